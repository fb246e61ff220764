"""Rollouts against hand numbers and against a plain Python loop; evaluation and play."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import rollout as rollouts
from jrl.envs import wrappers
from jrl.ops.returns import gae
from jrl.types import Agent, Box, Env, FinalObs, Key, Rollout, Spec, TimeStep, Tree, record

KEY = jax.random.key(3)
ALL_FOUR = [2.4707, 1.8371, 1.2130, 0.6000]  # advantages of the Counter's episodes, see below


@record
class Walker:
    """Somewhere between 0 and 7, from 7 on the episode is over."""

    x: jax.Array


def make_env(reset, observe, step, *, length, obs) -> Env:
    """An environment of one robot from functions of its state; it never truncates."""

    def timestep(state: Walker, reward: jax.Array, terminated: jax.Array):
        obs = observe(state)
        info = {"reward/all": reward}
        return state, TimeStep(obs, reward, terminated, jnp.zeros((), bool), obs, info)

    def env_reset(params: Tree, key: Key, where: jax.Array | bool = True):
        return timestep(Walker(reset(key)), jnp.zeros(()), jnp.zeros((), bool))

    def env_step(state: Walker, action: jax.Array):
        x, reward, terminated = step(state.x, action)
        return timestep(Walker(x), reward, terminated)

    spec = Spec(obs=obs, action=Box((1,), low=-1.0, high=1.0), episode_length=length)
    return Env(env_reset, env_step, (), spec)


def counter(limit: int = 4, num_envs: int = 1) -> Env:
    """Observes the steps since its reset, earns nothing, never terminates."""
    env = make_env(
        lambda key: jnp.zeros(()),
        lambda state: state.x[None],
        lambda x, action: (x + 1, jnp.zeros(()), jnp.zeros((), bool)),
        length=limit,
        obs=Box((1,)),
    )
    robot = wrappers.episode_statistics(wrappers.time_limit(env))
    return wrappers.batch(wrappers.auto_reset(robot), num_envs)


def walk(num_envs: int, *, auto_reset: bool = True, nested: bool = False) -> Env:
    """Starts anywhere in [0, 5), moves by about 1, terminates from 7 on, is cut after 5 steps."""

    def step(x: jax.Array, action: jax.Array):
        x = x + 1 + 0.1 * jnp.tanh(action[0])
        return x, 10 * x, x >= 7

    def observe(state: Walker) -> Tree:
        flat = jnp.stack([state.x, state.x**2])
        return {"policy": flat, "critic": {"x": -state.x}} if nested else flat

    obs = {"policy": Box((2,)), "critic": {"x": Box(())}} if nested else Box((2,))
    start = lambda key: jax.random.uniform(key, (), maxval=5.0)
    env = make_env(start, observe, step, length=5, obs=obs)
    robot = wrappers.episode_statistics(wrappers.time_limit(env))
    return wrappers.batch(wrappers.auto_reset(robot) if auto_reset else robot, num_envs)


def remembering() -> Agent:
    """Its action depends on everything it may: policy, memory, observation and key."""

    def act(policy: Tree, carry: Tree, obs: Tree, key: Key, *, explore: bool = True):
        x = jax.tree.leaves(obs)[-1].reshape(carry["sum"].shape[0], -1)[:, 0]
        noise = jax.random.normal(key, x.shape) if explore else jnp.zeros_like(x)
        carry = {"steps": carry["steps"] + 1, "sum": carry["sum"] + x}
        action = policy * x + noise + 0.1 * carry["steps"]
        return carry, action[:, None], {"log_prob": noise, "steps": carry["steps"]}

    return Agent(
        init=lambda key: jnp.float32(0.1),
        policy=lambda state: state,
        carry=lambda n: {"steps": jnp.zeros(n, jnp.int32), "sum": jnp.zeros(n)},
        act=act,
        update=lambda state, data, key: (state, {}),
        data="rollout",
    )


AGENT = remembering()


def collect(env: Env, key: Key = KEY, **kwargs) -> tuple[rollouts.ActorState, Rollout]:
    """Start and unroll, jitted."""

    @jax.jit
    def run(key: Key):
        k_start, k_roll = jax.random.split(key)
        actor = rollouts.start(AGENT, env, k_start)
        return rollouts.unroll(AGENT, env, jnp.float32(0.1), actor, k_roll, **kwargs)

    return run(key)


def advantages(data: Rollout) -> np.ndarray:
    """GAE with V(o) = o, γ = 0.9, λ = 0.95, all the way from the rollout."""
    value = lambda obs: obs[..., 0]
    next_value = rollouts.successor_values(data, value(data.obs), value(data.final.obs), 0.9)
    return np.asarray(
        gae(
            data.reward,
            value(data.obs)[:-1],
            next_value,
            data.terminated,
            data.truncated,
            discount=0.9,
            lam=0.95,
        )
    )


# --- time limits and their slots ------------------------------------------------------------------


def test_two_time_limited_episodes_get_the_advantages_of_their_true_successors():
    # δ = 0.9 (o + 1) - o for o = 0, 1, 2, 3: 0.9, 0.8, 0.7, 0.6; γλ = 0.855.
    # A = 0.6; 0.7 + 0.855 · 0.6 = 1.213; 0.8 + 0.855 · 1.213 = 1.837115; ... = 2.470733
    _, data = collect(counter(), num_steps=8)
    np.testing.assert_allclose(advantages(data)[:, 0], ALL_FOUR * 2, atol=5e-5)
    np.testing.assert_array_equal(data.truncated[:, 0], [0, 0, 0, 1, 0, 0, 0, 1])
    assert not data.terminated.any()
    # obs are those to act on: 0 again after each end; the successors, 4, are in the slots
    np.testing.assert_array_equal(data.obs[:, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(data.final.index, [3, 7])
    np.testing.assert_array_equal(data.final.obs[:, 0], [4, 4])
    assert data.final.dropped == 0


def test_a_window_that_ends_within_an_episode_bootstraps_from_its_last_observation():
    # T = 6: the second episode is open after o = 0, 1. δ = 0.9, 0.8; A = 0.8, 0.9 + 0.855 · 0.8.
    _, data = collect(counter(), num_steps=6)
    np.testing.assert_allclose(advantages(data)[:, 0], [*ALL_FOUR, 1.584, 0.8], atol=5e-5)


def test_a_rollout_goes_on_where_the_one_before_stopped():
    env = counter()
    actor, one = collect(env, num_steps=6)
    go_on = lambda a: rollouts.unroll(AGENT, env, jnp.float32(0.1), a, KEY, num_steps=6)
    _, two = jax.jit(go_on)(actor)
    np.testing.assert_array_equal(one.obs[-1], two.obs[0])
    np.testing.assert_array_equal(two.obs[:, 0, 0], [2, 3, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(two.carry["steps"], [2])  # two steps into the episode
    np.testing.assert_allclose(advantages(two)[:2, 0], ALL_FOUR[2:], atol=5e-5)


def test_a_cut_off_step_without_a_slot_counts_as_cut_one_step_earlier():
    # One slot for two ends: the second end, at t = 7, is lost. There δ = 0, and before it
    # A = 0.7; 0.8 + 0.855 · 0.7 = 1.3985; 0.9 + 0.855 · 1.3985 = 2.0957175.
    _, data = collect(counter(), num_steps=8, final_slots=1)
    assert data.final.dropped == 1
    np.testing.assert_allclose(
        advantages(data)[:, 0], [*ALL_FOUR, 2.0957, 1.3985, 0.7, 0], atol=5e-5
    )
    # the very numbers of an episode that is cut after three steps
    _, short = collect(counter(limit=3), num_steps=3)
    np.testing.assert_allclose(advantages(data)[4:7], advantages(short), atol=1e-6)


def test_slots_are_given_in_the_order_of_the_rows():
    # Three robots end together at t = 3 and t = 7; of six ends the first four are kept.
    _, data = collect(counter(num_envs=3), num_steps=8, final_slots=4)
    np.testing.assert_array_equal(data.final.index, [9, 10, 11, 21])  # 3·3 + b, 7·3 + b
    assert data.final.dropped == 2
    lost = advantages(data)[7]
    np.testing.assert_allclose(lost, [0.6, 0, 0], atol=1e-6)


def test_rewards_of_a_lost_step_teach_nothing():
    # r = 5 at the lost step: δ there is still 0, whatever the reward.
    data = Rollout(
        obs=jnp.asarray([[[1.0]], [[2.0]], [[0.0]]]),
        action=jnp.zeros((2, 1, 1)),
        reward=jnp.asarray([[1.0], [5.0]]),
        terminated=jnp.zeros((2, 1), bool),
        truncated=jnp.asarray([[False], [True]]),
        final=FinalObs(jnp.zeros((1, 1)), jnp.asarray([2], jnp.int32), jnp.int32(1)),
        carry=(),
        aux={},
        info={},
    )
    # A₁ = 0 and A₀ = 1 + 0.9 · 2 - 1 = 1.8
    np.testing.assert_allclose(advantages(data)[:, 0], [1.8, 0], atol=1e-6)


def test_default_slots():
    spec = Spec(obs=Box((1,)), action=Box((1,)))
    assert rollouts.slots_needed(spec, 32, 16) == 32  # 512 / 16
    assert rollouts.slots_needed(spec, 5, 3) == 1  # 15 / 16, rounded up
    limited = Spec(obs=Box((1,)), action=Box((1,)), episode_length=10)
    assert rollouts.slots_needed(limited, 25, 4) == 12  # three ends each at most
    assert rollouts.slots_needed(limited, 1, 4) == 4  # never more than there are steps


@pytest.mark.parametrize(("limit", "num_steps", "ahead"), [(4, 9, 3), (7, 2, 6)])
def test_default_slots_hold_every_end_that_a_time_limit_makes(limit, num_steps, ahead):
    # The worst case: all robots in step, and an end in the first step of the window.
    env = counter(limit, num_envs=3)
    actor, _ = collect(env, num_steps=ahead)
    _, data = jax.jit(
        lambda a: rollouts.unroll(AGENT, env, jnp.float32(0), a, KEY, num_steps=num_steps)
    )(actor)
    assert data.truncated[0].all()
    assert data.final.dropped == 0
    assert int((data.final.index < num_steps * 3).sum()) == int(data.truncated.sum())


# --- the whole rollout, against a Python loop -----------------------------------------------------


def by_hand(env: Env, actor: rollouts.ActorState, key: Key, num_steps: int) -> dict:
    """`unroll` as a loop over single steps, with NumPy for the bookkeeping."""
    state, ts, carry = actor.env, actor.timestep, actor.carry
    step, act = jax.jit(env.step), jax.jit(AGENT.act)
    rows = {name: [] for name in ("action", "reward", "terminated", "truncated", "aux", "info")}
    obs, finals = [ts.obs], {}
    for t, k in enumerate(jax.random.split(key, num_steps)):
        carry, action, aux = act(jnp.float32(0.1), carry, ts.obs, k)
        state, ts = step(state, action)
        ended = np.asarray(ts.terminated | ts.truncated)
        carry = jax.tree.map(lambda c: jnp.where(ended, jnp.zeros_like(c), c), carry)
        for b in np.flatnonzero(np.asarray(ts.truncated & ~ts.terminated)):
            finals[t * len(ended) + int(b)] = jax.tree.map(lambda x: np.asarray(x[b]), ts.final_obs)
        for name in ("reward", "terminated", "truncated", "info"):
            rows[name].append(getattr(ts, name))
        rows["action"].append(action)
        rows["aux"].append(aux)
        obs.append(ts.obs)
    stacked = {name: jax.tree.map(lambda *x: jnp.stack(x), *row) for name, row in rows.items()}
    return stacked | {
        "obs": jax.tree.map(lambda *x: jnp.stack(x), *obs),
        "finals": finals,
        "last": rollouts.ActorState(state, ts, carry),
    }


@functools.cache
def walked(nested: bool) -> tuple[Env, rollouts.ActorState, rollouts.ActorState, Rollout]:
    """An environment, a start, and 20 steps from there."""
    env = walk(6, nested=nested)
    actor = jax.jit(lambda key: rollouts.start(AGENT, env, key))(KEY)
    last, data = jax.jit(
        lambda actor: rollouts.unroll(
            AGENT, env, jnp.float32(0.1), actor, jax.random.key(9), num_steps=20, final_slots=60
        )
    )(actor)
    return env, actor, last, data


def assert_close(got: Tree, wanted: Tree, atol: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("nested", [False, True])
def test_unroll_is_a_loop_over_steps(nested):
    env, actor, last, data = walked(nested)
    wanted = by_hand(env, actor, jax.random.key(9), 20)
    assert wanted["terminated"].any()
    assert wanted["truncated"].any()
    for name in ("obs", "action", "reward", "terminated", "truncated", "aux", "info"):
        assert_close(getattr(data, name), wanted[name])
    assert_close(data.carry, actor.carry)
    assert_close(last, wanted["last"])
    used = np.asarray(data.final.index) < 120
    assert list(np.asarray(data.final.index)[used]) == list(wanted["finals"])
    got = jax.tree.map(lambda x: x[used], data.final.obs)
    assert_close(got, jax.tree.map(lambda *x: np.stack(x), *wanted["finals"].values()))


def test_terminated_steps_take_no_slot():
    *_, data = walked(nested=False)
    cut = np.asarray(data.truncated & ~data.terminated).ravel()
    assert data.terminated.any()
    index = np.asarray(data.final.index)
    np.testing.assert_array_equal(index[index < 120], np.flatnonzero(cut))


def test_the_memory_starts_again_with_each_episode():
    *_, last, data = walked(nested=False)
    ended = np.asarray(data.terminated | data.truncated)
    steps = np.asarray(data.aux["steps"])  # of the episode so far, as the agent counted them
    np.testing.assert_array_equal(steps, np.asarray(data.info["episode/length"]))
    np.testing.assert_array_equal(steps[1:][ended[:-1]], 1)
    np.testing.assert_array_equal(last.carry["steps"], np.where(ended[-1], 0, steps[-1]))
    first = np.asarray(rollouts.first_steps(data))
    np.testing.assert_array_equal(first[:-1], (steps == 1) & (np.arange(20) > 0)[:, None])
    np.testing.assert_array_equal(first[-1], ended[-1])


def test_without_jit_it_is_the_same():
    env = walk(2)
    actor = jax.jit(lambda key: rollouts.start(AGENT, env, key))(KEY)
    run = functools.partial(rollouts.unroll, AGENT, env, jnp.float32(0.1), actor, KEY, num_steps=3)
    with jax.disable_jit():
        eager = run()
    assert_close(jax.jit(lambda: run())(), eager)


def test_vmap_over_seeds_is_single_runs():
    env = walk(3)

    def run(key: Key):
        actor = rollouts.start(AGENT, env, key)
        return rollouts.unroll(
            AGENT, env, jnp.float32(0.1), actor, jax.random.fold_in(key, 1), num_steps=8
        )

    keys = jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(run))(keys)
    single = jax.jit(run)
    for i, key in enumerate(keys):
        assert_close(jax.tree.map(lambda x: x[i], together), single(key))
    assert len({float(x) for x in together[1].obs[:, 0, 0, 0]}) == 3


def test_a_robots_start_does_not_depend_on_how_many_there_are():
    starts = [rollouts.start(AGENT, walk(n), KEY).timestep.obs for n in (2, 5)]
    np.testing.assert_array_equal(starts[0], starts[1][:2])
    assert len(np.unique(np.asarray(starts[1])[:, 0])) == 5


def test_without_exploration_the_key_means_nothing():
    env = walk(2)
    actor = rollouts.start(AGENT, env, KEY)

    @jax.jit
    def run(key: Key) -> Rollout:
        return rollouts.unroll(
            AGENT, env, jnp.float32(0.1), actor, key, num_steps=4, explore=False
        )[1]

    np.testing.assert_array_equal(run(KEY).action, run(jax.random.key(1)).action)


def test_where_picks_rows_of_any_rank():
    mask = jnp.asarray([True, False])
    picked = rollouts.where(
        mask, {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    )
    np.testing.assert_array_equal(picked["a"], [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(picked["b"], [1, 0])


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_by_hand():
    data = Rollout(
        obs=jnp.zeros((3, 2, 1)),
        action=jnp.zeros((2, 2, 1)),
        reward=jnp.asarray([[1.0, 2.0], [3.0, 6.0]]),
        terminated=jnp.asarray([[False, True], [False, False]]),
        truncated=jnp.asarray([[False, False], [True, False]]),
        final=FinalObs(jnp.zeros((1, 1)), jnp.asarray([2], jnp.int32), jnp.int32(5)),
        carry=(),
        aux={},
        info={
            "episode/return": jnp.asarray([[1.0, 20.0], [4.0, 6.0]]),
            "episode/length": jnp.asarray([[1, 9], [2, 1]]),
            "reward/forward": jnp.asarray([[0.0, 1.0], [2.0, 3.0]]),
            "success": jnp.asarray([[False, True], [False, False]]),
            "nan_resets": jnp.asarray([[0.0, 1.0], [1.0, 0.0]]),
        },
    )
    out = jax.jit(rollouts.metrics)(data)
    assert {name: float(x) for name, x in out.items()} == {
        "rollout/reward": 3.0,  # (1 + 2 + 3 + 6) / 4
        "rollout/final_obs_dropped": 5.0,
        "episode/count": 2.0,
        "episode/return": 12.0,  # (20 + 4) / 2: those two episodes ended
        "episode/length": 5.5,  # (9 + 2) / 2
        "reward/forward": 1.5,
        "rollout/success": 0.25,
        "rollout/nan_resets": 2.0,
    }


def test_metrics_of_episodes_are_nan_where_none_ended():
    _, data = collect(counter(limit=100), num_steps=3)
    out = rollouts.metrics(data)
    assert out["episode/count"] == 0
    assert jnp.isnan(out["episode/return"])
    assert out["rollout/reward"] == 0


# --- evaluation and play --------------------------------------------------------------------------


@functools.cache
def evaluated() -> tuple[Env, dict[str, jax.Array]]:
    env = walk(8, auto_reset=False)
    return env, jax.jit(lambda: rollouts.evaluate(AGENT, env, jnp.float32(0.1), KEY))()


def play_one(env: Env, b: int) -> tuple[float, int, list[float]]:
    """Robot b alone until its episode ends."""
    state, ts = env.reset(env.params, jax.random.split(KEY)[0])
    carry, total, length, rewards = AGENT.carry(8), 0.0, 0, []
    step, act = jax.jit(env.step), jax.jit(AGENT.act, static_argnames="explore")
    while not (ts.terminated[b] | ts.truncated[b]):
        carry, action, _ = act(jnp.float32(0.1), carry, ts.obs, KEY, explore=False)
        state, ts = step(state, action)
        total, length = total + float(ts.reward[b]), length + 1
        rewards.append(float(ts.info["reward/all"][b]))
    return total, length, rewards


def test_evaluate_plays_each_episode_to_its_end_and_no_further():
    env, results = evaluated()
    lengths = set()
    for b in range(8):
        total, length, rewards = play_one(env, b)
        assert float(results["return"][b]) == pytest.approx(total, rel=1e-5)
        assert float(results["length"][b]) == length
        assert float(results["reward/all"][b]) == pytest.approx(np.mean(rewards), rel=1e-5)
        lengths.add(length)
    assert len(lengths) > 1  # they end at different times


def test_evaluate_reports_no_statistics_of_episodes_half_played():
    _, results = evaluated()
    assert set(results) == {"return", "length", "reward/all"}


def test_evaluate_gives_the_same_for_the_same_key_and_other_starts_for_another():
    env, results = evaluated()
    run = jax.jit(lambda key: rollouts.evaluate(AGENT, env, jnp.float32(0.1), key))
    np.testing.assert_array_equal(run(KEY)["return"], results["return"])
    assert (run(jax.random.key(1))["return"] != results["return"]).all()


def test_evaluate_stops_at_max_steps():
    env = walk(8, auto_reset=False)
    results = jax.jit(lambda: rollouts.evaluate(AGENT, env, jnp.float32(0.1), KEY, max_steps=2))()
    assert float(results["length"].max()) == 2.0


def test_evaluate_needs_an_end():
    env = counter()
    endless = env._replace(spec=Spec(obs=env.spec.obs, action=env.spec.action))
    with pytest.raises(ValueError, match="no time limit; give max_steps"):
        rollouts.evaluate(AGENT, endless, jnp.float32(0), KEY)


def cue_and_answer(num_envs: int, *, auto_reset: bool) -> Env:
    """Shows ±1 in the first observation, zeros after; earns the cue's sign times the 5th action."""

    @record
    class State:
        cue: jax.Array
        steps: jax.Array

    def timestep(state: State, reward: jax.Array):
        obs = jnp.where(state.steps == 0, state.cue, 0.0)[None]
        flag = jnp.zeros((), bool)
        return state, TimeStep(obs, reward, state.steps >= 5, flag, obs, {})

    def reset(params: Tree, key: Key, where: jax.Array | bool = True):
        state = State(jax.random.rademacher(key, (), jnp.float32), jnp.zeros((), jnp.int32))
        return timestep(state, jnp.zeros(()))

    def step(state: State, action: jax.Array):
        new = State(state.cue, state.steps + 1)
        return timestep(new, jnp.where(new.steps == 5, state.cue * jnp.sign(action[0]), 0.0))

    env = Env(reset, step, (), Spec(obs=Box((1,)), action=Box((1,)), episode_length=5))
    return wrappers.batch(wrappers.auto_reset(env) if auto_reset else env, num_envs)


