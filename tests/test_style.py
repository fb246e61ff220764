"""Sizes a reader can hold in mind, and nothing in the files that belongs to one machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jrl", "agents", "envs", "bridges", "experiments", "benchmarks")
SOURCES = [  # rglob does not follow the links jrl/agents, jrl/envs and jrl/bridges
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]
NAMELESS = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
BLOCKS = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar,
    ast.Match, ast.FunctionDef, ast.AsyncFunctionDef,
)  # fmt: skip
# a folder of somebody's machine, or a package fetched around the registry
MACHINE = re.compile(
    r"(?<![\w./-])/(?:tmp|work|root|home|mnt)/"
    r"|https?://\S+\.(?:whl|tar\.gz|zip)\b"
    r"|--(?:extra-)?index-url|--find-[l]inks"
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def size(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring; functions inside count."""
    documented = ast.get_docstring(function) is not None
    return lines(function) - (lines(function.body[0]) if documented else 0)


def depth(node: ast.AST) -> int:
    """How deep blocks and functions nest below a node; an `elif` is no deeper than its `if`."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        elif_ = isinstance(node, ast.If) and field == "orelse" and len(children) == 1
        for child in children:
            if isinstance(child, ast.AST):
                level = isinstance(child, BLOCKS) and not (elif_ and isinstance(child, ast.If))
                deepest = max(deepest, depth(child) + level)
    return deepest


def test_the_measures():
    code = '''
def f(x):
    """One
    two.
    """
    if x:
        for y in x:
            pass
    elif y:
        while x:
            pass
    return x
'''
    (f,) = ast.parse(code).body
    assert isinstance(f, ast.FunctionDef)
    assert size(f) == 8  # 11 lines, 3 of them docstring
    assert depth(f) == 2  # if > for, and elif > while
    assert MACHINE.search("cd /" + "tmp/x")
    assert not MACHINE.search("a/tmp/x")


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_and_functions_are_short(path):
    length = len(path.read_text().splitlines())
    assert length <= 400
    assert {f.name: size(f) for f in functions(path) if size(f) > 60} == {}
    assert {f.name: depth(f) for f in functions(path) if depth(f) > 3} == {}


def test_modules_are_named_for_what_they_hold():
    assert len(SOURCES) > 20
    assert [name(p) for p in SOURCES if NAMELESS & {p.stem, *p.relative_to(ROOT).parts}] == []


def test_nothing_belongs_to_one_machine():
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{name(path)}:{number}: {line.strip()}")
    assert found == []


def text_files() -> list[Path]:
    """The files of the repository, links and binary files apart."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listed.stdout.split("\0") if line]
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    return [path for path in files if b"\0" not in path.read_bytes()]
