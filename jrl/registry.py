"""Names to parts: the core reaches tasks, algorithms and buffers by name only, never by import.

A name is looked up among jrl's own, then among those registered in this process, then among those
that installed packages offer (entry points), and else read as a path: `my_pkg.my_env` is a module
with `Config` and `make`, `my_pkg.my_env:walk` a function in it.
"""

import inspect
import operator
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jrl.checks import ConfigError, unknown
from jrl.parts import KINDS, Part, read

AGENTS = {"ppo": "jrl.agents.ppo"}
BUFFERS = {"rollout": "jrl.buffers:rollout"}
ENVS = {
    "ant": "jrl.envs.ant",
    "cartpole": "jrl.envs.cartpole",
    "gymnasium": "jrl.envs.adapters.gymnasium",
    "halfcheetah": "jrl.envs.halfcheetah",
    "hopper": "jrl.envs.hopper",
    "humanoid": "jrl.envs.humanoid",
    "humanoid_fast": "jrl.envs.humanoid_fast",
    "humanoid_standup": "jrl.envs.humanoid_standup",
    "inverted_double_pendulum": "jrl.envs.inverted_double_pendulum",
    "inverted_pendulum": "jrl.envs.inverted_pendulum",
    "pendulum": "jrl.envs.pendulum",
    "pusher": "jrl.envs.pusher",
    "reacher": "jrl.envs.reacher",
    "swimmer": "jrl.envs.swimmer",
    "walker2d": "jrl.envs.walker2d",
}
OURS = {"env": ENVS, "agent": AGENTS, "buffer": BUFFERS}

_registered: dict[str, dict[str, str]] = {kind: {} for kind in OURS}
_NAME = re.compile(r"[\w-]+")
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")

Target = str | ModuleType | Callable[..., Any]


class Entry(NamedTuple):
    """Where a name leads, and who says so."""

    path: str
    owner: str


def register_env(name: str, target: Target) -> None:
    """Give a task of yours a name, for configs and for `jrl.envs.make`.

    A name is short for an import path. The configs of runs hold the path, so that another process
    finds the task too; it has to be in a module that can be imported there.

    Args:
        name: letters, digits, `_` and `-`.
        target: a path, "my_pkg.my_env" or "my_pkg.my_env:walk"; or the module, or the function. A
            module has `Config` (a frozen dataclass with defaults) and `make(cfg) -> Env`; a
            function takes a `Config` that its parameter is annotated with, or nothing.

    Raises:
        ConfigError: the name is taken by something else, or no other process could find the target.
    """
    _register("env", name, target)


def register_agent(name: str, target: Target) -> None:
    """Give an algorithm of yours a name: `make(cfg, spec) -> Agent`. See `register_env`."""
    _register("agent", name, target)


def register_buffer(name: str, target: Target) -> None:
    """Give a buffer of yours a name: `make(cfg) -> Buffer` or `make()`. See `register_env`."""
    _register("buffer", name, target)


def load(kind: str, name: str) -> Part:
    """The part of a kind, "env", "agent" or "buffer", behind a name or a path.

    Raises:
        ConfigError: nobody knows the name (naming the nearest), or what it leads to can't be used.
    """
    title = f"{KINDS[kind].noun} {name!r}"
    entry = find(kind, name)
    if entry is None and _PATH.fullmatch(name) and ("." in name or ":" in name):
        return read(kind, name, name, title)
    if entry is None:
        hint = " A path works as well: my_pkg.my_module, or my_module:my_function."
        raise unknown(KINDS[kind].noun, name, names(kind), hint)
    if entry.path != name and entry.owner != "jrl":
        title += f" ({entry.path}, of {entry.owner})"
    lasting = entry.path if name in _registered[kind] else name
    return read(kind, lasting, entry.path, title)


