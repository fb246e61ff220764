"""What `jrl doctor` says: what this machine has, what is missing, and the line that installs it."""

import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from jrl.version import __version__

CORE = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "mujoco", "mujoco-mjx", "numpy")
EXTRAS = {  # what it is for: (module, extra of this package)
    "torch policies and simulators": ("torch", "torch"),
    "clusters": ("ray", "ray"),
    "ManiSkill": ("mani_skill", "sim"),
    "MuJoCo Warp on NVIDIA GPUs": ("warp", "warp"),
    "TensorBoard": ("tensorboardX", "log"),
    "Weights & Biases": ("wandb", "log"),
    "SwanLab": ("swanlab", "log"),
}


def report() -> None:
    """Print everything, a line each; a missing part has the line that installs it."""
    found = list(findings())
    width = max(len(what) for what, _ in found)
    for what, line in found:
        print(f"{what:{width}}  {line}")


def findings() -> Iterator[tuple[str, str]]:
    """What there is: (what, what was found)."""
    yield "jrl", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in CORE:
        yield package, _version(package)
    devices = jax.devices()
    yield "devices", f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"
    if jax.default_backend() == "cpu" and Path("/proc/driver/nvidia").exists():
        yield "", "an NVIDIA driver is here, but JAX has no GPU: pip install 'jax[cuda13]'"
    yield "threads", _threads()
    yield "memory of JAX on a GPU", _preallocation()
    yield "compile cache", _cache()
    yield "rendering", _rendering()
    for what, (module, extra) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        yield what, f"{module} is there" if there else f"pip install 'jrl-embodied[{extra}]'"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"missing: pip install {package}"


def _threads() -> str:
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    limits = {k: os.environ[k] for k in ("OMP_NUM_THREADS", "XLA_FLAGS") if k in os.environ}
    said = "".join(f", {key}={value}" for key, value in limits.items())
    return f"{cores} cores for this process, of {os.cpu_count()}{said}"


def _preallocation() -> str:
    whole = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75")
    if not whole:
        return "taken as needed"
    return f"{share} of it taken at the start (XLA_PYTHON_CLIENT_PREALLOCATE=false: as needed)"


def _cache() -> str:
    from jrl import compilecache

    notes = compilecache.keep()
    return notes[0] if notes else str(jax.config.values["jax_compilation_cache_dir"])


def _rendering() -> str:
    """Film two positions of a ball, for real."""
    import mujoco

    from jrl.checks import UnavailableError

    render = importlib.import_module("jrl.envs.render")
    ball = "<mujoco><worldbody><body><freejoint/><geom size='.1'/></body></worldbody></mujoco>"
    model = mujoco.MjModel.from_xml_string(ball)
    with tempfile.TemporaryDirectory() as folder:
        try:
            render.video(model, np.zeros((2, 7)), f"{folder}/ball.mp4", fps=30.0)
        except UnavailableError as error:
            return str(error)
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    shown = screen or sys.platform != "linux"
    return "films work" + ("" if shown else "; the viewer needs a display, and there is none")
