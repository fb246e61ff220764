"""One update as data: stages in order, hooks between them, and the programs they become."""

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.checks import ConfigError, unknown
from jrl.types import Metrics, Tree

Hook = Callable[[Any], None]  # takes the engine


class Stage(NamedTuple):
    """A part of an update.

    `run(own, state, data) -> (own, state, data, metrics)` gets what the stage keeps for itself, the
    `LoopState` of the training, and what the stage before it passed on (None for the first; a
    `Rollout` after "rollout", what the buffer sampled after "update_dataset"). It returns all
    three, changed or as they were, and scalars to log. The structure, shapes and dtypes of `own`
    and `state` stay the same.
    """

    name: str
    run: Callable[[Tree, Tree, Tree], tuple[Tree, Tree, Tree, Metrics]]
    state: Tree = ()  # `own` at the start of a run; it is in every checkpoint
    jit: bool = True  # `run` is pure, to be compiled; False: ordinary Python, called as it is


class Program(NamedTuple):
    """Stages that run as one."""

    stages: tuple[Stage, ...]
    run: Callable[..., Any]  # (own states by stage name, state, data) -> the same, and metrics

    @property
    def name(self) -> str:
        """The names of its stages, joined by +."""
        return "+".join(stage.name for stage in self.stages)


def own_states(stages: Sequence[Stage]) -> dict[str, Tree]:
    """What the stages keep for themselves at the start, by name; numbers become arrays."""
    strong = lambda x: jnp.asarray(x, jnp.result_type(x))
    return {stage.name: jax.tree.map(strong, stage.state) for stage in stages}


def through(
    stages: Sequence[Stage], own: dict[str, Tree], state: Tree, data: Tree = None
) -> tuple[dict[str, Tree], Tree, Tree, Metrics]:
    """Run stages one after the other.

    Raises:
        ConfigError: a stage returned something else than it should.
    """
    metrics: Metrics = {}
    for stage in stages:
        out = stage.run(own[stage.name], state, data)
        if not (isinstance(out, tuple) and len(out) == 4):
            raise ConfigError(
                f"stage {stage.name!r} must return (own, state, data, metrics), it returned "
                f"{type(out).__name__}{f' of {len(out)}' if isinstance(out, tuple) else ''}."
            )
        kept, state_now, data, learnt = out
        _same(stage.name, "own state", own[stage.name], kept)
        _same(stage.name, "training state", state, state_now)
        own, state = {**own, stage.name: kept}, state_now
        if clash := sorted(metrics.keys() & learnt.keys()):
            raise ConfigError(
                f"stage {stage.name!r} reports {', '.join(clash)}, which an earlier stage reports "
                f"already. Call it {stage.name}/..."
            )
        metrics |= learnt
    return own, state, data, metrics


def _same(name: str, what: str, before: Tree, after: Tree) -> None:
    """Refuse a stage that changes the form of what it carries from update to update."""
    forms = [str(jax.tree.structure(tree)) for tree in (before, after)]
    if forms[0] != forms[1]:
        raise ConfigError(
            f"stage {name!r} changed the structure of its {what}:\n"
            f"before: {forms[0]}\nafter:  {forms[1]}"
        )
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after)):
        kinds = [_kind(old), _kind(new)]
        if kinds[0] != kinds[1]:
            leaf = jax.tree_util.keystr(path, simple=True, separator=".") or "it"
            raise ConfigError(
                f"stage {name!r} changed its {what}: {leaf} was {kinds[0]} and is {kinds[1]} now."
            )


def _kind(x: Any) -> str:
    """Dtype and shape of an array; of a handle, such as a torch module, its type."""
    known = isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | float | int)
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}" if known else type(x).__name__


