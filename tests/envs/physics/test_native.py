"""The C engine inside jitted code, against a plain mj_step loop."""

import pathlib
import subprocess
import sys
import threading
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mujoco.batch import Batch

from jrl.envs import physics
from jrl.envs.physics import native

ASSETS = pathlib.Path(find_spec("gymnasium").origin).parent / "envs/mujoco/assets"
HOPPER = mujoco.MjModel.from_xml_path(str(ASSETS / "hopper.xml"))
HUMANOID = mujoco.MjModel.from_xml_path(str(ASSETS / "humanoid.xml"))
# time, positions, velocities, activations, warm start: what comes before the inputs
ROW = mujoco.mjtState.mjSTATE_INTEGRATION.value & (mujoco.mjtState.mjSTATE_CTRL.value - 1)


def make(model=HOPPER, **options):
    return physics.make(model, **{"substeps": 4, "backend": "native", **options})


def bits(data):
    """The state rows as the engine sees them."""
    return np.asarray(data.state).view(np.float64)


def controls(model, *lead, seed=0):
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (*lead, model.nu)).astype(np.float32)


def starts(phys, n, seed=1):
    """Different start states, low enough to touch the ground soon."""
    model = phys.model
    noise = np.random.default_rng(seed).uniform(-0.02, 0.02, (n, model.nq)).astype(np.float32)
    qpos = model.qpos0.astype(np.float32) + noise
    return jax.jit(jax.vmap(phys.reset, (None, 0, 0)))(phys.params, qpos, np.zeros((n, model.nv)))


def plain(model, row, ctrls, substeps=4):
    """Reference: an ordinary MjData, loaded with a row and stepped."""
    data = mujoco.MjData(model)
    mujoco.mj_setState(model, data, row, ROW)
    for ctrl in ctrls:
        data.ctrl[:] = ctrl
        mujoco.mj_step(model, data, substeps)
    return data


def row_of(model, data):
    row = np.empty(mujoco.mj_stateSize(model, ROW))
    mujoco.mj_getState(model, data, row, ROW)
    return row


def scanned(phys):
    """Jitted `(params, data, ctrls [T, n, nu]) -> data` over many robots."""
    step = jax.vmap(phys.step, (None, 0, 0))
    return jax.jit(lambda p, d, c: jax.lax.scan(lambda d, c: (step(p, d, c), None), d, c)[0])


def test_equals_a_plain_loop_bit_for_bit():
    phys = make()
    data, ctrls = starts(phys, 3), controls(HOPPER, 60, 3)
    after = scanned(phys)({}, data, ctrls)
    for i in range(3):
        reference = plain(HOPPER, bits(data)[i], ctrls[:, i])
        assert reference.ncon > 0
        np.testing.assert_array_equal(bits(after)[i], row_of(HOPPER, reference))
        np.testing.assert_array_equal(after.qpos[i], reference.qpos.astype(np.float32))
        np.testing.assert_array_equal(after.qvel[i], reference.qvel.astype(np.float32))
    assert phys.dt == 4 * HOPPER.opt.timestep


def test_reset_is_a_rest_state_with_these_positions():
    phys = make(fields=("xpos",))
    qpos, qvel = HOPPER.qpos0 + 0.1, np.linspace(-1, 1, HOPPER.nv)
    data = phys.reset({}, qpos, qvel)
    reference = mujoco.MjData(HOPPER)
    reference.qpos[:], reference.qvel[:] = np.float32(qpos), np.float32(qvel)
    mujoco.mj_forward(HOPPER, reference)
    np.testing.assert_array_equal(bits(data), row_of(HOPPER, reference))
    np.testing.assert_array_equal(data.fields["xpos"], reference.xpos.astype(np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (3, 1, 2)])
def test_any_nesting_of_vmap_is_the_same_as_one_robot_at_a_time(shape):
    phys = make(fields=("xpos", "ncon"))
    n = int(np.prod(shape))
    data, ctrl = starts(phys, 6), controls(HOPPER, 6)
    robots = [jax.tree.map(lambda x, i=i: x[i], data) for i in range(n)]
    want = [phys.step({}, robot, c) for robot, c in zip(robots, ctrl)]
    want = jax.tree.map(lambda *x: jnp.stack(x).reshape(*shape, *x[0].shape), *want)
    step, reshape = phys.step, lambda x: x[:n].reshape(*shape, *x.shape[1:])
    for _ in shape:
        step = jax.vmap(step, (None, 0, 0))
    got = jax.jit(step)({}, jax.tree.map(reshape, data), reshape(ctrl))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got.fields["ncon"].shape == shape


