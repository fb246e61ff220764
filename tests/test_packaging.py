"""What an installation gets: every package, each under the one name `jrl.*`."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
LINKED = ("agents", "envs", "bridges")


def python(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_package_is_listed():
    # one that is forgotten works in a checkout and is missing from the wheel
    folders = {"jrl": ROOT / "jrl"} | {f"jrl.{name}": ROOT / name for name in LINKED}
    found = set()
    for package, folder in folders.items():
        for init in folder.rglob("__init__.py"):  # does not follow the links
            found.add(".".join([package, *init.parent.relative_to(folder).parts]))
    assert found == set(SETUP["packages"])
    assert SETUP["package-dir"] == {"jrl": "jrl"} | {f"jrl.{name}": name for name in LINKED}


@pytest.mark.parametrize("name", LINKED)
def test_folders_beside_the_core_are_linked_into_it(name):
    link = ROOT / "jrl" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


@pytest.mark.parametrize("name", LINKED)
def test_a_second_name_is_refused(name):
    done = python("-c", f"import {name}", cwd=ROOT)
    assert done.returncode == 1
    assert f"ImportError: import `jrl.{name}`: a second copy" in done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked into a folder of its own."""
    release = version("setuptools") if importlib.util.find_spec("setuptools") else "0"
    if int(release.partition(".")[0]) < 77:
        pytest.skip("needs setuptools >= 77: pip install -e '.[test]'")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jrl", *LINKED):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = python("-c", build, cwd=source)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("jrl_embodied-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_the_wheel_holds_every_file(site):
    wanted = {path.relative_to(ROOT) for path in (ROOT / "jrl").rglob("*.py")}
    for name in LINKED:
        wanted |= {Path("jrl") / p.relative_to(ROOT) for p in (ROOT / name).rglob("*.py")}
    held = {path.relative_to(site) for path in site.rglob("*.py")}
    assert held == wanted
    assert {path.name for path in site.iterdir() if path.is_dir()} == {
        "jrl",
        f"jrl_embodied-{version('jrl-embodied')}.dist-info",
    }
    assert (site / "jrl" / "py.typed").is_file()


def test_every_module_of_the_wheel_can_be_imported(site, tmp_path):
    modules = [
        ".".join(path.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(site.rglob("*.py"))
    ]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(site)!r})
for name in {modules}:
    file = importlib.import_module(name).__file__
    assert file.startswith({str(site)!r}), file
"""
    done = python("-P", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
