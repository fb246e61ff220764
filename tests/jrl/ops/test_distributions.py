import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.distributions import Categorical, Normal, SquashedNormal, bound_log_std


def f32(*values):
    return jnp.asarray(values, jnp.float32)


MANY = 200_000


# --- Normal --------------------------------------------------------------------------------------


def test_normal_log_prob_by_hand():
    # N(1, 2) at 3: z = 1: -.5 - log 2 - .918939 = -2.112086; N(0, 1) at 0: -.918939.
    # Sum -3.031025
    policy = Normal(f32(1, 0), jnp.log(f32(2, 1)))
    np.testing.assert_allclose(policy.log_prob(f32(3, 0)), -3.031025, rtol=1e-6)
    # Entropy: 2 * 1.418939 + log 2 = 3.531025
    np.testing.assert_allclose(policy.entropy(), 3.531025, rtol=1e-6)


def test_normal_kl_by_hand():
    # KL(N(1, 2) || N(0, 1)) = log(1/2) + (4 + 1) / 2 - 1/2 = -.693147 + 2 = 1.306853
    one = Normal(f32(1), jnp.log(f32(2)))
    np.testing.assert_allclose(one.kl(Normal(f32(0), f32(0))), 1.306853, rtol=1e-6)
    np.testing.assert_allclose(one.kl(one), 0.0, atol=1e-7)


def test_normal_std_shared_by_a_batch():
    mean = jnp.arange(12.0).reshape(2, 3, 2)
    policy = Normal(mean, f32(0.5, -0.5))
    same = Normal(mean, jnp.broadcast_to(policy.log_std, mean.shape))
    action = policy.sample(jax.random.key(0))
    assert action.shape == mean.shape
    assert action.dtype == jnp.float32
    for fn in (lambda p: p.log_prob(action), lambda p: p.entropy(), lambda p: p.kl(same)):
        assert fn(policy).shape == (2, 3)
        np.testing.assert_allclose(fn(policy), fn(same), rtol=1e-6)
    np.testing.assert_array_equal(policy.mode(), mean)


def test_normal_samples_have_the_moments_and_the_entropy():
    policy = Normal(jnp.broadcast_to(f32(3, -1), (MANY, 2)), jnp.log(f32(2, 0.5)))
    x = policy.sample(jax.random.key(1))
    np.testing.assert_allclose(x.mean(0), [3, -1], atol=0.02)
    np.testing.assert_allclose(x.std(0), [2, 0.5], rtol=0.01)
    np.testing.assert_allclose(-policy.log_prob(x).mean(), policy.entropy()[0], atol=0.01)


def test_distributions_are_records():
    policy = Normal(jnp.zeros((4, 2)), jnp.zeros(2))
    entropy = jax.jit(lambda p: p.entropy())(policy)
    assert entropy.shape == (4,)
    assert len(jax.tree.leaves(policy)) == 2


# --- SquashedNormal ------------------------------------------------------------------------------


def test_squashed_log_prob_where_tanh_is_exactly_one():
    # log N(10; 0, 1) = -50.918939; log(1 - tanh^2 10) = 2 (.693147 - 10) = -18.613706;
    # -50.918939 + 18.613706 = -32.305233
    policy = SquashedNormal(f32(0), f32(0))
    u = f32(10)
    assert policy.squash(u)[0] == 1.0
    np.testing.assert_allclose(policy.log_prob(u), -32.305, atol=5e-4)
    assert jnp.isfinite(jax.grad(policy.log_prob)(u)).all()


@pytest.mark.parametrize("u", [-1000.0, -30.0, 0.0, 30.0, 1000.0])
def test_squashed_log_prob_and_gradients_are_finite(u):
    policy = SquashedNormal(f32(0), f32(0))
    assert jnp.isfinite(policy.log_prob(f32(u)))
    by_policy = jax.grad(lambda p: p.log_prob(f32(u)))(policy)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves((by_policy.mean, by_policy.log_std)))


def test_squashed_bounds_scale_the_density():
    # Twice the width halves the density: -log 2 per dimension. u near 0 is in both.
    u = f32(0.3, -2.0, 10.0)
    unit = SquashedNormal(f32(0, 0, 0), f32(0, 0, 0))
    wide = SquashedNormal(unit.mean, unit.log_std, low=-2.0, high=2.0)
    np.testing.assert_allclose(wide.log_prob(u) - unit.log_prob(u), -3 * np.log(2), rtol=1e-5)
    # Bounds per dimension, asymmetric: [0, 2] is as wide as [-1, 1].
    mixed = SquashedNormal(unit.mean, unit.log_std, low=f32(0, -2, -1), high=f32(2, 2, 1))
    np.testing.assert_allclose(mixed.log_prob(u) - unit.log_prob(u), -np.log(2), rtol=1e-5)


def test_squashed_density_integrates_to_one():
    low, high = -0.4, 1.6
    policy = SquashedNormal(f32(0.5), f32(-0.3), low, high)
    action = jnp.linspace(low + 1e-4, high - 1e-4, 20_001)[:, None]
    density = jnp.exp(policy.log_prob(policy.unsquash(action)))
    np.testing.assert_allclose(jnp.trapezoid(density, action[:, 0]), 1.0, atol=2e-3)


