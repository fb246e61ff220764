"""Inverted double pendulum: a cart keeps two linked poles upright (InvertedDoublePendulum-v5)."""

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
    """The task; the defaults are those of Gymnasium's InvertedDoublePendulum-v5."""

    healthy_reward: float = 10.0
    """Reward of each step that ends with the tip up."""
    min_height: float = 1.0
    """Height of the tip in metres at or below which the episode ends."""
    reset_noise: float = 0.1
    """Half width of the uniform noise on the first position, deviation of the first velocity."""


def observe(data: Data) -> jax.Array:
    """Cart position, sines and cosines of the poles, velocities, the force on the cart: [9]."""
    return task.flat(
        data.qpos[:1],
        jnp.sin(data.qpos[1:]),
        jnp.cos(data.qpos[1:]),
        jnp.clip(data.qvel, -10, 10),
        jnp.clip(data.fields["qfrc_constraint"][:1], -10, 10),
    )


def reward(cfg: Config, before: Data, after: Data, action: jax.Array) -> dict[str, jax.Array]:
    """Staying up, less the tip's distance from (0, 2) and the poles' speeds."""
    del before, action
    x, _, z = after.fields["site_xpos"][0]
    return {
        "survive": cfg.healthy_reward * (~terminated(cfg, after)).astype(jnp.float32),
        "distance": -0.01 * x**2 - (z - 2) ** 2,
        "velocity": -1e-3 * after.qvel[1] ** 2 - 5e-3 * after.qvel[2] ** 2,
    }


def terminated(cfg: Config, after: Data) -> jax.Array:
    """Whether the tip fell."""
    return after.fields["site_xpos"][0, 2] <= cfg.min_height


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("inverted_double_pendulum.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    fields = ("site_xpos", "qfrc_constraint")
    engine = task.engine(model(cfg), cfg, substeps=5, fields=fields)
    return task.make(
        engine,
        start=functools.partial(task.normal_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg),
        terminated=functools.partial(terminated, cfg),
        episode_length=1000,
    )
