"""What stands behind a name: `read` imports a task, an algorithm or a buffer and checks it."""

import dataclasses
import importlib
import inspect
import operator
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jrl.checks import ConfigError
from jrl.types import Agent, Buffer, Env, HostAgent, HostEnv


class Kind(NamedTuple):
    """A kind of part: what it is called, and what its `make` takes and returns."""

    noun: str
    arguments: str
    returns: tuple[type, ...]


KINDS = {
    "env": Kind("environment", "(cfg)", (Env, HostEnv)),
    "agent": Kind("agent", "(cfg, spec)", (Agent, HostAgent)),
    "buffer": Kind("buffer", "(cfg)", (Buffer,)),
}


@dataclasses.dataclass(frozen=True)
class NoConfig:
    """The `Config` of a part that has nothing to set."""


class Part(NamedTuple):
    """A task, an algorithm or a buffer, ready to be made.

    Attributes:
        kind: "env", "agent" or "buffer".
        name: what a config calls it, here and in any other process.
        path: where it is, `my_pkg.my_env` or `my_pkg.my_env:walk`.
        Config: a frozen dataclass that sets it up, every field with a default.
        function: what makes it, as its author wrote it.
        module: where `function` was found.
        title: how errors call it.
    """

    kind: str
    name: str
    path: str
    Config: type
    function: Callable[..., Any]
    module: ModuleType
    title: str

    @property
    def on_host(self) -> bool:
        """Whether it is a simulator on the host: a task whose `make` takes `num_envs` as well."""
        return self.kind == "env" and _on_host(inspect.signature(self.function))

    def make(self, cfg: Any, *spec: Any, **sizes: int) -> Any:
        """`make(cfg)` of a task or a buffer, `make(cfg, spec)` of an algorithm.

        A simulator on the host is made in one piece, `make(cfg, num_envs=B)`.

        Raises:
            ConfigError: it returned something else.
        """
        if self.on_host and not sizes:
            raise ConfigError(
                f"{self.title} is a simulator on the host, a whole batch and no Env of one robot: "
                "train with it by `jrl train` or `jrl.builder`, or call its "
                f"{_place(self.function)} with num_envs."
            )
        made = self.function(*(() if self.Config is NoConfig else (cfg,)), *spec, **sizes)
        returns = KINDS[self.kind].returns
        if self.kind == "env":
            returns = (HostEnv,) if self.on_host else (Env,)
        if isinstance(made, HostEnv) and not self.on_host:
            raise ConfigError(
                f"{self.title}: {_place(self.function)} returned a HostEnv, so it must take how "
                "many robots to simulate: make(cfg, *, num_envs)."
            )
        if not isinstance(made, returns):
            raise ConfigError(
                f"{self.title}: {_place(self.function)} must return "
                f"{_a(returns[0].__name__)}, but it returned {_a(type(made).__name__)}."
            )
        return made

    @property
    def model(self) -> Callable[[Any], Any] | None:
        """`model(cfg)` of a task that is a module: its MuJoCo model, to film it with."""
        whole = self.function is getattr(self.module, "make", None)
        return getattr(self.module, "model", None) if whole else None


def read(kind: str, name: str, path: str, title: str) -> Part:
    """The part at an import path.

    Raises:
        ConfigError: it can't be imported, or isn't written as such a part is.
    """
    module_path, _, attribute = path.partition(":")
    module = _module(module_path, title)
    function = _function(kind, module, attribute or "make", title)
    parameters = _parameters(kind, function, title)
    config: type = NoConfig
    if parameters:
        config = _config(module, function, parameters[0], title, whole=not attribute)
    return Part(kind, name, path, config, function, module, title)


def _module(path: str, title: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:
        # of `a.b.c`, a missing `a` or `a.b` is a wrong path; anything else is trouble inside
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{path}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{title}: there is no module {missing!r}. Look at the spelling; install its "
                "package into this environment, or put its folder on PYTHONPATH."
            ) from error
        raise ConfigError(
            f"{title}: the module {path!r} is there, but importing it failed "
            f"({_origin(error)}): {type(error).__name__}: {error}"
        ) from error


