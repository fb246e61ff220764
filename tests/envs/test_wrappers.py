"""Wrappers: what a step of one robot says after each, in every sensible order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import envs
from jrl.envs import wrappers as w
from jrl.envs.nan_guard import nan_guard, replay
from jrl.ops.returns import gae
from jrl.testing import check_env, count_traces
from jrl.types import Box, Discrete, Env, HostEnv, Spec, TimeStep, record, zeros

NO, YES = np.bool_(False), np.bool_(True)


@record
class Count:
    steps: jax.Array
    goal: jax.Array


def counter(end: int = 0, limit: int = 4, reward: float = 0.0) -> Env:
    """Observes the steps since reset; draws a goal at reset; terminates after `end`, if not 0."""

    def timestep(state, reward, terminated):
        obs = state.steps.astype(jnp.float32)[None]
        info = {
            "goal": state.goal,
            "phase": state.steps,
            "steps": state.steps,
            "reward/even": jnp.float32(reward),
        }
        return state, TimeStep(obs, jnp.float32(reward), terminated, jnp.bool_(False), obs, info)

    def reset(params, key, where=True):
        state = Count(jnp.int32(0), jax.random.uniform(key) * params)
        return timestep(state, 0.0, jnp.bool_(False))

    def step(state, action):
        state = Count(state.steps + 1, state.goal)
        return timestep(state, reward, (state.steps >= end) if end else jnp.bool_(False))

    spec = Spec(Box((1,)), Box((1,), low=-1.0, high=1.0), dt=0.1, episode_length=limit)
    return Env(reset, step, np.float32(1.0), spec)


def at(tree, *index):
    return jax.tree.map(lambda x: x[index], tree)


def assert_equal(a, b, atol=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


def play(env: Env, steps: int, key=None, actions=None, batch: tuple[int, ...] = ()):
    """The first timestep, and all others stacked [T]."""
    state, first = jax.jit(env.reset)(env.params, jax.random.key(0) if key is None else key)
    if actions is None:
        actions = jnp.zeros((steps, *batch, *zeros(env.spec.action).shape))
    return first, jax.jit(lambda s: jax.lax.scan(env.step, s, actions))(state)[1]


# --- ends of episodes ---------------------------------------------------------------------------


def test_truncation_bootstraps_from_the_true_successor():
    first, ts = play(w.auto_reset(w.time_limit(counter())), 8)
    np.testing.assert_array_equal(ts.truncated, [0, 0, 0, 1, 0, 0, 0, 1])
    assert not ts.terminated.any()
    np.testing.assert_array_equal(ts.final_obs[:, 0], [1, 2, 3, 4, 1, 2, 3, 4])
    np.testing.assert_array_equal(ts.obs[:, 0], [1, 2, 3, 0, 1, 2, 3, 0])
    # With V(o) = o, γ = 0.9, λ = 0.95: δ = 0.9 (t+1) - t = .9, .8, .7, .6, and Aₜ = δₜ + .855 Aₜ₊₁.
    obs = jnp.concatenate([first.obs[None], ts.obs])[:-1, 0]
    col = lambda x: x[:, None]
    adv = gae(
        col(ts.reward),
        col(obs),
        col(ts.final_obs[:, 0]),
        col(ts.terminated),
        col(ts.truncated),
        discount=0.9,
        lam=0.95,
    )
    adv = adv[0] if isinstance(adv, tuple) else adv
    np.testing.assert_allclose(adv[:, 0], [2.4707, 1.8371, 1.2130, 0.6000] * 2, atol=1e-4)


def test_time_limit_never_truncates_a_terminated_step():
    _, ts = play(w.time_limit(counter(end=4)), 4)
    np.testing.assert_array_equal(ts.terminated, [0, 0, 0, 1])
    np.testing.assert_array_equal(ts.truncated, [0, 0, 0, 0])


def test_time_limit_keeps_its_own_count():
    # The environment counts in info["steps"] as well; counting there twice would cut at step 5.
    _, ts = play(w.auto_reset(w.time_limit(counter(), 10)), 20)
    np.testing.assert_array_equal(np.flatnonzero(ts.truncated), [9, 19])
    np.testing.assert_array_equal(ts.info["steps"][:10], np.arange(1, 11))
    assert w.time_limit(counter(), 10).spec.episode_length == 10
    assert w.time_limit(counter()).spec.episode_length == 4


def test_time_limit_without_a_limit_is_an_error():
    with pytest.raises(ValueError, match="steps must be greater than 0"):
        w.time_limit(counter(limit=0))


def test_fresh_starts_differ_and_info_starts_over():
    env = w.batch(w.auto_reset(w.time_limit(counter())), 4)
    first, ts = play(env, 40, batch=(4,))
    goals = np.concatenate([first.info["goal"][None], ts.info["goal"]])
    assert len(np.unique(goals)) == 44 - 4  # 10 starts of 4 robots were seen acting
    np.testing.assert_array_equal(ts.info["phase"][:, 0], [1, 2, 3, 4] * 10)


def test_cached_starts_come_from_a_bank_of_n():
    env = w.batch(w.auto_reset(w.time_limit(counter()), starts=3), 4)
    _, ts = play(env, 40, batch=(4,))
    assert len(np.unique(ts.info["goal"])) == 4 * (1 + 3)
    goals = ts.info["goal"][::4, 0]  # one per episode
    np.testing.assert_array_equal(goals[1:4], goals[4:7])
    np.testing.assert_array_equal(ts.info["phase"][:, 0], [1, 2, 3, 4] * 10)


def test_the_step_that_ends_keeps_reward_and_info():
    _, ts = play(w.auto_reset(w.episode_statistics(counter(end=3, reward=2.0))), 6)
    np.testing.assert_array_equal(ts.reward, [2] * 6)
    np.testing.assert_array_equal(ts.terminated, [0, 0, 1] * 2)
    np.testing.assert_array_equal(ts.info["episode/return"], [2, 4, 6] * 2)
    np.testing.assert_array_equal(ts.info["episode/length"], [1, 2, 3] * 2)


def test_the_kth_start_depends_on_key_and_k_only():
    # Robots whose episodes last 2 and 4 steps see the same sequence of starts.
    short, long = (
        play(w.auto_reset(w.time_limit(counter(), n)), 4 * n)[1].info["goal"][::n] for n in (2, 4)
    )
    np.testing.assert_array_equal(short, long)


def test_new_parameters_in_the_state_hold_from_the_next_start():
    env = w.auto_reset(w.time_limit(counter(), 2))
    state, _ = env.reset(env.params, jax.random.key(0))
    state = dataclasses.replace(state, params=jnp.float32(0))
    goals = []
    for _ in range(4):
        state, ts = env.step(state, jnp.zeros(1))
        goals.append(float(ts.info["goal"]))
    assert goals[0] == goals[1] != 0
    assert goals[2] == goals[3] == 0


# --- batches ------------------------------------------------------------------------------------


def test_robot_i_starts_alike_whatever_the_batch():
    env = w.auto_reset(envs.make("pendulum"))
    few, some, many = (
        w.batch(env, n).reset(env.params, jax.random.key(7))[1].obs for n in (4, 8, 64)
    )
    np.testing.assert_array_equal(few, some[:4])
    np.testing.assert_array_equal(some, many[:8])
    assert len(np.unique(many[:, 2])) == 64


def test_a_batch_equals_its_robots_one_by_one():
    env = w.auto_reset(w.episode_statistics(w.time_limit(envs.make("pendulum"), 3)))
    actions = jax.random.normal(jax.random.key(1), (8, 3, 1))
    key = jax.random.key(2)
    _, together = play(w.batch(env, 3), 8, key, actions)
    for i in range(3):
        _, alone = play(env, 8, jax.random.fold_in(key, i), actions[:, i])
        assert_equal(at(together, slice(None), i), alone, atol=1e-5)


def test_a_batch_never_resets_by_itself():
    _, ts = play(w.batch(w.time_limit(counter()), 2), 6, batch=(2,))
    np.testing.assert_array_equal(ts.obs[:, 0, 0], [1, 2, 3, 4, 5, 6])


def test_where_may_be_one_flag_or_one_per_robot():
    env = w.batch(counter(), 3)
    one = env.reset(env.params, jax.random.key(0), True)
    each = env.reset(env.params, jax.random.key(0), jnp.array([True, False, True]))
    np.testing.assert_array_equal(one[0].goal[0], each[0].goal[0])
    assert each[1].obs.shape == (3, 1)


def test_a_step_is_compiled_once():
    env = envs.vector("cartpole", 4)
    fn, traces = count_traces(env.step)
    step = jax.jit(fn)
    state, _ = jax.jit(env.reset)(env.params, jax.random.key(0))
    for _ in range(4):
        state, _ = step(state, jnp.zeros(4, jnp.int32))
    assert traces() == 1


def test_vector_takes_a_name_or_a_robot():
    assert envs.vector("cartpole", 2, episode_length=9).spec.episode_length == 9
    ours = envs.vector(counter(limit=0), 2)  # no limit: nothing cuts it
    assert not play(ours, 50, batch=(2,))[1].truncated.any()
    with pytest.raises(TypeError, match=r"finished Env and the options \[.dt"):
        envs.vector(counter(), 2, dt=9)


def test_the_options_of_a_vector():
    env = envs.vector(counter(reward=1.0), 2, action_repeat=2, frame_stack=3, episode_length=2)
    assert env.spec.obs.shape == (3, 1)
    _, ts = play(env, 2, batch=(2,))
    np.testing.assert_array_equal(ts.final_obs[:, 0, :, 0], [[0, 0, 2], [0, 2, 4]])
    np.testing.assert_array_equal(ts.reward[:, 0], [2, 2])
    np.testing.assert_array_equal(ts.truncated[:, 0], [0, 1])
    _, ts = play(envs.vector(counter(), 2, auto_reset=False), 5, batch=(2,))
    np.testing.assert_array_equal(ts.obs[:, 0, 0], [1, 2, 3, 4, 5])


def test_the_order_of_a_vector():
    env = envs.vector(counter(limit=3, reward=1.0), 2)
    _, ts = play(env, 6, batch=(2,))
    np.testing.assert_array_equal(ts.truncated[:, 0], [0, 0, 1, 0, 0, 1])
    np.testing.assert_array_equal(ts.info["episode/return"][:, 0], [1, 2, 3, 1, 2, 3])
    assert set(ts.info) >= {"episode/return", "episode/length", "nan_resets", "goal"}


# --- actions ------------------------------------------------------------------------------------


def echo(low, high, size: int) -> Env:
    """Observes the action it was sent."""

    def reset(params, key, where=True):
        obs = jnp.zeros(size)
        return obs, TimeStep(obs, jnp.float32(0), jnp.bool_(False), jnp.bool_(False), obs, {})

    def step(state, action):
        ts = TimeStep(action, jnp.float32(0), jnp.bool_(False), jnp.bool_(False), action, {})
        return action, ts

    return Env(reset, step, (), Spec(Box((size,)), Box((size,), low=low, high=high)))


def test_unit_actions_map_affinely_and_clip():
    env = w.unit_actions(echo((-0.4, 0.0), (0.4, 10.0), 2))
    assert (env.spec.action.low, env.spec.action.high) == (-1.0, 1.0)
    sent = jnp.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [3.0, -jnp.inf]])
    want = np.float32([[-0.4, 0], [0.4, 10], [0, 5], [0.2, 7.5], [0.4, 0]])
    np.testing.assert_array_equal(play(env, 5, actions=sent)[1].obs, want)


def test_unit_actions_leave_unbounded_elements():
    env = w.unit_actions(echo((-2.0, -np.inf, 0.0), (2.0, np.inf, np.inf), 3))
    assert env.spec.action.low == (-1.0, -np.inf, 0.0)
    assert env.spec.action.high == (1.0, np.inf, np.inf)
    sent = jnp.array([[0.5, 7.0, -3.0]])
    np.testing.assert_array_equal(play(env, 1, actions=sent)[1].obs, [[1.0, 7.0, 0.0]])
    free = echo(-np.inf, np.inf, 2)
    assert w.unit_actions(free) is free


def test_unit_actions_leave_discrete_actions():
    env = envs.make("cartpole")
    assert w.unit_actions(env) is env
    assert envs.vector("cartpole", 2).spec.action == Discrete(2)


def test_action_repeat_sums_rewards_and_stops_at_the_end():
    env = w.action_repeat(counter(end=5, reward=2.0), 3)
    assert env.spec.dt == pytest.approx(0.3)
    assert env.spec.episode_length == 2  # ceil(4 / 3)
    _, ts = play(env, 2)
    np.testing.assert_array_equal(ts.reward, [6, 4])  # 3 steps, then 2 until the end
    np.testing.assert_array_equal(ts.info["reward/even"], [6, 4])
    np.testing.assert_array_equal(ts.obs[:, 0], [3, 5])
    np.testing.assert_array_equal(ts.terminated, [0, 1])


def test_action_repeat_restarts_with_the_robot():
    _, ts = play(w.auto_reset(w.action_repeat(w.time_limit(counter(reward=1.0)), 3)), 4)
    np.testing.assert_array_equal(ts.final_obs[:, 0], [3, 4, 3, 4])
    np.testing.assert_array_equal(ts.reward, [3, 1, 3, 1])
    np.testing.assert_array_equal(ts.truncated, [0, 1, 0, 1])


def test_action_chunk_applies_each_action_in_turn():
    env = w.action_chunk(w.unit_actions(echo((-2.0,), (4.0,), 1)), 3)
    assert env.spec.action == Box((3, 1), low=-1.0, high=1.0)
    sent = jnp.array([[[0.1], [0.2], [-1.0]], [[0.0], [0.0], [1.0]]])
    np.testing.assert_array_equal(play(env, 2, actions=sent)[1].obs[:, 0], [-2, 4])
    with pytest.raises(TypeError, match="continuous"):
        w.action_chunk(envs.make("cartpole"), 2)


# --- observations -------------------------------------------------------------------------------


def test_frame_stack_starts_full_and_never_mixes_episodes():
    env = w.auto_reset(w.frame_stack(w.time_limit(counter(limit=3)), 2))
    assert env.spec.obs.shape == (2, 1)
    first, ts = play(env, 4)
    np.testing.assert_array_equal(first.obs[..., 0], [0, 0])
    np.testing.assert_array_equal(ts.final_obs[..., 0], [[0, 1], [1, 2], [2, 3], [0, 1]])
    np.testing.assert_array_equal(ts.obs[..., 0], [[0, 1], [1, 2], [0, 0], [0, 1]])


def test_frame_stack_of_named_observations():
    env = w.frame_stack(fragile(), 3)
    assert env.spec.obs["q"].shape == (3, 2)
    check_env(w.auto_reset(w.time_limit(env, 4)))


# --- domain randomization -----------------------------------------------------------------------


def test_randomize_draws_at_each_reset_and_keeps_the_draw():
    env = w.randomize(counter(), lambda params, key: params + jax.random.uniform(key))
    env = w.auto_reset(w.time_limit(env))
    state, _ = env.reset(env.params, jax.random.key(0))
    drawn = []
    for _ in range(12):
        drawn.append(float(state.state.state.params))
        state, _ = env.step(state, jnp.zeros(1))
    assert drawn == [x for x in drawn[::4] for _ in range(4)]
    assert len(set(drawn)) == 3
    assert 1 <= min(drawn) <= max(drawn) < 2
    check_env(env)


def test_randomize_must_keep_the_structure():
    env = w.randomize(counter(), lambda params, key: {"scale": params})
    with pytest.raises(ValueError, match="structure it was given"):
        env.reset(env.params, jax.random.key(0))


# --- non-finite robots --------------------------------------------------------------------------


@record
class Fragile:
    q: jax.Array
    v: jax.Array


def fragile() -> Env:
    """An action of 2 makes the velocity, the reward or a sensor NaN, by its place in [3]."""

    def timestep(state, reward, sensor):
        obs = {"q": state.q, "sensor": sensor}
        info = {"reward/q": reward}
        return state, TimeStep(obs, reward, jnp.bool_(False), jnp.bool_(False), obs, info)

    def reset(params, key, where=True):
        state = Fragile(jax.random.normal(key, (2,)), jnp.zeros(2))
        return timestep(state, jnp.float32(0), jnp.zeros(3))

    def step(state, action):
        broken = jnp.where(action >= 2, jnp.nan, 0.0)
        v = 0.9 * state.v - 0.1 * state.q
        state = Fragile(state.q + 0.1 * v, v + broken[0])  # a NaN velocity doesn't show in obs yet
        sensor = jnp.concatenate([state.q, broken[2:]])
        return timestep(state, (state.q**2).sum() + broken[1], sensor)

    obs = {"q": Box((2,)), "sensor": Box((3,))}
    return Env(reset, step, (), Spec(obs, Box((3,), low=-2.0, high=2.0), episode_length=20))


def test_one_broken_robot_touches_nothing_else():
    env = envs.vector(fragile(), 8)
    calm = jnp.zeros((10, 8, 3))
    faults = calm.at[4, 3, 0].set(1).at[6, 6, 1].set(1).at[2, 1, 2].set(1)
    _, good = play(env, 10, actions=calm)
    _, ts = play(env, 10, actions=faults)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(ts))
    assert ts.info["nan_resets"].sum() == 3
    healthy = [0, 2, 4, 5, 7]
    assert_equal(at(ts, slice(None), np.array(healthy)), at(good, slice(None), np.array(healthy)))
    for t, robot in ((4, 3), (6, 6), (2, 1)):
        row, before, after = (at(ts, i, robot) for i in (t, t - 1, t + 1))
        assert row.terminated
        assert not row.truncated
        assert row.reward == row.info["reward/q"] == 0
        assert row.info["nan_resets"] == 1
        np.testing.assert_array_equal(row.final_obs["q"], before.obs["q"])  # the last finite one
        assert (row.obs["q"] != row.final_obs["q"]).all()  # a fresh start
        assert not after.terminated
        assert after.reward > 0
        assert after.info["episode/length"] == 1


def test_nan_guard_passes_reported_failures_on():
    def step(state, action):
        state, ts = env.step(state, action)
        return state, dataclasses.replace(ts, info={"nan_resets": jnp.float32(1)})

    def reset(params, key, where=True):
        state, ts = env.reset(params, key)
        return state, dataclasses.replace(ts, info={"nan_resets": jnp.float32(0)})

    env = fragile()
    first, ts = play(nan_guard(env._replace(reset=reset, step=step)), 2)
    assert first.info["nan_resets"] == 0
    np.testing.assert_array_equal(ts.info["nan_resets"], [1, 1])


def test_nan_guard_allows_infinite_limits_in_the_state():
    env = fragile()

    def reset(params, key, where=True):
        state, ts = env.reset(params, key)
        return (state, jnp.float32(jnp.inf)), ts

    def step(state, action):
        new, ts = env.step(state[0], action)
        return (new, state[1]), ts

    _, ts = play(nan_guard(env._replace(reset=reset, step=step)), 3)
    assert ts.info["nan_resets"].sum() == 0


def test_a_dumped_failure_can_be_replayed(tmp_path):
    path = tmp_path / "failure.npz"
    env = w.randomize(fragile(), lambda params, key: params)
    robots = w.batch(w.auto_reset(nan_guard(env, dump=path)), 4)
    calm = jnp.zeros((6, 4, 3))
    play(robots, 6, actions=calm)
    jax.effects_barrier()
    assert not path.exists()
    _, ts = play(robots, 6, actions=calm.at[3, 2, 1].set(2).at[5, 1, 2].set(2))
    jax.effects_barrier()
    state, again = replay(env, path)  # the first of the two
    assert jnp.isnan(again.reward)
    q = state.state.q
    np.testing.assert_allclose(again.obs["q"], q)
    # The robot's state before the step gives its last good observation, which it kept showing.
    v = (q - ts.final_obs["q"][3, 2]) / 0.1
    np.testing.assert_allclose(v, state.state.v, atol=1e-5)
    with pytest.raises(ValueError, match="Replay it with the environment"):
        replay(counter(), path)


# --- wrong use ----------------------------------------------------------------------------------

WRAPPERS = {
    "time_limit": w.time_limit,
    "episode_statistics": w.episode_statistics,
    "auto_reset": w.auto_reset,
    "nan_guard": nan_guard,
    "unit_actions": w.unit_actions,
    "batch": lambda env: w.batch(env, 2),
    "action_repeat": lambda env: w.action_repeat(env, 2),
    "action_chunk": lambda env: w.action_chunk(env, 2),
    "frame_stack": lambda env: w.frame_stack(env, 2),
    "randomize": lambda env: w.randomize(env, lambda params, key: params),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_refuse_a_host_env(name):
    spec = counter().spec
    host = HostEnv(4, reset=lambda seed: None, step=lambda action: None, spec=spec)
    with pytest.raises(TypeError, match=f"{name} wraps an Env .* but got a HostEnv"):
        WRAPPERS[name](host)
    with pytest.raises(TypeError, match="but got str"):
        WRAPPERS[name]("cartpole")


@pytest.mark.parametrize("name", sorted(WRAPPERS.keys() - {"unit_actions", "batch"}))
def test_wrappers_refuse_to_run_across_episodes(name):
    env = WRAPPERS[name](w.unit_actions(w.auto_reset(counter())))
    with pytest.raises(TypeError, match=rf"auto_reset\({name}\(env\)\)"):
        env.reset(env.params, jax.random.key(0))


def test_episode_statistics_refuse_a_clash():
    env = w.episode_statistics(w.episode_statistics(counter()))
    with pytest.raises(ValueError, match="Wrap it only once"):
        env.reset(env.params, jax.random.key(0))


def test_everything_together_keeps_the_contract():
    env = w.randomize(w.unit_actions(fragile()), lambda params, key: params)
    env = w.time_limit(nan_guard(env), 7)
    env = w.action_chunk(env, 2)
    check_env(w.auto_reset(w.episode_statistics(w.frame_stack(env, 2)), starts=2), steps=2)
