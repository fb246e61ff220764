"""PPO against hand numbers, an independent NumPy implementation, and itself in other forms."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jrl import loops, optim
from jrl import rollout as rollouts
from jrl.agents import ppo
from jrl.envs import cartpole, wrappers
from jrl.ops import moments
from jrl.testing import check_agent, count_traces, fake_rollout
from jrl.types import Agent, Box, Discrete, Env, Key, Rollout, Spec, Tree

KEY = jax.random.key(5)
T, B = 8, 4
SPEC = Spec(obs=Box((3,)), action=Box((2,), low=-1.0, high=1.0))
ASYMMETRIC = Spec(obs={"policy": Box((3,)), "critic": Box((5,))}, action=SPEC.action)
CHOICES = Spec(obs=Box((3,)), action=Discrete(3))
SMALL = ppo.Config(hidden=(8,), num_epochs=2, num_minibatches=4)


def config(**changes) -> ppo.Config:
    return dataclasses.replace(SMALL, **changes)


@functools.cache
def setup(cfg: ppo.Config = SMALL, spec: Spec = SPEC) -> tuple[Agent, Tree, Rollout]:
    """An agent, its state and a fake rollout with ends of both kinds."""
    agent = ppo.make(cfg, spec)
    state = jax.jit(agent.init)(KEY)
    return agent, state, fake_rollout(agent, agent.policy(state), spec, jax.random.key(6), T, B)


@functools.cache
def counted(cfg: ppo.Config = SMALL, spec: Spec = SPEC):
    """The jitted update, and how often it was traced."""
    update, traces = count_traces(ppo.make(cfg, spec).update)
    return jax.jit(update), traces


def updater(cfg: ppo.Config = SMALL, spec: Spec = SPEC):
    return counted(cfg, spec)[0]


@functools.cache
def prepared(cfg: ppo.Config = SMALL, spec: Spec = SPEC) -> ppo.Batch:
    """What a rollout becomes before the first gradient step."""
    _, state, data = setup(cfg, spec)
    return jax.jit(functools.partial(ppo.prepare, cfg, ppo.network(cfg, spec)))(state, data)


def flat(tree: Tree) -> np.ndarray:
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


def assert_close(got: Tree, wanted: Tree, atol: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5)


# --- the contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "spec"),
    [
        ({"value_clip_eps": 0.2, "schedule": "adaptive"}, SPEC),
        ({"memory": 4}, ASYMMETRIC),
        ({"shared_trunk": True, "stop_kl": 1.0, "entropy_cost": 0.01}, CHOICES),
    ],
    ids=["continuous", "recurrent-asymmetric", "discrete-shared"],
)
def test_the_agents_contract(changes, spec):
    check_agent(ppo.make(config(**changes), spec), spec)


def test_what_ppo_cannot_do_is_said_at_once():
    with pytest.raises(ValueError, match=r"flat boxes or discrete.*\(2, 3\).*Flatten"):
        ppo.make(SMALL, Spec(obs=Box((3,)), action=Box((2, 3))))
    with pytest.raises(ValueError, match="shared_trunk.*'critic'.*off"):
        ppo.make(config(shared_trunk=True), ASYMMETRIC)
    with pytest.raises(ValueError, match="'adaptve'.*'adaptive'"):
        config(schedule="adaptve")
    with pytest.raises(ValueError, match="'swich'.*'swish'"):
        config(activation="swich")
    with pytest.raises(ValueError, match="decay_updates"):
        config(schedule="linear")
    with pytest.raises(ValueError, match="discount must be greater than 0"):
        config(discount=0.0)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        # 8 · 4 = 32 steps: the nearest divisors of 5 are 4 (1 off), 2 and 8 (3 off each)
        ({"num_minibatches": 5}, "num_envs x num_steps = 32 .* num_minibatches = 5 .*: 2, 4, 8"),
        ({"num_minibatches": 3, "memory": 4}, "num_envs = 4 .* num_minibatches = 3 .*: 1, 2, 4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes, numbers):
    agent = ppo.make(config(**changes), SPEC)
    state = jax.eval_shape(agent.init, KEY)
    data = dataclasses.replace(setup()[2], carry=agent.carry(B))
    with pytest.raises(ValueError, match=numbers):
        jax.eval_shape(agent.update, state, data, KEY)


# --- acting ---------------------------------------------------------------------------------------


def fixed_policy(state: ppo.State, mean: float, std: float) -> ppo.State:
    """The state with an actor that says `mean` whatever it sees."""
    params = jax.tree.map(jnp.zeros_like, state.params["params"])
    last = params["actor"]["Dense_1"]
    actor = {**params["actor"], "Dense_1": {**last, "bias": jnp.full(2, mean)}}
    log_std = jnp.full(2, math.log(std))
    parts = {**state.params["params"], "actor": actor, "log_std": log_std}
    return dataclasses.replace(state, params={"params": parts})


def test_act_samples_from_the_normal_it_says():
    agent, state, _ = setup()
    policy = agent.policy(fixed_policy(state, mean=1.5, std=0.5))
    obs = jax.random.normal(KEY, (20_000, 3))
    _, action, aux = jax.jit(agent.act)(policy, (), obs, KEY)
    # 40 000 numbers: the mean is off by 0.5 / 200 = 0.0025 at one sigma, the deviation by less
    assert float(action.mean()) == pytest.approx(1.5, abs=0.01)
    assert float(action.std()) == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(np.asarray(action).T)[0, 1]) < 0.03
    # log N(a; 1.5, 0.5) summed over the two numbers of an action
    z = (np.asarray(action) - 1.5) / 0.5
    wanted = (-0.5 * z**2 - math.log(0.5) - 0.5 * math.log(2 * math.pi)).sum(-1)
    np.testing.assert_allclose(aux["log_prob"], wanted, atol=1e-5)
    _, best, _ = jax.jit(functools.partial(agent.act, explore=False))(policy, (), obs, KEY)
    np.testing.assert_allclose(best, 1.5)


def test_the_policy_starts_with_the_deviation_it_is_told():
    agent = ppo.make(config(init_std=0.3), SPEC)
    state = jax.jit(agent.init)(KEY)
    np.testing.assert_allclose(jnp.exp(state.params["params"]["log_std"]), 0.3, rtol=1e-6)


def test_an_actors_slice_holds_no_critic():
    for cfg, spec in ((SMALL, SPEC), (config(memory=4), ASYMMETRIC)):
        agent = ppo.make(cfg, spec)
        policy = jax.eval_shape(lambda key: agent.policy(agent.init(key)), KEY)
        assert {"actor", "log_std"} <= set(policy.params["params"]) <= {"actor", "log_std", "gru"}
        assert set(policy.obs_stats) == {"policy"}


def recorder(limit: int = 4) -> Env:
    """A task bounded to ±1 that reports the first action number it receives as its reward."""

    def step(state: Tree, action: jax.Array):
        state, ts = env.step(state, jnp.zeros((), jnp.int32))
        return state, dataclasses.replace(ts, reward=action[0], terminated=jnp.zeros((), bool))

    env = cartpole.make(cartpole.Config(episode_length=limit))
    action = Box((2,), low=-1.0, high=1.0)
    robot = env._replace(step=step, spec=dataclasses.replace(env.spec, action=action))
    robot = wrappers.time_limit(wrappers.unit_actions(robot))
    return wrappers.batch(wrappers.auto_reset(robot), B)


def test_the_environment_clips_and_the_rollout_keeps_what_was_sampled():
    # mean 2.5, deviation 0.01: every sample is beyond the bound 1
    env = recorder()
    agent = ppo.make(SMALL, env.spec)
    state = fixed_policy(jax.jit(agent.init)(KEY), mean=2.5, std=0.01)

    @jax.jit
    def run() -> tuple[Rollout, ppo.Metrics]:
        actor = rollouts.start(agent, env, KEY)
        policy = agent.policy(state)
        _, data = rollouts.unroll(agent, env, policy, actor, jax.random.key(1), num_steps=T)
        net = ppo.network(SMALL, env.spec)
        batch = ppo.prepare(SMALL, net, state, data)
        return data, ppo.loss(SMALL, net, state.params, batch)[1]

    data, seen = run()
    np.testing.assert_array_equal(data.reward, 1.0)  # what the environment received
    np.testing.assert_allclose(data.action, 2.5, atol=0.05)  # what the agent chose
    # log-probability of the stored action: with std 0.01 that of the clipped one would be -11 000
    assert float(data.aux["log_prob"].min()) > 0
    assert float(seen["policy/ratio"]) == pytest.approx(1.0, abs=1e-6)


# --- from rollout to batch ------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0, 4])
def test_the_first_ratio_is_one_with_far_away_observations(memory):
    # Observations ~ N(100, 5), whitened by statistics that already know them.
    cfg = config(memory=memory)
    agent = ppo.make(cfg, SPEC)
    net = ppo.network(cfg, SPEC)
    far = 100 + 5 * jax.random.normal(jax.random.key(7), (64, T + 1, B, 3))
    stats = jax.jit(moments.update)(moments.init(SPEC.obs), far[1:])

    @jax.jit
    def run() -> tuple[ppo.Metrics, jax.Array]:
        state = dataclasses.replace(agent.init(KEY), obs_stats={"policy": stats})
        params = jax.tree.map(lambda p: p + 0.1, state.params)  # a policy that is not near zero
        state = dataclasses.replace(state, params=params)
        data = replay(agent, agent.policy(state), far[0])
        batch = ppo.prepare(cfg, net, state, data)
        _, numbers, _ = net.apply(
            state.params, *jax.tree.map(lambda c: c[0], (batch.carry,)), batch.x, batch.is_first
        )
        log_prob = ppo.distribution(numbers).log_prob(batch.action)
        return ppo.loss(cfg, net, state.params, batch)[1], log_prob - batch.log_prob

    seen, gap = run()
    assert float(jnp.abs(jnp.expm1(gap)).max()) <= 3e-6  # a few roundings of log-probs around 3
    assert float(seen["policy/ratio"]) == pytest.approx(1.0, abs=1e-6)
    assert float(seen["policy/clip_fraction"]) == 0.0
    assert float(seen["policy/approx_kl"]) == pytest.approx(0.0, abs=1e-9)


def replay(agent: Agent, policy: Tree, obs: jax.Array) -> Rollout:
    """The rollout of an agent that is shown `obs` [T + 1, B, ...]; episodes of 5 and of 3 steps."""
    length = obs.shape[0] - 1
    count = jnp.arange(1, length + 1)[:, None]
    truncated = jnp.broadcast_to(count % 5 == 0, (length, B))
    terminated = (count % 3 == 0) & (jnp.arange(B) % 2 == 1) & ~truncated
    fresh = agent.carry(B)

    def step(carry: Tree, row: tuple):
        x, ended, key = row
        carry, action, aux = agent.act(policy, carry, x, key)
        return rollouts.where(ended, fresh, carry), (action, aux)

    rows = (obs[:-1], terminated | truncated, jax.random.split(KEY, length))
    action, aux = jax.lax.scan(step, fresh, rows)[1]
    index = jnp.flatnonzero(truncated.ravel(), size=length * B, fill_value=length * B)
    final = rollouts.FinalObs(
        obs[1:].reshape(-1, *obs.shape[2:])[jnp.minimum(index, length * B - 1)] + 1.0,
        index.astype(jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    reward = jnp.sin(jnp.arange(length * B, dtype=jnp.float32)).reshape(length, B)
    return Rollout(obs, action, reward, terminated, truncated, final, fresh, aux, {})


def gae_by_hand(
    cfg: ppo.Config, data: Rollout, value: np.ndarray, successor: np.ndarray
) -> np.ndarray:
    """Advantages [T, B] in NumPy, backwards through each robot's steps."""
    advantage, after = np.zeros(data.reward.shape), np.zeros(B)
    for t in reversed(range(len(advantage))):
        ended = np.asarray(data.terminated[t] | data.truncated[t])
        following = np.where(data.terminated[t], 0.0, successor[t])
        delta = cfg.reward_scale * np.asarray(data.reward[t]) + cfg.discount * following - value[t]
        after = delta + cfg.discount * cfg.gae_lambda * np.where(ended, 0.0, after)
        advantage[t] = after
    return advantage


