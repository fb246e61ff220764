"""The host loop: the same rollout as the scan, live buffers, pipeline stages, training."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jrl.envs as envs
from jrl import host, loops, rollout
from jrl.agents import ppo
from jrl.types import Agent, Box, HostEnv, Spec, TimeStep


def hosted(env, num_envs, key, live=False):
    """An `Env` behind the host's interface; with `live`, every step writes into the same arrays."""
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    held = {}

    def show(ts):
        ts = jax.tree.map(np.array, ts)
        if not live:
            return ts
        if "ts" not in held:
            held["ts"] = ts
        for old, new in zip(jax.tree.leaves(held["ts"]), jax.tree.leaves(ts)):
            old[...] = new
        return held["ts"]

    def start(seed):
        held["state"], ts = reset(env.params, key)
        return show(ts)

    def advance(action):
        held["state"], ts = step(held["state"], action)
        return show(ts)

    return HostEnv(num_envs, start, advance, env.spec, save=lambda: held["state"])


def nudge() -> Agent:
    """A deterministic agent with a memory: its action depends on how often it has acted."""

    def act(policy, carry, obs, key, *, explore=True):
        del key, explore
        action = ((obs[:, 2] > 0) ^ (carry % 7 == 0)).astype(jnp.int32)
        return carry + 1, action, {"log_prob": -obs[:, 0]}

    empty = lambda n: jnp.zeros(n, jnp.int32)
    return Agent(lambda k: (), lambda s: (), empty, act, lambda s, d, k: (s, {}), "rollout")


def test_the_host_loop_gives_the_rollout_of_the_scan():
    env, agent, key = envs.vector("cartpole", 6, episode_length=9), nudge(), jax.random.key(3)
    actor = rollout.start(agent, env, key)
    run = jax.jit(lambda a: rollout.unroll(agent, env, (), a, key, num_steps=40))
    _, expected = run(actor)
    assert expected.truncated.any()
    assert int(expected.final.dropped) == 0
    for live in (False, True):
        sim = hosted(env, 6, key, live=live)
        actors = host.start(agent, [sim], seed=0)
        act = host.actor(agent)
        middle, first = host.unroll(agent, act, [sim], (), actors, key, num_steps=15)
        _, second = host.unroll(agent, act, [sim], (), middle, key, num_steps=25)
        joined = jax.tree.map(
            lambda a, b: np.concatenate([a, b]),
            (first.obs[:-1], first.action, first.reward, first.truncated, first.aux, first.info),
            (second.obs, second.action, second.reward, second.truncated, second.aux, second.info),
        )
        whole = (
            expected.obs, expected.action, expected.reward, expected.truncated,
            expected.aux, expected.info,
        )  # fmt: skip
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), joined, whole)
        cut = np.concatenate(
            [np.asarray(r.final.obs)[np.asarray(r.final.index) < r.reward.size]
             for r in (first, second)]
        )  # fmt: skip
        kept = np.asarray(expected.final.index) < expected.reward.size
        np.testing.assert_allclose(cut, np.asarray(expected.final.obs)[kept], rtol=1e-6)


def sleeper(num_envs, seconds, log):
    """A simulator that takes its time, and says when it was at work."""

    def ts(x):
        zeros = np.zeros(num_envs, bool)
        return TimeStep(
            np.full((num_envs, 1), x, np.float32), np.zeros(num_envs, np.float32),
            zeros, zeros, np.full((num_envs, 1), x, np.float32), {},
        )  # fmt: skip

    def step(action):
        begun = time.perf_counter()
        time.sleep(seconds)
        log.append((threading.get_ident(), begun, time.perf_counter()))
        return ts(float(action[0, 0]))

    return HostEnv(num_envs, lambda seed: ts(seed), step, Spec(Box((1,)), Box((1,))))


def test_pipeline_stages_step_at_the_same_time_and_lie_side_by_side():
    def act(policy, carry, obs, key, *, explore=True):
        return carry, obs + 1.0, {}

    agent = nudge()._replace(act=act, carry=lambda n: ())
    log: list = []
    sims = [sleeper(2, 0.02, log), sleeper(3, 0.02, log)]
    actors = host.start(agent, sims, seed=10)
    actors, data = host.unroll(
        agent, host.actor(agent), sims, (), actors, jax.random.key(0), num_steps=5
    )
    assert data.obs.shape == (6, 5, 1)
    # simulator 0 starts from seed 10, simulator 1 from 11; every step adds one
    np.testing.assert_array_equal(data.obs[:, 0, 0], [10, 11, 12, 13, 14, 15])
    np.testing.assert_array_equal(data.obs[:, 4, 0], [11, 12, 13, 14, 15, 16])
    spans = {}
    for thread, begun, ended in log:
        spans.setdefault(thread, []).append((begun, ended))
    assert len(spans) == 2
    one, other = spans.values()
    assert any(a < d and c < b for a, b in one for c, d in other), "the stages never overlapped"


def test_a_full_table_of_final_observations_is_counted():
    env, agent, key = envs.vector("cartpole", 4, episode_length=3), nudge(), jax.random.key(0)
    sim = hosted(env, 4, key)
    actors = host.start(agent, [sim], seed=0)
    act = host.actor(agent)
    _, data = host.unroll(agent, act, [sim], (), actors, key, num_steps=7, final_slots=5)
    # 4 robots cut at steps 3 and 6: 8 cut-off steps, 5 slots
    assert int(data.truncated.sum()) == 8
    assert int(data.final.dropped) == 3


def test_ppo_trains_through_the_host_loop():
    env = envs.vector("cartpole", 8)
    agent = ppo.make(ppo.Config(hidden=(16,), num_minibatches=2), env.spec)
    sims = [hosted(envs.vector("cartpole", 4), 4, jax.random.key(i)) for i in range(2)]
    loop = loops.on_policy_host(agent, sims, num_steps=16)
    state = loop.init(jax.random.key(0))
    before = jax.tree.map(np.array, state.agent.params)
    for _ in range(3):
        state, metrics = loop.step(state)
    assert int(state.agent.updates) == 3
    assert np.isfinite(float(metrics["loss/value"]))
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, state.agent.params)
    assert min(jax.tree.leaves(moved)) > 0
