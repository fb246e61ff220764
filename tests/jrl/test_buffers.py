"""The on-policy store."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import buffers


def test_a_rollout_comes_back_whole():
    buffer = buffers.rollout()
    data = {"reward": jnp.arange(6.0).reshape(3, 2)}
    state = buffer.init(data)
    assert not buffer.can_sample(state)
    state = buffer.add(state, data)
    assert buffer.can_sample(state)
    back = buffer.sample(state, jax.random.key(0))
    np.testing.assert_array_equal(back["reward"], data["reward"])
    assert buffer.data == "rollout"


def test_the_newest_rollout_replaces_the_one_before():
    buffer = buffers.rollout()
    state = buffer.add(buffer.add(buffer.init(None), jnp.zeros(2)), jnp.ones(2))
    np.testing.assert_array_equal(buffer.sample(state, jax.random.key(0)), [1, 1])


def test_an_empty_store_says_so():
    buffer = buffers.rollout()
    with pytest.raises(ValueError, match="empty: add a rollout"):
        buffer.sample(buffer.init(jnp.zeros(2)), jax.random.key(0))


def test_it_works_inside_jit():
    buffer = buffers.rollout()

    @jax.jit
    def through(data: jax.Array, key: jax.Array) -> jax.Array:
        return buffer.sample(buffer.add(buffer.init(data), data), key)

    np.testing.assert_array_equal(through(jnp.arange(3), jax.random.key(0)), [0, 1, 2])
