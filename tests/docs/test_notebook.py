"""The notebook runs from top to bottom, and is committed without what it printed."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

PATH = Path(__file__).parents[2] / "notebooks" / "cartpole.ipynb"
RUN = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
notebook.cells.append(nbformat.v4.new_code_cell(sys.argv[3]))
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
# in the notebook's own words: what it has shown, as numbers
LOOK = """
best = [float(x) for x in jnp.nanmax(by_rate, axis=1)]
different = len({float(x) for x in by_seed[:, -1]})
print(float(score), by_seed.shape, by_rate.shape, trains._cache_size(), best[0], best[2], different)
"""


def test_it_has_no_outputs():
    cells = nbformat.read(PATH, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) >= 8
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []


@pytest.mark.slow
def test_it_runs(tmp_path):
    # a process of its own: the kernel's client warns about things that pytest would call errors
    done = subprocess.run(
        [sys.executable, "-c", RUN, PATH, tmp_path / "run.ipynb", LOOK],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *cells, last = nbformat.read(tmp_path / "run.ipynb", as_version=4).cells
    pictures = [out for c in cells for out in c.get("outputs", []) if "image/png" in str(out)]
    assert len(pictures) == 3
    text = last.outputs[0].text
    score, *_ = text.split()
    assert float(score) > 400  # of 500: it balances the pole
    assert "(4, 60) (4, 60) 1 " in text  # seeds and rates, in one compiled program
    slow, quick, different = (float(x) for x in text.split()[-3:])
    assert quick > slow + 50  # rates matter
    assert different > 1  # and so do seeds
