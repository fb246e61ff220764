"""Gradients and means over two devices equal those of one, with and without replication checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jrl.mesh import pmean, vary

W = jnp.asarray([1.0, -2.0])
X = jnp.arange(8.0).reshape(4, 2)


def shard(fn, in_specs, out_specs, check_vma):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    )


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def gradient(w: jax.Array, x: jax.Array, axis: str | None) -> jax.Array:
    return pmean(jax.grad(loss)(vary(w, axis), x), axis)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_of_two_devices_is_that_of_one(check_vma):
    P = PartitionSpec
    both = shard(functools.partial(gradient, axis="data"), (P(), P("data")), P(), check_vma)
    # x·w of the rows is -2, -4, -6 and -8 (e.g. 2·1 - 3·2 = -4).
    # d/dw = mean 2 (x·w) x: first part 2 (-2·0 - 4·2 - 6·4 - 8·6) / 4 = -40,
    # second 2 (-2·1 - 4·3 - 6·5 - 8·7) / 4 = -50.
    np.testing.assert_allclose(gradient(W, X, None), [-40, -50], rtol=1e-6)
    np.testing.assert_allclose(both(W, X), [-40, -50], rtol=1e-6)


def test_without_vary_the_checked_gradient_is_twice_too_large():
    def familiar(w: jax.Array, x: jax.Array) -> jax.Array:
        return pmean(jax.grad(loss)(w, x), "data")

    P = PartitionSpec
    both = shard(familiar, (P(), P("data")), P(), check_vma=True)
    np.testing.assert_allclose(both(W, X), [-80, -100], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_vary_changes_no_value(check_vma):
    P = PartitionSpec
    copies = shard(lambda t: vary(t, "data"), (P(),), P("data"), check_vma)
    np.testing.assert_array_equal(copies({"w": W})["w"], jnp.concatenate([W, W]))


def test_pmean_is_the_mean_over_the_devices():
    P = PartitionSpec
    fn = shard(lambda x: pmean({"x": x}, "data"), (P("data"),), P(), check_vma=True)
    np.testing.assert_array_equal(fn(X)["x"], (X[:2] + X[2:]) / 2)


def test_outside_a_mesh_both_do_nothing():
    tree = {"w": W}
    assert vary(tree, None) is tree
    assert pmean(tree, None) is tree
