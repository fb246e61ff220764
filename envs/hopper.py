"""Hopper: a planar one-legged robot hops forward without falling (Gymnasium's Hopper-v5)."""

import dataclasses
import functools
import math
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
    """The task; the defaults are those of Hopper-v5."""

    forward_reward: float = 1.0
    """Reward per m/s of forward speed."""
    healthy_reward: float = 1.0
    """Reward of each step that ends on its feet."""
    ctrl_cost: float = 1e-3
    """Cost of the squared norm of the action."""
    terminate_unhealthy: bool = True
    """Whether a fall ends the episode."""
    healthy_state: tuple[float, float] = (-100.0, 100.0)
    """Bounds of every joint angle and velocity, beyond which the robot counts as fallen."""
    healthy_z: tuple[float, float] = (0.7, math.inf)
    """Bounds of the torso's height, metres."""
    healthy_angle: tuple[float, float] = (-0.2, 0.2)
    """Bounds of the torso's pitch, radians."""
    reset_noise: float = 5e-3
    """Half width of the uniform noise on the first position and velocity."""


def observe(data: Data) -> jax.Array:
    """Positions but x, then velocities clipped to [-10, 10]: [11]."""
    return task.flat(data.qpos[1:], jnp.clip(data.qvel, -10, 10))


def healthy(cfg: Config, data: Data) -> jax.Array:
    """Whether the robot is on its feet: bool."""
    state = task.flat(data.qpos[2:], data.qvel)
    return (
        task.between(state, cfg.healthy_state).all()
        & task.between(data.qpos[1], cfg.healthy_z)
        & task.between(data.qpos[2], cfg.healthy_angle)
    )


def reward(
    cfg: Config, dt: float, before: Data, after: Data, action: jax.Array
) -> dict[str, jax.Array]:
    """Forward speed, staying on its feet, and the cost of the action."""
    return {
        "forward": cfg.forward_reward * (after.qpos[0] - before.qpos[0]) / dt,
        "survive": cfg.healthy_reward * healthy(cfg, after).astype(jnp.float32),
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
    }


def terminated(cfg: Config, after: Data) -> jax.Array:
    """Whether the robot fell."""
    return ~healthy(cfg, after) & cfg.terminate_unhealthy


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("hopper.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=4)
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg, engine.dt),
        terminated=functools.partial(terminated, cfg),
        episode_length=1000,
    )
