"""Probe environments: five tasks so small that the value and the best action are known.

Each needs one more thing to work than the one before, so the first that an agent fails says where
to look (after Andy Jones, "Debugging RL, without the agonizing pain", 2021).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.types import Box, Discrete, Env, Key, Spec, TimeStep, Tree, record


class Probe(NamedTuple):
    """A task and what a trained agent must say about the observations in `obs`."""

    name: str
    env: Env
    obs: tuple[float, ...]  # N observations; each is shown as an array [1]
    rewards: tuple[tuple[float, ...], ...]  # N sequences: what the best policy earns from there
    action: tuple[float, ...] | None  # N best actions; None where none is better

    def value(self, discount: float) -> tuple[float, ...]:
        """The N values under the best policy: Σ γᵗ rₜ."""
        return tuple(sum(discount**t * r for t, r in enumerate(row)) for row in self.rewards)


@record
class State:
    """What the observation of this episode is drawn as (±1), and the steps taken."""

    cue: jax.Array
    steps: jax.Array


def _env(
    observe: Callable[[State], jax.Array],
    reward: Callable[[State, jax.Array], jax.Array],
    *,
    length: int,
    discrete: bool,
) -> Env:
    def timestep(state: State, reward: jax.Array, terminated: jax.Array) -> tuple[Tree, TimeStep]:
        obs = jnp.asarray(observe(state), jnp.float32)[None]
        return state, TimeStep(obs, reward, terminated, jnp.zeros((), bool), obs, {})

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        del params, where
        state = State(jax.random.rademacher(key, (), jnp.float32), jnp.zeros((), jnp.int32))
        return timestep(state, jnp.zeros((), jnp.float32), jnp.zeros((), bool))

    def step(state: State, action: jax.Array) -> tuple[Tree, TimeStep]:
        new = State(state.cue, state.steps + 1)
        choice = action if discrete else jnp.clip(action[0], -1, 1)
        earned = jnp.asarray(reward(state, choice), jnp.float32)
        return timestep(new, earned, new.steps >= length)

    action = Discrete(2) if discrete else Box((1,), low=-1.0, high=1.0)
    spec = Spec(obs=Box((1,), low=-1.0, high=1.0), action=action, dt=1.0, episode_length=length)
    return Env(reset, step, (), spec)


def probes(*, discrete: bool) -> tuple[Probe, ...]:
    """The five probes, from the simplest on, with 2 discrete or 1 continuous action in [-1, 1].

    Continuous rewards are 1 - (action - best)², so a policy with deviation σ earns 1 - σ² at most.
    """
    best, both = (1.0, (0.0, 1.0)) if discrete else (0.5, (-0.5, 0.5))

    def hit(wanted: jax.Array | float, action: jax.Array) -> jax.Array:
        return jnp.where(action == wanted, 1, -1) if discrete else 1 - (action - wanted) ** 2

    def zero(state: State) -> jax.Array:
        return jnp.zeros_like(state.cue)

    def cue(state: State, *action: jax.Array) -> jax.Array:
        del action
        return state.cue

    def clock(state: State, *action: jax.Array) -> jax.Array:
        del action
        return jnp.minimum(state.steps, 1)

    def always(state: State, action: jax.Array) -> jax.Array:
        del state, action
        return jnp.ones(())

    def right(state: State, action: jax.Array) -> jax.Array:
        del state
        return hit(best, action)

    def match(state: State, action: jax.Array) -> jax.Array:
        return hit(jnp.where(state.cue > 0, both[1], both[0]), action)

    def probe(
        name: str,
        parts: tuple[Callable, Callable],
        value: dict[float, tuple[float, ...]],
        action: tuple[float, ...] | None = None,
    ) -> Probe:
        env = _env(*parts, length=2 if name == "discount" else 1, discrete=discrete)
        return Probe(name, env, tuple(value), tuple(value.values()), action)

    return (
        probe("value", (zero, always), {0.0: (1.0,)}),
        probe("obs_value", (cue, cue), {-1.0: (-1.0,), 1.0: (1.0,)}),
        probe("discount", (clock, clock), {0.0: (0.0, 1.0), 1.0: (1.0,)}),
        probe("action", (zero, right), {0.0: (1.0,)}, (best,)),
        probe("obs_action", (cue, match), {-1.0: (1.0,), 1.0: (1.0,)}, both),
    )
