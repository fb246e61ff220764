"""The engine and its builder: runs, what they leave, how they stop."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import buffers, builder, checkpoint, config, logs
from jrl.agents import ppo
from jrl.types import Buffer

SMALL = [
    "--env.name", "cartpole", "--agent.hidden", "8", "--agent.num-minibatches", "2",
    "--train.num-envs", "4", "--train.num-steps", "8", "--train.total-steps", "100",
    "--eval.episodes", "2", "--env.episode-length", "20", "--log.no-plot", "--name", "run",
]  # fmt: skip


def load(tmp_path, *args):
    return config.load(None, [*SMALL, "--log.root", str(tmp_path), *args])


def build(cfg, buffer=None):
    env_group = builder.build_env_group(cfg)
    policy_group = builder.build_policy_group(ppo, cfg)
    buffer = buffer or builder.build_data_buffer(buffers.rollout, cfg)
    return builder.build_engine(env_group, policy_group, buffer, cfg)


def rows(cfg):
    return [json.loads(x) for x in (logs.run_dir(cfg) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_metrics_and_a_checkpoint_of_everything(tmp_path):
    cfg = load(tmp_path, "--eval.interval", "2", "--log.checkpoint-interval", "3")
    engine = build(cfg)
    engine.run()
    # 100 steps in portions of 4 x 8 = 32: 4 updates, 128 steps
    assert (engine.num_updates, engine.updates, engine.env_steps) == (4, 4, 128)
    seen = rows(cfg)
    assert [r["env_steps"] for r in seen if "loss/value" in r] == [32, 64, 96, 128]
    assert [r["env_steps"] for r in seen if "eval/return" in r] == [64, 128, 128]
    folder = logs.run_dir(cfg) / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["3", "4"]
    assert checkpoint.meta(folder)["env_steps"] == 128
    everything = {"loop": engine.state, "stages": engine.own}
    back = checkpoint.restore(folder, None, everything).state["loop"]
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), back, engine.state)
    assert all(jax.tree.leaves(same))


def test_training_by_hand_is_the_run(tmp_path):
    cfg = load(tmp_path)
    metrics = list(build(cfg).iterate())
    engine = build(load(tmp_path, "--name", "again"))
    engine.run()
    logged = [r["loss/value"] for r in rows(engine.config) if "loss/value" in r]
    assert logged == [m["loss/value"] for m in metrics]


def test_evaluation_is_deterministic_and_changes_nothing(tmp_path):
    engine = build(load(tmp_path))
    next(engine.iterate())
    before = jax.tree.map(np.array, jax.tree.map(jax.random.key_data, engine.state.key))
    params = jax.tree.map(np.array, engine.state.agent.params)
    assert engine.evaluate() == engine.evaluate()
    jax.tree.map(np.testing.assert_array_equal, params, engine.state.agent.params)
    np.testing.assert_array_equal(before, jax.random.key_data(engine.state.key))
    assert engine.evaluate()["eval/length"] <= 20


def test_native_physics_runs_in_two_stages_and_never_recompiles(tmp_path):
    engine = build(load(tmp_path, "--env.name", "hopper", "--train.total-steps", "96"))
    count = 0

    def counted(*_, **__):
        nonlocal count
        count += 1

    seen = []
    for metrics in engine.iterate():
        seen.append({name for name in metrics if name.startswith("stage/")})
        if len(seen) == 2:
            jax.monitoring.register_event_duration_secs_listener(
                lambda name, *_, **__: counted() if "backend_compile" in name else None
            )
    assert seen == [{"stage/rollout", "stage/update_dataset+train"}] * 3
    assert count == 0


def test_skipped_updates_name_what_was_not_finite():
    from jrl.run import _blame

    text = _blame({"update/skipped": 2.0, "nonfinite/advantage": 5.0, "nonfinite/target": 0.0}, 7)
    assert "update 7: 2 gradient steps" in text
    assert text.endswith("Not finite in the data: advantage.")


def test_parts_that_do_not_fit_are_refused_before_anything_starts(tmp_path):
    cfg = load(tmp_path)
    stranger = type(sys)("jrl.agents.stranger")
    with pytest.raises(ValueError, match=r"stranger.*agent.name.*'ppo'"):
        builder.build_policy_group(stranger, cfg)
    replay = Buffer(*[lambda *_: None] * 4, data="batch")
    with pytest.raises(ValueError, match=r"'rollout'.*'batch'"):
        build(cfg, buffer=replay)
    odd = dataclasses.replace(cfg, agent=dataclasses.replace(cfg.agent, num_minibatches=5))
    with pytest.raises(ValueError, match=r"32.*num_minibatches = 5.*4"):
        build(odd).compile()
    with pytest.raises(RuntimeError, match="nothing is trained"):
        build(cfg).evaluate()


def test_without_jit_the_same_program_runs(tmp_path):
    with jax.disable_jit():
        engine = build(load(tmp_path, "--train.num-steps", "2", "--train.total-steps", "8"))
        metrics = next(engine.iterate())
    assert np.isfinite(metrics["loss/value"])


PROGRAM = """
import sys
from jrl import buffers, builder, launch
from jrl.agents import ppo

def main(cfg):
    parts = builder.build_env_group(cfg), builder.build_policy_group(ppo, cfg)
    builder.build_engine(*parts, builder.build_data_buffer(buffers.rollout, cfg), cfg).run()

launch(main, None, sys.argv[1:])
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_between_updates_and_leaves_a_good_checkpoint(tmp_path, name):
    args = [*SMALL, "--log.root", str(tmp_path), "--train.total-steps", "100_000_000"]
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *args],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(getattr(signal, name))
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    assert "everything is saved" in said
    last = json.loads(metrics.read_text().splitlines()[-1])
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.latest(folder) == last["update"]
    engine = build(config.load(tmp_path / "run" / "config.yaml", []))
    engine.restore()
    assert int(engine.state.agent.updates) == engine.updates == last["update"]
