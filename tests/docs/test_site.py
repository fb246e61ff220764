"""The site builds without a warning, has a place for every public name, and fetches nothing."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jrl

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
INNER = (  # behind a package that gives out their names, or the version alone
    "jrl.envs.physics.", "jrl.testing.", "jrl.version",
)  # fmt: skip


def modules() -> list[str]:
    """Every module but the private and the inner ones."""
    root = Path(jrl.__file__).parent
    folders = [root, *(root / name for name in ("agents", "bridges", "envs"))]
    paths = {path for folder in folders for path in folder.rglob("*.py")}
    parts = sorted(path.relative_to(root).with_suffix("").parts for path in paths)
    names = [".".join(("jrl", *part)).removesuffix(".__init__") for part in parts]
    return [n for n in names if "._" not in n and not n.startswith(INNER)]


def public(name: str) -> dict[str, object]:
    """The public names of a module: those in `__all__`, or its own functions and classes."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return {key: getattr(module, key) for key in module.__all__ if not key.startswith("_")}
    return {
        key: thing
        for key, thing in vars(module).items()
        if not key.startswith("_")
        and (inspect.isfunction(thing) or inspect.isclass(thing))
        and thing.__module__ == name
    }


def own_docstring(thing: object) -> str:
    """What its author wrote, and not what a dataclass or named tuple makes up in its place."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    made_up = text.startswith(f"{getattr(thing, '__name__', '')}(")
    return "" if made_up else text


MODULES = modules()
SPOKEN_OF = [name for name in MODULES if public(name)]


def test_the_walk_finds_the_modules():
    assert {"jrl", "jrl.types", "jrl.ops.returns", "jrl.agents.ppo", "jrl.envs.ant"} <= {*SPOKEN_OF}
    assert public("jrl.ops.losses").keys() == {"ppo_clip", "value_loss", "normalize"}
    assert "check_env" in public("jrl.testing")


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name):
    assert own_docstring(importlib.import_module(name)), f"{name} says nothing about itself"
    assert [key for key, thing in public(name).items() if not own_docstring(thing)] == []


def test_what_counts_as_a_docstring():
    bare = jrl.record(type("Bare", (), {"__annotations__": {"x": int}}))
    assert bare.__doc__.startswith("Bare(")
    assert own_docstring(bare) == ""
    assert own_docstring(jrl.TimeStep).startswith("What an environment says")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does, every warning an error."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "off", "https_proxy": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return out


def test_every_public_name_has_its_place(site):
    html = "".join(path.read_text() for path in sorted((site / "api").rglob("index.html")))
    places = set(re.findall(r'id="(jrl[\w.]*)"', html))
    wanted = {f"{name}.{key}" for name in SPOKEN_OF for key in public(name)}
    assert sorted(wanted - places) == []
    assert len(wanted) > 200


def test_every_module_has_a_page_that_is_listed(site):
    shown = {
        name: path
        for path in API.glob("*.md")
        for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
    }
    assert sorted(shown) == SPOKEN_OF
    index = (API / "index.md").read_text()
    assert [p.name for p in shown.values() if f"]({p.name})" not in index] == []
    first = {name: importlib.import_module(name).__doc__.partition("\n\n")[0] for name in shown}
    stale = [
        name
        for name in re.findall(r"^\| \[`([\w.]+)`\]", index, re.MULTILINE)
        if name != "jrl.cli" and " ".join(first[name].split()) not in index
    ]
    assert stale == []


def test_nothing_is_fetched_from_elsewhere(site):
    loaded = r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="?(https?://[^"\s>]+)'
    found = {u for path in site.rglob("*.html") for u in re.findall(loaded, path.read_text())}
    assert found == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?https?:[^)]*\)|@import", styles) == []
    assert re.search(loaded, '<script src="https://elsewhere/x.js">')


def test_the_guide_for_assistants_is_in_the_site(site):
    text = (site / "llms.txt").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 8
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
