"""MuJoCo in JAX: MJX on any device ("mjx"), or MuJoCo Warp on an NVIDIA GPU ("warp"). float32."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from jrl.checks import ConfigError, unknown
from jrl.envs.physics import Data, Physics, nominal, when_any
from jrl.types import Tree

# All that a step depends on. Not the whole mjx.Data: wrappers pick between states robot by robot,
# and Warp's contact arrays have no axis of robots to pick along.
_STATE = ("time", "qpos", "qvel", "act", "history", "qacc_warmstart", "plugin_state", "ctrl",
    "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata")  # fmt: skip
_CONTACT_FORCES = frozenset({"cacc", "cfrc_ext", "cfrc_int"})  # mj_step leaves them out


def make(
    model: mujoco.MjModel,
    substeps: int,
    fields: tuple[str, ...],
    varying: tuple[str, ...],
    lagged: bool,
    backend: str,
) -> Physics:
    """The "mjx" and "warp" backends of `jrl.envs.physics.make`."""
    _check(model, backend)
    impl = "warp" if backend == "warp" else "jax"
    fixed, blank = mjx.put_model(model, impl=impl), mjx.make_data(model, impl=impl)
    _check_fields(model, blank, fields)
    params = {name: jnp.asarray(nominal(model, name), jnp.float32) for name in varying}
    derive = _deriver(model, varying)

    def specific(params: dict[str, jax.Array]) -> mjx.Model:
        values = {name: jnp.asarray(params[name], jnp.float32) for name in varying}
        return fixed.tree_replace(values | derive(values)) if varying else fixed

    def show(m: mjx.Model, end: mjx.Data, current: mjx.Data, *, forces: bool) -> Data:
        if forces and _CONTACT_FORCES & set(fields):
            current = mjx.rne_postconstraint(m, current)
        named = {name: _field(current, name).astype(jnp.float32) for name in fields}
        state = {name: getattr(end, name) for name in _STATE}
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves((state, named))])
        return _contain(Data(state, end.qpos, end.qvel, named, ~finite.all()), rest)

    def start(params: dict[str, jax.Array], qpos: jax.Array, qvel: jax.Array) -> Data:
        m = specific(params)
        data = mjx.forward(m, blank.replace(qpos=qpos, qvel=qvel))
        return show(m, data, data, forces=not lagged)

    def step(params: dict[str, jax.Array], data: Data, ctrl: jax.Array) -> Data:
        m = specific(params)
        body = lambda d, _: (_like(mjx.step(m, d), d), None)
        before = blank.replace(**{**data.state, "ctrl": jnp.asarray(ctrl, jnp.float32)})
        end = jax.lax.scan(body, before, length=substeps)[0]
        return show(m, end, end if lagged else mjx.forward(m, end), forces=True)

    rest = _rest(model, blank, fields)
    begin = when_any(start)

    def reset(
        params: dict[str, jax.Array],
        qpos: jax.Array,
        qvel: jax.Array,
        where: jax.Array | bool = True,
    ) -> Data:
        at = jnp.asarray(qpos, jnp.float32), jnp.asarray(qvel, jnp.float32)
        return begin(jnp.asarray(where, bool), params, *at)

    dt = substeps * float(model.opt.timestep)
    return Physics(model, backend, params, reset, step, dt)


def _check(model: mujoco.MjModel, backend: str) -> None:
    """Refuse what this backend can't run, before it fails somewhere deep."""
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        raise ConfigError(
            f"the {backend} physics backend has no PGS solver, which this model asks for. Use "
            "backend='native', or set the model's solver to Newton or CG."
        )
    if backend == "warp" and importlib.util.find_spec("warp") is None:
        raise ImportError(
            "the warp physics backend needs warp-lang: pip install 'jrl-embodied[warp]'"
        )


