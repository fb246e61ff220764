"""The robot tasks against the Gymnasium environments they restate, step by step."""

import subprocess
import sys
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from jrl import envs
from jrl.testing import check_env

STEPS = 200
NAMES = {  # ours: Gymnasium's, and whether random actions end an episode within 200 steps
    "ant": ("Ant-v5", True),
    "halfcheetah": ("HalfCheetah-v5", False),
    "hopper": ("Hopper-v5", True),
    "humanoid": ("Humanoid-v5", True),
    "humanoid_standup": ("HumanoidStandup-v5", False),
    "inverted_double_pendulum": ("InvertedDoublePendulum-v5", True),
    "inverted_pendulum": ("InvertedPendulum-v5", True),
    "pusher": ("Pusher-v5", False),
    "reacher": ("Reacher-v5", False),
    "swimmer": ("Swimmer-v5", False),
    "walker2d": ("Walker2d-v5", True),
}
Pair = tuple[str, Any, Any, Any, Any]  # name, env, our steps, their env, their steps
PENALTIES = {"distance_penalty": "distance", "velocity_penalty": "velocity"}


def make(name: str, **overrides: Any) -> Any:
    return envs.make(name, backend="native", **overrides)


def gymnasium_terms(info: dict) -> dict:
    terms = {k.removeprefix("reward_"): v for k, v in info.items() if k.startswith("reward_")}
    return terms | {ours: info[theirs] for theirs, ours in PENALTIES.items() if theirs in info}


@pytest.fixture(scope="module", params=sorted(NAMES))
def pair(request: pytest.FixtureRequest) -> Pair:
    """Ours and Gymnasium's, under the same actions from the same start: two lists of steps."""
    env = make(request.param)
    theirs: Any = gymnasium.make(NAMES[request.param][0])
    state, first = jax.jit(env.reset)(env.params, jax.random.key(0))
    low, high = theirs.action_space.low, theirs.action_space.high
    uniform = np.random.default_rng(0).uniform(size=(STEPS, *low.shape))
    # Up to 1.2 times the bounds: the engine clamps, but the costs are of the action as given.
    actions = (1.2 * (low + (high - low) * uniform)).astype(np.float32)
    _, ours = jax.jit(lambda s, a: jax.lax.scan(env.step, s, a))(state, jnp.asarray(actions))
    bare = theirs.unwrapped
    bare.reset(seed=0)
    mujoco.mj_resetData(bare.model, bare.data)  # `set_state` keeps the solver's warm start
    bare.set_state(*(np.asarray(x, np.float64) for x in (state.data.qpos, state.data.qvel)))
    first_obs = bare._get_obs()
    steps = [bare.step(action) for action in actions]
    return request.param, env, (first, ours), theirs, (first_obs, steps)


def test_spec_is_gymnasiums(pair: Pair) -> None:
    _, env, _, theirs, _ = pair
    assert env.spec.obs.shape == theirs.observation_space.shape
    assert env.spec.action.shape == theirs.action_space.shape
    np.testing.assert_allclose(env.spec.action.low, theirs.action_space.low)
    np.testing.assert_allclose(env.spec.action.high, theirs.action_space.high)
    assert env.spec.dt == pytest.approx(theirs.unwrapped.dt)
    assert env.spec.episode_length == theirs.spec.max_episode_steps


def test_observations_are_gymnasiums(pair: Pair) -> None:
    _, _, (first, ours), _, (first_obs, steps) = pair
    assert first.obs.dtype == ours.obs.dtype == jnp.float32
    np.testing.assert_allclose(first.obs, first_obs, rtol=1e-5, atol=1e-5)
    theirs = np.stack([obs for obs, *_ in steps])
    np.testing.assert_allclose(ours.obs, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ours.final_obs, ours.obs)


