"""MJX against the C engine, and what it refuses."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from jrl.envs import physics
from jrl.envs.physics import mjx

ASSETS = pathlib.Path(importlib.util.find_spec("gymnasium").origin).parent / "envs/mujoco/assets"
SPHERE = """<mujoco><worldbody><geom type="plane" size="5 5 1"/><body pos="0 0 .105">
  <freejoint/><geom size=".1"/></body></worldbody></mujoco>"""


def load(name, **options):
    """A model of Gymnasium's, with some of its options changed."""
    spec = mujoco.MjSpec.from_file(str(ASSETS / name))
    for key, value in options.items():
        setattr(spec.option, key, value)
    return spec.compile()


def fast_humanoid():
    return load(
        "humanoid.xml",
        integrator=mujoco.mjtIntegrator.mjINT_EULER,
        solver=mujoco.mjtSolver.mjSOL_NEWTON,
        iterations=8,
    )


def gentle(model, steps, *lead):
    """Small smooth controls: the two engines round differently, and chaos would tell them apart."""
    phase = np.arange(model.nu) + np.linspace(0, 1, int(np.prod(lead, initial=1)))[:, None]
    t = np.arange(steps)[:, None, None] * 0.1
    return (0.1 * np.sin(t + phase)).reshape(steps, *lead, model.nu).astype(np.float32)


def trajectory(phys, params, ctrls):
    """Positions [T, n, nq], the last data, and the compiled step, of robots started at qpos0."""
    axes = jax.tree.map(lambda _: 0, params)
    reset = jax.jit(jax.vmap(phys.reset, (axes, None, None, 0)))
    step = jax.jit(jax.vmap(phys.step, (axes, 0, 0)))
    start = phys.model.qpos0, np.zeros(phys.model.nv)
    data, path = reset(params, *start, jnp.ones(ctrls.shape[1], bool)), []
    for ctrl in ctrls:
        data = step(params, data, ctrl)
        path.append(data.qpos)
    assert step._cache_size() == 1  # what reset and step return looks the same to jit
    return np.stack(path), data, step


def touches(model, path):
    """Contacts along a path of one robot."""
    data, most = mujoco.MjData(model), 0
    for qpos in np.asarray(path)[::10]:
        data.qpos[:] = qpos
        mujoco.mj_forward(model, data)
        most = max(most, data.ncon)
    return most


@pytest.fixture(scope="module")
def hoppers():
    """Three hoppers on both engines, one light, one heavy, 100 steps."""
    model = load("hopper.xml", integrator=mujoco.mjtIntegrator.mjINT_EULER)
    made = {
        backend: physics.make(
            model,
            substeps=4,
            fields=("xpos", "cvel", "qfrc_actuator"),
            varying=("body_mass",),
            backend=backend,
        )
        for backend in ("native", "mjx")
    }
    masses = np.float32([0.5, 1, 2])[:, None] * np.asarray(made["mjx"].params["body_mass"])
    params, ctrls = {"body_mass": jnp.asarray(masses)}, gentle(model, 100, 3)
    return made, params, {name: trajectory(p, params, ctrls) for name, p in made.items()}


def test_three_hoppers_of_different_mass_agree_with_the_c_engine(hoppers):
    made, _, runs = hoppers
    (path, data, _), (reference, want, _) = runs["mjx"], runs["native"]
    np.testing.assert_allclose(path, reference, atol=1e-3)
    assert touches(made["mjx"].model, path[:, 1]) > 0
    assert np.abs(path[-1, 0] - path[-1, 2]).max() > 1e-2  # mass does matter
    for name, value in data.fields.items():
        assert np.abs(want.fields[name]).max() > 0.1
        np.testing.assert_allclose(value, want.fields[name], atol=2e-2, err_msg=name)
    assert not data.failed.any()


def test_a_broken_hopper_fails_alone(hoppers):
    made, params, runs = hoppers
    _, data, step = runs["mjx"]
    ctrl = np.zeros((3, 3), np.float32)
    want = step(params, data, ctrl)
    state = dict(data.state, qvel=data.state["qvel"].at[1, 2].set(jnp.nan))
    got = step(params, physics.Data(state, data.qpos, data.qvel, data.fields, data.failed), ctrl)
    np.testing.assert_array_equal(got.failed, [False, True, False])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    np.testing.assert_array_equal(got.qpos[1], made["mjx"].model.qpos0.astype(np.float32))
    keep = lambda a, b: np.testing.assert_array_equal(a[::2], b[::2])
    jax.tree.map(keep, got, want)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["hopper", "ant", "humanoid"])
