"""Run benchmarks, one after another: `python benchmarks/run.py [NAME ...] [--quick]`.

Writes results/NAME.json and the table results/README.md, and ends with the JSON lines.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import peers

FOLDER = Path(__file__).parent
NAMES = ("startup", "physics", "overhead", "train", "learning")


def run(name: str, *, quick: bool) -> dict[str, Any] | None:
    """One benchmark's last line; None where it failed, which it said itself."""
    print(f"== {name}", flush=True)
    command = [sys.executable, str(FOLDER / f"{name}.py"), *(["--quick"] if quick else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return json.loads(last) if process.returncode == 0 else None


def table(results: dict[str, dict[str, Any]], *, quick: bool) -> str:
    """All figures as Markdown."""
    machine = next(iter(results.values()))["machine"] if results else measure.machine()
    lines = [
        "# Figures",
        "",
        f"Written by `python benchmarks/run.py{' --quick' if quick else ''}`. A figure is a "
        "ratio of two sides that took turns in one run, or seconds. " + ", ".join(
            f"{key} {value}" for key, value in machine.items() if not key.startswith("load")
        ) + ".",
        "",
        "| benchmark | figure | value | bound | aim | load at start |",
        "|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, result in results.items():
        for key, value in result["figures"].items():
            bound, aim = result.get("bounds", {}).get(key, ("", ""))
            bound = f"≤ {bound}" if key in result.get("at_most", ()) else bound
            load = result["machine"]["load_at_start"]
            lines.append(f"| {name} | `{key}` | {value:.3g} | {bound} | {aim} | {load} |")
    return "\n".join(lines) + "\n"


def main(names: Sequence[str], *, quick: bool) -> int:
    absent = peers.missing()
    if absent:
        print(f"skipped peers: {', '.join(absent)} (not installed; pip install '.[bench]')")
    (FOLDER / "results").mkdir(exist_ok=True)
    results, failed = {}, []
    for name in names or NAMES:
        result = run(name, quick=quick)
        if result is None:
            failed.append(name)
            continue
        results[name] = result
        text = json.dumps(result, indent=1) + "\n"
        (FOLDER / "results" / f"{name}.json").write_text(text)
    (FOLDER / "results" / "README.md").write_text(table(results, quick=quick))
    for result in results.values():
        print(json.dumps(result))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    parser = measure.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(NAMES)}")
    raise SystemExit(main(chosen.names, quick=chosen.quick))
