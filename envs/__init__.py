"""Environments: pure functions of one robot. `make` builds one, `vector` a training-ready batch."""

if __name__ == "envs":
    raise ImportError("import `jrl.envs`: a second copy under another name breaks class identity")

from typing import Any

from jrl.envs import wrappers
from jrl.envs.nan_guard import nan_guard
from jrl.registry import make as _make
from jrl.types import Env


def make(name: str, **overrides: Any) -> Env:
    """One robot by name or path, as its task defines it. `overrides` are fields of its `Config`."""
    return _make("env", name, **overrides)


def vector(
    env: str | Env,
    num_envs: int,
    *,
    auto_reset: bool = True,
    action_repeat: int = 1,
    frame_stack: int = 0,
    episode_length: int = 0,
    **overrides: Any,
) -> Env:
    """`num_envs` robots ready for training, from a name or from an `Env` of one robot.

    They take unit actions, end non-finite episodes, stop at their time limit, report their episodes
    and restart by themselves. See `jrl.envs.wrappers` for other orders.

    Args:
        env: a name, with `overrides` for its `Config`, or one robot.
        num_envs: robots B; every array gets the leading axis [B].
        auto_reset: whether an ended episode is followed by the next; without, for evaluation.
        action_repeat: environment steps for which each action is held.
        frame_stack: observations shown at once, 0 for just the newest.
        episode_length: steps after which an episode is cut off, 0 for what the task says.
        **overrides: fields of the task's `Config`; only together with a name.

    Raises:
        TypeError: if `overrides` come with an `Env`, whose configuration is already fixed.
    """
    if isinstance(env, str):
        env = make(env, **overrides)
    elif overrides:
        raise TypeError(
            f"vector got a finished Env and the options {sorted(overrides)}. "
            "Give them to the `Config` the Env is made from, or give vector the env's name."
        )
    robot = nan_guard(wrappers.unit_actions(env))
    if action_repeat > 1:
        robot = wrappers.action_repeat(robot, action_repeat)
    if frame_stack > 1:
        robot = wrappers.frame_stack(robot, frame_stack)
    if episode_length or robot.spec.episode_length:
        robot = wrappers.time_limit(robot, episode_length or None)
    robot = wrappers.episode_statistics(robot)
    return wrappers.batch(wrappers.auto_reset(robot) if auto_reset else robot, num_envs)
