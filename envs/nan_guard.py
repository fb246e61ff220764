"""Contain a robot whose physics or rewards become non-finite, and play the failure back."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.wrappers import check, check_inside, select
from jrl.types import Env, Key, TimeStep, Tree, record


@record
class Guarded:
    """A robot and its last finite observation."""

    state: Tree
    obs: Tree


def nan_guard(env: Env, dump: str | Path | None = None) -> Env:
    """Contain a robot whose observation, reward or float state becomes non-finite.

    Its episode is terminated (there is nothing to bootstrap from) with reward 0, the last finite
    observation, zeros for the floats of `info`, and `info["nan_resets"]` = 1; it keeps the state
    from before the step. All other robots stay bit for bit what they were. Physics that carries its
    state as raw bits looks finite here: such environments report failures in `info["nan_resets"]`
    themselves, and the guard passes them on.

    Args:
        env: one robot.
        dump: a new `.npz` file for the first failure: the robot's state before the step and its
            action, for `replay`. An existing file is left alone. Costs nothing until it happens,
            but a program with a host callback may not enter JAX's compilation cache.
    """
    check(env, "nan_guard")

    def report(ts: TimeStep, failed: jax.Array) -> TimeStep:
        own = jnp.asarray(ts.info.get("nan_resets", 0.0), jnp.float32)
        info = {name: _zero_floats(failed, value) for name, value in ts.info.items()}
        info["nan_resets"] = jnp.where(failed, 1.0, own)
        return dataclasses.replace(ts, info=info)

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        state, ts = env.reset(params, key, where)
        check_inside(state, "nan_guard")
        obs = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), ts.obs)
        ts = dataclasses.replace(ts, obs=obs, final_obs=obs)
        return Guarded(state, obs), report(ts, jnp.zeros((), bool))

    def step(guarded: Guarded, action: jax.Array) -> tuple[Tree, TimeStep]:
        state, ts = env.step(guarded.state, action)
        failed = _broken((ts.obs, ts.reward)) | _broken(state, before=guarded.state)
        if dump is not None:
            _record_failure(Path(dump), failed, (guarded.state, action))
        obs = select(failed, guarded.obs, ts.obs)
        ts = TimeStep(
            obs=obs,
            reward=jnp.where(failed, 0, ts.reward),
            terminated=ts.terminated | failed,
            truncated=ts.truncated & ~failed,
            final_obs=obs,
            info=ts.info,
        )
        return Guarded(select(failed, guarded.state, state), obs), report(ts, failed)

    return Env(reset, step, env.params, env.spec)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _zero_floats(mask: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(mask, jnp.zeros_like(x), x) if _is_float(x) else x


def _broken(tree: Tree, before: Tree | None = None) -> jax.Array:
    """Whether any float is non-finite now (and was not so `before`: a limit may be infinite)."""
    broken = jnp.zeros((), bool)
    past = jax.tree.leaves(before) if before is not None else []
    for i, x in enumerate(jax.tree.leaves(tree)):
        if not _is_float(x):
            continue
        wrong = ~jnp.isfinite(x)
        broken |= (wrong & jnp.isfinite(past[i]) if past else wrong).any()
    return broken


def _record_failure(path: Path, failed: jax.Array, tree: Tree) -> None:
    """Write `tree` of the first failed robot to `path`; nothing crosses to the host until then."""
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]

    def write(failed: Any, leaves: list[Any]) -> None:
        first = np.unravel_index(np.argmax(failed), np.shape(failed))
        if not path.exists():
            np.savez(path, *(np.asarray(leaf)[first] for leaf in leaves))

    @jax.custom_batching.custom_vmap
    def watch(failed: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        def report() -> None:
            jax.debug.callback(write, failed, leaves)

        jax.lax.cond(failed.any(), report, lambda: None)
        return failed

    @watch.def_vmap
    def watch_batch(size: int, batched: Any, *args: Any) -> tuple[jax.Array, bool]:
        full = jax.tree.map(
            lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(batched)
        )
        return watch(*full), True

    watch(failed, raw)


def replay(env: Env, path: str | Path) -> tuple[Tree, TimeStep]:
    """Take the step again that `nan_guard(env, dump=path)` recorded; `env` is the guarded one."""
    template = jax.eval_shape(lambda key: env.reset(env.params, key)[0], jax.random.key(0))
    shapes, structure = jax.tree.flatten(template)
    with np.load(path) as file:
        *arrays, action = (file[f"arr_{i}"] for i in range(len(file.files)))
    is_key = [jnp.issubdtype(s.dtype, jax.dtypes.prng_key) for s in shapes]
    leaves = [
        jax.random.wrap_key_data(a) if key else jnp.asarray(a) for a, key in zip(arrays, is_key)
    ]
    saved, wanted = ([(x.shape, str(x.dtype)) for x in xs] for xs in (leaves, shapes))
    if len(arrays) != len(shapes) or saved != wanted:
        raise ValueError(
            f"{path} holds a state of arrays {saved}, but this environment's has {wanted}. "
            "Replay it with the environment that nan_guard was put around."
        )
    return env.step(jax.tree.unflatten(structure, leaves), jnp.asarray(action))
