import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jrl.ops import returns

gae = jax.jit(returns.gae)  # discount and lam are traced
vtrace = jax.jit(returns.vtrace)
lambda_returns = jax.jit(returns.lambda_returns)
n_step_returns = jax.jit(returns.n_step_returns, static_argnames="n")
group_advantages = jax.jit(returns.group_advantages, static_argnames="num_groups")

N = np.newaxis


def column(*values):
    return jnp.asarray(values, jnp.float32)[:, N]


def flags(length, *true):
    return jnp.zeros((length, 1), bool).at[jnp.asarray(true, int)].set(True)


def draw(seed, T=12, B=5):
    """Random reward, value, next_value (independent of value), terminated, truncated."""
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, T, B)).astype(np.float32)
    terminated, truncated = rng.random((2, T, B)) < 0.2
    return reward, value, next_value, terminated, truncated


# --- GAE ------------------------------------------------------------------------------------------


def test_gae_bootstraps_a_truncation_from_its_true_successor():
    # Counter: obs = value = steps since the reset, reward 0, cut off after 4 steps;
    # gamma .9, lam .95.
    # delta = .9 (o + 1) - o: .9, 1.8 - 1 = .8, 2.7 - 2 = .7, 3.6 - 3 = .6.
    # A3 = .6; A2 = .7 + .855*.6 = 1.213; A1 = .8 + .855*1.213 = 1.8371;
    # A0 = .9 + .855*1.8371 = 2.4707
    value = column(0, 1, 2, 3, 0, 1, 2, 3)
    none, cut = flags(8), flags(8, 3, 7)
    zero = jnp.zeros_like(value)
    args = (zero, value, value + 1.0, none, cut)
    delta = gae(*args, discount=0.9, lam=0.0)[:, 0]
    advantage = gae(*args, discount=0.9, lam=0.95)[:, 0]
    np.testing.assert_allclose(delta, [0.9, 0.8, 0.7, 0.6] * 2, atol=1e-6)
    np.testing.assert_allclose(advantage, [2.4707, 1.8371, 1.2130, 0.6000] * 2, atol=5e-5)


def test_gae_termination_and_truncation_differ():
    # gamma = lam = 1, r = 1, V = V' = 2: terminated: 1 + 0 - 2 = -1; truncated: 1 + 2 - 2 = +1.
    one, two = column(1, 1, 1), column(2, 2, 2)
    ended = gae(one, two, two, flags(3, 2), flags(3), discount=1.0, lam=1.0)
    cut = gae(one, two, two, flags(3), flags(3, 2), discount=1.0, lam=1.0)
    np.testing.assert_allclose(ended[:, 0], [1, 0, -1])
    np.testing.assert_allclose(cut[:, 0], [3, 2, 1])


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_gae_does_not_look_past_an_end(kind):
    reward, two = column(1, 1, 1), column(2, 2, 2)
    ends = {"terminated": flags(3), "truncated": flags(3), kind: flags(3, 1)}
    first, second = (
        gae(r, two, two, **ends, discount=1.0, lam=1.0) for r in (reward, reward.at[2].set(100.0))
    )
    np.testing.assert_array_equal(first[:2], second[:2])
    assert second[2] != first[2]


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("at_window_end", [True, False])
def test_gae_of_two_trajectories_in_one_row_is_that_of_each(terminated, at_window_end):
    reward, value, next_value, _, _ = draw(0, T=10, B=1)
    ends = flags(10, 4, 9) if at_window_end else flags(10, 4)
    none = flags(10)
    done = (ends, none) if terminated else (none, ends)
    args = (reward, value, next_value, *done)
    whole = gae(*args, discount=0.9, lam=0.95)
    parts = [gae(*(x[s] for x in args), discount=0.9, lam=0.95) for s in (np.s_[:5], np.s_[5:])]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-6)


def gae_by_definition(reward, value, next_value, terminated, truncated, discount, lam):
    """Sum of (discount lam)^k delta_{t+k} up to the episode's end, in float64, O(T^2)."""
    T, B = reward.shape
    result = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k, b] else float(next_value[k, b])
                delta = reward[k, b] + discount * bootstrap - value[k, b]
                result[t, b] += (discount * lam) ** (k - t) * delta
                if terminated[k, b] or truncated[k, b]:
                    break
    return result


seeds = st.integers(0, 2**31)
units = st.floats(0.0, 1.0, width=32)
few = hypothesis.settings(max_examples=25, deadline=None)


