import itertools
import json
import os
import subprocess
import sys
import warnings
import zlib

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
    back = checkpoint.restore(tmp_path, 7, state(0)).state
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
        "bytes": jnp.arange(256, dtype=jnp.uint8),
        "scalar": jnp.float32(1 / 3),
        "flag": jnp.asarray(True),
        "empty": jnp.zeros((0, 3), jnp.int32),
        "no_keys": jax.random.split(jax.random.key(5), 0),
        "number": np.float32(2.5),
        "numpy": np.arange(3, dtype=np.float64),
        "nothing": ((), None, {}),
    }
    checkpoint.save(tmp_path, 1, tree, {})
    back = checkpoint.restore(tmp_path, 1, tree).state
    same(back, tree)
    assert back["rbg"].dtype == tree["rbg"].dtype != back["threefry"].dtype
    assert jax.random.uniform(back["rbg"]) == jax.random.uniform(tree["rbg"])
    ours = {"numpy": np.zeros(3), "number": np.float32(0)}
    for name, leaf in back.items():
        assert isinstance(leaf, np.ndarray if name in ours else jax.Array | tuple), name
    shapes = jax.eval_shape(lambda: {k: v for k, v in tree.items() if k not in ours})
    same(checkpoint.restore(tmp_path, 1, shapes | ours).state, tree)


def test_a_state_without_a_single_number(tmp_path):
    tree = {"x": jnp.zeros(0), "y": ()}
    checkpoint.save(tmp_path, 1, tree, {})
    same(checkpoint.restore(tmp_path, 1, tree).state, tree)


def test_two_leaves_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"two leaves are called a\.b"):
        checkpoint.save(tmp_path, 1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.ones(1)}, {})
    assert list(tmp_path.iterdir()) == []


def test_any_number_of_devices_reads_it(tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    one = {"x": jnp.arange(8.0), "keys": jax.random.split(jax.random.key(0), 8)}
    two = jax.device_put(one, spread)
    for saved, like in ((two, one), (one, two)):
        checkpoint.save(tmp_path, 1, saved, {})
        back = checkpoint.restore(tmp_path, 1, like).state
        same(back, one)
        assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, like)


SPREAD = """
import sys
import jax, numpy as np
from jrl import checkpoint
mesh = jax.make_mesh((int(sys.argv[2]),), ("data",))
spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
keys = jax.random.wrap_key_data(jax.device_put(np.arange(16, dtype=np.uint32).reshape(8, 2)))
state = jax.device_put({"x": np.arange(8, dtype=np.float32) / 3, "keys": keys}, spread)
assert all(x.devices() == set(jax.devices()) for x in jax.tree.leaves(state))
if jax.device_count() == 2:
    checkpoint.save(sys.argv[1], 1, state, {})
else:
    back = checkpoint.restore(sys.argv[1], None, state).state
    assert all(x.devices() == set(jax.devices()) for x in jax.tree.leaves(back))
    assert np.array_equal(back["x"], state["x"])
    assert np.array_equal(*(jax.random.key_data(tree["keys"]) for tree in (back, state)))
"""


def test_another_process_with_fewer_devices_reads_it(tmp_path):
    for devices in ("2", "1"):
        flag = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, "-c", SPREAD, str(tmp_path), devices]
        subprocess.run(command, env=os.environ | {"XLA_FLAGS": flag}, check=True)


def test_in_part_reads_the_leaves_that_are_asked_for(tmp_path):
    checkpoint.save(tmp_path, 1, {"a": jnp.arange(3), "b": jax.random.key(5), "c": jnp.ones(2)}, {})
    like = {"b": jax.random.key(0)}
    with pytest.raises(checkpoint.MisfitError, match=r"a: int32\[3\] in the checkpoint, missing"):
        checkpoint.restore(tmp_path, 1, like)
    same(checkpoint.restore(tmp_path, 1, like, partial=True).state, {"b": jax.random.key(5)})
    with pytest.raises(checkpoint.MisfitError, match=r"d: missing in the checkpoint"):
        checkpoint.restore(tmp_path, 1, like | {"d": jnp.ones(1)}, partial=True)


def test_the_latest(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (9, 10, 2):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {"step": step})
    assert checkpoint.latest(tmp_path) == 10
    assert checkpoint.restore(tmp_path, None, {"x": jnp.float32(0)}).state["x"] == 10
    assert checkpoint.meta(tmp_path)["step"] == 10
    assert checkpoint.meta(tmp_path, 2)["step"] == 2


def test_meta_tells_the_versions(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros((2, 3))}, {"config": {"seed": 1}})
    meta = json.loads((tmp_path / "1" / "meta.json").read_text())
    assert meta["config"] == {"seed": 1}
    assert meta["versions"]["jax"] == jax.__version__
    assert meta["format"] == checkpoint.FORMAT == 2
    # 24 bytes of zeros
    assert meta["leaves"] == {
        "x": {"kind": "float32[2,3]", "bytes": 24, "crc32": zlib.crc32(bytes(24))}
    }
    (name,) = [name for name in meta["files"] if name.endswith("_METADATA") and "CHECK" not in name]
    stored = (tmp_path / "1" / name).read_bytes()
    assert meta["files"][name] == [len(stored), zlib.crc32(stored)]


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path, 5, {"x": jnp.float32(value)}, {})
    assert checkpoint.restore(tmp_path, 5, {"x": jnp.float32(0)}).state["x"] == 2.0
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
    for read in (lambda folder, like: checkpoint.restore(folder, None, like),):
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            read(tmp_path, {})
    checkpoint.save(tmp_path, 3, {"x": jnp.zeros(1)}, {})
    with pytest.raises(FileNotFoundError, match=r"of step 4 .* the latest is 3"):
        checkpoint.restore(tmp_path, 4, {"x": jnp.zeros(1)})


