"""The configuration of a run: one tree of frozen dataclasses, from YAML and the command line.

`env`, `agent` and `buffer` are the `Config` of the parts they name, so the tree is built in two
passes: the names first, then every other value over the types that belong to them.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from jrl import checks, registry, writers

_T = TypeVar("_T")

HELP = """Train a robot. The values shown are the ones in force.
--config FILE reads another YAML file. --overwrite starts over in a folder that holds a run.
--no-jit compiles nothing: slow, but a debugger and print see every number."""


@dataclass(frozen=True)
class EnvSection:
    """The task: what every task takes; the fields of the task's own `Config` join in."""

    name: str = "cartpole"
    """The task: a name that jrl knows, or the path of yours (my_pkg.my_env)."""
    action_repeat: int = 1
    """Environment steps for which each action is held."""
    frame_stack: int = 0
    """Observations shown at once, the newest last (0: just the newest)."""
    episode_length: int = 0
    """Steps after which an episode is cut off (0: what the task says)."""


@dataclass(frozen=True)
class AgentSection:
    """The algorithm; the fields of its own `Config` join in."""

    name: str = "ppo"
    """The algorithm: a name that jrl knows, or the path of yours (my_pkg.my_agent)."""


@dataclass(frozen=True)
class BufferSection:
    """Where experience waits to be learnt from; the fields of its own `Config` join in."""

    name: str = "rollout"
    """The buffer: a name that jrl knows, or the path of yours (my_pkg.my_buffer)."""


SECTIONS: dict[str, type[EnvSection | AgentSection | BufferSection]] = {
    "env": EnvSection,
    "agent": AgentSection,
    "buffer": BufferSection,
}


@dataclass(frozen=True)
class Train:
    """How much experience is collected, and in which portions."""

    total_steps: int = 1_000_000
    """Environment steps to train for, all environments together."""
    num_envs: int = 256
    """Environments that run side by side."""
    num_steps: int = 32
    """Steps of each environment in one rollout."""
    pipeline_stages: int = 1
    """Parts of num_envs that take turns, one simulating while the policy acts in the next; for
    simulators that are not JAX."""
    final_slots: int = 0
    """Last observations of cut-off episodes that one rollout can hold (0: chosen from its size)."""


@dataclass(frozen=True)
class Evaluation:
    """Measuring the policy without exploration."""

    episodes: int = 16
    """Episodes in one evaluation."""
    interval: int = 0
    """Updates between evaluations (0: only at the end)."""
    seed: int = 1_000
    """Seed of the evaluation episodes, the same ones each time."""


@dataclass(frozen=True)
class Runtime:
    """Where and how the program runs."""

    mode: Literal["local"] = "local"
    """local: everything in this process."""
    devices: int = 1
    """Devices to spread the environments over; this version knows one."""
    compile_cache: bool = True
    """Keep compiled programs on disk, so that the next start is quick."""
    jit: bool = True
    """Compile; off is for stepping through the code in a debugger, and slow."""
    matmul_precision: Literal["default", "high", "highest"] = "highest"
    """Precision of matrix products; GPUs round to TF32 below highest, which ruins some runs."""


@dataclass(frozen=True)
class Log:
    """What a run leaves behind."""

    root: str = "runs"
    """Folder in which each run gets a folder of its own."""
    interval: float = 1.0
    """Seconds between two lines on the console."""
    video: bool = True
    """Film one episode of the final policy."""
    plot: bool = True
    """Draw curves.png at the end."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints (0: none by time)."""
    checkpoint_interval: int = 0
    """Updates between checkpoints (0: none by number). One is written at the end in any case."""
    keep_checkpoints: int = 3
    """Checkpoints to keep, the newest ones (0: all)."""
    profile: bool = False
    """Run the stages one by one, and record a trace of a few updates for Perfetto."""
    writers: tuple[str, ...] = ()
    """Where scalars go besides metrics.jsonl: tensorboard, wandb, swanlab."""