def critic_by_hand(params: Tree, x: np.ndarray) -> np.ndarray:
    """V of whitened observations in NumPy, one hidden layer with swish."""
    one, two = params["params"]["critic"]["Dense_0"], params["params"]["critic"]["Dense_1"]
    hidden = np.asarray(x) @ np.asarray(one["kernel"]) + np.asarray(one["bias"])
    hidden = hidden / (1 + np.exp(-hidden))
    return (hidden @ np.asarray(two["kernel"]) + np.asarray(two["bias"]))[..., 0]


def test_advantages_and_targets_by_hand():
    cfg = config(reward_scale=0.5, discount=0.9, gae_lambda=0.8)
    _, state, data = setup(cfg)
    batch = prepared(cfg)
    # nothing was seen yet, so whitening only clips at ±10, which no observation reaches
    value = critic_by_hand(state.params, data.obs)
    successor = value[1:].copy().reshape(-1)
    index = np.asarray(data.final.index)
    used = index < T * B
    assert 0 < used.sum() < len(used)
    successor[index[used]] = critic_by_hand(state.params, data.final.obs)[used]
    wanted = gae_by_hand(cfg, data, value[:-1], successor.reshape(T, B))
    np.testing.assert_allclose(batch.advantage.reshape(T, B), wanted, atol=1e-5)
    np.testing.assert_allclose(batch.target.reshape(T, B), wanted + value[:-1], atol=1e-5)
    np.testing.assert_allclose(batch.value.reshape(T, B), value[:-1], atol=1e-5)
    assert batch.carry == ()


