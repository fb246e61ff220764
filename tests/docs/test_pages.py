"""The pages' programs run and print what is shown; what the pages name exists."""

import contextlib
import doctest
import importlib
import io
import itertools
import math
import re
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jrl import cli, config, registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(p.name for p in DOCS.glob("*.md") if p.name != "idea.md")  # tests/test_readme.py
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
SCRIPT = ROOT / "experiments" / "humanoid.py"
CONFIG = ROOT / "experiments" / "conf" / "humanoid.yaml"


def read(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(text: str, language: str) -> list[str]:
    return [code for kind, _, code in BLOCK.findall(text) if kind == language]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder of its own; modules imported from there and names registered are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = {kind: dict(names) for kind, names in registry._registered.items()}
    monkeypatch.setattr(registry, "_registered", known)
    before = set(sys.modules)
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compiling
    yield tmp_path
    jax.config.update("jax_disable_most_optimizations", False)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def run(text: str, folder: Path) -> dict:
    """Run a page from top to bottom, as a reader would who types it into one session.

    A block with a title is a file of that name. What a block prints is compared with the block of
    text right after it, where there is one, see `alike`.
    """
    names, printed, end = {"__name__": "page"}, None, 0
    for block in BLOCK.finditer(text):
        language, title, code = block.groups()
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(code)
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "block", "exec"), names)
            printed, end = out.getvalue(), block.end()
        elif language == "text" and printed is not None and not text[end : block.start()].strip():
            assert alike(code, printed), f"shown:\n{code}\nprinted:\n{printed}"
    return names


def alike(shown: str, printed: str) -> bool:
    """Whether two texts agree; `...` stands for anything, 0.68 for any number within a sixth."""
    if "..." in shown:
        return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)
    pairs = list(itertools.zip_longest(shown.split(), printed.split(), fillvalue=""))
    number = re.compile(r"\d+\.\d+")
    return all(
        math.isclose(float(a), float(b), rel_tol=1 / 6)
        if number.fullmatch(a) and number.fullmatch(b)
        else a == b
        for a, b in pairs
    )


def unused_files(text: str) -> list[str]:
    """Files that a page writes and never imports: their code would be shown without being run."""
    titles = [title for kind, title, code in BLOCK.findall(text) if title and kind == "python"]
    return [t for t in titles if t.removesuffix(".py").replace("/", ".") not in sys.modules]


def test_the_runner(alone):
    page = '```python title="a_b.py"\nx = 1.25\n```\n\n```python\nimport a_b\nprint(a_b.x)\n```\n\n'
    assert unused_files(page) == ["a_b.py"]
    assert run(page + "```text\n1.2...\n```\n", alone)["a_b"].x == 1.25
    assert unused_files(page) == []
    with pytest.raises(AssertionError, match="shown:"):
        run(page + "```text\n1.3...\n```\n", alone)
    assert alike("a 1.0 2\n", "a 1.1 2\n")
    for other in ("a 1.3 2", "a 1.0 3", "b 1.0 2", "a 1.0", "a 1.0 2 3"):
        assert not alike("a 1.0 2\n", other)
    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n", alone)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, alone, capsys):
    text = read(page)
    names = run(text, alone)
    assert unused_files(text) == (["humanoid.py"] if page == "index.md" else [])
    for line in "".join(blocks(text, "bash")).splitlines():
        check_command(shlex.split(line, comments=True), alone)
    if page == "your-own-code.md":
        check_learning(names)


def check_learning(names: dict) -> None:
    """Both foreign loops have learnt."""
    assert names["early"] < 40  # PPO on gymnax's cartpole: steps per episode
    assert names["late"] > 150
    value = names["value_of"](names["params"], names["places"])
    np.testing.assert_allclose(value, 0.9 ** np.arange(3, -1, -1), atol=0.02)
    action = names["mlp"](names["params"]["policy"], names["places"]).argmax(-1)
    assert action.tolist() == [1, 1, 1, 1]  # to the right


def check_command(words: list[str], folder: Path) -> None:
    """A line of a shell that the pages show is understood, flags and all."""
    for run_folder in (word for word in words if word.startswith("runs/")):
        if not (folder / run_folder).exists():
            (folder / run_folder).mkdir(parents=True)
            (folder / run_folder / "config.yaml").write_text(CONFIG.read_text())
    if words[:2] == ["python", "experiments/humanoid.py"]:
        assert (ROOT / words[1]).is_file()
        load(CONFIG, words[2:])
    elif words[:2] == ["jrl", "train"]:
        load(None, words[2:])
    elif words[:1] == ["jrl"]:
        takes = {"eval": cli.Eval, "play": cli.Play}.get(words[1])
        assert cli._parse(takes, words[2:], words[1]) if takes else words[1] in cli.COMMANDS
    elif words[:1] == ["make"]:
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    else:
        assert words[:1] in ([], ["pip"], ["python3"], ["."]), words


def load(path: Path | None, args: list[str]) -> None:
    if args == ["--help"]:
        with pytest.raises(SystemExit):
            config.load(path, args)
    else:
        config.load(path, args)


def test_the_command_line_checks_can_fail(alone):
    check_command(shlex.split("jrl eval runs/x --episodes 8"), alone)
    for line in ("jrl evil runs/x", "jrl trian", "make humanoids", "rm -rf ."):
        with pytest.raises((AssertionError, SystemExit)):
            check_command(shlex.split(line), alone)
    with pytest.raises((ValueError, SystemExit)):
        check_command(shlex.split("jrl train --env.nam hopper"), alone)


@pytest.mark.parametrize("page", ["index.md", "llms.txt"])
def test_the_five_line_program_is_the_experiment(page):
    program = SCRIPT.read_text().partition("\n\n")[2]
    assert blocks(read(page), "python")[0] == program


def test_the_guide_for_assistants_shows_what_runs(alone):
    _, short = blocks(read("llms.txt"), "python")
    for large, small in {
        "64": "8",
        "range(100)": "range(2)",
        "num_steps=32": "num_steps=8",
    }.items():
        assert large in short
        short = short.replace(large, small)
    assert "episode/return" in run(f"```python\n{short}```\n", alone)["metrics"]


@pytest.mark.parametrize("page", [*PAGES, "llms.txt"])
def test_names_in_backticks_exist(page):
    named = set(re.findall(r"`(jrl(?:\.\w+)+)", read(page)))
    entry_points = {"jrl.envs", "jrl.agents", "jrl.buffers"}
    for name in named - entry_points:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ImportError:
            assert hasattr(importlib.import_module(module), attribute), name
    paths = re.findall(r"`((?:jrl|agents|envs|notebooks|experiments|tests)/[\w./]+)`", read(page))
    assert [path for path in paths if not (ROOT / path).exists()] == []
