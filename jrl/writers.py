"""TensorBoard, Weights & Biases and SwanLab: a run's scalars and its config go there, nothing else.

Each writer works in a thread of its own, so that one that is slow, hangs or fails does not hold up
training. None needs a network or an account, and none asks for anything. The x axis is env_steps.
"""

import importlib.util
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jrl import checks

QUEUE_SIZE = 10_000  # rows that may wait for a writer
CLOSE_SECONDS = 10.0  # what the writers have, together, to finish
FLUSH_SECONDS = 5.0  # between two flushes of TensorBoard's file
DROPPED = "and gets no more rows; everything else goes on"


class Run(NamedTuple):
    """What a writer is told about the run.

    Attributes:
        folder: of the run; a writer keeps its files in a folder of its own in there.
        config: nested dicts of plain values.
        resumed_at: env_steps from which an earlier part of the run goes on, None at the start.
    """

    folder: Path
    config: Mapping[str, Any]
    resumed_at: int | None = None


class Writer(Protocol):
    """Somewhere to write scalars. Anything may raise: the writer is then dropped."""

    def write(self, row: Mapping[str, float], env_steps: int) -> None:
        """Add one row; all its numbers are finite. Rows of a resumed run go back in env_steps."""

    def close(self, status: str) -> None:
        """Finish: "finished", "interrupted" or "failed"."""


class TensorBoard:
    """Event files in tensorboard/; of a resumed run, the steps that are done again are hidden."""

    def __init__(self, run: Run) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._Event, self._Summary = Event, Summary
        self._flushed = time.monotonic()
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        # every START but the first hides what was written before it, from its step on
        first = 0 if run.resumed_at is None else run.resumed_at + 1
        self._add(step=first, session_log=SessionLog(status=SessionLog.START))

    def write(self, row: Mapping[str, float], env_steps: int) -> None:
        """Add one event that holds the whole row."""
        values = [self._Summary.Value(tag=name, simple_value=x) for name, x in row.items()]
        self._add(step=env_steps, summary=self._Summary(value=values))

    def close(self, status: str) -> None:
        """Flush and close the file; TensorBoard knows no status."""
        del status
        self._file.close()

    def _add(self, **what: Any) -> None:
        self._file.write_event(self._Event(wall_time=time.time(), **what))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()


class WandB:
    """A run in wandb/. It is offline unless WANDB_MODE says otherwise: `wandb sync` uploads it."""

    def __init__(self, run: Run) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False):
            raise RuntimeError(f"WANDB_MODE is {mode}, but no API key is known: run `wandb login`")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jrl"),
            name=run.folder.name,
            id=_identity(run, "wandb"),
            resume="allow",
            reinit="create_new",  # apart from a run that the user's own program may have
            dir=run.folder,
            config=dict(run.config),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, finish_timeout=0.8 * CLOSE_SECONDS),
        )
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, row: Mapping[str, float], env_steps: int) -> None:
        """Add one row; W&B's own step counts rows, and never goes back."""
        self._run.log({**row, "env_steps": env_steps})

    def close(self, status: str) -> None:
        """Finish with an exit code; what can't be uploaded in time is left in wandb/."""
        self._run.finish(exit_code={"finished": 0, "interrupted": 130}.get(status, 1))


class SwanLab:
    """A run in swanlab/. It is offline unless SWANLAB_MODE says otherwise, see `swanlab sync`."""

    def __init__(self, run: Run) -> None:
        import swanlab

        terminal = swanlab.Settings.Terminal(proxy_type="none")
        settings = swanlab.Settings(interactive=False, terminal=terminal)
        self._run = swanlab.init(
            project=settings.project.name or "jrl",
            name=run.folder.name,
            id=_identity(run, "swanlab"),
            resume="allow",
            log_dir=str(run.folder / "swanlab"),
            config=dict(run.config),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            settings=settings,
        )
        self._run.define_metric("*", x_axis="env_steps")

    def write(self, row: Mapping[str, float], env_steps: int) -> None:
        """Add one row; SwanLab's own step counts rows, and never goes back."""
        self._run.log({**row, "env_steps": env_steps})

    def close(self, status: str) -> None:
        """Finish with SwanLab's word for the status."""
        if status == "failed":
            self._run.finish("crashed", error="the run failed")
        else:
            self._run.finish("success" if status == "finished" else "aborted")


