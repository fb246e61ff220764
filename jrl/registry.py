"""Names to parts: the core reaches agents and environments by name only, never by import."""

import importlib
from types import ModuleType
from typing import Any

from jrl.checks import unknown

AGENTS = {"ppo": "jrl.agents.ppo"}
ENVS = {
    "ant": "jrl.envs.ant",
    "cartpole": "jrl.envs.cartpole",
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


def load(kind: str, name: str, known: dict[str, str]) -> ModuleType:
    """The module behind a name of `known`, or behind a dotted path such as `my_pkg.my_env`.

    Raises:
        ValueError: for an unknown name, with the nearest one.
        ImportError: for a dotted path that can't be imported.
    """
    path = known.get(name) or (name if "." in name else "")
    if not path:
        raise unknown(kind, name, known, " A dotted path to a module of yours works as well.")
    return importlib.import_module(path)


def make(kind: str, name: str, known: dict[str, str], **overrides: Any) -> Any:
    """`module.make(module.Config(**overrides))` of the module behind `name`."""
    module = load(kind, name, known)
    fields = module.Config.__dataclass_fields__
    for key in overrides:
        if key not in fields:
            raise unknown(f"option of {kind} {name!r}:", key, fields)
    return module.make(module.Config(**overrides))
