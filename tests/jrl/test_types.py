"""Records are pytrees, specs are hashable, zeros look like a spec."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.types import Box, Discrete, Spec, TimeStep, record, zeros


@record
class Pair:
    left: jax.Array
    right: jax.Array


def test_a_record_is_a_frozen_pytree():
    pair = Pair(jnp.float32(1), jnp.float32(2))
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(pair)
    assert isinstance(doubled, Pair)
    assert (float(doubled.left), float(doubled.right)) == (2.0, 4.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.left = jnp.float32(3)


def test_a_records_leaves_are_named():
    pair = Pair(jnp.float32(1), jnp.float32(2))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pair)]
    assert paths == [".left", ".right"]


def test_records_vmap_and_scan():
    def step(pair: Pair, x: jax.Array) -> tuple[Pair, jax.Array]:
        new = dataclasses.replace(pair, right=pair.right + x)
        return new, new.right

    pairs = Pair(jnp.zeros(3), jnp.arange(3.0))
    last, sums = jax.vmap(lambda p: jax.lax.scan(step, p, jnp.ones(2)))(pairs)
    np.testing.assert_array_equal(last.right, [2, 3, 4])
    np.testing.assert_array_equal(sums, [[1, 2], [2, 3], [3, 4]])


def test_a_spec_with_dict_observations_is_hashable_and_compares_by_value():
    def spec(size: int) -> Spec:
        obs = {"policy": Box((size,)), "critic": Box((4,), low=(0.0,) * 4)}
        return Spec(obs=obs, action=Discrete(2), dt=0.1, episode_length=10)

    assert hash(spec(3)) == hash(spec(3))
    assert spec(3) == spec(3)
    assert spec(3) != spec(2)
    changed = dataclasses.replace(spec(3), episode_length=5)
    assert changed.obs == spec(3).obs


def test_changing_the_mapping_a_spec_was_made_from_leaves_the_spec_alone():
    obs = {"policy": Box((3,))}
    spec = Spec(obs=obs, action=Discrete(2))
    obs["policy"] = Box((5,))
    assert spec.obs["policy"].shape == (3,)


def test_zeros_look_like_the_spec():
    spec = Spec(
        obs={"image": Box((2, 2), "uint8"), "deep": {"x": Box((3,))}}, action=Box((2,), low=-1.0)
    )
    obs = zeros(spec.obs)
    assert type(obs) is dict
    assert type(obs["deep"]) is dict
    assert obs["image"].shape == (2, 2)
    assert obs["image"].dtype == jnp.uint8
    assert obs["deep"]["x"].dtype == jnp.float32
    choice = zeros(Discrete(4))
    assert choice.shape == ()
    assert choice.dtype == jnp.int32
    assert not choice.weak_type


def test_a_timestep_can_be_an_in_axes_tree():
    ts = TimeStep(
        obs={"a": jnp.zeros((4, 2))},
        reward=jnp.arange(4.0),
        terminated=jnp.zeros(4, bool),
        truncated=jnp.zeros(4, bool),
        final_obs={"a": jnp.zeros((4, 2))},
        info={},
    )
    axes = TimeStep(0, 0, 0, 0, 0, {})
    np.testing.assert_array_equal(jax.vmap(lambda t: t.reward + 1, (axes,))(ts), [1, 2, 3, 4])
