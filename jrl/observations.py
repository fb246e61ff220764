"""From a robot's observation to what a network sees: vectors, whitened by running statistics."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jrl.ops import moments
from jrl.ops.moments import Moments
from jrl.types import Spec, Tree, zeros

Vectors = dict[str, jax.Array]  # "policy", and "critic" where the critic has its own


def vectors(obs: Tree, leading: int) -> Vectors:
    """What the policy sees, and the critic where the observation has a part of its own for it.

    Args:
        obs: an array or a tree of arrays, all of it for both; or a dict with the part "policy", and
            perhaps "critic" (privileged: it takes the place of the policy's for the critic).
        leading: how many leading axes the arrays share.

    Returns:
        float32 `[*leading axes, n]` for each.
    """
    if isinstance(obs, Mapping) and "policy" in obs:
        return {name: _join(obs[name], leading) for name in ("policy", "critic") if name in obs}
    return {"policy": _join(obs, leading)}


def example(spec: Spec) -> Vectors:
    """Zeros shaped like the vectors of one robot, [n]."""
    return vectors(zeros(spec.obs), leading=0)


def statistics(spec: Spec) -> dict[str, Moments]:
    """Statistics of nothing yet, one for each vector."""
    return {name: moments.init(x) for name, x in example(spec).items()}


def whiten(stats: dict[str, Moments], x: Vectors) -> Vectors:
    """Those vectors that there are statistics of, with mean 0 and standard deviation 1."""
    return {name: moments.normalize(stats[name], x[name]) for name in stats}


def observe(
    stats: dict[str, Moments], x: Vectors, *, axis: str | None = None
) -> dict[str, Moments]:
    """The statistics after seeing raw vectors with any leading axes, on all devices of `axis`."""
    return {name: moments.update(stats[name], x[name], axis=axis) for name in stats}


def _join(obs: Tree, leading: int) -> jax.Array:
    leaves = [x.reshape(*x.shape[:leading], -1).astype(jnp.float32) for x in jax.tree.leaves(obs)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=-1)
