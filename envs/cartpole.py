"""CartPole: balance a pole on a cart by pushing left or right (Barto, Sutton & Anderson 1983).

The same task as Gymnasium's CartPole-v1, in plain JAX.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Box, Discrete, Env, Key, Spec, TimeStep, Tree, record


@dataclasses.dataclass(frozen=True)
class Config:
    """The task."""

    episode_length: int = 500
    """Steps after which an episode is cut off."""
    dt: float = 0.02
    """Seconds per step (one explicit Euler step)."""
    max_angle: float = 12 * 2 * math.pi / 360
    """The pole has fallen beyond this angle from upright, radians."""
    max_position: float = 2.4
    """The cart has left the track beyond this distance from its middle, metres."""


@record
class Params:
    """The physical parameters, SI units."""

    gravity: float | jax.Array
    cart_mass: float | jax.Array
    pole_mass: float | jax.Array
    half_length: float | jax.Array  # from the hinge to the pole's centre
    force: float | jax.Array  # of a push


@record
class State:
    """Cart position, cart velocity, pole angle, pole velocity (float32 [4]) and the parameters."""

    x: jax.Array
    params: Params


def dynamics(params: Params, x: jax.Array, action: jax.Array, dt: float) -> jax.Array:
    """One Euler step of the cart and its pole (Florian 2007, eqs. 23 and 24, no friction)."""
    _, velocity, angle, spin = x
    push = jnp.where(action == 1, params.force, -params.force)
    mass = params.cart_mass + params.pole_mass
    moment = params.pole_mass * params.half_length
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    pull = (push + moment * spin**2 * sin) / mass
    spin_acc = (params.gravity * sin - cos * pull) / (
        params.half_length * (4.0 / 3.0 - params.pole_mass * cos**2 / mass)
    )
    acc = pull - moment * spin_acc * cos / mass
    return x + dt * jnp.stack([velocity, acc, spin, spin_acc])


def make(cfg: Config) -> Env:
    """CartPole: obs [4] (position, velocity, angle, angular velocity), reward 1 for each step."""

    def observe(state: State, reward: float, fallen: jax.Array) -> tuple[Tree, TimeStep]:
        flag = jnp.zeros((), bool)
        return state, TimeStep(state.x, jnp.float32(reward), fallen, flag, state.x, {})

    def reset(params: Params, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        del where
        x = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        params = jax.tree.map(jnp.asarray, params)
        return observe(State(x, params), 0.0, jnp.zeros((), bool))

    def step(state: State, action: jax.Array) -> tuple[Tree, TimeStep]:
        x = dynamics(state.params, state.x, action, cfg.dt)
        fallen = (jnp.abs(x[0]) > cfg.max_position) | (jnp.abs(x[2]) > cfg.max_angle)
        return observe(State(x, state.params), 1.0, fallen)

    params = Params(gravity=9.8, cart_mass=1.0, pole_mass=0.1, half_length=0.5, force=10.0)
    params = jax.tree.map(np.float32, params)
    spec = Spec(obs=Box((4,)), action=Discrete(2), dt=cfg.dt, episode_length=cfg.episode_length)
    return Env(reset, step, params, spec)
