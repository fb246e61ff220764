"""Film a robot: positions over time to an mp4, without a display.

MuJoCo picks its OpenGL library when it is first imported, and a broken driver can take the process
down. So the pictures are made by a process of their own, which is this file run as a script.
"""

import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jrl.checks import UnavailableError

if TYPE_CHECKING:
    import jax
    import mujoco

FPS = 30.0  # of the film, about
INSTALL = "apt-get install libegl1 libgl1 libosmesa6"


class RenderError(UnavailableError):
    """No picture can be made here; the text says what to install."""


def video(
    model: "mujoco.MjModel",
    qpos: np.ndarray,
    path: str | Path,
    *,
    fps: float,
    camera: str | None = None,
    width: int = 480,
    height: int = 360,
) -> None:
    """Write an mp4 of the robot moving through the positions `qpos` [T, nq], in real time.

    Args:
        model: what to film.
        qpos: one row of joint positions for each environment step.
        path: the file to write; its folder is made.
        fps: rows per second, `1 / spec.dt`. The film leaves rows out to show about 30 a second.
        camera: a camera of the model by name; None: one that follows a robot that can move away.
        width: of the film in pixels, even.
        height: of the film in pixels, even.

    Raises:
        ValueError: `qpos` has another shape or isn't finite, or a size or rate makes no film.
        RenderError: no OpenGL, or no ffmpeg.
    """
    import mujoco

    rows = np.asarray(qpos, np.float64)
    if rows.ndim != 2 or rows.shape[1] != model.nq or not len(rows) or not np.isfinite(rows).all():
        raise ValueError(f"qpos must be finite, [T, nq = {model.nq}], got shape {rows.shape}.")
    if not (fps > 0 and width > 0 and height > 0 and width % 2 == 0 and height % 2 == 0):
        raise ValueError(f"fps must be > 0 and sizes even, got {fps}, {width} x {height}.")
    if camera is not None and mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera) < 0:
        names = [model.camera(i).name for i in range(model.ncam)]
        raise ValueError(
            f"the model has no camera {camera!r}. It has: {', '.join(names) or 'none'}."
        )
    _need_ffmpeg()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    keep = max(1, round(fps / FPS))
    with tempfile.TemporaryDirectory() as folder:
        mujoco.mj_saveModel(model, f"{folder}/model.mjb", None)
        np.save(f"{folder}/qpos.npy", rows[::keep])
        size = [str(width), str(height)]
        _run([folder, str(Path(path).absolute()), str(fps / keep), *size, camera or ""])


def watch(model: "mujoco.MjModel", qpos: np.ndarray, *, fps: float) -> None:
    """Show the robot moving through `qpos` [T, nq] in MuJoCo's viewer, again until it is closed.

    Raises:
        RenderError: no display.
    """
    import mujoco

    if sys.platform == "linux" and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise RenderError(
            "no viewer: this machine has no display (DISPLAY is not set). Film it instead: "
            "leave --viewer away."
        )
    import mujoco.viewer

    data = mujoco.MjData(model)
    with mujoco.viewer.launch_passive(model, data) as viewer:
        for row in itertools.cycle(np.asarray(qpos, np.float64)):
            if not viewer.is_running():
                return
            data.qpos[:] = row
            mujoco.mj_forward(model, data)
            viewer.sync()
            time.sleep(1.0 / fps)


def qpos(state: Any) -> "jax.Array":
    """The joint positions [..., nq] in an environment's state, beneath whatever wraps it.

    Raises:
        TypeError: the environment is not a MuJoCo one.
    """
    inner = state
    while not hasattr(inner, "qpos"):  # wrappers call what they hold `state`, tasks `data`
        inner = getattr(inner, "data", None) or getattr(inner, "state", None)
        if inner is None:
            raise TypeError(f"the environment state {type(state).__name__} holds no MuJoCo qpos.")
    return inner.qpos


def _need_ffmpeg() -> None:
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise RenderError(
            f"no film: {error}. Install it: pip install imageio-ffmpeg, or apt-get install ffmpeg."
        ) from error


