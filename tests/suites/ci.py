"""Run everything that CI runs, in lanes, and print a table of suites and minutes.

    python -m tests.suites.ci              # what `.ci/run` does
    python -m tests.suites.ci lint test    # some suites only

Most suites wait: for a disk, for other ranks, for processes that start. So three of them run beside
each other. Each writes to a log of its own in build/ci. When a suite ends, the end of its log is
printed, or all of it if the suite failed. A failure stops no other suite.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import REPOSITORY

LANES = 3
# A run is ended after 90 minutes (.github/workflows/ci.yml), and its table is lost.
LATE_MINUTES = 75.0
_TAIL = 12  # lines of a log that passed


@dataclass(frozen=True, slots=True)
class Suite:
    """Calls of make that run one after the other.

    Attributes:
        name: The target, or what tells two calls of it apart.
        calls: Targets and their variables, as arguments of make.
        minutes: The usual time on two quiet cores. Long suites begin first.
    """

    name: str
    calls: tuple[tuple[str, ...], ...]
    minutes: float


# The same seeds every time, so that a failure is of the change at hand. `make soak` takes new ones.
SEED = "ARGS=--seed 20261121"
SUITES = (
    Suite("lint", (("lint",),), 0.5),
    Suite("test", (("test",),), 5),
    Suite("rank-test", (("rank-test",),), 4),
    Suite("test-tools", (("test-tools",),), 4.5),
    Suite(
        "gpu-rehearsal, versions",
        (
            ("gpu-rehearsal",),
            # The rehearsal has built a wheel for Python 3.12.
            ("versions", "ARGS=--ci --wheels build/gpu-rehearsal/gpu-kit/wheels"),
        ),
        4,
    ),
    Suite(
        "power-test",
        (("power-test", "POWER_STATES=40", "POWER_KILLED=2", "POWER_CUTS=3", SEED),),
        1.5,
    ),
    Suite("experiments", (("experiments",),), 1.2),
    # A version that is refused, the oldest one and the newest; a release tries all.
    Suite("megatron-test", (("megatron-test", "MEGATRON_OLDER=0.15.3 0.16.1"),), 1),
    Suite(
        "crash-test",
        (("crash-test", "CRASH_POINTS=100", "ERROR_POINTS=50", "DATA_KILLS=3", SEED),),
        1.2,
    ),
    Suite("damage-test", (("damage-test", "TRIALS=5000", SEED),), 0.6),
    Suite("trl-test", (("trl-test",),), 1),
    Suite("receivers-test", (("receivers-test",),), 1),
    Suite("grain-test", (("grain-test",),), 1),
    Suite(
        "fuzz",
        (
            ("fuzz", "FUZZ_RUNS=10000", "ARGS=apply round_trip arithmetic codes laws changes"),
            ("fuzz", "FUZZ_RUNS=300", "ARGS=documents roots --seed 20261121"),
        ),
        0.8,
    ),
    Suite("planted-bugs", (("planted-bugs",),), 0.6),
    Suite("titan-test", (("titan-test",),), 0.5),
    Suite("torn-test", (("torn-test", "RUNS=5"),), 0.5),
    Suite("store-test", (("store-test", "STORE_FAULTS=100", "ARGS=--seed 5"),), 0.5),
    Suite("model-test", (("model-test", "MODEL_RUNS=50", "FENCE_ROUNDS=25", "SCHEDULES=30"),), 0.3),
    # Prints one line and goes on where Spin is not installed: it is in no Python package registry.
    Suite("model-check", (("model-check", "MODEL_SIZE=--quick"),), 0.3),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit status of a suite, its log, and what it took: minutes, and minutes of processors."""

    suite: Suite
    status: int
    log: Path
    minutes: float
    processor_minutes: float


def main() -> int:
    """Run the suites, print the table, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of suites (default: all)")
    parser.add_argument("--lanes", type=int, default=LANES)
    options = parser.parse_args()
    unknown = set(options.names) - {suite.name for suite in SUITES}
    if unknown:
        parser.error(f"no suites {sorted(unknown)}; there are {[suite.name for suite in SUITES]}")
    chosen = [suite for suite in SUITES if not options.names or suite.name in options.names]
    folder = REPOSITORY / "build/ci"
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    # Nothing is left out for lack of time, but the log says what has taken it.
    late = threading.Timer(60 * LATE_MINUTES, report_late, [chosen, outcomes])
    late.daemon = True
    late.start()
    with ThreadPoolExecutor(options.lanes) as lanes:
        longest_first = sorted(chosen, key=lambda suite: -suite.minutes)
        for ended in as_completed([lanes.submit(run, suite, folder) for suite in longest_first]):
            outcomes.append(ended.result())
            print(end_of_log(outcomes[-1]), flush=True)
    print(table(outcomes, (time.monotonic() - begin) / 60))
    failed = sum(outcome.status != 0 for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return int(failed > 0)


def run(suite: Suite, folder: Path) -> Outcome:
    """Run the calls of a suite until one fails."""
    log = folder / f"{suite.name.replace(' ', '-')}.log"
    begin = time.monotonic()
    status, processor_seconds = 0, 0.0
    with log.open("wb") as file:
        for call in suite.calls:
            process = subprocess.Popen(
                # Make within make has the variables of the outer one, whose ARGS names suites.
                ["make", "ARGS=", *call],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            _, code, usage = os.wait4(process.pid, 0)
            process.returncode = status = os.waitstatus_to_exitcode(code)
            processor_seconds += usage.ru_utime + usage.ru_stime
            if status:
                break
    return Outcome(suite, status, log, (time.monotonic() - begin) / 60, processor_seconds / 60)


def report_late(chosen: Sequence[Suite], outcomes: Sequence[Outcome]) -> None:
    """Print what has been measured until ``LATE_MINUTES``, and which suites have not ended."""
    ended = [outcome.suite for outcome in outcomes]
    names = "; ".join(suite.name for suite in chosen if suite not in ended)
    print(table(outcomes, LATE_MINUTES), f"=== LATE: not ended: {names}", sep="\n", flush=True)


def end_of_log(outcome: Outcome) -> str:
    """Return the last lines of a log that passed, or all of one that failed."""
    lines = outcome.log.read_text(errors="replace").splitlines()
    result = "passed" if outcome.status == 0 else f"FAILED with status {outcome.status}"
    title = f"=== {outcome.suite.name}: {result} in {outcome.minutes:.1f} min"
    return "\n".join([title, *(lines if outcome.status else lines[-_TAIL:])])


def table(outcomes: Sequence[Outcome], minutes: float) -> str:
    """Return the table of suites, the longest first."""
    rows = [f"{'suite':<16} {'minutes':>8} {'processor':>10}  result"]
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.minutes):
        result = "passed" if outcome.status == 0 else f"failed ({outcome.status})"
        rows.append(
            f"{outcome.suite.name:<16} {outcome.minutes:>8.1f} {outcome.processor_minutes:>10.1f}"
            f"  {result}"
        )
    processor = sum(outcome.processor_minutes for outcome in outcomes)
    rows.append(f"{'all':<16} {minutes:>8.1f} {processor:>10.1f}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
