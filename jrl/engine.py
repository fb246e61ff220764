"""The training run: four stages as a schedule, driven from ordinary Python."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import checkpoint, curves, logs
from jrl.config import Config, to_dict
from jrl.loops import Loop, LoopState
from jrl.types import Key, Tree

Evaluate = Callable[[Tree, Key], dict[str, jax.Array]]  # (policy, key) -> [episodes] of each number
Film = Callable[[Tree, Key, Path], str]  # (policy, key, path of the video) -> what to tell people


class Engine:
    """Runs a loop in this process and leaves a run folder.

    One update is the stages rollout, update_dataset, train and sync_weights. They are fused into
    one jitted step; where the environment calls the host (native physics), the rollout is jitted
    apart, so that the rest can be cached between processes.

    Attributes:
        state: everything needed to go on, one pytree; replaced by every update.
        updates: updates done.
    """

    def __init__(
        self, loop: Loop, policy: Callable[[Tree], Tree], evaluate: Evaluate, film: Film | None,
        config: Config,
    ) -> None:  # fmt: skip
        self.config = config
        self.updates = 0
        self._policy, self._film = policy, film
        self._evaluate = jax.jit(evaluate)
        begun = time.perf_counter()
        self._stages = _compile(loop)
        self._init = self._stages.pop("init")
        self._compile_seconds = time.perf_counter() - begun
        self._stopping = False
        self.state: LoopState | None = None

    @property
    def batch_size(self) -> int:
        """Environment steps per update."""
        return self.config.train.num_envs * self.config.train.num_steps

    @property
    def num_updates(self) -> int:
        """Updates in the whole run: the fewest that reach `train.total_steps`."""
        return -(-self.config.train.total_steps // self.batch_size)

    @property
    def env_steps(self) -> int:
        """Environment steps done."""
        return self.updates * self.batch_size

    def iterate(self) -> Iterator[dict[str, float]]:
        """Train, yielding each update's metrics; stop whenever you like."""
        if self.state is None:
            self.state = self._init(jax.random.key(self.config.seed))
        while self.updates < self.num_updates and not self._stopping:
            yield self._update()

    def _update(self) -> dict[str, float]:
        """One pass through the stages, each timed."""
        passed: tuple[Any, ...] = (self.state,)
        seconds = {}
        for name, stage in self._stages.items():
            begun = time.perf_counter()
            passed = jax.block_until_ready(stage(*passed))
            seconds[f"stage/{name}"] = time.perf_counter() - begun
        self.state, learnt = passed
        self.updates += 1
        return seconds | {name: float(x) for name, x in jax.device_get(learnt).items()}

    def evaluate(self) -> dict[str, float]:
        """Play `eval.episodes` episodes without exploration, the same starts every time."""
        policy = self._policy(self._trained().agent)
        results = jax.device_get(self._evaluate(policy, jax.random.key(self.config.eval.seed)))
        means = {f"eval/{name}": float(np.mean(x)) for name, x in results.items()}
        return means | {"eval/return_std": float(np.std(results["return"]))}

    def run(self) -> None:
        """Train to the end; log, evaluate, save, plot and film as the config says."""
        with logs.Logger(self.config) as logger, self._signals():
            logger.event(f"compiled in {self._compile_seconds:.1f} s")
            for metrics in self.iterate():
                logger.log(metrics, update=self.updates, env_steps=self.env_steps)
                if metrics.get("update/skipped"):
                    logger.event(_blame(metrics, self.updates))
                if self._due(self.config.eval.interval):
                    logger.log(self.evaluate(), update=self.updates, env_steps=self.env_steps)
                if self._due(self.config.log.checkpoint_interval):
                    self.save()
            self._finish(logger)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.updates % interval == 0

    def _finish(self, logger: logs.Logger) -> None:
        """Save, evaluate, plot and film."""
        self.save()
        if self._stopping:
            logger.event(f"stopped after {self.env_steps:,} steps; everything is saved")
        logger.log(self.evaluate(), update=self.updates, env_steps=self.env_steps)
        folder = logs.run_dir(self.config)
        if self.config.log.plot:
            curves.plot(folder / "metrics.jsonl", folder / "curves.png")
        if self._film is not None and self.config.log.video:
            key = jax.random.key(self.config.eval.seed)
            policy = self._policy(self._trained().agent)
            logger.event(self._film(policy, key, folder / "videos" / "final.mp4"))

    def save(self) -> None:
        """Write a checkpoint of everything needed to go on."""
        folder = logs.run_dir(self.config) / "checkpoints"
        about = {"env_steps": self.env_steps, "config": to_dict(self.config)}
        checkpoint.save(folder, self.updates, self._trained(), about)

    def _trained(self) -> LoopState:
        if self.state is None:
            raise RuntimeError("nothing is trained yet: call `run` or `iterate` first.")
        return self.state

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop between two updates on Ctrl-C or SIGTERM; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = (signal.SIGINT, signal.SIGTERM)
        before = {name: signal.getsignal(name) for name in names}

        def stop(number: int, frame: Any) -> None:
            del frame
            self._stopping = True
            signal.signal(number, before[signal.Signals(number)])

        for name in names:
            signal.signal(name, stop)
        try:
            yield
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


def _compile(loop: Loop) -> dict[str, Callable[..., Any]]:
    """`init` and the stages of one update, compiled at the same time; the state is donated."""
    key = jax.random.key(0)
    state = jax.eval_shape(loop.init, key)
    programs: dict[str, tuple[Any, ...]] = {"init": (jax.jit(loop.init), key)}
    if "_callback[" in str(jax.make_jaxpr(loop.rollout)(state)):
        _, data = jax.eval_shape(loop.rollout, state)
        programs["rollout"] = (jax.jit(loop.rollout, donate_argnums=0), state)
        programs["train"] = (jax.jit(loop.train, donate_argnums=0), state, data)
    else:
        programs["step"] = (jax.jit(loop.step, donate_argnums=0), state)
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return {name: function for name, (function, *_) in programs.items()}
    lowered = [function.lower(*args) for function, *args in programs.values()]
    with ThreadPoolExecutor(len(lowered)) as pool:
        return dict(zip(programs, pool.map(lambda program: program.compile(), lowered)))
