"""Humanoid standup: a humanoid lying on its back gets up (Gymnasium's HumanoidStandup-v5)."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jrl.envs import task
from jrl.envs.humanoid import FIELDS, observe
from jrl.envs.physics import Data
from jrl.types import Env

if TYPE_CHECKING:
    import mujoco


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task; the defaults are those of HumanoidStandup-v5."""

    height_reward: float = 1.0
    """Reward per (metre of the torso's height / seconds of a substep)."""
    ctrl_cost: float = 0.1
    """Cost of the squared norm of the control."""
    impact_cost: float = 5e-7
    """Cost of the squared norm of the contact forces."""
    max_impact_cost: float = 10.0
    """What the impact cost of one step is cut off at."""
    reset_noise: float = 0.01
    """Half width of the uniform noise on the first position and velocity."""


def reward(
    cfg: Config, timestep: float, before: Data, after: Data, action: jax.Array
) -> dict[str, jax.Array]:
    """Height over the substep's duration, a constant, the costs of control and impacts."""
    del before
    impact = cfg.impact_cost * jnp.sum(after.fields["cfrc_ext"] ** 2)
    return {
        "linup": cfg.height_reward * after.qpos[2] / timestep,
        "survive": jnp.ones((), jnp.float32),
        "quadctrl": -cfg.ctrl_cost * jnp.sum(action**2),
        "impact": -jnp.minimum(impact, cfg.max_impact_cost),
    }


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("humanoidstandup.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=5, fields=FIELDS)
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg, float(engine.model.opt.timestep)),
        terminated=task.never,
        episode_length=1000,
    )
