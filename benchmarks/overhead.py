"""What the abstractions cost: our loop over a bare `lax.scan` that does the same by hand.

2048 environments whose step is nearly free, 160 floats each, a linear policy with Gaussian noise
and an update that is one product. Ours goes through the usual wrappers, `rollout.unroll` and
`loops.on_policy`; the scan is written out by hand, keeps the same trajectory (observations,
actions, rewards, ends) and cuts and restarts episodes at the same limit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure

from jrl import loops
from jrl.envs import wrappers
from jrl.types import Agent, Box, Env, Key, Metrics, Rollout, Spec, TimeStep, Tree

BOUNDS = {"loop_over_scan": (0.95, 0.95)}
NUM_ENVS, NUM_STEPS, OBS, ACTIONS, LIMIT = 2048, 64, 160, 8, 100
FIRST = 1.0  # every element of an episode's first observation
STD = 0.1


def physics(obs: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nearly free step of one robot: a decay, pushed by the mean action. (obs, reward)."""
    return 0.99 * obs + 0.01 * jnp.mean(action), -jnp.sum(action**2)


def choose(weights: jax.Array, obs: jax.Array, key: Key) -> jax.Array:
    """A linear policy's actions for B robots."""
    return obs @ weights + STD * jax.random.normal(key, (obs.shape[0], ACTIONS))


def learn(weights: jax.Array, reward: jax.Array) -> jax.Array:
    """A stand-in for an update: it needs the rewards, and costs nothing."""
    return weights * (1.0 - 1e-6 * jnp.mean(reward))


def free_env() -> Env:
    """One robot around `physics`, never ending by itself."""

    def timestep(obs: jax.Array, reward: jax.Array) -> TimeStep:
        no = jnp.zeros((), bool)
        return TimeStep(obs, reward, no, no, obs, {})

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:  # noqa: FBT001, FBT002
        del params, key, where
        obs = jnp.full((OBS,), FIRST, jnp.float32)
        return obs, timestep(obs, jnp.zeros((), jnp.float32))

    def step(state: Tree, action: jax.Array) -> tuple[Tree, TimeStep]:
        obs, reward = physics(state, action)
        return obs, timestep(obs, reward)

    return Env(reset, step, (), Spec(Box((OBS,)), Box((ACTIONS,)), 0.0, LIMIT))


def linear_agent() -> Agent:
    """`choose` and `learn` as an agent."""

    def act(
        policy: Tree, carry: Tree, obs: Tree, key: Key, *, explore: bool = True
    ) -> tuple[Tree, jax.Array, Tree]:
        del explore
        return carry, choose(policy, obs, key), {}

    def update(state: Tree, data: Rollout, key: Key) -> tuple[Tree, Metrics]:
        del key
        return learn(state, data.reward), {}

    return Agent(
        init=lambda key: 0.01 * jax.random.normal(key, (OBS, ACTIONS)),
        policy=lambda state: state,
        carry=lambda _: (),
        act=act,
        update=update,
        data="rollout",
    )


def our_rollout() -> Callable[[], int]:
    """The rollout of `loops.on_policy`, then its update; the trajectory is kept."""
    env = wrappers.batch(wrappers.auto_reset(wrappers.time_limit(free_env())), NUM_ENVS)
    agent = linear_agent()
    loop = loops.on_policy(agent, env, num_steps=NUM_STEPS)

    def step(state: loops.LoopState) -> tuple[loops.LoopState, Rollout]:
        state, data = loop.rollout(state)
        state, _ = loop.train(state, data)
        return state, data

    return repeat(step, jax.jit(loop.init)(jax.random.key(0)))


def bare_scan() -> Callable[[], int]:
    """The same by hand."""

    def step(state: tuple) -> tuple[tuple, tuple]:
        weights, obs, clock, key = state
        key, k_roll = jax.random.split(key)

        def one(loop: tuple, key: Key) -> tuple[tuple, tuple]:
            obs, clock = loop
            action = choose(weights, obs, key)
            new, reward = jax.vmap(physics)(obs, action)
            clock = clock + 1
            done = clock >= LIMIT
            new = jnp.where(done[:, None], FIRST, new)
            return (new, jnp.where(done, 0, clock)), (obs, action, reward, done)

        keys = jax.random.split(k_roll, NUM_STEPS)
        (obs, clock), data = jax.lax.scan(one, (obs, clock), keys)
        return (learn(weights, data[2]), obs, clock, key), data

    weights = linear_agent().init(jax.random.key(0))
    obs = jnp.full((NUM_ENVS, OBS), FIRST, jnp.float32)
    clock = jnp.zeros((NUM_ENVS,), jnp.int32)
    return repeat(step, (weights, obs, clock, jax.random.key(1)))


def repeat(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], int]:
    """A function that takes one jitted step on from `state`, and counts environment steps."""
    jitted = jax.jit(step, donate_argnums=0)

    def work() -> int:
        nonlocal state
        state, data = jitted(state)
        jax.block_until_ready((state, data))
        return NUM_STEPS * NUM_ENVS

    return work


def main(*, quick: bool) -> None:
    sides = {"bare scan": bare_scan(), "our loop": our_rollout()}
    reps, seconds = (15, 0.8) if quick else (41, 1.5)
    rates = measure.interleave(sides, reps=reps, seconds=seconds)
    print(f"{NUM_ENVS} free environments of {OBS} floats, linear policy, env-steps/s")
    measure.show(rates)
    figures = {"loop_over_scan": measure.ratio(rates, "our loop", "bare scan")}
    measure.report("overhead", figures, BOUNDS)


if __name__ == "__main__":
    main(quick=measure.arguments(__doc__).quick)
