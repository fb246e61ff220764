"""Reacher: a planar two-joint arm brings its fingertip to a target (Gymnasium's Reacher-v5)."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jrl.envs import task
from jrl.envs.physics import Data
from jrl.types import Env, Key

if TYPE_CHECKING:
    import mujoco

FINGERTIP, TARGET = 3, 4  # bodies of the model


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task; the defaults are those of Reacher-v5."""

    distance_cost: float = 1.0
    """Cost per metre between fingertip and target."""
    ctrl_cost: float = 1.0
    """Cost of the squared norm of the action."""


def start(model: "mujoco.MjModel", key: Key) -> tuple[jax.Array, jax.Array]:
    """An arm near its rest pose, a target uniform in the disc of radius 0.2 m around its base."""
    arm_key, radius_key, angle_key, speed_key = jax.random.split(key, 4)
    qpos, _ = task.uniform_start(model, 0.1, arm_key)
    _, qvel = task.uniform_start(model, 0.005, speed_key)
    radius = 0.2 * jnp.sqrt(jax.random.uniform(radius_key))  # uniform by area
    angle = jax.random.uniform(angle_key, maxval=2 * jnp.pi)
    target = radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    return qpos.at[2:].set(target), qvel.at[2:].set(0)


def _to_target(data: Data) -> jax.Array:
    return data.fields["xpos"][FINGERTIP] - data.fields["xpos"][TARGET]


def observe(data: Data) -> jax.Array:
    """Cosine, sine of the joints, target x y, joint velocities, fingertip - target x y: [10]."""
    joints = data.qpos[:2]
    return task.flat(
        jnp.cos(joints), jnp.sin(joints), data.qpos[2:], data.qvel[:2], _to_target(data)[:2]
    )


def reward(cfg: Config, before: Data, after: Data, action: jax.Array) -> dict[str, jax.Array]:
    """The costs of the distance and of the action."""
    del before
    return {
        "dist": -cfg.distance_cost * jnp.linalg.norm(_to_target(after)),
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
    }


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("reacher.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=2, fields=("xpos",))
    return task.make(
        engine,
        start=functools.partial(start, engine.model),
        observe=observe,
        reward=functools.partial(reward, cfg),
        terminated=task.never,
        episode_length=50,
    )
