"""Many robots stepped one by one, for the fields that mj_step leaves out.

`mujoco.batch.Batch` never calls mj_rnePostConstraint, which computes external contact forces.
Going through `Batch.get_data` would copy each robot's whole MjData; one MjData per thread, loaded
with a row at a time, costs a fifth of that.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mujoco
import numpy as np

FIELDS = frozenset({"cacc", "cfrc_ext", "cfrc_int"})  # what mj_rnePostConstraint computes
_ROW = mujoco.mjtState.mjSTATE_INTEGRATION.value


class Loop:
    """As much of `mujoco.batch.Batch` as the native backend uses, plus `FIELDS`.

    Args:
        model: the model.
        rows: number of robots.
        threads: to run them on.
        lagged: leave `FIELDS` at zero on reset, as mj_forward does.
    """

    def __init__(self, model: mujoco.MjModel, rows: int, threads: int, *, lagged: bool) -> None:
        self.model, self.lagged = model, lagged
        self.models = [model] * rows  # one each only where model fields vary
        self.data = [mujoco.MjData(model) for _ in range(min(threads, rows))]
        self.threads = ThreadPoolExecutor(len(self.data))
        mujoco.mj_resetData(model, self.data[0])
        rest = np.empty(mujoco.mj_stateSize(model, _ROW))
        mujoco.mj_getState(model, self.data[0], rest, _ROW)
        self.state = np.tile(rest, (rows, 1))
        self.rest = rest
        self.status = np.zeros(rows, np.int32)
        self.warning = np.zeros((rows, int(mujoco.mjtWarning.mjNWARNING), 2), np.int32)
        self.outputs: dict[str, np.ndarray] = {}
        self.expanded: dict[str, np.ndarray] = {}

    def bind(self, name: str) -> np.ndarray:
        """A live [rows, ...] array of an MjData field: the state's own are views of the rows."""
        like = np.asarray(getattr(self.data[0], name))
        kind = "WARMSTART" if name == "qacc_warmstart" else name.upper()
        component = getattr(mujoco.mjtState, f"mjSTATE_{kind}", None)
        if component is not None:
            start = mujoco.mj_stateSize(self.model, _ROW & (component.value - 1))
            return self.state[:, start : start + like.size].reshape(len(self.state), *like.shape)
        return self.outputs.setdefault(name, np.zeros((len(self.state), *like.shape), like.dtype))

    def expand(self, name: str) -> np.ndarray:
        """A [rows, ...] array of a model field, which takes effect at the next `set_const`."""
        if self.models[0] is self.model:
            self.models = [copy.copy(self.model) for _ in self.models]
        like = np.asarray(_value(self.model, name))
        return self.expanded.setdefault(name, np.tile(like, (len(self.models), *[1] * like.ndim)))

    def set_const(self) -> None:
        """Write the expanded fields into the models, and derive constants from them."""

        def one(data: mujoco.MjData, i: int) -> None:
            model = self.models[i]
            self._assign(i)
            mujoco.mj_setConst(model, data)
            self._assign(i)  # an expanded field may itself be one that is derived

        self._each(range(len(self.state)), one)

    def reset(self, ids: np.ndarray, stage: int) -> None:  # noqa: ARG002
        """Put rows back to the model's defaults; `stage` has to be mjSTAGE_NONE."""
        self.state[ids] = self.rest

    def forward(self, ids: np.ndarray) -> None:
        """mj_forward of some rows."""

        def one(data: mujoco.MjData, i: int) -> None:
            mujoco.mj_resetData(self.models[i], data)
            mujoco.mj_setState(self.models[i], data, self.state[i], _ROW)
            mujoco.mj_forward(self.models[i], data)
            if not self.lagged:
                mujoco.mj_rnePostConstraint(self.models[i], data)
            mujoco.mj_getState(self.models[i], data, self.state[i], _ROW)

        self._each(ids, one)

    def step(self, nstep: int, stage: int) -> None:
        """Advance every row by `nstep` mj_steps; any `stage` but none is mj_forward after them."""
        current = stage != mujoco.mjtStage.mjSTAGE_NONE.value

        def one(data: mujoco.MjData, i: int) -> None:
            model = self.models[i]
            mujoco.mj_setState(model, data, self.state[i], _ROW)
            mujoco.mj_step(model, data, nstep)
            mujoco.mj_getState(model, data, self.state[i], _ROW)
            if current:
                mujoco.mj_forward(model, data)
            mujoco.mj_rnePostConstraint(model, data)

        self._each(range(len(self.state)), one)

    def _each(self, ids: Any, one: Callable[[mujoco.MjData, int], None]) -> None:
        """Run `one` on every row of `ids`; threads take the next row as they come free."""
        rest = iter(ids)
        list(self.threads.map(lambda data: self._work(data, rest, one), self.data))

    def _work(
        self, data: mujoco.MjData, ids: Iterator[int], one: Callable[[mujoco.MjData, int], None]
    ) -> None:
        """A thread's share of the rows, with its own MjData."""
        for i in ids:
            data.warning.number[:] = 0
            before = self.state[i].copy()
            try:
                one(data, i)
                self.status[i] = 0
            except mujoco.FatalError:
                self.status[i] = 1
                self.state[i] = before
                mujoco.mj_resetData(self.model, data)
            self.warning[i, :, 1] = data.warning.number
            for name, out in self.outputs.items():
                out[i] = getattr(data, name)

    def _assign(self, i: int) -> None:
        """Write row `i` of the expanded fields into its model."""
        for name, values in self.expanded.items():
            like = _value(self.models[i], name)
            if isinstance(like, np.ndarray):
                like[...] = values[i]
            else:
                setattr(self.models[i].opt, name.removeprefix("opt."), float(values[i]))


def _value(model: mujoco.MjModel, name: str) -> Any:
    """A model field, "opt.<name>" for MjOption's."""
    return getattr(model.opt if name.startswith("opt.") else model, name.removeprefix("opt."))
