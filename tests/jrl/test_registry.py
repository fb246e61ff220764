"""Names to modules."""

import pathlib

import pytest

import jrl
from jrl import registry
from jrl.agents import ppo
from jrl.types import Env

ROOT = pathlib.Path(jrl.__file__).parent


def test_a_name_and_a_dotted_path_reach_the_same_module():
    assert registry.load("agent", "ppo", registry.AGENTS) is ppo
    assert registry.load("agent", "jrl.agents.ppo", registry.AGENTS) is ppo


@pytest.mark.parametrize("table", [registry.AGENTS, registry.ENVS])
def test_every_name_has_a_file(table):
    for name, path in table.items():
        package, folder, module = path.split(".")
        assert package == "jrl"
        assert (ROOT / folder / f"{module}.py").exists(), name


def test_every_agent_file_has_a_name():
    files = {path.stem for path in (ROOT / "agents").glob("*.py")} - {"__init__"}
    assert files == set(registry.AGENTS)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown environment 'cart_pole'.*'cartpole'.*ant,"):
        registry.load("environment", "cart_pole", registry.ENVS)


def test_a_dotted_path_that_is_not_there():
    with pytest.raises(ImportError, match="jrl.agents.nothing"):
        registry.load("agent", "jrl.agents.nothing", registry.AGENTS)


def test_make_passes_options_and_refuses_unknown_ones():
    env = registry.make("environment", "cartpole", registry.ENVS, episode_length=7)
    assert isinstance(env, Env)
    assert env.spec.episode_length == 7
    with pytest.raises(ValueError, match=r"'cartpole': 'episode_lenght'.*'episode_length'"):
        registry.make("environment", "cartpole", registry.ENVS, episode_lenght=7)
