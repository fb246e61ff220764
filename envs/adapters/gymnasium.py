"""Gymnasium's environments as simulators on the host: `--env.name gymnasium --env.id Hopper-v5`."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jrl.checks import ConfigError
from jrl.envs.adapters.episodes import Episodes, finite, floats, rows, unit_actions
from jrl.types import Box, Discrete, HostEnv, Spec, TimeStep, Tree


@dataclasses.dataclass(frozen=True)
class Config:
    """Which environment, and how its copies run."""

    id: str = "HalfCheetah-v5"
    """The name that Gymnasium knows it by; `my_package:Mine-v0` imports the package first."""
    workers: Literal["sync", "async"] = "sync"
    """sync: one robot after the other in this process; async: a process for each."""
    options: tuple[str, ...] = ()
    """Arguments of its constructor, as name=value: forward_reward_weight=2.0."""


def make(cfg: Config, *, num_envs: int) -> HostEnv:
    """`num_envs` copies of a Gymnasium environment, see `from_vector`."""
    import gymnasium
    import yaml

    options = dict(option.split("=", 1) for option in cfg.options)
    try:
        vector = gymnasium.make_vec(
            cfg.id,
            num_envs,
            vectorization_mode=cfg.workers,
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
            **{name: yaml.safe_load(value) for name, value in options.items()},
        )
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.id = {cfg.id!r}: {error}") from error
    limit = getattr(vector.spec, "max_episode_steps", None) or 0
    return from_vector(vector, episode_length=limit)


def from_vector(vector: Any, *, episode_length: int = 0) -> HostEnv:
    """A Gymnasium vector environment as a `HostEnv`.

    Actions of -1 to 1 cover the range of a box, as in jrl's own tasks; what is beyond is clipped.
    An observation or a reward that is not finite ends its episode: terminated, with reward 0, and
    counted in `info["nan_resets"]`.

    Args:
        vector: a `gymnasium.vector.VectorEnv` whose `autoreset_mode` is SAME_STEP.
        episode_length: steps after which it truncates; 0 where it never does.

    Raises:
        ConfigError: another auto-reset mode, or spaces that agents can't deal with.
    """
    from gymnasium.vector import AutoresetMode

    mode = vector.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.SAME_STEP:
        vector.close()
        raise ConfigError(
            f"this vector environment resets itself by {mode}, which loses the last observation "
            "or adds steps without an action. Make it with autoreset_mode=AutoresetMode.SAME_STEP."
        )
    num_envs = vector.num_envs
    spec = Spec(_seen(vector.single_observation_space), _taken(vector), 0.0, episode_length)
    scale = _scale(vector)
    episodes = Episodes(num_envs)

    def reset(seed: int) -> TimeStep:
        obs = floats(vector.reset(seed=seed)[0])
        no: Any = np.zeros(num_envs, bool)
        reward: Any = np.zeros(num_envs, np.float32)
        return TimeStep(obs, reward, no, no, obs, episodes.begin())

    def step(action: np.ndarray) -> TimeStep:
        obs, reward, terminated, truncated, info = vector.step(scale(action))
        obs, reward = floats(obs), reward.astype(np.float32)
        final = _final(obs, info)
        bad = ~(np.isfinite(reward) & finite(final, num_envs))
        if bad.any():
            obs, final, reward, terminated = contain(bad, obs, final, reward, terminated)
        ended = terminated | truncated
        return TimeStep(
            obs, reward, terminated, truncated, final, episodes.step(reward, ended, bad)
        )

    def contain(
        bad: np.ndarray, obs: Tree, final: Tree, reward: np.ndarray, terminated: np.ndarray
    ) -> tuple[Tree, Tree, np.ndarray, np.ndarray]:
        """End the episodes of robots that broke, and start them again."""
        fresh = floats(vector.reset(options={"reset_mask": bad})[0])
        obs = rows(bad, fresh, obs)
        return obs, rows(bad, obs, final), np.where(bad, np.float32(0.0), reward), terminated | bad

    return HostEnv(num_envs, reset, step, spec, close=vector.close)


def _final(obs: Tree, info: Mapping[str, Any]) -> Tree:
    """The true successors: what `info` keeps of robots that were reset, else the observation."""
    if "final_obs" not in info:
        return obs
    given, ended = info["final_obs"], info["_final_obs"]
    final = copy.deepcopy(obs)
    for i in np.flatnonzero(ended):
        _put(final, given[i], i)
    return final


def _put(all_: Tree, one: Tree, i: Any) -> None:
    """Write robot `i`'s observation into those of all."""
    if isinstance(all_, Mapping):
        for name, x in all_.items():
            _put(x, one[name], i)
    else:
        all_[i] = one


def _seen(space: Any) -> Box | dict[str, Box]:
    import gymnasium

    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _seen(part) for name, part in space.spaces.items()}  # type: ignore[misc]
    if not isinstance(space, gymnasium.spaces.Box):
        raise ConfigError(
            f"observations of {space} can't be seen by a network: only boxes and dicts of boxes "
            "can. Wrap the environment in gymnasium.wrappers.FlattenObservation."
        )
    dtype = "float32" if space.dtype.kind == "f" else str(space.dtype)
    return Box(space.shape, dtype)


def _taken(vector: Any) -> Box | Discrete:
    import gymnasium

    space = vector.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.Box):
        return Box(space.shape, "float32", -1.0, 1.0)
    raise ConfigError(f"actions of {space} are not supported: only boxes and Discrete are.")


def _scale(vector: Any) -> Callable[[np.ndarray], np.ndarray]:
    space = vector.single_action_space
    if not hasattr(space, "low"):
        return lambda action: np.asarray(action, space.dtype) + space.start
    return unit_actions(space.low, space.high, str(getattr(vector, "spec", None) or vector))
