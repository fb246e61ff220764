"""The contract of a buffer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.testing.agents import DATA
from jrl.testing.values import (
    _is_key,
    check_same_type,
    equal,
    expect,
    host_copies,
)
from jrl.types import Buffer, Key, Rollout, Tree

Rows = dict[str, list[bytes]]  # name of a field -> the values of its rows


def check_buffer(
    buffer: Buffer, example_data: Tree, key: Key | None = None, *, adds: int = 4
) -> None:
    """Check that `buffer` keeps the contract of a store of experience.

    A fresh store is empty. What is sampled was added: each row of it, whole, in its own dtype. The
    same key gives the same sample. Nothing that is passed in is changed, and nothing is remembered
    outside the state. The state is arrays of one structure, so that a scan can carry it (a fresh
    one may still be without arrays), and add, sample and can_sample do the same under jit, unless
    the arrays are all NumPy's.

    Args:
        buffer: what to check.
        example_data: what `add` takes; `sample` returns the same structure. A `Rollout` (obs
            [T + 1, B, ...], action [T, B, ...]; see `fake_rollout`), a `Transition` [N, ...] or
            [T, B, ...] (see `fake_transitions`), or another tree whose leaves share their leading
            axes, one leaf (such as the reward) having no others. Data to add is made up like it:
            new floats, shuffled integers, the same flags.
        key: of the data and of what is sampled.
        adds: how often data is added: so often that the store can be sampled, and that one of
            limited capacity overflows.

    Raises:
        AssertionError: with a sentence on the first thing that is wrong.
    """
    keys = jax.random.split(jax.random.key(0) if key is None else key, adds + 1)
    expect(buffer.data in DATA, f"buffer.data must be one of {DATA}, not {buffer.data!r}.")
    rng = np.random.default_rng(np.asarray(jax.random.key_data(keys[-1])))
    state = _check_init(buffer, example_data)
    add = jax.jit(buffer.add)
    seen: list[list[Rows]] = []
    for i in range(adds):
        data = _alike(example_data, rng)
        seen.append(_rows(data))
        state = _check_add(buffer, add, state, data)
        if _can_sample(buffer, state):
            _check_sample(buffer, state, keys[i], data, seen)
    expect(
        _can_sample(buffer, state),
        f"can_sample is still False after {adds} adds. Check the buffer with a smaller minimum, or "
        "with larger `adds`.",
    )


def _check_init(buffer: Buffer, example: Tree) -> Tree:
    before = host_copies(example)
    state, again = buffer.init(example), buffer.init(example)
    expect(equal(before, host_copies(example)), "init changed the example it was given.")
    _check_arrays(state)
    check_same_type("the states of two inits", state, again)
    expect(equal(state, again), "init gave two different states for the same example.")
    expect(
        not _can_sample(buffer, state),
        "can_sample must be False before anything was added: the example only says what will come.",
    )
    return state


def _check_arrays(state: Tree) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        expect(
            isinstance(x, jax.Array | np.ndarray | np.generic),
            f"state{jax.tree_util.keystr(path)} is of type {type(x).__name__}. A state is made of "
            "arrays: jnp.int32(0) instead of 0, an array with an axis instead of a list.",
        )


def _check_add(buffer: Buffer, jitted: Callable[..., Tree], state: Tree, data: Tree) -> Tree:
    """Add data, twice without jit and once with it."""
    after, again = _unchanged("add", buffer.add, state, data)
    _check_arrays(after)
    if jax.tree.leaves(state):
        check_same_type("the state before and after add", state, after)
    expect(
        equal(after, again),
        "add gave two different states for the same state and data: does it remember something "
        "outside the state?",
    )
    return _check_jit("add", jitted, after, state, data)


def _check_sample(
    buffer: Buffer, state: Tree, key: Key, data: Tree, seen: list[list[Rows]]
) -> None:
    sample, again = _unchanged("sample", buffer.sample, state, key)
    first, then = str(jax.tree.structure(data)), str(jax.tree.structure(sample))
    expect(first == then, f"sample must return what add takes, {first}, but returned {then}.")
    expect(
        equal(sample, again),
        "sample gave two different results for the same state and key. All chance comes from the "
        "key.",
    )
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(data), jax.tree.leaves(sample)):
        expect(
            x.dtype == y.dtype,
            f"sample returns {jax.tree_util.keystr(path)} as {y.dtype}; it was added as {x.dtype}.",
        )
    for i, rows in enumerate(_rows(sample)):
        _check_rows(rows, [added[i] for added in seen])
    _check_jit("sample", jax.jit(buffer.sample), sample, state, key)


def _can_sample(buffer: Buffer, state: Tree) -> bool:
    can, again = _unchanged("can_sample", buffer.can_sample, state)
    expect(
        getattr(can, "shape", None) == () and can.dtype == bool,
        f"can_sample must return a bool scalar array, not {can!r}.",
    )
    expect(equal(can, again), "can_sample gave two different answers for the same state.")
    return bool(_check_jit("can_sample", jax.jit(buffer.can_sample), can, state))


def _unchanged(name: str, function: Callable[..., Tree], *args: Tree) -> tuple[Tree, Tree]:
    """The results of two equal calls, which must leave their arguments alone."""
    before = host_copies(args)
    result = function(*args)
    expect(
        not any(x.is_deleted() for x in jax.tree.leaves(args) if hasattr(x, "is_deleted")),
        f"{name} deleted its inputs: donation is the caller's choice, not the buffer's.",
    )
    expect(
        equal(before, host_copies(args)),
        f"{name} changed the arrays it was given. Return new ones instead.",
    )
    return result, function(*args)


def _check_jit(name: str, jitted: Callable[..., Tree], wanted: Tree, *args: Tree) -> Tree:
    """The result under jit, which must be the one without; without, where the state is NumPy's."""
    leaves = jax.tree.leaves(args[0])
    if leaves and not any(isinstance(x, jax.Array) for x in leaves):
        return wanted
    try:
        result = jitted(*args)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError) as error:
        raise AssertionError(
            f"{name} can't run under jit: use jnp.where and jax.lax instead of Python's `if`, and "
            f"shapes that don't depend on values. JAX says: {error}"
        ) from error
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(result)):
        (a,), (b,) = host_copies(x), host_copies(y)
        expect(
            np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True),
            f"{name} gives another result under jit: {jax.tree_util.keystr(path)} is {a} without, "
            f"and {b} with it.",
        )
    return result


