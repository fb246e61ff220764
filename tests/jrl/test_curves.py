import json
import math
import sys

import imageio.v3 as iio
import numpy as np
import pytest

from jrl import curves


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path):
    """A run of 60 updates: nothing ends in the first 3, an evaluation at the end."""
    rows = [
        {
            "update": i, "env_steps": 100 * i, "time/seconds": 0.5 * i,
            "time/env_steps_per_second": 200.0 + i % 3,
            "episode/return": None if i < 3 else 50 * (1 - math.exp(-i / 20)),
            "episode/length": None if i < 3 else 10.0 + i,
            "loss/policy": -0.01, "loss/value": 1 / (1 + i), "policy/kl": 0.01,
            "reward/alive": 1.0, "policy/entropy": 2.0,
        }
        for i in range(60)
    ]  # fmt: skip
    rows.append({"update": 59, "env_steps": 5900, "time/seconds": 31.0, "eval/return": 60.0})
    return write(tmp_path / "metrics.jsonl", rows)


def test_draws_a_picture(run, tmp_path):
    curves.plot(run, tmp_path / "curves.png")
    image = iio.imread(tmp_path / "curves.png")[..., :3]
    assert image.shape == (990, 1518, 3)  # 3 x 3 panels of 4.6 x 3 inches at 110 dots
    colors = {tuple(c) for c in np.unique(image.reshape(-1, 3), axis=0).tolist()}
    for wanted in curves.COLORS[:2]:  # the lines of episode/return and eval/return
        assert tuple(int(wanted[i : i + 2], 16) for i in (1, 3, 5)) in colors
    assert "matplotlib.pyplot" not in sys.modules


def test_panels_of_what_there_is(run):
    panels = {title: keys for title, _, keys in curves._panels(curves.read(run))}
    assert panels == {
        "return by env steps": ["episode/return", "eval/return"],
        "return by time": ["episode/return", "eval/return"],
        "episode length": ["episode/length"],
        "reward terms": ["reward/alive"],
        "losses": ["loss/policy", "loss/value"],
        "KL divergence": ["policy/kl"],
        "entropy": ["policy/entropy"],
        "env steps per second": ["time/env_steps_per_second"],
    }


def test_missing_metrics_are_left_out(tmp_path):
    run = write(tmp_path / "m.jsonl", [{"update": 1, "env_steps": 5, "loss/value": 1.0}])
    curves.plot(run, tmp_path / "c.png")
    assert iio.imread(tmp_path / "c.png").shape[:2] == (330, 506)  # one panel


def test_nothing_to_draw(tmp_path):
    for rows in ([], [{"update": 1, "env_steps": 5, "episode/return": None}]):
        with pytest.raises(ValueError, match="no metrics to draw"):
            curves.plot(write(tmp_path / "m.jsonl", rows), tmp_path / "c.png")


def test_lines_skip_rows_without_a_value(tmp_path):
    rows = [
        {"env_steps": 10, "time/seconds": 60.0, "a": None},
        {"env_steps": 20, "time/seconds": 90.0, "a": 4.0},
        {"env_steps": 20, "time/seconds": 99.0},
        {"env_steps": 30, "time/seconds": 120.0, "a": 5},
    ]
    x, y = curves._line(rows, "env_steps", "a")
    assert (x.tolist(), y.tolist()) == ([20.0, 30.0], [4.0, 5.0])
    minutes, _ = curves._line(rows, "time/seconds", "a")
    assert minutes.tolist() == [1.5, 2.0]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"env_steps": 1}\n{"env_steps": 2, "los')
    assert curves.read(path) == [{"env_steps": 1}]
    path.write_text('{"env_steps": 1, "lo\n{"env_steps": 2}\n')
    with pytest.raises(json.JSONDecodeError):  # damage elsewhere is not hidden
        curves.read(path)


def test_smoothing():
    # 80 values: 80 // 40 = 2 neighbours on each side, fewer at the ends
    values = np.zeros(80)
    values[0], values[40] = 3.0, 5.0
    smooth = curves._smooth(values)
    assert smooth[0] == 1.0  # 3 / 3
    assert smooth[1] == 0.75  # 3 / 4
    np.testing.assert_allclose(smooth[37:44], [0, 1, 1, 1, 1, 1, 0], atol=1e-12)  # 5 / 5
    np.testing.assert_allclose(curves._smooth(np.full(100, 2.5)), 2.5)