@few
@hypothesis.given(seed=seeds, discount=units, lam=units)
def test_gae_matches_its_definition(seed, discount, lam):
    args = draw(seed)
    expected = gae_by_definition(*args, discount, lam)
    np.testing.assert_allclose(
        gae(*args, discount=discount, lam=lam), expected, rtol=1e-4, atol=1e-5
    )


def test_gae_takes_traced_discounts_without_retracing():
    gae(*draw(0), discount=0.9, lam=0.95)
    before = gae._cache_size()
    gae(*draw(1), discount=0.8, lam=0.5)
    assert gae._cache_size() == before


def test_gae_ignores_the_value_after_a_termination():
    reward, value, next_value, _, _ = draw(3, T=4, B=1)
    end, none = flags(4, 1), flags(4)
    args = {"terminated": end, "truncated": none, "discount": 0.9, "lam": 0.9}
    broken = jnp.asarray(next_value).at[1].set(jnp.nan)
    np.testing.assert_array_equal(
        gae(reward, value, next_value, **args), gae(reward, value, broken, **args)
    )


def test_gae_refuses_shapes_that_would_broadcast():
    reward, value, next_value, terminated, truncated = draw(0)
    with pytest.raises(ValueError, match=r"value.*\(12, 5, 1\)"):
        gae(reward, value[..., N], next_value, terminated, truncated, discount=0.9, lam=0.9)


# --- against rlax ---------------------------------------------------------------------------------


def chained(seed):
    """A rollout as rlax assumes: V(s'_t) is V(s_t+1), and every end is a termination."""
    reward, value, next_value, terminated, _ = draw(seed)
    next_value = np.concatenate([value[1:], next_value[-1:]])
    return reward, value, next_value, terminated, np.zeros_like(terminated)


