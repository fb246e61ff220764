"""Collect experience: `unroll` scans an environment, `evaluate` plays whole episodes."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.types import Agent, Env, FinalObs, Key, Metrics, Rollout, Spec, TimeStep, Tree, record


@record
class ActorState:
    """Where a batch of environments stands between two rollouts; everything leads with [B]."""

    env: Tree
    timestep: TimeStep
    carry: Tree  # the agent's memory, already fresh where an episode has just begun


def start(agent: Agent, env: Env, key: Key) -> ActorState:
    """Reset a batched environment and give the agent an empty memory."""
    env_state, timestep = env.reset(env.params, key)
    return ActorState(env_state, timestep, agent.carry(timestep.reward.shape[0]))


def slots_needed(spec: Spec, num_steps: int, num_envs: int) -> int:
    """How many slots for final observations a rollout gets by default.

    A sixteenth of its steps; where a time limit cuts episodes, never fewer than the limit can cut
    even when all environments reach it together.
    """
    slots = math.ceil(num_steps * num_envs / 16)
    if spec.episode_length:
        slots = max(slots, num_envs * math.ceil(num_steps / spec.episode_length))
    return min(slots, num_steps * num_envs)


def unroll(
    agent: Agent,
    env: Env,
    policy: Tree,
    actor: ActorState,
    key: Key,
    *,
    num_steps: int,
    final_slots: int = 0,
    explore: bool = True,
) -> tuple[ActorState, Rollout]:
    """Act for `num_steps` steps in a batched, auto-resetting environment.

    The agent's memory restarts where an episode ends. Observations are kept once, `[T + 1]`; the
    true successors of cut-off steps go to `final_slots` slots (0: `slots_needed`).

    Returns:
        Where to go on, and the rollout.
    """
    num_envs = actor.timestep.reward.shape[0]
    slots = final_slots or slots_needed(env.spec, num_steps, num_envs)
    fresh = agent.carry(num_envs)

    def step(loop: tuple, inputs: tuple[jax.Array, Key]) -> tuple[tuple, tuple]:
        actor, obs, final = loop
        t, key = inputs
        obs = jax.tree.map(lambda all_, x: all_.at[t].set(x), obs, actor.timestep.obs)
        carry, action, aux = agent.act(
            policy, actor.carry, actor.timestep.obs, key, explore=explore
        )
        env_state, ts = env.step(actor.env, action)
        carry = where(ts.terminated | ts.truncated, fresh, carry)
        final = _keep_final(final, ts, t, num_steps * num_envs)
        out = (action, ts.reward, ts.terminated, ts.truncated, aux, ts.info)
        return (ActorState(env_state, ts, carry), obs, final), out

    first = actor.timestep.obs
    obs = jax.tree.map(lambda x: jnp.zeros((num_steps + 1, *x.shape), x.dtype), first)
    empty = FinalObs(
        jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), first),
        jnp.full((slots,), num_steps * num_envs, jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    inputs = (jnp.arange(num_steps), jax.random.split(key, num_steps))
    (last, obs, final), out = jax.lax.scan(step, (actor, obs, empty), inputs)
    obs = jax.tree.map(lambda all_, x: all_.at[num_steps].set(x), obs, last.timestep.obs)
    action, reward, terminated, truncated, aux, info = out
    return last, Rollout(obs, action, reward, terminated, truncated, final, actor.carry, aux, info)


def _keep_final(final: FinalObs, ts: TimeStep, t: jax.Array, num_rows: int) -> FinalObs:
    """Write the final observations of the steps cut off now into the free slots."""
    cut = ts.truncated & ~ts.terminated
    slots, num_envs = final.index.shape[0], cut.shape[0]

    def write(final: FinalObs) -> FinalObs:
        used = jnp.sum(final.index < num_rows, dtype=jnp.int32)
        slot = jnp.where(cut, used + jnp.cumsum(cut, dtype=jnp.int32) - 1, slots)
        row = t.astype(jnp.int32) * num_envs + jnp.arange(num_envs, dtype=jnp.int32)
        return FinalObs(
            jax.tree.map(lambda s, x: s.at[slot].set(x, mode="drop"), final.obs, ts.final_obs),
            final.index.at[slot].set(row, mode="drop"),
            final.dropped + jnp.sum(cut & (slot >= slots), dtype=jnp.int32),
        )

    return jax.lax.cond(jnp.any(cut), write, lambda final: final, final)


def successor_values(
    rollout: Rollout, value: jax.Array, final_value: jax.Array, discount: float | jax.Array
) -> jax.Array:
    """The value of each step's true successor, from values of `obs` and of the final slots.

    Args:
        rollout: T steps of B environments.
        value: V(obs), [T + 1, B].
        final_value: V(final.obs), [M].
        discount: γ.

    Returns:
        [T, B]. A cut-off step that found no slot gets the value that makes its temporal difference
        zero: the episode then counts as cut one step earlier, where its successor is known, and
        the step itself teaches nothing. Nothing is biased, `final.dropped` steps are lost.
    """
    shape = rollout.reward.shape
    kept = jnp.zeros(math.prod(shape), bool).at[rollout.final.index].set(True, mode="drop")
    lost = rollout.truncated & ~rollout.terminated & ~kept.reshape(shape)
    flat = value[1:].reshape(-1).at[rollout.final.index].set(final_value, mode="drop")
    neutral = (value[:-1] - rollout.reward) / discount
    return jnp.where(lost, neutral, flat.reshape(shape))


def first_steps(rollout: Rollout) -> jax.Array:
    """Which rows of `rollout.obs` begin an episode inside the rollout, bool [T + 1, B].

    Row 0 is False: `rollout.carry` is already fresh where an episode began there.
    """
    ended = rollout.terminated | rollout.truncated
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended])


def where(mask: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Pick rows: trees whose leaves lead with [B], `mask` bool [B]."""

    def pick(y: jax.Array, n: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(mask.shape + (1,) * (n.ndim - mask.ndim)), y, n)

    return jax.tree.map(pick, yes, no)


