"""Where a run's time goes: seconds per stage, and a trace of a few updates for Perfetto."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

TRACED = (3, 5)  # updates in a trace, counted from where this process began, both included


class Profile:
    """Adds up the seconds of a run, and records a trace of updates 3 to 5 where asked to.

    Attributes:
        seconds: by what they were spent on: "stage/rollout", "compile", "evaluate", ...
    """

    def __init__(self, folder: Path, *, trace: bool) -> None:
        self.seconds: dict[str, float] = {}
        self._folder = folder
        self._trace = trace
        self._updates = 0
        self._tracing = False

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count seconds under their names."""
        for name, x in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + x

    @contextlib.contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Count what is spent inside under `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - begun})

    def begin_update(self) -> None:
        """Start the trace before the first update that it shows."""
        self._updates += 1
        if self._trace and self._updates == TRACED[0]:
            jax.profiler.start_trace(self._folder / "trace", create_perfetto_trace=True)
            self._tracing = True

    def end_update(self) -> None:
        """End the trace after the last update that it shows."""
        if self._updates == TRACED[1]:
            self.stop()

    def stop(self) -> None:
        """End a trace that is being recorded."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def summary(self) -> dict[str, Any]:
        """What profile.json holds: seconds of each part, and its share of the training time.

        Training time is stages, hooks, logging and checkpoints; compiling, evaluating and filming
        stand apart. "bookkeeping_share" is the part of logging and checkpoints in it.
        """
        apart = ("compile", "evaluate", "film")
        training = {name: x for name, x in self.seconds.items() if name not in apart}
        total = sum(training.values())
        book = sum(training.get(name, 0.0) for name in ("logging", "checkpoints"))
        return {
            "updates": self._updates,
            "seconds": {name: round(x, 4) for name, x in self.seconds.items()},
            "share": {name: round(x / total, 4) for name, x in training.items() if total},
            "bookkeeping_share": round(book / total, 4) if total else 0.0,
        }

    def write(self) -> None:
        """Write profile.json."""
        (self._folder / "profile.json").write_text(json.dumps(self.summary(), indent=1) + "\n")
