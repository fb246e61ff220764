"""The five-line program where the simulator, or the algorithm, is not JAX."""

import sys

import jax
import numpy as np
import pytest

from jrl import builder, config, envs, host, run
from jrl.agents import ppo
from jrl.checks import ConfigError
from jrl.types import Box, HostEnv, Spec, TimeStep

PARTS = '''
import dataclasses, functools
import jax, numpy as np
from jrl import host, types
from jrl.agents import ppo
from jrl.envs import cartpole, vector

@dataclasses.dataclass(frozen=True)
class Robot:
    forgetful: bool = False

closed = []

@functools.cache  # of one function, JAX keeps what it compiled
def robots(num_envs):
    return vector(cartpole.make(cartpole.Config()), num_envs, episode_length=20)

def robot(cfg: Robot, *, num_envs: int) -> types.HostEnv:
    env = host.from_env(robots(num_envs), num_envs)
    env = env._replace(close=lambda: closed.append(num_envs))
    return env._replace(save=lambda: None, restore=None) if cfg.forgetful else env

def agent(cfg: ppo.Config, spec: types.Spec) -> types.HostAgent:
    """PPO as if it weren't JAX: its state is a box that is changed in place."""
    inner = ppo.make(cfg, spec)
    act, learn = jax.jit(inner.act, static_argnames="explore"), jax.jit(inner.update)

    class Box:
        pass

    def boxed(state):
        box = Box()
        box.state = state
        return box

    def update(box, rollout, key):
        box.state, metrics = learn(box.state, rollout, key)
        return box, metrics

    return types.HostAgent(
        init=lambda key: boxed(jax.jit(inner.init)(key)),
        policy=lambda box: inner.policy(box.state),
        carry=inner.carry,
        act=act,
        update=update,
        data="rollout",
        save=lambda box: jax.tree.map(np.array, box.state),
        restore=boxed,
    )
'''
SMALL = {
    "agent": {"hidden": [8], "num_minibatches": 2},
    "train": {"num_envs": 4, "num_steps": 8, "total_steps": 192},
    "eval": {"episodes": 3},
    "env": {"episode_length": 20},
    "log": {"plot": False, "video": False},
}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """These engines are much alike: what one has compiled, the next one takes."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [jax.config.values[name] for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("cache")), 0.1)):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before):
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    (tmp_path / "host_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    if "host_parts" in sys.modules:
        sys.modules["host_parts"].closed.clear()


def settings(**changes):
    values = {name: {**part, **changes.pop(name, {})} for name, part in SMALL.items()}
    return config.from_dict(values | changes)


def host_task(**env):
    return {"name": "host_parts:robot", "episode_length": 0, **env}


def leaves(engine):
    state = engine._loop.save(engine.state)
    raw = lambda x: (
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return [np.asarray(raw(x)) for x in jax.tree.leaves(state)]


def test_an_algorithm_on_the_host_learns_bit_for_bit_what_jax_does_there():
    a, b = (
        builder.build(settings(env=host_task(), agent={"name": name}))
        for name in ("ppo", "host_parts:agent")
    )
    for ours, theirs in zip(a.iterate(), b.iterate()):
        assert ours["loss/value"] == theirs["loss/value"]
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    assert a.evaluate() == b.evaluate()


@pytest.mark.parametrize(
    "parts",
    [
        {"env": host_task(), "train": {"pipeline_stages": 2}},
        {"agent": {"name": "host_parts:agent"}, "env": {"name": "cartpole"}},
    ],
    ids=["simulator", "algorithm"],
)
def test_stopped_and_resumed_equals_never_stopped(parts):
    whole, first = builder.build(settings(**parts)), builder.build(settings(**parts))
    updates = list(whole.iterate())
    for _ in zip(range(3), first.iterate()):
        pass
    first.save()
    second = builder.build(settings(**parts))
    assert second.restore() == []
    rest = list(second.iterate())
    assert [m["loss/value"] for m in rest] == [m["loss/value"] for m in updates[3:]]
    for x, y in zip(leaves(whole), leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_simulator_that_can_not_be_saved_begins_anew_and_that_is_said():
    cfg = settings(env=host_task(forgetful=True))
    engine = builder.build(cfg)
    next(engine.iterate())
    engine.save()
    again = builder.build(cfg)
    assert "4 episodes are given up" in again.restore()[0]
    assert [m["episode/count"] >= 0 for m in again.iterate()] == [True] * 5
    assert again.updates == 6


def test_a_run_leaves_a_policy_to_evaluate_and_closes_its_simulators():
    import host_parts

    cfg = settings(env=host_task(), agent={"name": "host_parts:agent"}, name="one")
    engine = builder.build(cfg)
    engine.run()
    assert sorted(host_parts.closed) == [3, 4]  # that of the evaluation, and that of the training
    opened, notes = builder.open_run("runs/one")
    assert notes == []
    assert opened.evaluate() == engine.evaluate()


def test_simulators_are_closed_where_the_training_crashes():
    import host_parts

    engine = builder.build(settings(env=host_task()))

    def crash(engine):
        raise RuntimeError("a bug")

    engine.before("train", crash)
    with pytest.raises(RuntimeError, match="a bug"):
        run.run(engine)
    assert host_parts.closed == [4]


def ladder(num_envs):
    """Robot i's episodes last i + 1 steps; each gives the reward 1."""
    t = np.zeros(num_envs, np.int32)
    spec = Spec(Box((1,)), Box((1,), low=-1.0, high=1.0), 0.0, 10)

    def show(reward, ended):
        obs = t[:, None].astype(np.float32)
        return TimeStep(obs, np.full(num_envs, reward, np.float32), ended, ~ended & False, obs, {})

    def reset(seed):
        t[:] = 0
        return show(0.0, np.zeros(num_envs, bool))

    def step(action):
        t[:] += 1
        ended = t > np.arange(num_envs)
        t[ended] = 0
        return show(1.0, ended)

    return HostEnv(num_envs, reset, step, spec)


