"""Draw the learning curves of a run from its metrics.jsonl."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, float | None]
Line = tuple[np.ndarray, np.ndarray]

COLORS = ("#2f6db5", "#e07b39", "#3a9a5b", "#8d5fb8", "#c2495b", "#7a7f87")
RETURNS = ("episode/return", "eval/return")


def plot(jsonl_path: str | Path, png_path: str | Path) -> None:
    """Draw the curves that metrics.jsonl has values for as small panels of one picture.

    Returns against env steps and against time, episode length, reward terms, losses, KL and
    throughput; metrics that are missing are left out.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read(jsonl_path)
    panels = [panel for panel in _panels(rows) if panel[2]]
    if not panels:
        raise ValueError(
            f"{jsonl_path} holds no metrics to draw: a row is written after each update."
        )
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.0 * lines), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax, (title, x, keys) in zip(axes, panels):
        _draw(ax, title, x, {key: _line(rows, x, key) for key in keys})
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    figure.savefig(png_path)


def read(jsonl_path: str | Path) -> list[Row]:
    """The rows of metrics.jsonl; a last line that was cut off by a crash is left out."""
    lines = Path(jsonl_path).read_text().splitlines()
    rows = [json.loads(line) for line in lines[:-1]]
    try:
        return [*rows, *map(json.loads, lines[-1:])]
    except json.JSONDecodeError:
        return rows


def _panels(rows: list[Row]) -> list[tuple[str, str, list[str]]]:
    """Title, x and the metrics of each panel, of those that have a value in some row."""
    known = list(dict.fromkeys(k for row in rows for k, v in row.items() if v is not None))

    def having(*parts: str) -> list[str]:
        return [key for key in known if any(part in key for part in parts)]

    returns = [key for key in RETURNS if key in known]
    return [
        ("return by env steps", "env_steps", returns),
        ("return by time", "time/seconds", returns),
        (
            "episode length",
            "env_steps",
            [k for k in ("episode/length", "eval/length") if k in known],
        ),
        ("reward terms", "env_steps", [key for key in known if key.startswith("reward/")]),
        ("losses", "env_steps", having("loss")),
        ("KL divergence", "env_steps", having("kl")),
        ("entropy", "env_steps", [k for k in having("entropy") if "loss" not in k]),
        (
            "env steps per second",
            "env_steps",
            [k for k in known if k == "time/env_steps_per_second"],
        ),
    ]


def _line(rows: list[Row], x: str, key: str) -> Line:
    points = [(row[x], row[key]) for row in rows if row.get(key) is not None and x in row]
    xs, ys = np.asarray(points, np.float64).reshape(-1, 2).T
    return xs / 60 if x == "time/seconds" else xs, ys


def _draw(ax: "Axes", title: str, x: str, lines: dict[str, Line]) -> None:
    from matplotlib.ticker import EngFormatter

    for (key, (xs, ys)), color in zip(lines.items(), COLORS * len(lines)):
        few = len(xs) < 40
        smooth = ys if few else _smooth(ys)
        if not few:
            ax.plot(xs, ys, color=color, alpha=0.22, linewidth=0.8)
        marker = "o" if few else None
        ax.plot(xs, smooth, color=color, linewidth=1.6, label=key, marker=marker, markersize=3.5)
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
    ax.set_xlabel("minutes" if x == "time/seconds" else "env steps", fontsize=8)
    if x == "env_steps":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.tick_params(labelsize=8)
    ax.grid(visible=True, color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1 or title.startswith("return"):
        ax.legend(fontsize=7, frameon=False)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred moving mean over a twentieth of the curve, one-sided at its ends."""
    half = max(1, len(values) // 40)
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)