def test_newest_refuses_another_network_instead_of_looking_for_an_older_one(tmp_path):
    checkpoint.save(tmp_path, 1, network(), {})
    checkpoint.save(tmp_path, 2, network(hidden=128), {"env_steps": 20})
    found = checkpoint.restore(tmp_path, None, network(hidden=128))
    assert (found.step, found.meta["env_steps"], found.notes) == (2, 20, [])
    with pytest.raises(ValueError, match=r"2 doesn't fit this program") as error:
        checkpoint.restore(tmp_path, None, network())
    assert not isinstance(error.value, checkpoint.DamagedError)


@pytest.mark.parametrize(
    ("keep", "left"), [(0, "1 2 3 4 9"), (1, "4 9"), (2, "3 4 9"), (9, "1 2 3 4 9")]
)
def test_keep(tmp_path, keep, left):
    for step in (9, 1, 2, 3):  # 9 is higher than what is saved last, and stays
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {})
    (tmp_path / "2.part").mkdir()
    (tmp_path / "notes.part").mkdir()  # somebody else's
    checkpoint.save(tmp_path, 4, {"x": jnp.float32(4)}, {}, keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left.split(), "notes.part"]
    assert checkpoint.restore(tmp_path, 4, {"x": jnp.float32(0)}).state["x"] == 4


def test_nothing_is_removed_before_the_new_one_is_there(tmp_path, monkeypatch):
    import orbax.checkpoint

    checkpoint.save(tmp_path, 1, {"x": jnp.ones(1)}, {})

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(orbax.checkpoint.Checkpointer, "save", full)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left .* needs about 4e-06 MB"):
            checkpoint.save(tmp_path, step, {"x": jnp.zeros(1)}, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoint.restore(tmp_path, None, {"x": jnp.zeros(1)}).state["x"] == 1


def save_as_format_1(folder, tree):
    """As jrl wrote it before there were checksums: the arrays as they are, and no sums."""
    import orbax.checkpoint

    leaves = {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in tree.items()}
    about = {"env_steps": 10, "format": 1, "versions": {"jrl": "0.0"}, "leaves": leaves}
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps(about, indent=1))
    with warnings.catch_warnings(), orbax.checkpoint.StandardCheckpointer() as checkpointer:
        warnings.simplefilter("ignore")
        checkpointer.save(folder / "state", {name: x for name, x in tree.items() if x.size})


def test_format_1_is_read_and_said_to_have_no_checksums(tmp_path):
    tree = {
        "x": jnp.arange(3.0),
        "key": jax.random.key(1),
        "rbg": jax.random.key(2, impl="rbg"),
        "empty": jnp.zeros((0, 2)),
        "numpy": np.arange(2.0),
    }
    save_as_format_1(tmp_path / "7", tree)
    found = checkpoint.restore(tmp_path, None, tree)
    same(found.state, tree)
    assert (found.step, found.meta["env_steps"], found.meta["format"]) == (7, 10, 1)
    assert len(found.notes) == 1
    assert "7 was written without checksums" in found.notes[0]
    with pytest.raises(ValueError, match=r"x: float32\[3\] in the checkpoint"):
        checkpoint.restore(tmp_path, None, tree | {"x": jnp.zeros(4)})
    (tmp_path / "7" / "state" / "_METADATA").write_text("{")
    with pytest.raises(checkpoint.DamagedError, match=r"7 is damaged \(state: "):
        checkpoint.restore(tmp_path, 7, tree)


def test_the_order_of_leaves_may_change(tmp_path):
    @record
    class One:
        a: jax.Array
        b: jax.Array

    @record
    class Other:
        b: jax.Array
        a: jax.Array

    checkpoint.save(tmp_path, 1, One(a=jnp.zeros(2), b=jnp.ones(3)), {})
    back = checkpoint.restore(tmp_path, 1, Other(a=jnp.ones(2), b=jnp.zeros(3))).state
    same(back, Other(a=jnp.zeros(2), b=jnp.ones(3)))


def test_a_newer_format_is_refused(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros(1)}, {})
    path = tmp_path / "1" / "meta.json"
    about = json.loads(path.read_text()) | {"format": 3}
    del about["crc32"]
    about["crc32"] = zlib.crc32(json.dumps(about).encode())
    path.write_text(json.dumps(about))
    for read in (
        lambda folder, like: checkpoint.restore(folder, None, like),
        lambda folder, like: checkpoint.meta(folder),
    ):
        with pytest.raises(ValueError, match=r"has format 3.* reads up to 2: a newer jrl wrote it"):
            read(tmp_path, {"x": jnp.zeros(1)})


def test_other_warnings_stay_errors(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros(1)}, {})
    with pytest.raises(UserWarning):
        warnings.warn("after a save", stacklevel=1)
