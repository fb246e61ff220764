"""The schedule is data: stages of a user's own, hooks, and what happens to wrong ones."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import buffers, builder, config, logs
from jrl.agents import ppo
from jrl.stages import Schedule, Stage, through

SMALL = [
    "--env.name", "cartpole", "--agent.hidden", "8", "--agent.num-minibatches", "2",
    "--train.num-envs", "4", "--train.num-steps", "8", "--train.total-steps", "128",
    "--eval.episodes", "2", "--env.episode-length", "20", "--log.no-plot", "--name", "run",
]  # fmt: skip


def build(tmp_path, *args):
    cfg = config.load(None, [*SMALL, "--log.root", str(tmp_path), *args])
    env_group = builder.build_env_group(cfg)
    policy_group = builder.build_policy_group(ppo, cfg)
    buffer = builder.build_data_buffer(buffers.rollout, cfg)
    return builder.build_engine(env_group, policy_group, buffer, cfg)


def relabel(scale, state, rollout):
    """A reward model with a state: every reward becomes `scale`, which doubles."""
    reward = jnp.full_like(rollout.reward, scale)
    return 2 * scale, state, dataclasses.replace(rollout, reward=reward), {"relabel/scale": scale}


def test_a_stage_between_rollout_and_train_changes_what_is_learnt(tmp_path):
    plain, changed = build(tmp_path), build(tmp_path)
    changed.insert(Stage("relabel", relabel, state=4.0), after="rollout")
    a, b = next(plain.iterate()), next(changed.iterate())
    assert "stage/rollout+update_dataset+train" in a
    assert "stage/rollout+relabel+update_dataset+train" in b
    assert b["relabel/scale"] == 4.0
    assert float(changed.own["relabel"]) == 8.0
    assert a["rollout/reward"] == b["rollout/reward"] == 1.0  # what the task itself paid
    assert a["loss/value"] != b["loss/value"]


def test_a_stage_that_changes_nothing_changes_nothing(tmp_path):
    plain, same = build(tmp_path), build(tmp_path)
    same.insert(Stage("look", lambda own, state, data: (own, state, data, {})), before="train")
    for _ in zip(plain.iterate(), same.iterate()):
        pass
    jax.tree.map(np.testing.assert_array_equal, plain.state.agent, same.state.agent)


def test_a_stage_in_ordinary_python_runs_between_two_programs(tmp_path):
    seen = []

    def host(own, state, rollout):
        seen.append(rollout.reward.shape)
        return own, state, rollout, {"host/calls": len(seen)}

    engine, plain = build(tmp_path), build(tmp_path)
    engine.insert(Stage("host", host, jit=False), after="rollout")
    metrics = list(engine.iterate())
    assert seen == [(8, 4)] * 4
    stages = [name for name in metrics[0] if name.startswith("stage/")]
    assert stages == ["stage/rollout", "stage/host", "stage/update_dataset+train"]
    assert [m["host/calls"] for m in metrics] == [1, 2, 3, 4]
    assert [m["loss/value"] for m in plain.iterate()] == [m["loss/value"] for m in metrics]


def test_a_curriculum_changes_the_environments_and_is_in_the_checkpoint(tmp_path):
    def harder(level, state, data):
        """Every update shortens the episodes that are running by one step."""
        level = level + 1

        def later(path, x):
            return x + 1 if ".steps" in jax.tree_util.keystr(path) else x

        env = jax.tree_util.tree_map_with_path(later, state.actor.env)
        actor = dataclasses.replace(state.actor, env=env)
        return level, dataclasses.replace(state, actor=actor), data, {"curriculum/level": level}

    stage = Stage("curriculum", harder, state=0)
    straight = build(tmp_path, "--name", "straight")
    straight.insert(stage, after="train")
    told = [m["curriculum/level"] for m in straight.iterate()]
    assert told == [1, 2, 3, 4]

    first = build(tmp_path, "--train.total-steps", "64")
    first.insert(stage, after="train")
    first.run()
    second = build(tmp_path)
    second.insert(stage, after="train")
    second.restore()
    assert int(second.own["curriculum"]) == 2
    rest = [m["curriculum/level"] for m in second.iterate()]
    assert rest == [3, 4]
    for x, y in zip(jax.tree.leaves(straight.state), jax.tree.leaves(second.state), strict=True):
        x, y = (jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k
                for k in (x, y))  # fmt: skip
        np.testing.assert_array_equal(x, y)


def test_hooks_see_the_data_and_split_the_programs(tmp_path):
    engine, seen = build(tmp_path), []
    engine.after("rollout", lambda engine: seen.append(("rollout", engine.data.reward.shape)))
    engine.before("train", lambda engine: seen.append(("train", engine.updates)))
    engine.after("train", lambda engine: seen.append(("after", engine.metrics["loss/value"])))
    metrics = next(engine.iterate())
    assert seen == [("rollout", (8, 4)), ("train", 0), ("after", metrics["loss/value"])]
    assert [name for name in metrics if name.startswith("stage/")] == [
        "stage/rollout", "stage/update_dataset", "stage/train"]  # fmt: skip
    with pytest.raises(RuntimeError, match="has begun"):
        engine.before("train", lambda engine: None)


def test_profiling_runs_the_stages_apart_and_writes_where_time_went(tmp_path):
    engine = build(tmp_path, "--log.profile", "--log.no-video", "--train.total-steps", "192")
    engine.run()
    folder = logs.run_dir(engine.config)
    profile = json.loads((folder / "profile.json").read_text())
    stages = {"stage/rollout", "stage/update_dataset", "stage/train"}
    assert stages <= set(profile["share"])
    assert profile["updates"] == 6
    assert sum(profile["share"].values()) == pytest.approx(1.0, abs=1e-3)
    assert profile["bookkeeping_share"] == pytest.approx(
        profile["share"]["logging"] + profile["share"]["checkpoints"], abs=2e-4
    )
    assert {"compile", "evaluate"} <= set(profile["seconds"])
    assert list((folder / "trace").rglob("perfetto_trace.json.gz"))


WRONG = [
    (Stage("train", relabel), {"after": "rollout"}, "there is a stage 'train' already"),
    (Stage("mine", relabel), {"after": "rolout"}, "Did you mean 'rollout'"),
    (Stage("mine", relabel), {}, "either before=... or after=..."),
    (Stage("mine", lambda data: data), {"after": "rollout"}, r"state, data\).*takes \(data\)"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "place", "text"), WRONG)
def test_a_wrong_stage_is_refused_at_once(tmp_path, stage, place, text):
    with pytest.raises(ValueError, match=text):
        build(tmp_path).insert(stage, **place)


RETURNS = [
    (lambda own, state, data: data, "must return .*returned Rollout"),
    (lambda own, state, data: (own, data, {}), "returned tuple of 3"),
    (lambda own, state, data: ((own, 1), state, data, {}), "structure of its own state"),
    (lambda own, state, data: (own + 0.5, state, data, {}), r"was int32\[\] and is float32"),
    (lambda own, state, data: (own, state, data, {"rollout/reward": 1}), "reports rollout/reward"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "text"), RETURNS)
def test_a_stage_that_returns_something_else_is_named(tmp_path, run, text):
    engine = build(tmp_path)
    engine.insert(Stage("mine", run, state=1), after="rollout")
    with pytest.raises(ValueError, match=f"stage 'mine'.*{text}"):
        next(engine.iterate())


def test_a_hook_with_a_wrong_signature_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"hook 'close'.*\(engine\)"):
        build(tmp_path).after("train", close)


def close():
    """Takes nothing."""


def test_stages_run_in_order_each_with_its_own_state():
    # own states 1 and 10; data 0 -> 0 + 1 = 1 -> 1 + 10 = 11
    def add(own, state, data):
        return own * 2, state, data + own, {}

    stages = [Stage("one", add), Stage("ten", add)]
    own, state, data, _ = through(stages, {"one": 1, "ten": 10}, 5, 0)
    assert (own, state, data) == ({"one": 2, "ten": 20}, 5, 11)
    schedule = Schedule(stages)
    schedule.insert(Stage("two", add), before="ten")
    assert [stage.name for stage in schedule.stages] == ["one", "two", "ten"]
