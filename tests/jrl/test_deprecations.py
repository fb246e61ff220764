"""A name that moved still works, and says so; a name that never was is an error as ever."""

import pkgutil
import subprocess
import sys

import pytest

import jrl
from jrl import deprecations
from jrl.ops import losses
from jrl.types import TimeStep


def test_a_moved_name_works_and_warns_where_it_is_used(monkeypatch):
    table = {"jrl.Step": ("jrl.TimeStep", "0.3"), "jrl.clip": ("jrl.ops.losses.ppo_clip", "0.4")}
    monkeypatch.setattr(deprecations, "DEPRECATED", table)
    with pytest.warns(DeprecationWarning, match=r"^jrl\.Step is now jrl\.TimeStep; .*jrl 0\.3"):
        assert jrl.Step is TimeStep
    with pytest.warns(DeprecationWarning, match=r"jrl\.ops\.losses\.ppo_clip; .* until jrl 0\.4"):
        from jrl import clip
    assert clip is losses.ppo_clip
    with pytest.warns(DeprecationWarning, match="Step") as seen:
        getattr(jrl, "Step")  # noqa: B009
    assert [warning.filename for warning in seen] == [__file__]  # the user's line, not ours


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="module 'jrl' has no attribute 'TimeStop'") as error:
        getattr(jrl, "TimeStop")  # noqa: B009
    assert (error.value.name, error.value.obj) == ("TimeStop", jrl)  # Python names the nearest
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from jrl import nothing  # noqa: F401


def overdue(table):
    """The old names that should be gone by this version; each new one has to exist."""
    here = tuple(int(part) for part in jrl.__version__.split(".")[:2])
    for new, _ in table.values():
        pkgutil.resolve_name(new)
    ends = {old: tuple(map(int, version.split(".")[:2])) for old, (_, version) in table.items()}
    return [old for old, end in ends.items() if end <= here]


def test_every_entry_leads_somewhere_and_is_not_overdue():
    assert overdue(deprecations.DEPRECATED) == []
    assert overdue({"jrl.Step": ("jrl.TimeStep", "0.0")}) == ["jrl.Step"]
    with pytest.raises(AttributeError):
        overdue({"jrl.Step": ("jrl.TimeStop", "9.0")})


def test_looking_a_name_up_imports_nothing_heavy():
    program = (
        "import sys, jrl\nhasattr(jrl, 'nothing')\nprint({'mujoco', 'torch'} & {*sys.modules})"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout.strip() == "set()"
