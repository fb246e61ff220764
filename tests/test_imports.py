"""What `import jrl` loads, and in which directions its modules import one another."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jrl

ROOT = Path(__file__).parents[1]
# flax loads rich by itself, so rich can't be kept out
HEAVY = {"torch", "ray", "mujoco", "tyro", "matplotlib", "orbax", "gymnasium", "imageio"}
LIGHT = ("jrl", "jrl.envs", "jrl.agents.ppo", "jrl.loops", "jrl.config", "jrl.testing")


def python(code: str, **env: str) -> str:
    """What a fresh interpreter prints, run outside the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT.anchor,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_stays_light():
    loaded = python(f"import sys, {', '.join(LIGHT)}; print(*sys.modules)").split()
    assert "jrl.agents.ppo" in loaded
    assert not HEAVY & set(loaded)


def test_importing_starts_no_jax_backend():
    # a program must still be able to choose its devices after the import
    code = f"import {', '.join(LIGHT)}; from jax._src import xla_bridge as x; print(x._backends)"
    assert python(code).strip() == "{}"


def test_launch_is_the_function():
    assert python("from jrl import launch; print(callable(launch))").strip() == "True"


@pytest.mark.parametrize("name", jrl.__all__)
def test_public_names_say_what_they_are(name):
    thing = getattr(jrl, name)
    written = inspect.getdoc(thing) or ""
    made_up = written.startswith((f"{name}(", "Alias for"))  # what dataclass and NamedTuple invent
    assert written
    assert not made_up


def test_every_name_of_the_registry_is_a_part():
    from jrl import registry

    for known in (registry.ENVS, registry.AGENTS):
        for path in known.values():
            module = importlib.import_module(path)
            assert callable(module.make)
            module.Config()


def test_imports_point_one_way():
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
