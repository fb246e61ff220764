"""The limit of native physics: `mujoco.batch.Batch` in a bare loop, with random controls."""

from collections.abc import Callable

import mujoco
import numpy as np
from mujoco.batch import Batch

from jrl.envs import humanoid_fast

NOISE = 0.01  # of the starts, as in the humanoid tasks
STD = 0.6  # of the controls in units of half their range, as an untrained policy's


def humanoids(
    model: mujoco.MjModel, num_envs: int, *, substeps: int, threads: int = 0, steps: int = 32
) -> Callable[[], int]:
    """A function that steps humanoids `steps` times, restarts the fallen, and counts env-steps.

    It binds the fields that `humanoid_fast` reads and draws its controls beforehand: nothing but
    physics is timed.
    """
    batch = Batch(model, num_envs, threads)
    qpos, qvel, ctrl, *_ = map(batch.bind, ("qpos", "qvel", "ctrl", *humanoid_fast.FIELDS))
    rng = np.random.default_rng(0)
    low, high = model.actuator_ctrlrange.T
    bank = np.clip(STD * rng.standard_normal((256, num_envs, model.nu)), -1, 1)
    bank = (low + high) / 2 + bank * (high - low) / 2
    clock = 0

    def restart(ids: np.ndarray) -> None:
        batch.reset(ids, stage=0)
        qpos[ids] = model.qpos0 + rng.uniform(-NOISE, NOISE, (len(ids), model.nq))
        qvel[ids] = rng.uniform(-NOISE, NOISE, (len(ids), model.nv))
        batch.forward(ids)

    def work() -> int:
        nonlocal clock
        for _ in range(steps):
            ctrl[:] = bank[clock % len(bank)]
            clock += 1
            batch.step(nstep=substeps, stage=0)
            fallen = np.flatnonzero((qpos[:, 2] <= 1.0) | (qpos[:, 2] >= 2.0)).astype(np.int32)
            if fallen.size:
                restart(fallen)
        return steps * num_envs

    restart(np.arange(num_envs, dtype=np.int32))
    return work
