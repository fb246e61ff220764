import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl import optim


def f32(*values):
    return jnp.asarray(values, jnp.float32)


PARAMS = {"w": f32(1, -2, 3), "b": jnp.float32(0.5)}
GRADS = {"w": f32(0.1, -0.2, 0.3), "b": jnp.float32(-0.4)}


def start(**options):
    tx = optim.adam(**{"learning_rate": 0.1, **options})
    return tx, tx.init(PARAMS)


def test_first_adam_step_by_hand():
    # m = .1 g and v = .001 g^2, unbiased g and g^2: the step is .1 g / (abs(g) + eps).
    tx, state = start(eps=0.1)
    params, _, skipped = optim.apply(tx, GRADS, state, PARAMS)
    # g = .1: .1 * .1 / .2 = .05; -.2: -.0666667; .3: .075; -.4: -.08
    np.testing.assert_allclose(params["w"], [0.95, -2 + 0.0666667, 2.925], rtol=1e-5)
    np.testing.assert_allclose(params["b"], 0.58, rtol=1e-5)
    assert skipped == 0


def test_adam_matches_torch():
    torch = pytest.importorskip("torch")
    w = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    theirs = torch.optim.Adam([w], lr=0.01, eps=1e-5)
    tx = optim.adam(0.01, max_grad_norm=0.5)
    ours = f32(1, -2, 3)
    state = tx.init(ours)
    for step in range(5):
        target = np.float32(step)
        theirs.zero_grad()
        (((w - float(target)) ** 2).sum()).backward()
        torch.nn.utils.clip_grad_norm_([w], 0.5)
        theirs.step()
        ours, state, _ = optim.apply(tx, 2 * (ours - target), state, ours)
    np.testing.assert_allclose(ours, w.detach().numpy(), rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    # (3, 4) has norm 5; at most 1: (.6, .8). Seen in the first moment: .1 g.
    tx = optim.adam(0.1, max_grad_norm=1.0)
    params = {"a": f32(0), "b": f32(0)}
    _, state, _ = optim.apply(tx, {"a": f32(3), "b": f32(4)}, tx.init(params), params)
    mu = optax.tree.get(state, "mu")
    np.testing.assert_allclose((mu["a"][0], mu["b"][0]), (0.06, 0.08), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_bad_gradient_changes_nothing_and_is_counted(bad, max_grad_norm):
    tx, state = start(max_grad_norm=max_grad_norm)
    step = jax.jit(lambda g, s, p: optim.apply(tx, g, s, p))
    params, state, _ = step(GRADS, state, PARAMS)
    broken = {"w": GRADS["w"].at[1].set(bad), "b": GRADS["b"]}
    same, same_state, skipped = step(broken, state, params)
    assert skipped == 1
    assert skipped.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, (same, same_state), (params, state))
    # And it goes on as if nothing had happened.
    after, _, skipped = step(GRADS, same_state, same)
    expected, _, _ = step(GRADS, state, params)
    assert skipped == 0
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    assert (after["w"] != params["w"]).all()


def test_a_bad_update_is_refused_too():
    tx, state = start()
    state = optim.set_learning_rate(state, jnp.nan)
    params, _, skipped = optim.apply(tx, GRADS, state, PARAMS)
    assert skipped == 1
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)


def test_apply_serves_any_optax_optimiser():
    tx = optax.sgd(0.5)
    params, _, _ = optim.apply(tx, GRADS, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(params["w"], [0.95, -1.9, 2.85], rtol=1e-6)


def test_steps_don_t_retrace():
    tx, state = start()
    step = jax.jit(lambda g, s, p: optim.apply(tx, g, s, p), donate_argnums=(1, 2))
    params = jax.tree.map(jnp.copy, PARAMS)
    for rate in (0.1, 0.2):
        params, state, _ = step(GRADS, state, params)
        state = optim.set_learning_rate(state, rate)
    step(GRADS, state, params)
    assert step._cache_size() == 1


# --- the learning rate ----------------------------------------------------------------------------


def test_the_state_owns_the_learning_rate():
    tx, state = start()
    np.testing.assert_allclose(optim.learning_rate(state), 0.1)
    params, _, _ = optim.apply(tx, GRADS, state, PARAMS)
    half, _, _ = optim.apply(tx, GRADS, optim.set_learning_rate(state, 0.05), PARAMS)
    np.testing.assert_allclose(half["w"] - PARAMS["w"], (params["w"] - PARAMS["w"]) / 2, rtol=1e-4)
    np.testing.assert_allclose(optim.learning_rate(state), 0.1)  # the old state is untouched


def test_a_lowered_rate_survives_saving():
    # Tiny target: 1e-3 / 1.5^10 = 1.73e-5.
    tx, state = start(learning_rate=1e-3)
    for _ in range(10):
        rate = optim.adaptive_kl(optim.learning_rate(state), jnp.float32(1.0), 1e-6)
        state = optim.set_learning_rate(state, rate)
    leaves, structure = jax.tree.flatten(state)
    restored = jax.tree.unflatten(structure, [jnp.asarray(np.array(leaf)) for leaf in leaves])
    np.testing.assert_allclose(optim.learning_rate(restored), 1.734e-5, rtol=1e-3)
    fresh_tx, _ = start(learning_rate=1e-3)
    new, _, _ = optim.apply(fresh_tx, GRADS, restored, PARAMS)
    expected, _, _ = optim.apply(tx, GRADS, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, new, expected)


def test_a_schedule_counts_updates_but_not_skipped_ones():
    tx, state = start(learning_rate=optax.linear_schedule(1.0, 0.0, 4))
    rates = []
    for scale in (1.0, 1.0, np.nan, 1.0):
        grads = {"w": scale * GRADS["w"], "b": GRADS["b"]}
        _, state, _ = optim.apply(tx, grads, state, PARAMS)
        rates.append(float(optim.learning_rate(state)))
    assert rates == [1.0, 0.75, 0.75, 0.5]


def test_learning_rates_can_be_swept_by_vmap():
    def change(rate):
        tx = optim.adam(rate)
        params, _, _ = optim.apply(tx, GRADS, tx.init(PARAMS), PARAMS)
        return params["w"][0] - PARAMS["w"][0]

    np.testing.assert_allclose(jax.vmap(change)(f32(0.1, 0.2)), [-0.1, -0.2], rtol=1e-3)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.021, 1e-3 / 1.5),  # more than twice the target
        (0.02, 1e-3),  # exactly twice is still fine
        (0.01, 1e-3),
        (0.005, 1e-3),
        (0.0049, 1.5e-3),  # less than half
        (0.0, 1e-3),  # nothing changed: no information
        (-1e-4, 1e-3),
        (np.nan, 1e-3),
        (np.inf, 1e-3 / 1.5),
    ],
)
def test_adaptive_kl(kl, expected):
    rate = jax.jit(optim.adaptive_kl)(jnp.float32(1e-3), jnp.float32(kl), jnp.float32(0.01))
    np.testing.assert_allclose(rate, expected, rtol=1e-6)
    assert rate.dtype == jnp.float32


def test_adaptive_kl_stays_within_bounds():
    rate = jnp.float32(1e-3)
    for kl, limit in ((1.0, 2e-4), (1e-6, 5e-3)):
        for _ in range(20):
            rate = optim.adaptive_kl(rate, jnp.float32(kl), 0.01, bounds=(2e-4, 5e-3))
        np.testing.assert_allclose(rate, limit, rtol=1e-6)
