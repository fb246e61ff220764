"""Start a run: read the config, prepare JAX, claim the run's folder, call `main(config)`."""

import dataclasses
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from jrl import compilecache
from jrl import config as configs
from jrl.checks import ConfigError
from jrl.config import Config
from jrl.logs import run_dir
from jrl.version import __version__

UNUSED = {"config.yaml", "README.md", "lock"}  # what a run's folder holds before it trains
SHORT = {"--no-jit": "--runtime.no-jit"}  # flags that people type often

_held: dict[Path, int] = {}  # locks of run folders, as file descriptors


def launch(
    main: Callable[[Config], Any],
    config_path: str | Path | None = None,
    args: Sequence[str] | None = None,
) -> Any:
    """Call `main(config)` in a run folder of its own; `args` is the command line by default.

    A mistake in the config or on the command line ends the program with one readable message and
    exit code 2, before anything starts; so do parts that turn out not to fit (`ConfigError`).
    A start that fails before it wrote anything leaves no folder behind. What else `main` raises
    passes through.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        flags = [SHORT.get(word, word) for word in words if word != "--overwrite"]
        config = configs.load(config_path, flags)
        notes = prepare(config)
        config = claim(config, overwrite="--overwrite" in words)
    except ValueError as error:
        raise _refuse(error) from None
    announce(config, notes)
    try:
        return main(config)
    except BaseException as error:
        folder = run_dir(config)
        if {path.name for path in folder.iterdir()} <= UNUSED and not config.resume:
            shutil.rmtree(folder)
        if isinstance(error, ConfigError):
            raise _refuse(error) from None
        raise
    finally:
        release(config)


def _refuse(error: ValueError) -> SystemExit:
    """Say what is wrong, for people; the exit to raise."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    return SystemExit(2)


def prepare(config: Config) -> list[str]:
    """Set up JAX as `config.runtime` says; returns what the user should know.

    Raises:
        ValueError: more devices asked for than there are.
    """
    runtime, notes = config.runtime, []
    jax.config.update("jax_default_matmul_precision", runtime.matmul_precision)
    jax.config.update("jax_disable_jit", not runtime.jit)
    if not runtime.jit:
        notes.append("runtime.jit is off: nothing is compiled, and everything is slow.")
    if runtime.compile_cache:
        notes += compilecache.keep()
    if runtime.devices > jax.device_count():
        raise ValueError(
            f"runtime.devices = {runtime.devices}, but JAX sees {jax.device_count()} "
            f"({jax.default_backend()}). Lower it, or install JAX for your accelerator."
        )
    return notes


def claim(config: Config, *, overwrite: bool = False) -> Config:
    """Make the run's folder, and hold it while this process lives; the config with the run's name.

    Raises:
        ValueError: the folder can't be written, is in use by another process, or holds a run
            already (naming what differs).
    """
    if config.resume:
        return _reclaim(config)
    names = [config.name] if config.name else _fresh_names(config)
    try:
        for name in names:
            named = dataclasses.replace(config, name=name)
            folder = run_dir(named)
            folder.mkdir(parents=True, exist_ok=True)
            if not _hold(folder, wait=not config.name):
                continue
            if overwrite or not (folder / "config.yaml").exists():
                _start_over(named, folder)
                return named
            release(named)
    except OSError as error:
        raise _unwritable(named, error) from error
    raise _occupied(named, folder)


def _reclaim(config: Config) -> Config:
    """Hold the folder of a run that goes on."""
    try:
        _hold(run_dir(config))
    except OSError as error:
        raise _unwritable(config, error) from error
    return config


def _hold(folder: Path, *, wait: bool = False) -> bool:
    """Lock a run's folder; the system lets go of it when this process ends, however it ends.

    Raises:
        ValueError: another process holds it; False instead where other names may be tried.
    """
    import fcntl

    if folder.resolve() in _held:
        return True
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(lock, 20).decode() or "unknown"
        os.close(lock)
        if wait:
            return False
        raise ConfigError(
            f"{folder} is in use by another run (process {pid}). Wait for it, stop it, or choose "
            "another --name."
        ) from None
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    _held[folder.resolve()] = lock
    return True


def release(config: Config) -> None:
    """Let go of the run's folder."""
    lock = _held.pop(run_dir(config).resolve(), None)
    if lock is not None:
        os.close(lock)


def _start_over(config: Config, folder: Path) -> None:
    """Remove what an earlier run left, but the lock that is being held, and begin."""
    old = folder.iterdir() if (folder / "config.yaml").exists() else ()
    for path in old:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    configs.save(config, folder / "config.yaml")
    (folder / "README.md").write_text(_readme(config))


def _readme(config: Config) -> str:
    """What to do with a run's folder."""
    program, folder = Path(sys.argv[0]), run_dir(config)
    script = f"python {os.path.relpath(program)}" if program.suffix == ".py" else "jrl train"
    return f"""# {config.name}

{config.env.name}, trained by {config.agent.name} with jrl {__version__}.

    {script} --resume {folder}    # go on; add --train.total-steps N to train for longer
    jrl eval {folder}    # evaluate the newest checkpoint
    jrl play {folder}    # film it (--viewer: watch it)
    {script} --config {folder}/config.yaml --name again    # repeat the run
"""


def announce(config: Config, notes: Sequence[str] = ()) -> None:
    """Print the resolved config, one section a line, and where it runs."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    devices, table = jax.devices(), Table.grid(padding=(0, 2))
    table.add_row("[bold]run[/]", f"{escape(str(run_dir(config)))}  [dim]seed[/] {config.seed}")
    for section, fields in configs.to_dict(config).items():
        if isinstance(fields, dict):
            shown = (f"[dim]{key}[/] {escape(_show(value))}" for key, value in fields.items())
            table.add_row(f"[bold]{section}[/]", "  ".join(shown))
    hardware = escape(f"{len(devices)} x {devices[0].device_kind}")
    table.add_row("[bold]jax[/]", f"{jax.__version__} on {hardware}, jrl {__version__}")
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)


def _fresh_names(config: Config) -> Iterator[str]:
    """`<env>-<agent>-<time>`, then with -2, -3 ... for runs that start in the same second."""
    paths = (path.removesuffix(":make") for path in (config.env.name, config.agent.name))
    parts = [path.replace(":", ".").rpartition(".")[2] for path in paths]
    stem = "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")])
    return itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))


def _occupied(config: Config, folder: Path) -> ValueError:
    """The error for a folder that holds a run, naming the fields in which the configs differ."""
    old = yaml.safe_load((folder / "config.yaml").read_text()) or {}
    changes = configs.differences(old, configs.to_dict(config))
    what = f"a run with another config ({'; '.join(changes)})" if changes else "this very run"
    return ConfigError(
        f"{folder} already holds {what}. Go on with it (--resume {folder}), choose another --name, "
        "or --overwrite to start over there."
    )


def _unwritable(config: Config, error: OSError) -> ValueError:
    return ConfigError(
        f"can't write the run folder {run_dir(config)}: {error.strerror}. "
        f"Choose another place with --log.root, or give yourself write permission."
    )


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return repr(value) if value == "" else str(value)
