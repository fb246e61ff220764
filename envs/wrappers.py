"""Wrappers: functions `Env -> Env` on one robot, and `batch`, which makes many of one.

The usual order, inside out (what `jrl.envs.vector` does):

    batch(auto_reset(episode_statistics(time_limit(nan_guard(unit_actions(env))))), n)

`randomize`, `action_repeat`, `action_chunk` and `frame_stack` go anywhere inside `auto_reset`. A
wrapper keeps its bookkeeping in its own state record, never in `info`, so it can't clash with what
an environment reports.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.checks import positive
from jrl.types import Box, Env, HostEnv, Key, TimeStep, Tree, record


@record
class Timed:
    """A robot and the steps of its episode so far (int32)."""

    state: Tree
    steps: jax.Array


@record
class Counted:
    """A robot with the undiscounted return (float32) and length (int32) of its episode so far."""

    state: Tree
    total: jax.Array
    length: jax.Array


@record
class Restarting:
    """A robot that starts again by itself: the k-th start is drawn with `fold_in(key, k)`."""

    state: Tree
    params: Tree  # the parameters the next start is made with
    key: jax.Array
    episode: jax.Array  # int32: starts drawn so far
    starts: Tree  # [N, ...] a bank of cached starts, (state, timestep); () where starts are fresh


def done(timestep: TimeStep) -> jax.Array:
    """Whether the episode ended with this step, for either reason."""
    return timestep.terminated | timestep.truncated


def select(mask: jax.Array, on_true: Tree, on_false: Tree) -> Tree:
    """One tree or the other, by a scalar."""
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), on_true, on_false)


def _strong(tree: Tree) -> Tree:
    """Python numbers become arrays of a fixed type, so that a scan carries them unchanged."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def check(env: Env, wrapper: str) -> None:
    """Refuse to wrap what is not an Env."""
    if isinstance(env, HostEnv):
        raise TypeError(
            f"{wrapper} wraps an Env (pure functions of one robot), but got a HostEnv: a batch "
            "that is not JAX and resets itself. Set its time limit and its other options where "
            "the simulator is made, and give it to the loop as it is."
        )
    if not isinstance(env, Env):
        raise TypeError(
            f"{wrapper} wraps an Env, but got {type(env).__name__}. "
            "Make one with `jrl.envs.make(name)` or `module.make(module.Config())`."
        )


def check_inside(state: Tree, wrapper: str) -> None:
    """Refuse to wrap a robot that restarts by itself: its episode ends would go unseen."""
    while dataclasses.is_dataclass(state):
        if isinstance(state, Restarting):
            raise TypeError(
                f"{wrapper} was put around auto_reset, where it would run on across episodes. "
                f"Swap them: auto_reset({wrapper}(env))."
            )
        state = getattr(state, "state", None)


def time_limit(env: Env, steps: int | None = None) -> Env:
    """Cut an episode off (truncated, not terminated) after `steps`, default `spec.episode_length`.

    Raises:
        ValueError: if neither gives a limit.
    """
    check(env, "time_limit")
    limit = env.spec.episode_length if steps is None else steps
    positive(steps=limit)

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        state, ts = env.reset(params, key, where)
        check_inside(state, "time_limit")
        return Timed(state, jnp.zeros((), jnp.int32)), ts

    def step(timed: Timed, action: jax.Array) -> tuple[Tree, TimeStep]:
        state, ts = env.step(timed.state, action)
        steps = timed.steps + 1
        truncated = ts.truncated | ((steps >= limit) & ~ts.terminated)
        return Timed(state, steps), dataclasses.replace(ts, truncated=truncated)

    return Env(reset, step, env.params, dataclasses.replace(env.spec, episode_length=limit))


def episode_statistics(env: Env) -> Env:
    """Report `info["episode/return"]` and `info["episode/length"]` of the episode so far.

    They are the episode's totals on the step that ends it.

    Raises:
        ValueError: if the environment reports entries of these names itself.
    """
    check(env, "episode_statistics")

    def report(ts: TimeStep, total: jax.Array, length: jax.Array) -> TimeStep:
        ours = {"episode/return": total, "episode/length": length}
        if clash := sorted(ours.keys() & ts.info.keys()):
            raise ValueError(
                f"the environment's info already has {clash}, which episode_statistics adds. "
                "Wrap it only once, or rename what the environment reports."
            )
        return dataclasses.replace(ts, info={**ts.info, **ours})

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        state, ts = env.reset(params, key, where)
        check_inside(state, "episode_statistics")
        total, length = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
        return Counted(state, total, length), report(ts, total, length)

    def step(counted: Counted, action: jax.Array) -> tuple[Tree, TimeStep]:
        state, ts = env.step(counted.state, action)
        total, length = counted.total + ts.reward, counted.length + 1
        return Counted(state, total, length), report(ts, total, length)

    return Env(reset, step, env.params, env.spec)


