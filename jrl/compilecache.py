"""Compiled programs are kept in the user's cache folder, so that the next start is quick.

The folder can be shared, also over a network by machines of several kinds: programs for a CPU use
the instructions that it has, and JAX asks nobody before it runs them, so every kind of machine has
a folder of its own in it. What a killed process left half written is compiled again.
"""

import os
import platform
import tempfile
import zlib
from pathlib import Path

import jax
import jaxlib


def keep() -> list[str]:
    """Turn the cache on, where JAX was given none already; notes why, where that can't be."""
    given = jax.config.values["jax_compilation_cache_dir"]
    try:
        own = f"{jaxlib.__version__}-{kind()}"
        folder = Path(given) if given else _home() / "jrl" / "jax" / own
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        return [f"compile cache off, each start compiles again: {error}"]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return []


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The kind of this machine: its architecture, and a digest of its CPU's model and abilities."""
    names = ("model name", "flags", "Features", "CPU part")  # of x86, and of Arm
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    about = {line for line in lines if line.startswith(names)} or {platform.processor()}
    return f"{platform.machine()}-{zlib.crc32(''.join(sorted(about)).encode()):08x}"
