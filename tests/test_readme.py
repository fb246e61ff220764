"""The documents' programs run, and what they name exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jrl import config, envs, registry
from jrl.types import Discrete

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "agents/README.md", "envs/README.md", "docs/idea.md")
SMALLER = {  # what the pages say: what is run here
    "num_envs=64": "num_envs=4",
    "num_steps=32": "num_steps=8",
    "hidden=(64, 64)": "hidden=(8,)",
    "length=100": "length=2",
    "range(100)": "range(10)",
}
SMALL_RUN = """--name small --log.no-video --env.episode-length 10 --train.total-steps 64
--train.num-envs 8 --train.num-steps 4 --eval.episodes 2 --agent.hidden 8
--agent.num-minibatches 2"""
README = (ROOT / "README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )


FIVE_LINES, *SNIPPETS = [block for page in PAGES for block in blocks(page, "python")]


def test_the_five_line_program_is_the_experiment(tmp_path):
    script = ROOT / "experiments" / "humanoid.py"
    docstring, _, program = script.read_text().partition("\n\n")
    assert docstring.startswith('"""')
    assert program == FIVE_LINES
    done = subprocess.run(
        [sys.executable, script, *SMALL_RUN.split(), "--log.root", tmp_path],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = {path.name for path in (tmp_path / "small").iterdir()}
    assert left >= {"config.yaml", "metrics.jsonl", "checkpoints", "curves.png"}
    assert all(name in README for name in left)


def test_every_page_shows_that_it_runs():
    assert len(SNIPPETS) >= 5
    for large in SMALLER:
        assert any(large in snippet for snippet in SNIPPETS), f"{large} is nowhere: drop it"


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet):
    for large, small in SMALLER.items():
        snippet = snippet.replace(large, small)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    links = [folder / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    paths = re.findall(r"`((?:jrl|agents|envs|benchmarks|experiments|tests)/[\w./]+)`", text)
    missing = [path for path in [*links, *(ROOT / p for p in paths)] if not path.exists()]
    assert missing == []


def test_command_lines_are_understood(tmp_path):
    lines = [line for block in blocks("README.md", "bash") for line in block.splitlines()]
    script = "python experiments/humanoid.py "
    ours = [line.removeprefix(script) for line in lines if line.startswith(script)]
    assert len(ours) >= 4
    yaml = ROOT / "experiments" / "conf" / "humanoid.yaml"
    copy = tmp_path / "config.yaml"
    copy.write_text(yaml.read_text())
    for line in ours:
        files = {"config.yaml": str(copy), "<name>": str(tmp_path)}
        args = [files.get(a.rpartition("/")[2], a) for a in shlex.split(line)]
        if args != ["--help"]:
            config.load(yaml, args)


def test_the_error_shown_is_the_error():
    shown = re.search(r"\$ python \S+ (.*)\nerror: (.*) \.\.\.", README)
    with pytest.raises(ValueError, match=rf"^{re.escape(shown[2])}"):
        config.load(None, shlex.split(shown[1]))


def test_the_table_of_environments():
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d+) \| (\d+)( choices)? \|$", README, re.MULTILINE)
    on_host = {name for name in registry.ENVS if registry.load("env", name).on_host}
    assert [row[0] for row in rows] == sorted(set(registry.ENVS) - on_host)
    assert all(f"--env.name {name} " in README for name in on_host)
    for name, obs, action, choices in rows:
        spec = envs.make(name).spec
        assert spec.obs.shape == (int(obs),)
        assert (
            (spec.action == Discrete(int(action)))
            if choices
            else (spec.action.shape == (int(action),))
        )


def test_the_extras_are_the_ones_there_are():
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    table = README.split("| extra |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = re.findall(r"`(\w+)`", " ".join(cells))
    assert sorted(named) == sorted(re.findall(r"^(\w+) =", extras, re.MULTILINE))
