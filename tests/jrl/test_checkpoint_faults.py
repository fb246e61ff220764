"""Real faults: killed processes, flipped bytes, files cut or gone, folders that take nothing."""

import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import checkpoint

MB = 1 << 20


def numbered(n, size=2000):
    """A state that tells which one it is."""
    return {
        "n": np.int64(n),
        "weights": jnp.asarray(np.random.default_rng(n).normal(size=size), jnp.float32),
        "key": jax.random.key(n),
        "flags": np.arange(4) % 2 == n % 2,
    }


def content(tree):
    """Every bit of a state, by name."""
    keys = {name: jax.random.key_data(x) for name, x in tree.items() if name == "key"}
    return {name: np.asarray(x).tobytes() for name, x in (tree | keys).items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, place, mask):
    """Change the bits of `mask` in one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


# ---------------------------------------------------------------------------------------- kill -9


def keep_saving(folder):
    """Every step twice, once told to, until killed."""
    import orbax.checkpoint  # noqa: F401

    input()
    for n in itertools.count():
        checkpoint.save(folder, n // 2, numbered(n), {}, keep=2)
        print(n, flush=True)  # noqa: T201


def die_between_the_renames(folder):
    checkpoint.save(folder, 5, numbered(1), {})
    rename = Path.rename

    def last(self, target):
        rename(self, target)
        os.kill(os.getpid(), signal.SIGKILL)

    Path.rename = last
    checkpoint.save(folder, 5, numbered(2), {})


def child(function, folder):
    command = [sys.executable, __file__, function.__name__, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def test_kill_9_at_any_moment_leaves_the_last_one_that_was_saved(tmp_path):
    delay = random.Random(0)
    folders = [tmp_path / str(i) for i in range(5)]
    children = [child(keep_saving, folder) for folder in folders]
    for folder, process in zip(folders, children):
        print(file=process.stdin, flush=True)
        first = process.stdout.readline()
        time.sleep(delay.uniform(0, 0.3))
        process.kill()
        saved = [int(line) for line in (first + process.communicate()[0]).split()]
        assert process.returncode == -signal.SIGKILL
        found = checkpoint.restore(folder, None, numbered(0))
        n = int(found.state["n"])
        assert n in (saved[-1], saved[-1] + 1)  # the latter is there, its line not yet
        assert (found.step, found.notes) == (n // 2, [])
        assert content(found.state) == content(numbered(n))
        checkpoint.save(folder, found.step + 1, numbered(0), {})
        assert {Path(name).suffix for name in names(folder)} == {""}  # nothing left behind


def test_kill_9_between_the_two_renames_of_a_step_that_is_saved_again(tmp_path):
    process = child(die_between_the_renames, tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["5.old", "5.part"]
    assert checkpoint.latest(tmp_path) == 5
    found = checkpoint.restore(tmp_path, None, numbered(0))
    assert (found.step, int(found.state["n"]), found.notes) == (5, 1, [])
    checkpoint.save(tmp_path, 6, numbered(3), {})
    assert names(tmp_path) == ["5", "6"]
    assert content(checkpoint.restore(tmp_path, 5, numbered(0)).state) == content(numbered(1))


def test_a_swap_that_was_complete_but_for_the_clearing(tmp_path):
    for n in (1, 2):
        checkpoint.save(tmp_path / str(n), 5, numbered(n), {})
    (tmp_path / "1" / "5").rename(tmp_path / "2" / "5.old")
    assert int(checkpoint.restore(tmp_path / "2", None, numbered(0)).state["n"]) == 2
    checkpoint.save(tmp_path / "2", 6, numbered(3), {})
    assert names(tmp_path / "2") == ["5", "6"]
    assert int(checkpoint.restore(tmp_path / "2", 5, numbered(0)).state["n"]) == 2


# ----------------------------------------------------------------------------------------- damage


def test_flipped_bytes_are_noticed(tmp_path):
    state = numbered(1, size=50)
    checkpoint.save(tmp_path / "good", 1, state, {"config": {"seed": 1}})
    chance, noticed = random.Random(0), 0
    for i in range(100):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "good", folder)
        path = chance.choice([path for path in files(folder) if path.stat().st_size])
        flip(path, chance.randrange(path.stat().st_size), chance.randrange(1, 256))
        where = re.escape(f"{folder / '1'} is damaged ({path.relative_to(folder / '1').as_posix()}")
        try:
            with pytest.raises(checkpoint.DamagedError, match=where):
                found = checkpoint.restore(folder, 1, state)
            noticed += 1
        except pytest.fail.Exception:  # one kind of space for another in meta.json
            assert path.name == "meta.json"
            assert content(found.state) == content(state)
    assert noticed >= 98


def test_every_byte_of_meta_json_matters(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros(2)}, {"env_steps": 10, "rate": 0.5})
    path, meta = tmp_path / "1" / "meta.json", checkpoint.meta(tmp_path)
    good = path.read_bytes()
    for place in range(len(good)):
        flip(path, place, 1 << place % 7)
        try:
            assert checkpoint.meta(tmp_path) == meta
            assert good[place : place + 1].isspace()
        except checkpoint.DamagedError:
            pass
        path.write_bytes(good)


@pytest.mark.parametrize("change", ["cut", "emptied", "removed", "longer"])
def test_every_file_matters(tmp_path, change):
    state = numbered(1, size=50)
    checkpoint.save(tmp_path, 1, state, {})
    for path in files(tmp_path / "1"):
        good = path.read_bytes()
        if change == "removed":
            path.unlink()
        else:
            half = good[: len(good) // 2]
            path.write_bytes({"cut": half, "emptied": b"", "longer": good + b"!"}[change])
        name = path.relative_to(tmp_path / "1").as_posix()
        if good or change != "emptied":
            with pytest.raises(checkpoint.DamagedError, match=re.escape(f"damaged ({name}: ")):
                checkpoint.restore(tmp_path, 1, state)
        path.write_bytes(good)
    assert content(checkpoint.restore(tmp_path, 1, state).state) == content(state)
    shutil.rmtree(tmp_path / "1" / "state")
    with pytest.raises(checkpoint.DamagedError, match="state/.*: No such file"):
        checkpoint.restore(tmp_path, 1, state)


def test_a_leaf_with_other_numbers_is_noticed_even_where_every_file_is_as_written(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"a": jnp.zeros(3), "b": jnp.full(3, step)}, {})
    first, second = (json.loads((tmp_path / n / "meta.json").read_text()) for n in "12")
    second["leaves"] = first["leaves"]  # of a state that Orbax didn't write into these files
    del second["crc32"]
    second["crc32"] = zlib.crc32(json.dumps(second).encode())
    (tmp_path / "2" / "meta.json").write_text(json.dumps(second))
    with pytest.raises(checkpoint.DamagedError, match=r"damaged \(leaf b: "):
        checkpoint.restore(tmp_path, 2, {"a": jnp.zeros(3), "b": jnp.full(3, 0)})


def test_newest_goes_back_to_one_that_is_whole_and_says_so(tmp_path):
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, step, numbered(step), {"env_steps": step * 100})
    flip(tmp_path / "40" / "meta.json", 5, 1)
    flip(max(files(tmp_path / "30" / "state"), key=lambda path: path.stat().st_size), 99, 4)
    found = checkpoint.restore(
        tmp_path, None, jax.eval_shape(lambda: numbered(0)) | {"n": np.int64(0)}
    )
    assert (found.step, found.meta["env_steps"]) == (20, 2000)
    assert content(found.state) == content(numbered(20))
    first, second = found.notes
    assert re.search(r"checkpoint .*40 is damaged \(meta.json: .*\); went back to 20", first)
    assert re.search(r"checkpoint .*30 is damaged \(state/.*\); went back to 20", second)
    with pytest.raises(
        checkpoint.DamagedError, match=r"(?s)40 is damaged .*here are 40, 30, 20, 10\)"
    ):
        checkpoint.restore(tmp_path, 40, numbered(0))  # strict: asked for by its number

    for step in ("10", "20"):
        (tmp_path / step / "meta.json").unlink()
    with pytest.raises(checkpoint.DamagedError, match="or start anew elsewhere") as error:
        checkpoint.restore(tmp_path, None, numbered(0))
    assert re.findall(r"/(\d+) is damaged", str(error.value)) == ["40", "30", "20", "10"]


# ---------------------------------------------------------------------- what can't be written


def test_a_disk_that_takes_no_more(tmp_path):
    checkpoint.save(tmp_path, 1, numbered(1), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, limits[1]))  # no file over 1 MB
    try:
        with pytest.raises(OSError, match=r"checkpoint 2 needs about 4.19 MB in") as error:
            checkpoint.save(tmp_path, 2, numbered(2, size=MB), {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert str(tmp_path) in str(error.value)
    assert names(tmp_path) == ["1"]
    assert content(checkpoint.restore(tmp_path, None, numbered(0)).state) == content(numbered(1))
    checkpoint.save(tmp_path, 2, numbered(2), {}, keep=1)
    assert names(tmp_path) == ["2"]


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"checkpoint 1 needs about .* MB in .*file"):
        checkpoint.save(tmp_path / "file", 1, numbered(1), {})
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    checkpoint.save(tmp_path, 1, numbered(1), {})
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="checkpoint 2 needs about"):
            checkpoint.save(tmp_path, 2, numbered(2), {})
        assert int(checkpoint.restore(tmp_path, None, numbered(0)).state["n"]) == 1
    finally:
        tmp_path.chmod(0o700)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
