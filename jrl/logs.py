"""What a run says while it trains: metrics.jsonl for machines, a progress display for people."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from jrl import writers
from jrl.config import Config, to_dict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SHOWN = ("episode/return", "episode/length", "eval/return")  # metrics the display follows


def run_dir(config: Config) -> Path:
    """The folder of a run, `<log.root>/<name>`; it need not exist yet."""
    return Path(config.log.root) / (config.name or f"{config.env.name}-{config.agent.name}")


class MetricsFile:
    """metrics.jsonl: one JSON object a line, on disk as soon as it is added.

    Attributes:
        path: where it is; made by the first row.
        missing: rows that couldn't be written.
        trouble: why not, the last time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.missing = 0
        self.trouble: OSError | None = None
        self._file: FileIO | None = None
        self._end, self._torn = 0, False

    def rewind(self, update: int) -> tuple[dict[str, Any], int]:
        """Keep the rows up to `update`; the last of them, and how many later ones are dropped.

        Lines that are no rows, such as a last one that was cut off, are dropped and not counted.
        """
        last: dict[str, Any] = {}
        later = 0
        if not self.path.exists():
            return last, later
        part = self.path.with_suffix(".part")
        with self.path.open("rb") as old, part.open("wb") as new:
            for line in old:
                row = _row(line)
                if row.get("update", math.inf) <= update:
                    new.write(line.rstrip(b"\n") + b"\n")
                    last = row
                else:
                    later += bool(row)
            new.flush()
            os.fsync(new.fileno())
        part.replace(self.path)
        return last, later

    def add(self, row: Mapping[str, float | None]) -> None:
        """Write one row; where that can't be done, count it as missing."""
        line = json.dumps(row).encode() + b"\n"
        try:
            self._write(line)
        except OSError as error:
            self.missing += 1
            self.trouble = error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
            self._end = self._file.tell()
        if self._torn:  # part of a row that didn't fit
            self._file.truncate(self._end)
        self._torn = True
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._torn = False
        self._end += len(line)