@pytest.mark.parametrize("action", [-1.0, 1.0, -1.5, 1.5, 0.999, 0.0])
def test_squashed_demonstrations_at_the_bounds_are_finite(action):
    policy = SquashedNormal(f32(0), f32(0))
    u = policy.unsquash(f32(action))
    assert jnp.isfinite(policy.log_prob(u))
    np.testing.assert_allclose(policy.squash(u), np.clip(action, -1, 1), atol=1e-6)


def test_squashed_actions_stay_inside_the_bounds():
    low, high = f32(-0.4, 0.1), f32(0.4, 0.3)
    policy = SquashedNormal(jnp.zeros((1000, 2)), f32(3, 3), low, high)
    action = policy.squash(policy.sample(jax.random.key(0)))
    assert (action >= low).all()
    assert (action <= high).all()
    np.testing.assert_allclose(policy.squash(policy.mode())[0], [0.0, 0.2], atol=1e-6)


def test_squashed_entropy_and_kl():
    one = SquashedNormal(jnp.full((MANY, 1), 0.3), f32(-0.5))
    other = SquashedNormal(jnp.zeros((MANY, 1)), f32(0.1))
    u = one.sample(jax.random.key(0))
    np.testing.assert_allclose(
        one.kl(other)[0], (one.log_prob(u) - other.log_prob(u)).mean(), atol=0.01
    )
    # Entropy by quadrature over the action.
    action = jnp.linspace(-0.9999, 0.9999, 20_001)[:, None]
    log_p = SquashedNormal(f32(0.3), f32(-0.5)).log_prob(one.unsquash(action))
    exact = jnp.trapezoid(-jnp.exp(log_p) * log_p, action[:, 0])
    np.testing.assert_allclose(one.entropy(jax.random.key(1)).mean(), exact, atol=0.01)


# --- Categorical ---------------------------------------------------------------------------------


def test_categorical_by_hand():
    # p = (.5, .25, .25): entropy .5 log 2 + .5 log 4 = 1.5 log 2; KL to uniform = log 3 - that.
    policy = Categorical(jnp.log(f32(2, 1, 1)) + 5.0)
    np.testing.assert_allclose(policy.log_prob(jnp.int32(1)), np.log(0.25), rtol=1e-6)
    np.testing.assert_allclose(policy.entropy(), 1.5 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(
        policy.kl(Categorical(f32(0, 0, 0))), np.log(3) - 1.5 * np.log(2), rtol=1e-5
    )
    assert policy.mode() == 0


def test_categorical_batch_and_frequencies():
    policy = Categorical(jnp.broadcast_to(jnp.log(f32(0.6, 0.3, 0.1)), (MANY, 3)))
    action = policy.sample(jax.random.key(0))
    assert action.dtype == policy.mode().dtype == jnp.int32
    np.testing.assert_allclose(np.bincount(action) / MANY, [0.6, 0.3, 0.1], atol=0.005)
    assert policy.log_prob(action).shape == (MANY,)


def test_categorical_with_a_forbidden_choice():
    policy = Categorical(f32(0, 0, -jnp.inf))
    other = Categorical(f32(0, jnp.log(3.0), -jnp.inf))
    np.testing.assert_allclose(policy.entropy(), np.log(2), rtol=1e-6)
    # .5 log(.5 / .25) + .5 log(.5 / .75)
    np.testing.assert_allclose(policy.kl(other), 0.5 * np.log(2) + 0.5 * np.log(2 / 3), rtol=1e-5)
    grad = jax.grad(lambda x: Categorical(x).entropy() + Categorical(x).kl(other))(policy.logits)
    assert jnp.isfinite(grad).all()
    assert policy.kl(Categorical(f32(0, -jnp.inf, 0))) == jnp.inf
    assert (
        Categorical(jnp.broadcast_to(policy.logits, (500, 3))).sample(jax.random.key(0)) < 2
    ).all()


# --- the bound on a learnt std --------------------------------------------------------------------


def test_bounded_std_survives_a_huge_learning_rate():
    # Plain gradient descent with rate 10 on the log-probability of wild actions, then of tame ones.
    def loss(log_std, action):
        return -Normal(jnp.zeros(2), bound_log_std(log_std)).log_prob(action).mean()

    log_std = jnp.zeros(2)
    for scale in [100.0] * 10 + [1e-4] * 10:
        action = scale * jax.random.normal(jax.random.key(0), (16, 2))
        log_std = log_std - 10.0 * jax.grad(loss)(log_std, action)
        std = jnp.exp(bound_log_std(log_std))
        assert (std > 0).all()
        assert (std <= np.exp(2.0) * 1.000001).all()


def test_bounded_std_leaves_the_bound_again():
    # A plain clip has gradient 0 beyond the bound, and would stay there.
    gradient = lambda x, sign: jax.grad(lambda x: (sign * bound_log_std(x)).sum())(f32(x))[0]
    assert gradient(5.0, 1.0) == 1.0  # descent goes down, back inside
    assert gradient(5.0, -1.0) == 0.0
    assert gradient(-9.0, -1.0) == -1.0  # descent goes up, back inside
    assert gradient(-9.0, 1.0) == 0.0
    assert gradient(0.7, 1.0) == 1.0
    assert gradient(0.7, -1.0) == -1.0
    np.testing.assert_array_equal(bound_log_std(f32(-9, 0.7, 5)), f32(-5, 0.7, 2))
    np.testing.assert_array_equal(bound_log_std(f32(-9, 5), -1.0, 1.0), f32(-1, 1))
