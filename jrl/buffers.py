"""Stores of experience as pure functions: `init`, `add`, `sample`, `can_sample`."""

import jax
import jax.numpy as jnp

from jrl.types import Buffer, Key, Rollout


def rollout() -> Buffer:
    """The on-policy store: holds one rollout, gives it back whole, is emptied by `init`."""

    def init(example: Rollout) -> None:
        del example

    def add(state: Rollout | None, data: Rollout) -> Rollout:
        del state
        return data

    def sample(state: Rollout | None, key: Key) -> Rollout:
        del key
        if state is None:
            raise ValueError("this rollout buffer is empty: add a rollout before sampling.")
        return state

    def can_sample(state: Rollout | None) -> jax.Array:
        return jnp.asarray(state is not None)

    return Buffer(init, add, sample, can_sample, data="rollout", keeps=False)