def metrics(rollout: Rollout) -> Metrics:
    """Scalars to log: means over the steps, and over the episodes that ended, of `info`."""
    ended = rollout.terminated | rollout.truncated
    count = jnp.sum(ended)
    out = {
        "rollout/reward": jnp.mean(rollout.reward),
        "rollout/final_obs_dropped": rollout.final.dropped,
        "episode/count": count,
    }
    for name, x in rollout.info.items():
        x = x.astype(jnp.float32)
        if name.startswith("episode/"):
            out[name] = jnp.sum(jnp.where(ended, x, 0.0)) / count  # NaN where none ended
        elif name == "nan_resets":
            out["rollout/nan_resets"] = jnp.sum(x)
        else:
            out[name if "/" in name else f"rollout/{name}"] = jnp.mean(x)
    return out


def evaluate(
    agent: Agent, env: Env, policy: Tree, key: Key, *, max_steps: int = 0
) -> dict[str, jax.Array]:
    """Play one whole episode in each environment of a batch that does **not** reset itself.

    Acts without exploration and changes nothing. Environments that ended earlier wait.

    Args:
        agent: the algorithm.
        env: batched, with a time limit; B of its robots are played.
        policy: what to act with.
        key: of the starts.
        max_steps: when to stop at the latest (0: the spec's episode length).

    Returns:
        Per episode, [B]: "return", "length", and the mean over its steps of every scalar in `info`
        (but "episode/...", which are totals so far).

    Raises:
        ValueError: where neither `max_steps` nor the spec bounds an episode.
    """
    limit = max_steps or env.spec.episode_length
    if not limit:
        raise ValueError("evaluate: this environment has no time limit; give max_steps.")
    k_start, k_act = jax.random.split(key)
    actor = start(agent, env, k_start)
    num_envs = actor.timestep.reward.shape[0]
    zero = jnp.zeros(num_envs, jnp.float32)
    sums = {name: zero for name in actor.timestep.info if not name.startswith("episode/")}

    def going(loop: tuple) -> jax.Array:
        t, _, alive, *_ = loop
        return (t < limit) & jnp.any(alive)

    def step(loop: tuple) -> tuple:
        t, actor, alive, total, length, sums = loop
        carry, action, _ = agent.act(
            policy, actor.carry, actor.timestep.obs, jax.random.fold_in(k_act, t), explore=False
        )
        env_state, ts = env.step(actor.env, action)
        total = total + jnp.where(alive, ts.reward, 0.0)
        length = length + alive
        sums = {
            name: s + jnp.where(alive, ts.info[name].astype(jnp.float32), 0.0)
            for name, s in sums.items()
        }
        alive = alive & ~(ts.terminated | ts.truncated)
        return t + 1, ActorState(env_state, ts, carry), alive, total, length, sums

    loop = (jnp.zeros((), jnp.int32), actor, jnp.ones(num_envs, bool), zero, zero, sums)
    *_, total, length, sums = jax.lax.while_loop(going, step, loop)
    means = jax.tree.map(lambda s: s / length, sums)
    return {"return": total, "length": length, **means}


def play(
    agent: Agent,
    env: Env,
    policy: Tree,
    key: Key,
    look: Callable[[Tree], Tree],
    *,
    num_steps: int,
) -> tuple[Tree, jax.Array]:
    """Watch a batch that does not reset itself act without exploration.

    Args:
        agent: the algorithm.
        env: batched.
        policy: what to act with.
        key: of the starts.
        look: environment state -> what to keep of it.
        num_steps: T.

    Returns:
        What `look` saw after each step, [T, ...], and whether the episode went on until then,
        bool [T, B].
    """
    k_start, k_act = jax.random.split(key)
    actor = start(agent, env, k_start)
    alive = jnp.ones(actor.timestep.reward.shape, bool)

    def step(loop: tuple, key: Key) -> tuple[tuple, tuple]:
        actor, alive = loop
        carry, action, _ = agent.act(policy, actor.carry, actor.timestep.obs, key, explore=False)
        env_state, ts = env.step(actor.env, action)
        still = alive & ~(ts.terminated | ts.truncated)
        return (ActorState(env_state, ts, carry), still), (look(env_state), alive)

    _, seen = jax.lax.scan(step, (actor, alive), jax.random.split(k_act, num_steps))
    return seen
