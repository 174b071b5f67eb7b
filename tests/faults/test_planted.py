"""The tests of the tests: bugs that are planted on purpose must be caught. All of them: ``make
planted-bugs``.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.suites import planted
from tests.support.paths import REPOSITORY


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_a_planted_bug_is_caught() -> None:
    command = [sys.executable, planted.__file__, "lease-ignored"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 planted bugs were caught" in done.stdout


def test_there_are_enough_bugs_with_names_of_their_own() -> None:
    assert len({bug.name for bug in planted.BUGS}) == len(planted.BUGS) >= 15


def test_a_bug_whose_place_has_gone_is_an_error_and_not_a_success() -> None:
    gone = planted.Bug(
        "gone", (planted.Edit("deltacheck.leaf.digest", "a text that is nowhere", ""),), ()
    )
    with pytest.raises(
        LookupError,
        match=r"no function of deltacheck\.leaf\.digest contains 'a text that is nowhere' any more",
    ):
        planted.plant(gone)


@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_every_bug_still_has_its_place(bug: planted.Bug) -> None:
    for edit in bug.edits:
        file = REPOSITORY / f"{edit.module.replace('.', '/')}.py"
        assert edit.old in file.read_text(), f"{edit.module} does not contain {edit.old!r} any more"


def test_an_unknown_bug_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SystemExit, match="there is no bug 'x'; there are data-not-synced"):
        planted.named("x")