@dataclass(frozen=True)
class Config:
    """Everything that defines a run. `load` and `from_dict` build it."""

    name: str = ""
    """Name of the run and of its folder (empty: env, agent and time)."""
    resume: str = ""
    """Folder of a run to go on with; its config takes the place of --config."""
    seed: int = 0
    """Seed of everything random."""
    env: EnvSection = EnvSection()
    """The task."""
    agent: AgentSection = AgentSection()
    """The algorithm."""
    buffer: BufferSection = BufferSection()
    """Where experience waits to be learnt from."""
    train: Train = Train()
    """How much experience is collected, and in which portions."""
    eval: Evaluation = Evaluation()
    """Measuring the policy without exploration."""
    runtime: Runtime = Runtime()
    """Where and how the program runs."""
    log: Log = Log()
    """What a run leaves behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (to_dict(self),)  # its class is made at run time: pickle the values


def load(path: str | Path | None, args: Sequence[str]) -> Config:
    """The config in the YAML file `path`, changed by the command line `args`.

    `--config other.yaml` on the command line takes the place of `path`; None means defaults.

    Raises:
        ValueError: an unknown key or name (with the nearest), a wrong type, a value out of range.
        SystemExit: `--help`, or an error on the command line, which has then been printed.
    """
    import tyro

    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names.add_argument("--config", default=path)
    names.add_argument("--resume")
    for section in SECTIONS:
        names.add_argument(f"--{section}.name", dest=section)
    first, args = names.parse_known_args(list(args))
    source = str(first.config) if first.config else "the defaults"
    values = _read(first.config) if first.config else {}
    if first.resume is not None:
        values, source = _going_on(Path(first.resume)), f"{first.resume}/config.yaml"
    for section in SECTIONS:
        name, given = getattr(first, section), values.get(section) or {}
        if name and isinstance(given, Mapping):
            values[section] = {**given, "name": name}
    default = from_dict(values, source)
    config = tyro.cli(type(default), args=args, default=default, description=HELP)
    check(config)
    return config


def from_dict(values: Mapping[str, Any], source: str = "config") -> Config:
    """A config from nested mappings; what they leave out has its default. `source` is for errors.

    Raises:
        ValueError: an unknown key or name (with the nearest), or a wrong type.
    """
    parts, values = [], dict(values)
    for kind, section in SECTIONS.items():
        given = values.get(kind)
        name = given.get("name") if isinstance(given, Mapping) else None
        part = registry.load(kind, str(name or section.name))
        parts.append(part.Config)
        if isinstance(given, Mapping) and name:
            values[kind] = {**given, "name": part.name}  # what another process finds it by
    return _fill(_tree(*parts), values, "", source)


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts of plain values."""
    return dataclasses.asdict(config)


def save(config: Config, path: str | Path) -> None:
    """Write the config as YAML, its folder too; `load` reads the same config back."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a full disk must not cost the config that is there
    part.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
    part.replace(path)


def check(config: Config) -> None:
    """Check the values that belong together or have a range.

    Raises:
        ValueError: naming the value, and the numbers that would work.
    """
    train, runtime = config.train, config.runtime
    at_least = {
        0: ("seed", "env.frame_stack", "env.episode_length", "train.final_slots", "eval.interval",
            "eval.seed", "log.interval", "log.checkpoint_seconds", "log.checkpoint_interval",
            "log.keep_checkpoints"),
        1: ("env.action_repeat", "train.total_steps", "train.num_envs", "train.num_steps",
            "train.pipeline_stages", "eval.episodes", "runtime.devices"),
    }  # fmt: skip
    for low, names in at_least.items():
        for name in names:
            if not (value := attrgetter(name)(config)) >= low:
                raise ValueError(f"{name} must be at least {low}, got {value}.")
    if config.name == ".." or Path(config.name).name != config.name:
        raise ValueError(f"name must be one folder name, got {config.name!r}. See log.root.")
    if runtime.devices > 1:
        raise ValueError(
            f"runtime.devices = {runtime.devices}, but this version trains on one. Leave it 1."
        )
    if (
        config.resume
        and Path(config.log.root, config.name).resolve() != Path(config.resume).resolve()
    ):
        raise checks.ConfigError(
            f"a run goes on in its own folder, {config.resume}: leave --name and --log.root away."
        )
    writers.check(config.log.writers)
    checks.divides(train.num_envs, train.pipeline_stages, "train.num_envs", "train.pipeline_stages")
    batch = train.num_envs * train.num_steps
    if train.total_steps < batch:
        raise ValueError(
            f"train.total_steps = {train.total_steps} is less than one rollout: train.num_envs = "
            f"{train.num_envs} times train.num_steps = {train.num_steps} is {batch} steps. "
            f"Raise total_steps to {batch} or more, or lower one of the others."
        )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In which fields two configs (as `to_dict` gives them) differ, for people."""
    there, here = (dict(_flat(yaml.safe_load(yaml.safe_dump(dict(x))))) for x in (old, new))
    return [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in dict.fromkeys([*here, *there])
        if there.get(name, there) != here.get(name, here)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _going_on(folder: Path) -> dict[str, Any]:
    """The values of the run in `folder`, to go on with it."""
    if not (folder / "config.yaml").is_file():
        runs = sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))
        near = difflib.get_close_matches(folder.name, runs, n=1) or runs[-1:]
        guess = f" Did you mean {folder.parent / near[0]}?" if near else ""
        raise checks.ConfigError(f"there is no run in {folder} (no config.yaml).{guess}")
    values = _read(folder / "config.yaml")
    log = {**(values.get("log") or {}), "root": str(folder.parent)}
    return {**values, "name": folder.resolve().name, "log": log, "resume": str(folder)}


