"""S3: any mutating call fails, writes less than it was asked to, or hangs; once, or from there on.

    python -m tests.faults.io_errors --points 150    # over all scenarios and faults
    python -m tests.faults.io_errors --exhaustive    # every call and error, once and from there on
    python -m tests.faults.io_errors --replay "delta fail ENOSPC 17"   # repeat one, keep its files
    python -m tests.faults.io_errors --public-calls 500    # only the table of ``external_calls``

Two ways to meet the fault: ``fail``, a whole life of the library (opening, compacting, collecting)
that may only raise, after which the same process goes on; and ``train``, a training that goes on
while its saves fail.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from tests.faults import external_calls
from tests.faults.campaign import Campaign, Tally, Trial
from tests.faults.scenarios import ORBAX, TORCH
from tests.faults.shim import MUTATING, Fault, Mode
from tests.faults.trials import FAULT_OVER
from tests.faults.zygote import Outcome

_OPENING = frozenset({"open", "look", "mkdir"})
_CHANGING = frozenset({"open", "mkdir", "rename", "unlink", "rmdir", "truncate"})
_GROWING = frozenset({"open", "write", "mkdir", "truncate", "rename"})

# Where each may come from: the kinds of calls that it is given to.
FAULTS: dict[str, Fault] = {
    "ENOSPC": Fault(Mode.FAIL, error=errno.ENOSPC, kinds=_GROWING),
    "ENOSPC-from": Fault(Mode.FAIL_FROM, error=errno.ENOSPC, kinds=_GROWING),
    "EIO": Fault(Mode.FAIL, error=errno.EIO),
    "EIO-from": Fault(Mode.FAIL_FROM, error=errno.EIO),
    "EMFILE": Fault(Mode.FAIL, error=errno.EMFILE, kinds=_OPENING - {"mkdir"}),
    "EMFILE-from": Fault(Mode.FAIL_FROM, error=errno.EMFILE, kinds=_OPENING - {"mkdir"}),
    "EROFS": Fault(Mode.FAIL, error=errno.EROFS, kinds=_CHANGING),
    "EROFS-from": Fault(Mode.FAIL_FROM, error=errno.EROFS, kinds=_CHANGING),
    "fsync": Fault(Mode.FAIL, error=errno.EIO, kinds=frozenset({"sync"})),
    "fsync-from": Fault(Mode.FAIL_FROM, error=errno.EIO, kinds=frozenset({"sync"})),
    "short": Fault(Mode.SHORT, kinds=frozenset({"write"})),
    "hang": Fault(Mode.HANG),
}
WAYS = ("fail", "train")
HANG_TIMEOUT_SECONDS = 1.0
TRAININGS = ("first-keyframe", "delta", "keep-last", "orbax-keep")


@dataclass(frozen=True, slots=True)
class Point:
    """Call ``at``, of those that the fault may be given to, meets the fault."""

    scenario: str
    way: str
    fault: str
    at: int

    def __str__(self) -> str:
        return f"{self.scenario} {self.way} {self.fault} {self.at}"

    @classmethod
    def parse(cls, words: str) -> Point:
        """Return the point that ``str`` printed."""
        scenario, way, fault, at = words.split()
        return cls(scenario, way, fault, int(at))


def cells(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Every scenario with every way and fault that it can meet. Opening a root waits for the disk
    however long that hangs.
    """
    return [
        (name, way, fault)
        for name in names
        for way in WAYS
        for fault in FAULTS
        if not (way == "train" and name not in TRAININGS)
        and not (way == "fail" and (fault == "hang" or name in ORBAX))
    ]


def calls(
    campaign: Campaign, cells: Iterable[tuple[str, str, str]]
) -> dict[tuple[str, str, str], int]:
    """Count the calls that each fault may hit, in one trace for each scenario and mode."""
    traces: dict[tuple[str, str], Counter[str]] = {}
    for name, way in dict.fromkeys((name, way) for name, way, _ in cells):
        with campaign.trial(name) as trial:
            outcome = meet(campaign, trial, way, Fault(kinds=MUTATING | {"look"}))
            problems = outcome.error or outcome.value
            assert not problems, outcome
            ops = itertools.takewhile(lambda op: op.path != FAULT_OVER, trial.ops())
            traces[name, way] = Counter(op.kind for op in ops)
    return {
        cell: sum(traces[cell[0], cell[1]][kind] for kind in FAULTS[cell[2]].kinds)
        for cell in cells
    }


