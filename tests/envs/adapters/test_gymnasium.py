"""Gymnasium behind the host's interface, beside Gymnasium itself."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from jrl.checks import ConfigError
from jrl.envs.adapters import gymnasium as adapter
from jrl.types import Box, Discrete


class Ladder(gym.Env):
    """Counts steps; robot `n` ends after `n` of them, by itself or cut off. Dict observations."""

    def __init__(self, n=2, broken_at=0, high=2.0):
        self.observation_space = gym.spaces.Dict(
            {
                "steps": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
            }
        )
        self.action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, high]))
        self.n, self.broken_at, self.t = n, broken_at, 0

    def see(self):
        value = np.nan if self.t and self.t == self.broken_at else float(self.t)
        return {
            "steps": np.full(2, value),
            "image": np.full((2, 2, 3), self.t, np.uint8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action):
        self.t += 1
        self.action = action
        return self.see(), 1.0, self.t == self.n and self.n % 2 == 0, self.t == self.n, {}


def ladders(*settings):
    makers = [lambda kwargs=kwargs: Ladder(**kwargs) for kwargs in settings]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def test_the_last_observation_is_the_true_one_and_the_next_is_of_the_new_episode():
    vector = ladders({"n": 2}, {"n": 3})  # 2: terminated; 3: cut off
    env = adapter.from_vector(vector)
    assert env.spec.obs["image"] == Box((2, 2, 3), "uint8")
    assert env.spec.obs["steps"].dtype == "float32"
    first = env.reset(0)
    assert (first.obs["steps"] == 0).all()
    assert first.obs["steps"].dtype == np.float32
    shown, final, ends, totals = [], [], [], []
    for _ in range(3):
        ts = env.step(np.zeros((2, 2), np.float32))
        shown.append(ts.obs["steps"][:, 0].tolist())
        final.append(ts.final_obs["image"][:, 0, 0, 0].tolist())
        ends.append([*ts.terminated.tolist(), *ts.truncated.tolist()])
        totals.append(ts.info["episode/return"].tolist())
    # robot 0 counts 1, 2 (end), 1; robot 1 counts 1, 2, 3 (end)
    assert shown == [[1, 1], [0, 2], [1, 0]]
    assert final == [[1, 1], [2, 2], [1, 3]]
    assert ends == [[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    assert totals == [[1, 1], [2, 2], [1, 3]]
    env.close()


def test_unit_actions_cover_the_range_and_are_clipped():
    vector = ladders({"n": 9})
    env = adapter.from_vector(vector)
    env.reset(0)
    env.step(np.float32([[0.5, -3.0]]))  # of -1..1 and 0..2
    np.testing.assert_allclose(vector.envs[0].action, [0.5, 0.0])
    env.close()


def test_a_broken_robot_ends_its_episode_and_no_other():
    env = adapter.from_vector(ladders({"n": 9, "broken_at": 2}, {"n": 9}))
    env.reset(0)
    env.step(np.zeros((2, 2), np.float32))
    ts = env.step(np.zeros((2, 2), np.float32))
    assert ts.terminated.tolist() == [True, False]
    assert ts.reward.tolist() == [0.0, 1.0]
    assert ts.info["nan_resets"].tolist() == [1.0, 0.0]
    assert ts.obs["steps"][:, 0].tolist() == [0.0, 2.0]
    assert np.isfinite(ts.final_obs["steps"]).all()
    ts = env.step(np.zeros((2, 2), np.float32))
    assert ts.obs["steps"][:, 0].tolist() == [1.0, 3.0]
    assert ts.info["episode/length"].tolist() == [1, 3]
    env.close()


def test_is_gymnasium_itself_step_by_step():
    env = adapter.make(adapter.Config("CartPole-v1"), num_envs=2)
    alone = gym.make("CartPole-v1")
    assert (env.spec.action, env.spec.episode_length) == (Discrete(2), 500)
    ts = env.reset(7)
    obs, _ = alone.reset(seed=7)  # the first robot has the seed itself
    np.testing.assert_array_equal(ts.obs[0], obs)
    for t in range(30):
        ts = env.step(np.int32([t % 3 == 0, 1]))
        obs, _, ended, _, _ = alone.step(int(t % 3 == 0))
        np.testing.assert_array_equal(ts.final_obs[0], obs)
        assert ts.terminated[0] == ended
        if ended:
            break
    assert ended
    env.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ladders({"high": np.inf}), "without finite bounds"),
        (
            lambda: SyncVectorEnv([Ladder], autoreset_mode=AutoresetMode.NEXT_STEP),
            "autoreset_mode=AutoresetMode.SAME_STEP",
        ),
    ],
)
def test_what_can_not_be_used_says_why(make, says):
    with pytest.raises(ConfigError, match=says):
        adapter.from_vector(make())


def test_an_unknown_name_is_a_mistake_in_the_config():
    with pytest.raises(ConfigError, match="CartPol-v1"):
        adapter.make(adapter.Config("CartPol-v1"), num_envs=1)


def test_options_reach_the_constructor():
    cfg = adapter.Config("CartPole-v1", options=("sutton_barto_reward=true",))
    env = adapter.make(cfg, num_envs=1)
    env.reset(0)
    assert env.step(np.int32([0])).reward.tolist() == [0.0]  # that reward is -1 at the end, else 0
    env.close()
