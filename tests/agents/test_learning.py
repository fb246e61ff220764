"""Agents learn: the probes' known values and actions, CartPole, and a task that needs a memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import loops, probes
from jrl import rollout as rollouts
from jrl.agents import ppo
from jrl.envs import vector, wrappers
from jrl.types import Box, Discrete, Env, Key, Spec, TimeStep, Tree, record

QUICK = ppo.Config(
    hidden=(16,),
    learning_rate=1e-2,
    num_epochs=4,
    num_minibatches=2,
    normalize_obs=False,
    discount=0.9,
)


def train(env: Env, cfg: ppo.Config, *, num_steps: int, updates: int, seed: int = 0) -> Tree:
    """The agent's state after that many updates, in one compiled scan."""
    loop = loops.on_policy(ppo.make(cfg, env.spec), env, num_steps=num_steps)

    @jax.jit
    def run(key: Key) -> Tree:
        return jax.lax.scan(lambda s, _: loop.step(s), loop.init(key), length=updates)[0]

    return run(jax.random.key(seed)).agent


def opinions(cfg: ppo.Config, spec: Spec, state: Tree, obs: tuple[float, ...]) -> tuple:
    """The value of each observation, and the best action there."""
    net, agent = ppo.network(cfg, spec), ppo.make(cfg, spec)
    seen = jnp.asarray(obs)[:, None]
    memory = agent.carry(len(obs))

    @jax.jit
    def ask(state: Tree) -> tuple[jax.Array, jax.Array]:
        x = ppo.see(cfg, state.obs_stats, seen[None], leading=2)
        first = jnp.ones((1, len(obs)), bool)
        _, known = net.apply(state.params, memory, x, first, method="remember")
        value = net.apply(state.params, known, x, method="value")[0]
        _, action, _ = agent.act(
            agent.policy(state), memory, seen, jax.random.key(0), explore=False
        )
        return value, action

    return tuple(np.asarray(x) for x in ask(state))


@pytest.mark.parametrize("probe", probes.probes(discrete=True), ids=lambda p: p.name)
def test_discrete_probes(probe):
    check_probe(probe, QUICK)


@pytest.mark.parametrize("probe", probes.probes(discrete=False)[3:], ids=lambda p: p.name)
def test_continuous_probes(probe):
    check_probe(probe, QUICK)


def test_a_probe_with_a_memory():
    check_probe(probes.probes(discrete=True)[4], dataclasses.replace(QUICK, memory=8))


def check_probe(probe: probes.Probe, cfg: ppo.Config) -> None:
    env = wrappers.batch(wrappers.auto_reset(probe.env), 32)
    state = train(env, cfg, num_steps=8, updates=60)
    value, action = opinions(cfg, env.spec, state, probe.obs)
    # Exploring costs a little: the deviation left in a Gaussian earns 1 - σ² at most.
    discrete = isinstance(env.spec.action, Discrete)
    np.testing.assert_allclose(value, probe.value(cfg.discount), atol=0.1 if discrete else 0.25)
    if probe.action is not None:
        wanted = np.asarray(probe.action)
        np.testing.assert_allclose(action.reshape(wanted.shape), wanted, atol=0.15)


def test_ppo_balances_the_pole():
    cfg = ppo.Config(
        hidden=(32, 32),
        activation="tanh",
        learning_rate=3e-3,
        num_minibatches=4,
        discount=0.98,
        normalize_obs=False,
    )
    state = train(vector("cartpole", 32), cfg, num_steps=32, updates=80)
    env = vector("cartpole", 16, auto_reset=False)
    agent = ppo.make(cfg, env.spec)
    results = jax.jit(lambda s: rollouts.evaluate(agent, env, agent.policy(s), jax.random.key(1)))(
        state
    )
    assert float(results["return"].mean()) >= 475


def recall(delay: int = 4) -> Env:
    """Shows ±1 once, then zeros; the last action must name the sign (reward 1, otherwise -1)."""

    @record
    class State:
        cue: jax.Array
        steps: jax.Array

    def timestep(state: State, reward: jax.Array) -> tuple[Tree, TimeStep]:
        obs = jnp.where(state.steps == 0, state.cue, 0.0)[None]
        ended, flag = state.steps >= delay, jnp.zeros((), bool)
        return state, TimeStep(obs, reward, ended, flag, obs, {})

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        state = State(jax.random.rademacher(key, (), jnp.float32), jnp.zeros((), jnp.int32))
        return timestep(state, jnp.zeros(()))

    def step(state: State, action: jax.Array) -> tuple[Tree, TimeStep]:
        new = State(state.cue, state.steps + 1)
        right = action == (state.cue > 0)
        return timestep(new, jnp.where(new.steps < delay, 0.0, jnp.where(right, 1.0, -1.0)))

    return Env(reset, step, (), Spec(obs=Box((1,)), action=Discrete(2), episode_length=delay))


@pytest.mark.parametrize("memory", [0, 16])
def test_a_memory_solves_what_cannot_be_seen(memory):
    cfg = dataclasses.replace(QUICK, memory=memory, discount=0.95, entropy_cost=0.01)
    env = wrappers.batch(wrappers.auto_reset(recall()), 64)
    state = train(env, cfg, num_steps=8, updates=80)
    agent = ppo.make(cfg, env.spec)
    played = wrappers.batch(recall(), 256)
    results = jax.jit(
        lambda s: rollouts.evaluate(agent, played, agent.policy(s), jax.random.key(1))
    )(state)
    mean = float(results["return"].mean())
    # Blind, the best is to name one sign always: right half the time, 0 ± 1/16 on average.
    if memory:
        assert mean > 0.95
    else:
        assert abs(mean) < 0.25
