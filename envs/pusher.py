"""Pusher: a seven-joint arm pushes a cylinder to a goal (Gymnasium's Pusher-v5)."""

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

TIP, OBJECT, GOAL = 10, 11, 12  # bodies of the model


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task; the defaults are those of Pusher-v5."""

    near_cost: float = 0.5
    """Cost per metre between the arm's tip and the object."""
    distance_cost: float = 1.0
    """Cost per metre between the object and the goal."""
    ctrl_cost: float = 0.1
    """Cost of the squared norm of the action."""


def start(model: "mujoco.MjModel", key: Key) -> tuple[jax.Array, jax.Array]:
    """The arm at rest, the object in [-0.3, 0] x [-0.2, 0.2] m, over 0.17 m off the goal."""
    object_key, speed_key = jax.random.split(key)
    # 32 draws, of which all would miss once in 10^13 times: no loop to wait for.
    low, high = jnp.array([-0.3, -0.2]), jnp.array([0.0, 0.2])
    draws = jax.random.uniform(object_key, (32, 2), minval=low, maxval=high)
    first = draws[jnp.argmax(jnp.linalg.norm(draws, axis=-1) > 0.17)]
    qpos = jnp.asarray(model.qpos0, jnp.float32).at[-4:-2].set(first).at[-2:].set(0)
    _, qvel = task.uniform_start(model, 0.005, speed_key)
    return qpos, qvel.at[-4:].set(0)


def observe(data: Data) -> jax.Array:
    """Joint positions and velocities of the arm, positions of tip, object and goal: [23]."""
    return task.flat(data.qpos[:7], data.qvel[:7], data.fields["xpos"][TIP : GOAL + 1])


def reward(cfg: Config, before: Data, after: Data, action: jax.Array) -> dict[str, jax.Array]:
    """The costs of both distances and of the action."""
    del before
    tip, thing, goal = (after.fields["xpos"][body] for body in (TIP, OBJECT, GOAL))
    return {
        "near": -cfg.near_cost * jnp.linalg.norm(thing - tip),
        "dist": -cfg.distance_cost * jnp.linalg.norm(thing - goal),
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
    }


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("pusher_v5.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=5, fields=("xpos",))
    return task.make(
        engine,
        start=functools.partial(start, engine.model),
        observe=observe,
        reward=functools.partial(reward, cfg),
        terminated=task.never,
        episode_length=100,
    )
