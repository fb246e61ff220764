"""A run that was killed and goes on is the run that was never stopped, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import builder, checkpoint, config
from jrl.cli import main
from jrl.envs import render

RUN = [
    "--env.name", "cartpole", "--agent.hidden", "8", "--agent.num-minibatches", "2",
    "--agent.schedule", "adaptive", "--train.num-envs", "4", "--train.num-steps", "8",
    "--env.episode-length", "20", "--eval.episodes", "2", "--eval.interval", "5",
    "--train.total-steps", "640", "--log.checkpoint-interval", "1", "--log.no-plot",
]  # fmt: skip
KINDS = {"feed-forward": [], "recurrent": ["--agent.memory", "4"]}


def jrl(tmp_path, *args, **kwargs):
    """A `jrl` command in a process of its own."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "jrl.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=tmp_path, env=env, **kwargs,
    )  # fmt: skip


def train(tmp_path, *args):
    """Train to the end; what was said."""
    child = jrl(tmp_path, "train", *args)
    said, _ = child.communicate(timeout=200)
    assert child.returncode == 0, said
    return said


def kill_after(tmp_path, updates, *args):
    """Start training, and kill it without warning once that many updates are saved."""
    child = jrl(tmp_path, "train", *args)
    folder, deadline = tmp_path / "runs" / "killed" / "checkpoints", time.monotonic() + 120
    while (checkpoint.latest(folder) or 0) < updates and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert updates <= (checkpoint.latest(folder) or 0) < 20


def leaves(folder):
    """The raw leaves of a run's newest checkpoint, by name."""
    engine = builder.build(config.load(None, ["--resume", str(folder)]))
    engine.restore()
    flat = jax.tree_util.tree_leaves_with_path(engine.state)
    return engine.updates, {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in flat
    }


def scalars(folder):
    """Everything logged, but the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "stage/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_equals_never_stopped(tmp_path, kind):
    args = [*RUN, *KINDS[kind]]
    train(tmp_path, *args, "--name", "straight")
    kill_after(tmp_path, 10, *args, "--name", "killed")
    train(tmp_path, "--resume", "runs/killed")
    straight, killed = (tmp_path / "runs" / name for name in ("straight", "killed"))
    (updates, one), (same, other) = leaves(straight), leaves(killed)
    assert updates == same == 20
    assert list(one) == list(other)
    assert len(one) > 30
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert scalars(straight) == scalars(killed)
    assert [row["update"] for row in scalars(killed) if "loss/value" in row] == [*range(1, 21)]


def test_a_finished_run_trains_longer_and_its_config_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = [*RUN, "--train.total-steps", "64", "--runtime.no-compile-cache", "--name", "run"]
    main(["train", *short])
    main(["train", "--resume", "runs/run"])
    assert "all 2 updates are done: raise --train.total-steps" in capsys.readouterr().out
    main(["train", "--resume", "runs/run", "--train.total-steps", "128"])
    cfg = config.load("runs/run/config.yaml", [])
    assert (cfg.train.total_steps, cfg.resume) == (128, "")
    assert checkpoint.latest("runs/run/checkpoints") == 4
    readme = (tmp_path / "runs" / "run" / "README.md").read_text()
    for line in ("--resume runs/run", "jrl eval runs/run", "jrl play runs/run"):
        assert line in readme

    # what eval says is what the run said of itself at its end
    main(["eval", "runs/run", "--episodes", "2"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = scalars(tmp_path / "runs" / "run")[-1]
    assert said["update"] == 4
    assert said["eval/return"] == last["eval/return"]


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_what_can_not_go_on_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    off = "--runtime.no-compile-cache"
    main(["train", *RUN, "--train.total-steps", "64", off, "--name", "run"])
    text = refused(capsys, "train", "--resume", "runs/rum")
    assert "no run in runs/rum" in text
    assert "Did you mean runs/run" in text
    text = refused(capsys, "train", "--resume", "runs/run", "--agent.hidden", "16")
    assert "float32[4,8] in the checkpoint, float32[4,16] here" in text
    assert "agent.hidden is [8] there and [16] here" in text
    text = refused(capsys, "train", "--resume", "runs/run", "--name", "other")
    assert "leave --name and --log.root away" in text
    text = refused(capsys, "train", *RUN, off, "--name", "run")
    assert "already holds a run with another config" in text
    assert "train.total_steps is 64 there and 640 here" in text
    assert "Did you mean 'eval'" in refused(capsys, "evla", "runs/run")
    assert "no MuJoCo model" in refused(capsys, "play", "runs/run")


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = [*RUN, "--train.total-steps", "96", "--runtime.no-compile-cache", "--name", "run"]
    main(["train", *args])
    newest = tmp_path / "runs" / "run" / "checkpoints" / "3"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    bits = bytearray(victim.read_bytes())
    bits[len(bits) // 2] ^= 1
    victim.write_bytes(bytes(bits))
    capsys.readouterr()
    main(["train", "--resume", "runs/run"])
    said = capsys.readouterr().out
    assert "is damaged" in said
    assert "went back to 2" in said
    assert [r["update"] for r in scalars(tmp_path / "runs" / "run") if "loss/value" in r] == [
        1,
        2,
        3,
    ]


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    forever = [*RUN, "--train.total-steps", "100_000_000", "--name", "killed"]
    child = jrl(tmp_path, "train", *forever)
    folder, deadline = tmp_path / "runs" / "killed" / "checkpoints", time.monotonic() + 120
    while checkpoint.latest(folder) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for args in (["--resume", "runs/killed"], [*forever, "--overwrite"]):
        text = refused(capsys, "train", *args)
        assert f"in use by another run (process {child.pid})" in text
    child.send_signal(signal.SIGKILL)
    child.communicate()
    main(["train", "--resume", "runs/killed", "--train.total-steps", "32"])
    assert "updates are done" in capsys.readouterr().out


def test_play_films_a_checkpoint_with_other_environments_than_it_was_trained_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    args = ["--env.name", "inverted_pendulum", "--env.episode-length", "5", "--log.no-video"]
    rest = ["--runtime.no-compile-cache", "--train.total-steps", "32", "--name", "run"]
    main(["train", *RUN[2:], *args, *rest])
    filmed = []
    monkeypatch.setattr(render, "video", lambda model, qpos, path, fps: filmed.append(qpos.shape))
    capsys.readouterr()
    main(["play", "runs/run", "--out", "a.mp4"])
    assert capsys.readouterr().out.strip() == "a.mp4"
    ((steps, nq),) = filmed
    assert nq == 2
    assert 1 <= steps <= 5
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    if sys.platform == "linux":
        assert "no display" in refused(capsys, "play", "runs/run", "--viewer")