@functools.cache
def _tree(*parts: type) -> type[Config]:
    """`Config` with the sections of these parts; one class for each choice of them."""
    sections = [
        (kind, dataclasses.make_dataclass(section.__name__, [], bases=(part, section), frozen=True))
        for (kind, section), part in zip(SECTIONS.items(), parts)
    ]
    fields = [(kind, cls, cls()) for kind, cls in sections]
    return dataclasses.make_dataclass("Config", fields, bases=(Config,), frozen=True)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise ValueError(f"can't read the config file {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping (key: value), it holds {values!r}.")
    return values


def _fill(cls: type[_T], values: Any, name: str, source: str) -> _T:
    """An instance of the dataclass `cls`, called `name` in the tree, from a mapping."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: {name} must be a mapping (key: value), got {values!r}.")
    hints = typing.get_type_hints(cls)
    dot = f"{name}." if name else ""
    known = [f"{dot}{field.name}" for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if f"{dot}{key}" not in known:
            homes = [n for n, h in hints.items() if key in getattr(h, "__dataclass_fields__", ())]
            hint = f" It may belong to {homes[0]}: {homes[0]}.{key}." if homes else ""
            raise checks.unknown(f"key in {source}:", f"{dot}{key}", known, hint)
    return cls(**{k: _convert(v, hints[k], f"{dot}{k}", source) for k, v in values.items()})


def _convert(value: Any, hint: Any, name: str, source: str) -> Any:
    """A YAML value as the type `hint` asks for."""
    kind, options = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _fill(hint, {} if value is None else value, name, source)  # type: ignore[arg-type]
    if kind is tuple and isinstance(value, list | tuple):
        parts = options[:1] * len(value) if options[-1:] == (...,) else options
        if len(parts) == len(value):
            return tuple(_convert(v, h, name, source) for v, h in zip(value, parts))
    for option in options if kind in (typing.Union, types.UnionType) else ():
        with contextlib.suppress(ValueError):
            return _convert(value, option, name, source)
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return _number(value, kind)
    plain = isinstance(kind, type) and kind not in (int, float, tuple) and isinstance(value, kind)
    if hint is Any or plain or (kind is Literal and value in options):
        return value
    wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise ValueError(f"{source}: {name} must be {wanted}, got {value!r}.")


def _number(value: Any, kind: type) -> int | float:
    """A number of this kind; YAML reads 1e6 as text, and True is no number here."""
    number = float(str(value))
    if kind is float or isinstance(value, int):
        return kind(value)
    if not number.is_integer():
        raise ValueError(f"{value!r} is not a whole number.")
    return int(number)
