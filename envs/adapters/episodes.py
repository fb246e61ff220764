"""What simulators on the host have in common: counting episodes, unit actions, float32."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jrl.checks import ConfigError
from jrl.types import Tree


class Episodes:
    """Return and length of each robot's episode so far, as `jrl.envs.wrappers` reports them."""

    def __init__(self, num_envs: int) -> None:
        self._total = np.zeros(num_envs, np.float32)
        self._length = np.zeros(num_envs, np.int32)
        self._fresh = np.ones(num_envs, bool)

    def begin(self) -> dict[str, np.ndarray]:
        """All episodes begin; the `info` of their reset."""
        self._fresh[:] = True
        zero = np.zeros_like(self._total)
        return {"episode/return": zero, "episode/length": zero.astype(np.int32), "nan_resets": zero}

    def step(self, reward: np.ndarray, ended: np.ndarray, bad: np.ndarray) -> dict[str, np.ndarray]:
        """The `info` of a step: totals so far, whole where an episode ends with it.

        Args:
            reward: float32 [B].
            ended: bool [B].
            bad: bool [B]: the simulator gave numbers that are not finite.
        """
        self._total = np.where(self._fresh, np.float32(0.0), self._total) + reward
        self._length = np.where(self._fresh, 0, self._length).astype(np.int32) + 1
        self._fresh = ended.copy()
        failed = bad.astype(np.float32)
        return {"episode/return": self._total, "episode/length": self._length, "nan_resets": failed}


def unit_actions(low: Any, high: Any, what: str) -> Callable[[np.ndarray], np.ndarray]:
    """Scale actions of -1 to 1 to a simulator's range; what is beyond is clipped.

    Raises:
        ConfigError: the range is not finite.
    """
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise ConfigError(
            f"{what} takes actions from {low.min()} to {high.max()}: without finite bounds they "
            "can't be scaled. Rescale or clip the actions in the simulator."
        )
    middle, half = (high + low) / 2, (high - low) / 2
    return lambda action: middle + half * np.clip(action, -1.0, 1.0)


def floats(obs: Tree) -> Tree:
    """Observations with float32 in place of other floats; images and integers stay."""
    if isinstance(obs, Mapping):
        return {name: floats(x) for name, x in obs.items()}
    return np.asarray(obs, np.float32) if obs.dtype.kind == "f" else np.asarray(obs)


def finite(obs: Tree, num_envs: int) -> np.ndarray:
    """Which robots' observations are finite, bool [B]."""
    if isinstance(obs, Mapping):
        return np.logical_and.reduce([finite(x, num_envs) for x in obs.values()])
    return np.isfinite(obs).reshape(num_envs, -1).all(axis=1)


def rows(mask: np.ndarray, yes: Tree, no: Tree) -> Tree:
    """Rows of `yes` where `mask`, else of `no`."""
    if isinstance(no, Mapping):
        return {name: rows(mask, yes[name], no[name]) for name in no}
    return np.where(mask.reshape(-1, *(1,) * (no.ndim - 1)), yes, no)
