import os
import re
import subprocess
import sys

import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from jrl.envs import render
from jrl.types import record

# a red ball on a rail along x, above a green floor
XML = """
<mujoco>
  <worldbody>
    <light pos="0 0 10"/>
    <camera name="above" pos="0 0 8"/>
    <geom type="plane" size="50 50 1" rgba="0 0.6 0 1"/>
    <body pos="0 0 1">
      <joint type="slide" axis="1 0 0" {limits}/>
      <geom type="sphere" size="0.5" rgba="1 0 0 1"/>
    </body>
  </worldbody>
</mujoco>
"""


def ball(limits=""):
    return mujoco.MjModel.from_xml_string(XML.format(limits=limits))


@pytest.fixture(scope="module")
def gl(tmp_path_factory):
    """Films need OpenGL."""
    try:
        render.video(ball(), np.zeros((1, 1)), tmp_path_factory.mktemp("gl") / "a.mp4", fps=30)
    except render.RenderError as error:
        pytest.skip(str(error))


def film(path, rows, model=None, **options):
    options = {"fps": 30.0, "width": 96, "height": 72} | options
    render.video(model or ball(), rows, path, **options)
    command = [get_ffmpeg_exe(), "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    frames = np.frombuffer(done.stdout, np.uint8).reshape(
        -1, options["height"], options["width"], 3
    )
    return frames.astype(int), float(re.search(rb"([0-9.]+) fps", done.stderr)[1])


def red(frame):
    """Mean column and row of the ball, and how many pixels it has."""
    rows, columns = np.nonzero((frame[..., 0] > 100) & (frame[..., 1] < 60))
    return columns.mean(), rows.mean(), len(rows)


@pytest.mark.usefixtures("gl")
class TestFilm:
    def test_is_in_real_time(self, tmp_path):
        # 100 rows at 100 a second are one second of film: every 3rd row, at 33.3 a second
        frames, fps = film(tmp_path / "a.mp4", np.zeros((100, 1)), fps=100.0)
        assert frames.shape == (34, 72, 96, 3)  # rows 0, 3, ..., 99
        assert fps == pytest.approx(100 / 3, rel=1e-3)
        assert os.listdir(tmp_path) == ["a.mp4"]

    def test_slow_environments_keep_every_row(self, tmp_path):
        frames, fps = film(tmp_path / "a.mp4", np.zeros((7, 1)), fps=10.0)
        assert (len(frames), fps) == (7, 10.0)

    def test_follows_a_robot_that_can_leave(self, tmp_path):
        rows = np.linspace(0, 20, 10)[:, None]  # 20 m, 40 times its radius
        frames, _ = film(tmp_path / "new" / "a.mp4", rows)
        for frame in (frames[0], frames[-1]):
            column, row, size = red(frame)
            assert abs(column - 48) < 10
            assert abs(row - 36) < 12
            assert size > 100

    def test_shows_every_place_of_one_that_can_not(self, tmp_path):
        rows = np.linspace(-2, 2, 10)[:, None]
        frames, _ = film(tmp_path / "a.mp4", rows, ball('limited="true" range="-2 2"'))
        columns = [red(frame)[0] for frame in frames]
        assert np.all(np.diff(columns) > 0)  # it crosses the picture, and the camera stays
        assert columns[0] < 40 < 56 < columns[-1]
        assert min(red(frame)[2] for frame in frames) > 20

    def test_a_camera_by_name(self, tmp_path):
        # it looks down from 8 m, as MuJoCo's cameras do by default, and stays: +x is to the right
        frames, _ = film(tmp_path / "a.mp4", np.array([[-2.0], [2.0]]), camera="above")
        left, right = red(frames[0]), red(frames[-1])
        assert left[0] < 40 < 56 < right[0]
        assert abs(left[1] - 36) < 3

    def test_size(self, tmp_path):
        frames, _ = film(tmp_path / "a.mp4", np.zeros((1, 1)), width=1000, height=722)
        assert frames.shape[1:] == (722, 1000, 3)  # larger than MuJoCo's own limit of 640 x 480


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.zeros((5, 2)), {}, r"\[T, nq = 1\], got shape \(5, 2\)"),
        (np.zeros(5), {}, r"got shape \(5,\)"),
        (np.zeros((0, 1)), {}, r"got shape \(0, 1\)"),
        (np.full((5, 1), np.nan), {}, "must be finite"),
        (np.zeros((5, 1)), {"width": 97}, "97 x 72"),
        (np.zeros((5, 1)), {"fps": 0.0}, "fps must be > 0"),
        (np.zeros((5, 1)), {"camera": "abov"}, "no camera 'abov'. It has: above"),
    ],
)
def test_refuses(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=message):
        film(tmp_path / "a.mp4", rows, **options)


def test_without_opengl_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    with pytest.raises(render.RenderError) as error:
        film(tmp_path / "a.mp4", np.zeros((1, 1)))
    assert "apt-get install libegl1 libgl1 libosmesa6" in str(error.value)
    assert "MUJOCO_GL=nonsense" in str(error.value)
    assert os.listdir(tmp_path) == []


def test_without_ffmpeg_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(render.RenderError, match="pip install imageio-ffmpeg"):
        film(tmp_path / "a.mp4", np.zeros((1, 1)))


def test_the_module_is_light():
    code = "import sys, jrl.envs.render; print('mujoco' in sys.modules, 'imageio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@record
class Physics:
    state: jnp.ndarray
    qpos: jnp.ndarray


@record
class Task:
    data: Physics
    step: int


@record
class Wrapped:
    state: object
    time: int


def test_qpos_beneath_the_wrappers():
    task = Task(Physics(jnp.zeros(9), jnp.arange(3.0)), 0)
    for state in (task, Wrapped(task, 1), Wrapped(Wrapped(task, 1), 2)):
        assert render.qpos(state).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(TypeError, match="Wrapped holds no MuJoCo qpos"):
        render.qpos(Wrapped({"x": 1}, 0))