@pytest.mark.parametrize("fields", [("cvel", "xpos"), ("qfrc_actuator", "qacc"), ("cfrc_ext",)])
def test_fields_are_those_of_the_state_they_come_with(fields):
    phys = make(fields=fields)
    data, ctrls = starts(phys, 2), controls(HOPPER, 40, 2)
    after = scanned(phys)({}, data, ctrls)
    reference = plain(HOPPER, bits(data)[1], ctrls[:, 1])
    np.testing.assert_array_equal(after.qpos[1], reference.qpos.astype(np.float32))
    mujoco.mj_forward(HOPPER, reference)
    mujoco.mj_rnePostConstraint(HOPPER, reference)
    for name in fields:
        want = getattr(reference, name)
        assert np.abs(want).max() > 0.01
        np.testing.assert_array_equal(after.fields[name][1], want.astype(np.float32))


def test_lagged_fields_and_contact_forces_are_gymnasiums():
    fields = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext", "subtree_com")
    phys = make(HUMANOID, substeps=5, fields=fields, lagged=True)
    data = starts(phys, 3)
    assert not data.fields["cfrc_ext"].any()  # mj_forward after a reset doesn't compute it
    ctrls = controls(HUMANOID, 30, 3)
    after = scanned(phys)({}, data, ctrls)
    for i in range(3):
        reference = plain(HUMANOID, bits(data)[i], ctrls[:, i], 5)
        mujoco.mj_rnePostConstraint(HUMANOID, reference)
        assert np.abs(reference.cfrc_ext).max() > 1
        np.testing.assert_array_equal(bits(after)[i], row_of(HUMANOID, reference))
        for name in fields:
            want = getattr(reference, name).astype(np.float32)
            np.testing.assert_array_equal(after.fields[name][i], want)


def heavier(model, factor):
    """The model with other masses, its constants derived anew."""
    spec = mujoco.MjSpec.from_file(str(ASSETS / "hopper.xml"))
    other = spec.compile()
    other.body_mass[:] = model.body_mass * factor
    mujoco.mj_setConst(other, mujoco.MjData(other))
    return other


@pytest.mark.parametrize("fields", [("xpos",), ("cfrc_ext",)])
def test_each_robot_has_its_own_masses(fields):
    # factors are powers of two, so float32 parameters are exact enough to compare bit for bit
    factors = np.float32([0.5, 1, 2])
    phys = make(varying=("body_mass",), fields=fields)
    params = {"body_mass": factors[:, None] * np.asarray(phys.params["body_mass"])}
    ctrls = controls(HOPPER, 30, 3)
    qpos = np.tile(HOPPER.qpos0, (3, 1))
    data = jax.vmap(phys.reset)(params, qpos, np.zeros((3, HOPPER.nv)))
    step = jax.vmap(phys.step)
    for ctrl in ctrls:
        data = step(params, data, ctrl)
    for i, factor in enumerate(factors):
        exact = HOPPER.body_mass if factor == 1 else np.float64(params["body_mass"][i])
        model = heavier(HOPPER, 1)
        model.body_mass[:] = exact
        mujoco.mj_setConst(model, mujoco.MjData(model))
        single = make(model, fields=fields)
        alone = single.reset({}, HOPPER.qpos0, np.zeros(HOPPER.nv))
        for ctrl in ctrls[:, i]:
            alone = single.step({}, alone, ctrl)
        np.testing.assert_array_equal(bits(data)[i], bits(alone))
    assert abs(data.qpos[0, 1] - data.qpos[2, 1]) > 1e-4


def test_varying_friction_is_the_same_with_contact_forces_as_without():
    factors, ctrls = np.float32([0.1, 1]), controls(HOPPER, 60, 2)
    ends = []
    for fields in [("xpos",), ("cfrc_ext",)]:
        phys = make(varying=("geom_friction", "opt.viscosity"), fields=fields)
        friction = factors[:, None, None] * np.asarray(phys.params["geom_friction"])
        params = {"geom_friction": friction, "opt.viscosity": np.float32([0, 0.5])}
        data, step = starts(make(), 2), jax.jit(jax.vmap(phys.step))
        for ctrl in ctrls:
            data = step(params, data, ctrl)
        ends.append(bits(data))
    np.testing.assert_array_equal(*ends)
    slippery = scanned(make())({}, starts(make(), 2), ctrls)
    assert np.abs(bits(slippery) - ends[0]).max(axis=1).min() > 1e-3


