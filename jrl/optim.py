"""Optimisers: Adam with a learning rate that lives in its state, and updates that can't do harm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jrl.types import Tree


def adam(
    learning_rate: jax.Array | float | Callable[[jax.Array], jax.Array],
    *,
    max_grad_norm: float | None = None,
    eps: float = 1e-5,
    b1: float = 0.9,
    b2: float = 0.999,
) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980), the gradient first clipped by its global norm.

    The learning rate is kept in the optimiser's state and nowhere else (see `learning_rate`), so
    a checkpoint of the state has it.

    Args:
        learning_rate: a number, a traced scalar, or a schedule: updates made so far -> rate, e.g.
            `optax.linear_schedule(3e-4, 0.0, 1000)`. A skipped update does not count.
        max_grad_norm: gradients with a larger norm are scaled down to it; None for no limit.
        eps: added to the root of the second moment.
        b1: decay of the first moment.
        b2: decay of the second moment.
    """

    def chain(learning_rate: jax.Array) -> optax.GradientTransformation:
        rule = optax.adam(learning_rate, b1=b1, b2=b2, eps=eps)
        if max_grad_norm is None:
            return rule
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), rule)

    return optax.inject_hyperparams(chain)(learning_rate=learning_rate)


def learning_rate(opt_state: Tree) -> jax.Array:
    """The learning rate in the state of `adam`: the one of the last update, if on a schedule."""
    return opt_state.hyperparams["learning_rate"]


def set_learning_rate(opt_state: Tree, rate: jax.Array) -> Tree:
    """The state with another learning rate. It has no effect on an optimiser with a schedule."""
    rate = jnp.asarray(rate, learning_rate(opt_state).dtype)
    return opt_state._replace(hyperparams={**opt_state.hyperparams, "learning_rate": rate})


def apply(
    tx: optax.GradientTransformation, grads: Tree, opt_state: Tree, params: Tree
) -> tuple[Tree, Tree, jax.Array]:
    """Update the parameters, unless a gradient or the update is not finite.

    A gradient whose squared norm overflows float32 counts as not finite.

    Returns:
        (params, opt_state, skipped): both as they were, and skipped = 1 (int32), where the update
        was refused.
    """
    updates, new_state = tx.update(grads, opt_state, params)
    finite = jnp.isfinite(optax.tree.norm(grads)) & jnp.isfinite(optax.tree.norm(updates))
    new = (optax.apply_updates(params, updates), new_state)
    params, opt_state = jax.tree.map(
        lambda after, before: jnp.where(finite, after, before), new, (params, opt_state)
    )
    return params, opt_state, (~finite).astype(jnp.int32)


def adaptive_kl(
    rate: jax.Array,
    kl: jax.Array,
    target: jax.Array | float,
    *,
    bounds: tuple[float, float] = (1e-5, 1e-2),
    factor: float = 1.5,
) -> jax.Array:
    """A learning rate that holds the policy's change per update near a KL divergence.

    Divided by `factor` where kl > 2 target, multiplied by it where 0 < kl < target / 2, within
    `bounds`. A KL that is 0 (nothing changed yet), negative (an estimate's noise) or NaN says
    nothing, and leaves the rate as it is.

    Args:
        rate: the current learning rate.
        kl: KL divergence of the policy from the one that acted; with several devices, their mean.
        target: the divergence wanted.
        bounds: lowest and highest rate to move to.
        factor: the step.
    """
    low, high = bounds
    slower = jnp.where(kl > 2.0 * target, jnp.maximum(rate / factor, low), rate)
    faster = (kl > 0.0) & (kl < 0.5 * target)
    return jnp.where(faster, jnp.minimum(rate * factor, high), slower)
