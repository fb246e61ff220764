"""Swimmer: a three-link snake swims forward in a viscous plane (Gymnasium's Swimmer-v5)."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jrl.envs import task
from jrl.envs.physics import Data
from jrl.types import Env

if TYPE_CHECKING:
    import mujoco


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task; the defaults are those of Swimmer-v5."""

    forward_reward: float = 1.0
    """Reward per m/s of forward speed."""
    ctrl_cost: float = 1e-4
    """Cost of the squared norm of the action."""
    reset_noise: float = 0.1
    """Half width of the uniform noise on the first position and velocity."""


def observe(data: Data) -> jax.Array:
    """Angles and velocities, without x and y: [8]."""
    return task.flat(data.qpos[2:], data.qvel)


def reward(
    cfg: Config, dt: float, before: Data, after: Data, action: jax.Array
) -> dict[str, jax.Array]:
    """Forward speed, and the cost of the action."""
    return {
        "forward": cfg.forward_reward * (after.qpos[0] - before.qpos[0]) / dt,
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
    }


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("swimmer.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=4)
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg, engine.dt),
        terminated=task.never,
        episode_length=1000,
    )
