"""What a run says while it trains: metrics.jsonl for machines, a progress display for people."""

import json
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from jrl.config import Config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

SHOWN = ("episode/return", "episode/length", "eval/return")  # metrics the display follows


def run_dir(config: Config) -> Path:
    """The folder of a run, `<log.root>/<name>`; it need not exist yet."""
    return Path(config.log.root) / (config.name or f"{config.env.name}-{config.agent.name}")


class Logger:
    """Writes metrics.jsonl of a run and shows its progress.

    Every row has `update`, `env_steps` and `time/seconds` since the logger was made. Where the row
    is further in env_steps than the one before, it has `time/env_steps_per_second` too, except the
    first such row: that update was compiled, and it has `time/first_update` in seconds instead.
    Rows that stand still, such as an evaluation, don't count in the throughput.

    Attributes:
        path: metrics.jsonl, one JSON object a line, complete up to the last `log`.
    """

    def __init__(self, config: Config, console: "Console | None" = None) -> None:
        from rich.console import Console

        self.path = run_dir(config) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._total = config.train.total_steps
        self._interval = config.log.interval
        self._console = console or Console(highlight=False)
        self._start = self._last = time.perf_counter()
        self._printed = -math.inf
        self._steps = 0
        self._timed_steps, self._timed_seconds = 0, 0.0  # without the compiled first update
        self._first: float | None = None
        self._latest = dict.fromkeys(SHOWN, math.nan)
        self._closed = False
        self._progress = self._bar() if self._console.is_terminal else None

    def log(self, metrics: Mapping[str, Any], *, update: int, env_steps: int) -> None:
        """Add one row of scalars and refresh the display.

        Raises:
            ValueError: a metric that is not a scalar, or is named like the logger's own.
        """
        values = jax.device_get(
            dict(metrics)
        )  # waits for the device, so the clock is read after it
        now = time.perf_counter()
        row: dict[str, float | None] = {"update": update, "env_steps": env_steps}
        row |= {"time/seconds": round(now - self._start, 4)}
        row |= self._clock(env_steps, now)
        for name in metrics:
            value = values[name]
            if name in row or name.startswith("time/"):
                raise ValueError(
                    f"metric {name!r}: the logger writes this name itself, use another."
                )
            if np.size(value) != 1:
                raise ValueError(f"metric {name!r} must be a scalar, got shape {np.shape(value)}.")
            number = np.asarray(value).item()
            row[name] = number if math.isfinite(number) else None
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        for name in SHOWN:
            if (known := row.get(name)) is not None:  # no episode may have ended since the last row
                self._latest[name] = known
        self._show(now)

    def event(self, text: str) -> None:
        """Print a line for people; it does not enter metrics.jsonl."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self, status: str = "finished") -> None:
        """Stop the display and say how the run ended; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._progress:
            self._progress.stop()
        seconds = _duration(time.perf_counter() - self._start)
        first = "" if self._first is None else f", first update {self._first:.1f} s"
        self.event(
            f"{status}: {self._steps:,} env-steps in {seconds}, {self._facts()['rate']} env-steps/s"
            f"{first}. {self.path.parent}"
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
            self.event(self._line())

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


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"
