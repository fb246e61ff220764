"""The command `jrl`: train, eval, play, doctor, bench."""

import dataclasses
import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jrl.checks import UnavailableError

if TYPE_CHECKING:
    from jrl.engine import Engine

_T = TypeVar("_T")


def main(args: Sequence[str] | None = None) -> None:
    """Run one of the commands; mistakes end it with one readable message and exit code 2."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    command = COMMANDS.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        _refuse(f"unknown command {words[0]!r}.{guess}\n{_help()}")
        return
    try:
        command(words[1:])
    except (ValueError, FileNotFoundError, UnavailableError) as error:
        _refuse(f"error: {error}")


def _refuse(text: str) -> None:
    print(text, file=sys.stderr)
    raise SystemExit(2)


def _help() -> str:
    said = {name: (run.__doc__ or "").splitlines()[0] for name, run in COMMANDS.items()}
    lines = [f"  {name:8}{line.replace('`', '')}" for name, line in said.items()]
    return "\n".join(["usage: jrl COMMAND [--help]", "", *lines])


def train(args: list[str]) -> None:
    """Train by a config: `jrl train [--config FILE | --resume RUN] [--env.name hopper ...]`."""
    from jrl import builder, launch

    sys.path.insert(0, "")  # as `python script.py` would: parts of yours in this folder are found
    launch(lambda config: builder.build(config).run(), None, args)


@dataclasses.dataclass(frozen=True)
class Eval:
    """Play episodes with a trained policy, without exploration; the last line is JSON."""

    run: str
    """Folder of the run."""
    episodes: int = 16
    """How many."""
    seed: int = 1_000
    """Of their starts."""
    step: int | None = None
    """Updates after which the checkpoint was taken; the newest by default."""


def evaluate(args: list[str]) -> None:
    """Evaluate a run's policy: `jrl eval RUN [--episodes 16] [--seed 1000] [--step UPDATES]`."""
    choice = _parse(Eval, args, "eval")
    flags = ["--eval.episodes", str(choice.episodes), "--eval.seed", str(choice.seed)]
    engine = _open(choice.run, choice.step, flags)
    results = engine.evaluate()
    for name, value in results.items():
        print(f"{name.removeprefix('eval/'):20} {value:12.4g}")
    print(json.dumps({"update": engine.updates, "episodes": choice.episodes, **results}))


@dataclasses.dataclass(frozen=True)
class Play:
    """Film an episode of a trained policy, or watch it."""

    run: str
    """Folder of the run."""
    out: str = ""
    """The mp4 to write; RUN/videos/<updates>.mp4 by default."""
    viewer: bool = False
    """Watch in MuJoCo's viewer instead, which needs a display."""
    seed: int = 1_000
    """Of the start."""
    step: int | None = None
    """Updates after which the checkpoint was taken; the newest by default."""


def play(args: list[str]) -> None:
    """Film a run's policy, or watch it: `jrl play RUN [--out FILE] [--viewer] [--step UPDATES]`."""
    choice = _parse(Play, args, "play")
    engine = _open(choice.run, choice.step, ["--eval.seed", str(choice.seed)])
    if choice.viewer:
        engine.watch()
        return
    path = Path(choice.out or Path(choice.run) / "videos" / f"{engine.updates}.mp4")
    engine.film(path)
    print(path)


def doctor(args: list[str]) -> None:
    """Say what this machine has (versions, devices) and what is missing: `jrl doctor`."""
    from jrl import doctor

    if args:
        raise ValueError(f"jrl doctor takes no arguments, got {' '.join(args)}.")
    doctor.report()


def bench(args: list[str]) -> None:
    """Run benchmarks of a checkout: `jrl bench [NAME ...] [--quick]`."""
    import jrl

    script = Path(jrl.__file__).resolve().parents[1] / "benchmarks" / "run.py"
    if not script.exists():
        raise UnavailableError(
            "the benchmarks are part of a checkout of jrl, not of an installed package: clone it, "
            "`pip install -e '.[bench]'` there, and run `jrl bench` again."
        )
    raise SystemExit(subprocess.run([sys.executable, str(script), *args], check=False).returncode)


def _open(run: str, step: int | None, flags: list[str]) -> "Engine":
    """The engine of a run with its policy, and what people should know about it said."""
    from jrl import builder

    engine, notes = builder.open_run(run, step=step, args=flags)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return engine


def _parse(cls: type[_T], args: list[str], name: str) -> _T:
    import tyro

    return tyro.cli(cls, args=args, prog=f"jrl {name}", config=(tyro.conf.PositionalRequiredArgs,))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "play": play,
    "doctor": doctor,
    "bench": bench,
}


if __name__ == "__main__":
    main()
