"""Averages and sums over a device mesh that are right inside and outside `shard_map`."""

import jax

from jrl.types import Tree


def vary(tree: Tree, axis: str | None) -> Tree:
    """Mark replicated values as one copy per device, before a gradient is taken of them.

    Inside `shard_map` the gradient with respect to a replicated value is summed over the devices
    on its own; averaging it afterwards would then give N times too much. With `vary`, then grad,
    then `pmean`, the result is right whether or not `shard_map` checks replication. Does nothing
    where `axis` is None.
    """
    if axis is None:
        return tree
    return jax.tree.map(lambda x: jax.lax.pcast(x, axis, to="varying"), tree)


def pmean(tree: Tree, axis: str | None) -> Tree:
    """The mean over the devices of a mesh axis; the tree itself where `axis` is None."""
    return tree if axis is None else jax.lax.pmean(tree, axis)


def psum(tree: Tree, axis: str | None) -> Tree:
    """The sum over the devices of a mesh axis; the tree itself where `axis` is None."""
    return tree if axis is None else jax.lax.psum(tree, axis)
