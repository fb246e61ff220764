"""Action distributions: diagonal Gaussian, its tanh-squashed form, categorical.

The last axis is the action's; the axes before it are a batch. Log-probabilities, entropies and
divergences are in nats, summed over the last axis.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jrl.types import Key, record


@record
class Normal:
    """Gaussian with independent dimensions."""

    mean: jax.Array  # [..., A]
    log_std: jax.Array  # [..., A] or [A]

    def sample(self, key: Key) -> jax.Array:
        """Draw one action per batch entry, [..., A]."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """The likeliest action, [..., A]."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log density of `action` [..., A], as [...]."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> jax.Array:
        """Differential entropy, [...]."""
        each = self.log_std + 0.5 * (1.0 + math.log(2 * math.pi))
        return jnp.sum(jnp.broadcast_to(each, self.mean.shape), axis=-1)

    def kl(self, other: "Normal") -> jax.Array:
        """KL(self ‖ other), [...]."""
        ratio = self.log_std - other.log_std
        z = (self.mean - other.mean) * jnp.exp(-other.log_std)
        return jnp.sum(0.5 * (jnp.exp(2.0 * ratio) + z**2 - 1.0) - ratio, axis=-1)


@record
class SquashedNormal:
    """Gaussian pressed into an interval: low + (high − low) (tanh u + 1) / 2 with u normal.

    `sample`, `mode` and `log_prob` speak of u, the action before squashing, because tanh can't be
    undone in float32 (tanh 10 is exactly 1). Keep u, and send `squash(u)` to the environment.
    """

    mean: jax.Array  # [..., A], before squashing
    log_std: jax.Array  # [..., A] or [A], before squashing
    low: jax.Array | float = -1.0  # bounds of the action, [A] or a number
    high: jax.Array | float = 1.0

    def sample(self, key: Key) -> jax.Array:
        """Draw u, [..., A]."""
        return Normal(self.mean, self.log_std).sample(key)

    def mode(self) -> jax.Array:
        """The u whose action is the median one, [..., A]."""
        return self.mean

    def squash(self, u: jax.Array) -> jax.Array:
        """The action of u, within [low, high]."""
        half = 0.5 * (self.high - self.low)
        return jnp.clip(self.low + half * (jnp.tanh(u) + 1.0), self.low, self.high)

    def unsquash(self, action: jax.Array) -> jax.Array:
        """A u that gives `action`, e.g. of a demonstration; finite at the bounds and beyond."""
        unit = 2.0 * (action - self.low) / (self.high - self.low) - 1.0
        edge = 1.0 - float(jnp.finfo(unit.dtype).eps)
        return jnp.arctanh(jnp.clip(unit, -edge, edge))

    def log_prob(self, u: jax.Array) -> jax.Array:
        """Log density of the action `squash(u)`, as [...] (Haarnoja et al. 2018, appendix C).

        log(1 − tanh² u) is computed as 2 (log 2 − u − softplus(−2u)), exact for any u.
        """
        slope = 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))
        half = 0.5 * jnp.asarray(self.high - self.low, u.dtype)
        stretch = jnp.sum(slope + jnp.log(half), axis=-1)
        return Normal(self.mean, self.log_std).log_prob(u) - stretch

    def entropy(self, key: Key) -> jax.Array:
        """Entropy estimated from one sample, [...]; there is no closed form."""
        return -self.log_prob(self.sample(key))

    def kl(self, other: "SquashedNormal") -> jax.Array:
        """KL(self ‖ other), [...], of two with the same bounds (squashing leaves it unchanged)."""
        return Normal(self.mean, self.log_std).kl(Normal(other.mean, other.log_std))


@record
class Categorical:
    """One of n choices, by unnormalised log-probabilities. A choice with −inf never happens."""

    logits: jax.Array  # [..., n]

    def sample(self, key: Key) -> jax.Array:
        """Draw int32 choices, [...]."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> jax.Array:
        """The likeliest choice, int32 [...]."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of the choices `action` [...], as [...]."""
        log_p = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_p, action[..., None], axis=-1)[..., 0]

    def entropy(self) -> jax.Array:
        """Entropy, [...]."""
        log_p = jax.nn.log_softmax(self.logits)
        return -_expected(log_p, log_p)

    def kl(self, other: "Categorical") -> jax.Array:
        """KL(self ‖ other), [...]; infinite where `other` rules out what `self` allows."""
        log_p, log_q = jax.nn.log_softmax(self.logits), jax.nn.log_softmax(other.logits)
        allowed = jnp.isfinite(log_p)
        return _expected(log_p, jnp.where(allowed, log_p, 0.0) - jnp.where(allowed, log_q, 0.0))


def _expected(log_p: jax.Array, x: jax.Array) -> jax.Array:
    """Σ p x, where impossible choices add nothing."""
    possible = jnp.isfinite(log_p)
    return jnp.sum(jnp.where(possible, jnp.exp(log_p) * jnp.where(possible, x, 0.0), 0.0), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def bound_log_std(log_std: jax.Array, low: float = -5.0, high: float = 2.0) -> jax.Array:
    """Keep a learnt log standard deviation in [low, high], so that the std is in (0, exp(high)].

    Inside the bounds it changes nothing. Outside, a gradient that leads back passes and one that
    leads further out is dropped, so a parameter never gets stuck beyond a bound (it would with a
    plain clip, whose gradient there is 0). Reverse mode only; gradients are those of a loss to
    be minimised.
    """
    return jnp.clip(log_std, low, high)


def _bound_forward(log_std: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    return jnp.clip(log_std, low, high), log_std


def _bound_backward(
    low: float, high: float, log_std: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    outward = ((log_std >= high) & (gradient < 0.0)) | ((log_std <= low) & (gradient > 0.0))
    return (jnp.where(outward, 0.0, gradient),)


bound_log_std.defvjp(_bound_forward, _bound_backward)
