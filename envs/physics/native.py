"""MuJoCo's C engine inside jitted code: many robots per call, stepped on a thread pool.

A robot's state is the part of MuJoCo's state row that a step changes, carried through JAX as raw
bits, so that float64 survives 32-bit JAX and a step is a pure function of the row.
"""

import contextlib
import ctypes
import logging
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from mujoco.batch import Batch, SimulationError

from jrl.envs.physics import Data, Physics, nominal, when_any
from jrl.envs.physics.loop import FIELDS, Loop

_STAGE = mujoco.mjtStage
_STATE = frozenset({"time", "qpos", "qvel", "act", "ctrl", "history", "qacc_warmstart",
    "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos", "mocap_quat", "userdata",
    "plugin_state"})  # fmt: skip
_ACCELERATION = frozenset({"act_dot", "actuator_force", "cacc", "cfrc_ext", "cfrc_int", "qacc",
    "qacc_smooth", "qfrc_actuator", "qfrc_constraint", "qfrc_smooth", "solver_niter",
    "solver_nnz"})  # fmt: skip
_UNSTABLE = [int(w) for w in (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL,
    mujoco.mjtWarning.mjWARN_BADQACC, mujoco.mjtWarning.mjWARN_BADCTRL)]  # fmt: skip


_LOG = logging.getLogger(__name__)
_told: set[str] = set()


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _warn(text: bytes) -> None:
    """Log MuJoCo's warnings once each, rather than to a file in the working directory.

    Unstable robots are not even logged: `Data.failed` reports them.
    """
    message = text.decode(errors="replace").split(". Time")[0]
    if "unstable" not in message and message not in _told:
        _told.add(message)
        _LOG.warning("MuJoCo: %s", message)


