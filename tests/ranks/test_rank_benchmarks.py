"""The benchmarks of several ranks run in their quick form, and their figures hold where they are
not of time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("numcodecs")

from benchmarks import rank_sizes, restart
from benchmarks.record import Settings


@pytest.mark.timeout(400)
def test_killed_ranks_continue_from_the_copy_of_their_memory(tmp_path: Path) -> None:
    result = restart.run(Settings(quick=True, folder=tmp_path))
    (start, kill) = result.tables[0].rows
    assert start[1] == 1
    assert kill[1] == restart.QUICK_KILLS
    wrong = result.figures[1]
    assert "differ" in wrong.name
    assert wrong.value == 0


def test_saves_of_ranks_are_measured_beside_those_of_one_process(tmp_path: Path) -> None:
    result = rank_sizes.run(Settings(quick=True, folder=tmp_path))
    rows = {row[1]: row for row in result.tables[0].rows}
    assert set(rows) == {"1", "4"}
    # In the tiny run documents outweigh the data.
    assert all(0 < row[3] < 20 for row in rows.values())