def test_rewards_and_their_terms_are_gymnasiums(pair: Pair) -> None:
    name, _, (_, ours), _, (_, steps) = pair
    # A speed is the difference of two float32 positions over dt: 1e-7 * 2 m / 0.008 s = 3e-5.
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
    np.testing.assert_allclose(ours.reward, [reward for _, reward, *_ in steps], **close)
    theirs = [gymnasium_terms(info) for *_, info in steps]
    terms = {k.removeprefix("reward/") for k in ours.info if k.startswith("reward/")}
    unnamed = {"survive"} if name == "humanoid_standup" else set()  # its constant 1 has no name
    assert terms == set(theirs[0]) | unnamed
    for term in theirs[0]:
        np.testing.assert_allclose(
            ours.info[f"reward/{term}"], [x[term] for x in theirs], **close, err_msg=term
        )


def test_terminations_are_gymnasiums(pair: Pair) -> None:
    name, _, (first, ours), _, (_, steps) = pair
    theirs = np.array([terminated for _, _, terminated, *_ in steps])
    np.testing.assert_array_equal(ours.terminated, theirs)
    assert theirs.any() == NAMES[name][1]
    assert not theirs[0]
    assert not first.terminated | first.truncated | ours.truncated.any()


def test_the_reward_is_the_sum_of_its_terms(pair: Pair) -> None:
    _, _, (first, ours), _, _ = pair
    terms = sum(value for k, value in ours.info.items() if k.startswith("reward/"))
    np.testing.assert_allclose(ours.reward, terms, rtol=1e-6, atol=1e-6)
    assert set(first.info) == set(ours.info)
    assert not any(first.info.values())
    assert ours.info["nan_resets"].sum() == 0


@pytest.mark.parametrize("name", ["hopper", "walker2d", "ant", "humanoid"])
def test_unhealthy_robots_go_on_where_falls_do_not_end_the_episode(name: str) -> None:
    env = make(name, terminate_unhealthy=False, healthy_z=(5.0, 6.0))
    state, _ = env.reset(env.params, jax.random.key(0))
    _, step = env.step(state, jnp.zeros(env.spec.action.shape))
    assert not step.terminated
    assert step.info["reward/survive"] == 0
    strict = make(name, healthy_z=(5.0, 6.0))
    _, step = strict.step(state, jnp.zeros(env.spec.action.shape))
    assert step.terminated


@pytest.mark.parametrize("name", ["humanoid_fast", "ant", "pusher", "reacher"])
def test_the_contract_of_an_environment(name: str) -> None:
    check_env(make(name), steps=2)


def starts(name: str, n: int, **overrides: Any) -> tuple[np.ndarray, np.ndarray]:
    env = make(name, **overrides)
    keys = jax.random.split(jax.random.key(1), n)
    state, _ = jax.jit(jax.vmap(lambda key: env.reset(env.params, key)))(keys)
    return np.asarray(state.data.qpos), np.asarray(state.data.qvel)


def test_starts_have_gymnasiums_spread() -> None:
    # U(-a, a) has deviation a / sqrt(3); N(0, a) has deviation a. 500 starts: errors below 10 %.
    qpos, qvel = starts("hopper", 500, reset_noise=0.3)
    np.testing.assert_allclose(qpos.std(0), 0.3 / 3**0.5, rtol=0.1)
    np.testing.assert_allclose(qvel.std(0), 0.3 / 3**0.5, rtol=0.1)
    assert abs(qvel).max() <= 0.3
    np.testing.assert_allclose(qpos.mean(0), [0, 1.25, 0, 0, 0, 0], atol=0.05)  # stands 1.25 high
    qpos, qvel = starts("halfcheetah", 500, reset_noise=0.3)
    np.testing.assert_allclose(qpos.std(0), 0.3 / 3**0.5, rtol=0.1)
    np.testing.assert_allclose(qvel.std(0), 0.3, rtol=0.15)
    assert abs(qvel).max() > 0.6  # a normal reaches twice its deviation, a uniform never


def test_reacher_targets_fill_the_disc() -> None:
    qpos, qvel = starts("reacher", 500)
    radius = jnp.linalg.norm(qpos[:, 2:], axis=1)
    assert radius.max() < 0.2
    # Uniform by area: half of them lie within 0.2 / sqrt(2); by radius 71 % would.
    assert abs((radius < 0.2 / 2**0.5).mean() - 0.5) < 0.07
    assert not qvel[:, 2:].any()


