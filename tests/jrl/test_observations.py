"""From observations to the vectors networks see."""

import jax
import jax.numpy as jnp
import numpy as np

from jrl import observations
from jrl.types import Box, Spec


def test_leaves_are_joined_by_name_as_floats():
    obs = {"b": jnp.full((2, 3, 2), 7, jnp.uint8), "a": jnp.arange(24.0).reshape(2, 3, 2, 2)}
    x = observations.vectors(obs, leading=2)
    assert set(x) == {"policy"}
    assert x["policy"].shape == (2, 3, 6)
    assert x["policy"].dtype == jnp.float32
    np.testing.assert_array_equal(x["policy"][0, 1], [4, 5, 6, 7, 7, 7])
    assert observations.vectors(jnp.zeros((5, 2)), leading=2)["policy"].shape == (5, 2, 1)


def test_policy_and_critic_have_their_own_vectors_and_statistics():
    spec = Spec(obs={"policy": Box((2,)), "critic": Box((3,))}, action=Box((1,)))
    stats = observations.statistics(spec)
    assert {name: s.mean.shape for name, s in stats.items()} == {"policy": (2,), "critic": (3,)}
    obs = {
        "policy": 5 + 2 * jax.random.normal(jax.random.key(0), (4, 500, 2)),
        "critic": jnp.full((4, 500, 3), 9.0),
    }
    x = observations.vectors(obs, leading=2)
    stats = observations.observe(stats, x)
    white = observations.whiten(stats, x)
    np.testing.assert_allclose(white["policy"].mean((0, 1)), 0.0, atol=1e-4)
    np.testing.assert_allclose(white["policy"].std((0, 1)), 1.0, atol=1e-3)
    np.testing.assert_array_equal(white["critic"], 0.0)  # never varied: centred, not scaled
    # an actor has the policy's statistics only, and is shown the policy's vector only
    assert set(observations.whiten({"policy": stats["policy"]}, x)) == {"policy"}
