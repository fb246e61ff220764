"""The rollout of simulators that are not JAX: a Python loop around a jitted policy."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jrl.rollout import ActorState, slots_needed, where
from jrl.types import Agent, FinalObs, HostEnv, Key, Rollout, TimeStep, Tree


def start(agent: Agent, envs: Sequence[HostEnv], seed: int) -> tuple[ActorState, ...]:
    """Reset each simulator, with a seed of its own, and give the agent an empty memory."""

    def one(env: HostEnv, seed: int) -> ActorState:
        timestep = jax.tree.map(np.array, env.reset(seed))
        return ActorState(env.save(), timestep, agent.carry(env.num_envs))

    return tuple(one(env, seed + i) for i, env in enumerate(envs))


def actor(agent: Agent) -> Callable[..., tuple[Tree, jax.Array, Tree]]:
    """`act(policy, carry, obs, key, t)`, jitted; make it once and give it to `unroll`."""

    @functools.partial(jax.jit, static_argnames="explore")
    def act(
        policy: Tree, carry: Tree, obs: Tree, key: Key, t: int, *, explore: bool = True
    ) -> tuple[Tree, jax.Array, Tree]:
        return agent.act(policy, carry, obs, jax.random.fold_in(key, t), explore=explore)

    return act


def unroll(
    agent: Agent,
    act: Callable[..., tuple[Tree, jax.Array, Tree]],
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
    agent: Agent,
    act: Callable[..., tuple[Tree, jax.Array, Tree]],
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
