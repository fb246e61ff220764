"""How everything here is measured: sides take turns, medians are compared, the result is JSON."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

Bounds = Mapping[str, tuple[float, float]]  # figure -> (bound, aim)
LOAD_AT_START = os.getloadavg()[0]  # before the benchmark loads the machine itself


def machine() -> dict[str, Any]:
    """Where the figures come from; compare figures of equal machines only."""
    info = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    versions = {name: metadata.version(name) for name in ("jax", "mujoco", "numpy")}
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
        "load_at_start": round(LOAD_AT_START, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    return parser


def arguments(description: str | None) -> argparse.Namespace:
    """What the command line of a benchmark says."""
    return parser(description).parse_args()


def interleave(
    sides: Mapping[str, Callable[[], int]], *, reps: int, seconds: float
) -> dict[str, list[float]]:
    """Time the sides in turn, forwards and backwards, so that slow minutes hit all of them alike.

    Args:
        sides: name -> a function that does a piece of work to its end and returns the steps done.
            Each is called once before, untimed.
        reps: turns of each side.
        seconds: length of a turn, at least; one call may take longer.

    Returns:
        Steps per second of each side in each turn.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for work in sides.values():
        work()
    for rep in range(reps):
        for name in list(sides)[:: 1 if rep % 2 == 0 else -1]:
            steps, begun = 0, time.perf_counter()
            while not steps or time.perf_counter() - begun < seconds:
                steps += sides[name]()
            rates[name].append(steps / (time.perf_counter() - begun))
    return rates


def ratio(rates: Mapping[str, list[float]], top: str, bottom: str) -> float:
    """The median over the turns of `top` over `bottom`, each pair timed side by side."""
    pairs = zip(rates[top], rates[bottom], strict=True)
    return statistics.median(a / b for a, b in pairs)


def show(rates: Mapping[str, list[float]]) -> None:
    """Print each side's median and extremes, steps per second."""
    width = max(map(len, rates))
    for name, each in rates.items():
        middle = statistics.median(each)
        print(f"  {name:{width}}  {middle:12,.0f}/s  ({min(each):,.0f} .. {max(each):,.0f})")


def report(
    name: str,
    figures: Mapping[str, float],
    bounds: Bounds,
    *,
    at_most: Collection[str] = (),
    **notes: Any,
) -> dict[str, Any]:
    """Print the figures beside their bounds, then everything as one line of JSON.

    Bounds are the least that will do, but those of the figures named in `at_most`.
    """
    for key, value in figures.items():
        bound, aim = bounds.get(key, (0.0, 0.0))
        verdict = f"  (bound {bound:g}, aim {aim:g})" if key in bounds else ""
        misses = key in bounds and (value > bound if key in at_most else value < bound)
        print(f"{key} = {value:.3g}{verdict}{' MISSES ITS BOUND' if misses else ''}")
    rounded = {key: float(f"{value:.4g}") for key, value in figures.items()}
    result = {"benchmark": name, "machine": machine(), "figures": rounded}
    if bounds:
        result["bounds"] = {k: bounds[k] for k in figures if k in bounds}
        result["at_most"] = [k for k in figures if k in at_most]
    result |= notes
    print(json.dumps(result), flush=True)
    return result