def _run(args: list[str]) -> None:
    """Film in a process of its own, with the first OpenGL that works."""
    chosen = os.environ.get("MUJOCO_GL")
    backends = ["egl", "osmesa"] if sys.platform == "linux" else [""]
    failures = []
    for backend in [chosen] if chosen else backends:
        env = {**os.environ, "MUJOCO_GL": backend}
        env.pop("PYOPENGL_PLATFORM", None)  # another library may have set it for itself
        command = [sys.executable, "-P", __file__, *args]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        failures.append(f"  MUJOCO_GL={backend}: {said[-1]}")
    raise RenderError(
        f"no film: MuJoCo can't draw here without a display. Install OpenGL: {INSTALL}\n"
        + "\n".join(failures)
    )


# --- the process that draws ---------------------------------------------------------------------


def _main(folder: str, path: str, fps: str, width: str, height: str, camera: str) -> None:
    import imageio_ffmpeg
    import mujoco

    model = mujoco.MjModel.from_binary_path(f"{folder}/model.mjb")
    size = (int(width), int(height))
    part = str(Path(path).with_suffix(".part.mp4"))
    writer = imageio_ffmpeg.write_frames(
        part, size, fps=float(fps), macro_block_size=2, quality=7, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in _frames(model, np.load(f"{folder}/qpos.npy"), size, camera):
        writer.send(frame)
    writer.close()
    os.replace(part, path)


def _frames(
    model: "mujoco.MjModel", rows: np.ndarray, size: tuple[int, int], camera: str
) -> Iterator[np.ndarray]:
    import mujoco

    width, height = size
    model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
    model.vis.global_.offheight = max(height, model.vis.global_.offheight)
    model.vis.quality.offsamples = 0  # without a GPU, smooth edges take three times as long
    data = mujoco.MjData(model)
    view = camera or _whole_robot(model, data, rows)
    with mujoco.Renderer(model, height, width) as renderer:
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            renderer.scene.flags[flag] = False  # they cost most of the time without a GPU
        for row in rows:
            data.qpos[:] = row
            mujoco.mj_fwdPosition(model, data)
            renderer.update_scene(data, view)
            yield np.ascontiguousarray(renderer.render())


def _whole_robot(
    model: "mujoco.MjModel", data: "mujoco.MjData", rows: np.ndarray
) -> "mujoco.MjvCamera":
    """A camera that follows a robot that can leave, or shows every place of one that can't."""
    import mujoco

    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    body = _roaming(model)
    robot = np.flatnonzero(model.geom_bodyid > 0)  # geoms of the world are its floor and walls
    if not len(robot):
        return camera
    centers = []
    for row in rows[:1] if body else rows[:: max(1, len(rows) // 20)]:
        data.qpos[:] = row
        mujoco.mj_kinematics(model, data)
        centers.append(data.geom_xpos[robot])
    places = np.concatenate(centers)
    middle = (places.min(0) + places.max(0)) / 2
    radius = np.linalg.norm(places - middle, axis=1).max() + model.geom_rbound[robot].max()
    camera.lookat[:] = middle
    camera.azimuth, camera.elevation = (110.0, -15.0) if body else (90.0, -30.0)
    room = 1.3 if body else 1.0
    camera.distance = room * radius / math.sin(math.radians(model.vis.global_.fovy) / 2)
    if body:
        camera.type, camera.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, body
    return camera


def _roaming(model: "mujoco.MjModel") -> int:
    """The root body that can leave the place, 0 where there is none."""
    import mujoco

    for joint in range(model.njnt):
        body, kind = model.jnt_bodyid[joint], model.jnt_type[joint]
        slides = kind == mujoco.mjtJoint.mjJNT_SLIDE and not model.jnt_limited[joint]
        if model.body_parentid[body] == 0 and (kind == mujoco.mjtJoint.mjJNT_FREE or slides):
            return int(body)
    return 0


if __name__ == "__main__":
    _main(*sys.argv[1:])
