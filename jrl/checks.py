"""Readable errors for wrong shapes, wrong names and sizes that don't divide."""

import difflib
from collections.abc import Iterable

import jax

from jrl.types import Tree


class ConfigError(ValueError):
    """A name or a number that somebody chose, and that can't work."""


class UnavailableError(RuntimeError):
    """Something that this machine lacks; the text says what to install."""


def expect(tree: Tree, leading: tuple[int, ...], what: str) -> None:
    """Check that every leaf of `tree` starts with the axes `leading`.

    Raises:
        ValueError: naming the leaf, the axes expected and its shape.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.shape[: len(leading)] != leading:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)}: expected leading axes {leading}, "
                f"got shape {leaf.shape}. Rollouts are time-major, [T, B, ...]."
            )


def unknown(kind: str, name: str, known: Iterable[str], hint: str = "") -> ConfigError:
    """The error for a name nobody knows: the nearest one, and the list."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}.{guess} Known: {', '.join(names)}.{hint}")


def positive(**values: float) -> None:
    """Check that each named value is greater than zero; traced values pass.

    Raises:
        ConfigError: naming the first that isn't.
    """
    for name, value in values.items():
        if not isinstance(value, jax.core.Tracer) and not value > 0:
            raise ConfigError(f"{name} must be greater than 0, got {value}.")


def divides(total: int, parts: int, what: str, fix: str) -> None:
    """Check that `total` splits into `parts` equal pieces.

    Raises:
        ConfigError: with `what`, both numbers, and the nearest values of `fix` that would divide.
    """
    positive(**{fix: parts})
    if total % parts:
        legal = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(sorted(legal, key=lambda n: abs(n - parts))[:3])
        raise ConfigError(
            f"{what} = {total} does not divide into {fix} = {parts} equal parts. "
            f"Values of {fix} that would: {', '.join(map(str, near))}."
        )
