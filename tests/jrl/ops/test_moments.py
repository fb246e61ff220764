import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import moments
from jrl.types import Box, Discrete, Spec

update = jax.jit(moments.update)
normalize = jax.jit(moments.normalize)


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def batch(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_moments_by_hand():
    # Rows 1 and 3, then 8: mean 4, variance (9 + 1 + 16) / 3 = 26 / 3.
    seen = update(moments.init(f32(0)), f32(1, 3)[:, None])
    np.testing.assert_allclose((seen.mean[0], seen.var[0]), (2, 1))
    seen = update(seen, f32(8)[:, None])
    np.testing.assert_allclose((seen.mean[0], seen.var[0]), (4, 26 / 3), rtol=1e-6)
    assert seen.count == 3
    # (17 - 4) / sqrt(26 / 3) = 4.41589
    np.testing.assert_allclose(normalize(seen, f32(17)), [4.41589], rtol=1e-5)


def test_batches_of_any_shape_add_up():
    x = 3.0 + 2.0 * batch(0, 8, 5, 4)
    whole = update(moments.init(x[0, 0]), x)
    parts = moments.init(x[0, 0])
    for part in (x[:1], x[1:3, :2], x[1:3, 2:], x[3:]):
        parts = update(parts, part)
    assert parts.count == whole.count == 40
    np.testing.assert_allclose(whole.mean, x.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(whole.var, x.var((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-5)
    np.testing.assert_allclose(parts.var, whole.var, rtol=1e-5)


def test_nothing_seen_is_the_identity():
    fresh = moments.init(jnp.zeros(3))
    x = f32(-3, 0, 9.5)
    np.testing.assert_array_equal(normalize(fresh, x), x)
    np.testing.assert_array_equal(moments.denormalize(fresh, x), x)


def test_a_resumed_normaliser_moves_by_its_share():
    # 50 updates of 64, then 64 rows shifted by +100: the mean moves by 100 * 64 / (3200 + 64).
    seen = moments.init(jnp.zeros(3))
    for seed in range(50):
        seen = update(seen, batch(seed, 64, 3))
    leaves, structure = jax.tree.flatten(seen)
    restored = jax.tree.unflatten(structure, [jnp.asarray(np.array(leaf)) for leaf in leaves])
    assert restored.count == 3200
    later = update(restored, seen.mean + 100.0 + jnp.zeros((64, 3)))
    np.testing.assert_allclose(later.mean - seen.mean, 100 * 64 / 3264, rtol=1e-4)


# --- far from zero, or constant -------------------------------------------------------------------


@pytest.mark.parametrize("constants", [f32(5, 0, 1e6), f32(0.1, -7.3, 1234567)])
def test_constants_give_zero_and_the_clip_holds(constants):
    # The second kind is not what a float32 sum of 1000 of them, over 1000, gives back.
    seen = moments.init(jnp.zeros(3))
    x = jnp.broadcast_to(constants, (1000, 3))
    for _ in range(200):
        seen = update(seen, x)
    np.testing.assert_array_equal(normalize(seen, x), jnp.zeros_like(x))
    moved = normalize(seen, x + 0.1)
    assert jnp.isfinite(moved).all()
    assert (jnp.abs(moved) <= 10).all()
    np.testing.assert_allclose(moved[0, :2], [0.1, 0.1], rtol=1e-4)  # scale 1, not 1 / eps


@pytest.mark.parametrize("rows", [1, 7, 256, 8192])
@pytest.mark.parametrize("centre", [1e4, -1e4, 0.0])
def test_std_far_from_zero(rows, centre):
    seen = moments.init(jnp.zeros(2))
    for seed in range(100):
        seen = update(seen, centre + 0.1 * batch(seed, rows, 2))
    low, high = (0.08, 0.12) if rows == 1 else (0.09, 0.11)  # 100 samples know the std to 7 %
    assert (low <= jnp.sqrt(seen.var)).all()
    assert (jnp.sqrt(seen.var) <= high).all()
    score = normalize(seen, centre + 0.1 * batch(100, 1000, 2))
    np.testing.assert_allclose(score.std(0), 1, atol=0.2 if rows == 1 else 0.1)


def test_rounding_noise_is_not_a_signal():
    # Neighbouring float32 numbers at 1e6 are 1/16 apart: a dimension that flickers between two of
    # them varies no more than rounding does.
    x = jnp.where(jnp.arange(64) % 2, 1e6, 1e6 + 0.0625).astype(jnp.float32)[:, None]
    seen = update(moments.init(x[0]), x)
    assert (jnp.abs(normalize(seen, x)) < 0.1).all()


def test_result_is_clipped():
    seen = update(moments.init(jnp.zeros(1)), batch(0, 100, 1))
    np.testing.assert_array_equal(normalize(seen, f32(1e6, -1e6)[:, None]), [[10], [-10]])
    np.testing.assert_array_equal(normalize(seen, f32(1e6)[:, None], clip=5.0), [[5]])


def test_denormalize_undoes_normalize():
    x = 50.0 + 10.0 * batch(0, 64, 3)
    seen = update(moments.init(x[0]), x)
    np.testing.assert_allclose(moments.denormalize(seen, normalize(seen, x)), x, rtol=1e-5)


# --- garbage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 500, 999])
def test_a_bad_row_leaves_no_trace(row):
    x = 2.0 + batch(0, 1000, 3)
    fresh = moments.init(x[0])
    clean = update(fresh, jnp.delete(x, row, axis=0))
    gone = update(fresh, x.at[row].set(jnp.nan))  # the same sum, in the same order
    for bad in (np.nan, np.inf, -np.inf, 1e30, -1e20):
        seen = update(fresh, x.at[row, 1].set(bad))
        assert (seen.count, seen.skipped) == (999, 1)
        jax.tree.map(np.testing.assert_array_equal, (seen.mean, seen.var), (gone.mean, gone.var))
        np.testing.assert_allclose(seen.mean, clean.mean, rtol=1e-6)
        np.testing.assert_allclose(seen.var, clean.var, rtol=1e-6)


def test_bad_rows_one_after_the_other():
    x = batch(0, 1000, 3)
    seen = moments.init(x[0])
    for bad in (jnp.nan, jnp.inf, 1e30):
        seen = update(seen, x.at[7, 1].set(bad))
    assert (seen.count, seen.skipped) == (2997, 3)
    assert jnp.isfinite(normalize(seen, x)).all()


@pytest.mark.parametrize("start", ["fresh", "after a batch"])
def test_a_batch_of_only_bad_rows_changes_nothing(start):
    x = batch(0, 16, 3)
    before = moments.init(x[0])
    before = before if start == "fresh" else update(before, x)
    after = update(before, jnp.full((16, 3), jnp.nan))
    assert after.skipped == 16
    np.testing.assert_array_equal(after.mean, before.mean)
    np.testing.assert_array_equal(after.var, before.var)
    assert after.count == before.count


def test_numbers_below_the_limit_stay_finite():
    x = jnp.full((4096, 1), 9e14).at[::2].multiply(-1)
    seen = update(update(moments.init(x[0]), x), x)
    np.testing.assert_allclose(jnp.sqrt(seen.var), [9e14], rtol=1e-5)


# --- several devices -----------------------------------------------------------------------------


@jax.jit
def on_devices(seen, x):
    """Each device holds one row of x; the moments are replicated."""
    fn = lambda x: moments.update(seen, x, axis="data")
    return jax.vmap(fn, axis_name="data")(x)


def test_two_devices_share_one_normaliser():
    # N(0, 1) and N(10, 1): mean 5, variance 1 + 25 = 26; 100 updates of 2 * 1024 rows.
    seen = moments.init(jnp.zeros(1))
    for seed in range(100):
        both = on_devices(seen, batch(seed, 2, 1024, 1) + f32(0, 10)[:, None, None])
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf[0], leaf[1]), both)
        seen = jax.tree.map(lambda leaf: leaf[0], both)
    assert seen.count == 204_800
    np.testing.assert_allclose(seen.mean, [5.0], atol=0.02)
    np.testing.assert_allclose(seen.var, [26.0], atol=0.2)
    restored = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), seen)
    assert on_devices(restored, batch(0, 2, 1024, 1)).count[0] == 206_848