def test_agrees_with_the_c_engine_over_100_steps(name):
    if name == "humanoid":
        model, substeps = fast_humanoid(), 3
    elif name == "ant":
        # round cones: the two engines turn the friction pyramid under a capsule differently;
        # half a second: a bouncing ant is chaotic, and rounding reaches 1e-3 after that
        model = load("ant.xml", cone=mujoco.mjtCone.mjCONE_ELLIPTIC, timestep=0.005)
        substeps = 1
    else:
        model, substeps = load("hopper.xml"), 4
    ctrls, runs = gentle(model, 100, 1), {}
    for backend in ("native", "mjx"):
        phys = physics.make(model, substeps=substeps, backend=backend)
        runs[backend] = trajectory(phys, {}, ctrls)[0]
    assert touches(model, runs["native"][:, 0]) > 0
    np.testing.assert_allclose(runs["mjx"], runs["native"], atol=1e-3)


@pytest.mark.parametrize("make_model", [lambda: load("hopper.xml"), fast_humanoid])
def test_constants_follow_the_masses_as_in_mj_set_const(make_model):
    model = make_model()
    names = ("body_mass", "dof_armature")
    scale = np.linspace(0.5, 2, model.nbody)
    values = {
        "body_mass": jnp.asarray(model.body_mass * scale, jnp.float32),
        "dof_armature": jnp.asarray(model.dof_armature + 0.1, jnp.float32),
    }
    got = jax.jit(mjx._deriver(model, names))(values)
    model.body_mass[:], model.dof_armature[:] = values["body_mass"], values["dof_armature"]
    mujoco.mj_setConst(model, mujoco.MjData(model))
    assert set(got) == {"body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0"}
    for name, value in got.items():
        np.testing.assert_allclose(value, getattr(model, name), rtol=2e-4, err_msg=name)


def test_a_whole_batch_without_a_reset_computes_none():
    calls = []

    def function(x):
        return jax.pure_callback(
            lambda x: calls.append(1) or np.asarray(x) * 2, x, x, vmap_method="broadcast_all"
        )

    call = physics.when_any(function)
    twice = jax.jit(jax.vmap(jax.vmap(call, (0, 0)), (0, None)))
    x = jnp.arange(3.0)
    nobody = jax.block_until_ready(twice(jnp.zeros((2, 3), bool), x))
    assert not calls
    np.testing.assert_array_equal(nobody, np.zeros((2, 3)))
    one = jax.block_until_ready(twice(jnp.zeros((2, 3), bool).at[1, 1].set(True), x))
    assert len(calls) == 1
    np.testing.assert_array_equal(one[1], [0, 2, 4])
    np.testing.assert_array_equal(jax.jit(call)(True, x), [0, 2, 4])
    np.testing.assert_array_equal(jax.vmap(call, (0, None))(jnp.ones(2, bool), x), [[0, 2, 4]] * 2)


@pytest.mark.parametrize("backend", ["mjx", "warp"])
def test_a_pgs_model_is_native_only(backend):
    with pytest.raises(ValueError, match=r"no PGS solver.*backend='native'"):
        physics.make(load("humanoid.xml"), backend=backend)


def test_warp_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'jrl-embodied\[warp\]'"):
        physics.make(mujoco.MjModel.from_xml_string(SPHERE), backend="warp")


def test_fields_mjx_cannot_show():
    model = load("hopper.xml")
    with pytest.raises(ValueError, match="unknown field of MJX 'qfrc_spring'"):
        physics.make(model, backend="mjx", fields=("qfrc_spring",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_warp_agrees_with_the_c_engine():
    pytest.importorskip("warp")
    model, runs = mujoco.MjModel.from_xml_string(SPHERE), {}
    for backend in ("native", "warp"):
        phys = physics.make(model, substeps=2, fields=("xpos",), backend=backend)
        runs[backend] = trajectory(phys, {}, np.zeros((20, 2, 0), np.float32))
    np.testing.assert_allclose(runs["warp"][0], runs["native"][0], atol=1e-3)
    got, want = runs["warp"][1].fields["xpos"], runs["native"][1].fields["xpos"]
    np.testing.assert_allclose(got, want, atol=1e-3)
