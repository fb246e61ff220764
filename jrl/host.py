"""Simulators and policies that are not JAX: rollouts and evaluations as Python loops."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.rollout import ActorState, slots_needed, where
from jrl.types import Agent, Env, FinalObs, HostAgent, HostEnv, Key, Rollout, TimeStep, Tree

Act = Callable[..., tuple[Tree, Any, Tree]]  # (policy, carry, obs, key, t, *, explore=True)


def from_env(env: Env, num_envs: int) -> HostEnv:
    """A batched, auto-resetting `Env` as a simulator on the host, for policies that are not JAX.

    Its steps are compiled, and its state can be saved.
    """
    reset, advance = jax.jit(env.reset), jax.jit(env.step)
    held: dict[str, Tree] = {}

    def show(state: Tree, timestep: TimeStep) -> TimeStep:
        held["state"] = state
        return jax.tree.map(np.asarray, timestep)

    return HostEnv(
        num_envs=num_envs,
        reset=lambda seed: show(*reset(env.params, jax.random.key(seed))),
        step=lambda action: show(*advance(held["state"], jnp.asarray(action))),
        spec=env.spec,
        save=lambda: held["state"],
        restore=lambda state: held.update(state=state),
    )


def start(agent: Agent | HostAgent, envs: Sequence[HostEnv], seed: int) -> tuple[ActorState, ...]:
    """Reset each simulator, with a seed of its own, and give the agent an empty memory."""
    return tuple(_start(agent, env, seed + i) for i, env in enumerate(envs))


def _start(agent: Agent | HostAgent, env: HostEnv, seed: int) -> ActorState:
    timestep = jax.tree.map(np.array, env.reset(seed))
    return ActorState(env.save(), timestep, agent.carry(env.num_envs))


def go_on(agent: Agent | HostAgent, env: HostEnv, saved: ActorState, seed: int) -> ActorState:
    """Bring a simulator to where it was when it was saved; one that can't starts new episodes."""
    if env.restore is None:
        return _start(agent, env, seed)
    env.restore(saved.env)
    return saved


def actor(agent: Agent | HostAgent) -> Act:
    """`act(policy, carry, obs, key, t)`, jitted where it is JAX; make it once, for `unroll`."""
    if isinstance(agent, HostAgent):
        fold = jax.jit(jax.random.fold_in)

        def call(
            policy: Any, carry: Tree, obs: Tree, key: Key, t: int, *, explore: bool = True
        ) -> tuple[Tree, Any, Tree]:
            return agent.act(policy, carry, obs, fold(key, t), explore=explore)

        return call

    @functools.partial(jax.jit, static_argnames="explore")
    def act(
        policy: Tree, carry: Tree, obs: Tree, key: Key, t: int, *, explore: bool = True
    ) -> tuple[Tree, jax.Array, Tree]:
        return agent.act(policy, carry, obs, jax.random.fold_in(key, t), explore=explore)

    return act


def unroll(
    agent: Agent | HostAgent,
    act: Act,
    envs: Sequence[HostEnv],
    policy: Tree,
    actors: Sequence[ActorState],
    key: Key,
    *,
    num_steps: int,
    final_slots: int = 0,
) -> tuple[tuple[ActorState, ...], Rollout]:
    """Act for `num_steps` steps in S simulators side by side (pipeline stages), as one rollout.

    While one simulator steps, the policy acts for another: a step of all B robots costs about
    S · max(step of B / S robots, act for B / S robots) instead of their sum. S = 1 is the plain
    loop.

    Args:
        agent: the algorithm.
        act: `actor(agent)`.
        envs: S simulators of B / S robots each, which restart by themselves.
        policy: what to act with.
        actors: where each of them stands, from `start` or the last `unroll`.
        key: of the actions.
        num_steps: T.
        final_slots: see `jrl.rollout.unroll`.

    Returns:
        Where to go on, and the rollout [T, B] of NumPy arrays, simulators side by side along B.
    """
    keys = jax.random.split(key, len(envs))
    run = functools.partial(_unroll_one, agent, act, policy, num_steps)
    with ThreadPoolExecutor(len(envs)) as pool:
        lasts, parts = zip(*pool.map(run, envs, actors, keys))
    obs, action, ts, aux = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
    last_obs = jax.tree.map(lambda *x: np.concatenate(x)[None], *(a.timestep.obs for a in lasts))
    final = _pack_final(ts, final_slots or slots_needed(envs[0].spec, *ts.reward.shape))
    return lasts, Rollout(
        obs=jax.tree.map(lambda x, y: np.concatenate([x, y]), obs, last_obs),
        action=action,
        reward=ts.reward,
        terminated=ts.terminated,
        truncated=ts.truncated,
        final=final,
        carry=jax.tree.map(lambda *x: np.concatenate(x), *(a.carry for a in actors)),
        aux=aux,
        info=ts.info,
    )


