"""A humanoid made for fast training: Gymnasium's body, cheap contacts and its own observation.

The rewards are those of Humanoid-v5 without the contact cost. The physics differs: one evaluation
per substep (Euler) instead of four (RK4), a few Newton iterations, longer substeps, and contacts
only where an upright humanoid can have them (feet on floor, leg against leg). It is five to
six times as fast as `humanoid`, and runs on every engine.
"""

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

TOUCHING = (  # the pairs of geoms that collide, besides each foot with the floor
    ("right_foot", "left_foot"),
    ("right_foot", "left_shin1"),
    ("right_shin1", "left_foot"),
    ("right_shin1", "left_shin1"),
    ("right_thigh1", "left_thigh1"),
)

FIELDS = ("subtree_com", "xpos", "cvel")


@dataclasses.dataclass(frozen=True)
class Config(task.Simulation):
    """The task, and how finely its physics is computed."""

    forward_reward: float = 1.25
    """Reward per m/s of forward speed of the centre of mass."""
    healthy_reward: float = 5.0
    """Reward of each step on its feet."""
    ctrl_cost: float = 0.1
    """Cost of the squared norm of the control."""
    healthy_z: tuple[float, float] = (1.0, 2.0)
    """Bounds of the torso's height in metres; outside them the episode ends."""
    reset_noise: float = 0.01
    """Half width of the uniform noise on the first position and velocity."""
    episode_length: int = 1000
    """Steps after which an episode is cut off."""
    timestep: float = 0.005
    """Seconds per substep of the engine."""
    substeps: int = 3
    """Substeps under one action: with the timestep, 0.015 s per action."""
    iterations: int = 4
    """Newton iterations of the contact solver, at most; with 2 or fewer it can diverge."""


def observe(data: Data) -> jax.Array:
    """Where each body is and how it moves, wherever the robot is: [162].

    Joint positions but x and y (22) and velocities (23), then of the 13 bodies the positions
    relative to the torso's x and y (39) and the velocities (78, `cvel`). The bodies' part follows
    from the joints', but with it a policy needs a third of the steps to stand.
    """
    x, y = data.qpos[0], data.qpos[1]
    beside = data.fields["xpos"][1:] - jnp.stack([x, y, jnp.zeros_like(x)])
    return task.flat(data.qpos[2:], data.qvel, beside, data.fields["cvel"][1:])


def healthy(cfg: Config, data: Data) -> jax.Array:
    """Whether the torso is at a standing height: bool."""
    return task.between(data.qpos[2], cfg.healthy_z)


def reward(
    cfg: Config, dt: float, before: Data, after: Data, action: jax.Array
) -> dict[str, jax.Array]:
    """Forward speed of the centre of mass, staying up, and the cost of the control."""
    moved = after.fields["subtree_com"][0, 0] - before.fields["subtree_com"][0, 0]
    return {
        "forward": cfg.forward_reward * moved / dt,
        "survive": cfg.healthy_reward * healthy(cfg, after).astype(jnp.float32),
        "ctrl": -cfg.ctrl_cost * jnp.sum(action**2),
    }


def terminated(cfg: Config, after: Data) -> jax.Array:
    """Whether the humanoid fell."""
    return ~healthy(cfg, after)


def model(cfg: Config) -> "mujoco.MjModel":
    """Gymnasium's humanoid with the faster physics."""
    import mujoco

    spec = mujoco.MjSpec.from_file(str(task.asset("humanoid.xml")))
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    spec.option.timestep = cfg.timestep
    spec.option.iterations = cfg.iterations
    spec.option.ls_iterations = 2 * cfg.iterations
    for geom in spec.geoms:
        geom.contype = int(geom.name == "floor")
        geom.conaffinity = int(geom.name in ("right_foot", "left_foot"))
    for first, second in TOUCHING:
        spec.add_pair(geomname1=first, geomname2=second, condim=1)
    return spec.compile()


def make(cfg: Config) -> Env:
    """The environment."""
    body = model(cfg)
    engine = task.engine(body, cfg, substeps=cfg.substeps, fields=FIELDS)
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, body, cfg.reset_noise),
        observe=observe,
        reward=functools.partial(reward, cfg, engine.dt),
        terminated=functools.partial(terminated, cfg),
        episode_length=cfg.episode_length,
    )
