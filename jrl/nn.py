"""Networks as flax modules: frozen, hashable, with pure `init` and `apply`."""

from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp

from jrl.checks import unknown
from jrl.types import Tree

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "tanh": jnp.tanh,
}


class MLP(linen.Module):
    """Dense layers `[..., n] -> [..., sizes[-1]]`, uniform weights scaled by fan-in, zero biases.

    (Orthogonal weights would cost seconds of start-up, for the QR decompositions.)

    Attributes:
        sizes: width of each layer, the output last.
        activation: a name in `ACTIVATIONS`, used between the layers (and after the last where
            `activate_last`).
        last_scale: gain of the last layer's weights; a small one starts a policy near its mean.
    """

    sizes: tuple[int, ...]
    activation: str = "swish"
    last_scale: float = 1.0
    activate_last: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise unknown("activation", self.activation, ACTIVATIONS)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., n] -> [..., sizes[-1]]`."""
        leading = x.shape[:-1]
        x = x.reshape(-1, x.shape[-1])  # plain matrix products: XLA's CPU backend is 20 % faster
        for i, size in enumerate(self.sizes):
            last = i == len(self.sizes) - 1
            gain = self.last_scale if last else 2.0**0.5
            spread = linen.initializers.variance_scaling(gain**2, "fan_in", "uniform")
            x = linen.Dense(size, kernel_init=spread)(x)
            if not last or self.activate_last:
                x = ACTIVATIONS[self.activation](x)
        return x.reshape(*leading, -1)


class GRU(linen.Module):
    """A gated recurrent unit (Cho et al. 2014) over a time-major sequence, restarted at episodes.

    Attributes:
        size: units of memory.
    """

    size: int

    @linen.compact
    def __call__(
        self, carry: jax.Array, x: jax.Array, is_first: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run `x` [T, B, n] from memory `carry` [B, size].

        Where `is_first` [T, B] a step starts an episode, and its memory starts at zero.

        Returns:
            The memory after the last step [B, size], and after each step [T, B, size].
        """

        def step(
            cell: linen.GRUCell, h: jax.Array, inputs: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            x, first = inputs
            return cell(jnp.where(first[:, None], 0.0, h), x)

        scan = linen.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(linen.GRUCell(self.size, name="cell"), carry, (x, is_first))


class ActorCritic(linen.Module):
    """A policy and a critic over time-major sequences [L, N], with a memory in front if asked for.

    The policy sees `x["policy"]` (through the memory); so does the critic, unless the observation
    has a part `x["critic"]` of its own, which then takes its place (beside the memory).

    Attributes:
        action_size: numbers that describe the distribution's centre: action size or choices.
        hidden: widths of the hidden layers.
        activation: a name in `ACTIVATIONS`.
        memory: units of the GRU, 0 for none.
        shared_trunk: one set of hidden layers for both.
        continuous: the policy is a Gaussian, with a log standard deviation of its own.
    """

    action_size: int
    hidden: tuple[int, ...] = (256, 256)
    activation: str = "swish"
    memory: int = 0
    shared_trunk: bool = False
    continuous: bool = True

    def setup(self) -> None:
        """Name the parts; what is never called gets no parameters."""
        own = () if self.shared_trunk else self.hidden
        self.gru = GRU(self.memory)
        self.trunk = MLP(self.hidden, self.activation, 2.0**0.5, activate_last=True)
        self.actor = MLP((*own, self.action_size), self.activation, last_scale=0.01)
        self.critic = MLP((*own, 1), self.activation)
        if self.continuous:
            self.log_std = self.param("log_std", linen.initializers.zeros, (self.action_size,))

    def __call__(
        self, carry: Tree, x: dict[str, jax.Array], is_first: jax.Array
    ) -> tuple[Tree, tuple[jax.Array, ...], jax.Array]:
        """Everything at once: the memory, the policy's numbers and the value."""
        carry, known = self.remember(carry, x, is_first)
        return carry, self.policy(known), self.value(known, x)

    def remember(
        self, carry: Tree, x: dict[str, jax.Array], is_first: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """What is known at each step: the memory after it, or the input where there is none."""
        if not self.memory:
            return carry, x["policy"]
        return self.gru(carry, x["policy"], is_first)

    def policy(self, known: jax.Array) -> tuple[jax.Array, ...]:
        """`(mean, log_std)` of a continuous policy, `(logits,)` of a discrete one."""
        out = self.actor(self.trunk(known) if self.shared_trunk else known)
        return (out, self.log_std) if self.continuous else (out,)

    def value(self, known: jax.Array, x: dict[str, jax.Array]) -> jax.Array:
        """V [L, N]."""
        if "critic" in x:
            known = jnp.concatenate([known, x["critic"]], -1) if self.memory else x["critic"]
        return self.critic(self.trunk(known) if self.shared_trunk else known)[..., 0]


def apply(net: linen.Module, params: Tree, *args: Any, method: str | None = None) -> Any:
    """`net.apply` with a type that tools can follow: the method's own outputs, no mutable state."""
    return net.apply(params, *args, method=method)
