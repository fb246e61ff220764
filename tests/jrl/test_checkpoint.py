import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl import checkpoint
from jrl.types import record


@record
class State:
    params: dict
    opt: tuple
    key: jax.Array
    updates: jax.Array
    carry: tuple = ()


def network(features=48, hidden=256, layers=2):
    sizes = [features, *[hidden] * (layers - 1), 1]
    return {
        f"layer{i}": {"kernel": jnp.full((a, b), 0.5 + i), "bias": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def state(seed=0, **sizes):
    params = network(**sizes)
    return State(params, optax.adam(1e-3).init(params), jax.random.key(seed), jnp.int32(seed))


def numbers(tree):
    """Leaves as NumPy, keys as what they are made of."""
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(numbers(a), numbers(b)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def test_round_trip(tmp_path):
    checkpoint.save(tmp_path, 7, state(7), {"env_steps": 70})
    back = checkpoint.restore(tmp_path, 7, state(0))
    same(back, state(7))
    assert isinstance(back, State)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(back))
    # the next random number is the one that would have come
    assert jax.random.uniform(back.key) == jax.random.uniform(jax.random.key(7))


def test_every_kind_of_leaf(tmp_path):
    tree = {
        "threefry": jax.random.key(1),
        "rbg": jax.random.key(2, impl="rbg"),
        "keys": jax.random.split(jax.random.key(3), 4),
        "old_key": jax.random.PRNGKey(4),
        "bfloat16": jnp.asarray([1.5, 2.5], jnp.bfloat16),
        "bits": jnp.asarray([0, 2**32 - 1], jnp.uint32),
        "flags": jnp.asarray([True, False]),
        "nan": jnp.asarray([jnp.nan, jnp.inf]),
        "empty": jnp.zeros((0, 3), jnp.int32),
        "numpy": np.arange(3, dtype=np.float64),
        "nothing": ((), None, {}),
    }
    checkpoint.save(tmp_path, 1, tree, {})
    back = checkpoint.restore(tmp_path, 1, tree)
    same(back, tree)
    assert back["rbg"].dtype == tree["rbg"].dtype != back["threefry"].dtype
    assert type(back["numpy"]) is np.ndarray
    shapes = jax.eval_shape(lambda: {k: v for k, v in tree.items() if k != "numpy"})
    same(checkpoint.restore(tmp_path, 1, shapes | {"numpy": np.zeros(3)}), tree)


def test_any_number_of_devices_reads_it(tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    one = {"x": jnp.arange(8.0), "keys": jax.random.split(jax.random.key(0), 8)}
    two = jax.device_put(one, spread)
    for saved, like in ((two, one), (one, two)):
        checkpoint.save(tmp_path, 1, saved, {})
        back = checkpoint.restore(tmp_path, 1, like)
        same(back, one)
        assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, like)


def test_the_latest(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (9, 10, 2):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {"step": step})
    assert checkpoint.latest(tmp_path) == 10
    assert checkpoint.restore(tmp_path, None, {"x": jnp.float32(0)})["x"] == 10
    assert checkpoint.meta(tmp_path)["step"] == 10
    assert checkpoint.meta(tmp_path, 2)["step"] == 2


def test_meta_tells_the_versions(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros((2, 3))}, {"config": {"seed": 1}})
    meta = json.loads((tmp_path / "1" / "meta.json").read_text())
    assert meta["config"] == {"seed": 1}
    assert meta["versions"]["jax"] == jax.__version__
    assert (meta["format"], meta["leaves"]) == (1, {"x": "float32[2,3]"})


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path, 5, {"x": jnp.float32(value)}, {})
    assert checkpoint.restore(tmp_path, 5, {"x": jnp.float32(0)})["x"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert sorted(path.name for path in (tmp_path / "5").iterdir()) == ["meta.json", "state"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"features": 52}, ["layer0.kernel: float32[48,256] in", "float32[52,256] here"]),
        ({"hidden": 128}, ["layer0.bias: float32[256] in", "float32[128] here"]),
        ({"layers": 3}, ["layer2.kernel: missing in the checkpoint, float32[256,1] here"]),
        ({"layers": 1}, ["layer1.kernel: float32[256,1] in the checkpoint, missing here"]),
    ],
)
def test_another_network_is_refused(tmp_path, sizes, words):
    checkpoint.save(tmp_path, 1, network(), {})
    with pytest.raises(ValueError, match="doesn't fit this program") as error:
        checkpoint.restore(tmp_path, 1, network(**sizes))
    for word in words:
        assert word in str(error.value)


def test_another_dtype_is_refused(tmp_path):
    tree = {"a": jnp.zeros(2), "key": jax.random.key(0)}
    checkpoint.save(tmp_path, 1, tree, {})
    with pytest.raises(ValueError, match=r"a: float32\[2\] in the checkpoint, int32\[2\] here"):
        checkpoint.restore(tmp_path, 1, tree | {"a": jnp.zeros(2, jnp.int32)})
    with pytest.raises(ValueError, match="key: key<fry>"):
        checkpoint.restore(tmp_path, 1, tree | {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(ValueError, match="key: key<fry>"):
        checkpoint.restore(tmp_path, 1, tree | {"key": jax.random.PRNGKey(0)})


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        checkpoint.restore(tmp_path, None, {})
    checkpoint.save(tmp_path, 3, {"x": jnp.zeros(1)}, {})
    with pytest.raises(FileNotFoundError, match=r"of step 4 .* the latest is 3"):
        checkpoint.restore(tmp_path, 4, {"x": jnp.zeros(1)})


def test_an_interrupted_save_does_not_count(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"x": jnp.ones(1)}, {})

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint.StandardCheckpointer.save", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path, 2, {"x": jnp.zeros(1)}, {})
    assert checkpoint.latest(tmp_path) == 1
    assert checkpoint.restore(tmp_path, None, {"x": jnp.zeros(1)})["x"] == 1
    checkpoint.save(tmp_path, 2, {"x": jnp.full(1, 2.0)}, {})  # over what was left behind
    assert checkpoint.restore(tmp_path, None, {"x": jnp.zeros(1)})["x"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "file", 1, {"x": jnp.zeros(1)}, {})


def test_other_warnings_stay_errors(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros(1)}, {})
    with pytest.raises(UserWarning):
        warnings.warn("after a save", stacklevel=1)