# name -> the package it needs, and how to make it
WRITERS: dict[str, tuple[str, Callable[[Run], Writer]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", WandB),
    "swanlab": ("swanlab", SwanLab),
}


class Background:
    """A writer in a thread of its own.

    Its first error is its last: it is kept for `news`, and only `close` reaches the writer after.
    """

    def __init__(self, name: str, make: Callable[[], Writer]) -> None:
        self.name = name
        self._todo: queue.SimpleQueue[tuple[Mapping[str, float], int] | str] = queue.SimpleQueue()
        self._trouble = ""
        self._told = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=name, daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, float], env_steps: int) -> None:
        """Leave a row for the writer; returns at once."""
        if not self._trouble and self._todo.qsize() >= QUEUE_SIZE:
            self._trouble = f"is {QUEUE_SIZE:,} rows behind {DROPPED}"
        if not self._trouble:
            self._todo.put((row, env_steps))

    def end(self, status: str) -> None:
        """Tell the writer to close, after what it has left to do; returns at once."""
        self._todo.put(status)

    def wait(self, until: float) -> None:
        """Wait for the end, until `time.monotonic()` is so far."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._trouble = self._trouble or f"did not finish in {CLOSE_SECONDS:g} s: left behind"

    def news(self) -> str:
        """What went wrong, told once; empty otherwise."""
        if self._told or not self._trouble:
            return ""
        self._told = True
        return f"{self.name} {self._trouble}."

    def _work(self, make: Callable[[], Writer]) -> None:
        writer = self._attempt(make)
        while not isinstance(task := self._todo.get(), str):
            if writer is not None and not self._trouble:
                self._attempt(partial(writer.write, *task))
        if writer is not None:
            self._attempt(partial(writer.close, task))

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            reason = str(error).strip().partition("\n")[0]
            what = f"failed ({type(error).__name__}: {reason}) {DROPPED}"
            self._trouble = self._trouble or what
            return None


def check(names: Iterable[str]) -> None:
    """Check that writers of these names exist.

    Raises:
        ConfigError: one doesn't (with the nearest).
    """
    for name in names:
        if name not in WRITERS:
            raise checks.unknown("writer in log.writers:", name, WRITERS)


def start(names: Iterable[str], run: Run) -> list[Background]:
    """Start the writers of these names.

    Raises:
        ConfigError: there is no such writer, or its package is missing; none is started then.
    """
    names = list(dict.fromkeys(names))
    check(names)
    for name in names:
        package, _ = WRITERS[name]
        if importlib.util.find_spec(package) is None:
            raise checks.ConfigError(
                f"log.writers has {name!r}, but the package {package} is not installed. Get it by "
                "pip install 'jrl-embodied[log]' (in a checkout: pip install -e '.[log]'), or "
                "leave the writer out."
            )
    return [Background(name, partial(WRITERS[name][1], run)) for name in names]


def close(started: Sequence[Background], status: str) -> None:
    """Close all of them, in `CLOSE_SECONDS` or less; what hangs is left behind."""
    until = time.monotonic() + CLOSE_SECONDS
    for writer in started:
        writer.end(status)
    for writer in started:
        writer.wait(until)


def _identity(run: Run, name: str) -> str:
    """The id of this run at a service, kept in the run's folder so that it goes on as the same."""
    path = run.folder / name / "run_id"
    if run.resumed_at is None or not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(uuid.uuid4().hex[:21])  # as long as SwanLab's own
    return path.read_text()
