"""Agent x environment -> a training loop as pure functions, to jit, scan, vmap or shard."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jrl import host
from jrl import rollout as rollouts
from jrl.checks import ConfigError
from jrl.types import Agent, Buffer, Env, HostEnv, Key, Metrics, Rollout, Tree, record


@record
class LoopState:
    """Everything needed to go on training, as one pytree."""

    agent: Tree
    actor: Tree  # an ActorState; a tuple of them where simulators run on the host
    key: Key


class Loop(NamedTuple):
    """A training loop. `step` is `rollout`, then `train`; drive them apart where that suits."""

    init: Callable[[Key], LoopState]
    step: Callable[[LoopState], tuple[LoopState, Metrics]]
    rollout: Callable[[LoopState], tuple[LoopState, Rollout]]
    train: Callable[[LoopState, Tree], tuple[LoopState, Metrics]]


def on_policy(
    agent: Agent,
    env: Env,
    *,
    num_steps: int,
    buffer: Buffer | None = None,
    final_slots: int = 0,
) -> Loop:
    """Alternate a rollout of `num_steps` steps and an update on it.

        state = loop.init(key)
        state, metrics = jax.jit(loop.step)(state)

    Args:
        agent: an algorithm that learns from rollouts.
        env: batched and auto-resetting, as `jrl.envs.vector` makes it.
        num_steps: T, steps of each environment per update.
        buffer: where a rollout waits for its update; default: straight through.
        final_slots: see `jrl.rollout.unroll`.

    Raises:
        ValueError: where agent and buffer don't speak of the same kind of data.
    """
    check_data(agent, buffer)

    def init(key: Key) -> LoopState:
        k_agent, k_env, key = jax.random.split(key, 3)
        return LoopState(agent.init(k_agent), rollouts.start(agent, env, k_env), key)

    def collect(state: LoopState) -> tuple[LoopState, Rollout]:
        key, k_roll = jax.random.split(state.key)
        policy = agent.policy(state.agent)
        actor, data = rollouts.unroll(
            agent, env, policy, state.actor, k_roll, num_steps=num_steps, final_slots=final_slots
        )
        return LoopState(state.agent, actor, key), data

    def train(state: LoopState, data: Tree) -> tuple[LoopState, Metrics]:
        return _train(agent, buffer, state, data)

    def step(state: LoopState) -> tuple[LoopState, Metrics]:
        return train(*collect(state))

    return Loop(init, step, collect, train)


def on_policy_host(
    agent: Agent,
    envs: Sequence[HostEnv],
    *,
    num_steps: int,
    buffer: Buffer | None = None,
    final_slots: int = 0,
) -> Loop:
    """`on_policy` for simulators that are not JAX, S of them side by side (pipeline stages).

    The loop jits its own parts: call `init`, `step`, `rollout` and `train` as they are.

    Args:
        agent: an algorithm that learns from rollouts.
        envs: S simulators with the same spec, see `jrl.host.unroll`.
        num_steps: T, steps of each robot per update.
        buffer: where a rollout waits for its update; default: straight through.
        final_slots: see `jrl.rollout.unroll`.

    Raises:
        ValueError: where agent and buffer don't speak of the same kind of data.
    """
    check_data(agent, buffer)
    act = host.actor(agent)
    learn = jax.jit(functools.partial(_train, agent, buffer))

    def init(key: Key) -> LoopState:
        k_agent, k_env, key = jax.random.split(key, 3)
        seed = int(jax.random.randint(k_env, (), 0, 2**30))
        return LoopState(jax.jit(agent.init)(k_agent), host.start(agent, envs, seed), key)

    def collect(state: LoopState) -> tuple[LoopState, Rollout]:
        key, k_roll = jax.random.split(state.key)
        policy = agent.policy(state.agent)
        actors, data = host.unroll(
            agent, act, envs, policy, state.actor, k_roll,
            num_steps=num_steps, final_slots=final_slots,
        )  # fmt: skip
        return LoopState(state.agent, actors, key), data

    def train(state: LoopState, data: Tree) -> tuple[LoopState, Metrics]:
        learnt, metrics = learn(LoopState(state.agent, (), state.key), data)
        return LoopState(learnt.agent, state.actor, learnt.key), metrics

    def step(state: LoopState) -> tuple[LoopState, Metrics]:
        return train(*collect(state))

    return Loop(init, step, collect, train)


def _train(
    agent: Agent, buffer: Buffer | None, state: LoopState, data: Tree
) -> tuple[LoopState, Metrics]:
    """Update the dataset, learn from it, and say what was seen and learnt."""
    key, k_sample, k_update = jax.random.split(state.key, 3)
    seen = rollouts.metrics(data)
    if buffer is not None:
        data = buffer.sample(buffer.add(buffer.init(data), data), k_sample)
    agent_state, learnt = agent.update(state.agent, data, k_update)
    return LoopState(agent_state, state.actor, key), seen | learnt


def check_data(agent: Agent, buffer: Buffer | None) -> None:
    """Check that a buffer gives what an agent's update takes.

    Raises:
        ValueError: naming both kinds.
    """
    gives = buffer.data if buffer is not None else "rollout"
    if agent.data != gives:
        raise ConfigError(
            f"this agent learns from data of the kind {agent.data!r}, but the buffer gives "
            f"{gives!r}. Choose a buffer whose `data` is {agent.data!r}."
        )
