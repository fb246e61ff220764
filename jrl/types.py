"""The values every part of jrl speaks: records, environments, agents, buffers, specs.

Axes, here and everywhere: T time, B environments, A action size, M slots. Rollouts are time-major.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, dataclass_transform

import flax.core
import jax
import jax.numpy as jnp

Tree = Any  # a pytree of arrays
Key = jax.Array  # a typed key, `jax.random.key(seed)`
Metrics = dict[str, jax.Array]  # flat: "group/name" -> scalar

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass that is also a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


# --- what an environment and an agent look like from outside (static, hashable) -------------------


@dataclasses.dataclass(frozen=True)
class Box:
    """An array: its shape, dtype and bounds (a float, or one float per element of a flat array)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | tuple[float, ...] = -math.inf
    high: float | tuple[float, ...] = math.inf


@dataclasses.dataclass(frozen=True)
class Discrete:
    """One of `n` choices, an int32 scalar."""

    n: int


@dataclasses.dataclass(frozen=True)
class Spec:
    """What one robot shows and accepts.

    Attributes:
        obs: a `Box`, or a mapping of name to `Box` (kept as a hashable FrozenDict).
        action: a `Box` (continuous) or a `Discrete`.
        dt: seconds of simulated time per step.
        episode_length: steps after which an episode is cut off; 0 where nothing cuts it.
    """

    obs: Any
    action: Box | Discrete
    dt: float = 0.0
    episode_length: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.obs, Mapping):
            object.__setattr__(self, "obs", flax.core.freeze(dict(self.obs)))


def zeros(spec: Box | Discrete | Mapping) -> Tree:
    """Arrays of zeros shaped like a spec; mappings become plain dicts."""
    if isinstance(spec, Mapping):
        return {name: zeros(box) for name, box in spec.items()}
    if isinstance(spec, Discrete):
        return jnp.zeros((), jnp.int32)
    return jnp.zeros(spec.shape, spec.dtype)


# --- environments -------------------------------------------------------------------------------


@record
class TimeStep:
    """What an environment says after reset and each step. Leading axes: none, [B] or [T, B]."""

    obs: Tree  # what to act on next: the first observation of a new episode, where one just ended
    reward: jax.Array  # float32
    terminated: jax.Array  # bool: the task ended it; nothing to bootstrap from
    truncated: jax.Array  # bool: it was cut off; bootstrap from final_obs
    final_obs: Tree  # the true successor observation, before any auto-reset
    info: dict[str, Any]  # scalars; same keys, shapes and dtypes on every step


class Reset(Protocol):
    """`(params, key, where=True) -> (state, timestep)`: a fresh episode of one robot.

    `where` is False for a robot whose result will be thrown away (under `auto_reset` and vmap a
    reset is computed for every robot): expensive work may then return anything of the right shape.
    """

    def __call__(
        self,
        params: Tree,
        key: Key,
        where: jax.Array | bool = True,
    ) -> tuple[Tree, TimeStep]:
        """Start an episode."""
        ...


class Env(NamedTuple):
    """One robot as pure functions; `vmap` makes many. Close over it, never pass it to `jit`."""

    reset: Reset
    step: Callable[[Tree, jax.Array], tuple[Tree, TimeStep]]  # randomness and params ride in state
    params: Tree  # nominal physical and task parameters
    spec: Spec


class HostEnv(NamedTuple):
    """A batch of `num_envs` robots that are not JAX, resetting themselves.

    Ordinary functions on NumPy arrays. `state` is whatever `save` returns, or None where the
    simulator can't save it.
    """

    num_envs: int
    reset: Callable[[int], TimeStep]  # seed -> [B]
    step: Callable[[Any], TimeStep]  # action [B, A] -> [B], same-step auto-reset, true final_obs
    spec: Spec
    save: Callable[[], Any] = lambda: None
    restore: Callable[[Any], None] | None = None
    close: Callable[[], None] = lambda: None


@record
class Transition:
    """Steps for off-policy and offline learning. Leading axes: none, [N] or [T, B]."""

    obs: Tree
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_obs: Tree  # the true successor, also where the episode ended


@record
class FinalObs:
    """The successor observations of steps that were cut off, packed into M slots."""

    obs: Tree  # [M, ...]
    index: jax.Array  # int32 [M]: t * B + b of the step; T * B where the slot is free
    dropped: jax.Array  # int32: cut-off steps that found no slot (see `rollout.successor_values`)


@record
class Rollout:
    """T steps of B environments, as collected under one policy."""

    obs: Tree  # [T + 1, B, ...]; the last row is what comes after the last step
    action: jax.Array  # [T, B, ...] as the agent chose it (an environment clips its own copy)
    reward: jax.Array  # [T, B]
    terminated: jax.Array  # bool [T, B]
    truncated: jax.Array  # bool [T, B]
    final: FinalObs
    carry: Tree  # [B, ...] the agent's memory before the first step
    aux: Tree  # [T, B, ...] what `act` recorded, e.g. {"log_prob": ...}
    info: dict[str, Any]  # [T, B]


# --- agents and buffers ---------------------------------------------------------------------------


class Agent(NamedTuple):
    """An algorithm as pure functions. Close over it, never pass it to `jit`."""

    init: Callable[[Key], Tree]  # key -> state: everything needed to go on training
    policy: Callable[[Tree], Tree]  # state -> the slice an actor needs
    carry: Callable[[int], Tree]  # memory for B environments; () where there is none
    act: Callable[..., tuple[Tree, jax.Array, Tree]]
    # act(policy, carry, obs [B, ...], key, *, explore=True) -> (carry, action, aux)
    update: Callable[[Tree, Tree, Key], tuple[Tree, Metrics]]
    data: str  # what `update` eats: "rollout" | "batch" | "episodes"


class HostAgent(NamedTuple):
    """An algorithm that isn't JAX, such as a torch policy: ordinary functions.

    Its state is a handle to memory of its own, which `update` may change in place. Observations,
    actions and rollouts are NumPy or JAX arrays.
    """

    init: Callable[[Key], Any]  # key -> state
    policy: Callable[[Any], Any]  # state -> what acting needs; it may be the same memory
    carry: Callable[[int], Tree]  # memory for B environments; () where there is none
    act: Callable[..., tuple[Tree, Any, Tree]]  # as `Agent.act`
    update: Callable[[Any, Tree, Key], tuple[Any, Metrics]]
    data: str  # what `update` eats, see Agent.data
    save: Callable[[Any], Tree]  # state -> everything training goes on from, a copy, as arrays
    restore: Callable[[Tree], Any]  # that tree -> state, bit for bit


class Buffer(NamedTuple):
    """A store of experience as pure functions over its own state."""

    init: Callable[[Tree], Tree]  # an example of what `add` takes -> state
    add: Callable[[Tree, Tree], Tree]
    sample: Callable[[Tree, Key], Tree]
    can_sample: Callable[[Tree], jax.Array]
    data: str  # what `sample` returns, see Agent.data
    keeps: bool = True  # it remembers from update to update; False: each begins with an empty one
