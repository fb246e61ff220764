"""Running mean and variance of observations, and the normalisation that goes with them.

Update from raw observations, once per collected step, and never from normalised ones. The moments
an action was chosen with belong to its log-probability: use the same ones in the loss, and update
afterwards.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrl.types import Box, Discrete, Tree, record, zeros

LARGEST = 1e15  # |x| from which a number is taken for garbage; its square still fits float32
COUNT_LIMIT = 2**31 - 1


@record
class Moments:
    """Mean and variance of every observation seen, per element.

    Integer leaves (images, tokens) are never normalised, and None here. The variance is kept rather
    than the sum of squares, which would outgrow float32's resolution. `count` is exact up to
    2^31 - 1, where it stays: from then on old rows fade.
    """

    count: jax.Array  # int32: rows seen
    mean: Tree  # float32, shaped like one observation
    var: Tree  # float32, population variance
    skipped: jax.Array  # int32: rows dropped for a non-finite or absurd value, see LARGEST


def init(example: Any) -> Moments:
    """Moments of nothing: normalising with them changes nothing (but clips).

    Args:
        example: one observation (arrays or shapes with dtypes), or its spec, e.g. `spec.obs`.
    """
    example = zeros(example) if isinstance(example, Box | Discrete | Mapping) else example
    blank = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), _floats(example))
    zero = lambda: jnp.zeros((), jnp.int32)  # arrays of their own, so that they can be donated
    return Moments(count=zero(), mean=blank(), var=blank(), skipped=zero())


def update(moments: Moments, x: Tree, *, axis: str | None = None) -> Moments:
    """Take in a batch of observations (Chan et al. 1983, eq. 2.1: merging two sets' moments).

    A row (one observation) with a non-finite value, or one of at least `LARGEST` in magnitude, in
    any leaf is dropped from all of them and counted in `skipped`.

    Args:
        moments: what was seen before, the same on all devices.
        x: observations with any leading axes, e.g. [T, B, ...].
        axis: name of a mesh axis; the batches of all its devices are then merged, exactly.

    Raises:
        ValueError: if the observations' shape is not the one the moments were made for.
    """
    total = functools.partial(jax.lax.psum, axis_name=axis) if axis is not None else lambda n: n
    rows = jax.tree.map(_rows, moments.mean, _floats(x))
    checks = [jnp.all(jnp.abs(leaf) < LARGEST, axis=-1) for leaf in jax.tree.leaves(rows)]
    if not checks:
        return moments
    ok = functools.reduce(jnp.logical_and, checks)
    here = jnp.sum(ok, dtype=jnp.int32)
    seen = total(here)
    weight = seen / jnp.maximum(moments.count.astype(jnp.float32) + seen, 1.0)

    def move(mean: jax.Array, rows: jax.Array) -> jax.Array:
        """The batch's mean, minus the running mean."""
        # Sums run over differences from a point near the rows: far from zero, float32 sums of
        # the rows themselves would lose what varies.
        first = jnp.where(ok[:, None], rows, 0.0)[jnp.argmax(ok)]
        near = jnp.where(moments.count > 0, mean.ravel(), first)
        off = jnp.sum(jnp.where(ok[:, None], rows - near, 0.0), axis=0) / jnp.maximum(here, 1)
        share = here / jnp.maximum(seen, 1)
        return total(share * (near + off - mean.ravel())).reshape(mean.shape)

    def spread(mean: jax.Array, var: jax.Array, shift: jax.Array, rows: jax.Array) -> jax.Array:
        """The variance of old and new together."""
        off = jnp.where(ok[:, None], rows - (mean + shift).ravel(), 0.0)
        batch = total(jnp.sum(off**2, axis=0)) / jnp.maximum(seen, 1)
        return var + weight * (batch.reshape(var.shape) + (1.0 - weight) * shift**2 - var)

    shift = jax.tree.map(move, moments.mean, rows)
    return Moments(
        count=_add(moments.count, seen),
        mean=jax.tree.map(lambda mean, shift: mean + weight * shift, moments.mean, shift),
        var=jax.tree.map(spread, moments.mean, moments.var, shift, rows),
        skipped=_add(moments.skipped, total(jnp.sum(~ok, dtype=jnp.int32))),
    )


def normalize(moments: Moments, x: Tree, *, clip: float = 10.0) -> Tree:
    """Observations as standard scores, (x − mean) / std, clipped to ±clip.

    An element that never varied (or of which nothing was seen) is only centred and clipped, not
    scaled. Integer leaves pass unchanged.

    Args:
        moments: see `update`.
        x: observations with any leading axes.
        clip: largest magnitude of the result.
    """

    def score(mean: jax.Array, var: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.clip((x - mean) / _scale(mean, var), -clip, clip)

    return _map_floats(score, moments, x)


def denormalize(moments: Moments, x: Tree) -> Tree:
    """Undo `normalize`, where it did not clip."""

    def restore(mean: jax.Array, var: jax.Array, x: jax.Array) -> jax.Array:
        return x * _scale(mean, var) + mean

    return _map_floats(restore, moments, x)


def _scale(mean: jax.Array, var: jax.Array) -> jax.Array:
    """The standard deviation, or 1 where it is no more than float32's rounding of the values."""
    std = jnp.sqrt(var)
    return jnp.where(std > 1e-6 * jnp.maximum(1.0, jnp.abs(mean)), std, 1.0)


def _rows(mean: jax.Array, leaf: jax.Array) -> jax.Array:
    """A leaf [..., *shape of mean] as float32 [N, D]."""
    if leaf.shape[leaf.ndim - mean.ndim :] != mean.shape:
        raise ValueError(
            f"expected observations [..., {', '.join(map(str, mean.shape))}] as these moments were "
            f"made for, got shape {leaf.shape}."
        )
    return leaf.astype(jnp.float32).reshape(-1, mean.size)


def _floats(tree: Tree) -> Tree:
    """The tree with None in place of integer leaves."""
    keep = lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None
    return jax.tree.map(keep, tree)


def _map_floats(fn: Callable[..., jax.Array], moments: Moments, x: Tree) -> Tree:
    """fn(mean, var, leaf) for each float leaf of x; the others stay."""
    return jax.tree.map(
        lambda mean, var, leaf: leaf if mean is None else fn(mean, var, leaf),
        moments.mean,
        moments.var,
        x,
        is_leaf=lambda node: node is None,
    )


def _add(count: jax.Array, more: jax.Array) -> jax.Array:
    return count + jnp.minimum(more, COUNT_LIMIT - count)