class Schedule:
    """The stages of an update, in order, and the hooks before and after them.

    Attributes:
        stages: in the order in which they run.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages: list[Stage] = []
        self._before: dict[str, list[Hook]] = {}
        self._after: dict[str, list[Hook]] = {}
        for stage in stages:
            self._check(stage)
            self.stages.append(stage)

    def insert(self, stage: Stage, *, before: str = "", after: str = "") -> None:
        """Put a stage before or after the one of that name.

        Raises:
            ConfigError: a name that is taken, or none or two places, or a wrong signature.
            ValueError: no stage of that name to stand beside.
        """
        if bool(before) == bool(after):
            raise ConfigError(f"stage {stage.name!r}: say either before=... or after=...")
        self._check(stage)
        self.stages.insert(self._place(before or after) + bool(after), stage)

    def hook(self, hook: Hook, *, before: str = "", after: str = "") -> None:
        """Call `hook(engine)` before or after the stage of that name, in every update."""
        self._place(before or after)
        _takes(hook, 1, f"hook {getattr(hook, '__name__', hook)!r}", "(engine)")
        hooks = self._before if before else self._after
        hooks.setdefault(before or after, []).append(hook)

    def hooks(self, program: Program) -> tuple[list[Hook], list[Hook]]:
        """The hooks to call before and after a program."""
        first, last = program.stages[0].name, program.stages[-1].name
        return self._before.get(first, []), self._after.get(last, [])

    def compile(self, state: Tree, *, apart: bool = False) -> list[Program]:
        """The programs of an update, compiled at the same time; states are donated.

        Stages are fused as far as hooks, ordinary Python and calls of the host in a rollout (native
        physics: an executable that calls back can't always be cached) allow. What follows a stage
        in ordinary Python is compiled when it first runs.

        Args:
            state: a `LoopState` of shapes.
            apart: don't fuse, so that every stage can be timed.
        """
        groups = self._groups(apart=apart)
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return [Program(tuple(g), _bind(g)) for g in groups]
        own, data, known = jax.eval_shape(lambda: own_states(self.stages)), None, True
        waiting: list[tuple[list[Stage], Any]] = []
        while groups:
            group = groups.pop(0)
            known &= group[0].jit
            if not known:
                run = _bind(group)
                lazy = jax.jit(run, donate_argnums=(0, 1)) if group[0].jit else run
                waiting.append((group, lazy))
                continue
            traced = _trace(group[:1], own, state, data)
            if len(group) > 1 and "_callback[" in str(traced.jaxpr):
                groups.insert(0, group[1:])
                group = group[:1]
            elif len(group) > 1:
                traced = _trace(group, own, state, data)
            data = traced.out_info[2]
            waiting.append((group, traced.lower()))
        return _compiled(waiting)

    def _groups(self, *, apart: bool) -> list[list[Stage]]:
        """Neighbours that may be fused."""
        groups: list[list[Stage]] = []
        for stage in self.stages:
            last = groups[-1][-1] if groups else None
            if (
                last is None or apart or not (stage.jit and last.jit)
                or last.name in self._after or stage.name in self._before
            ):  # fmt: skip
                groups.append([stage])
            else:
                groups[-1].append(stage)
        return groups

    def _place(self, name: str) -> int:
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise unknown("stage", name, names)
        return names.index(name)

    def _check(self, stage: Stage) -> None:
        if any(stage.name == known.name for known in self.stages):
            raise ConfigError(f"there is a stage {stage.name!r} already: choose another name.")
        _takes(stage.run, 3, f"stage {stage.name!r}: its `run`", "(own, state, data)")


def _takes(function: Callable[..., Any], count: int, what: str, wanted: str) -> None:
    """Check that a user's function can be called with `count` arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        has = inspect.signature(function)
        raise ConfigError(f"{what} must take {wanted}, but it takes {has}.") from None


def _bind(group: Sequence[Stage]) -> Callable[..., Any]:
    return lambda own, state, data: through(group, own, state, data)


def _trace(group: Sequence[Stage], own: Tree, state: Tree, data: Tree) -> Any:
    mine = {stage.name: own[stage.name] for stage in group}
    return jax.jit(_bind(group), donate_argnums=(0, 1)).trace(mine, state, data)


def _compiled(waiting: list[tuple[list[Stage], Any]]) -> list[Program]:
    """Compile what is lowered, side by side; leave the rest as it is."""

    def finish(item: tuple[list[Stage], Any]) -> Program:
        group, run = item
        return Program(tuple(group), run.compile() if hasattr(run, "compile") else run)

    with ThreadPoolExecutor(len(waiting)) as pool:
        return list(pool.map(finish, waiting))
