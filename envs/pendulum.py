"""Pendulum: swing a pendulum up and hold it there, with a motor too weak to do it in one go.

The same task as Gymnasium's Pendulum-v1, in plain JAX.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Box, Env, Key, Spec, TimeStep, Tree, record


@dataclasses.dataclass(frozen=True)
class Config:
    """The task."""

    episode_length: int = 200
    """Steps after which an episode is cut off; nothing else ends it."""
    dt: float = 0.05
    """Seconds per step (one semi-implicit Euler step)."""
    max_speed: float = 8.0
    """The angular velocity is clipped to this, rad/s."""
    max_torque: float = 2.0
    """The motor's bound, N m."""


@record
class Params:
    """The physical parameters, SI units."""

    gravity: float | jax.Array
    mass: float | jax.Array
    length: float | jax.Array


@record
class State:
    """Angle from upright (rad, not wrapped), angular velocity (rad/s) and the parameters."""

    angle: jax.Array
    speed: jax.Array
    params: Params


def cost(state: State, torque: jax.Array) -> jax.Array:
    """θ² + 0.1 ω² + 0.001 u², with θ wrapped to [-π, π)."""
    angle = (state.angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    return angle**2 + 0.1 * state.speed**2 + 0.001 * torque**2


def dynamics(cfg: Config, state: State, torque: jax.Array) -> State:
    """One step of a uniform rod that hangs from its end: I = m l² / 3."""
    p = state.params
    acc = 3 * p.gravity / (2 * p.length) * jnp.sin(state.angle)
    acc += 3 / (p.mass * p.length**2) * torque
    speed = jnp.clip(state.speed + acc * cfg.dt, -cfg.max_speed, cfg.max_speed)
    return State(state.angle + speed * cfg.dt, speed, p)


def make(cfg: Config) -> Env:
    """Pendulum: obs [3] (cos, sin, angular velocity), action [1] a torque, reward minus `cost`."""

    def observe(state: State, reward: jax.Array) -> tuple[Tree, TimeStep]:
        obs = jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.speed])
        flag = jnp.zeros((), bool)
        return state, TimeStep(obs, reward, flag, flag, obs, {})

    def reset(params: Params, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        del where
        high = jnp.array([jnp.pi, 1.0], jnp.float32)
        angle, speed = jax.random.uniform(key, (2,), jnp.float32, -high, high)
        return observe(State(angle, speed, jax.tree.map(jnp.asarray, params)), jnp.zeros(()))

    def step(state: State, action: jax.Array) -> tuple[Tree, TimeStep]:
        torque = jnp.clip(action[0], -cfg.max_torque, cfg.max_torque)
        return observe(dynamics(cfg, state, torque), -cost(state, torque))

    params = jax.tree.map(np.float32, Params(gravity=10.0, mass=1.0, length=1.0))
    high = (1.0, 1.0, cfg.max_speed)
    spec = Spec(
        obs=Box((3,), low=tuple(-h for h in high), high=high),
        action=Box((1,), low=-cfg.max_torque, high=cfg.max_torque),
        dt=cfg.dt,
        episode_length=cfg.episode_length,
    )
    return Env(reset, step, params, spec)