def _row(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl; empty where it is no row."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and "update" in row else {}


class Logger:
    """Writes metrics.jsonl of a run, hands its rows to other writers, and shows its progress.

    Every row has `update`, `env_steps` and `time/seconds` since the run began, breaks left out.
    Where the row is further in env_steps than the one before, it has `time/env_steps_per_second`
    too, except the first such row: that update was compiled, and it has `time/first_update` in
    seconds instead. Rows that stand still, such as an evaluation, don't count in the throughput.

    A number that is not finite is null in metrics.jsonl, and left out of what writers get.

    A run that goes on says with `resume_at` after how many updates: later rows are dropped, as they
    will be written again. Nothing but wrong metrics makes `log` raise: a full disk or a writer that
    fails is said once, and training goes on.

    Attributes:
        path: metrics.jsonl, one JSON object a line, complete up to the last `log`.
        seconds: what logging took of the caller's time so far, waiting for the device left out.
    """

    def __init__(
        self, config: Config, console: "Console | None" = None, *, resume_at: int | None = None
    ) -> None:
        from rich.console import Console

        self._start = self._last = time.perf_counter()
        folder = run_dir(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.seconds = 0.0
        self._total = config.train.total_steps
        self._interval = config.log.interval
        self._console = console or Console(highlight=False)
        self._printed = -math.inf
        self._steps = 0
        self._timed_steps, self._timed_seconds = 0, 0.0  # without the compiled first update
        self._first: float | None = None
        self._latest = dict.fromkeys(SHOWN, math.nan)
        self._closed = self._told = False
        self._file = MetricsFile(self.path)
        if resume_at is not None:
            self._go_on(resume_at)
        resumed_at = None if resume_at is None else self._steps
        run = writers.Run(folder.absolute(), to_dict(config), resumed_at)
        self._writers = writers.start(config.log.writers, run)
        self._progress = self._bar() if self._console.is_terminal else None

    def log(self, metrics: Mapping[str, Any], *, update: int, env_steps: int) -> None:
        """Add one row of scalars and refresh the display.

        Raises:
            ValueError: a metric that is not a scalar, or is named like the logger's own.
        """
        values = jax.device_get(dict(metrics))  # waits for the device; the clock is read after it
        with self._counted():
            now = time.perf_counter()
            scalars = _scalars({name: values[name] for name in metrics})
            row: dict[str, float | None] = {"update": update, "env_steps": env_steps}
            row |= {"time/seconds": round(now - self._start, 4)}
            row |= self._clock(env_steps, now) | scalars
            self._write(row, env_steps)
            for name in SHOWN:
                if (known := row.get(name)) is not None:  # in some rows no episode ended
                    self._latest[name] = known
            self._show(now)

    def event(self, text: str) -> None:
        """Print a line for people; it does not enter metrics.jsonl."""
        with self._counted():
            self._say(text)

    def close(self, status: str = "finished") -> None:
        """Close every writer and say how the run ended; calling it again does nothing.

        Args:
            status: "finished", "interrupted" or "failed".
        """
        if self._closed:
            return
        self._closed = True
        with self._counted():
            seconds = _duration(time.perf_counter() - self._start)
            if self._progress:
                self._progress.stop()
            self._file.close()
            writers.close(self._writers, status)
            self._tell_troubles()
            if self._file.missing:
                self._say(f"{self._file.missing} rows are missing in {self.path}.")
            first = "" if self._first is None else f", first update {self._first:.1f} s"
            self._say(
                f"{status}: {self._steps:,} env-steps in {seconds}, "
                f"{self._facts()['rate']} env-steps/s{first}. {self.path.parent}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close("finished")
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _go_on(self, update: int) -> None:
        """Take up the record of an earlier part of the run."""
        last, later = self._file.rewind(update)
        self._start -= last.get("time/seconds", 0.0)
        self._steps = last.get("env_steps", 0)
        if later:
            self._say(f"metrics.jsonl: {later} rows after update {update} are dropped")

    def _write(self, row: dict[str, float | None], env_steps: int) -> None:
        """Hand a row to metrics.jsonl and to the writers."""
        self._file.add(row)
        known = {name: x for name, x in row.items() if x is not None and name != "env_steps"}
        for writer in self._writers:
            writer.write(known, env_steps)
        self._tell_troubles()

    def _tell_troubles(self) -> None:
        """Say what can't be written, each trouble once."""
        if self._file.missing and not self._told:
            self._told = True
            reason = self._file.trouble and self._file.trouble.strerror
            self._say(
                f"can't write {self.path}: {reason}. Training goes on, but rows will be missing."
            )
        for writer in self._writers:
            if text := writer.news():
                self._say(text)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the console may be a file on a full disk
            self._console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begun

    def _clock(self, env_steps: int, now: float) -> dict[str, float]:
        """The timing of this row, and of the run so far."""
        steps, seconds = env_steps - self._steps, now - self._last
        self._steps, self._last = env_steps, now
        if steps <= 0:
            return {}
        if self._first is None:
            self._first = seconds
            return {"time/first_update": round(seconds, 4)}
        self._timed_steps += steps
        self._timed_seconds += seconds
        return {"time/env_steps_per_second": round(steps / seconds, 2)}

    def _facts(self) -> dict[str, Any]:
        rate = self._timed_steps / self._timed_seconds if self._timed_seconds else math.nan
        left = (self._total - self._steps) / rate if rate > 0 else math.nan
        score, length, tested = (self._latest[name] for name in SHOWN)
        return {
            "rate": f"{rate:,.0f}" if rate > 0 else "-",
            "eta": _duration(max(left, 0.0)) if math.isfinite(left) else "-",
            "score": _number(score, ".1f"),
            "length": _number(length, ".0f"),
            "tested": _number(tested, ".1f"),
        }

    def _show(self, now: float) -> None:
        if self._progress:
            self._progress.update(
                self._progress.task_ids[0], completed=self._steps, **self._facts()
            )
        elif now - self._printed >= self._interval:
            self._printed = now
            self._say(self._line())

    def _line(self) -> str:
        facts = self._facts()
        return (
            f"{min(100 * self._steps / self._total, 100):5.1f}%  {self._steps:>13,} env-steps  "
            f"{facts['rate']:>9} /s  ETA {facts['eta']:>8}  "
            f"return {facts['score']:>9}  length {facts['length']:>6}  "
            f"eval {facts['tested']:>9}"
        )

    def _bar(self) -> "Progress":
        from rich.progress import BarColumn, Progress, TextColumn

        texts = (
            "[progress.percentage]{task.percentage:>3.0f}%",
            "{task.completed:,} env-steps",
            "[cyan]{task.fields[rate]}/s",
            "ETA {task.fields[eta]}",
            "return [bold green]{task.fields[score]}[/]",
            "length {task.fields[length]}",
            "eval [bold green]{task.fields[tested]}[/]",
        )
        columns = [BarColumn(bar_width=24), *(TextColumn(text) for text in texts)]
        progress = Progress(*columns, console=self._console)
        progress.add_task("", total=self._total, **self._facts())
        progress.start()
        return progress


def _scalars(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics as plain numbers, null where they are not finite."""
    numbers: dict[str, float | None] = {}
    for name, value in values.items():
        if name in ("update", "env_steps") or name.startswith("time/"):
            raise ValueError(f"metric {name!r}: the logger writes this name itself, use another.")
        array = np.asarray(value)
        if array.size != 1:
            raise ValueError(f"metric {name!r} must be a scalar, got shape {array.shape}.")
        number = array.item()
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"
