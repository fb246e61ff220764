"""The contract of an environment."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.testing.values import (
    _bound,
    _is_key,
    check_same_type,
    count_traces,
    equal,
    expect,
    host_copies,
    random_values,
)
from jrl.types import Env, Key, Spec, TimeStep, Tree, zeros

CHANGED = "env.params were changed by reset or step. Return new arrays instead."


def check_env(
    env: Env, key: Key | None = None, *, steps: int = 8, fixed_start: bool = False
) -> None:
    """Check that `env` keeps the contract of one robot.

    Structure, shapes and dtypes that a scan can carry; observations as `spec` says; finite values;
    the same under jit, without it and under vmap; the same from the same key; no input changed; no
    key used twice; a `where` accepted by reset; starts that differ.

    Args:
        env: one robot, wrapped or not, but not `batch`ed.
        key: of its starts and of the random actions it takes.
        steps: how many of them. Every step is also taken without jit, from the same state.
        fixed_start: allow starts that don't depend on the key.

    Raises:
        AssertionError: with a sentence on the first thing that is wrong.
    """
    keys = jax.random.split(jax.random.key(0) if key is None else key, 3)
    expect(_hashable(env.spec), "env.spec must be hashable: use tuples, floats and strings in it.")
    actions = random_values(env.spec.action, keys[2], (steps,))
    params = jax.tree.map(np.array, env.params)
    _check_where(env, keys[0])
    _check_shapes(env, keys[0], actions[0])
    _check_keys(env, keys[0], actions[0])

    step, traces = count_traces(env.step)
    reset, step = jax.jit(env.reset), jax.jit(step)

    def play(key: Key) -> list[tuple[Tree, TimeStep]]:
        history = [reset(env.params, key, jnp.ones((), bool))]
        for action in actions:
            history.append(step(history[-1][0], action))
        return history

    one, two = play(keys[0]), play(keys[1])
    expect(equal(params, env.params), CHANGED)
    _check_same("the same key", one, play(keys[0]), exact=True)
    expect(traces() == 1, f"step was compiled {traces()} times for the same types of input.")
    for _, ts in one + two:
        _check_timestep(env.spec, ts)
    _check_start(one[0], two[0], fixed_start=fixed_start)
    _check_eager(env, keys[0], one, actions)
    _check_vmap(env, keys[:2], (one, two), actions)
    expect(equal(params, env.params), CHANGED)


def _hashable(spec: Spec) -> bool:
    try:
        hash(spec)
    except TypeError:
        return False
    return True


def _check_shapes(env: Env, key: Key, action: jax.Array) -> None:
    state, first = jax.eval_shape(env.reset, env.params, key)
    after, ts = jax.eval_shape(env.step, state, action)
    check_same_type("the state of reset and of step", state, after)
    expect(isinstance(first, TimeStep) and isinstance(ts, TimeStep), "return (state, TimeStep).")
    check_same_type("the timestep of reset and of step", first, ts)
    check_same_type("obs and final_obs", ts.obs, ts.final_obs)
    for name, dtype in (("reward", "float32"), ("terminated", "bool"), ("truncated", "bool")):
        field = getattr(ts, name)
        expect(
            field.shape == () and field.dtype == dtype,
            f"{name} must be a {dtype} scalar, not {field.dtype}{list(field.shape)}.",
        )
    for name, value in ts.info.items():
        expect(
            getattr(value, "shape", None) == () and value.dtype in ("float32", "bool", "int32"),
            f"info[{name!r}] must be a float32, bool or int32 scalar, not {value}.",
        )
    wanted = jax.eval_shape(lambda: zeros(env.spec.obs))
    check_same_type("the observation in spec.obs and the one that comes", wanted, ts.obs)


def _check_keys(env: Env, key: Key, action: jax.Array) -> None:
    """One reset and one step under JAX's key-reuse checker."""

    def episode(key: Key) -> Tree:
        state, _ = env.reset(env.params, key)
        return env.step(state, action)[1]

    try:
        with jax.debug_key_reuse(True):  # noqa: FBT003
            jax.eval_shape(episode, key)
    except jax.errors.KeyReuseError as error:
        raise AssertionError(
            f"a random key is used twice; split it, and use every part once. JAX says: {error}"
        ) from error


