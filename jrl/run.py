"""A run from start to end: logging, evaluation, checkpoints, signals, and what is left behind."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl import checkpoint, curves, logs
from jrl import config as configs
from jrl.checks import UnavailableError

if TYPE_CHECKING:
    from jrl.engine import Engine


def run(engine: "Engine") -> None:
    """Train to the end; log, evaluate, save, plot and film as the config says.

    A crash that strikes between two updates leaves a checkpoint of the last one; a crash inside an
    update, whose state is then half new, leaves the last periodic one.

    Raises:
        OSError: the last checkpoint can't be written. (If a periodic one can't, training goes on.)
    """
    config = engine.config
    notes = engine.restore() if config.resume else []
    engine.compile()  # sizes that don't divide are found here, before anything is written
    # Written by `launch` too; but there are runs without it, and resumed ones with new values.
    lasting = dataclasses.replace(config, resume="")
    configs.save(lasting, logs.run_dir(config) / "config.yaml")
    with (
        contextlib.closing(engine),
        logs.Logger(config, resume_at=engine.updates if config.resume else None) as logger,
        _signals() as stopping,
        _rescue(engine),
        _profile(engine, logger),
    ):
        for note in notes:
            logger.event(note)
        _train(engine, logger, stopping)
        _finish(engine, logger, stopped=stopping.is_set())


def _train(engine: "Engine", logger: logs.Logger, stopping: threading.Event) -> None:
    """The updates, and what is due between them."""
    config, saved = engine.config, time.monotonic()
    if engine.updates >= engine.num_updates:
        logger.event(f"all {engine.num_updates} updates are done: raise --train.total-steps.")
    logger.event(f"compiled in {engine.profile.seconds['compile']:.1f} s")
    for metrics in engine.iterate():
        logger.log(metrics, update=engine.updates, env_steps=engine.env_steps)
        if metrics.get("update/skipped"):
            logger.event(_blame(metrics, engine.updates))
        if _every(config.eval.interval, engine.updates):
            logger.log(engine.evaluate(), update=engine.updates, env_steps=engine.env_steps)
        late = 0 < config.log.checkpoint_seconds < time.monotonic() - saved
        if late or _every(config.log.checkpoint_interval, engine.updates):
            _save(engine, logger)
            saved = time.monotonic()
        if stopping.is_set():
            return


def _every(interval: int, updates: int) -> bool:
    return interval > 0 and updates % interval == 0


def _save(engine: "Engine", logger: logs.Logger) -> None:
    """A periodic checkpoint; where it can't be written, an earlier one is still there."""
    try:
        engine.save()
    except OSError as error:
        logger.event(f"update {engine.updates}: no checkpoint written, training goes on: {error}")


def _finish(engine: "Engine", logger: logs.Logger, *, stopped: bool) -> None:
    """Save, evaluate, plot and film."""
    engine.save()
    if stopped:
        logger.event(f"stopped after {engine.env_steps:,} steps; everything is saved")
    logger.log(engine.evaluate(), update=engine.updates, env_steps=engine.env_steps)
    folder = logs.run_dir(engine.config)
    if engine.config.log.plot:
        _show(logger, "curves", folder / "curves.png", lambda path: curves.plot(logger.path, path))
    if engine.config.log.video and engine.films:
        _show(logger, "video", folder / "videos" / "final.mp4", engine.film)
    if stopped:
        logger.close("interrupted")


def _show(logger: logs.Logger, what: str, path: Path, draw: Callable[[Path], None]) -> None:
    """Draw what people look at; where that can't be done, say why: the training is not lost."""
    try:
        draw(path)
        logger.event(f"{what}: {path}")
    except (UnavailableError, OSError, ValueError) as error:
        logger.event(f"no {what}: {error}")


@contextlib.contextmanager
def _rescue(engine: "Engine") -> Iterator[None]:
    """On a crash between two updates, save what there is: nothing is lost then."""
    try:
        yield
    except BaseException:
        if engine.whole and engine.updates != checkpoint.latest(engine.checkpoints):
            engine.save()
        raise


@contextlib.contextmanager
def _profile(engine: "Engine", logger: logs.Logger) -> Iterator[None]:
    """Write profile.json, however the run ends."""
    try:
        yield
    finally:
        engine.profile.stop()
        engine.profile.add({"logging": logger.seconds})
        engine.profile.write()


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second one stops at once."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    names = (signal.SIGINT, signal.SIGTERM)
    before = {name: signal.getsignal(name) for name in names}

    def stop(number: int, frame: Any) -> None:
        del frame
        stopping.set()
        signal.signal(number, before[signal.Signals(number)])

    for name in names:
        signal.signal(name, stop)
    try:
        yield stopping
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _blame(metrics: dict[str, float], update: int) -> str:
    """What to tell people about gradient steps that were skipped."""
    names = [name for name, x in metrics.items() if name.startswith("nonfinite/") and x]
    bad = ", ".join(name.removeprefix("nonfinite/") for name in names)
    return (
        f"update {update}: {metrics['update/skipped']:.0f} gradient steps were not finite and were "
        f"skipped. Not finite in the data: {bad or 'nothing; the learning rate may be too high'}."
    )
