"""Ant: a four-legged robot walks forward (Gymnasium's Ant-v5)."""

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

TORSO = 1  # body of the model


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task; the defaults are those of Ant-v5."""

    forward_reward: float = 1.0
    """Reward per m/s of forward speed of the torso."""
    healthy_reward: float = 1.0
    """Reward of each step that ends at a healthy height."""
    ctrl_cost: float = 0.5
    """Cost of the squared norm of the action."""
    contact_cost: float = 5e-4
    """Cost of the squared norm of the clipped contact forces."""
    contact_force: tuple[float, float] = (-1.0, 1.0)
    """Bounds that contact forces are clipped to, in cost and observation."""
    terminate_unhealthy: bool = True
    """Whether an unhealthy height ends the episode."""
    healthy_z: tuple[float, float] = (0.2, 1.0)
    """Bounds of the torso's height in metres, inclusive."""
    reset_noise: float = 0.1
    """Half width of the uniform noise on the first position, deviation of the first velocity."""


def contact_forces(cfg: Config, data: Data) -> jax.Array:
    """Clipped external torques and forces on each body: [14, 6]."""
    return jnp.clip(data.fields["cfrc_ext"], *cfg.contact_force)


def observe(cfg: Config, data: Data) -> jax.Array:
    """Positions but x and y, velocities, clipped contact forces: [105]."""
    return task.flat(data.qpos[2:], data.qvel, contact_forces(cfg, data)[1:])


def healthy(cfg: Config, data: Data) -> jax.Array:
    """Whether the torso is at a healthy height: bool."""
    low, high = cfg.healthy_z
    return (low <= data.qpos[2]) & (data.qpos[2] <= high)


def reward(
    cfg: Config, dt: float, before: Data, after: Data, action: jax.Array
) -> dict[str, jax.Array]:
    """Forward speed, staying healthy, and the costs of action and contacts."""
    moved = after.fields["xpos"][TORSO, 0] - before.fields["xpos"][TORSO, 0]
    return {
        "forward": cfg.forward_reward * moved / dt,
        "survive": cfg.healthy_reward * healthy(cfg, after).astype(jnp.float32),
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
        "contact": -cfg.contact_cost * jnp.sum(contact_forces(cfg, after) ** 2),
    }


def terminated(cfg: Config, after: Data) -> jax.Array:
    """Whether the torso left the healthy heights."""
    return ~healthy(cfg, after) & cfg.terminate_unhealthy


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("ant.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=5, fields=("xpos", "cfrc_ext"))
    return task.make(
        engine,
        start=functools.partial(task.normal_start, engine.model, cfg.reset_noise),
        observe=functools.partial(observe, cfg),
        reward=functools.partial(reward, cfg, engine.dt),
        terminated=functools.partial(terminated, cfg),
        episode_length=1000,
    )
