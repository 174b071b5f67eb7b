"""Cuts the power at every moment of recorded scenarios, in the model of ``power.py``, and looks at
what is left.

    python -m tests.faults.cut                             # every scenario, 2,000 states each
    python -m tests.faults.cut delta --states 100000       # more of one
    python -m tests.faults.cut delta --seed 7 --only 1234  # one state again, which is kept

Each scenario is recorded from the first call on: its preparation, in a directory whose parents it
has to make, and its act. It passes where every step that was acknowledged, and every other that is
listed, restores bit for bit, and a new process can save and collect. Those that do not sync must
lose what they acknowledged: they show that the model bites. With ``durability="process"`` nothing
that is restored may be wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltacheck import SaveOptions
from tests.faults import power, scenarios, shim
from tests.faults.scenarios import Acknowledge, Scenario
from tests.suites import planted
from tests.support.memory import memory_folder

ROOT = Path(
    "new/parents/root"
)  # in the folder of a scenario, which alone is there at the beginning


class ReplacedTorchSave(scenarios.OverwritingTorchSave):
    """The common advice: another name, then ``os.replace``; and no sync."""

    @staticmethod
    def save(root: Path, step: int) -> None:
        import torch

        root.mkdir(parents=True, exist_ok=True)
        with (root / "checkpoint.tmp").open("wb") as file:
            torch.save(scenarios.torch_state(step), file)
        os.replace(root / "checkpoint.tmp", root / "checkpoint.pt")


class SyncedReference(scenarios.ReferenceProtocol):
    """The reference protocol, with the way to its root."""

    @staticmethod
    def save(root: Path, step: int) -> None:
        for missing in reversed([path for path in (root, *root.parents) if not path.exists()]):
            missing.mkdir()
            scenarios.sync(missing.parent)
        scenarios.ReferenceProtocol.save(root, step)


def _unsynced(root: Path, acknowledge: Acknowledge) -> None:
    with scenarios.engine(
        root, options=SaveOptions(grace_seconds=0, durability="process")
    ) as opened:
        for step in range(2):
            opened.save(step, scenarios.torch_state(step)).wait(timeout=240)
            acknowledge(step)


def _fresh(root: Path, acknowledge: Acknowledge) -> None:
    with scenarios.engine(root) as opened:
        for step in range(2):
            opened.save(step, scenarios.torch_state(step)).wait(timeout=240)
            acknowledge(step)


def _control(name: str, subject: Any, keep: int | None) -> Scenario:
    def act(root: Path, acknowledge: Acknowledge) -> None:
        for step in range(2):
            subject.save(root, step)
            acknowledge(step)

    return Scenario(name, subject, lambda root: None, act, keep=keep)


MUST_PASS = {
    "two-saves": Scenario("two-saves", scenarios.TorchEngine(), lambda root: None, _fresh),
    **scenarios.TORCH,
    "memory-rebooted": scenarios.TIER["memory-rebooted"],
    **scenarios.ORBAX,
    "reference-protocol": _control("reference-protocol", SyncedReference(), keep=None),
}
MUST_LOSE = {
    "durability-process": Scenario(
        "durability-process", scenarios.TorchEngine(), lambda root: None, _unsynced
    ),
    "torch.save-replaced": _control("torch.save-replaced", ReplacedTorchSave(), keep=1),
}
ALL = MUST_PASS | MUST_LOSE


# --- recording ------------------------------------------------------------------------------------


def record(base: Path, names: Iterable[str]) -> dict[str, list[power.Op]]:
    """The calls of each scenario, carried out below ``base`` by one process of its own."""
    command = [sys.executable, "-m", "tests.faults.cut", "--record", base, *names]
    subprocess.run(list(map(str, command)), check=True, timeout=300, env=shim.environment())
    return {name: power.from_trace(shim.read_trace(base / f"{name}.trace")) for name in names}


def _record(base: Path, names: Sequence[str]) -> None:
    """REQUIRES: runs under the shim."""
    for name in names:
        scenario, folder = ALL[name], base / name
        folder.mkdir(parents=True, exist_ok=True)
        shim.arm(folder, shim.Fault())
        shim.trace(base / f"{name}.trace")
        scenario.prepare(folder / ROOT)
        for step in scenario.prepared:
            shim.mark(f"ack {step}")
        scenario.act(folder / ROOT, lambda step: shim.mark(f"ack {step}"))
        shim.trace(None)
        shim.disarm()


def killed(
    scenario: Scenario, trace: Sequence[power.Op], points: Sequence[int], folder: Path
) -> Iterator[list[power.Op]]:
    """For each point: the calls of a run that was killed there, then of a process that finds what
    it
    left, goes on, saves and is acknowledged.

    What the first had not synced is not durable only because the second has seen it.
    """
    base = folder / f"{scenario.name}-killed"
    for point in points:
        (base / str(point)).mkdir(parents=True)
        power.materialise(power.seen_at(trace, point), base / str(point))
    command = [
        sys.executable,
        "-m",
        "tests.faults.cut",
        "--record-again",
        base,
        scenario.name,
        *points,
    ]
    subprocess.run(list(map(str, command)), check=True, timeout=300, env=shim.environment())
    for point in points:
        yield [*trace[:point], *power.from_trace(shim.read_trace(base / f"{point}.trace"))]


def _record_again(base: Path, name: str, points: Sequence[str]) -> None:
    """REQUIRES: runs under the shim."""
    for point in points:
        shim.arm(base / point, shim.Fault())
        shim.trace(base / f"{point}.trace")
        shim.mark(f"ack {ALL[name].subject.go_on(base / point / ROOT)}")
        shim.trace(None)
        shim.disarm()


# --- judging --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """Of one scenario. ``states``: tried; ``saves``: of these, those in which a new process saved
    and
    collected too. Numbers of states with: ``lost``, an acknowledged step that is not listed;
    ``unreadable``, a listed one that raises; ``wrong``, one with wrong values; ``stuck``, something
    in the way of the next process. ``first``: the first bad one.
    """

    states: int = 0
    saves: int = 0
    lost: int = 0
    unreadable: int = 0
    wrong: int = 0
    stuck: int = 0
    first: str = ""

    @property
    def bad(self) -> int:
        return self.lost + self.unreadable + self.wrong + self.stuck

    def note(self, problems: Sequence[str], where: str) -> None:
        self.lost += any(
            "acknowledged" in problem or "cannot be listed" in problem for problem in problems
        )
        self.wrong += any(
            "does not restore" in problem and _is_wrong(problem) for problem in problems
        )
        self.unreadable += any(
            "does not restore" in problem and not _is_wrong(problem) for problem in problems
        )
        if problems and not self.first:
            self.first = f"{where}: {'; '.join(problems)}"


def _is_wrong(problem: str) -> bool:
    """Return whether a value was returned that is not the right one."""
    what = problem.partition("does not restore: ")[2]
    return what.startswith(("leaf ", "keys ")) or " instead of " in what


def acknowledged(cut: power.Cut) -> set[int]:
    return {int(mark.removeprefix("ack ")) for mark in cut.marks}


def try_states(
    scenario: Scenario,
    trace: Sequence[power.Op],
    states: int,
    seed: int,
    folder: Path,
    *,
    saves: float = 0.1,
    only: int | None = None,
) -> Outcome:
    """Try at most ``states`` states of a scenario. ``saves``: share of them in which a new process
    saves and collects, too.
    """
    scenario = dataclasses.replace(
        scenario, prepared=()
    )  # what was acknowledged is among the marks
    outcome, rng = Outcome(), random.Random(seed)
    for number, cut in enumerate(power.cuts(trace, states, seed)):
        goes_on = rng.random() < saves
        if only not in (None, number):
            continue
        place = folder / f"{scenario.name}-{number}"
        place.mkdir()
        power.materialise(cut.tree, place)
        where = (
            f"state {number} (--seed {seed} --states {states} --only {number}), after call"
            f" {cut.point} {trace[cut.point - 1].kind}"
        )
        problems = scenarios.violations(scenario, place / ROOT, acknowledged(cut))
        outcome.states += 1
        outcome.note(problems, where)
        if goes_on and not problems:
            outcome.saves += 1
            problems = scenarios.recovery_violations(scenario, place / ROOT)
            outcome.stuck += bool(problems)
            outcome.note([f"afterwards: {problem}" for problem in problems], where)
        if only is None:
            shutil.rmtree(place)
    return outcome


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder in memory where there is such a file system, else on disk."""
    folder = Path(tempfile.mkdtemp(prefix="deltacheck-power-", dir=memory_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="scenario", help=", ".join(ALL))
    parser.add_argument("--states", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument(
        "--saves",
        type=float,
        default=0.05,
        help="share of the states in which a new process saves and collects, too",
    )
    parser.add_argument("--only", type=int, help="this state only; it is kept")
    parser.add_argument(
        "--killed",
        type=int,
        default=0,
        help="also kill each scenario at so many points, go on, and cut the power then",
    )
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--record-again", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    planted.plant_by_environment()
    if args.record:
        _record(Path(args.names[0]), args.names[1:])
        return 0
    if args.record_again:
        _record_again(Path(args.names[0]), args.names[1], args.names[2:])
        return 0
    failed, tried = False, 0
    with workplace() as folder:
        runs = list(record(folder, args.names or list(ALL)).items())
        for name, trace in list(runs):
            if name in MUST_PASS and args.killed:
                points = sorted(
                    random.Random(args.seed).sample(
                        range(1, len(trace)), min(args.killed, len(trace) - 1)
                    )
                )
                runs += [(name, again) for again in killed(ALL[name], trace, points, folder)]
        for name, trace in runs:
            begin = time.monotonic()
            outcome = try_states(
                ALL[name], trace, args.states, args.seed, folder, saves=args.saves, only=args.only
            )
            is_expected = (
                (outcome.lost > 0 and not outcome.wrong) if name in MUST_LOSE else not outcome.bad
            )
            failed |= not is_expected and args.only is None
            tried += outcome.states if name in MUST_PASS else 0
            print(
                f"{name}: {len(trace)} calls ({sum(op.kind == 'sync' for op in trace)} syncs),"
                f" {outcome.states} states, {outcome.saves} saves "
                f"after: {outcome.lost} lose an acknowledged step, {outcome.unreadable} list an"
                f" unreadable one, {outcome.wrong} a wrong one, "
                f"{outcome.stuck} stop the next process; {time.monotonic() - begin:.0f} s"
                + ("" if is_expected else "  <- NOT AS PROMISED")
                + (" (it must)" if is_expected and name in MUST_LOSE else ""),
                flush=True,
            )
            if outcome.first and (not is_expected or args.only is not None):
                print(f"  first: {outcome.first[:2000]}")
            if args.only is not None:
                kept = Path(tempfile.mkdtemp(prefix="deltacheck-power-kept-"))
                shutil.copytree(folder / f"{name}-{args.only}", kept / "state")
                print(f"  kept in {kept}")
    if tried and not failed:
        print(
            f"seed {args.seed}: no failure in {tried} states; less than {3 / tried:.1e} of such"
            " states fail, with 95 % confidence"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
