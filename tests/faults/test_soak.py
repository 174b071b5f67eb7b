"""The driver of the long runs counts what its suites tell, and the endurance run finds what
grows.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from deltacheck.backends.torch import Engine
from tests.suites import endurance, restarts, soak
from tests.suites.endurance import Count, grown
from tests.suites.soak import SUITES, Suite


def printing(text: str, status: int = 0) -> Suite:
    """A suite that says this in every round, ``{size}`` and ``{seed}`` filled in."""
    code = (
        f"import sys; print({text!r}.format(size=sys.argv[1], seed=sys.argv[2]));"
        f" sys.exit({status})"
    )
    return Suite(
        "S0",
        "nothing",
        lambda size, seed: [sys.executable, "-S", "-c", code, str(size), str(seed)],
        soak.TALLY,
        8,
    )


def test_rounds_are_added_up_until_the_time_is_over() -> None:
    outcome = soak.soak(printing("all {size} tried 0 failed"), 0.5, random.Random(0))
    assert outcome.rounds >= 2
    assert outcome.trials >= 16
    assert not outcome.failed
    assert f"{3 / outcome.trials:.1e}" in outcome.row()


@pytest.mark.parametrize(
    ("text", "status", "failed"),
    [
        ("all {size} tried 3 failed", 1, 3),
        ("all {size} tried 0 failed", 1, 1),
        ("a suite without figures", 0, 1),
    ],
)
def test_a_suite_that_fails_is_shown_with_its_seed_and_gets_no_bound(
    text: str, status: int, failed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = soak.soak(printing(text + "; seed {seed}", status), 60, random.Random(7))
    assert (outcome.rounds, outcome.failed) == (1, failed)
    assert f"; seed {random.Random(7).randrange(1 << 32)}" in capsys.readouterr().out
    assert " - " in outcome.row()


@pytest.mark.parametrize(
    ("suite", "output", "trials", "failed"),
    [
        ("S2", "seed 3: no failure in 2,000 states".replace(",", ""), 2000, 0),
        ("S4", "\n20000 trials from seed 1 in 16 s of processor time", 20_000, 0),
        ("S5", "stat::number_of_executed_units: 123\n4567 inputs\n", 4690, 0),
        ("S6", "2 failed, 40 passed in 3.0s", 40, 2),
        ("S8", "500 calls, 1 wrong; 3 children, 0 failed", 500, 1),
        ("S13", "  all 106 tried 0 failed", 106, 0),
    ],
)
def test_the_figures_of_each_suite_are_found(
    suite: str, output: str, trials: int, failed: int
) -> None:
    import re

    counts = next(one.counts for one in SUITES if one.name == suite)
    found = [match.groupdict() for match in re.finditer(counts, output, re.MULTILINE)]
    assert sum(int(match["trials"]) for match in found) == trials
    assert sum(int(match.get("failed") or 0) for match in found) == failed


def counts(memory: float = 0.0, files: int = 0, disk: float = 0.0) -> list[Count]:
    """An hour in 60 counts; what grows, by how much in it."""
    return [
        Count(
            60.0 * k,
            5 + files * k // 60,
            13,
            int((300 << 20) + memory * k / 60),
            int(1000 * (1 + disk * k / 60)),
        )
        for k in range(60)
    ]


def test_what_grows_is_found_and_what_is_flat_is_not() -> None:
    assert grown(counts()) == []
    assert grown(counts(memory=1 << 20)) == []
    assert "memory grows by 30.0 MiB an hour" in grown(counts(memory=30 << 20))[0]
    assert grown(counts(files=4)) == ["open files: 6 before, 8 after"]
    assert "bytes on disk" in grown(counts(disk=4))[0]


def test_a_training_that_is_killed_and_goes_on_loses_nothing(tmp_path: Path) -> None:
    found = endurance.endure(tmp_path / "root", seconds=1.0, seed=1, saves_per_kill=5)
    assert found.failures == []
    assert found.kills >= 1
    assert found.saves >= 2
    assert found.restores >= 1


def test_a_process_that_opens_its_root_again_and_again_loses_nothing(tmp_path: Path) -> None:
    found = restarts.restart(tmp_path / "root", 60, seed=1)
    assert found.failures == []
    assert len(found.counts) == 3


def test_a_restart_that_is_refused_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Engine] = []
    monkeypatch.setattr(restarts, "Cycle", held.append)
    monkeypatch.setattr(restarts, "WAYS", ("in a cycle",))
    found = restarts.restart(tmp_path / "root", 2, seed=1)
    held[0].close()
    assert (found.restarts, found.failed) == (2, 1)
    assert "RootBusy" in found.failures[0]