def auto_reset(env: Env, *, starts: int = 0) -> Env:
    """Start a new episode in the step that ends one.

    Of the step that ended the episode, everything is kept (reward, terminated, truncated, info, and
    the true successor as `final_obs`); only `obs` is the first observation of the new episode. The
    k-th start depends on the key given to `reset` and on k, and on nothing else.

    Args:
        env: one robot.
        starts: 0 draws a fresh start each time. N > 0 draws N starts at `reset` and hands them out
            in turn: for environments whose reset costs more than a step. Everything drawn at reset
            (goals, randomised parameters) then takes only these N values per robot.
    """
    check(env, "auto_reset")

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        params = _strong(params)
        state, ts = env.reset(params, jax.random.fold_in(key, 0), where)
        check_inside(state, "auto_reset")
        bank: Tree = ()
        if starts:
            keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(1 + jnp.arange(starts))
            bank = jax.vmap(lambda k: env.reset(params, k, where))(keys)
        return Restarting(state, params, key, jnp.ones((), jnp.int32), bank), ts

    def start(old: Restarting, where: jax.Array) -> tuple[Tree, TimeStep]:
        if starts:
            return jax.tree.map(lambda x: x[(old.episode - 1) % starts], old.starts)
        return env.reset(old.params, jax.random.fold_in(old.key, old.episode), where)

    def step(old: Restarting, action: jax.Array) -> tuple[Tree, TimeStep]:
        state, ts = env.step(old.state, action)
        ended = done(ts)
        fresh, first = start(old, ended)
        new = dataclasses.replace(
            old, state=select(ended, fresh, state), episode=old.episode + ended
        )
        return new, dataclasses.replace(ts, obs=select(ended, first.obs, ts.obs))

    return Env(reset, step, env.params, env.spec)


def batch(env: Env, n: int) -> Env:
    """`n` robots at once: every array gets a leading axis [n], `spec` stays that of one robot.

    Robot i draws from `fold_in(key, i)`, so it starts alike whatever `n` is. A batch never resets
    by itself: put `auto_reset` inside.
    """
    check(env, "batch")
    positive(n=n)

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(n))
        where = jnp.broadcast_to(jnp.asarray(where), (n,))
        return jax.vmap(env.reset, in_axes=(None, 0, 0))(params, keys, where)

    return Env(reset, jax.vmap(env.step), env.params, env.spec)


def unit_actions(env: Env) -> Env:
    """Present every bounded action element as [-1, 1].

    Actions are mapped affinely to the task's bounds and clipped there, so an agent may send
    unclipped samples. Elements without two finite bounds, and discrete actions, pass unchanged.
    """
    check(env, "unit_actions")
    box = env.spec.action
    if not isinstance(box, Box):
        return env
    low, high = _bounds(box)
    bounded = np.isfinite(low) & np.isfinite(high)
    if not bounded.any():
        return env
    ends = np.where(bounded, low, -1), np.where(bounded, high, 1)
    scale, middle = (ends[1] - ends[0]) / 2, (ends[1] + ends[0]) / 2

    def step(state: Tree, action: jax.Array) -> tuple[Tree, TimeStep]:
        return env.step(state, jnp.clip(middle + scale * action, low, high).astype(box.dtype))

    unit = dataclasses.replace(
        box,
        low=_as_bound(np.where(bounded, -1.0, low)),
        high=_as_bound(np.where(bounded, 1.0, high)),
    )
    return Env(env.reset, step, env.params, dataclasses.replace(env.spec, action=unit))