def meet(campaign: Campaign, trial: Trial, way: str, fault: Fault) -> Outcome:
    """Let a trial meet a fault."""
    if way == "fail":
        return campaign.run("fail", trial, fault=fault)
    # Of Orbax's own calls nothing is promised: the fault is given to those in our store.
    watched = trial.root / "deltacheck" if trial.scenario in ORBAX else trial.area
    timeout = HANG_TIMEOUT_SECONDS if fault.mode is Mode.HANG else 240.0
    return campaign.run(
        "train", trial, str(watched), fault.as_json(), timeout, trace=True, deadline=300.0
    )


def stratified(
    points: int, calls: Mapping[tuple[str, str, str], int], rng: random.Random
) -> Iterator[Point]:
    """``points``, drawn without replacement from the cells until all have been drawn, each at any
    of its calls.
    """
    drawn: list[tuple[str, str, str]] = []
    for _ in range(points):
        drawn = drawn or rng.sample(sorted(calls), len(calls))
        cell = drawn.pop()
        yield Point(*cell, rng.randrange(max(1, calls[cell])))


def exhaustive(calls: Mapping[tuple[str, str, str], int]) -> Iterator[Point]:
    """Every call of every cell."""
    return (Point(*cell, at) for cell, number in calls.items() for at in range(number))


def attempt(campaign: Campaign, point: Point, *, keep: bool = True) -> list[str]:
    """Let one call meet its fault; every promise that is then broken."""
    fault = replace(FAULTS[point.fault], at=point.at)
    with campaign.trial(point.scenario) as trial:
        outcomes = [meet(campaign, trial, point.way, fault)]
        outcomes.append(campaign.run("check_trust", trial, str(trial.trace), fault.error))
        problems: list[str] = []
        for outcome in outcomes:
            problems += outcome.value or []
            problems += [f"it raised or died: {outcome.error}"] if outcome.error else []
            problems += [f"it hung: {outcome}"] if outcome.hung or outcome.killed else []
        if problems and keep:
            problems.append(f"kept: {campaign.keep(trial)}")
    return problems


def attempt_all(campaign: Campaign, points: Iterable[Point], tally: Tally) -> list[str]:
    """Every problem of all points, each with what replays it."""
    found = []
    for point in points:
        problems = attempt(campaign, point, keep=tally.failed.total() < 5)
        tally.add(f"{point.way} {point.fault}", bool(problems))
        found += [f"seed {tally.seed}, --replay '{point}': {problem}" for problem in problems]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=150)
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--times", type=int, default=1, help="with --replay, attempts")
    parser.add_argument(
        "--scenario", action="append", help="only this one; may be given more than once"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--replay", metavar="POINT")
    parser.add_argument(
        "--public-calls", type=int, metavar="POINTS", help="let only the table of calls fail"
    )
    parser.add_argument("--call", action="append", help="of the table, only this public call")
    asked = parser.parse_args()
    if asked.replay is not None and ":" in asked.replay:
        _report(*external_calls.replay(asked.replay))
    if asked.public_calls is not None:
        _report(*external_calls.campaign(asked.public_calls, asked.seed, asked.call))
    with Campaign() as campaign:
        if asked.replay is not None:
            tally = Tally(f"S3, replay of {asked.replay}", asked.seed)
            points: Iterable[Point] = [Point.parse(asked.replay)] * asked.times
        else:
            tally = Tally("S3, I/O errors", asked.seed)
            found = calls(campaign, cells(asked.scenario or [*TORCH, *ORBAX]))
            points = (
                exhaustive(found)
                if asked.exhaustive
                else stratified(asked.points, found, random.Random(asked.seed))
            )
        problems = attempt_all(campaign, points, tally)
    if asked.replay is None and asked.scenario is None:
        print(tally)
        number = None if asked.exhaustive else 4 * asked.points
        more, tally = external_calls.campaign(number, asked.seed, asked.call)
        problems += more
    _report(problems, tally)


def _report(problems: list[str], tally: Tally) -> NoReturn:
    print(*problems, tally, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
