import contextlib
import dataclasses
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jrl import writers
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


@pytest.fixture
def at(monkeypatch):
    """Set the clock to so many seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_throughput_leaves_out_the_first_update(config, screen, at):
    logger = Logger(config, screen)
    for seconds, update, env_steps, metrics in (
        (10.0, 1, 100, {}),  # compiled
        (12.0, 2, 200, {}),  # 100 steps in 2 s
        (20.0, 2, 200, {"eval/return": 1.0}),  # no steps
        (24.0, 3, 400, {}),  # 200 steps in 4 s, the evaluation apart
    ):
        at(seconds)
        logger.log(metrics, update=update, env_steps=env_steps)
    at(30.0)
    logger.close()
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


def test_the_clock_goes_on_where_the_last_kept_row_stopped(config, screen, at):
    with Logger(config, screen) as logger:
        for update in (1, 2, 3):
            at(10.0 * update)
            logger.log({}, update=update, env_steps=100 * update)
    at(1000.0)
    with Logger(config, screen, resume_at=2) as logger:
        for update, seconds in ((3, 1005.0), (4, 1007.0)):
            at(seconds)
            logger.log({}, update=update, env_steps=100 * update)
    # update 2 was at 20 s, and the second part began at 1000 s: 20 + 5 and 20 + 7
    assert [row["time/seconds"] for row in rows(config)] == [10.0, 20.0, 25.0, 27.0]
    assert [row.get("time/first_update") for row in rows(config)] == [10.0, None, 5.0, None]
    assert rows(config)[-1]["time/env_steps_per_second"] == 50.0  # 100 steps in 2 s
    assert "finished: 400 env-steps in 0:00:27, 50 env-steps/s" in screen.file.getvalue()


def test_it_knows_what_its_own_time_was(config, at):
    class Slow(io.StringIO):
        def write(self, text):
            at(time.perf_counter() + 0.25)
            return super().write(text)

    logger = Logger(config, Console(file=Slow(), force_terminal=False))
    at(10.0)
    logger.log({}, update=1, env_steps=1)  # prints a line
    at(20.0)
    logger.event("x")
    at(30.0)
    logger.close()
    writes = len(logger._console.file.getvalue().splitlines())
    assert writes == 3
    assert logger.seconds == 0.25 * 3


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


# --- going on with a run ---


def play(config, screen, updates, *, resume_at=None, stop_at=math.inf):
    """Log a run of which every number follows from the update."""
    with Logger(config, screen, resume_at=resume_at) as logger:
        for update in updates:
            metrics = {"loss": 1.0 / update, "episode/return": math.nan if update % 3 else update}
            logger.log(metrics, update=update, env_steps=100 * update)
            if update % 4 == 0:
                logger.log({"eval/return": update}, update=update, env_steps=100 * update)
            if update == stop_at:
                raise RuntimeError("crash")


def timeless(config):
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in rows(config)]


def test_a_resumed_run_has_the_record_of_an_uninterrupted_one(config, screen):
    through = dataclasses.replace(config, name="through")
    play(through, screen, range(1, 31))
    with pytest.raises(RuntimeError, match="crash"):
        play(config, screen, range(1, 31), stop_at=23)
    play(config, screen, range(21, 31), resume_at=20)
    assert timeless(config) == timeless(through)
    # updates 21, 22 and 23 had been written; the evaluation of update 20 stays
    assert "3 rows after update 20 are dropped" in screen.file.getvalue()


@pytest.mark.parametrize(
    "tail", [b'{"update": 3, "lo', b"\xff\xfe{", b"[3]\n", b'{"no": 1}\n', b"", b"\n"]
)
def test_a_line_that_is_no_row_is_dropped_when_a_run_goes_on(config, screen, tail):
    path = run_dir(config) / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"update": 1, "env_steps": 100}\n{"update": 2, "env_steps": 200}\n' + tail)
    play(config, screen, [3], resume_at=2)
    assert [row["update"] for row in rows(config)] == [1, 2, 3]
    assert "dropped" not in screen.file.getvalue()


def test_a_row_that_lacks_only_its_line_end_is_kept(config, screen):
    path = run_dir(config) / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"update": 1, "env_steps": 100}')
    play(config, screen, [2], resume_at=1)
    assert [row["update"] for row in rows(config)] == [1, 2]


def test_going_on_without_a_record_begins_one(config, screen):
    play(config, screen, [3], resume_at=2)
    assert [row["update"] for row in rows(config)] == [3]


# --- what can't be written ---


CHILD = """
import sys
from jrl.config import Config, Log
from jrl.logs import Logger