def _bounds(box: Box) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of a box as two float32 arrays of its shape."""

    def full(bound: Any) -> np.ndarray:
        bound = np.asarray(bound, np.float32)
        return np.broadcast_to(bound, box.shape) if bound.ndim == 0 else bound.reshape(box.shape)

    return full(box.low), full(box.high)


def _as_bound(values: np.ndarray) -> float | tuple[float, ...]:
    flat = [float(v) for v in values.ravel()]
    return flat[0] if len(set(flat)) == 1 else tuple(flat)


@record
class Randomized:
    """A robot and the parameters drawn for its episode."""

    state: Tree
    params: Tree


def randomize(env: Env, fn: Callable[[Tree, Key], Tree]) -> Env:
    """Draw a robot's parameters at each reset: `fn(params, key) -> params`, of the same structure.

    The draw stays in the state, and with it in every checkpoint.
    """
    check(env, "randomize")

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        key_fn, key_reset = jax.random.split(key)
        drawn = fn(params, key_fn)
        given, returned = str(jax.tree.structure(params)), str(jax.tree.structure(drawn))
        if given != returned:
            raise ValueError(
                "randomize: the function must return parameters of the structure it was given.\n"
                f"given:    {given}\nreturned: {returned}"
            )
        drawn = jax.tree.map(lambda old, new: jnp.asarray(new, jnp.result_type(old)), params, drawn)
        state, ts = env.reset(drawn, key_reset, where)
        check_inside(state, "randomize")
        return Randomized(state, drawn), ts

    def step(old: Randomized, action: jax.Array) -> tuple[Tree, TimeStep]:
        state, ts = env.step(old.state, action)
        return Randomized(state, old.params), ts

    return Env(reset, step, env.params, env.spec)


def action_repeat(env: Env, n: int) -> Env:
    """Apply each action for `n` steps, or until the episode ends.

    Rewards and `info["reward/..."]` are summed, undiscounted; all else is of the last step taken.
    `spec.episode_length` becomes a number of such longer steps, rounded up.
    """
    check(env, "action_repeat")
    positive(n=n)
    every = _every(env, n, "action_repeat")

    def step(state: Tree, action: jax.Array) -> tuple[Tree, TimeStep]:
        return every.step(state, jnp.broadcast_to(action, (n, *jnp.shape(action))))

    return every._replace(step=step)


def action_chunk(env: Env, n: int) -> Env:
    """Take `n` actions in one, [n, A], and apply them in turn until the episode ends.

    Rewards and `info["reward/..."]` are summed, undiscounted; all else is of the last step taken.
    An agent's discount therefore counts per chunk, and so does `spec.episode_length`, rounded up.
    """
    check(env, "action_chunk")
    positive(n=n)
    box = env.spec.action
    if not isinstance(box, Box):
        raise TypeError(f"action_chunk needs continuous actions (a Box), but the env takes {box}.")
    every = _every(env, n, "action_chunk")
    return every._replace(spec=dataclasses.replace(every.spec, action=_stacked(box, n)))


def _every(env: Env, n: int, wrapper: str) -> Env:
    """One step that takes actions [n, ...] and stops acting at the first end."""

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        state, ts = env.reset(params, key, where)
        check_inside(state, wrapper)
        return state, ts

    def merge(old: TimeStep, new: TimeStep) -> TimeStep:
        sums = {k: old.info[k] + v for k, v in new.info.items() if k.startswith("reward/")}
        return dataclasses.replace(new, reward=old.reward + new.reward, info={**new.info, **sums})

    def step(state: Tree, actions: jax.Array) -> tuple[Tree, TimeStep]:
        def one(carry: tuple[Tree, TimeStep], action: jax.Array) -> tuple[Any, None]:
            state, ts = carry
            new_state, new = env.step(state, action)
            return select(done(ts), carry, (new_state, merge(ts, new))), None

        shapes = jax.eval_shape(env.step, state, actions[0])[1]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(one, (state, empty), actions)[0]

    spec = dataclasses.replace(
        env.spec, dt=env.spec.dt * n, episode_length=-(-env.spec.episode_length // n)
    )
    return Env(reset, step, env.params, spec)


@record
class Stacked:
    """A robot and its last n observations, [n, ...], oldest first."""

    state: Tree
    frames: Tree


def frame_stack(env: Env, n: int) -> Env:
    """Show the last `n` observations, [n, ...], oldest first; episodes start with n equal ones."""
    check(env, "frame_stack")
    positive(n=n)

    def reset(params: Tree, key: Key, where: jax.Array | bool = True) -> tuple[Tree, TimeStep]:
        state, ts = env.reset(params, key, where)
        check_inside(state, "frame_stack")
        frames = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), ts.obs)
        return Stacked(state, frames), dataclasses.replace(ts, obs=frames, final_obs=frames)

    def step(old: Stacked, action: jax.Array) -> tuple[Tree, TimeStep]:
        state, ts = env.step(old.state, action)
        frames = jax.tree.map(lambda f, x: jnp.concatenate([f[1:], x[None]]), old.frames, ts.obs)
        return Stacked(state, frames), dataclasses.replace(ts, obs=frames, final_obs=frames)

    obs = env.spec.obs
    if isinstance(obs, Mapping):
        obs = {name: _stacked(box, n) for name, box in obs.items()}
    else:
        obs = _stacked(obs, n)
    return Env(reset, step, env.params, dataclasses.replace(env.spec, obs=obs))


def _stacked(box: Box, n: int) -> Box:
    """A box with a leading axis [n]."""
    low, high = (b * n if isinstance(b, tuple) else b for b in (box.low, box.high))
    return dataclasses.replace(box, shape=(n, *box.shape), low=low, high=high)
