"""Agent x environment -> a training loop as pure functions, to jit, scan, vmap or shard."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import host
from jrl import rollout as rollouts
from jrl.checks import ConfigError
from jrl.stages import Stage, own_states, through
from jrl.types import Agent, Buffer, Env, HostAgent, HostEnv, Key, Metrics, Rollout, Tree, record


@record
class LoopState:
    """Everything needed to go on training, as one pytree."""

    agent: Tree
    actor: Tree  # an ActorState; a tuple of them where simulators run on the host
    key: Key
    buffer: Tree = ()  # experience kept from earlier updates, where the buffer does that


class Loop(NamedTuple):
    """A training loop: where it starts, and the stages of an update.

    A loop in which something isn't JAX has a `restore`; its `init` can't be compiled, and its state
    holds more than arrays.
    """

    init: Callable[[Key], LoopState]
    stages: tuple[Stage, ...]
    save: Callable[[LoopState], LoopState] = lambda state: state  # -> arrays alone
    restore: Callable[[LoopState], tuple[LoopState, list[str]]] | None = None
    # what was saved -> where to go on, and what people should know

    def step(self, state: LoopState) -> tuple[LoopState, Metrics]:
        """One update: all stages."""
        state, data, metrics = self._run(self.stages[:1], state, None)
        state, _, learnt = self._run(self.stages[1:], state, data)
        return state, metrics | learnt

    def rollout(self, state: LoopState) -> tuple[LoopState, Rollout]:
        """The first stage alone."""
        state, data, _ = self._run(self.stages[:1], state, None)
        return state, data

    def train(self, state: LoopState, data: Tree) -> tuple[LoopState, Metrics]:
        """The other stages."""
        state, _, metrics = self._run(self.stages[1:], state, data)
        return state, metrics

    def _run(
        self, stages: tuple[Stage, ...], state: LoopState, data: Tree
    ) -> tuple[LoopState, Tree, Metrics]:
        _, state, data, metrics = through(stages, own_states(stages), state, data)
        return state, data, metrics


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
        state = LoopState(agent.init(k_agent), rollouts.start(agent, env, k_env), key)
        if buffer is None or not buffer.keeps:
            return state
        shapes = jax.eval_shape(lambda state: collect((), state, None)[2], state)
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return dataclasses.replace(state, buffer=buffer.init(example))

    def collect(
        own: Tree, state: LoopState, data: None
    ) -> tuple[Tree, LoopState, Rollout, Metrics]:
        del data
        key, k_roll = jax.random.split(state.key)
        policy = agent.policy(state.agent)
        actor, seen = rollouts.unroll(
            agent, env, policy, state.actor, k_roll, num_steps=num_steps, final_slots=final_slots
        )
        state = dataclasses.replace(state, actor=actor, key=key)
        return own, state, seen, rollouts.metrics(seen)

    return Loop(init, (Stage("rollout", collect), *_learning(agent, buffer)))


def on_policy_host(
    agent: Agent | HostAgent,
    envs: Sequence[HostEnv],
    *,
    num_steps: int,
    buffer: Buffer | None = None,
    final_slots: int = 0,
) -> Loop:
    """`on_policy` for simulators, or an algorithm, that are not JAX.

    S simulators run side by side (pipeline stages).

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
    if buffer is not None and buffer.keeps:
        raise ConfigError("beside simulators on the host, a buffer can't keep experience yet.")
    act = host.actor(agent)
    look = jax.jit(rollouts.metrics)
    jax_alone = isinstance(agent, Agent)
    make = jax.jit(agent.init) if jax_alone else agent.init

    def init(key: Key) -> LoopState:
        k_agent, k_env, key = jax.random.split(key, 3)
        return LoopState(make(k_agent), host.start(agent, envs, _seed(k_env)), key)

    def collect(
        own: Tree, state: LoopState, data: None
    ) -> tuple[Tree, LoopState, Rollout, Metrics]:
        del data
        key, k_roll = jax.random.split(state.key)
        policy = agent.policy(state.agent)
        actors, seen = host.unroll(
            agent, act, envs, policy, state.actor, k_roll,
            num_steps=num_steps, final_slots=final_slots,
        )  # fmt: skip
        return own, dataclasses.replace(state, actor=actors, key=key), seen, look(seen)

    learning = _learning(agent, buffer)
    wrap = _without_actor if jax_alone else lambda stage: stage._replace(jit=False)
    stages = Stage("rollout", collect, jit=False), *map(wrap, learning)
    return Loop(init, stages, *_keeping(agent, envs))


def _seed(key: Key) -> int:
    return int(jax.random.randint(key, (), 0, 2**30))


def _keeping(
    agent: Agent | HostAgent, envs: Sequence[HostEnv]
) -> tuple[Callable[..., LoopState], Callable[..., Any]]:
    """How the state of a loop becomes arrays, and arrays the state of a loop."""
    pack, unpack = (
        (agent.save, agent.restore) if isinstance(agent, HostAgent) else (lambda x: x, lambda x: x)
    )

    def save(state: LoopState) -> LoopState:
        return dataclasses.replace(state, agent=pack(state.agent))

    def restore(saved: LoopState) -> tuple[LoopState, list[str]]:
        state = dataclasses.replace(saved, agent=unpack(saved.agent))
        if saved.actor == ():  # a policy alone
            return state, []
        seeds = range(_seed(saved.key), 2**31)
        actors = tuple(map(functools.partial(host.go_on, agent), envs, saved.actor, seeds))
        lost = sum(env.num_envs for env in envs if env.restore is None)
        told = f"{lost} episodes are given up and begin anew: their simulator can't save its state."
        return dataclasses.replace(state, actor=actors), [told] if lost else []

    return save, restore


def _learning(agent: Agent | HostAgent, buffer: Buffer | None) -> tuple[Stage, Stage]:
    """The stages that take a rollout and learn from it."""

    def update_dataset(own: Tree, state: LoopState, data: Tree) -> tuple[Tree, ...]:
        key, k_sample = jax.random.split(state.key)
        if buffer is None:
            return own, dataclasses.replace(state, key=key), data, {}
        filled = buffer.add(state.buffer if buffer.keeps else buffer.init(data), data)
        kept = filled if buffer.keeps else ()
        batch = buffer.sample(filled, k_sample)
        return own, dataclasses.replace(state, key=key, buffer=kept), batch, {}

    def train(own: Tree, state: LoopState, data: Tree) -> tuple[Tree, ...]:
        key, k_update = jax.random.split(state.key)
        learnt, metrics = agent.update(state.agent, data, k_update)
        return own, dataclasses.replace(state, agent=learnt, key=key), None, metrics

    return Stage("update_dataset", update_dataset), Stage("train", train)


def _without_actor(stage: Stage) -> Stage:
    """A compiled stage beside simulators, whose state is not made of arrays."""
    jitted = jax.jit(stage.run)

    def run(own: Tree, state: LoopState, data: Tree) -> tuple[Tree, ...]:
        own, after, data, metrics = jitted(own, dataclasses.replace(state, actor=()), data)
        return own, dataclasses.replace(after, actor=state.actor), data, metrics

    return stage._replace(run=run, jit=False)


def check_data(agent: Agent | HostAgent, buffer: Buffer | None) -> None:
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