def make(
    model: mujoco.MjModel,
    substeps: int,
    fields: tuple[str, ...],
    varying: tuple[str, ...],
    lagged: bool,
    threads: int,
) -> Physics:
    """The native backend of `jrl.envs.physics.make`."""
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_warn)
    engine = _Engine(model, substeps, fields, varying, lagged, threads)
    params = {name: jnp.asarray(engine.nominal[name], jnp.float32) for name in varying}

    def leaves(params: dict[str, jax.Array]) -> list[jax.Array]:
        return [jnp.asarray(params[name], jnp.float32) for name in varying]

    def unpack(rows: jax.Array, packed: jax.Array) -> Data:
        values, at = [], 0
        for shape in engine.shapes.values():
            size = math.prod(shape)
            values.append(packed[..., at : at + size].reshape(*packed.shape[:-1], *shape))
            at += size
        named = dict(zip(engine.shapes, values))
        qpos, qvel = named.pop("_qpos"), named.pop("_qvel")
        return Data(rows, qpos, qvel, named, packed[..., -1] > 0)

    def call(function: Any, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = (
            jax.ShapeDtypeStruct((engine.width,), jnp.uint32),
            jax.ShapeDtypeStruct((engine.packed,), jnp.float32),
        )
        host = lambda _, out, *args: function(*map(np.asarray, (*out, *args)))
        return buffer_callback(host, out, vmap_method="broadcast_all")(*args)

    start = when_any(lambda *args: call(engine.reset, *args))

    def reset(
        params: dict[str, jax.Array],
        qpos: jax.Array,
        qvel: jax.Array,
        where: jax.Array | bool = True,
    ) -> Data:
        where = jnp.asarray(where, bool)
        at = jnp.asarray(qpos, jnp.float32), jnp.asarray(qvel, jnp.float32)
        return unpack(*start(where, where, *at, *leaves(params)))

    def step(params: dict[str, jax.Array], data: Data, ctrl: jax.Array) -> Data:
        ctrl = jnp.asarray(ctrl, jnp.float32)
        return unpack(*call(engine.step, data.state, ctrl, *leaves(params)))

    dt = substeps * float(model.opt.timestep)
    return Physics(model, "native", params, reset, step, dt)


def _stage(model: mujoco.MjModel, fields: tuple[str, ...]) -> mujoco.mjtStage:
    """How much of the forward pass the fields need at the new state."""
    derived = set(fields) - _STATE
    late = derived & _ACCELERATION
    if "sensordata" in derived and (model.sensor_needstage == _STAGE.mjSTAGE_ACC).any():
        late.add("sensordata")
    if late:
        return _STAGE.mjSTAGE_ACC
    return _STAGE.mjSTAGE_VEL if derived else _STAGE.mjSTAGE_NONE


def _changing(model: mujoco.MjModel) -> int:
    """How many numbers at the start of a state row a step can change.

    The user's inputs (controls, applied forces, mocap, ...) come last. Controls are given anew to
    every step and nothing here sets the others, so they need not travel; plugins' state does.
    """
    state = mujoco.mjtState
    whole = state.mjSTATE_INTEGRATION.value
    before_inputs = whole & (state.mjSTATE_CTRL.value - 1)  # components lie in the order of bits
    return mujoco.mj_stateSize(model, whole if model.npluginstate else before_inputs)


class _Worker:
    """A Batch and live views of it. Keeps nothing between calls but allocations."""

    def __init__(self, engine: "_Engine", rows: int) -> None:
        self.batch: Any
        if engine.looped:
            self.batch = Loop(engine.model, rows, engine.threads, lagged=engine.lagged)
        else:
            self.batch = Batch(engine.model, rows, engine.threads)
        self.bits = self.batch.state[:, : engine.numbers].view(np.uint32)
        self.qpos, self.qvel, self.ctrl = map(self.batch.bind, ("qpos", "qvel", "ctrl"))
        self.outputs = [self.qpos, self.qvel, *map(self.batch.bind, engine.fields)]
        self.expanded = [self.batch.expand(name) for name in engine.varying]
        self.leaves: list[np.ndarray] = []

    def run(self, call: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """Rows that MuJoCo gave up on; the others ran to completion."""
        self.batch.warning[:] = 0
        with contextlib.suppress(SimulationError):  # `status` says which rows
            call(*args, **kwargs)
        failed = self.batch.status != 0
        return failed | self.batch.warning[:, _UNSTABLE, 1].any(axis=1)


class _Engine:
    """The host side: NumPy arrays in, NumPy arrays out, any number of leading axes."""

    def __init__(
        self,
        model: mujoco.MjModel,
        substeps: int,
        fields: tuple[str, ...],
        varying: tuple[str, ...],
        lagged: bool,
        threads: int,
    ) -> None:
        self.model, self.fields, self.varying = model, fields, varying
        self.substeps, self.lagged = substeps, lagged
        self.stage = int(_STAGE.mjSTAGE_NONE if lagged else _stage(model, fields))
        allowed = getattr(os, "sched_getaffinity", None)  # Linux only
        cores = len(allowed(0)) if allowed else os.cpu_count() or 1
        self.threads = threads or max(1, cores // jax.local_device_count())
        self.nominal = {name: nominal(model, name) for name in varying}
        self.looped = bool(FIELDS & set(fields))
        self.derives = any(  # set_const is also what hands values to a Loop
            self.looped or name in mujoco.MjModel._setconst_inputs or name.startswith("opt.")
            for name in varying
        )
        self.numbers = _changing(model)
        self.free: dict[int, list[_Worker]] = {}
        one = _Worker(self, 1)
        self.width = one.bits.shape[1]
        names = ["_qpos", "_qvel", *fields]
        self.shapes = {name: out.shape[1:] for name, out in zip(names, one.outputs)}
        self.packed = sum(map(math.prod, self.shapes.values())) + 1
        everyone = np.zeros(1, np.int32)
        one.batch.reset(everyone, stage=int(_STAGE.mjSTAGE_NONE))
        one.batch.forward(everyone)
        self.rest = one.bits.copy(), np.zeros((1, self.packed), np.float32)
        self._pack(one, self.rest[1])

    def step(self, new: Any, packed: Any, rows: Any, ctrl: Any, *leaves: Any) -> None:
        """Step every row of `rows`; `new` and `packed` receive the result."""
        n = math.prod(rows.shape[:-1])
        new, packed = new.reshape(n, -1), packed.reshape(n, -1)
        worker = self._take(n)
        worker.bits[:] = rows.reshape(n, -1)
        worker.ctrl[:] = ctrl.reshape(n, self.model.nu)
        failed = self._write(worker, n, leaves)
        failed |= worker.run(worker.batch.step, nstep=self.substeps, stage=self.stage)
        new[:] = worker.bits
        self._pack(worker, packed)
        self.free[n].append(worker)
        failed |= ~np.isfinite(packed).all(axis=1)
        failed |= ~np.isfinite(new.view(np.float64)).all(axis=1)
        self._give_up(failed, new, packed)

    def reset(self, new: Any, packed: Any, where: Any, qpos: Any, qvel: Any, *leaves: Any) -> None:
        """Rest states with these positions and velocities, in the rows that want one."""
        n = where.size
        new, packed = new.reshape(n, -1), packed.reshape(n, -1)
        worker = self._take(n)
        ids = np.flatnonzero(where).astype(np.int32)
        worker.batch.reset(ids, stage=int(_STAGE.mjSTAGE_NONE))
        worker.qpos[ids] = qpos.reshape(n, -1)[ids]
        worker.qvel[ids] = qvel.reshape(n, -1)[ids]
        failed = self._write(worker, n, leaves)
        failed |= worker.run(worker.batch.forward, ids)
        new[:], packed[:] = 0, 0
        new[ids] = worker.bits[ids]
        few = np.zeros((len(ids), self.packed), np.float32)
        self._pack(worker, few, ids)
        packed[ids] = few
        self.free[n].append(worker)
        failed = where.reshape(n) & (failed | ~np.isfinite(packed).all(axis=1))
        self._give_up(failed, new, packed)

    def _give_up(self, failed: np.ndarray, rows: np.ndarray, packed: np.ndarray) -> None:
        """Put what failed at rest, and say so."""
        if failed.any():
            rows[failed], packed[failed] = self.rest
        packed[:, -1] = failed

    def _take(self, rows: int) -> _Worker:
        """A worker that no other call is using."""
        free = self.free.setdefault(rows, [])
        try:
            return free.pop()
        except IndexError:
            return _Worker(self, rows)

    def _pack(
        self, worker: _Worker, packed: np.ndarray, ids: np.ndarray | slice = slice(None)
    ) -> None:
        """The outputs side by side: few big arrays cross into JAX faster than many."""
        at = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for out in worker.outputs:
                flat = out[ids].reshape(len(packed), -1)
                packed[:, at : at + flat.shape[1]] = flat
                at += flat.shape[1]
        packed[:, at] = 0

    def _write(self, worker: _Worker, n: int, leaves: tuple[Any, ...]) -> np.ndarray:
        """Write the varying model fields; derive constants from them where they changed."""
        values = [np.asarray(leaf) for leaf in leaves]
        self._expand(worker, values)
        changed = self.derives and not (
            worker.leaves and all(map(np.array_equal, values, worker.leaves))
        )
        if not changed:
            return np.zeros(n, bool)
        failed = worker.run(worker.batch.set_const)
        worker.leaves = [] if failed.any() else [value.copy() for value in values]
        self._expand(worker, values)  # a varying field may itself be one that is derived
        return failed

    def _expand(self, worker: _Worker, values: list[np.ndarray]) -> None:
        """Set model fields; a nominal float32 value stands for its float64 original."""
        for value, exact, out in zip(values, self.nominal.values(), worker.expanded):
            value = value.reshape(out.shape)
            out[:] = np.where(value == exact.astype(np.float32), exact, value)
