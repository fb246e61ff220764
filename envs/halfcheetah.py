"""HalfCheetah: a planar two-legged robot runs forward (Gymnasium's HalfCheetah-v5)."""

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
    """The task; the defaults are those of HalfCheetah-v5."""

    forward_reward: float = 1.0
    """Reward per m/s of forward speed."""
    ctrl_cost: float = 0.1
    """Cost of the squared norm of the action."""
    reset_noise: float = 0.1
    """Half width of the uniform noise on the first position, deviation of the first velocity."""


def observe(data: Data) -> jax.Array:
    """Positions but x, and velocities: [17]."""
    return task.flat(data.qpos[1:], data.qvel)


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
    return task.load("half_cheetah.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=5)
    return task.make(
        engine,
        start=functools.partial(task.normal_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg, engine.dt),
        terminated=task.never,
        episode_length=1000,
    )