def test_nominal_params_change_nothing():
    ctrls = controls(HOPPER, 20, 2)
    bare, phys = make(), make(varying=("body_mass", "opt.gravity", "geom_friction"))
    data = starts(bare, 2)
    want = scanned(bare)({}, data, ctrls)
    np.testing.assert_array_equal(bits(scanned(phys)(phys.params, data, ctrls)), bits(want))


def test_a_call_leaves_nothing_behind(monkeypatch):
    # the same robot gets the same result whoever used the engine before
    calls = []
    original = Batch.set_const
    monkeypatch.setattr(Batch, "set_const", lambda self: (calls.append(1), original(self))[1])
    phys = make(varying=("body_mass",))
    data, ctrl = starts(phys, 2), controls(HOPPER, 2)
    step = jax.jit(jax.vmap(phys.step, (None, 0, 0)))
    first = step(phys.params, data, ctrl)
    light = {"body_mass": phys.params["body_mass"] / 2}
    assert not np.array_equal(step(light, data, ctrl).qvel, first.qvel)
    again = step(phys.params, data, ctrl)
    np.testing.assert_array_equal(bits(again), bits(first))
    before = len(calls)
    step(phys.params, data, ctrl).qpos.block_until_ready()
    assert len(calls) == before  # nothing changed: nothing to derive
    step(light, data, ctrl).qpos.block_until_ready()
    assert len(calls) == before + 1


def test_reset_only_where_wanted(monkeypatch):
    ids = []
    original = native._Worker.run
    spy = lambda self, call, *args, **kw: (ids.append(args), original(self, call, *args, **kw))[1]
    monkeypatch.setattr(native._Worker, "run", spy)
    phys = make(fields=("xpos",))
    data = starts(phys, 4)
    reset = jax.jit(jax.vmap(phys.reset, (None, 0, None, 0)))
    where = np.array([True, False, True, False])
    ids.clear()
    got = jax.block_until_ready(reset({}, data.qpos, np.zeros(HOPPER.nv), where))
    assert [list(args[0]) for args in ids] == [[0, 2]]
    for i in (0, 2):
        np.testing.assert_array_equal(bits(got)[i], bits(data)[i])
    assert not got.failed.any()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    ids.clear()
    got = jax.block_until_ready(reset({}, data.qpos, np.zeros(HOPPER.nv), ~(where | True)))
    assert not ids  # nobody wants a reset: the engine isn't called
    assert not got.failed.any()


def test_reset_under_two_vmaps_with_a_mask_shared_by_one():
    phys = make()
    data = starts(phys, 6)
    qpos = np.asarray(data.qpos).reshape(2, 3, -1)
    inner = jax.vmap(phys.reset, (None, 0, None, None))
    outer = jax.jit(jax.vmap(inner, (None, 0, None, 0)))
    got = outer({}, qpos, np.zeros(HOPPER.nv), np.array([False, True]))
    np.testing.assert_array_equal(bits(got)[1], bits(data).reshape(2, 3, -1)[1])
    everywhere = jax.vmap(phys.reset, (None, None, None, 0))
    same = everywhere({}, qpos[0, 0], np.zeros(HOPPER.nv), np.array([True, True]))
    np.testing.assert_array_equal(bits(same), bits(data)[[0, 0]])


@pytest.mark.parametrize("fields", [("xpos",), ("cfrc_ext",)])
@pytest.mark.parametrize("bad", ["nan velocity", "huge velocity", "nan control"])
def test_a_broken_robot_fails_alone(bad, fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    phys = make(fields=fields)
    data, ctrl = starts(phys, 4), controls(HOPPER, 4)
    step = jax.jit(jax.vmap(phys.step, (None, 0, 0)))
    want = step({}, data, ctrl)
    rows, spoiled = bits(data).copy(), ctrl.copy()
    at = 1 + HOPPER.nq + 3  # after time, qpos and the root: the first hinge
    if bad == "nan control":
        spoiled[2, 0] = np.nan
    else:
        rows[2, at] = np.nan if bad == "nan velocity" else 1e9
    got = step({}, physics.Data(rows.view(np.uint32), *list(vars(data).values())[1:]), spoiled)
    np.testing.assert_array_equal(got.failed, [False, False, True, False])
    assert np.isfinite(bits(got)).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    others = np.array([0, 1, 3])
    same = lambda a, b: np.testing.assert_array_equal(a[others], b[others])
    jax.tree.map(same, got, want)
    onwards = step({}, got, ctrl)
    assert not onwards.failed.any()
    assert not list(tmp_path.iterdir())  # no log file


def test_an_engine_error_fails_one_robot():
    # six balls that all touch need more memory than this model has: mj_stackAlloc raises
    ball = '<body pos="{} 0 1"><freejoint/><geom size=".2"/></body>'
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><size memory="12K"/><worldbody><geom type="plane" size="5 5 1"/>'
        + "".join(map(ball.format, range(6)))
        + "</worldbody></mujoco>"
    )
    apart = model.qpos0
    touching = apart.reshape(6, 7) * [0.1, 1, 0.1, 1, 1, 1, 1]
    for fields in [("xpos",), ("cacc",)]:
        phys = make(model, fields=fields, lagged=True)
        qpos = np.stack([apart, apart, apart])
        data = jax.vmap(phys.reset, (None, 0, None))({}, qpos, np.zeros(model.nv))
        assert not data.failed.any()
        rows = bits(data).copy()
        rows[1, 1 : 1 + model.nq] = touching.ravel()
        spoiled = physics.Data(rows.view(np.uint32), *list(vars(data).values())[1:])
        got = jax.vmap(phys.step, (None, 0, None))({}, spoiled, np.zeros(0))
        np.testing.assert_array_equal(got.failed, [False, True, False])
        np.testing.assert_array_equal(got.qpos[1], model.qpos0.astype(np.float32))
        want = jax.vmap(phys.step, (None, 0, None))({}, data, np.zeros(0))
        np.testing.assert_array_equal(bits(got)[[0, 2]], bits(want)[[0, 2]])


