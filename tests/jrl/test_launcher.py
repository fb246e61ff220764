import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml

from jrl.config import Config, Log, Runtime, Train, load
from jrl.launcher import announce, claim, launch, prepare
from jrl.logs import run_dir

FLAGS = (
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def own_world(tmp_path, monkeypatch):
    """JAX as it was, afterwards; caches and runs in a folder of the test."""
    before = {name: jax.config.values[name] for name in FLAGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_main_gets_the_config_in_a_folder_of_its_own(capsys):
    def main(config):
        assert (run_dir(config) / "config.yaml").exists()
        return config

    args = ["--name", "one", "--agent.clip-eps", "0.1", "--runtime.no-compile-cache"]
    config = launch(main, args=args)
    assert (config.name, config.agent.clip_eps) == ("one", 0.1)
    assert load("runs/one/config.yaml", []) == config
    said = capsys.readouterr().out
    for words in ("runs/one", "clip_eps 0.1", "matmul_precision highest", jax.__version__):
        assert words in " ".join(said.split())


def test_reads_the_file_and_the_command_line(monkeypatch, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("seed: 3\ntrain: {num_envs: 8}")
    monkeypatch.setattr(sys, "argv", ["humanoid.py", "--seed", "4", "--runtime.no-compile-cache"])
    config = launch(lambda config: config, path)
    assert (config.seed, config.train.num_envs) == (4, 8)


def test_nameless_runs_never_share_a_folder():
    folders = [run_dir(claim(Config())) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.name.startswith("cartpole-ppo-2") for folder in folders)


def test_refuses_a_folder_with_another_run(capsys):
    def start(*args):
        launch(lambda config: None, args=["--name", "a", "--runtime.no-compile-cache", *args])

    start("--agent.hidden", "64")
    with pytest.raises(SystemExit) as stop:
        start("--agent.hidden", "128", "--seed", "1")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "agent.hidden is [64] there and [128] here" in said
    assert "seed is 0 there and 1 here" in said
    assert "num_envs" not in said  # the same in both
    assert "--name" in said
    assert "--overwrite" in said
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["agent"]["hidden"] == [64]


def test_refuses_the_same_run_again(capsys):
    claim(Config(name="a"))
    with pytest.raises(ValueError, match="already holds this very run"):
        claim(Config(name="a"))


def test_overwrite_starts_over():
    claim(Config(name="a"))
    Path("runs/a/metrics.jsonl").write_text("old")
    args = ["--name", "a", "--overwrite", "--seed", "1", "--runtime.no-compile-cache"]
    launch(lambda config: None, args=args)
    assert sorted(os.listdir("runs/a")) == ["README.md", "config.yaml", "lock"]
    assert load("runs/a/config.yaml", []).seed == 1


def test_overwrite_leaves_folders_alone_that_hold_no_run():
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/thesis.tex").write_text("years of work")
    claim(Config(name="a"), overwrite=True)
    assert sorted(os.listdir("runs/a")) == ["README.md", "config.yaml", "lock", "thesis.tex"]


def test_a_start_that_fails_leaves_no_folder():
    def main(config):
        raise ZeroDivisionError("what main raises passes through")

    args = ["--name", "a", "--runtime.no-compile-cache"]
    with pytest.raises(ZeroDivisionError, match="passes through"):
        launch(main, args=args)
    assert os.listdir("runs") == []


def test_a_run_that_fails_keeps_what_it_wrote():
    def main(config):
        (run_dir(config) / "metrics.jsonl").write_text("{}")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(main, args=["--name", "a", "--runtime.no-compile-cache"])
    assert sorted(os.listdir("runs/a")) == ["README.md", "config.yaml", "lock", "metrics.jsonl"]


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_place_that_can_not_be_written(root, capsys):
    Path("file").write_text("not a folder")
    started = []
    with pytest.raises(SystemExit) as stop:
        launch(started.append, args=["--log.root", root, "--name", "a"])
    assert (stop.value.code, started) == (2, [])
    said = capsys.readouterr().err
    assert f"can't write the run folder {root}/a" in said
    assert "--log.root" in said


def test_mistakes_end_with_one_message(capsys):
    started = []
    with pytest.raises(SystemExit) as stop:
        launch(started.append, args=["--train.num-envs", "1000", "--train.total-steps", "5"])
    assert (stop.value.code, started) == (2, [])
    said = capsys.readouterr().err
    assert said.startswith("error: train.total_steps = 5 is less than one rollout")
    assert said.count("\n") == 1
    assert not Path("runs").exists()


def test_more_devices_than_there_are():
    runtime = Runtime(devices=1024, compile_cache=False)
    with pytest.raises(ValueError, match=r"runtime.devices = 1024, but JAX sees \d+ \(cpu\)"):
        prepare(Config(runtime=runtime, train=Train(num_envs=1024)))


def test_precision_reaches_the_program():
    def text():
        return jax.jit(jnp.dot).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).as_text()

    prepare(Config(runtime=Runtime(matmul_precision="highest", compile_cache=False)))
    assert "precision = [HIGHEST, HIGHEST]" in text()
    prepare(Config(runtime=Runtime(matmul_precision="default", compile_cache=False)))
    assert "HIGHEST" not in text()


def test_jit_off():
    traced = []

    @jax.jit
    def f(x):
        traced.append(isinstance(x, jax.core.Tracer))
        return x

    notes = prepare(Config(runtime=Runtime(jit=False, compile_cache=False)))
    f(1.0)
    prepare(Config(runtime=Runtime(jit=True, compile_cache=False)))
    f(1.0)
    assert traced == [False, True]
    assert "runtime.jit is off" in notes[0]
    assert not launch(lambda config: config, args=["--no-jit"]).runtime.jit


def test_a_cache_that_can_not_be_written_is_said(tmp_path, capsys):
    (tmp_path / "cache").write_text("a file")
    notes = prepare(Config())
    assert len(notes) == 1
    assert "compile cache off" in notes[0]
    announce(Config(name="x"), notes)
    assert "note compile cache off" in capsys.readouterr().out


def test_a_cache_that_somebody_set_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    prepare(Config())
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "theirs")


def test_announce_shows_brackets_as_they_are(capsys):
    announce(Config(name="a[bold]", log=Log(root="[red]")))
    assert "[red]/a[bold]" in capsys.readouterr().out