def test_the_feed_forward_batch_is_one_sequence_step_per_row():
    _, _, data = setup()
    batch = prepared()
    assert batch.advantage.shape == (1, T * B)
    np.testing.assert_array_equal(batch.action, data.action.reshape(1, T * B, 2))
    np.testing.assert_array_equal(batch.log_prob, data.aux["log_prob"].reshape(1, -1))


# --- the loss -------------------------------------------------------------------------------------


def loss_by_hand(cfg: ppo.Config, params: Tree, batch: ppo.Batch) -> tuple[float, dict]:
    """The objective in NumPy float64, for a Gaussian policy with one hidden layer."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    b = jax.tree.map(lambda x: np.asarray(x, np.float64)[0], dataclasses.replace(batch, carry=()))

    def network(layers: dict) -> np.ndarray:
        hidden = b.x["policy"] @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"]
        hidden = hidden / (1 + np.exp(-hidden))
        return hidden @ layers["Dense_1"]["kernel"] + layers["Dense_1"]["bias"]

    mean, value = network(p["actor"]), network(p["critic"])[:, 0]
    std = np.exp(np.clip(p["log_std"], -5, 2))
    density = np.exp(-0.5 * ((b.action - mean) / std) ** 2) / np.sqrt(2 * np.pi * std**2)
    ratio = np.prod(density, axis=1) / np.exp(b.log_prob)
    advantage = (b.advantage - b.advantage.mean()) / b.advantage.std()
    surrogate = np.where(
        advantage > 0,
        advantage * np.minimum(ratio, 1 + cfg.clip_eps),
        advantage * np.maximum(ratio, 1 - cfg.clip_eps),
    )
    near = np.clip(value, b.value - cfg.value_clip_eps, b.value + cfg.value_clip_eps)
    error = np.maximum((value - b.target) ** 2, (near - b.target) ** 2)
    entropy = np.sum(np.log(std * np.sqrt(2 * np.pi * np.e)))
    total = -surrogate.mean() + cfg.value_cost * 0.5 * error.mean() - cfg.entropy_cost * entropy
    return total, {
        "loss/policy": -surrogate.mean(),
        "loss/value": 0.5 * error.mean(),
        "policy/entropy": entropy,
        "policy/ratio": ratio.mean(),
        "policy/clip_fraction": np.mean(abs(ratio - 1) > cfg.clip_eps),
    }


def test_loss_and_gradient_are_those_of_an_independent_implementation():
    cfg = config(value_clip_eps=0.1, entropy_cost=0.02, value_cost=0.7)
    net = ppo.network(cfg, SPEC)
    _, state, _ = setup(cfg)
    batch = prepared(cfg)
    # away from where the data was collected, so that ratios and values are clipped here and there
    keys = iter(jax.random.split(jax.random.key(8), 20))
    params = jax.tree.map(lambda p: p + 0.2 * jax.random.normal(next(keys), p.shape), state.params)
    total, wanted = loss_by_hand(cfg, params, batch)
    run = jax.jit(jax.value_and_grad(functools.partial(ppo.loss, cfg, net), has_aux=True))
    (got, seen), slope = run(params, batch)
    assert 0 < wanted["policy/clip_fraction"] < 1
    assert float(got) == pytest.approx(total, rel=1e-5)
    for name, x in wanted.items():
        assert float(seen[name]) == pytest.approx(x, rel=1e-4), name
    # central differences in float64 along each parameter tree's own axes, 30 of them at random
    leaves, tree = jax.tree.flatten(params)
    sizes = np.cumsum([0, *(x.size for x in leaves)])
    vector, gradient = flat(params).astype(np.float64), flat(slope)

    def at(vector: np.ndarray) -> float:
        parts = [vector[i:j].reshape(x.shape) for i, j, x in zip(sizes, sizes[1:], leaves)]
        return loss_by_hand(cfg, jax.tree.unflatten(tree, parts), batch)[0]

    for i in np.random.default_rng(0).choice(len(vector), 30, replace=False):
        step = np.zeros_like(vector)
        step[i] = 1e-6
        central = (at(vector + step) - at(vector - step)) / 2e-6
        assert gradient[i] == pytest.approx(central, abs=1e-5, rel=1e-3)


# --- updates --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    _, state, data = setup()
    update = updater()
    one, again, other = (update(state, data, jax.random.key(k))[0] for k in (1, 1, 2))
    np.testing.assert_array_equal(flat(one), flat(again))
    assert (flat(one.params) != flat(other.params)).any()
    assert int(one.updates) == 1


def test_nothing_is_compiled_twice():
    update, traces = counted()
    _, state, data = setup()
    for k in range(5):
        state, _ = update(state, data, jax.random.key(k))
    assert traces() == 1


def test_a_huge_learning_rate_leaves_a_policy_that_can_act():
    agent, state, data = setup()
    rate = jnp.float32(10.0)
    state = dataclasses.replace(state, opt=optim.set_learning_rate(state.opt, rate))
    for k in range(20):
        state, seen = updater()(state, data, jax.random.key(k))
    assert float(seen["update/learning_rate"]) == 10.0
    assert np.isfinite(flat(state.params)).all()
    assert np.exp(-5) <= float(seen["policy/std"]) <= np.exp(2) + 1e-5
    _, action, aux = jax.jit(agent.act)(agent.policy(state), (), data.obs[0], KEY)
    assert np.isfinite(flat((action, aux))).all()


def test_the_logged_deviation_is_the_one_acted_with():
    agent, state, data = setup()
    params = {**state.params["params"], "log_std": jnp.full(2, jnp.float32(200))}  # exp overflows
    state = dataclasses.replace(state, params={"params": params})
    _, seen = updater()(state, data, KEY)
    assert float(seen["policy/std"]) == pytest.approx(np.exp(2), rel=1e-5)


def affected(cfg: ppo.Config, bad: np.ndarray, key: Key) -> int:
    """How many minibatches of an update hold one of the rows `bad` (bool [T · B])."""
    count = 0
    for k in jax.random.split(key, cfg.num_epochs):
        order = np.asarray(jax.random.permutation(k, len(bad)))
        count += bad[order].reshape(cfg.num_minibatches, -1).any(axis=1).sum()
    return int(count)


def test_a_nan_reward_costs_its_minibatches_and_nothing_else():
    _, state, data = setup()
    # The first step of a robot whose earlier steps can't see it: one row of 32 is bad.
    data = dataclasses.replace(data, reward=data.reward.at[0, 2].set(jnp.nan))
    bad = np.zeros((T, B), bool)
    bad[0, 2] = True
    after, seen = updater()(state, data, KEY)
    assert affected(SMALL, bad.ravel(), KEY) == SMALL.num_epochs  # one minibatch in each pass
    assert int(seen["update/skipped"]) == SMALL.num_epochs
    assert int(seen["nonfinite/advantage"]) == 1
    assert int(seen["nonfinite/target"]) == 1
    assert int(seen["nonfinite/log_prob"]) == 0
    assert np.isfinite(flat(after)).all()
    assert (flat(after.params) != flat(state.params)).any()


def test_an_update_of_nothing_but_nan_changes_nothing():
    _, state, data = setup()
    data = dataclasses.replace(data, reward=jnp.full((T, B), jnp.float32(jnp.nan)))
    after, seen = updater()(state, data, KEY)
    assert int(seen["update/skipped"]) == SMALL.num_epochs * SMALL.num_minibatches
    np.testing.assert_array_equal(flat(after.params), flat(state.params))
    np.testing.assert_array_equal(flat(after.opt), flat(state.opt))


def test_statistics_take_each_observation_once_and_after_the_update():
    _, state, data = setup()
    shifted = dataclasses.replace(data, obs=data.obs + 100)
    after, seen = updater()(state, shifted, KEY)
    stats = after.obs_stats["policy"]
    rows = np.asarray(shifted.obs[:-1]).reshape(-1, 3)
    assert int(stats.count) == T * B  # the last row is the next rollout's first
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-3)
    assert int(seen["nonfinite/obs_rows"]) == 0


# --- learning rates -------------------------------------------------------------------------------


def test_a_linear_schedule_reaches_zero():
    # over 4 updates: 1, 3/4, 1/2 and 1/4 of the rate, then nothing
    cfg = config(schedule="linear", decay_updates=4, learning_rate=1e-3, normalize_obs=False)
    _, state, data = setup(cfg)
    rates = []
    for k in range(6):
        before = state
        state, seen = updater(cfg)(state, data, jax.random.key(k))
        rates.append(float(seen["update/learning_rate"]))
    np.testing.assert_allclose(rates, [1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(flat(state.params), flat(before.params))
    assert int(state.obs_stats["policy"].count) == 0  # nothing is whitened, nothing is counted


ADAPTIVE = config(schedule="adaptive", learning_rate=1e-3, stop_kl=1.0)


@functools.cache
def adaptive():
    """An update that takes the divergences to aim at and to stop at."""

    def update(target: jax.Array, stop: jax.Array, state: Tree, data: Rollout, key: Key):
        cfg = dataclasses.replace(ADAPTIVE, target_kl=target, stop_kl=stop)
        return ppo.make(cfg, SPEC).update(state, data, key)

    return jax.jit(update)


def test_an_adaptive_rate_goes_down_where_the_policy_moves_too_far_and_up_where_too_little():
    _, state, data = setup(ADAPTIVE)
    rates = {}
    for target in (1e-6, 10.0):
        after, seen = adaptive()(target, jnp.inf, state, data, KEY)
        rates[target] = float(optim.learning_rate(after.opt))
        assert float(seen["update/learning_rate"]) == rates[target]
    # The first of 8 minibatches has KL 0 and says nothing; 7 steps of 1.5 are left at most, and
    # the rate stays within 1e-5 and 1e-2: 1e-3 / 1.5^7 = 5.85e-5, 1e-3 · 1.5^7 = 1.7e-2.
    assert rates[1e-6] == pytest.approx(1e-3 / 1.5**7, rel=1e-3)
    assert rates[10.0] == pytest.approx(1e-2, rel=1e-3)


def test_an_update_stops_where_the_policy_has_moved_too_far_and_lowers_its_rate_once():
    # Nothing has moved before the first step (KL 0), so exactly one is taken.
    _, state, data = setup(ADAPTIVE)
    after, _ = adaptive()(1e-10, 1e-9, state, data, KEY)
    order = jax.random.permutation(jax.random.split(KEY, 2)[0], T * B)
    first = jax.tree.map(lambda x: x[0], ppo.minibatches(prepared(ADAPTIVE), order, 4))
    learner = ppo.Learner(state.params, state.opt, jnp.zeros((), bool))
    one, _ = jax.jit(functools.partial(ppo.learn, ADAPTIVE, ppo.network(ADAPTIVE, SPEC)))(
        learner, first
    )
    assert not one.stopped
    np.testing.assert_allclose(flat(after.params), flat(one.params), atol=1e-7)
    assert (flat(one.params) != flat(state.params)).any()
    assert float(optim.learning_rate(after.opt)) == pytest.approx(1e-3 / 1.5, rel=1e-5)


# --- a critic that sees more ----------------------------------------------------------------------


def test_the_critics_observation_changes_values_and_not_actions():
    agent, state, data = setup(SMALL, ASYMMETRIC)
    other = {**data.obs, "critic": data.obs["critic"] + 1}
    act = jax.jit(agent.act)
    policy = agent.policy(state)
    one, two = (act(policy, (), jax.tree.map(lambda x: x[0], o), KEY)[1] for o in (data.obs, other))
    np.testing.assert_array_equal(one, two)
    prepare = jax.jit(functools.partial(ppo.prepare, SMALL, ppo.network(SMALL, ASYMMETRIC)))
    values = [prepare(state, dataclasses.replace(data, obs=o)).value for o in (data.obs, other)]
    assert (values[0] != values[1]).all()


def test_policy_and_critic_learn_from_their_own_observations():
    net = ppo.network(SMALL, ASYMMETRIC)
    _, state, _ = setup(SMALL, ASYMMETRIC)
    batch = prepared(SMALL, ASYMMETRIC)

    def part(x: dict, name: str) -> jax.Array:
        with_x = dataclasses.replace(batch, x=x)
        return ppo.loss(SMALL, net, state.params, with_x)[1][f"loss/{name}"]

    of_policy, of_value = (
        jax.jit(jax.grad(functools.partial(part, name=name)))(batch.x)
        for name in ("policy", "value")
    )
    assert of_policy["policy"].any()
    assert not of_policy["critic"].any()
    assert of_value["critic"].any()
    assert not of_value["policy"].any()


# --- memory ---------------------------------------------------------------------------------------

RECURRENT = config(memory=4, num_minibatches=2)


@functools.cache
def remembered(memory: float) -> tuple[ppo.State, Rollout, ppo.Batch]:
    """A rollout of 16 steps with ends of both kinds, begun with a memory of `memory`."""
    agent = ppo.make(RECURRENT, ASYMMETRIC)
    state = jax.jit(agent.init)(KEY)
    params = jax.tree.map(lambda p: p + 0.05, state.params)
    state = dataclasses.replace(state, params=params)
    began = agent._replace(carry=lambda n: jnp.full((n, 4), memory))
    data = fake_rollout(began, agent.policy(state), ASYMMETRIC, KEY, 16, B)
    return state, data, prepare_recurrent(state, data)


prepare_recurrent = jax.jit(
    functools.partial(ppo.prepare, RECURRENT, ppo.network(RECURRENT, ASYMMETRIC))
)


def test_the_learner_recomputes_what_the_actor_knew():
    state, data, batch = remembered(0.0)
    net = ppo.network(RECURRENT, ASYMMETRIC)

    @jax.jit
    def run(batch: ppo.Batch) -> tuple[jax.Array, jax.Array]:
        _, numbers, value = net.apply(
            state.params, *jax.tree.map(lambda c: c[0], (batch.carry,)), batch.x, batch.is_first
        )
        return ppo.distribution(numbers).log_prob(batch.action), value

    log_prob, value = run(batch)
    ended = np.asarray(data.terminated | data.truncated)
    assert 4 < ended.sum() < 32
    np.testing.assert_allclose(log_prob, data.aux["log_prob"], atol=1e-5)
    np.testing.assert_allclose(value, batch.value, atol=1e-5)
    assert batch.advantage.shape == (16, B)
    np.testing.assert_array_equal(batch.is_first[1:], ended[:-1])
    assert not batch.is_first[0].any()


def test_values_and_bootstraps_use_the_memory_of_their_step():
    state, data, batch = remembered(0.5)
    net = ppo.network(RECURRENT, ASYMMETRIC)

    @jax.jit
    def step(h: jax.Array, obs: Tree) -> tuple[jax.Array, jax.Array]:
        obs = jax.tree.map(lambda v: v[None], obs)
        x = ppo.see(RECURRENT, state.obs_stats, obs, leading=2)
        after, _, value = net.apply(state.params, h, x, jnp.zeros((1, h.shape[0]), bool))
        return after, value[0]

    # One step at a time, the memory emptied by hand where an episode ended.
    ended = np.asarray(data.terminated | data.truncated)
    h, successor = data.carry, np.zeros((16, B))
    final = {int(row): slot for slot, row in enumerate(np.asarray(data.final.index))}
    value = []
    for t in range(17):
        h, v = step(h, jax.tree.map(lambda x: x[t], data.obs))
        value.append(np.asarray(v))
        for b in range(B):
            # a cut-off step goes on from the memory after obs[t], with one step of final_obs
            slot = final.get(t * B + b)
            if slot is not None and t < 16:
                obs = jax.tree.map(lambda x: jnp.stack([x[slot]] * B), data.final.obs)
                successor[t, b] = step(h, obs)[1][b]
        if t < 16:
            h = jnp.where(ended[t][:, None], 0.0, h)
    for t in range(16):
        cut = np.asarray(data.truncated[t] & ~data.terminated[t])
        successor[t] = np.where(cut, successor[t], value[t + 1])
    np.testing.assert_allclose(batch.value, value[:-1], atol=1e-5)
    wanted = gae_by_hand(RECURRENT, data, np.stack(value), successor)
    np.testing.assert_allclose(batch.advantage, wanted, atol=2e-5)


def test_minibatches_of_sequences_keep_each_robots_memory_with_its_steps():
    *_, batch = remembered(0.0)
    batch = dataclasses.replace(batch, carry=jnp.arange(4.0)[None, :, None] * jnp.ones((1, 1, 4)))
    dealt = ppo.minibatches(batch, jnp.asarray([2, 0, 3, 1]), 2)
    assert dealt.advantage.shape == (2, 16, 2)
    np.testing.assert_array_equal(dealt.carry[:, 0, :, 0], [[2, 0], [3, 1]])
    np.testing.assert_array_equal(dealt.advantage[0, :, 1], batch.advantage[:, 0])
    np.testing.assert_array_equal(dealt.advantage[1, :, 0], batch.advantage[:, 3])
    np.testing.assert_array_equal(dealt.x["critic"][1, :, 1], batch.x["critic"][:, 1])


# --- many runs at once ----------------------------------------------------------------------------


def test_vmap_over_hyper_parameters_is_separate_runs():
    _, _, data = setup()
    names = ("clip_eps", "learning_rate", "entropy_cost", "init_std", "discount")
    grid = dict(
        zip(names, jnp.asarray([[0.1, 0.3], [1e-3, 1e-2], [0.0, 0.1], [0.4, 1.0], [0.9, 0.99]]))
    )

    def train(values: dict[str, jax.Array]) -> tuple[ppo.State, ppo.Metrics]:
        agent = ppo.make(config(**values), SPEC)
        return agent.update(agent.init(KEY), data, jax.random.key(1))

    together = jax.jit(jax.vmap(train))(grid)
    plain = {name: float(x[1]) for name, x in grid.items()}  # closed over, as numbers
    alone = jax.jit(lambda: train(plain))()
    assert_close(jax.tree.map(lambda x: x[1], together), alone, atol=1e-5)
    log_std = together[0].params["params"]["log_std"]
    assert (log_std[0] != log_std[1]).all()


# --- a mesh ---------------------------------------------------------------------------------------


def slots_of_each_device(final: rollouts.FinalObs) -> rollouts.FinalObs:
    """Four slots for each of two devices, which hold B / 2 robots each."""
    free = T * B // 2
    index = np.full((2, 4), free, np.int32)
    obs = jax.tree.map(lambda x: np.zeros((2, 4, *x.shape[1:]), np.float32), final.obs)
    used = [0, 0]
    for slot, row in enumerate(np.asarray(final.index)):
        if row < T * B:
            t, b = divmod(int(row), B)
            device, place = b // 2, used[b // 2]
            index[device, place] = t * (B // 2) + b % 2
            for name in obs:
                obs[name][device, place] = final.obs[name][slot]
            used[device] += 1
    assert 0 < max(used) <= 4
    join = lambda x: jnp.asarray(x.reshape(8, *x.shape[2:]))
    return rollouts.FinalObs(jax.tree.map(join, obs), join(index), final.dropped)


MESH = config(num_epochs=1, num_minibatches=1, schedule="adaptive", learning_rate=1e-2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_devices_learn_what_one_does(check_vma):
    _, state, data = setup(MESH, ASYMMETRIC)
    one, seen = updater(MESH, ASYMMETRIC)(state, data, KEY)
    for name, size in (("policy", 3), ("critic", 5)):
        rows = np.asarray(data.obs[name][:-1]).reshape(-1, size)
        np.testing.assert_allclose(one.obs_stats[name].mean, rows.mean(0), atol=1e-6)
    P = PartitionSpec
    steps, robots = P(None, "data"), P("data")
    final = rollouts.FinalObs(robots, robots, P())
    specs = Rollout(steps, steps, steps, steps, steps, final, robots, steps, {})
    update = jax.jit(
        jax.shard_map(
            ppo.make(MESH, ASYMMETRIC, axis="data").update,
            mesh=Mesh(np.array(jax.devices()[:2]), ("data",)),
            in_specs=(P(), specs, P()),
            out_specs=(P(), P()),
            check_vma=check_vma,
        )
    )
    split = dataclasses.replace(data, final=slots_of_each_device(data.final))
    both, told = jax.block_until_ready(update(state, split, KEY))
    assert int(both.obs_stats["policy"].count) == T * B
    assert_close(both, one, atol=1e-5)
    assert_close(told, seen, atol=1e-4)


# --- the loop -------------------------------------------------------------------------------------


def test_no_key_is_used_twice_in_a_whole_step():
    env = wrappers.auto_reset(wrappers.time_limit(cartpole.make(cartpole.Config())))
    loop = loops.on_policy(
        ppo.make(config(memory=4, num_minibatches=1), env.spec), wrappers.batch(env, 2), num_steps=3
    )
    everything = jax.jit(lambda key: loop.step(loop.init(key)))
    with jax.debug_key_reuse(True):  # finds out while tracing
        everything.trace(jax.random.key(21))