def test_calls_in_turn_share_one_engine_batch(monkeypatch):
    made = []
    original = native._Worker.__init__
    spy = lambda self, engine, rows: (made.append(rows), original(self, engine, rows))[1]
    monkeypatch.setattr(native._Worker, "__init__", spy)
    phys = make()
    data = starts(phys, 5)
    jax.block_until_ready(scanned(phys)({}, data, controls(HOPPER, 20, 5)))
    assert made == [1, 5]  # one to look at the model, one for the calls


def test_shards_run_at_the_same_time_and_change_nothing(monkeypatch):
    phys = make(fields=("xpos",))
    data, ctrl = starts(phys, 6), controls(HOPPER, 6)
    step = jax.vmap(phys.step, (None, 0, 0))
    want = jax.jit(step)({}, data, ctrl)
    both = threading.Barrier(2)  # passes only while two calls are inside together
    original = native._Worker.run

    def meet(self, *args, **kwargs):
        both.wait(timeout=60)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(native._Worker, "run", meet)
    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    spec = PartitionSpec("data")
    sharded = jax.jit(
        jax.shard_map(lambda d, c: step({}, d, c), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    )
    got = jax.block_until_ready(sharded(data, ctrl))
    assert not both.broken
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_reset_inside_shards():
    phys = make(fields=("xpos",))
    data, where = starts(phys, 4), np.array([True, False, False, False])
    reset = jax.vmap(phys.reset, (None, 0, None, 0))
    mesh, spec = Mesh(np.array(jax.devices()[:2]), "data"), PartitionSpec("data")
    inside = lambda q, w: reset({}, q, np.zeros(HOPPER.nv), w)
    sharded = jax.shard_map(inside, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    got = jax.block_until_ready(jax.jit(sharded)(data.qpos, where))
    np.testing.assert_array_equal(bits(got)[0], bits(data)[0])
    assert not np.asarray(got.qpos[2:]).any()  # the second shard wanted none: zeros


def test_jit_compiles_once():
    phys = make(varying=("body_mass",), fields=("xpos",))
    step = jax.jit(phys.step)
    data = phys.reset(phys.params, HOPPER.qpos0, np.zeros(HOPPER.nv))
    for _ in range(3):
        data = step(phys.params, data, np.zeros(HOPPER.nu, np.float32))
    assert step._cache_size() == 1
    assert not any(x.weak_type for x in jax.tree.leaves(phys.params))


def test_names_nobody_knows():
    with pytest.raises(ValueError, match="Did you mean 'native'"):
        make(backend="nativ")
    with pytest.raises(ValueError, match="Did you mean 'xpos'"):
        make(fields=("xposs",))
    with pytest.raises(ValueError, match="Did you mean 'body_mass'"):
        make(varying=("body_masses",))
    with pytest.raises(ValueError, match="only real-valued"):
        make(varying=("body_parentid",))
    with pytest.raises(ValueError, match="substeps must be greater than 0"):
        make(substeps=0)


def test_the_cpu_gets_the_c_engine():
    assert physics.make(HOPPER).backend == "native"


def test_importing_physics_imports_no_engine():
    code = "import sys, jrl.envs.physics; sys.exit('mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
