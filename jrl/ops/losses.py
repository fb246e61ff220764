"""Losses on arrays: log-probabilities, values and advantages in, a scalar out. No networks here.

Every array has the same shape, any shape. `mask` (bool, that shape) keeps the entries that count:
a masked entry adds nothing to a loss, a metric or a gradient.
"""

import jax
import jax.numpy as jnp

from jrl.types import Metrics


def ppo_clip(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    advantage: jax.Array,
    *,
    clip_eps: jax.Array | float,
    clip_eps_high: jax.Array | float | None = None,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Clipped surrogate loss of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        L = −mean min(ratio A, clip(ratio, 1 − ε, 1 + ε_high) A)

    The log of the ratio is kept within ±20, where everything is clipped long since: an overflow
    would turn a clipped sample's gradient into NaN.

    Args:
        log_prob: log π(a|s) of the policy being trained.
        old_log_prob: log π(a|s) of the policy that acted.
        advantage: A, a constant to the gradient.
        clip_eps: ε, half-width of the trust interval.
        clip_eps_high: upper half-width where it differs (arXiv:2503.14476, "clip-higher").
        mask: bool, the entries that count; all of them if None.

    Returns:
        The loss, and the metrics `ratio` (mean), `clip_fraction` (share of ratios outside the
        interval) and `approx_kl` (mean of ratio − 1 − log ratio, never negative).
    """
    high = clip_eps if clip_eps_high is None else clip_eps_high
    advantage = jax.lax.stop_gradient(advantage)
    log_ratio = jnp.clip(log_prob - old_log_prob, -20.0, 20.0)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_eps, 1.0 + high)
    loss = -_mean(jnp.minimum(ratio * advantage, clipped * advantage), mask)
    outside = ((ratio < 1.0 - clip_eps) | (ratio > 1.0 + high)).astype(jnp.float32)
    metrics = {
        "ratio": _mean(ratio, mask),
        "clip_fraction": _mean(outside, mask),
        "approx_kl": _mean(jnp.expm1(log_ratio) - log_ratio, mask),
    }
    return loss, jax.lax.stop_gradient(metrics)


def value_loss(
    value: jax.Array,
    target: jax.Array,
    old_value: jax.Array | None = None,
    *,
    clip_eps: jax.Array | float | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Half the mean squared error of the values, clipped around the old ones if asked.

        L = ½ mean max((V − G)², (V_old + clip(V − V_old, ±ε) − G)²)

    Args:
        value: V(s) of the critic being trained.
        target: G, a constant to the gradient.
        old_value: V(s) when the data was collected; only used for clipping.
        clip_eps: ε in units of value; None for the plain error.
        mask: bool, the entries that count; all of them if None.

    Raises:
        ValueError: if `clip_eps` is given without `old_value`.
    """
    target = jax.lax.stop_gradient(target)
    error = (value - target) ** 2
    if clip_eps is None:
        return 0.5 * _mean(error, mask)
    if old_value is None:
        raise ValueError("value_loss: clipping (clip_eps) needs old_value to clip around.")
    clipped = old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)
    return 0.5 * _mean(jnp.maximum(error, (clipped - target) ** 2), mask)


def normalize(x: jax.Array, axis: str | None = None) -> jax.Array:
    """Shift and scale to mean 0 and standard deviation 1 over all entries.

    Entries that are all equal, and a batch of one, give zeros.

    Args:
        x: what to normalise, e.g. the advantages of a minibatch.
        axis: name of a mesh axis; the moments are then those of all devices together, which
            must hold equally many entries.
    """
    mean = jnp.mean(x)
    mean = mean if axis is None else jax.lax.pmean(mean, axis)
    var = jnp.mean((x - mean) ** 2)
    var = var if axis is None else jax.lax.pmean(var, axis)
    # Where the spread is mere rounding error, it must not be blown up to 1.
    smallest = (1e-8 + 1e-6 * jnp.abs(mean)) ** 2
    return (x - mean) * (var > smallest) / jnp.sqrt(jnp.maximum(var, smallest))


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return jnp.mean(x)
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
