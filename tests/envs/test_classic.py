"""CartPole and Pendulum against Gymnasium's own classes, one step at a time from the same state."""

import jax
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from jrl import envs
from jrl.envs import cartpole, pendulum
from jrl.testing import check_env


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_contract(name):
    check_env(envs.make(name))


def test_cartpole_is_gymnasiums():
    env = cartpole.make(cartpole.Config())
    theirs = CartPoleEnv()
    step = jax.jit(env.step)
    rng = np.random.default_rng(0)
    fallen = 0
    for _ in range(200):
        # Around the limits (2.4 m, 0.209 rad), so that both ends of an episode are seen.
        x = rng.uniform(-1, 1, 4) * [2.5, 2.0, 0.22, 2.0]
        action = int(rng.integers(2))
        theirs.reset()
        theirs.state = x
        obs, reward, terminated, _, _ = theirs.step(action)
        state = cartpole.State(np.float32(x), env.params)
        _, ts = step(state, np.int32(action))
        np.testing.assert_allclose(ts.obs, obs, atol=1e-5)
        assert (ts.reward, ts.terminated, ts.truncated) == (reward, terminated, False)
        fallen += terminated
    assert 20 < fallen < 180


def test_cartpole_along_a_balanced_episode():
    env = cartpole.make(cartpole.Config())
    theirs = CartPoleEnv()
    state, ts = env.reset(env.params, jax.random.key(3))
    theirs.reset()
    step = jax.jit(env.step)
    for t in range(200):
        theirs.state = np.asarray(ts.obs, np.float64)
        # Push towards the side the pole leans to: this balances for a long time.
        action = int(theirs.state[2] + 0.3 * theirs.state[3] > 0)
        obs, _, terminated, _, _ = theirs.step(action)
        state, ts = step(state, np.int32(action))
        np.testing.assert_allclose(ts.obs, obs, atol=1e-5, err_msg=f"step {t}")
        assert not (terminated | ts.terminated)


def test_pendulum_is_gymnasiums():
    env = pendulum.make(pendulum.Config())
    theirs = PendulumEnv()
    step = jax.jit(env.step)
    rng = np.random.default_rng(1)
    for _ in range(200):
        angle, speed = rng.uniform(-10, 10), rng.uniform(-8, 8)
        action = rng.uniform(-3, 3, 1).astype(np.float32)  # beyond the motor's bound of 2
        theirs.reset()
        theirs.state = np.array([angle, speed])
        obs, reward, _, _, _ = theirs.step(action)
        state = pendulum.State(np.float32(angle), np.float32(speed), env.params)
        _, ts = step(state, action)
        np.testing.assert_allclose(ts.obs, obs, atol=1e-5)
        np.testing.assert_allclose(ts.reward, reward, rtol=1e-4, atol=1e-4)
        assert not ts.terminated


def test_pendulum_trajectory_from_the_same_start():
    env = pendulum.make(pendulum.Config())
    theirs = PendulumEnv()
    state, ts = env.reset(env.params, jax.random.key(5))
    theirs.reset()
    theirs.state = np.array([state.angle, state.speed], np.float64)
    step = jax.jit(env.step)
    for t in range(200):
        action = np.float32([np.sign(ts.obs[2])])  # with the motion: pumps energy in
        obs, _, _, _, _ = theirs.step(action)
        state, ts = step(state, action)
        np.testing.assert_allclose(ts.obs, obs, atol=5e-3, err_msg=f"step {t}")


def test_specs_are_gymnasiums():
    assert envs.make("cartpole").spec.episode_length == 500
    spec = envs.make("pendulum").spec
    assert (spec.episode_length, spec.action.low, spec.action.high) == (200, -2.0, 2.0)
    assert spec.obs.high == (1.0, 1.0, 8.0)
    assert envs.make("cartpole", episode_length=7).spec.episode_length == 7


def test_parameters_are_arguments_not_constants():
    env = cartpole.make(cartpole.Config())
    heavy = cartpole.Params(9.8, 10.0, 0.1, 0.5, 10.0)
    start = [env.reset(p, jax.random.key(0))[0] for p in (env.params, heavy)]
    light, slow = (env.step(state, np.int32(1))[1].obs[1] for state in start)
    # From rest a push of 10 N moves about 1.1 kg by 10/1.1 * 0.02 s and 10.1 kg by a tenth of it.
    assert light - start[0].x[1] == pytest.approx(0.195, abs=5e-3)
    assert slow - start[1].x[1] == pytest.approx(0.0198, abs=1e-3)
