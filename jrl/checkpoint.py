"""Save and restore a training state: a folder for each step, all of it or none of it.

A step's folder holds `meta.json` and `state/` (Orbax), which is one array: the bytes of the leaves,
in the order of `meta.json`. That lists them by their dotted names, so a checkpoint depends neither
on how the Python classes are built nor on the devices. It also has a CRC-32 of every leaf, of every
file and of itself: nothing is read from a file that isn't as it was written.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.checks import ConfigError
from jrl.types import Tree
from jrl.version import __version__

FORMAT = 2  # of the folder; raised, with a line in MIGRATIONS, when what is written changes
Arrays = dict[str, np.ndarray]


class DamagedError(ValueError):
    """A checkpoint isn't as it was written."""


class MisfitError(ConfigError):
    """A checkpoint belongs to another program or another config."""


class Restored(NamedTuple):
    """A checkpoint that was read, with its `meta` and what people should know about it."""

    step: int
    state: Tree
    meta: dict[str, Any]
    notes: list[str]


def save(
    directory: str | Path, step: int, state: Tree, meta: Mapping[str, Any], keep: int = 0
) -> None:
    """Write `state` and `meta` to `directory/<step>`, in place of what was there.

    Returns when everything is on disk. Whenever a save is interrupted, the earlier checkpoints are
    as they were; the next save clears what it left. `meta` is kept as JSON, with the versions of
    jrl and JAX added. With `keep`, older steps are removed afterwards, so that the newest `keep`
    are left (0: all); higher steps stay.

    Raises:
        OSError: the folder can't be written, or the disk is full.
    """
    root = Path(directory).absolute()
    part = root / f"{step}.part"
    leaves = _leaves(state)
    arrays = {name: _array(leaf) for name, leaf in leaves.items()}
    sums = {
        name: {"kind": _kind(leaves[name]), "bytes": array.nbytes, "crc32": _crc(array)}
        for name, array in arrays.items()
    }
    versions = {"jrl": __version__, "jax": jax.__version__}
    about = {**meta, "format": FORMAT, "versions": versions, "leaves": sums}
    try:
        _tidy(root)
        _write(part, arrays, about)
        _swap(part, root / str(step))
    except (OSError, ValueError) as error:
        code = _errno(error)
        if code is None:
            raise
        size = sum(array.nbytes for array in arrays.values()) / 1e6
        needs = f"checkpoint {step} needs about {size:.3g} MB in {root}"
        what = f"{os.strerror(code)}: {needs}. Earlier checkpoints are as they were."
        raise OSError(code, what) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if keep:
        _prune(root, step, keep)


def restore(
    directory: str | Path, step: int | None, like: Tree, *, partial: bool = False
) -> Restored:
    """A checkpoint, its state with the structure, types and placement of `like`.

    Args:
        directory: of the checkpoints.
        step: which; None for the newest that is whole: `notes` then names those passed over.
        like: a state of this program, or its `jax.eval_shape`; its values are not used.
        partial: leaves that the checkpoint has and `like` hasn't are left out.

    Raises:
        FileNotFoundError: no such checkpoint.
        DamagedError: it isn't as it was written; or none is, and each is named.
        MisfitError: it has other leaves, shapes or dtypes than `like` (each is named).
        ValueError: a newer jrl wrote it.
    """
    asked, folders = _folder(directory, step), _folders(directory)
    damaged: list[str] = []
    for folder in folders.values() if step is None else [asked]:
        try:
            found = _read(folder, like, partial=partial)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        passed = [f"{what}; went back to {found.step}" for what in damaged]
        return found._replace(notes=passed + found.notes)
    steps = ", ".join(map(str, folders))
    what_now = f"Restore another step (here are {steps}) or a copy, or start anew elsewhere."
    raise DamagedError("\n".join([*damaged, what_now]))


def meta(directory: str | Path, step: int | None = None) -> dict[str, Any]:
    """What `save` was given as `meta`, plus `versions`, `format`, `leaves`, `files` (None: latest).

    Raises what `restore` does, of `meta.json` alone.
    """
    return _about(_folder(directory, step))


def latest(directory: str | Path) -> int | None:
    """The highest step with a checkpoint in `directory`, None where there is none."""
    return max(_folders(directory), default=None)


