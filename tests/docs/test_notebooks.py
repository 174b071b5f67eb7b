"""The notebooks of the documentation run from top to bottom, and hold no outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.xla import UNOPTIMIZED

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorial").glob("*.ipynb"))
# Each cell is compiled by itself, so that an error names its cell. Nothing of Jupyter is needed:
# the cells are plain Python without magic commands.
RUN_CELLS = """
import json, sys
document = json.loads(sys.stdin.read())
space = {"__name__": "__main__"}
for number, cell in enumerate(document["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), space)
"""


def run_notebook(document: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the code cells of a notebook in order, in one process."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {UNOPTIMIZED}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_CELLS],
        input=document,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.tools
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    done = run_notebook(notebook.read_text(), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "every bit is equal" in done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_of_format_4_without_outputs(notebook: Path) -> None:
    document = json.loads(notebook.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_an_error_names_its_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["text"]},
        {"cell_type": "code", "source": ["value = 1\n", "print(value)"]},
        {"cell_type": "code", "source": ["assert value == 2"]},
    ]
    done = run_notebook(json.dumps({"cells": cells}), tmp_path)
    assert done.returncode == 1
    assert done.stdout == "1\n"
    assert "<cell 2>" in done.stderr
