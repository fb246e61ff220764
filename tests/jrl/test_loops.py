"""A loop is its two halves, whoever drives them, with one seed or many, watched or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import buffers, loops
from jrl import rollout as rollouts
from jrl.agents import ppo
from jrl.envs import cartpole, wrappers
from jrl.loops import Loop, LoopState
from jrl.testing import count_traces
from jrl.types import Agent, Env, Tree

KEYS = jax.random.split(jax.random.key(0), 3)


def tiny_env(num_envs: int, *, auto_reset: bool = True) -> Env:
    env = wrappers.time_limit(cartpole.make(cartpole.Config()), 10)
    env = wrappers.episode_statistics(env)
    return wrappers.batch(wrappers.auto_reset(env) if auto_reset else env, num_envs)


def tiny_agent(env: Env) -> Agent:
    return ppo.make(ppo.Config(hidden=(4,), num_epochs=1, num_minibatches=2), env.spec)


@functools.cache
def loop() -> Loop:
    env = tiny_env(4)
    return loops.on_policy(tiny_agent(env), env, num_steps=8)


@functools.cache
def jitted():
    """The jitted `init` and `step`, and how often `step` was traced."""
    step, traces = count_traces(loop().step)
    return jax.jit(loop().init), jax.jit(step), traces


def raw(tree: Tree) -> list[np.ndarray]:
    """Copies of all leaves; keys as their data."""

    def copy(x: jax.Array) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return [copy(x) for x in jax.tree.leaves(tree)]


def run(key: jax.Array, updates: int = 3) -> LoopState:
    init, step, _ = jitted()
    state = init(key)
    for _ in range(updates):
        state, _ = step(state)
    return state


def assert_same(a: Tree, b: Tree) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(raw(a), raw(b)):
        np.testing.assert_array_equal(x, y)


def test_the_same_key_gives_the_same_bits():
    assert_same(run(KEYS[0]), run(KEYS[0]))


def test_seeds_differ_from_the_first_observation_on():
    init, *_ = jitted()
    starts = [init(key) for key in KEYS]
    weights = {float(jax.tree.leaves(s.agent.params)[1].ravel()[0]) for s in starts}
    obs = {float(s.actor.timestep.obs[0, 0]) for s in starts}
    ends = {float(jax.tree.leaves(run(k).agent.params)[1].ravel()[0]) for k in KEYS}
    assert len(weights) == len(obs) == len(ends) == 3


def test_vmap_over_seeds_is_single_runs():
    def train(key: jax.Array) -> LoopState:
        state = loop().init(key)
        return jax.lax.scan(lambda s, _: loop().step(s), state, length=3)[0]

    together = jax.jit(jax.vmap(train))(KEYS)
    for i, key in enumerate(KEYS):
        single = run(key)
        for x, y in zip(raw(together), raw(single)):
            np.testing.assert_allclose(x[i], y, atol=1e-5, rtol=1e-5)


def test_step_is_compiled_once():
    run(KEYS[1], updates=5)
    *_, traces = jitted()
    assert traces() == 1


def test_step_is_rollout_then_train_with_or_without_a_buffer_in_between():
    init, step, _ = jitted()
    state = init(KEYS[0])
    whole, metrics = step(state)
    env = tiny_env(4)
    apart = loops.on_policy(tiny_agent(env), env, num_steps=8, buffer=buffers.rollout())
    collected, data = jax.jit(apart.rollout)(state)
    assert data.reward.shape == (8, 4)
    trained, told = jax.jit(apart.train)(collected, data)
    learnt = {name: metrics[name] for name in told}  # the rest is of the rollout
    assert "loss/policy" in learnt
    for x, y in zip(raw((whole, learnt)), raw((trained, told)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-5)


def test_metrics_tell_of_the_rollout_and_of_the_update():
    init, step, _ = jitted()
    state, metrics = step(init(KEYS[0]))
    assert {"rollout/reward", "episode/count", "loss/policy", "update/skipped"} <= set(metrics)
    assert float(metrics["rollout/reward"]) == 1.0  # CartPole earns 1 a step
    state, metrics = step(state)
    assert int(metrics["episode/count"]) >= 4  # all were cut off at 10 of 16 steps, if not before
    assert 1 <= float(metrics["episode/length"]) <= 10


def test_evaluating_changes_nothing():
    # Play between the updates, on observations and with keys of its own.
    env = tiny_env(3, auto_reset=False)
    agent = tiny_agent(env)
    evaluate = jax.jit(functools.partial(rollouts.evaluate, agent, env))
    init, step, _ = jitted()
    state = init(KEYS[0])
    for key in KEYS:
        before = raw(state)
        results = evaluate(agent.policy(state.agent), key)
        assert results["return"].shape == (3,)
        for x, y in zip(before, raw(state)):
            np.testing.assert_array_equal(x, y)
        state, _ = step(state)
    assert_same(state, run(KEYS[0]))


def test_agent_and_buffer_must_speak_of_the_same_data():
    env = tiny_env(2)
    agent = tiny_agent(env)
    replay = buffers.rollout()._replace(data="batch")
    with pytest.raises(ValueError, match=r"kind 'rollout', but the buffer gives 'batch'"):
        loops.on_policy(agent, env, num_steps=2, buffer=replay)
    with pytest.raises(ValueError, match=r"kind 'batch', but the buffer gives 'rollout'"):
        loops.on_policy(agent._replace(data="batch"), env, num_steps=2)
    loops.on_policy(agent, env, num_steps=2, buffer=buffers.rollout())