def _folders(directory: str | Path) -> dict[int, Path]:
    """Steps and folders, newest first; `<step>.old` counts where a save died before its swap."""
    paths = sorted(Path(directory).absolute().glob("*"), reverse=True)  # "5.old" before "5"
    names = [(path.name.removesuffix(".old"), path) for path in paths]
    found = {int(name): path for name, path in names if name.isdecimal()}
    return dict(sorted(found.items(), reverse=True))


def _folder(directory: str | Path, step: int | None) -> Path:
    root, folders = Path(directory).absolute(), _folders(directory)
    if not folders:
        raise FileNotFoundError(f"no checkpoint in {root}")
    last = next(iter(folders))
    if step is not None and step not in folders:
        raise FileNotFoundError(f"no checkpoint of step {step} in {root}; the latest is {last}")
    return folders[last if step is None else step]


def _tidy(root: Path) -> None:
    """Clear what killed saves left in `root`, and put back what one had moved away."""
    root.mkdir(parents=True, exist_ok=True)
    for step, folder in _folders(root).items():
        if folder.suffix == ".old":
            folder.rename(root / str(step))
    for path in [*root.glob("*.old"), *root.glob("*.part")]:
        if path.stem.isdecimal():
            shutil.rmtree(path, ignore_errors=True)


def _write(part: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    """Everything of a checkpoint, down to the disk."""
    part.mkdir()
    if any(array.size for array in arrays.values()):  # Orbax doesn't store empty arrays
        # One array: where writing one of many fails, Orbax leaves the others being written.
        everything = np.concatenate([_bytes(array) for array in arrays.values()])
        with _orbax() as (ocp, checkpointer):
            checkpointer.save(part / "state", args=ocp.args.PyTreeSave({"bytes": everything}))
    paths = sorted(part.rglob("*"))
    files = {path.relative_to(part).as_posix(): _sum(path) for path in paths if path.is_file()}
    about = about | {"files": files}
    text = json.dumps(about | {"crc32": _crc_of_meta(about)}, indent=1)
    (part / "meta.json").write_text(text)
    for path in [*paths, part / "meta.json", part]:
        _sync(path)


def _swap(part: Path, final: Path) -> None:
    """Put a complete checkpoint in its place; one of the two is there at any moment."""
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        final.rename(old)
    part.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove checkpoints, so that `keep` of those up to `step` are left."""
    known = [folder for s, folder in _folders(root).items() if s <= step]
    for folder in known[keep:]:
        part = folder.with_name(f"{folder.name}.part")
        folder.rename(part)  # gone at once, and never there in part
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _errno(error: Exception) -> int | None:
    """The system's error number; TensorStore's errors have it in their text only."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def _read(folder: Path, like: Tree, *, partial: bool) -> Restored:
    about = _about(folder)
    leaves = _leaves(like)
    stored = {name: leaf["kind"] for name, leaf in about["leaves"].items()}
    if partial:
        stored = {name: kind for name, kind in stored.items() if name in leaves}
    _fits(stored, leaves, folder)
    for name, (size, crc) in about["files"].items():
        _check_file(folder, name, size, crc)
    room = {name: _room(leaf) for name, leaf in leaves.items()}
    try:
        arrays = _load(folder, room, about)
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder, f"state: {error}") from error
    for name, array in arrays.items():
        crc = about["leaves"][name]["crc32"]
        if crc not in (None, _crc(array)):
            raise _damaged(folder, f"leaf {name}: its CRC-32 isn't the saved one")
    placed = [_place(arrays[name], leaf) for name, leaf in leaves.items()]
    state = jax.tree.unflatten(jax.tree.structure(like), placed)
    old = f"checkpoint {folder} was written without checksums: damage in it would go unnoticed"
    return Restored(int(folder.stem), state, about, [old] if about["format"] == 1 else [])


