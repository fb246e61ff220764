import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import distributions, losses, moments

ppo_clip = jax.jit(losses.ppo_clip)
value_loss = jax.jit(losses.value_loss)
normalize = jax.jit(losses.normalize, static_argnames="axis")

update, scores = jax.jit(moments.update), jax.jit(moments.normalize)


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def test_ppo_clip_by_hand():
    # Ratios 1.5, .5, 1.1 with eps .2; advantages 1, 1, -1:
    # min(1.5, 1.2) = 1.2; min(.5, .8) = .5; min(-1.1, -1.1) = -1.1; loss = -(.6)/3 = -.2
    # outside [.8, 1.2]: two of three. Mean ratio 3.1 / 3.
    # kl: ratio - 1 - log ratio = .5 - .405465, -.5 + .693147, .1 - .0953102; mean .0974571
    old = f32(-1.0, -2.0, -3.0)
    new = old + jnp.log(f32(1.5, 0.5, 1.1))
    loss, metrics = ppo_clip(new, old, f32(1, 1, -1), clip_eps=0.2)
    np.testing.assert_allclose(loss, -0.2, rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio"], 3.1 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["approx_kl"], 0.0974571, rtol=1e-5)


def test_ppo_clip_higher_moves_the_upper_edge_only():
    # Ratios 1.5 and .5, A = 1, interval [.8, 1.4]: -(1.4 + .5) / 2 = -.95
    old = f32(0, 0)
    new = jnp.log(f32(1.5, 0.5))
    loss, _ = ppo_clip(new, old, f32(1, 1), clip_eps=0.2, clip_eps_high=0.4)
    np.testing.assert_allclose(loss, -0.95, rtol=1e-5)


def test_ppo_clip_gradient_is_the_policy_gradient_inside_and_zero_where_clipped():
    # d/d log_prob of -mean(ratio A) at ratio 1 is -A / N. A clipped sample (ratio 2, A > 0) is 0,
    # and the same ratio with A < 0 is not clipped: -(2 * -1) / 3.
    old = f32(0, 0, 0)
    new = f32(0, np.log(2), np.log(2))
    grad = jax.grad(lambda x: ppo_clip(x, old, f32(3, 1, -1), clip_eps=0.2)[0])(new)
    np.testing.assert_allclose(grad, [-1.0, 0.0, 2 / 3], rtol=1e-5)


@pytest.mark.parametrize("gap", [1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_ppo_clip_stays_finite_for_absurd_ratios(gap, advantage):
    # exp(1000) is inf in float32.
    loss, grad = jax.value_and_grad(lambda x: ppo_clip(x, f32(0), f32(advantage), clip_eps=0.2)[0])(
        f32(gap)
    )
    assert jnp.isfinite(loss)
    assert jnp.isfinite(grad).all()


def test_ppo_clip_masked_steps_contribute_nothing():
    # Two episodes of lengths 3 and 1, padded to 3 with garbage.
    mask = jnp.asarray([[True, True, True], [True, False, False]])
    old = jnp.zeros((2, 3))
    new = jnp.where(mask, 0.1, jnp.nan)
    advantage = jnp.where(mask, 2.0, 1e9)
    loss = lambda x, mask: ppo_clip(x, old, advantage, clip_eps=0.2, mask=mask)[0]
    np.testing.assert_allclose(loss(new, mask), -2 * np.exp(0.1), rtol=1e-6)
    grad = jax.grad(loss)(jnp.full((2, 3), 0.1), mask)
    np.testing.assert_allclose(grad, np.where(mask, -2 * np.exp(0.1) / 4, 0), rtol=1e-6)
    assert loss(new, jnp.zeros_like(mask)) == 0.0


def test_zero_advantages_give_zero_loss_and_gradient():
    zero = jnp.zeros(4)
    loss, grad = jax.value_and_grad(lambda x: ppo_clip(x, zero, zero, clip_eps=0.2)[0])(zero + 0.05)
    assert loss == 0.0
    assert not grad.any()


def test_first_ratio_is_one_for_an_action_beyond_the_bounds():
    # mean 0, std 1, sampled 2.5, env clips its own copy to 1. The sampled action keeps the ratio 1;
    # the clipped one would give exp((2.5^2 - 1) / 2) = 13.8.
    policy = distributions.Normal(jnp.zeros(1), jnp.zeros(1))
    old = policy.log_prob(f32(2.5))
    ratio = lambda action: ppo_clip(policy.log_prob(f32(action)), old, f32(1.0), clip_eps=0.2)[1][
        "ratio"
    ]
    assert ratio(2.5) == 1.0
    np.testing.assert_allclose(ratio(1.0), 13.8, atol=0.01)


def test_first_ratio_is_one_with_normalisation():
    # Raw observations ~ N(100, 5); the same moments serve acting and the loss.
    key_obs, key_act, key_net = jax.random.split(jax.random.key(0), 3)
    raw = 100.0 + 5.0 * jax.random.normal(key_obs, (64, 6))
    seen = update(moments.init(raw[0]), raw)
    weight = 0.1 * jax.random.normal(key_net, (6, 2))
    policy = lambda m: distributions.Normal(scores(m, raw) @ weight, jnp.zeros(2))
    action = policy(seen).sample(key_act)
    old = policy(seen).log_prob(action)
    advantage = jnp.ones(64)
    _, metrics = ppo_clip(policy(seen).log_prob(action), old, advantage, clip_eps=0.2)
    assert abs(metrics["ratio"] - 1.0) <= 1e-6
    assert metrics["clip_fraction"] == 0.0
    # With moments updated in between it is not: the test can tell.
    later = update(seen, raw + 10.0)
    _, metrics = ppo_clip(policy(later).log_prob(action), old, advantage, clip_eps=0.2)
    assert metrics["approx_kl"] > 1e-4


def test_value_loss_by_hand():
    # Errors 1 and -2: .5 (1 + 4) / 2 = 1.25
    assert value_loss(f32(2, 1), f32(1, 3)) == 1.25
    # Clipped by .5 around old 0 and 3: values .5 and 2.5 against 1 and 3: errors .25 and .25;
    # the larger of plain and clipped: 1 and 4.
    value, target, old = f32(2, 1), f32(1, 3), f32(0, 3)
    assert value_loss(value, target, old, clip_eps=0.5) == 1.25
    # Value has overshot in the right direction: plain error 0, clipped (.5 - 2)^2 = 2.25 wins.
    assert value_loss(f32(2), f32(2), f32(0), clip_eps=0.5) == 1.125
    assert value_loss(value, target, mask=jnp.asarray([True, False])) == 0.5


def test_value_loss_needs_something_to_clip_around():
    with pytest.raises(ValueError, match="old_value"):
        value_loss(f32(1), f32(2), clip_eps=0.2)


def test_normalize_by_hand():
    # 1, 2, 3, 4: mean 2.5, population variance 1.25.
    x = f32(1, 2, 3, 4)
    np.testing.assert_allclose(normalize(x), (np.arange(1, 5) - 2.5) / np.sqrt(1.25), rtol=1e-6)


@pytest.mark.parametrize(
    "x", [f32(3.7), jnp.full(1000, 1000.3), jnp.full((7, 3), 0.1), jnp.zeros(3)]
)
def test_normalize_of_equal_entries_is_zero(x):
    # Rounding makes the mean of 1000.3 differ from it by 6e-5 or so; that must not become a signal.
    np.testing.assert_array_equal(normalize(x), jnp.zeros_like(x))
    assert jnp.isfinite(jax.grad(lambda x: normalize(x).sum())(x)).all()


def test_normalize_over_devices_is_that_of_all_entries():
    x = 5.0 + 2.0 * jax.random.normal(jax.random.key(0), (4, 8, 3))
    sharded = jax.vmap(lambda x: normalize(x, "data"), axis_name="data")(x)
    np.testing.assert_allclose(sharded, normalize(x), rtol=1e-4, atol=1e-5)