def _check_fields(model: mujoco.MjModel, data: mjx.Data, fields: tuple[str, ...]) -> None:
    """Refuse fields of MuJoCo's that MJX doesn't have, or lays out in its own way."""
    known = {*vars(data), *vars(data._impl)} - {"_impl"}
    host = mujoco.MjData(model)
    for name in fields:
        if name not in known:
            raise unknown("field of MJX", name, known)
        if np.shape(getattr(host, name)) != _field(data, name).shape:
            raise ConfigError(
                f"MJX lays {name} out as {_field(data, name).shape}, MuJoCo as "
                f"{np.shape(getattr(host, name))}. Only backend='native' can show this field."
            )


def _rest(model: mujoco.MjModel, blank: mjx.Data, fields: tuple[str, ...]) -> Data:
    """The model at rest, its fields computed by the C engine: nothing to compile."""
    host = mujoco.MjData(model)
    mujoco.mj_forward(model, host)
    named = {name: jnp.asarray(getattr(host, name), jnp.float32) for name in fields}
    state = {name: getattr(blank, name) for name in _STATE}
    return Data(state, blank.qpos, blank.qvel, named, jnp.zeros((), bool))


def _field(data: mjx.Data, name: str) -> jax.Array:
    """A field of MJX's Data, public or the implementation's own."""
    return jnp.asarray(getattr(data if hasattr(data, name) else data._impl, name))


def _like(tree: Tree, example: Tree) -> Tree:
    """The same values with the example's dtypes, strong, so that a loop's carry keeps its type."""
    return jax.tree.map(lambda x, e: jnp.asarray(x, e.dtype), tree, example)


def _contain(data: Data, rest: Data) -> Data:
    """Put a robot whose values went non-finite back to rest, marked as failed."""
    calm = jax.tree.map(lambda new, old: jnp.where(data.failed, old, new), data, _like(rest, data))
    return Data(calm.state, calm.qpos, calm.qvel, calm.fields, data.failed)


def _deriver(model: mujoco.MjModel, varying: tuple[str, ...]) -> Any:
    """The model constants that depend on inertia, as mj_setConst derives them at qpos0."""
    if not any(name.startswith(("body_", "dof_armature", "jnt_", "qpos0")) for name in varying):
        return lambda _: {}
    fixed, blank = mjx.put_model(model, impl="jax"), mjx.make_data(model, impl="jax")
    below, means = _descendants(model), _joint_means(model)

    def derive(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        m = fixed.tree_replace(values)
        d = mjx.kinematics(m, blank.replace(qpos=jnp.asarray(m.qpos0)))
        d = mjx.crb(m, mjx.com_pos(m, d))
        inertia = mjx.full_m(m, d)
        inverse = jnp.linalg.inv(inertia)
        jacobian = jax.vmap(lambda at, body: jnp.stack(mjx.jac(m, d, at, body)))
        jac = jacobian(d.xipos, jnp.arange(model.nbody))  # [nbody, 2, nv, 3]
        weight = jnp.einsum("bkix,ij,bkjx->bk", jac, inverse, jac) / 3
        derived = {
            "body_subtreemass": below @ m.body_mass,
            "body_invweight0": weight * (model.body_weldid > 0)[:, None],
            "dof_invweight0": means @ jnp.diagonal(inverse),
            "dof_M0": jnp.diagonal(inertia),
        }
        return {name: value for name, value in derived.items() if name not in values}

    return derive


def _descendants(model: mujoco.MjModel) -> np.ndarray:
    """[nbody, nbody]: 1 where the column's body is the row's or below it."""
    below = np.eye(model.nbody, dtype=np.float32)
    for body in range(model.nbody - 1, 0, -1):
        below[model.body_parentid[body]] += below[body]
    return below


def _joint_means(model: mujoco.MjModel) -> np.ndarray:
    """[nv, nv]: averages over the three axes of a ball joint, and of a free joint's two halves."""
    means = np.eye(model.nv, dtype=np.float32)
    sizes = {int(mujoco.mjtJoint.mjJNT_FREE): 6, int(mujoco.mjtJoint.mjJNT_BALL): 3}
    for at, kind in zip(model.jnt_dofadr, model.jnt_type):
        for first in range(at, at + sizes.get(int(kind), 0), 3):
            means[first : first + 3, first : first + 3] = 1 / 3
    return means
