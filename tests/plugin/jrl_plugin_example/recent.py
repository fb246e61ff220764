"""A store of the last few rollouts, of which one is drawn at a time."""

import dataclasses

import jax
import jax.numpy as jnp

from jrl.checks import positive
from jrl.types import Buffer, Key, Rollout, Tree, record


@dataclasses.dataclass(frozen=True)
class Config:
    """What to keep."""

    num_rollouts: int = 2
    """Rollouts to keep, the newest ones."""


@record
class State:
    """K rollouts, [K, ...] each field, and how many were ever added."""

    rollouts: Rollout
    added: jax.Array  # int32


def recent(cfg: Config) -> Buffer:
    """Keeps `num_rollouts` rollouts, and gives back any of them, whole."""
    positive(num_rollouts=cfg.num_rollouts)
    size = cfg.num_rollouts

    def init(example: Tree) -> State:
        empty = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), example)
        return State(empty, jnp.zeros((), jnp.int32))

    def add(state: State, data: Tree) -> State:
        slot = state.added % size
        rollouts = jax.tree.map(lambda all_, x: all_.at[slot].set(x), state.rollouts, data)
        return State(rollouts, state.added + 1)

    def sample(state: State, key: Key) -> Tree:
        slot = jax.random.randint(key, (), 0, jnp.minimum(state.added, size))
        return jax.tree.map(lambda all_: all_[slot], state.rollouts)

    return Buffer(init, add, sample, lambda state: state.added > 0, data="rollout")
