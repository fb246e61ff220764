"""Parts of other packages: installed, found by name, held to the contracts, trained."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jrl import config, envs, registry
from jrl.checks import ConfigError
from jrl.testing import check_agent, check_buffer, check_env, fake_rollout
from jrl.types import Env

PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the example package is installed, as pip does it."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__"))
    flags = "--no-deps --no-build-isolation --no-index --quiet --disable-pip-version-check"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags.split(), "--target", target, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(site, monkeypatch):
    """The same, visible to this process."""
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "jrl_plugin_example"]:
        monkeypatch.delitem(sys.modules, name)


def offer(folder, package, **groups):
    """Install a package that consists of entry points: `env={"name": "path"}`."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = []
    for kind, points in groups.items():
        lines += [f"[jrl.{kind}s]", *(f"{name} = {path}" for name, path in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_names_of_an_installed_package_are_known(installed):
    names = [("env", "point_mass"), ("agent", "reinforce"), ("buffer", "recent")]
    for kind, name in names:
        assert registry.names(kind)[name].startswith("jrl_plugin_example.")
        assert registry.load(kind, name).name == name
    assert envs.make("point_mass", episode_length=7).spec.episode_length == 7
    with pytest.raises(ConfigError, match=r"'point_mas'.*Did you mean 'point_mass'.*cartpole"):
        registry.load("env", "point_mas")
    made = config.from_dict({kind: {"name": name} for kind, name in names})
    assert (made.env.reach, made.agent.hidden, made.buffer.num_rollouts) == (1.0, (32,), 2)
    with pytest.raises(ConfigError, match=r"buffer.num_rollout'.*'buffer.num_rollouts'"):
        config.from_dict({"buffer": {"name": "recent", "num_rollout": 3}})


def test_its_parts_keep_the_contracts(installed):
    part = registry.load("env", "point_mass")
    env = part.make(part.Config())
    check_env(env, steps=3)
    part = registry.load("agent", "reinforce")
    agent = part.make(part.Config(hidden=(8,)), env.spec)
    policy = agent.policy(jax.jit(agent.init)(jax.random.key(0)))
    rollout = fake_rollout(agent, policy, env.spec, jax.random.key(1), 8, 4)
    check_agent(agent, env.spec, data=rollout)
    part = registry.load("buffer", "recent")
    check_buffer(part.make(part.Config(num_rollouts=2)), rollout, adds=3)  # the third replaces


# The five-line program. It names no part: the command line does.
PROGRAM = """
import sys
from jrl import builder, launch

def main(config):
    env_group = builder.build_env_group(config)
    policy_group = builder.build_policy_group(None, config)
    buffer = builder.build_data_buffer(None, config)
    engine = builder.build_engine(env_group, policy_group, buffer, config)
    engine.run()

launch(main, None, sys.argv[1:])
"""
RUN = """--env.name point_mass --agent.name reinforce --buffer.name recent --name pushed
--train.num-envs 64 --train.num-steps 40 --train.total-steps 153600 --eval.episodes 16
--buffer.num-rollouts 1 --env.reach 0.9 --agent.learning-rate 0.02"""


def test_the_five_line_program_trains_it_by_names_alone(site, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, *RUN.split(), "--log.root", tmp_path / "runs"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "pushed"
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "curves.png"} <= {
        path.name for path in run.iterdir()
    }
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["buffer"] == {"name": "recent", "num_rollouts": 1}
    assert (saved["env"]["reach"], saved["agent"]["name"]) == (0.9, "reinforce")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learnt = [row["episode/return"] for row in rows if "loss/policy" in row]
    assert len(learnt) == 60  # 60 updates of 64 x 40 steps
    # it drifts away at first, about -31, and stays near the target at the end
    assert np.mean(learnt[-5:]) > np.mean(learnt[:3]) / 2.5
    assert rows[-1]["eval/return"] > np.mean(learnt[:3]) / 2.5


def test_the_plugin_is_searched_for_only_where_a_name_is_not_ours(monkeypatch):
    def stop(**_):
        raise RuntimeError("searched the installed packages")

    monkeypatch.setattr(importlib.metadata, "entry_points", stop)
    assert isinstance(registry.load("env", "cartpole").make(envs.cartpole.Config()), Env)
    config.from_dict({})
    with pytest.raises(RuntimeError, match="searched"):
        registry.load("env", "no_name_of_ours")


def test_a_broken_package_breaks_only_its_own_names(installed, folder):
    (folder / "broken_inside.py").write_text("import a_module_nobody_has\n")
    points = {"lost": "no_such_package.env", "inside": "broken_inside:make", "odd": "1+1 = 2"}
    offer(folder, "broken-package", env=points)
    assert set(points) <= set(registry.names("env"))
    assert isinstance(envs.make("point_mass"), Env)
    of = r"of the installed package 'broken-package'"
    with pytest.raises(ConfigError, match=rf"'lost'.*{of}.*no module 'no_such_package'"):
        registry.load("env", "lost")
    text = rf"'inside'.*{of}.*importing it failed.*broken_inside.py:1.*a_module_nobody_has"
    with pytest.raises(ConfigError, match=text):
        registry.load("env", "inside")
    with pytest.raises(ConfigError, match=rf"'odd'.*{of}"):
        registry.load("env", "odd")


def test_two_packages_with_one_name(folder):
    offer(folder, "one", env={"same": "jrl.envs.cartpole", "alike": "jrl.envs.cartpole"})
    offer(folder, "two", env={"same": "jrl.envs.pendulum", "alike": "jrl.envs.cartpole"})
    with pytest.raises(ConfigError, match=r"'one' \(jrl.envs.cartpole\) and .*'two' .*'same'"):
        registry.load("env", "same")
    assert registry.load("env", "alike").path == "jrl.envs.cartpole"


def test_a_name_of_ours_stays_ours(folder):
    offer(folder, "thief", env={"cartpole": "jrl.envs.pendulum"})
    assert registry.load("env", "cartpole").path == "jrl.envs.cartpole"


def test_the_name_of_an_installed_package_is_taken(installed):
    with pytest.raises(ConfigError, match=r"'point_mass': .*'jrl-plugin-example' has it"):
        registry.register_env("point_mass", "my_pkg.my_env")
    registry.register_env("point_mass", "jrl_plugin_example.point_mass:make")  # the very same


def test_a_task_in_a_program_of_its_own(tmp_path):
    """Registered in one process, resumed by path in another."""
    (tmp_path / "my_task.py").write_text(
        textwrap.dedent("""
        from jrl.envs import cartpole

        def short(cfg: cartpole.Config):
            return cartpole.make(cfg)
        """)
    )
    code = """
import jrl, my_task, pickle, sys
from jrl import config
jrl.register_env("short", my_task.short)
made = config.load(None, ["--env.name", "short", "--env.max-angle", "0.3"])
sys.stdout.buffer.write(pickle.dumps(made))
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    ).stdout
    code = """
import pickle, sys
from jrl import builder
config = pickle.loads(sys.stdin.buffer.read())
print(config.env.name, config.env.max_angle, builder.build_env_group(config).task.path)
"""
    heard = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, input=told
    ).stdout
    assert heard.split() == [b"my_task:short", b"0.3", b"my_task:short"]
