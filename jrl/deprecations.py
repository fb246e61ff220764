"""Names that moved: the old one works for a while, and says what to use instead."""

import pkgutil
import sys
import warnings
from typing import Any

# "jrl.old_name": ("jrl.new_name", the version from which the old one is gone)
DEPRECATED: dict[str, tuple[str, str]] = {}


def moved(module: str, name: str) -> Any:
    """What `module.name` is now, with a warning; for a module's `__getattr__`.

    Raises:
        AttributeError: there was never such a name.
    """
    old = f"{module}.{name}"
    if old not in DEPRECATED:
        owner = sys.modules[module]
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=owner)
    new, version = DEPRECATED[old]
    warnings.warn(
        f"{old} is now {new}; the old name works until jrl {version}.",
        DeprecationWarning,
        stacklevel=3,
    )
    return pkgutil.resolve_name(new)