def find(kind: str, name: str) -> Entry | None:
    """Where a name leads; None where nobody knows it.

    Raises:
        ConfigError: two installed packages offer it.
    """
    if name in OURS[kind]:
        return Entry(OURS[kind][name], "jrl")
    if name in _registered[kind]:
        return Entry(_registered[kind][name], "this program")
    offers = _installed(kind).get(name, [])
    if len({offer.path for offer in offers}) > 1:
        both = " and ".join(sorted(f"{offer.owner} ({offer.path})" for offer in offers))
        raise ConfigError(
            f"{both} both offer the {KINDS[kind].noun} {name!r}. Use one by its path, or uninstall "
            "the other."
        )
    return offers[0] if offers else None


def names(kind: str) -> dict[str, str]:
    """Every name that is known: jrl's own, registered or installed; and where it leads."""
    installed = {name: offers[0].path for name, offers in _installed(kind).items()}
    return {**installed, **_registered[kind], **OURS[kind]}


def make(kind: str, name: str, **overrides: Any) -> Any:
    """A task or a buffer by name; `overrides` are fields of its `Config`."""
    part = load(kind, name)
    fields = part.Config.__dataclass_fields__  # type: ignore[attr-defined]
    for key in overrides:
        if key not in fields:
            raise unknown(f"option of {KINDS[kind].noun} {name!r}:", key, fields)
    return part.make(part.Config(**overrides))


def _register(kind: str, name: str, target: Target) -> None:
    if not _NAME.fullmatch(name):
        noun = KINDS[kind].noun
        raise ConfigError(f"{noun} name {name!r}: use letters, digits, _ and -, at least one.")
    path = import_path(target)
    known = find(kind, name)
    if known is not None and tidy(known.path) != path:
        raise ConfigError(
            f"{KINDS[kind].noun} name {name!r}: {known.owner} has it for {known.path}. Choose "
            f"another name for {path}."
        )
    if known is None:
        _registered[kind][name] = path


def import_path(target: Target) -> str:
    """The path by which any process can import a module or a function.

    Raises:
        ConfigError: no other process could, and why.
    """
    if isinstance(target, str):
        if not _PATH.fullmatch(target):
            raise ConfigError(f"{target!r} is no import path such as my_pkg.my_module:make.")
        module, _, name = target.partition(":")
    elif inspect.ismodule(target):
        module, name = target.__name__, ""
    else:
        module = getattr(target, "__module__", "") or ""
        name = getattr(target, "__qualname__", "")
    trouble = ""
    if module == "__main__":
        trouble = "it belongs to the program itself (__main__), which others don't import"
    elif "<lambda>" in name:
        trouble = "a lambda has no name"
    elif "<locals>" in name:
        trouble = "it exists only inside another function"
    elif not isinstance(target, str) and not _is_at(target, module, name):
        trouble = "importing that gives something else (was the module reloaded?)"
    if trouble:
        raise ConfigError(
            f"{target!r} can't be registered, because another process could not find it: "
            f"{trouble}. Write it into a module, as a function of its own, and import it there."
        )
    return tidy(f"{module}:{name}" if name else module)


def _is_at(target: Any, module: str, name: str) -> bool:
    """Whether a module or function is what its own path leads to."""
    found = sys.modules.get(module)
    try:
        return target is (operator.attrgetter(name)(found) if name else found)
    except AttributeError:
        return False


def tidy(path: str) -> str:
    """One spelling: `a.b` for `a.b:make`, and `a:make` for a module `a`, as no name has a colon."""
    if "." in path.partition(":")[0]:
        return path.removesuffix(":make")
    return path if ":" in path else f"{path}:make"


def _installed(kind: str) -> dict[str, list[Entry]]:
    """What installed packages offer in the entry point group `jrl.envs`, `jrl.agents` ..."""
    from importlib.metadata import entry_points  # costs time, and is rarely needed

    offers: dict[str, list[Entry]] = {}
    for point in entry_points(group=f"jrl.{kind}s"):
        owner = f"the installed package {point.dist.name!r}" if point.dist else "a package"
        path = "".join(point.value.partition("[")[0].split())
        offers.setdefault(point.name, []).append(Entry(path, owner))
    return offers
