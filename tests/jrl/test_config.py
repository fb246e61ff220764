import copy
import os
import pickle
import re
import subprocess
import sys
import textwrap

import pytest
import yaml

from jrl import config
from jrl.config import Config, from_dict, load, save, to_dict

TASK = '''
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Config:
    """A task."""

    gravity: float = 9.81
    """Gravity of the toy world in metres per second squared."""
    goal: tuple[float, float] = (0.0, 1.0)
    """Where to go."""
    speed: float | None = None
    """Wanted speed, None for any."""
    episode_length: int = 77
    """The task's own length."""


def make(cfg):
    """Never called."""
'''
AGENT = '''
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Config:
    """An algorithm."""

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the toy network."""
    schedule: Literal["constant", "adaptive"] = "constant"
    """How the learning rate changes."""
    clip_eps: float = 0.2
    """Half-width of the trust interval."""
    normalize: bool = True
    """Whiten."""
    steps: int | float = 3
    """Int or float."""


def make(cfg, spec):
    """Never called."""
'''
NAMES = ["--env.name", "toy_parts.task", "--agent.name=toy_parts.agent"]


@pytest.fixture(autouse=True, scope="module")
def toys(tmp_path_factory):
    """A task and an algorithm of somebody else, by dotted path."""
    root = tmp_path_factory.mktemp("parts")
    package = root / "toy_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "task.py").write_text(TASK)
    (package / "agent.py").write_text(AGENT)
    sys.path.insert(0, str(root))
    yield root
    sys.path.remove(str(root))
    for name in ("toy_parts", "toy_parts.task", "toy_parts.agent"):
        sys.modules.pop(name, None)


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


def test_defaults_and_types():
    import toy_parts.agent
    import toy_parts.task

    made = load(None, NAMES)
    assert isinstance(made, Config)
    assert isinstance(made.env, toy_parts.task.Config)
    assert isinstance(made.env, config.EnvSection)
    assert isinstance(made.agent, toy_parts.agent.Config)
    assert (made.env.name, made.agent.name) == ("toy_parts.task", "toy_parts.agent")
    assert (made.train.num_envs, made.agent.hidden, made.env.gravity) == (256, (64, 64), 9.81)
    assert made.env.episode_length == 77  # the task's default, not the generic 0
    assert made.env.action_repeat == 1


def test_command_line_over_yaml_over_default(tmp_path):
    path = write(
        tmp_path / "a.yaml",
        """
        env: {name: toy_parts.task, gravity: 1.62}
        agent: {name: toy_parts.agent, clip_eps: 0.3, hidden: [8]}
        train: {num_envs: 8, num_steps: 4}
        """,
    )
    made = load(path, ["--agent.clip-eps", "0.1", "--train.num_envs", "16"])
    assert made.agent.clip_eps == 0.1  # command line
    assert made.train.num_envs == 16  # command line, with an underscore
    assert (made.env.gravity, made.agent.hidden, made.train.num_steps) == (1.62, (8,), 4)  # YAML
    assert made.eval.episodes == 16  # default


def test_config_option_takes_the_place_of_the_path(tmp_path):
    parts = "env: {name: toy_parts.task}\nagent: {name: toy_parts.agent}\n"
    one = write(tmp_path / "one.yaml", parts + "seed: 1")
    two = write(tmp_path / "two.yaml", parts + "seed: 2")
    assert load(one, []).seed == 1
    assert load(one, ["--config", str(two)]).seed == 2
    assert load(one, [f"--config={two}", "--seed", "3"]).seed == 3


def test_yaml_types(tmp_path):
    path = write(
        tmp_path / "a.yaml",
        """
        env: {name: toy_parts.task, gravity: 10, goal: [1, 2e-1], speed: 1e-3}
        agent: {name: toy_parts.agent, schedule: adaptive, normalize: false, steps: 0.5}
        train: {total_steps: 1e6}
        """,
    )
    made = load(path, [])
    assert made.env.gravity == 10.0
    assert isinstance(made.env.gravity, float)
    assert made.env.goal == (1.0, 0.2)  # YAML 1.1 reads 2e-1 as text
    assert made.env.speed == 0.001
    assert (made.agent.schedule, made.agent.normalize, made.agent.steps) == ("adaptive", False, 0.5)
    assert made.train.total_steps == 1_000_000
    assert isinstance(made.train.total_steps, int)
    assert hash(made) == hash(load(path, []))


def test_big_integers_are_exact():
    assert from_dict({"seed": 2**53 + 1, **parts()}).seed == 2**53 + 1


