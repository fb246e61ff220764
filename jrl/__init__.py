"""jrl trains robots by reinforcement learning, as pure functions on arrays."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jrl.types import (
    Agent,
    Box,
    Buffer,
    Discrete,
    Env,
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
    "HostEnv",
    "Rollout",
    "Spec",
    "TimeStep",
    "Transition",
    "__version__",
    "launch",
    "record",
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
