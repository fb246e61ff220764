"""Humanoid: a 17-motor humanoid walks forward without falling (Gymnasium's Humanoid-v5)."""

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

FIELDS = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")  # what `observe` reads


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task; the defaults are those of Humanoid-v5."""

    forward_reward: float = 1.25
    """Reward per m/s of forward speed of the centre of mass."""
    healthy_reward: float = 5.0
    """Reward of each step that ends on its feet."""
    ctrl_cost: float = 0.1
    """Cost of the squared norm of the control."""
    contact_cost: float = 5e-7
    """Cost of the squared norm of the contact forces."""
    max_contact_cost: float = 10.0
    """What the contact cost of one step is cut off at."""
    terminate_unhealthy: bool = True
    """Whether a fall ends the episode."""
    healthy_z: tuple[float, float] = (1.0, 2.0)
    """Bounds of the torso's height, metres."""
    reset_noise: float = 0.01
    """Half width of the uniform noise on the first position and velocity."""


def observe(data: Data) -> jax.Array:
    """Positions but x and y, velocities; inertia, velocity, motor and contact fields: [348]."""
    cinert, cvel, qfrc_actuator, cfrc_ext = (data.fields[name] for name in FIELDS)
    world = task.flat(cinert[1:], cvel[1:], qfrc_actuator[6:], cfrc_ext[1:])
    return task.flat(data.qpos[2:], data.qvel, world)


def healthy(cfg: Config, data: Data) -> jax.Array:
    """Whether the torso is at a standing height: bool."""
    return task.between(data.qpos[2], cfg.healthy_z)


def reward(
    cfg: Config, dt: float, before: Data, after: Data, action: jax.Array
) -> dict[str, jax.Array]:
    """Forward speed of the centre of mass, staying up, the costs of control and contacts."""
    moved = after.fields["subtree_com"][0, 0] - before.fields["subtree_com"][0, 0]
    contact = cfg.contact_cost * jnp.sum(after.fields["cfrc_ext"] ** 2)
    return {
        "forward": cfg.forward_reward * moved / dt,
        "survive": cfg.healthy_reward * healthy(cfg, after).astype(jnp.float32),
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
        "contact": -jnp.minimum(contact, cfg.max_contact_cost),
    }


def terminated(cfg: Config, after: Data) -> jax.Array:
    """Whether the humanoid fell."""
    return ~healthy(cfg, after) & cfg.terminate_unhealthy


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's model."""
    del cfg
    return task.load("humanoid.xml")


def make(cfg: Config) -> Env:
    """The environment."""
    engine = task.engine(model(cfg), cfg, substeps=5, fields=("subtree_com", *FIELDS))
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, engine.model, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg, engine.dt),
        terminated=functools.partial(terminated, cfg),
        episode_length=1000,
    )