def parts():
    return {"env": {"name": "toy_parts.task"}, "agent": {"name": "toy_parts.agent"}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"train": {"num_env": 4}},
            ["train.num_env'", "mine.yaml", "Did you mean 'train.num_envs'"],
        ),
        ({"trian": {"num_envs": 4}}, ["unknown key", "'trian'", "Did you mean 'train'"]),
        ({"num_envs": 4}, ["'num_envs'", "train.num_envs"]),
        (
            {"agent": {"name": "toy_parts.agent", "clip_esp": 4}},
            ["agent.clip_esp", "agent.clip_eps"],
        ),
        ({"train": {"num_envs": 4.5}}, ["train.num_envs must be int, got 4.5"]),
        ({"train": {"num_envs": True}}, ["train.num_envs must be int, got True"]),
        ({"train": {"num_envs": "many"}}, ["train.num_envs must be int, got 'many'"]),
        ({"train": {"num_envs": [4]}}, ["train.num_envs must be int, got [4]"]),
        ({"log": {"video": "yes"}}, ["log.video must be bool, got 'yes'"]),
        ({"name": 3}, ["name must be str, got 3"]),
        ({"runtime": {"mode": "locla"}}, ["runtime.mode", "'local'", "'locla'"]),
        ({"train": 3}, ["train must be a mapping", "3"]),
        ({"env": "toy_parts.task"}, ["env must be a mapping"]),
        ({"env": {"name": "toy_parts.task", "goal": [1, 2, 3]}}, ["env.goal", "[1, 2, 3]"]),
        (
            {"env": {"name": "toy_parts.task", "goal": [1, "b"]}},
            ["env.goal must be float, got 'b'"],
        ),
        (
            {"env": {"name": "toy_parts.task", "speed": "fast"}},
            ["env.speed", "float | None", "fast"],
        ),
        ({"env": {"name": "humanoit"}}, ["unknown environment 'humanoit'", "'humanoid'"]),
        ({"agent": {"name": "pppo"}}, ["unknown agent 'pppo'", "'ppo'"]),
    ],
)
def test_mistakes_in_yaml(tmp_path, values, words):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**parts(), **values}))
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        load(path, [])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--train.total-step", "100000"], ["--train.total-step", "--train.total-steps"]),
        (["--num-envs", "4"], ["--num-envs", "--train.num-envs"]),
        (["--agent.clip-esp", "0.1"], ["--agent.clip-esp", "--agent.clip-eps"]),
        (["--train.num-envs", "3.5"], ["--train.num-envs", "3.5"]),
        (["--agent.hidden", "wide"], ["--agent.hidden", "wide"]),
        (["--runtime.mode", "locla"], ["--runtime.mode", "locla", "local"]),
    ],
)
def test_mistakes_on_the_command_line(capsys, args, words):
    with pytest.raises(SystemExit) as stop:
        load(None, [*NAMES, *args])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train.num-envs", "0"], "train.num_envs must be at least 1, got 0"),
        (["--train.num-steps", "-1"], "train.num_steps must be at least 1, got -1"),
        (["--env.action-repeat", "0"], "env.action_repeat must be at least 1, got 0"),
        (["--eval.interval", "-2"], "eval.interval must be at least 0, got -2"),
        (["--log.interval", "nan"], "log.interval must be at least 0, got nan"),
        (["--name", "a/b"], "one folder name, got 'a/b'"),
        (["--name", ".."], "one folder name, got '..'"),
    ],
)
def test_values_out_of_range(args, message):
    with pytest.raises(ValueError, match=message):
        load(None, [*NAMES, *args])


def test_zero_is_allowed_where_it_means_something():
    zeros = ("env.frame-stack", "train.final-slots", "eval.interval", "log.checkpoint-interval")
    load(None, [*NAMES, *(word for name in zeros for word in (f"--{name}", "0"))])


def test_total_steps_hold_one_rollout():
    sizes = ["--train.num-envs", "10", "--train.num-steps", "7"]
    load(None, [*NAMES, *sizes, "--train.total-steps", "70"])  # 10 * 7
    with pytest.raises(ValueError, match=r"(?s)69.*10.*7.*70"):
        load(None, [*NAMES, *sizes, "--train.total-steps", "69"])


def test_one_device_for_now():
    with pytest.raises(ValueError, match="runtime.devices = 3.*Leave it 1"):
        load(None, [*NAMES, "--runtime.devices", "3"])


def test_saved_config_loads_the_same(tmp_path):
    args = ["--env.goal", "3", "4", "--env.speed", "0.1", "--agent.hidden", "7", "--seed", "5"]
    made = load(None, [*NAMES, *args, "--log.no-video", "--agent.clip-eps", "1e-05", "--name", "é"])
    save(made, tmp_path / "config.yaml")
    again = load(tmp_path / "config.yaml", [])
    assert again == made
    assert type(again) is type(made)
    assert again != load(None, NAMES)
    assert (made.env.goal, made.agent.clip_eps, made.log.video) == ((3.0, 4.0), 1e-5, False)


def test_copies_are_equal():
    made = load(None, [*NAMES, "--seed", "5", "--agent.hidden", "3"])
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made
    assert from_dict(to_dict(made)) == made


@pytest.mark.parametrize(
    ("text", "words"),
    [("train: [", "not valid YAML"), ("- 1", "must hold a mapping")],
)
def test_files_that_are_no_config(tmp_path, text, words):
    path = write(tmp_path / "a.yaml", text)
    with pytest.raises(ValueError, match=words) as error:
        load(path, [])
    assert str(path) in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"can't read .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml", [])


def test_empty_file_and_sections_mean_defaults(tmp_path):
    path = write(tmp_path / "a.yaml", "train:\neval:\n")
    assert load(path, NAMES) == load(None, NAMES)


def test_every_field_has_a_sentence():
    import ast
    import inspect

    for node in ast.walk(ast.parse(inspect.getsource(config))):
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(text, ast.Expr), ast.unparse(field)


def test_help_in_a_fresh_process(toys):
    code = f"from jrl import config; config.load(None, {[*NAMES, '--help']})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(toys), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "--train.num-envs INT",
        "Environments that run side by side.",
        "Gravity of the toy world in metres per second squared.",  # the task's
        "Widths of the toy network.",  # the algorithm's
        "Environment steps for which each action is held.",
        "--config FILE",
    ):
        assert words in done.stdout
