"""How long until training runs, whether anything compiles later, and what keeping books costs.

`warm_s` and `cold_s` are seconds from the start of `python experiments/humanoid.py` until the row
of the first PPO update is in metrics.jsonl: the users' own program, with compiled programs from an
earlier start and with an empty cache. A run in this process then counts what is compiled after the
second update (training, logging and checkpoints; the evaluation is compiled at its first use, and
reported apart), and takes the share of logging and checkpoints from its profile.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
import measure

from jrl import builder, launch
from jrl.config import Config

PROGRAM = Path(__file__).parents[1] / "experiments" / "humanoid.py"
CONFIG = PROGRAM.parent / "conf" / "humanoid.yaml"
CACHES_CALLBACKS = jax.__version_info__ >= (0, 12)
BOUNDS = {
    "warm_s": (6.0 if CACHES_CALLBACKS else 9.0, 6.0),
    "cold_s": (15.0, 10.0),
    "late_compiles": (0.0, 0.0),
    "bookkeeping_share": (0.03, 0.01),
}


def first_update(folder: Path, cache: Path, name: str) -> float:
    """Seconds from the start of a process until its first update is done and logged."""
    command = [sys.executable, str(PROGRAM), "--name", name, "--log.root", str(folder)]
    rows = folder / name / "metrics.jsonl"
    begun = time.perf_counter()
    with subprocess.Popen(
        command,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (rows.exists() and rows.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"{PROGRAM.name} ended early:\n{process.communicate()[1]}")
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        process.kill()
    return seconds


def starts(reps: int, folder: Path) -> dict[str, list[float]]:
    """Cold and warm starts in turn, each pair with a cache of its own."""
    seconds: dict[str, list[float]] = {"cold_s": [], "warm_s": []}
    for rep in range(reps):
        cache = folder / f"cache{rep}"
        for kind, each in seconds.items():
            each.append(first_update(folder, cache, f"{kind}{rep}"))
            print(f"  {kind[:4]} start: {each[-1]:.2f} s", flush=True)
    return seconds


def training(folder: Path, total_steps: int) -> tuple[int, int, float]:
    """Compiles after the second update and in the first evaluation, and the books' share."""
    compiled: list[str] = []
    marks: list[int] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def main(config: Config) -> None:
        engine = builder.build(config)
        engine.after("train", lambda _: marks.append(len(compiled)))
        jax.monitoring.register_event_duration_secs_listener(listen)
        engine.run()

    flags = ["--name", "training", "--log.root", str(folder), "--log.no-video", "--log.no-plot"]
    launch(main, CONFIG, [*flags, "--train.total-steps", str(total_steps)])
    profile = json.loads((folder / "training" / "profile.json").read_text())
    return marks[-1] - marks[1], len(compiled) - marks[-1], profile["bookkeeping_share"]


def main(*, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = starts(1 if quick else 3, folder)
        late, evaluation, share = training(folder, 400_000 if quick else 3_000_000)
    figures = {kind: median(each) for kind, each in seconds.items()}
    figures |= {"late_compiles": float(late), "bookkeeping_share": share}
    measure.report(
        "startup", figures, BOUNDS, at_most=BOUNDS, evaluation_compiles=evaluation,
        seconds=seconds,
    )  # fmt: skip


if __name__ == "__main__":
    main(quick=measure.arguments(__doc__).quick)