def _function(kind: str, module: ModuleType, attribute: str, title: str) -> Callable[..., Any]:
    where = f"{module.__name__!r} ({getattr(module, '__file__', None) or 'a folder'})"
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError:
        own = [
            name
            for name, thing in vars(module).items()
            if inspect.isfunction(thing) and thing.__module__ == module.__name__ and name[0] != "_"
        ]
        wanted = f"make{KINDS[kind].arguments} -> {KINDS[kind].returns[0].__name__}"
        raise ConfigError(
            f"{title}: the module {where} has no {attribute!r}. Write `{wanted}` there, or name a "
            f"function of it as '{module.__name__}:function'. It has: {', '.join(own) or 'none'}."
        ) from None
    if not callable(function):
        raise ConfigError(
            f"{title}: {attribute!r} in {where} is {_a(type(function).__name__)}, not a function."
        )
    return function


def _parameters(kind: str, function: Callable[..., Any], title: str) -> list[inspect.Parameter]:
    """The parameters that `make` is called with: none, or those of its kind."""
    wanted = KINDS[kind].arguments
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"{title}: {_place(function)} doesn't say what it takes.") from error
    sizes = {"num_envs": 1} if kind == "env" and _on_host(signature) else {}
    if _takes(signature, wanted.count(",") + 1, **sizes):
        return list(signature.parameters.values())
    if kind != "agent" and _takes(signature, 0, **sizes):
        return []
    raise ConfigError(f"{title}: {_place(function)} must take {wanted}, but it takes {signature}.")


def _on_host(signature: inspect.Signature) -> bool:
    num_envs = signature.parameters.get("num_envs")
    return num_envs is not None and num_envs.kind is inspect.Parameter.KEYWORD_ONLY


def _takes(signature: inspect.Signature, count: int, **sizes: int) -> bool:
    try:
        signature.bind(*range(count), **sizes)
    except TypeError:
        return False
    return True


def _config(
    module: ModuleType,
    function: Callable[..., Any],
    first: inspect.Parameter,
    title: str,
    *,
    whole: bool,
) -> type:
    """The `Config` that a function takes: its module's, or the one `first` is annotated with."""
    own = getattr(module, "Config", None)
    config = own if whole and own is not None else (_annotation(function, first, title) or own)
    if config is None:
        raise ConfigError(
            f"{title}: {_place(function)} takes ({first}), but there is no telling which Config. "
            f"Annotate it with a frozen dataclass, or write a `Config` in {module.__name__!r}."
        )
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"{title}: its Config must be a frozen dataclass, not {config!r}.")
    _check_fields(config, title)
    return config


def _annotation(function: Callable[..., Any], first: inspect.Parameter, title: str) -> type | None:
    """The dataclass that a parameter is annotated with, if it is."""
    annotated = first.annotation
    if isinstance(annotated, str):  # `from __future__ import annotations`
        try:
            annotated = eval(annotated, getattr(inspect.unwrap(function), "__globals__", {}))
        except (NameError, AttributeError) as error:
            raise ConfigError(
                f"{title}: {_place(function)} takes ({first}), but {error}. A Config must be "
                "imported at run time, not only for type checking."
            ) from error
    return annotated if dataclasses.is_dataclass(annotated) else None  # type: ignore[return-value]


def _check_fields(config: type, title: str) -> None:
    called = f"{title}: {config.__module__}.{config.__qualname__}"
    if not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConfigError(f"{called} must be frozen: write @dataclass(frozen=True).")
    fields = dataclasses.fields(config)
    without = [
        field.name
        for field in fields
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if without:
        raise ConfigError(f"{called} needs a default for every field, not for {without} yet.")
    if "name" in [field.name for field in fields]:
        raise ConfigError(
            f"{called} has a field 'name', which in a run's config says which part it is. Call "
            "yours something else."
        )


def _place(function: Callable[..., Any]) -> str:
    """`make (my_env.py:12)`."""
    inner = inspect.unwrap(function)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    code = getattr(inner, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _origin(error: Exception) -> str:
    """Where an error was raised: `my_env.py:12`."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
    return f"{last.filename}:{last.lineno}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"
