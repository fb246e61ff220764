"""Inverted pendulum: a cart keeps its pole upright (Gymnasium's InvertedPendulum-v5)."""

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
    """The task; the defaults are those of InvertedPendulum-v5."""

    max_angle: float = 0.2
    """The angle of the pole in radians beyond which the episode ends."""
    reset_noise: float = 0.01
    """Half width of the uniform noise on the first position and velocity."""


def observe(data: Data) -> jax.Array:
    """Positions and velocities of cart and pole: [4]."""
    return task.flat(data.qpos, data.qvel)


def reward(cfg: Config, before: Data, after: Data, action: jax.Array) -> dict[str, jax.Array]:
    """One for each step with the pole upright."""
    del before, action
    return {"survive": (~terminated(cfg, after)).astype(jnp.float32)}


def terminated(cfg: Config, after: Data) -> jax.Array:
    """Whether the pole fell."""
    return jnp.abs(after.qpos[1]) > cfg.max_angle


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("inverted_pendulum.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=2)
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg),
        terminated=functools.partial(terminated, cfg),
        episode_length=1000,
    )
