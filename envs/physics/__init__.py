"""One MuJoCo model as pure functions of a state, three engines behind one signature."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.checks import ConfigError, positive, unknown
from jrl.types import Tree, record

BACKENDS = ("native", "mjx", "warp")


@record
class Data:
    """The physics of one robot; `vmap` adds axes.

    Everything here is finite, also where `failed`.
    """

    state: Tree  # the engine's own: all of it that the next step depends on
    qpos: jax.Array  # float32 [nq]
    qvel: jax.Array  # float32 [nv]
    fields: dict[str, jax.Array]  # the derived MjData fields asked for, float32, shaped as there
    failed: jax.Array  # bool: the engine gave up, or a value went non-finite, in this call


class Physics(NamedTuple):
    """One model as pure functions of one robot. Close over it, never pass it to `jit`."""

    model: Any  # mujoco.MjModel, on the host
    backend: str
    params: dict[str, jax.Array]  # nominal values of the model fields named in `varying`
    reset: Callable[..., Data]  # (params, qpos, qvel, where=True): at rest there, time and ctrl 0
    step: Callable[[dict[str, jax.Array], Data, jax.Array], Data]  # (params, data, ctrl [nu])
    dt: float  # seconds of simulated time per step


def make(
    model: Any,
    *,
    substeps: int = 1,
    fields: Sequence[str] = (),
    varying: Sequence[str] = (),
    backend: str = "auto",
    lagged: bool = False,
    threads: int = 0,
) -> Physics:
    """Physics of a `mujoco.MjModel`.

    Args:
        model: the model; don't edit it afterwards.
        substeps: engine steps per call of `step`, all under the same controls.
        fields: names of derived MjData fields that `Data.fields` shall hold ("xpos", ...).
        varying: names of model fields that may differ between robots: MjModel's ("body_mass") or
            MjOption's ("opt.gravity"). Constants MuJoCo derives from them follow.
        backend: "native" (C engine, CPU), "mjx" (JAX, anywhere), "warp" (NVIDIA GPU), or "auto":
            the fastest for JAX's default device.
        lagged: fields as `mj_step` leaves them, one substep behind (what Gymnasium shows), rather
            than those of the state they come with.
        threads: of the native engine, per call; 0 shares the available cores among JAX's devices.

    Raises:
        ValueError: for an unknown backend, field or varying name, or a model the backend can't run.
        ImportError: if the backend's package is not installed.
    """
    positive(substeps=substeps)
    if backend == "auto":
        backend = _fastest(model)
    if backend not in BACKENDS:
        raise unknown("physics backend", backend, (*BACKENDS, "auto"))
    _check_names(fields, varying)
    if backend == "native":
        from jrl.envs.physics import native

        return native.make(model, substeps, tuple(fields), tuple(varying), lagged, threads)
    from jrl.envs.physics import mjx

    return mjx.make(model, substeps, tuple(fields), tuple(varying), lagged, backend)


def when_any(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """`call(where, *args)`: `function(*args)`, or zeros where a whole batch doesn't want it.

    Under `vmap` a condition of one robot can't save work, since both branches run and one is
    picked. This one is decided once for the batch: if any robot wants the result all compute it,
    else none does.
    """

    @jax.custom_batching.custom_vmap
    def call(where: jax.Array, *args: Tree) -> Tree:
        shapes = jax.eval_shape(function, *args)
        zeros = lambda *_: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.cond(jnp.any(where), function, zeros, *args)

    @call.def_vmap
    def _(size: int, batched: list[Tree], where: jax.Array, *args: Tree) -> tuple[Tree, Tree]:
        if not any(jax.tree.leaves(batched[1:])):  # results can't depend on the axis: give it one
            args = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), args)
            batched = jax.tree.map(lambda _: True, batched)
        axes = jax.tree.map(lambda has: 0 if has else None, tuple(batched[1:]))
        out = when_any(jax.vmap(function, in_axes=axes))(where, *args)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _fastest(model: Any) -> str:
    """The backend for JAX's default device; the PGS solver exists in the C engine alone."""
    import mujoco

    if jax.default_backend() == "cpu" or model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        return "native"
    return "warp" if "cuda" in jax.devices()[0].client.platform_version.lower() else "mjx"


def _check_names(fields: Sequence[str], varying: Sequence[str]) -> None:
    """Refuse names MuJoCo doesn't have, with the nearest one that it has."""
    from mujoco import batch

    for name in fields:
        if name not in batch.DATA_FIELDS:
            raise unknown("physics field", name, batch.DATA_FIELDS)
    for name in varying:
        if name not in batch.MODEL_FIELDS:
            raise unknown("varying model field", name, batch.MODEL_FIELDS)


def nominal(model: Any, name: str) -> Any:
    """The model's own value of a varying field, float64.

    Raises:
        ValueError: if the field holds integers, which can't vary.
    """
    import numpy as np

    owner, _, leaf = name.rpartition(".")
    value = np.asarray(getattr(model.opt if owner else model, leaf))
    if value.dtype.kind != "f":
        raise ConfigError(f"{name} holds integers; only real-valued model fields can vary.")
    return value.astype(np.float64)
