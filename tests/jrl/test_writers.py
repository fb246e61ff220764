"""The writers that exist, with their real packages, no network, no account and nobody to ask."""

import dataclasses
import importlib.util
import io
import json
import os
import struct
import subprocess
import sys

import pytest
from rich.console import Console

from jrl import config, writers
from jrl.config import Config, Log, Train
from jrl.logs import Logger, run_dir


def test_an_unknown_writer_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown writer.*'tensorbord'.*'tensorboard'\?"):
        writers.check(["tensorbord"])
    cfg = dataclasses.replace(Config(), log=Log(writers=("wandbb",)))
    with pytest.raises(ValueError, match=r"'wandbb'.*'wandb'\?"):
        config.check(cfg)
    config.check(dataclasses.replace(cfg, log=Log(writers=("tensorboard", "wandb", "swanlab"))))


@pytest.mark.parametrize("name", list(writers.WRITERS))
def test_a_missing_package_is_said_with_the_way_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"{name}.*pip install 'jrl-embodied\[log\]'"):
        writers.start([name], writers.Run(tmp_path, {}))
    assert list(tmp_path.iterdir()) == []


def test_packages_are_imported_only_where_they_are_named():
    program = (
        "import sys, jrl.logs; print(sorted({'wandb', 'swanlab', 'tensorboardX'} & {*sys.modules}))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout.strip() == "[]"


# --- TensorBoard ---


def events(path):
    """The events in one file of TensorBoard: length, its checksum, the event, its checksum."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data):
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    data, at = path.read_bytes(), 0
    while at < len(data):
        length, check = struct.unpack_from("<QI", data, at)
        assert check == masked(data[at : at + 8])
        event = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked(event),)
        at += length + 16
        yield Event.FromString(event)


def shown(folder):
    """Tag -> [(step, value)] as TensorBoard shows them: a second START hides later steps."""
    points, started = [], False
    for path in sorted(folder.iterdir()):
        for event in events(path):
            if event.session_log.status == event.session_log.START:
                points = [p for p in points if p[1] < event.step or not started]
                started = True
            points += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return {tag: [(s, x) for t, s, x in points if t == tag] for tag in {p[0] for p in points}}


def test_tensorboard_shows_every_row_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboardX")
    cfg = Config(name="run", log=Log(root=str(tmp_path), writers=("tensorboard",)))
    screen = Console(file=io.StringIO(), force_terminal=False)
    for updates, resume_at in ((range(1, 6), None), (range(4, 8), 3)):  # within one second
        with Logger(cfg, screen, resume_at=resume_at) as logger:
            for update in updates:
                metrics = {"loss/value": update / 4, "bad": float("nan")}
                logger.log(metrics, update=update, env_steps=100 * update)
    folder = run_dir(cfg) / "tensorboard"
    assert len(list(folder.iterdir())) == 2
    seen = shown(folder)
    assert seen["loss/value"] == [(100 * update, update / 4) for update in range(1, 8)]
    assert len(seen["time/seconds"]) == 7
    assert "bad" not in seen
    assert "failed" not in screen.file.getvalue()


# --- services ---

CHILD = """
import sys, threading
from jrl.config import Config, Log
from jrl.logs import Logger

root, name = sys.argv[1:]
config = Config(name="run", log=Log(root=root, writers=(name,), interval=1e9))

def play(updates, **how):
    with Logger(config, **how) as logger:
        for update in updates:
            metrics = {"loss/value": update / 4, "bad": float("nan")}
            logger.log(metrics, update=update, env_steps=100 * update)
            logger.log({"eval/return": update}, update=update, env_steps=100 * update)
        if not how:
            raise KeyboardInterrupt

try:
    play(range(1, 6))
except KeyboardInterrupt:
    play(range(4, 8), resume_at=3)
assert name not in [thread.name for thread in threading.enumerate()]
"""


def alone(args):
    """A command without a network, where that can be had."""
    without = ["unshare", "--map-root-user", "--net"]
    try:
        works = subprocess.run([*without, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return [*without, *args] if works else args


def play_alone(root, name):
    """A run in two parts, in a process that has nobody to ask; the writer's folder."""
    env = {"PATH": os.environ["PATH"], "HOME": str(root / "home"), "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        alone([sys.executable, "-c", CHILD, str(root), name]),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=100,
    )  # fmt: skip
    said = child.stdout + child.stderr
    assert child.returncode == 0, said
    for ending in ("\ninterrupted: 500 env-steps", "\nfinished: 700 env-steps"):
        assert said.count(ending) == 1
    for trouble in ("failed", "left behind", "Traceback"):
        assert trouble not in said
    folder = root / "run"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines[::2]] == list(range(1, 8))
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", name}
    return folder / name


def records(path):
    """The records of a log in LevelDB's format, behind a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def test_wandb_keeps_every_row_of_a_resumed_run(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    folder = play_alone(tmp_path, "wandb")
    run_id = (folder / "run_id").read_text()
    parts = sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(parts) == 2
    for path, updates, code in zip(parts, (range(1, 6), range(4, 8)), (130, 0)):
        told = [Record.FromString(record) for record in records(path)]
        history = [
            {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            for r in told
            if r.HasField("history")
        ]
        losses = [(h["env_steps"], h["loss/value"]) for h in history if "loss/value" in h]
        assert losses == [(100 * update, update / 4) for update in updates]
        assert [h["env_steps"] for h in history if "eval/return" in h] == [s for s, _ in losses]
        assert not any("bad" in h for h in history)
        assert [r.exit.exit_code for r in told if r.HasField("exit")] == [code]
        axes = {r.metric.glob_name: r.metric.step_metric for r in told if r.HasField("metric")}
        assert axes["*"] == "env_steps"
        settings = {i.key: i.value_json for r in told for i in r.run.config.update}
        assert json.loads(settings["train"])["total_steps"] == Train().total_steps


def test_swanlab_keeps_every_row_of_a_resumed_run(tmp_path):
    pytest.importorskip("swanlab")
    folder = play_alone(tmp_path, "swanlab")
    run_id = (folder / "run_id").read_text()
    parts = sorted(folder.glob(f"run-*-{run_id}/run-{run_id}.swanlab"))
    assert len(parts) == 2
    for path, updates in zip(parts, (range(1, 6), range(4, 8))):
        told = list(records(path))
        axis, *losses = [record for record in told if b"loss/value" in record]
        assert b"env_steps" in axis
        for update, record in zip(updates, losses, strict=True):
            assert struct.pack("<d", update / 4) in record
        assert sum(b"eval/return" in record for record in told) == 1 + len(updates)
        assert not any(b"bad" in record for record in told)
        assert "total_steps" in (path.parent / "files" / "config.yaml").read_text()
