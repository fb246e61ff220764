"""Training as a schedule of stages, driven from ordinary Python."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jrl import checkpoint, logs
from jrl.checks import UnavailableError
from jrl.config import Config, differences, to_dict
from jrl.loops import Loop, LoopState
from jrl.profile import Profile
from jrl.stages import Hook, Program, Schedule, Stage, own_states
from jrl.types import Key, Tree

Evaluate = Callable[
    [Tree, Key], Mapping[str, jax.Array | np.ndarray]
]  # (policy, key) -> [episodes] of each number


class Film(NamedTuple):
    """How a task shows an episode of a policy."""

    video: Callable[[Tree, Key, Path], None]  # (policy, key, the mp4 to write)
    watch: Callable[[Tree, Key], None]  # in a window


class Engine:
    """Trains in this process; `run` leaves a run folder.

    An update is the stages of the loop: rollout, update_dataset and train, and those that you
    `insert`. (The fourth, sync_weights, has nothing to do in one process: a rollout takes its
    policy from the state.) Stages are fused into as few jitted programs as hooks, stages in
    ordinary Python, and physics on the host allow.

    Attributes:
        state: the `LoopState`: agent, environments, key. Replaced by every update.
        own: what inserted stages keep for themselves, by their names.
        data: while an update runs, what its stages pass on; for hooks.
        metrics: of the update that runs, or of the last one.
        updates: updates done.
        close: ends simulators that run beside this process; `run` does so.
    """

    def __init__(
        self, loop: Loop, policy: Callable[[Tree], Tree], evaluate: Evaluate, film: Film | None,
        config: Config, close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.config, self.close = config, close
        self.state: LoopState | None = None
        self.own: dict[str, Tree] = {}
        self.data: Tree = None
        self.metrics: dict[str, float] = {}
        self.updates = 0
        self.profile = Profile(logs.run_dir(config), trace=config.log.profile)
        self._loop, self._schedule = loop, Schedule(loop.stages)
        self._policy, self._film, self._evaluate = policy, film, evaluate
        self._programs: list[Program] | None = None
        self._between = True

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

    @property
    def whole(self) -> bool:
        """Whether `state` stands between two updates, so that it can be saved."""
        return self._between and self.state is not None

    def insert(self, stage: Stage, *, before: str = "", after: str = "") -> None:
        """Put a stage of yours before or after the one of that name.

        Raises:
            ValueError: an unknown place, a name that is taken, a wrong signature.
            RuntimeError: the training has begun.
        """
        self._still_open("a stage")
        self._schedule.insert(stage, before=before, after=after)

    def before(self, name: str, hook: Hook) -> None:
        """Call `hook(engine)` before the stage `name`, in every update."""
        self._still_open("a hook")
        self._schedule.hook(hook, before=name)

    def after(self, name: str, hook: Hook) -> None:
        """Call `hook(engine)` after the stage `name`, in every update."""
        self._still_open("a hook")
        self._schedule.hook(hook, after=name)

    def _still_open(self, what: str) -> None:
        if self._programs is not None:
            raise RuntimeError(f"{what} can't join a training that has begun: add it before.")

    def iterate(self) -> Iterator[dict[str, float]]:
        """Train, yielding each update's metrics; stop whenever you like."""
        self.compile()
        while self.updates < self.num_updates:
            yield self._update()

    def run(self) -> None:
        """Train to the end; log, evaluate, save, plot and film as the config says."""
        from jrl import run

        run.run(self)

    def compile(self) -> None:
        """Compile the programs, and meanwhile make the first state where there is none yet."""
        if self._programs is not None:
            return
        if self.state is not None and self.state.actor == ():
            raise RuntimeError("this engine holds a policy alone: to go on training, use --resume.")
        begun, on_host = time.perf_counter(), self._loop.restore is not None
        init = self._loop.init if on_host else jax.jit(self._loop.init)
        key = jax.random.key(self.config.seed)
        with ThreadPoolExecutor(1) as pool:
            first = None if self.state is not None else pool.submit(init, key)
            shapes = None if on_host else jax.eval_shape(init, key)
            self._programs = self._schedule.compile(shapes, apart=self.config.log.profile)
            if first is not None:
                self.state, self.own = first.result(), own_states(self._schedule.stages)
        self.profile.add({"compile": time.perf_counter() - begun})

    def _update(self) -> dict[str, float]:
        """One pass through the programs, each timed."""
        self._between, self.metrics = False, {}
        self.profile.begin_update()
        seconds = {}
        for program in self._programs or ():
            before, after = self._schedule.hooks(program)
            self._call(before)
            begun = time.perf_counter()
            self._run_program(program)
            seconds[f"stage/{program.name}"] = time.perf_counter() - begun
            self._call(after)
        self.data = None
        self.updates += 1
        self._between = True
        self.profile.end_update()
        self.profile.add(seconds)
        return seconds | self.metrics

    def _run_program(self, program: Program) -> None:
        own = {stage.name: self.own[stage.name] for stage in program.stages}
        own, self.state, self.data, learnt = jax.block_until_ready(
            program.run(own, self.state, self.data)
        )
        self.own |= own
        self.metrics |= {name: float(x) for name, x in jax.device_get(learnt).items()}

    def _call(self, hooks: list[Hook]) -> None:
        begun = time.perf_counter()
        for hook in hooks:
            hook(self)
        if hooks:
            self.profile.add({"hooks": time.perf_counter() - begun})

    def evaluate(self) -> dict[str, float]:
        """Play `eval.episodes` episodes without exploration, the same starts every time."""
        with self.profile.spent("evaluate"):
            results = jax.device_get(self._evaluate(*self._acting()))
        means = {f"eval/{name}": float(np.mean(x)) for name, x in results.items()}
        return means | {"eval/return_std": float(np.std(results["return"]))}

    @property
    def films(self) -> bool:
        """Whether this task can be filmed."""
        return self._film is not None

    def film(self, path: Path) -> None:
        """Film an episode without exploration, the first of the evaluation's starts.

        Raises:
            UnavailableError: this task can't be filmed, or this machine can't draw.
        """
        with self.profile.spent("film"):
            self._shown().video(*self._acting(), path)

    def watch(self) -> None:
        """Show that episode in MuJoCo's viewer, until its window is closed.

        Raises:
            UnavailableError: this task can't be shown, or this machine has no display.
        """
        self._shown().watch(*self._acting())

    def _shown(self) -> Film:
        if self._film is None:
            raise UnavailableError(
                f"{self.config.env.name} has no MuJoCo model that could be shown."
            )
        return self._film

    def _acting(self) -> tuple[Tree, Key]:
        """The policy, and the key of the evaluation's starts."""
        if self.state is None:
            raise RuntimeError("nothing is trained yet: call `run`, `iterate` or `restore` first.")
        return self._policy(self.state.agent), jax.random.key(self.config.eval.seed)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints, each under its number of updates."""
        return logs.run_dir(self.config) / "checkpoints"

    def save(self) -> None:
        """Write a checkpoint of everything needed to go on.

        Raises:
            OSError: the folder can't be written, or the disk is full.
        """
        if self.state is None or not self.whole:
            raise RuntimeError("a checkpoint is taken between two updates, not inside one.")
        about = {"env_steps": self.env_steps, "config": to_dict(self.config)}
        everything, keep = (
            {"loop": self._loop.save(self.state), "stages": self.own},
            self.config.log.keep_checkpoints,
        )
        with self.profile.spent("checkpoints"):
            checkpoint.save(self.checkpoints, self.updates, everything, about, keep=keep)

    def restore(self, step: int | None = None, *, policy_only: bool = False) -> list[str]:
        """Take up a checkpoint of this run: that of `step` updates, or the newest that is whole.

        Args:
            step: updates done when it was written.
            policy_only: the agent alone, to evaluate and play it: environments, and stages of
                yours, may then differ from those it was trained with.

        Returns:
            What people should know, such as that a damaged checkpoint was passed over.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it belongs to another config, or (`DamagedError`) it is damaged.
        """
        self._still_open("a checkpoint")
        init, go_on = self._loop.init, self._loop.restore
        key = jax.random.key(self.config.seed)
        state = self._loop.save(init(key)) if go_on is not None else jax.eval_shape(init, key)
        like = {"loop": state, "stages": own_states(self._schedule.stages)}
        if policy_only:
            like = {"loop": dataclasses.replace(state, actor=(), key=()), "stages": {}}
        try:
            found = checkpoint.restore(self.checkpoints, step, like, partial=policy_only)
        except checkpoint.MisfitError as error:
            raise checkpoint.MisfitError(f"{error}\n{self._changes(step)}") from None
        self.state, self.own = found.state["loop"], found.state["stages"]
        self.updates = found.step
        if go_on is None:
            return found.notes
        self.state, lost = go_on(self.state)
        return found.notes + lost

    def _changes(self, step: int | None) -> str:
        """In which fields the config of a checkpoint differs from this one."""
        then = checkpoint.meta(self.checkpoints, step)["config"]
        changes = differences({**then, "resume": self.config.resume}, to_dict(self.config))
        return "The configs differ: " + "; ".join(changes) if changes else "The configs are equal."