def _about(folder: Path) -> dict[str, Any]:
    """What `meta.json` says, as this version writes it."""
    try:
        about = dict(json.loads((folder / "meta.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder, f"meta.json: {error}") from error
    crc = about.pop("crc32", None)
    without = crc is None and about.get("format") == 1 and "leaves" in about
    if not without and crc != _crc_of_meta(about):
        raise _damaged(folder, "meta.json: its CRC-32 isn't the saved one")
    if about["format"] > FORMAT:
        what = f"has format {about['format']}, and jrl {__version__} reads up to {FORMAT}"
        raise ValueError(f"checkpoint {folder} {what}: a newer jrl wrote it. Update jrl.")
    for version in range(about["format"], FORMAT):
        about = MIGRATIONS[version](about)
    return about


def _from_1(about: dict[str, Any]) -> dict[str, Any]:
    """Format 1 has no checksums, and its leaves are just `"float32[2,3]"`."""
    leaves = {name: {"kind": kind, "crc32": None} for name, kind in about["leaves"].items()}
    return about | {"leaves": leaves, "files": {}}


# What makes the meta.json of a format that of the next one; `format` keeps saying what is on disk.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}


def _check_file(folder: Path, name: str, size: int, crc: int) -> None:
    try:
        found = _sum(folder / name)
    except OSError as error:
        raise _damaged(folder, f"{name}: {error.strerror}") from error
    if found != (size, crc):
        raise _damaged(folder, f"{name}: {found[0]} bytes, CRC-32 {found[1]}; saved: {size}, {crc}")


def _load(folder: Path, room: Arrays, about: dict[str, Any]) -> Arrays:
    """The arrays of a checkpoint that `room` has, which knows their shapes and dtypes."""
    if about["format"] == 1:  # every leaf was an array of Orbax
        return _restored(folder, room)
    sizes = {name: leaf["bytes"] for name, leaf in about["leaves"].items()}
    everything = _restored(folder, {"bytes": np.empty(sum(sizes.values()), np.uint8)})["bytes"]
    parts = zip(sizes, np.split(everything, np.cumsum(list(sizes.values()))[:-1]))
    return {
        name: part.copy().view(room[name].dtype).reshape(room[name].shape)
        for name, part in parts
        if name in room
    }


def _restored(folder: Path, target: Arrays) -> Arrays:
    """What Orbax stored, shaped like `target`; it doesn't store what is empty."""
    stored = {name: array for name, array in target.items() if array.size}
    if not stored:
        return target
    with _orbax() as (ocp, checkpointer):
        host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
        args = ocp.args.PyTreeRestore(stored, restore_args=host, partial_restore=True)
        return target | checkpointer.restore(folder / "state", args=args)


def _damaged(folder: Path, what: str) -> DamagedError:
    return DamagedError(f"checkpoint {folder} is damaged ({what})")


def _fits(stored: Mapping[str, str], leaves: Mapping[str, Any], folder: Path) -> None:
    here = {name: _kind(leaf) for name, leaf in leaves.items()}
    wrong = [
        f"{name}: {stored.get(name, 'missing')} in the checkpoint, {here.get(name, 'missing')} here"
        for name in dict.fromkeys([*stored, *here])
        if stored.get(name) != here.get(name)
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise MisfitError(
            f"the checkpoint {folder} doesn't fit this program, which was probably built from "
            f"another config (its own is in its meta.json):\n  " + "\n  ".join(wrong[:10]) + more
        )


def _leaves(state: Tree) -> dict[str, Any]:
    """The leaves by their dotted names; plain numbers as NumPy."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "state"
        if name in leaves:
            raise ValueError(f"two leaves are called {name}: rename the key that has a dot in it.")
        leaves[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return leaves


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _array(leaf: Any) -> np.ndarray:
    """A leaf as it is stored: keys as what they are made of."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _room(leaf: Any) -> np.ndarray:
    """An array of the shape and dtype that `_array` gives."""
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    stored = jax.eval_shape(jax.random.key_data, struct) if _is_key(leaf) else struct
    return np.empty(stored.shape, stored.dtype)


def _place(array: np.ndarray, leaf: Any) -> Any:
    """A stored array as the like of `leaf`: on its devices, or NumPy where it is that."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return array
    if not _is_key(leaf):
        return jax.device_put(array, leaf.sharding)
    impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
    return jax.device_put(jax.random.wrap_key_data(jnp.asarray(array), impl=impl), leaf.sharding)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(_bytes(array).data)


def _crc_of_meta(about: Mapping[str, Any]) -> int:
    """Of the content: how `meta.json` is laid out doesn't matter."""
    return zlib.crc32(json.dumps(about).encode())


def _sum(path: Path) -> tuple[int, int]:
    """Bytes in a file, and their CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """Orbax and a checkpointer, without its log and its warnings."""
    log = logging.getLogger("absl")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.CRITICAL)  # it logs what it raises
        try:
            import orbax.checkpoint as ocp

            # plain files: several times quicker than its database
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
            with ocp.Checkpointer(handler) as checkpointer:
                yield ocp, checkpointer
        finally:
            log.setLevel(level)