def _check_timestep(spec: Spec, ts: TimeStep) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(ts):
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(x.dtype, jnp.floating):
            expect(jnp.isfinite(x).all(), f"timestep{name} is not finite: {x}.")
    expect(
        not (ts.terminated & ts.truncated),
        "a step is both terminated and truncated; say truncated only where it isn't terminated.",
    )
    ended = ts.terminated | ts.truncated
    expect(
        ended or equal(ts.obs, ts.final_obs),
        "obs and final_obs differ though the episode goes on. final_obs is the true successor "
        "on every step, and only an auto-reset may replace obs.",
    )
    boxes = spec.obs if isinstance(spec.obs, Mapping) else {"": spec.obs}
    values = ts.obs if isinstance(spec.obs, Mapping) else {"": ts.obs}
    for name, box in boxes.items():
        low, high = _bound(box, box.low) - 1e-5, _bound(box, box.high) + 1e-5
        expect(
            ((values[name] >= low) & (values[name] <= high)).all(),
            f"observation {name!r} leaves the bounds in spec.obs: {values[name]}.",
        )


def _check_start(one: Any, two: Any, *, fixed_start: bool) -> None:
    first = one[1]
    drawn = [[x for x in jax.tree.leaves(start) if not _is_key(x)] for start in (one, two)]
    expect(
        not (first.terminated | first.truncated) and first.reward == 0,
        "an episode must start with reward 0, and neither terminated nor truncated.",
    )
    expect(equal(first.obs, first.final_obs), "reset must return final_obs equal to obs.")
    expect(
        fixed_start or not equal(*drawn),
        "two keys gave the same start. Draw it from the key, or pass fixed_start=True if the task "
        "always starts alike.",
    )


def _check_where(env: Env, key: Key) -> None:
    start = jax.eval_shape(env.reset, env.params, key)
    try:
        masked = jax.eval_shape(env.reset, env.params, key, jnp.zeros((), bool))
    except TypeError as error:
        raise AssertionError(
            "reset must take `where` as its third argument: reset(params, key, where=True). "
            f"It failed with: {error}"
        ) from error
    check_same_type("reset without and with `where`", start, masked)


def _check_eager(env: Env, key: Key, history: list, actions: jax.Array) -> None:
    """The start, the first and the last step again without jit, from the same states."""
    _check_same("running without jit", history, [env.reset(env.params, key)])
    for t in (0, len(actions) - 1):
        state, action = history[t][0], actions[t]
        before = host_copies((state, action))
        after = env.step(state, action)
        expect(
            equal(before, host_copies((state, action))),
            "step changed the state or the action it was given. Return new arrays instead.",
        )
        _check_same("running without jit", [history[t + 1]], [after])


def _check_vmap(env: Env, keys: Key, histories: tuple, actions: jax.Array) -> None:
    """Each step again with both robots at once, from the same states."""

    def both(trees: Any) -> Tree:
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    step = jax.jit(jax.vmap(env.step, in_axes=(0, None)))
    pairs = [jax.jit(jax.vmap(env.reset, in_axes=(None, 0)))(env.params, keys)]
    for one, two, action in zip(*histories, actions):
        pairs.append(step(both((one[0], two[0])), action))
    for i, history in enumerate(histories):
        alone = [jax.tree.map(lambda x: x[i], pair) for pair in pairs]  # noqa: B023
        _check_same("vmap", history, alone)


def _check_same(what: str, wanted: list, got: list, *, exact: bool = False) -> None:
    """Compare the timesteps of two histories."""
    for t, ((_, a), (_, b)) in enumerate(zip(wanted, got)):
        leaves = jax.tree_util.tree_leaves_with_path(a)
        for (path, x), y in zip(leaves, jax.tree.leaves(b)):
            x, y = np.asarray(x), np.asarray(y)
            same = np.array_equal(x, y) if exact else np.allclose(x, y, rtol=1e-4, atol=1e-4)
            expect(
                same,
                f"{what} gives other results: timestep{jax.tree_util.keystr(path)} is {x} "
                f"and {y} (step {t}). Look for hidden state, "
                "Python side effects or NumPy randomness.",
            )
