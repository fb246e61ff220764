"""A robot task as four small functions over physics: start, observe, reward, terminated."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs import physics
from jrl.envs.physics import Data, Physics
from jrl.types import Box, Env, Key, Spec, TimeStep, Tree, record

if TYPE_CHECKING:
    import mujoco


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What every task lets you choose about its simulator."""

    backend: str = "auto"
    """The engine: native, mjx, warp, or auto (native on a CPU, warp on an NVIDIA GPU)."""
    threads: int = 0
    """Host threads of the native engine; 0 takes every core."""
    varying: tuple[str, ...] = ()
    """Fields of the model that may differ between robots, for domain randomization."""


@record
class State:
    """One robot in its task."""

    data: Data
    params: Tree  # the physical parameters in force in this episode


def make(
    engine: Physics,
    *,
    start: Callable[[Key], tuple[jax.Array, jax.Array]],
    observe: Callable[[Data], jax.Array],
    reward: Callable[[Data, Data, jax.Array], dict[str, jax.Array]],
    terminated: Callable[[Data], jax.Array],
    episode_length: int,
) -> Env:
    """The environment of one robot. An action is the control vector itself, in its own units.

    Args:
        engine: the simulator; its `params` become those of the environment.
        start: key -> (qpos [nq], qvel [nv]) of a new episode.
        observe: data -> observation [D].
        reward: (before, after, action [nu]) -> named float32 terms. Their sum is the reward, and
            each is reported as `info["reward/<name>"]`.
        terminated: data -> bool, whether the state reached ends the episode.
        episode_length: steps after which an episode should be cut off, for `spec` only.

    A step the engine could not compute ends its episode with reward 0 and finite observations,
    counted by `info["nan_resets"]`.
    """
    spec = _spec(engine, observe, episode_length)
    action = jax.ShapeDtypeStruct((engine.model.nu,), jnp.float32)

    def timestep(data: Data, terms: dict[str, jax.Array], ended: jax.Array) -> TimeStep:
        terms = {name: jnp.where(data.failed, 0.0, term) for name, term in terms.items()}
        info = {f"reward/{name}": term for name, term in terms.items()}
        info["nan_resets"] = data.failed.astype(jnp.float32)
        obs, total = observe(data), sum(terms.values(), jnp.float32(0))
        return TimeStep(obs, total, ended, jnp.zeros((), bool), obs, info)

    def reset(
        params: Tree,
        key: Key,
        where: jax.Array | bool = True,
    ) -> tuple[State, TimeStep]:
        data = engine.reset(params, *start(key), where)
        terms = jax.eval_shape(reward, data, data, action)
        nothing = {name: jnp.zeros((), jnp.float32) for name in terms}
        return State(data, params), timestep(data, nothing, jnp.zeros((), bool))

    def step(state: State, action: jax.Array) -> tuple[State, TimeStep]:
        data = engine.step(state.params, state.data, action)
        terms = reward(state.data, data, action)
        return State(data, state.params), timestep(data, terms, terminated(data) | data.failed)

    return Env(reset, step, engine.params, spec)


def _spec(engine: Physics, observe: Callable[[Data], jax.Array], episode_length: int) -> Spec:
    model = engine.model
    qpos, qvel = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (model.nq, model.nv))
    obs = jax.eval_shape(lambda *a: observe(engine.reset(*a)), engine.params, qpos, qvel)
    limited = model.actuator_ctrllimited.astype(bool)
    low = np.where(limited, model.actuator_ctrlrange[:, 0], -np.inf)
    high = np.where(limited, model.actuator_ctrlrange[:, 1], np.inf)
    return Spec(
        obs=Box(obs.shape),
        action=Box((model.nu,), "float32", tuple(low.tolist()), tuple(high.tolist())),
        dt=engine.dt,
        episode_length=episode_length,
    )


def engine(
    model: "mujoco.MjModel", cfg: Simulation, *, substeps: int, fields: tuple[str, ...] = ()
) -> Physics:
    """The simulator of a task, as `cfg` asks.

    `fields` are given as `mj_step` leaves them, one substep behind `qpos`: Gymnasium's tasks are
    defined on those values.
    """
    return physics.make(
        model,
        substeps=substeps,
        fields=fields,
        varying=cfg.varying,
        backend=cfg.backend,
        lagged=True,
        threads=cfg.threads,
    )


def asset(xml: str) -> Path:
    """Where a model file of the installed gymnasium package lies (gymnasium isn't imported)."""
    found = importlib.util.find_spec("gymnasium")
    if found is None or not found.submodule_search_locations:
        raise ImportError(
            f"{xml} is part of the gymnasium package, which is not installed: "
            "`pip install gymnasium`."
        )
    return Path(found.submodule_search_locations[0]) / "envs" / "mujoco" / "assets" / xml


@functools.cache
def load(xml: str) -> "mujoco.MjModel":
    """The compiled model of an `asset`, loaded once; treat it as read-only."""
    import mujoco

    return mujoco.MjModel.from_xml_path(str(asset(xml)))


def uniform_start(model: "mujoco.MjModel", noise: float, key: Key) -> tuple[jax.Array, jax.Array]:
    """The model's rest pose with every position and velocity off by U(-noise, noise)."""
    qpos_key, qvel_key = jax.random.split(key)
    qpos = jax.random.uniform(qpos_key, (model.nq,), minval=-noise, maxval=noise)
    qvel = jax.random.uniform(qvel_key, (model.nv,), minval=-noise, maxval=noise)
    return jnp.asarray(model.qpos0, jnp.float32) + qpos, qvel


def normal_start(model: "mujoco.MjModel", noise: float, key: Key) -> tuple[jax.Array, jax.Array]:
    """As `uniform_start`, with velocities from a normal distribution of deviation `noise`."""
    qpos_key, qvel_key = jax.random.split(key)
    qpos, _ = uniform_start(model, noise, qpos_key)
    return qpos, noise * jax.random.normal(qvel_key, (model.nv,))


def never(data: Data) -> jax.Array:
    """The `terminated` of a task that only time ends."""
    del data
    return jnp.zeros((), bool)


def between(value: jax.Array, bounds: tuple[float, float]) -> jax.Array:
    """Whether `value` lies strictly between the two bounds, elementwise."""
    return (bounds[0] < value) & (value < bounds[1])


def flat(*parts: Any) -> jax.Array:
    """All parts, flattened, as one vector."""
    return jnp.concatenate([jnp.ravel(part) for part in parts])
