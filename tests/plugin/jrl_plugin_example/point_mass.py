"""A mass on a frictionless table is pushed to a target, in plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Box, Env, Key, Spec, TimeStep, Tree, record


@dataclasses.dataclass(frozen=True)
class Config:
    """The task."""

    episode_length: int = 40
    """Steps after which an episode is cut off."""
    dt: float = 0.1
    """Seconds per step."""
    reach: float = 1.0
    """Targets lie up to this far from the start along each axis, metres."""
    effort_cost: float = 0.05
    """Weight of the squared force in the reward."""


@record
class State:
    """Where things are (metres, [2]), how fast (m/s, [2]), and the mass (kg)."""

    position: jax.Array
    velocity: jax.Array
    target: jax.Array
    mass: jax.Array


def make(cfg: Config) -> Env:
    """The mass: obs [4] (offset to the target, velocity), action [2] (force in newtons)."""

    def observe(state: State, terms: dict[str, jax.Array]) -> tuple[State, TimeStep]:
        obs = jnp.concatenate([state.target - state.position, state.velocity])
        never = jnp.zeros((), bool)
        info = {f"reward/{name}": x for name, x in terms.items()}
        return state, TimeStep(obs, sum(terms.values(), jnp.float32(0)), never, never, obs, info)

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[State, TimeStep]:
        del where
        rest = jnp.zeros(2)
        target = jax.random.uniform(key, (2,), minval=-cfg.reach, maxval=cfg.reach)
        nothing = {"distance": jnp.float32(0), "effort": jnp.float32(0)}
        return observe(State(rest, rest, target, jnp.asarray(params["mass"])), nothing)

    def step(state: State, action: jax.Array) -> tuple[State, TimeStep]:
        force = jnp.clip(action, -1.0, 1.0)
        velocity = state.velocity + cfg.dt * force / state.mass
        position = state.position + cfg.dt * velocity
        terms = {
            "distance": -jnp.linalg.norm(state.target - position),
            "effort": -cfg.effort_cost * jnp.sum(force**2),
        }
        return observe(State(position, velocity, state.target, state.mass), terms)

    spec = Spec(Box((4,)), Box((2,), low=-1.0, high=1.0), cfg.dt, cfg.episode_length)
    return Env(reset, step, {"mass": np.float32(1.0)}, spec)