with Logger(Config(name="run", log=Log(root=sys.argv[1], interval=1e9))) as logger:
    for update in range(1, 10**9):
        logger.log({"x" * 50: 1.0}, update=update, env_steps=update)
        print(update, flush=True)
"""


def test_kill_loses_at_most_the_row_being_written(config, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    for _ in range(50):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    told = 50 + sum(line.strip().isdecimal() for line in child.communicate()[0].splitlines())
    lines = (run_dir(config) / "metrics.jsonl").read_text().splitlines()
    whole = lines if lines[-1].endswith("}") else lines[:-1]
    assert [json.loads(line)["update"] for line in whole] == list(range(1, len(whole) + 1))
    assert told - 1 <= len(whole) <= told + 1  # the last number may have been cut off as well


@contextlib.contextmanager
def files_end_at(size):
    """No file can grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_rows_and_nothing_else(config, screen):
    logger = Logger(config, screen)
    path = run_dir(config) / "metrics.jsonl"

    def log(*updates):
        for update in updates:
            logger.log({"a": 0.5}, update=update, env_steps=update)

    log(1, 2)
    whole = path.stat().st_size
    with files_end_at(whole + 10):
        log(3, 4)
        assert path.stat().st_size == whole + 10  # the beginning of a row
    log(5)  # there is room again
    logger.close()
    assert [row["update"] for row in rows(config)] == [1, 2, 5]
    said = screen.file.getvalue()
    assert said.count("can't write") == 1
    assert "Training goes on" in said
    assert f"2 rows are missing in {path}" in said


def test_a_full_disk_from_the_start(config, screen):
    folder = run_dir(config)
    folder.mkdir()
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    play(config, screen, [1, 2, 3])
    said = screen.file.getvalue()
    assert said.count("No space left on device. Training goes on") == 1
    assert "3 rows are missing" in said


def test_a_console_on_a_full_disk_is_no_reason_to_stop(config):
    with open("/dev/full", "w") as full:
        play(config, Console(file=full, force_terminal=False), [1, 2, 3])
        with contextlib.suppress(OSError):
            full.close()
    assert [row["update"] for row in rows(config)] == [1, 2, 3]


# --- other writers ---


class Fake:
    """A writer in memory; `trouble(fake)` is called before each write."""

    def __init__(self, trouble=None):
        self.seen, self.closed, self.calls = [], [], 0
        self.trouble = trouble or (lambda fake: None)

    def write(self, row, env_steps):
        self.calls += 1
        self.now = env_steps
        self.trouble(self)
        self.seen.append((env_steps, dict(row)))

    def close(self, status):
        self.closed.append(status)


@pytest.fixture
def using(config, monkeypatch):
    """The config with these writers, named a, b ..."""

    def use(*made):
        names = "abc"[: len(made)]
        for name, writer in zip(names, made):
            make = writer if callable(writer) else lambda run, writer=writer: writer
            monkeypatch.setitem(writers.WRITERS, name, ("json", make))
        return dataclasses.replace(
            config, log=dataclasses.replace(config.log, writers=tuple(names))
        )

    return use