def summing() -> Agent:
    """Acts by the sum of all it saw in this episode."""

    def act(policy: Tree, carry: jax.Array, obs: jax.Array, key: Key, *, explore: bool = True):
        carry = carry + obs
        return carry, carry, {}

    return AGENT._replace(act=act, carry=lambda n: jnp.zeros((n, 1)))


def test_a_memory_lasts_for_one_episode_in_evaluation_and_in_rollouts():
    agent = summing()
    results = jax.jit(
        lambda: rollouts.evaluate(agent, cue_and_answer(8, auto_reset=False), (), KEY)
    )()
    np.testing.assert_array_equal(results["return"], np.ones(8))
    # Three episodes in a row each earn the same 1; a memory that outlived its episode would make
    # a sum of cues, which is 0 or of the wrong sign for some of the eight robots.
    env = cue_and_answer(8, auto_reset=True)
    actor = rollouts.start(agent, env, KEY)
    _, data = jax.jit(
        lambda: rollouts.unroll(agent, env, (), actor, KEY, num_steps=15, final_slots=1)
    )()
    np.testing.assert_array_equal(data.reward[4::5], np.ones((3, 8)))
    assert len(np.unique(np.asarray(data.obs[::5, :, 0]).sum(0))) > 1
    assert data.final.dropped == 0


