import io
import json
import math
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jrl.config import Config, EnvSection, Log, Train
from jrl.logs import Logger, run_dir


@pytest.fixture
def config(tmp_path):
    return Config(name="run", log=Log(root=str(tmp_path), interval=0.0), train=Train(1000))


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), force_terminal=False, width=60, highlight=False)


def rows(config):
    lines = (run_dir(config) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_run_dir(config, tmp_path):
    assert run_dir(config) == tmp_path / "run"
    nameless = Config(env=EnvSection(name="ant"))
    assert run_dir(nameless).as_posix() == "runs/ant-ppo"


def test_rows_hold_what_was_logged(config, screen):
    with Logger(config, screen) as logger:
        values = {"loss/value": jnp.float32(0.25), "a/np": np.float64(2.5), "a/int": 3}
        logger.log(values, update=1, env_steps=100)
        # a row is on disk before the logger is closed
        (row,) = rows(config)
    assert {k: v for k, v in row.items() if not k.startswith("time/")} == {
        "update": 1, "env_steps": 100, "loss/value": 0.25, "a/np": 2.5, "a/int": 3,
    }  # fmt: skip
    assert list(row)[:2] == ["update", "env_steps"]


def test_not_a_number_is_null(config, screen):
    with Logger(config, screen) as logger:
        logger.log({"x": math.nan, "y": jnp.inf, "z": np.float32(1)}, update=1, env_steps=1)
    (row,) = rows(config)
    assert (row["x"], row["y"], row["z"]) == (None, None, 1.0)


def test_throughput_leaves_out_the_first_update(config, screen, monkeypatch):
    clock = iter([0.0, 10.0, 12.0, 20.0, 24.0, 30.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    logger = Logger(config, screen)  # at 0 s
    logger.log({}, update=1, env_steps=100)  # at 10 s: compiled
    logger.log({}, update=2, env_steps=200)  # at 12 s: 100 steps in 2 s
    logger.log({"eval/return": 1.0}, update=2, env_steps=200)  # at 20 s: no steps
    logger.log({}, update=3, env_steps=400)  # at 24 s: 200 steps in 4 s, the evaluation apart
    logger.close()  # at 30 s
    seen = rows(config)
    assert [row["time/seconds"] for row in seen] == [10.0, 12.0, 20.0, 24.0]
    assert [row.get("time/first_update") for row in seen] == [10.0, None, None, None]
    assert [row.get("time/env_steps_per_second") for row in seen] == [None, 50.0, None, 50.0]
    said = screen.file.getvalue().splitlines()
    # (100 + 200) / (2 + 4) = 50 steps per second, and 1000 - 400 = 600 of them are left: 12 s
    assert "40.0%" in said[-2]
    assert "50 /s" in said[-2]
    assert "ETA  0:00:12" in said[-2]
    expected = "finished: 400 env-steps in 0:00:30, 50 env-steps/s, first update 10.0 s"
    assert said[-1].startswith(expected)


def test_plain_lines_show_the_last_known_return(config, screen):
    with Logger(config, screen) as logger:
        logger.log({"episode/return": 12.34, "episode/length": 56}, update=1, env_steps=10)
        logger.log({"episode/return": jnp.nan, "episode/length": jnp.nan}, update=2, env_steps=20)
    first, second, _ = screen.file.getvalue().splitlines()  # one line each, however long
    for line in (first, second):
        assert re.search(r"return +12\.3 +length +56 +eval +-", line)


def test_lines_keep_their_interval(config, screen, tmp_path):
    slow = Config(name="run", log=Log(root=str(tmp_path), interval=1000.0), train=Train(1000))
    with Logger(slow, screen) as logger:
        for update in range(5):
            logger.log({}, update=update, env_steps=update)
    assert len(rows(slow)) == 5
    assert len(screen.file.getvalue().splitlines()) == 2  # the first row, and the end


def test_terminal_gets_a_bar(config):
    screen = Console(file=io.StringIO(), force_terminal=True, width=160)
    with Logger(config, screen) as logger:
        logger.log({"episode/return": 7.5}, update=1, env_steps=250)
        logger.event("saved [1/2]")
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    for words in ("━", "25%", "return 7.5", "saved [1/2]", "finished: 250 env-steps"):
        assert words in said


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": jnp.ones(3)}, r"'loss' must be a scalar, got shape \(3,\)"),
        ({"time/rollout": 1.0}, "'time/rollout': the logger writes this name itself"),
        ({"update": 1.0}, "'update': the logger writes this name itself"),
    ],
)
def test_refuses(config, screen, metrics, message):
    with Logger(config, screen) as logger, pytest.raises(ValueError, match=message):
        logger.log(metrics, update=1, env_steps=1)
    assert not (run_dir(config) / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")]
)
def test_says_how_it_ended(config, screen, error, status):
    logger = Logger(config, screen)

    def run():
        with logger:
            logger.log({"a": 1.0}, update=1, env_steps=10)
            raise error

    with pytest.raises(error):
        run()
    logger.close("finished")  # too late, and only once
    said = screen.file.getvalue()
    assert f"{status}: 10 env-steps" in said
    assert "finished" not in said
    assert len(rows(config)) == 1


def test_a_second_logger_goes_on_in_the_same_file(config, screen):
    for update in (1, 2):
        with Logger(config, screen) as logger:
            logger.log({}, update=update, env_steps=update)
    assert [row["update"] for row in rows(config)] == [1, 2]
