import subprocess
import sys

import pytest

from jrl import compilecache

PROGRAM = """
import warnings, jax, jax.numpy as jnp
from jrl.config import Config
from jrl.launcher import prepare
warnings.simplefilter("always")
assert prepare(Config()) == []
run = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))
print(float(run(jnp.arange(9.0).reshape(3, 3))[1, 2]))
"""


def start():
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process):
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return float(out), errors


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jrl" / "jax"


def test_two_processes_share_it_and_half_written_programs_are_compiled_again(home):
    # Both start with an empty cache, and write the same programs into it at the same time.
    first, second = [end(process)[0] for process in (start(), start())]
    assert first == second
    programs = list(home.rglob("jit__lambda*-cache"))
    assert programs  # and in the folder of this kind of machine:
    assert {path.parent.name.rpartition("-")[2] for path in programs} == {
        compilecache.kind().rpartition("-")[2]
    }
    for path in home.rglob("*-cache"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again, said = end(start())
    assert again == first
    assert "persistent compilation cache" in said  # JAX says that it couldn't read them


def test_machines_of_another_kind_have_another_folder(tmp_path):
    cpus = {
        "old": "model name\t: A CPU\nflags\t\t: sse avx2\n",
        "new": "model name\t: A CPU\nflags\t\t: sse avx2 avx512f\n",
        "busy": "model name\t: A CPU\ncpu MHz\t\t: 2200\nflags\t\t: sse avx2\n",
    }
    kinds = {}
    for name, text in cpus.items():
        (tmp_path / name).write_text(text * 2)  # two cores
        kinds[name] = compilecache.kind(tmp_path / name)
    assert kinds["old"] != kinds["new"]
    assert kinds["old"] == kinds["busy"]
    assert compilecache.kind(tmp_path / "none")  # no such file on macOS
