"""Save and restore a training state: a folder for each step, all of it or none of it.

A step's folder holds `state/` (Orbax) and `meta.json`. The state is stored flat, by the dotted
names of its leaves, so that a checkpoint doesn't depend on how the Python classes are built.
"""

import contextlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import Tree
from jrl.version import __version__

FORMAT = 1  # of the folder; raised when older checkpoints need another way of reading


def save(directory: str | Path, step: int, state: Tree, meta: Mapping[str, Any]) -> None:
    """Write `state` and `meta` to `directory/<step>`, in place of what was there.

    Returns when everything is on disk. An interrupted save leaves the earlier checkpoints as they
    were. `meta` is kept as JSON, with the versions of jrl and JAX added.

    Raises:
        OSError: the folder can't be written, or the disk is full.
    """
    final = Path(directory).absolute() / str(step)
    part = final.with_name(f"{step}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    leaves = _leaves(state)
    about = {
        **meta,
        "format": FORMAT,
        "versions": {"jrl": __version__, "jax": jax.__version__},
        "leaves": {name: _kind(leaf) for name, leaf in leaves.items()},
    }
    (part / "meta.json").write_text(json.dumps(about, indent=1))
    arrays = {
        name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        for name, leaf in leaves.items()
        if np.size(leaf)  # Orbax doesn't store arrays without elements
    }
    with _checkpointer() as checkpointer:
        checkpointer.save(part / "state", arrays)
    if final.exists():
        final.rename(part / "old")
    part.rename(final)
    shutil.rmtree(final / "old", ignore_errors=True)


def restore(directory: str | Path, step: int | None, like: Tree) -> Tree:
    """The state of `step` (None: the latest), with the structure, types and placement of `like`.

    `like` is a state of this program, or its `jax.eval_shape`; its values are not used.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: the checkpoint has other leaves, shapes or dtypes than `like` (each is named).
    """
    folder = _folder(directory, step)
    leaves = _leaves(like)
    _fits(json.loads((folder / "meta.json").read_text())["leaves"], leaves, folder)
    target = {name: _target(leaf) for name, leaf in leaves.items() if np.size(leaf)}
    with _checkpointer() as checkpointer:
        arrays = checkpointer.restore(folder / "state", target)
    empty = {name: jnp.zeros(x.shape, x.dtype) for name, x in leaves.items() if not np.size(x)}
    known = {**arrays, **empty}
    return jax.tree.unflatten(jax.tree.structure(like), [known[name] for name in leaves])


def meta(directory: str | Path, step: int | None = None) -> dict[str, Any]:
    """What `save` was given as `meta`, plus `versions`, `format` and `leaves` (None: the latest).

    Raises:
        FileNotFoundError: no such checkpoint.
    """
    return json.loads((_folder(directory, step) / "meta.json").read_text())


def latest(directory: str | Path) -> int | None:
    """The highest step with a complete checkpoint in `directory`, None where there is none."""
    found = Path(directory).glob("*/meta.json")
    return max((int(p.parent.name) for p in found if p.parent.name.isdecimal()), default=None)


def _folder(directory: str | Path, step: int | None) -> Path:
    root = Path(directory).absolute()
    last = latest(root)
    if last is None:
        raise FileNotFoundError(f"no checkpoint in {root}")
    folder = root / str(last if step is None else step)
    if not (folder / "meta.json").exists():
        raise FileNotFoundError(f"no checkpoint of step {step} in {root}; the latest is {last}")
    return folder


def _leaves(state: Tree) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator=".") or "state": x for p, x in flat}


def _kind(leaf: Any) -> str:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _target(leaf: Any) -> Any:
    """What a leaf is to be restored as: on the devices of `leaf`, or as NumPy where it is that."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(leaf)
    place = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _fits(stored: Mapping[str, str], leaves: Mapping[str, Any], folder: Path) -> None:
    here = {name: _kind(leaf) for name, leaf in leaves.items()}
    wrong = [
        f"{name}: {stored.get(name, 'missing')} in the checkpoint, {here.get(name, 'missing')} here"
        for name in dict.fromkeys([*stored, *here])
        if stored.get(name) != here.get(name)
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(
            f"the checkpoint {folder} doesn't fit this program, which was probably built from "
            f"another config (its own is in its meta.json):\n  " + "\n  ".join(wrong[:10]) + more
        )


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """Orbax, without its log and its warnings."""
    log = logging.getLogger("absl")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            import orbax.checkpoint as ocp

            with ocp.StandardCheckpointer() as checkpointer:
                yield checkpointer
        finally:
            log.setLevel(level)