def test_writers_get_every_finite_number_and_how_it_ended(using, screen):
    fake, other = Fake(), Fake()
    play(using(fake, other), screen, [1, 2, 3])
    assert [steps for steps, _ in fake.seen] == [100, 200, 300]
    assert "episode/return" not in fake.seen[0][1]  # it was NaN
    assert fake.seen[2][1]["episode/return"] == 3.0
    assert fake.seen[2][1]["update"] == 3
    assert all(math.isfinite(x) for _, row in fake.seen for x in row.values())
    assert other.seen == fake.seen
    assert fake.closed == other.closed == ["finished"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_writers_are_closed_once_whatever_happens(using, screen, error, status):
    fake = Fake()
    logger = Logger(using(fake), screen)

    def run():
        with logger:
            logger.log({"a": 1.0}, update=1, env_steps=10)
            raise error

    with pytest.raises(error):
        run()
    logger.close("finished")
    assert fake.closed == [status]
    assert len(fake.seen) == 1


def test_a_run_stopped_by_a_signal_is_interrupted(using, screen):
    fake = Fake()
    with Logger(using(fake), screen) as logger:
        logger.log({"a": 1.0}, update=7, env_steps=10)
        logger.close("interrupted")
    assert fake.closed == ["interrupted"]
    assert screen.file.getvalue().splitlines()[-1].startswith("interrupted: 10 env-steps")


def refuse_to_go_back(fake):
    if fake.seen and fake.now < fake.seen[-1][0]:
        raise RuntimeError(f"step {fake.now} is too old")


def test_a_writer_that_wants_rising_steps_costs_no_row(using, screen):
    fake = Fake(refuse_to_go_back)
    cfg = using(fake)
    with pytest.raises(RuntimeError, match="crash"):
        play(cfg, screen, range(1, 300), stop_at=212)
    play(cfg, screen, range(201, 216), resume_at=200)
    updates = [row["update"] for row in rows(cfg) if "loss" in row]
    assert updates == list(range(1, 216))
    assert [r["update"] for r in rows(cfg) if "eval/return" in r][-4:] == [200, 204, 208, 212]
    assert fake.closed == ["failed", "finished"]
    assert screen.file.getvalue().count("step 20100 is too old") == 1


def test_a_writer_that_raises_is_dropped_and_said_once(using, screen):
    def every_third(fake):
        if fake.calls % 3 == 0:
            raise ConnectionError("no route\nto host")

    fake, sound = Fake(every_third), Fake()
    cfg = using(fake, sound)
    play(cfg, screen, range(1, 12))
    assert [steps for steps, _ in fake.seen] == [100, 200]
    assert fake.calls == 3
    assert fake.closed == ["finished"]
    assert len(sound.seen) == len(rows(cfg)) == 11 + 2
    told = "a failed (ConnectionError: no route) and gets no more rows; everything else goes on."
    assert screen.file.getvalue().splitlines().count(told) == 1
    assert screen.file.getvalue().count("ConnectionError") == 1


@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(1)])
def test_a_writer_that_can_not_start_or_close_is_said_too(using, screen, error):
    def never(run):
        raise error

    class Last(Fake):
        def close(self, status):
            super().close(status)
            raise error

    last = Last()
    cfg = using(never, last)
    play(cfg, screen, [1, 2])
    assert len(rows(cfg)) == len(last.seen) == 2
    assert last.closed == ["finished"]
    said = screen.file.getvalue()
    for name in "ab":
        assert said.count(f"{name} failed ({type(error).__name__}: {error})") == 1


@pytest.mark.parametrize("where", ["start", "write", "close"])
def test_a_writer_that_hangs_does_not_hold_the_run(using, screen, monkeypatch, where):
    monkeypatch.setattr(writers, "CLOSE_SECONDS", 0.2)
    release = threading.Event()
    sound = Fake()

    class Hanging(Fake):
        def __init__(self, run):
            super().__init__(lambda fake: release.wait(20) if where == "write" else None)
            if where == "start":
                release.wait(20)

        def close(self, status):
            if where == "close":
                release.wait(20)

    cfg = using(Hanging, sound)
    begun = time.monotonic()
    play(cfg, screen, [1, 2, 3])
    assert time.monotonic() - begun < 5
    release.set()
    assert len(rows(cfg)) == len(sound.seen) == 3
    assert sound.closed == ["finished"]
    said = screen.file.getvalue().splitlines()
    assert said.count("a did not finish in 0.2 s: left behind.") == 1
    assert said[-1].startswith("finished")


def test_a_writer_that_is_too_slow_is_dropped_before_memory_runs_out(using, screen, monkeypatch):
    monkeypatch.setattr(writers, "QUEUE_SIZE", 5)
    release = threading.Event()
    fake = Fake(lambda fake: release.wait(20))
    cfg = using(fake)
    with Logger(cfg, screen) as logger:
        for update in range(20):
            logger.log({}, update=update, env_steps=update)
        release.set()
    assert len(rows(cfg)) == 20
    assert screen.file.getvalue().count("a is 5 rows behind and gets no more rows") == 1
    assert len(fake.seen) < 20
    assert fake.closed == ["finished"]


def test_no_writer_starts_if_one_can_not(using, screen, monkeypatch):
    started = []
    cfg = using(started.append)
    monkeypatch.setitem(writers.WRITERS, "gone", ("no_such_package", Fake))
    both = dataclasses.replace(cfg, log=dataclasses.replace(cfg.log, writers=("a", "gone")))
    with pytest.raises(ValueError, match="no_such_package is not installed"):
        Logger(both, screen)
    assert started == []
