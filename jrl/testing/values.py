"""Random values of any spec, made-up experience, and what the checks are written with."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.types import (
    Agent,
    Box,
    Discrete,
    FinalObs,
    Key,
    Rollout,
    Spec,
    Transition,
    Tree,
)


def expect(holds: Any, sentence: str) -> None:
    """Raise an AssertionError with this sentence unless `holds`."""
    if not holds:
        raise AssertionError(sentence)


def count_traces(fn: Callable) -> tuple[Callable, Callable[[], int]]:
    """`fn`, and a function that says how often its Python body ran: under jit, its compilations."""
    calls: list[None] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return fn(*args, **kwargs)

    return counted, lambda: len(calls)


def random_values(spec: Any, key: Key, leading: tuple[int, ...] = ()) -> Tree:
    """Arrays `[*leading, ...]` as a `Box`, a `Discrete` or a mapping of them allows.

    Uniform between finite bounds, otherwise standard normal, clipped to the bounds. Drawn by NumPy,
    so it compiles nothing and can't be traced.
    """
    return _draw(spec, np.random.default_rng(np.asarray(jax.random.key_data(key))), leading)


def _draw(spec: Any, rng: np.random.Generator, leading: tuple[int, ...]) -> Tree:
    if isinstance(spec, Mapping):
        return {name: _draw(spec[name], rng, leading) for name in spec}
    if isinstance(spec, Discrete):
        return jnp.asarray(rng.integers(0, spec.n, leading), jnp.int32)
    low, high = (_bound(spec, bound) for bound in (spec.low, spec.high))
    if jnp.issubdtype(spec.dtype, jnp.integer):
        info = jnp.iinfo(spec.dtype)
        low, high = np.maximum(low, info.min), np.minimum(high, info.max)
    finite = np.isfinite(low) & np.isfinite(high)
    ends = np.where(finite, low, 0), np.where(finite, high, 1)
    shape = (*leading, *spec.shape)
    inside, free = rng.uniform(*ends, shape), np.clip(rng.normal(size=shape), low, high)
    return jnp.asarray(np.where(finite, inside, free).astype(spec.dtype))


def _bound(box: Box, bound: float | tuple[float, ...]) -> np.ndarray:
    values = np.asarray(bound, np.float32)
    return values.reshape(box.shape) if values.ndim else np.broadcast_to(values, box.shape)


def host_copies(tree: Tree) -> list[np.ndarray]:
    """Copies of all arrays; keys as their raw data."""
    return [np.array(jax.random.key_data(x) if _is_key(x) else x) for x in jax.tree.leaves(tree)]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)


def equal(a: Tree, b: Tree) -> bool:
    """Whether two trees hold the same numbers, NaN counting as itself."""
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(host_copies(a), host_copies(b)))


def fake_rollout(
    agent: Agent, policy: Tree, spec: Spec, key: Key, num_steps: int, num_envs: int
) -> Rollout:
    """A rollout of random observations and rewards, with the agent's own actions and aux.

    Every eighth step on average terminates its episode, and every eighth truncates it.
    """
    keys = jax.random.split(key, num_steps + 3)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(keys[0])))
    act = jax.jit(agent.act)
    obs = random_values(spec.obs, keys[1], (num_steps + 1, num_envs))
    ends = rng.integers(0, 8, (num_steps, num_envs))
    ends[0, 0], ends[num_steps // 2, -1] = 0, 1
    carry = fresh = agent.carry(num_envs)
    steps = []
    for t in range(num_steps):
        carry, action, aux = act(policy, carry, jax.tree.map(lambda x: x[t], obs), keys[3 + t])  # noqa: B023
        carry = jax.tree.map(lambda new, old: _rows(ends[t] < 2, new, old), fresh, carry)  # noqa: B023
        steps.append((action, aux))
    action, aux = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *steps)
    index = [*np.flatnonzero(ends.ravel() == 1), ends.size]  # and one slot that stays free
    final_obs = random_values(spec.obs, keys[2], (len(index),))
    return Rollout(
        obs=obs,
        action=action,
        reward=jnp.asarray(rng.normal(size=ends.shape), jnp.float32),
        terminated=jnp.asarray(ends == 0),
        truncated=jnp.asarray(ends == 1),
        final=FinalObs(final_obs, jnp.asarray(index, jnp.int32), jnp.zeros((), jnp.int32)),
        carry=fresh,
        aux=aux,
        info={},
    )


def fake_transitions(spec: Spec, key: Key, n: int) -> Transition:
    """`n` random transitions [N]; some terminate, some are truncated."""
    keys = jax.random.split(key, 4)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(keys[0])))
    ends = rng.integers(0, 8, n)
    return Transition(
        obs=random_values(spec.obs, keys[1], (n,)),
        action=random_values(spec.action, keys[2], (n,)),
        reward=jnp.asarray(rng.normal(size=n), jnp.float32),
        terminated=jnp.asarray(ends == 0),
        truncated=jnp.asarray(ends == 1),
        next_obs=random_values(spec.obs, keys[3], (n,)),
    )


def _rows(mask: np.ndarray, yes: jax.Array, no: jax.Array) -> jax.Array:
    return jnp.where(mask.reshape(mask.shape + (1,) * (no.ndim - 1)), yes, no)


def _describe(tree: Tree) -> dict[str, str]:
    """Every leaf's path, with its dtype, shape and whether its type is weak."""

    def text(x: Any) -> str:
        weak = " (weakly typed)" if getattr(x, "weak_type", False) else ""
        return f"{x.dtype}{list(x.shape)}{weak}"

    return {
        jax.tree_util.keystr(path): text(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_same_type(what: str, old: Tree, new: Tree) -> None:
    """Check that two trees have the same structure, shapes and dtypes."""
    before, after = _describe(old), _describe(new)
    for path in before.keys() | after.keys():
        expect(path in after, f"{what}: {path} is there at first, and is missing afterwards.")
        expect(path in before, f"{what}: {path} is missing at first, and appears afterwards.")
        expect(
            before[path] == after[path],
            f"{what}: {path} is {before[path]} at first and {after[path]} afterwards, so a scan "
            "can't carry it or compiles twice. Give it one dtype and shape, e.g. jnp.float32(0) "
            "for a Python number.",
        )
    first, then = str(jax.tree.structure(old)), str(jax.tree.structure(new))
    expect(first == then, f"{what}: the structure changes from {first} to {then}.")
