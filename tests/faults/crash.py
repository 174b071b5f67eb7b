"""S1: a process is killed before or inside any mutating call, or at any time, and once more while
it
recovers.

    python -m tests.faults.crash --points 300   # over all scenarios and both ways to be killed
    python -m faults.crash --exhaustive                    every call of every scenario, both ways
    python -m faults.crash --replay "delta TORN 17"        one of them again, keeping what it leaves

Which call has which number varies from run to run where several threads write, so a replay may need
some attempts (``--times``).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.faults.campaign import Campaign, Tally, shares
from tests.faults.scenarios import ORBAX, TIER, TORCH
from tests.faults.shim import Fault, Mode

MODES = (Mode.KILL, Mode.TORN)


@dataclass(frozen=True, slots=True)
class Point:
    """A moment at which a process is killed.

    ``at``: the call of the scenario, or ``None`` to kill after ``seconds``. ``again``: a call of
    the recovery at which that is killed too.
    """

    scenario: str
    mode: Mode = Mode.KILL
    at: int | None = None
    seconds: float | None = None
    again: int | None = None

    def __str__(self) -> str:
        when = f"{self.mode.name} {self.at}" if self.at is not None else f"after {self.seconds:.4f}"
        return f"{self.scenario} {when}" + ("" if self.again is None else f" again {self.again}")

    @classmethod
    def parse(cls, words: str) -> Point:
        """Return the point that ``str`` printed."""
        scenario, how, number, *more = words.split()
        again = int(more[1]) if more else None
        if how == "after":
            return cls(scenario, seconds=float(number), again=again)
        return cls(scenario, Mode[how], int(number), again=again)


def stratified(points: int, calls: Mapping[str, int], rng: random.Random) -> Iterator[Point]:
    """``points`` over the scenarios, by the root of their number of calls; within each spread over
    its calls, both modes in turn.
    """
    for scenario, share in shares(
        points, {name: number**0.5 for name, number in calls.items()}
    ).items():
        for number in range(share):
            at = int(calls[scenario] * (number + rng.random()) / share)
            yield Point(scenario, MODES[(number + share) % 2], at)


def exhaustive(calls: Mapping[str, int]) -> Iterator[Point]:
    """Every call of every scenario, both modes."""
    return (
        Point(scenario, mode, at)
        for scenario, number in calls.items()
        for mode in MODES
        for at in range(number)
    )


def attempt(campaign: Campaign, point: Point, *, keep: bool = True) -> list[str]:
    """Kill at a point; every promise that is then broken."""
    with campaign.trial(point.scenario) as trial:
        fault = None if point.at is None else Fault(point.mode, point.at)
        acted = campaign.run("act", trial, fault=fault, kill_after=point.seconds)
        problems = [f"it hung: {acted}"] if acted.hung else [acted.error] if acted.error else []
        if point.again is not None:
            recovered = campaign.run("recover", trial, fault=Fault(Mode.KILL, point.again))
            problems += [f"the recovery hung: {recovered}"] if recovered.hung else []
            problems += [f"the recovery failed: {recovered.error}"] if recovered.error else []
        checked = campaign.run("check", trial)
        problems += checked.value or []
        problems += [checked.error] if checked.error else []
        problems += [f"the check hung: {checked}"] if checked.hung else []
        if problems and keep:
            problems.append(f"kept: {campaign.keep(trial)}")
    return problems


def attempt_all(campaign: Campaign, points: Iterable[Point], tally: Tally) -> list[str]:
    """Every problem of all points, each with what replays it."""
    found = []
    for point in points:
        problems = attempt(campaign, point, keep=tally.failed.total() < 5)
        tally.add(point.scenario, bool(problems))
        found += [f"seed {tally.seed}, --replay '{point}': {problem}" for problem in problems]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument(
        "--times",
        type=int,
        default=0,
        help="kills at random times beside the points; with --replay, attempts",
    )
    parser.add_argument(
        "--again", type=int, default=0, help="points at which the recovery is killed, too"
    )
    parser.add_argument(
        "--scenario", action="append", help="only this one; may be given more than once"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--replay", metavar="POINT")
    asked = parser.parse_args()
    with Campaign() as campaign:
        if asked.replay is not None:
            tally = Tally(f"S1, replay of {asked.replay}", asked.seed)
            points: Iterable[Point] = [Point.parse(asked.replay)] * max(1, asked.times)
        else:
            tally = Tally("S1, process crash", asked.seed)
            points = planned(campaign, asked, random.Random(asked.seed))
        problems = attempt_all(campaign, points, tally)
    print(*problems, tally, sep="\n")
    sys.exit(bool(problems))


def planned(campaign: Campaign, asked: argparse.Namespace, rng: random.Random) -> list[Point]:
    """The points that the command line asks for."""
    names = asked.scenario or [*TORCH, *TIER, *ORBAX]
    counts = {name: campaign.counts(name) for name in names}
    calls = {name: acted for name, (acted, _, _) in counts.items()}
    points = [*exhaustive(calls)] if asked.exhaustive else [*stratified(asked.points, calls, rng)]
    for _ in range(asked.times):
        name = rng.choice(names)
        points.append(Point(name, seconds=rng.uniform(0, 1.2 * counts[name][2])))
    for _ in range(asked.again):
        name = rng.choice(names)
        points.append(
            Point(
                name,
                rng.choice(MODES),
                rng.randrange(calls[name]),
                again=rng.randrange(counts[name][1]),
            )
        )
    return points


if __name__ == "__main__":
    main()