def _check_rows(sample: Rows, added: list[Rows]) -> None:
    """Every row of a sample must be a row that was added: each field of it, and all together."""
    for name, values in sample.items():
        known = {value for rows in added for value in rows[name]}
        strange = [i for i, value in enumerate(values) if value not in known]
        expect(
            not strange,
            f"sample returned a value of {name} that was never added, in row {strange[:1]}. A "
            "buffer hands out what it was given; change data in a stage of the loop instead.",
        )
    known_rows = {row for rows in added for row in zip(*rows.values())}
    mixed = [i for i, row in enumerate(zip(*sample.values())) if row not in known_rows]
    expect(
        not mixed,
        f"sample mixes rows: each part of row {mixed[:1]} was added, but never together. Take all "
        f"of {', '.join(sample)} from the same place.",
    )


def _rows(data: Tree) -> list[Rows]:
    """The rows of some data: its steps; of a rollout, what each robot starts with as well."""
    if isinstance(data, Rollout):
        steps = {
            "obs": jax.tree.map(lambda x: x[:-1], data.obs),
            "next obs": jax.tree.map(lambda x: x[1:], data.obs),
            "final obs": _final(data),
        }
        for name in ("action", "reward", "terminated", "truncated", "aux", "info"):
            steps[name] = getattr(data, name)
        start = {"obs": jax.tree.map(lambda x: x[0], data.obs), "carry": data.carry}
        return [_flat(steps, 2), _flat(start, 1)]
    leaves = jax.tree.leaves(data)
    expect(leaves, "there is no array in the data.")
    return [_flat(data, min(x.ndim for x in leaves))]


def _final(data: Rollout) -> Tree:
    """The final observations where they belong, [T, B, ...]; zeros elsewhere."""
    shape = data.reward.shape
    index = np.asarray(data.final.index)
    used = index < data.reward.size

    def place(x: jax.Array) -> np.ndarray:
        out = np.zeros((data.reward.size, *x.shape[1:]), x.dtype)
        out[index[used]] = np.asarray(x)[used]
        return out.reshape(*shape, *x.shape[1:])

    return jax.tree.map(place, data.final.obs)


def _flat(tree: Tree, axes: int) -> Rows:
    """Each leaf's values along its leading axes, in one row of them."""
    rows, leading = {}, None
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, (values,) = jax.tree_util.keystr(path), host_copies(x)
        leading = leading or values.shape[:axes]
        expect(
            values.shape[:axes] == leading,
            f"{name} must lead with the same {axes} axes as the rest, {leading}: {values.shape}.",
        )
        rows[name] = [value.tobytes() for value in values.reshape(-1, *values.shape[axes:])]
    return rows


def _alike(example: Tree, rng: np.random.Generator) -> Tree:
    """Other data of the same shapes and dtypes; episodes end where they did."""

    def leaf(x: Any) -> Any:
        if _is_key(x) or x.dtype == bool:
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=x.shape), x.dtype)
        return jnp.asarray(rng.permutation(np.asarray(x).ravel()).reshape(x.shape), x.dtype)

    made = jax.tree.map(leaf, example)
    if isinstance(example, Rollout):
        final = dataclasses.replace(
            made.final, index=example.final.index, dropped=example.final.dropped
        )
        return dataclasses.replace(made, final=final)
    return made
