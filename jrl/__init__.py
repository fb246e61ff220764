"""jrl trains robots by reinforcement learning, as pure functions on arrays."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.registry import register_agent, register_buffer, register_env
from jrl.types import (
    Agent,
    Box,
    Buffer,
    Discrete,
    Env,
    HostAgent,
    HostEnv,
    Rollout,
    Spec,
    TimeStep,
    Transition,
    record,
)
from jrl.version import __version__

__all__ = [
    "Agent",
    "Box",
    "Buffer",
    "Discrete",
    "Env",
    "HostAgent",
    "HostEnv",
    "Rollout",
    "Spec",
    "TimeStep",
    "Transition",
    "__version__",
    "launch",
    "record",
    "register_agent",
    "register_buffer",
    "register_env",
]


def launch(
    main: Callable[[Any], Any],
    config_path: str | Path | None = None,
    args: Sequence[str] | None = None,
) -> Any:
    """Read the config and the command line, make the run's folder, call `main(config)`.

    See `jrl.launcher.launch`, which this is, imported when it is needed.
    """
    from jrl import launcher

    return launcher.launch(main, config_path, args)


if not TYPE_CHECKING:  # a type checker would believe that every name is there

    def __getattr__(name: str) -> Any:
        """A name that moved, with a warning: see `jrl.deprecations`."""
        from jrl.deprecations import moved

        return moved(__name__, name)