@pytest.mark.parametrize("centre", [0.0, 1e4])
def test_devices_together_equal_one(centre):
    x = centre + batch(0, 4, 50, 3)
    x = x.at[2, :, 1].set(jnp.nan).at[0, 0, 0].set(jnp.inf)  # one device has no good row at all
    start = update(moments.init(x[0, 0]), centre + 1.0 + batch(1, 20, 3))
    for seen in (start, moments.init(x[0, 0])):
        many = jax.tree.map(lambda leaf: leaf[0], on_devices(seen, x))
        one = update(seen, x.reshape(200, 3))
        assert many.count == one.count == seen.count + 149
        assert many.skipped == one.skipped == 51
        np.testing.assert_allclose(many.mean, one.mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(many.var, one.var, rtol=1e-2 if centre else 1e-5)


# --- trees, specs, dtypes, counting ---------------------------------------------------------------


def test_a_tree_with_images():
    obs = {
        "image": jnp.full((6, 4, 4, 3), 200, jnp.uint8),
        "joint": 5.0 + batch(0, 6, 2),
        "height": batch(1, 6),
    }
    seen = update(moments.init(jax.tree.map(lambda leaf: leaf[0], obs)), obs)
    assert seen.mean["image"] is None
    scores = normalize(seen, obs)
    np.testing.assert_array_equal(scores["image"], obs["image"])
    assert scores["image"].dtype == jnp.uint8
    np.testing.assert_allclose(scores["joint"].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(scores["height"].std(), 1, rtol=1e-5)
    back = moments.denormalize(seen, scores)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), back, obs)