@pytest.fixture(scope="module")
def rlax():
    return pytest.importorskip("rlax")


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_gae_matches_rlax(rlax):
    reward, value, next_value, terminated, truncated = chained(1)
    values = np.concatenate([value, next_value[-1:]])
    reference = jax.vmap(
        rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1
    )(reward, 0.97 * (1.0 - terminated), 0.9, values)
    ours = gae(reward, value, next_value, terminated, truncated, discount=0.97, lam=0.9)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def test_lambda_returns_match_rlax(rlax):
    reward, _, next_value, terminated, truncated = chained(2)
    reference = jax.vmap(rlax.lambda_returns, in_axes=(1, 1, 1, None), out_axes=1)(
        reward, 0.97 * (1.0 - terminated), next_value, 0.9
    )
    ours = lambda_returns(reward, next_value, terminated, truncated, discount=0.97, lam=0.9)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_returns_match_rlax(rlax, n):
    reward, _, next_value, terminated, truncated = chained(3)
    reference = jax.vmap(
        lambda r, d, v: rlax.n_step_bootstrapped_returns(r, d, v, min(n, 12)), (1, 1, 1), 1
    )(reward, 0.97 * (1.0 - terminated), next_value)
    ours = n_step_returns(reward, next_value, terminated, truncated, discount=0.97, n=n)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_vtrace_matches_rlax(rlax, lam):
    reward, value, next_value, terminated, truncated = chained(4)
    ratio = np.random.default_rng(4).lognormal(size=reward.shape).astype(np.float32)
    reference = jax.vmap(
        lambda v, w, r, d, rho: rlax.vtrace_td_error_and_advantage(v, w, r, d, rho, lam), 1, 1
    )(value, next_value, reward, 0.97 * (1.0 - terminated), ratio)
    target, advantage = vtrace(
        reward, value, next_value, terminated, truncated, ratio, discount=0.97, lam=lam
    )
    np.testing.assert_allclose(target, value + reference.errors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(advantage, reference.pg_advantage, rtol=1e-4, atol=1e-5)


# --- λ-returns and n-step returns -----------------------------------------------------------------


@few
@hypothesis.given(seed=seeds, discount=units, lam=units)
def test_lambda_returns_are_gae_plus_value(seed, discount, lam):
    reward, value, next_value, terminated, truncated = draw(seed)
    # The identity needs V(s'_t) = V(s_{t+1}) within an episode.
    inner = ~(terminated | truncated)[:-1]
    next_value[:-1] = np.where(inner, value[1:], next_value[:-1])
    ends = {"terminated": terminated, "truncated": truncated, "discount": discount, "lam": lam}
    target = lambda_returns(reward, next_value, **ends)
    expected = gae(reward, value, next_value, **ends) + value
    np.testing.assert_allclose(target, expected, rtol=1e-4, atol=1e-5)


def test_n_step_stops_at_ends():
    # Start one step before an episode's end, r = 1, gamma .9, n = 3: two rewards, 1 + .9 = 1.9.
    # Terminated: no bootstrap. Truncated: + .9^2 V(final obs) = .81 * 7.
    reward, next_value = jnp.ones((5, 1)), column(100, 100, 7, 100, 100)
    end, none = flags(5, 2), flags(5)
    ended = n_step_returns(reward, next_value, end, none, discount=0.9, n=3)
    cut = n_step_returns(reward, next_value, none, end, discount=0.9, n=3)
    np.testing.assert_allclose(ended[1], [1.9], rtol=1e-6)
    np.testing.assert_allclose(cut[1], [1.9 + 0.81 * 7], rtol=1e-6)
    # The whole of n steps fits before the end: 1 + .9 + .81 (+ .729 * 7 = 5.103).
    np.testing.assert_allclose(ended[0], [2.71], rtol=1e-6)
    np.testing.assert_allclose(cut[0], [2.71 + 5.103], rtol=1e-6)
    # The window's end: two rewards are left, then gamma^2 * 100.
    np.testing.assert_allclose(cut[3], [1.9 + 81.0], rtol=1e-6)


def test_n_step_matches_its_definition():
    reward, _, next_value, terminated, truncated = draw(7, T=9, B=4)
    expected = np.zeros((9, 4))
    for t, b in np.ndindex(9, 4):
        for k in range(4):
            expected[t, b] += 0.9**k * reward[t + k, b]
            last = terminated[t + k, b] or truncated[t + k, b] or t + k == 8 or k == 3
            if last:
                expected[t, b] += 0.9 ** (k + 1) * next_value[t + k, b] * ~terminated[t + k, b]
                break
    ours = n_step_returns(reward, next_value, terminated, truncated, discount=0.9, n=4)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_n_step_refuses_nonsense():
    reward, _, next_value, terminated, truncated = draw(0)
    with pytest.raises(ValueError, match="at least 1"):
        n_step_returns(reward, next_value, terminated, truncated, discount=0.9, n=0)


# --- V-trace --------------------------------------------------------------------------------------


def test_vtrace_advantage_at_a_truncation_is_of_its_own_episode():
    # A: V = 1, cut off at its 2nd step; B: V = 100. r = 0, gamma 1, on-policy: A's last advantage
    # is 0 + 1 - 1 = 0; taking the next episode's target would give 100 - 1 = 99.
    value = column(1, 1, 100, 100)
    one = jnp.ones_like(value)
    target, advantage = vtrace(0 * one, value, value, flags(4), flags(4, 1), one, discount=1.0)
    np.testing.assert_array_equal(advantage[:, 0], [0, 0, 0, 0])
    np.testing.assert_array_equal(target[:, 0], [1, 1, 100, 100])


def test_every_step_of_the_window_counts():
    # The only reward comes with the last step, which does not end the episode.
    reward, zero = column(0, 0, 0, 0, 1), jnp.zeros((5, 1))
    none, one = flags(5), jnp.ones((5, 1))
    target, advantage = vtrace(reward, zero, zero, none, none, one, discount=0.5)
    # v4 = A4 = 1, v3 = .5, v2 = .25 ...
    np.testing.assert_allclose(target[:, 0], [0.0625, 0.125, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(advantage[:, 0], [0.0625, 0.125, 0.25, 0.5, 1.0])
    assert advantage.shape == reward.shape


def vtrace_by_definition(reward, value, next_value, terminated, truncated, ratio, discount, lam):
    """Eq. 1 of Espeholt et al. as a sum over the rest of the episode, in float64, O(T^2)."""
    T, B = reward.shape
    done = terminated | truncated
    bootstrap = np.where(terminated, 0.0, next_value)
    delta = np.minimum(1.0, ratio) * (reward + discount * bootstrap - value)
    target = value.astype(np.float64)
    for t, b in np.ndindex(T, B):
        weight = 1.0
        for k in range(t, T):
            target[t, b] += weight * delta[k, b]
            weight *= discount * lam * min(1.0, ratio[k, b])
            if done[k, b]:
                break
    advantage = np.zeros((T, B))
    for t, b in np.ndindex(T, B):
        inside = t + 1 < T and not done[t, b]
        following = target[t + 1, b] if inside else bootstrap[t, b]
        mixed = lam * following + (1 - lam) * bootstrap[t, b]
        advantage[t, b] = min(1.0, ratio[t, b]) * (reward[t, b] + discount * mixed - value[t, b])
    return target, advantage


@few
@hypothesis.given(seed=seeds, discount=units, lam=units)
def test_vtrace_matches_its_definition(seed, discount, lam):
    args = draw(seed)
    ratio = np.random.default_rng(seed).lognormal(size=args[0].shape).astype(np.float32)
    ours = vtrace(*args, ratio, discount=discount, lam=lam)
    for got, expected in zip(ours, vtrace_by_definition(*args, ratio, discount, lam)):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@few
@hypothesis.given(seed=seeds, lam=units)
def test_on_policy_vtrace_is_gae(seed, lam):
    reward, value, next_value, terminated, truncated = draw(seed)
    inner = ~(terminated | truncated)[:-1]
    next_value[:-1] = np.where(inner, value[1:], next_value[:-1])
    args = (reward, value, next_value, terminated, truncated)
    advantage = gae(*args, discount=0.95, lam=lam)
    target, pg_advantage = vtrace(*args, np.ones_like(reward), discount=0.95, lam=lam)
    np.testing.assert_allclose(target, advantage + value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pg_advantage, advantage, rtol=1e-4, atol=1e-5)


def test_vtrace_clips_each_weight_on_its_own():
    # One step, r = 1, V = V' = 0, ratio 4: v = min(3, 4) 1 = 3; A = min(2, 4) 1 = 2.
    one, zero, none = column(1), column(0), flags(1)
    target, advantage = vtrace(
        one, zero, zero, none, none, 4 * one, discount=0.9, clip_rho=3.0, clip_pg_rho=2.0
    )
    assert (target.item(), advantage.item()) == (3.0, 2.0)
    # Two steps, ratio 4, gamma .5, c = 1.5: v0 = 3 + .5 * 1.5 * 3 = 5.25
    two = jnp.ones((2, 1))
    target, _ = vtrace(
        two, 0 * two, 0 * two, flags(2), flags(2), 4 * two, discount=0.5, clip_rho=3.0, clip_c=1.5
    )
    assert target[0].item() == 5.25


# --- group-relative advantages --------------------------------------------------------------------


def test_group_advantages_by_hand():
    # [0, 0, 0, 1]: mean .25, population variance (3 * .0625 + .5625) / 4 = .1875, std .4330;
    # -.25 / .4330 = -.5774, .75 / .4330 = 1.7321
    reward = jnp.asarray([[1, 1, 1, 1], [0, 0, 0, 1]], jnp.float32)
    advantage = group_advantages(reward)
    np.testing.assert_array_equal(advantage[0], [0, 0, 0, 0])
    np.testing.assert_allclose(advantage[1], [-0.57735, -0.57735, -0.57735, 1.73205], rtol=1e-5)
    np.testing.assert_array_equal(group_advantages(reward[::-1]), advantage[::-1])


@pytest.mark.parametrize("value", [0.1, 1e3 + 0.3, -7.7])
def test_group_of_equal_rewards_is_exactly_zero(value):
    # Seven times .1 summed and divided by seven is not .1 in float32.
    reward = jnp.full((3, 7), value, jnp.float32)
    np.testing.assert_array_equal(group_advantages(reward), np.zeros((3, 7)))


def test_groups_by_id_may_be_mixed_and_unequal():
    reward = jnp.asarray([0, 5, 0, 1, 5, 0, 9], jnp.float32)
    group = jnp.asarray([0, 1, 0, 0, 1, 0, 3], jnp.int32)
    advantage = group_advantages(reward, group, num_groups=4)
    a, b = -0.57735, 1.73205
    np.testing.assert_allclose(advantage, [a, 0, a, b, 0, a, 0], rtol=1e-5)


def test_group_advantages_explain_themselves():
    with pytest.raises(ValueError, match=r"\[G, K\]"):
        group_advantages(jnp.zeros(4))
    with pytest.raises(ValueError, match="num_groups"):
        group_advantages(jnp.zeros(4), jnp.zeros(4, int))
