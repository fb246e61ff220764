"""Returns and advantages: GAE, λ-returns, n-step returns, V-trace and group-relative advantages.

Arrays are time-major, [T, B] (or [T] for one environment), and agree in shape. `next_value[t]` is
the value of the true successor of step t, also where an episode was cut off and the environment
went on from a fresh start. `terminated` stops the bootstrap; `terminated | truncated` stops the
sum. The window's end needs no argument of its own: the last row bootstraps from `next_value[-1]`.
`discount` and `lam` are numbers or traced scalars. Nothing here stops gradients.
"""

import functools

import jax
import jax.numpy as jnp

Scalar = jax.Array | float


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: Scalar,
    lam: Scalar,
) -> jax.Array:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        δₜ = rₜ + γ (1 − terminatedₜ) V(s'ₜ) − V(sₜ)
        Aₜ = δₜ + γ λ (1 − doneₜ) Aₜ₊₁

    The value target that goes with it is `advantage + value`.

    Args:
        reward: [T, B].
        value: [T, B] V(sₜ).
        next_value: [T, B] V(s'ₜ) of the true successor; ignored where terminated.
        terminated: bool [T, B], the task ended the episode.
        truncated: bool [T, B], the episode was cut off.
        discount: γ.
        lam: λ; 0 is the one-step error, 1 the whole return.

    Returns:
        Advantages [T, B].

    Raises:
        ValueError: if the shapes differ.
    """
    _same_shape(
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
    )
    delta = reward + discount * jnp.where(terminated, 0.0, next_value) - value
    decay = discount * lam * ~(terminated | truncated)
    return _backward(delta, decay, jnp.zeros_like(delta[0]))


def lambda_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: Scalar,
    lam: Scalar,
) -> jax.Array:
    """λ-returns, the targets of TD(λ) (Sutton & Barto 2018, section 12.1).

        Gₜ = rₜ + γ (1 − terminatedₜ) [(1 − λ) V(s'ₜ) + λ Gₜ₊₁],  V(s'ₜ) for Gₜ₊₁ at an end

    Arguments as in `gae`; equal to `gae(...) + value`, and needs no `value`.

    Returns:
        Targets [T, B].

    Raises:
        ValueError: if the shapes differ.
    """
    _same_shape(reward=reward, next_value=next_value, terminated=terminated, truncated=truncated)
    done = terminated | truncated
    bootstrap = jnp.where(terminated, 0.0, next_value)
    first = reward + discount * (1.0 - lam * ~done) * bootstrap
    return _backward(first, discount * lam * ~done, next_value[-1])


def n_step_returns(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: Scalar,
    n: int,
) -> jax.Array:
    """Returns over at most n steps, then the value (Sutton & Barto 2018, eq. 7.1).

        Gₜ = Σᵢ₍₀ ≤ ᵢ < ₖ₎ γⁱ rₜ₊ᵢ + γᵏ V(s'ₜ₊ₖ₋₁)

    where k ≤ n is the number of steps until the sum reaches n, an episode's end or the window's
    end. The value is left out where step t + k − 1 terminated. Arguments as in `gae`.

    Returns:
        Targets [T, B].

    Raises:
        ValueError: if the shapes differ, or n is less than 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 (one reward and the next value), got {n}.")
    _same_shape(reward=reward, next_value=next_value, terminated=terminated, truncated=truncated)
    done = terminated | truncated
    bootstrap = jnp.where(terminated, 0.0, next_value)

    def longer(_: int, returns: jax.Array) -> jax.Array:
        return reward + discount * jnp.where(done, bootstrap, _shift(returns, next_value))

    return jax.lax.fori_loop(0, n - 1, longer, reward + discount * bootstrap)


def vtrace(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    ratio: jax.Array,
    *,
    discount: Scalar,
    lam: Scalar = 1.0,
    clip_rho: Scalar = 1.0,
    clip_c: Scalar = 1.0,
    clip_pg_rho: Scalar = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """V-trace: off-policy value targets and advantages (Espeholt et al. 2018, arXiv:1802.01561).

        vₜ = V(sₜ) + ρₜ (rₜ + γ V(s'ₜ) − V(sₜ)) + γ cₜ (vₜ₊₁ − V(s'ₜ)),      eq. 1
        Aₜ = min(ρ̄_pg, ratioₜ) (rₜ + γ [λ vₜ₊₁ + (1 − λ) V(s'ₜ)] − V(sₜ)),   section 4.2

    with ρₜ = min(ρ̄, ratioₜ), cₜ = λ min(c̄, ratioₜ). At an end of an episode and of the window
    vₜ₊₁ is V(s'ₜ), and at a termination 0: it never comes from the next episode. Mixing by λ in A
    makes the on-policy advantage GAE(λ), and at λ = 1 it is the paper's.

    Args:
        reward: [T, B].
        value: [T, B] V(sₜ).
        next_value: [T, B] V(s'ₜ) of the true successor; ignored where terminated.
        terminated: bool [T, B], the task ended the episode.
        truncated: bool [T, B], the episode was cut off.
        ratio: [T, B] π(aₜ|sₜ) / μ(aₜ|sₜ), the learner's policy over the one that acted.
        discount: γ.
        lam: λ.
        clip_rho: ρ̄, decides which policy's value is learnt.
        clip_c: c̄ ≤ ρ̄, decides how fast.
        clip_pg_rho: ρ̄ of the policy gradient.

    Returns:
        Value targets v and advantages A, both [T, B].

    Raises:
        ValueError: if the shapes differ.
    """
    _same_shape(
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
        ratio=ratio,
    )
    done = terminated | truncated
    bootstrap = jnp.where(terminated, 0.0, next_value)
    delta = jnp.minimum(clip_rho, ratio) * (reward + discount * bootstrap - value)
    decay = discount * lam * jnp.minimum(clip_c, ratio) * ~done
    target = value + _backward(delta, decay, jnp.zeros_like(delta[0]))
    following = jnp.where(done, bootstrap, _shift(target, next_value))
    mixed = lam * following + (1.0 - lam) * bootstrap
    advantage = jnp.minimum(clip_pg_rho, ratio) * (reward + discount * mixed - value)
    return target, advantage


def group_advantages(
    reward: jax.Array, group: jax.Array | None = None, num_groups: int | None = None
) -> jax.Array:
    """Group-relative advantages of GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

        Aᵢ = (rᵢ − mean of i's group) / std of i's group

    The standard deviation is the population's (divided by the group's size, not size − 1). A group
    whose rewards are all equal gets exactly 0.

    Args:
        reward: [G, K], K rewards for each of G groups; or [N] with `group`.
        group: int32 [N], the group of each reward, in 0 … num_groups − 1. Sizes may differ.
        num_groups: how many groups there are; static.

    Returns:
        Advantages, shaped like `reward`.

    Raises:
        ValueError: if `reward` is not [G, K] (without `group`), or `group` and `num_groups` don't
            come together.
    """
    if (group is None) != (num_groups is None):
        raise ValueError("group_advantages needs both `group` and `num_groups`, or neither.")
    if group is not None:
        return _group_advantages(reward, group, num_groups)
    if reward.ndim != 2:
        raise ValueError(
            f"group_advantages: expected rewards [G, K], got shape {reward.shape}. "
            "For a flat [N] give `group` and `num_groups` as well."
        )
    G, K = reward.shape
    rows = jnp.repeat(jnp.arange(G), K)
    return _group_advantages(reward.ravel(), rows, G).reshape(G, K)


def _group_advantages(reward: jax.Array, group: jax.Array, num_groups: int | None) -> jax.Array:
    total = functools.partial(jax.ops.segment_sum, segment_ids=group, num_segments=num_groups)
    size = jnp.maximum(total(jnp.ones_like(reward)), 1.0)
    centred = reward - (total(reward) / size)[group]
    std = jnp.sqrt(total(centred**2) / size)
    # Rounding leaves a constant group with a tiny spread, so equality is asked for directly.
    highest = jax.ops.segment_max(reward, group, num_groups)
    lowest = jax.ops.segment_min(reward, group, num_groups)
    varied = highest > lowest
    return jnp.where(varied[group], centred / jnp.where(varied, std, 1.0)[group], 0.0)


def _backward(first: jax.Array, decay: jax.Array, last: jax.Array) -> jax.Array:
    """Solve xₜ = firstₜ + decayₜ xₜ₊₁ from x_T = last."""

    def step(x: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, decay = row
        x = first + decay * x
        return x, x

    return jax.lax.scan(step, last.astype(first.dtype), (first, decay), reverse=True)[1]


def _shift(x: jax.Array, next_value: jax.Array) -> jax.Array:
    """xₜ₊₁, which is V(s') after the last step."""
    return jnp.concatenate([x[1:], next_value[-1:]])


def _same_shape(**arrays: jax.Array) -> None:
    shapes = {name: x.shape for name, x in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"expected arrays of one shape, time-major [T, B], got {shapes}.")
