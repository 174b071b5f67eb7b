"""A save and a restore enter no more functions and files than they did.

``python -m tests.suites.entered --list`` prints the functions of a save.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suites import entered


# The goals are 220 and 45 of a save, 170 and 36 of a restore. Lower a limit with what goes. A few
# functions are entered in some runs only: 308 and 62, 288 and 51 are the least that were seen.
@pytest.mark.parametrize(
    ("call", "most_functions", "most_files"), [("save", 312, 65), ("restore", 291, 54)]
)
def test_the_way_of_a_call_stays_within_its_limits(
    call: str, most_functions: int, most_files: int, tmp_path: Path
) -> None:
    places = entered.measure(call, tmp_path / "root")
    files = {file for file, _, _ in places}
    assert len(places) <= most_functions, "\n".join(map(str, places))
    assert len(files) <= most_files, sorted(files)