def test_pusher_objects_start_off_the_goal() -> None:
    qpos, qvel = starts("pusher", 500)
    assert jnp.linalg.norm(qpos[:, -4:-2], axis=1).min() > 0.17
    assert ((qpos[:, -4] >= -0.3) & (qpos[:, -4] <= 0) & (abs(qpos[:, -3]) <= 0.2)).all()
    assert not qpos[:, -2:].any()
    assert not qvel[:, -4:].any()
    assert abs(qvel[:, :7]).max() > 0.004


def test_a_failed_step_ends_its_episode_without_reward_and_touches_no_other() -> None:
    env = make("hopper")
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = jax.vmap(lambda key: env.reset(env.params, key))(keys)
    action = jnp.array([[jnp.nan, 0, 0], [0.0, 0, 0]])
    _, step = jax.vmap(env.step)(state, action)
    np.testing.assert_array_equal(step.terminated, [True, False])
    np.testing.assert_array_equal(step.info["nan_resets"], [1.0, 0.0])
    assert step.reward[0] == 0
    assert step.reward[1] > 0.5  # alive
    assert all(value[0] == 0 for k, value in step.info.items() if k.startswith("reward/"))
    assert jnp.isfinite(step.obs).all()


def test_varying_fields_are_parameters_of_each_robot() -> None:
    env = make("hopper", varying=("opt.gravity",))
    np.testing.assert_allclose(env.params["opt.gravity"], [0, 0, -9.81])
    gravity = {"opt.gravity": jnp.array([[0, 0, -9.81], [0, 0, 0.0]])}
    state, _ = jax.vmap(env.reset, in_axes=(0, None))(gravity, jax.random.key(0))
    still = jnp.zeros((2, 3))
    after, _ = jax.vmap(env.step)(state, still)
    # 4 substeps of 2 ms: 0.008 s * 9.81 m/s^2 = 0.0785 m/s slower, and nothing without gravity.
    change = after.data.qvel[:, 1] - state.data.qvel[:, 1]
    np.testing.assert_allclose(change, [-0.0785, 0], atol=2e-3)


def test_the_fast_humanoid_survives_random_actions() -> None:
    env = make("humanoid_fast")
    keys = jax.random.split(jax.random.key(0), 16)
    state, first = jax.jit(jax.vmap(lambda key: env.reset(env.params, key)))(keys)
    shape = (100, 16, *env.spec.action.shape)
    actions = jax.random.uniform(jax.random.key(1), shape, minval=-0.4, maxval=0.4)
    _, steps = jax.jit(lambda s, a: jax.lax.scan(jax.vmap(env.step), s, a))(state, actions)
    assert first.obs.shape == (16, 162)
    assert steps.info["nan_resets"].sum() == 0
    assert jnp.isfinite(steps.obs).all()
    assert steps.terminated[-1].all()  # everybody falls within 1.5 s, and stays down
    assert not steps.terminated[:5].any()
    # Upright it earns 5 a step, at 0.1 |a|^2 <= 0.1 * 17 * 0.4^2 = 0.272 for the control.
    np.testing.assert_allclose(steps.info["reward/survive"][0], 5.0)
    assert (steps.info["reward/ctrl"] >= -0.272).all()


def test_the_fast_humanoids_feet_meet_the_floor() -> None:
    from jrl.envs import humanoid_fast

    model = humanoid_fast.model(humanoid_fast.Config())
    data = mujoco.MjData(model)
    data.qpos[2] = 1.29  # feet just above the floor
    for _ in range(20):
        mujoco.mj_step(model, data)
    names = {frozenset(model.geom(g).name for g in pair) for pair in data.contact.geom}
    assert names == {frozenset({"floor", "left_foot"}), frozenset({"floor", "right_foot"})}
    weight = 9.81 * model.body_mass.sum()
    assert data.qfrc_constraint[2] == pytest.approx(weight, rel=0.5)


def test_importing_a_task_does_not_load_mujoco() -> None:
    code = "import sys, jrl.envs.hopper, jrl.envs.humanoid_fast; print('mujoco' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