def _unroll_one(
    agent: Agent | HostAgent,
    act: Act,
    policy: Tree,
    num_steps: int,
    env: HostEnv,
    actor: ActorState,
    key: Key,
) -> tuple[ActorState, Tree]:
    """One simulator's share of `unroll`: where it stands, and its rows [T, B / S]."""
    fresh, carry, ts = agent.carry(env.num_envs), actor.carry, actor.timestep
    acted: Tree = None
    seen: Tree = None
    for t in range(num_steps):
        carry, action, aux = act(policy, carry, ts.obs, key, t)
        sent = np.asarray(action)
        # Kept before the step: a simulator may write its next observation into the same memory.
        acted = _keep(acted, (ts.obs, sent, aux), t, num_steps)
        ts = env.step(sent)
        seen = _keep(seen, ts, t, num_steps)
        carry = where(ts.terminated | ts.truncated, fresh, carry)
    obs, action, aux = acted
    return ActorState(env.save(), jax.tree.map(np.array, ts), carry), (obs, action, seen, aux)


def _keep(rows: Tree, row: Tree, t: int, num_steps: int) -> Tree:
    """Copy row `t` into `rows`, which are made for the first one."""
    if rows is None:
        rows = jax.tree.map(lambda x: np.empty((num_steps, *x.shape), x.dtype), row)
    for all_, x in zip(jax.tree.leaves(rows), jax.tree.leaves(row)):
        all_[t] = x
    return rows


def _pack_final(ts: TimeStep, slots: int) -> FinalObs:
    """The final observations of the steps cut off, from rows [T, B], in slots."""
    num_rows = ts.truncated.size
    cut = np.flatnonzero(ts.truncated & ~ts.terminated)
    kept = cut[:slots]
    index = np.full(slots, num_rows, np.int32)
    index[: len(kept)] = kept

    def pack(x: np.ndarray) -> np.ndarray:
        x = x.reshape(num_rows, *x.shape[2:])
        return x[np.minimum(index, num_rows - 1)]

    return FinalObs(
        jax.tree.map(pack, ts.final_obs),
        jnp.asarray(index),
        jnp.asarray(len(cut) - len(kept), jnp.int32),
    )


def evaluate(
    agent: Agent | HostAgent, act: Act, env: HostEnv, policy: Tree, key: Key, *, max_steps: int = 0
) -> dict[str, np.ndarray]:
    """Play the first episode of each robot, whole, without exploration.

    Every robot counts once: robots whose episodes are short don't count more often. The numbers
    are those of `jrl.rollout.evaluate`.

    Args:
        agent: the algorithm.
        act: `actor(agent)`.
        env: a simulator for this alone; it is reset.
        policy: what to act with.
        key: of the starts.
        max_steps: when to stop at the latest (0: the spec's episode length).

    Raises:
        ValueError: where neither `max_steps` nor the spec bounds an episode.
    """
    limit = max_steps or env.spec.episode_length
    if not limit:
        raise ValueError("evaluate: this simulator has no time limit; give max_steps.")
    k_start, k_act = jax.random.split(key)
    actor = _start(agent, env, int(jax.random.randint(k_start, (), 0, 2**30)))
    carry, ts = actor.carry, actor.timestep
    alive, zero = np.ones(env.num_envs, bool), np.zeros(env.num_envs, np.float32)
    sums = {name: zero for name in ("return", "length", *ts.info) if name[:8] != "episode/"}
    t = 0
    while t < limit and alive.any():
        carry, action, _ = act(policy, carry, ts.obs, k_act, t, explore=False)
        ts = env.step(np.asarray(action))
        seen = {"return": ts.reward, "length": 1.0, **ts.info}
        sums = {name: s + np.where(alive, seen[name], 0.0) for name, s in sums.items()}
        alive &= ~(ts.terminated | ts.truncated)
        t += 1
    total, length = sums.pop("return"), sums.pop("length")
    return {"return": total, "length": length, **{name: s / length for name, s in sums.items()}}


def play(
    agent: HostAgent,
    env: Env,
    policy: Any,
    key: Key,
    look: Callable[[Tree], Tree],
    *,
    num_steps: int,
) -> tuple[Tree, np.ndarray]:
    """`jrl.rollout.play` for an algorithm that isn't JAX."""
    k_start, k_act = jax.random.split(key)
    step = jax.jit(env.step)
    state, ts = jax.jit(env.reset)(env.params, k_start)
    alive = np.ones(ts.reward.shape, bool)
    carry, seen = agent.carry(len(alive)), []
    for t in range(num_steps):
        act_key = jax.random.fold_in(k_act, t)
        carry, action, _ = agent.act(policy, carry, ts.obs, act_key, explore=False)
        state, ts = step(state, jnp.asarray(action))
        seen.append((look(state), alive))
        alive = alive & ~np.asarray(ts.terminated | ts.truncated)
    return jax.tree.map(lambda *x: np.stack(x), *seen)
