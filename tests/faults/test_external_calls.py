"""Each public call raises errors of ours only, whichever external call fails below it.

The quick part; ``make crash-test`` lets more of them fail. A failure prints what to replay it with.
"""

from __future__ import annotations

import random

import pytest

from tests.faults import external_calls
from tests.faults.campaign import Tally
from tests.faults.external_calls import ORBAX, TORCH, Point, PublicCall, Table


@pytest.mark.parametrize(("calls", "number"), [(TORCH, 30), (ORBAX, 8)], ids=["torch", "orbax"])
def test_a_failing_external_call_gives_an_error_of_ours_and_costs_no_acknowledged_step(
    calls: dict[str, PublicCall], number: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    with Table(calls) as table:
        cells = table.cells()
        chosen = external_calls.drawn(cells, number, random.Random(seed))
        problems = external_calls.attempt_all(table, chosen, Tally("S3, public calls", seed))
    assert problems == []
    # The table is of use only as long as its patches meet the calls.
    assert {kind for _, kind in cells} >= external_calls.KINDS.keys() - {"torch memory"}


def test_nobody_waits_for_a_save_whose_threads_could_not_start() -> None:
    with Table(["engine_save"]) as table:
        table.cells()
        assert table.attempt(Point("engine_save", "thread", 0, 0)) == []