def test_an_evaluation_counts_the_first_episode_of_each_robot_and_no_more():
    env = ladder(4)
    agent = ppo.make(ppo.Config(hidden=(4,)), env.spec)
    policy = agent.policy(agent.init(jax.random.key(0)))
    seen = host.evaluate(agent, host.actor(agent), env, policy, jax.random.key(1))
    assert seen["return"].tolist() == [1, 2, 3, 4]
    assert seen["length"].tolist() == [1, 2, 3, 4]


def test_evaluations_on_the_host_are_those_in_jax():
    # Cartpole's episodes end within 20 steps, so that restarting robots and waiting ones agree.
    cfg = settings(env={"name": "cartpole"})
    fused = builder.build(cfg)
    hosted = builder.build(settings(env={"name": "cartpole"}, agent={"name": "host_parts:agent"}))
    assert isinstance(fused, type(hosted))
    for engine in (fused, hosted):
        engine.compile()
        results = engine.evaluate()
        assert 5 < results["eval/length"] <= 20
        assert results["eval/return"] == results["eval/length"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": {"pipeline_stages": 3}}, "Values of train.pipeline_stages that would: 1, 2, 4"),
        ({"train": {"pipeline_stages": 2}}, "not JAX"),
        ({"env": {"name": "host_parts:robot"}}, "env.episode_length is for environments in JAX"),
    ],
)
def test_what_does_not_fit_says_why(changes, says):
    def start():
        wanted = settings(**changes)
        config.check(wanted)
        builder.build(wanted)

    with pytest.raises(ConfigError, match=says):
        start()


def test_a_simulator_is_no_env_of_one_robot():
    with pytest.raises(ConfigError, match=r"'gymnasium' is a simulator on the host.* num_envs"):
        envs.make("gymnasium", id="CartPole-v1")


def test_a_host_task_must_take_how_many_robots(tmp_path):
    text = PARTS.replace("*, num_envs: int", "num_envs: int = 4")
    (tmp_path / "fixed_parts.py").write_text(text)
    with pytest.raises(ConfigError, match=r"make\(cfg, \*, num_envs\)"):
        builder.build(settings(env={"name": "fixed_parts:robot", "episode_length": 0}))
