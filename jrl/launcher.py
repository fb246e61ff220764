"""Start a run: read the config, prepare JAX, claim the run's folder, call `main(config)`."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from jrl import config as configs
from jrl.checks import ConfigError
from jrl.config import Config
from jrl.logs import run_dir
from jrl.version import __version__


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
        config = configs.load(config_path, [word for word in words if word != "--overwrite"])
        notes = prepare(config)
        config = claim(config, overwrite="--overwrite" in words)
    except ValueError as error:
        raise _refuse(error) from None
    announce(config, notes)
    try:
        return main(config)
    except BaseException as error:
        folder = run_dir(config)
        if [path.name for path in folder.iterdir()] == ["config.yaml"]:
            shutil.rmtree(folder)
        if isinstance(error, ConfigError):
            raise _refuse(error) from None
        raise


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
        notes += _compile_cache()
    if runtime.devices > jax.device_count():
        raise ValueError(
            f"runtime.devices = {runtime.devices}, but JAX sees {jax.device_count()} "
            f"({jax.default_backend()}). Lower it, or install JAX for your accelerator."
        )
    return notes


def claim(config: Config, *, overwrite: bool = False) -> Config:
    """Make the run's folder with config.yaml in it; returns the config with the run's name.

    Raises:
        ValueError: the folder can't be written, or holds a run already (naming what differs).
    """
    names = [config.name] if config.name else _fresh_names(config)
    try:
        for name in names:
            named = dataclasses.replace(config, name=name)
            folder = run_dir(named)
            if overwrite and (folder / "config.yaml").exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (folder / "config.yaml").touch(exist_ok=False)  # of two starts, one gets the name
                configs.save(named, folder / "config.yaml")
                return named
    except OSError as error:
        raise ValueError(
            f"can't write the run folder {run_dir(named)}: {error.strerror}. "
            f"Choose another place with --log.root, or give yourself write permission."
        ) from error
    raise _occupied(named, folder)


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


def _compile_cache() -> list[str]:
    """Keep compiled programs in the user's cache folder; notes why, where that can't be."""
    folder = jax.config.values["jax_compilation_cache_dir"] or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jrl" / "jax"
    )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        return [f"compile cache off, each start compiles again: {error}"]
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return []


def _fresh_names(config: Config) -> Iterator[str]:
    """`<env>-<agent>-<time>`, then with -2, -3 ... for runs that start in the same second."""
    parts = [name.rpartition(".")[2] for name in (config.env.name, config.agent.name)]
    stem = "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")])
    return itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))


def _occupied(config: Config, folder: Path) -> ValueError:
    """The error for a folder that holds a run, naming the fields in which the configs differ."""
    old = dict(_flat(yaml.safe_load((folder / "config.yaml").read_text()) or {}))
    new = dict(_flat(yaml.safe_load(yaml.safe_dump(configs.to_dict(config)))))
    changes = [
        f"{name} is {old.get(name, 'missing')} there and {new.get(name, 'missing')} here"
        for name in dict.fromkeys([*new, *old])
        if old.get(name, old) != new.get(name, new)
    ]
    what = f"a run with another config ({'; '.join(changes)})" if changes else "this very run"
    return ValueError(
        f"{folder} already holds {what}. Choose another --name, or --overwrite to start over there."
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return repr(value) if value == "" else str(value)