def test_a_row_bad_in_one_leaf_is_dropped_from_all():
    obs = {"a": batch(0, 5, 2), "b": batch(1, 5, 3).at[4, 0].set(jnp.nan)}
    seen = update(moments.init(jax.tree.map(lambda leaf: leaf[0], obs)), obs)
    assert (seen.count, seen.skipped) == (4, 1)
    np.testing.assert_allclose(seen.mean["a"], obs["a"][:4].mean(0), rtol=1e-5)


def test_init_from_a_spec():
    spec = Spec(obs={"image": Box((4, 4, 3), "uint8"), "joint": Box((2,))}, action=Box((1,)))
    fresh = moments.init(spec.obs)
    obs = {"image": jnp.zeros((3, 4, 4, 3), jnp.uint8), "joint": jnp.ones((3, 2))}
    assert update(fresh, obs).count == 3
    assert moments.init(Box((7,))).mean.shape == (7,)
    tokens = moments.init(Discrete(5))
    x = jnp.arange(4, dtype=jnp.int32)
    np.testing.assert_array_equal(normalize(update(tokens, x), x), x)


def test_one_observation_without_a_batch_is_one_row():
    seen = update(moments.init(jnp.zeros(3)), f32(1, 2, 3))
    assert seen.count == 1
    np.testing.assert_array_equal(seen.mean, [1, 2, 3])


@pytest.mark.parametrize("shape", [(4, 6), (3, 4), (2,), ()])
def test_observations_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="made for"):
        moments.update(moments.init(jnp.zeros(3)), jnp.zeros(shape))


def test_half_precision_is_summed_in_float32():
    x = (1.0 + batch(0, 4096, 2)).astype(jnp.bfloat16)
    seen = update(moments.init(x[0]), x)
    assert seen.mean.dtype == seen.var.dtype == jnp.float32
    np.testing.assert_allclose(seen.mean, x.astype(jnp.float32).mean(0), rtol=1e-4)


def test_count_is_exact_far_beyond_float32():
    # float32 would not see one more row from 2^24 = 16,777,216 on.
    seen = update(moments.init(jnp.zeros(1)), batch(0, 8, 1))
    many = moments.Moments(jnp.int32(10**9), seen.mean, seen.var, seen.skipped)
    assert update(many, batch(1, 3, 1)).count == 10**9 + 3
    # The variance of a settled normaliser neither sinks nor grows.
    for seed in range(20):
        many = update(many, seen.mean + jnp.sqrt(seen.var) * batch(seed, 1000, 1))
    np.testing.assert_allclose(many.var, seen.var, rtol=1e-4)


def test_count_stops_instead_of_wrapping():
    seen = update(moments.init(jnp.zeros(1)), batch(0, 8, 1))
    full = moments.Moments(jnp.int32(2**31 - 3), seen.mean, seen.var, seen.skipped)
    later = update(update(full, batch(1, 64, 1)), batch(2, 64, 1))
    assert later.count == 2**31 - 1
    assert jnp.isfinite(later.var).all()


def test_update_keeps_types_and_can_be_donated():
    seen = moments.init({"a": jnp.zeros(3), "b": jnp.zeros(())})
    step = jax.jit(moments.update, donate_argnums=0)
    x = {"a": batch(0, 4, 3), "b": batch(1, 4)}
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), seen)
    for _ in range(3):
        seen = step(seen, x)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), seen) == shapes
    assert step._cache_size() == 1


def test_statistics_of_raw_observations_settle():
    # Obs ~ N(100, 5): after 20 updates the mean is within 100 +- 1.
    seen = moments.init(jnp.zeros(4))
    for seed in range(20):
        seen = update(seen, 100.0 + 5.0 * batch(seed, 128, 4))
    assert (jnp.abs(seen.mean - 100.0) < 1.0).all()
    np.testing.assert_allclose(jnp.sqrt(seen.var), 5.0, rtol=0.1)