def test_play_shows_every_state_and_which_belong_to_the_first_episode():
    env = walk(8, auto_reset=False)
    look = lambda state: jax.tree.leaves(state)[0]
    seen, alive = jax.jit(
        lambda: rollouts.play(AGENT, env, jnp.float32(0.1), KEY, look, num_steps=6)
    )()
    assert seen.shape == (6, 8)
    _, results = evaluated()
    # one True for each step of the episode, the last included, and none after
    np.testing.assert_array_equal(alive.sum(0), results["length"])
    assert (np.diff(np.asarray(alive).astype(int), axis=0) <= 0).all()
    x = np.where(alive, seen, 0).sum(0)  # the reward is 10 x after the step
    np.testing.assert_allclose(10 * x, results["return"], rtol=1e-5)


# --- random keys ----------------------------------------------------------------------------------


def test_no_key_is_used_twice():
    env, played = walk(2), walk(2, auto_reset=False)

    def everything(key: Key) -> Tree:
        k_start, k_roll, k_eval, k_play = jax.random.split(key, 4)
        actor = rollouts.start(AGENT, env, k_start)
        look = lambda state: jax.tree.leaves(state)[0]
        policy = jnp.float32(0.1)
        return (
            rollouts.unroll(AGENT, env, policy, actor, k_roll, num_steps=3)[1].reward,
            rollouts.evaluate(AGENT, played, policy, k_eval),
            rollouts.play(AGENT, played, policy, k_play, look, num_steps=3),
        )

    def careless(key: Key) -> jax.Array:
        return jax.random.normal(key) + jax.random.uniform(key)

    with jax.debug_key_reuse(True):  # finds out while tracing
        jax.jit(everything).trace(jax.random.key(11))
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(careless).trace(jax.random.key(11))
