"""The long forms of the random suites, within a time that is given in minutes: one table of trials,
failures and bounds.

Each suite is a program of its own, run again and again with other seeds until its share of the time
is over. A suite whose files are not here is left out, and named. With no failure in n trials the
rate is below 3/n with 95 % confidence.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import TESTS

PYTHON = sys.executable


@dataclass(frozen=True, slots=True)
class Suite:
    """``command(size, seed)``: of one round; ``size`` is trials, or seconds where ``by_seconds``.
    ``counts``: finds "trials", and "failed" where that is told, in what it prints; all matches are
    added up. ``first``: size of the first round, from which the others follow. ``needs``: files
    without which it is left out.
    """

    name: str
    what: str
    command: Callable[[int, int], Sequence[str | Path]]
    counts: str
    first: int
    by_seconds: bool = False
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def program(path: str, size: str) -> Callable[[int, int], Sequence[str | Path]]:
    module = "tests." + path.removesuffix(".py").replace("/", ".")
    return lambda n, s: [PYTHON, "-m", module, size, str(n), "--seed", str(s)]


def pytest(*names: str) -> list[str | Path]:
    return [PYTHON, "-m", "pytest", "-q", "-n", "0", *(TESTS / f"{name}.py" for name in names)]


TALLY = r"\ball +(?P<trials>\d+) tried +(?P<failed>\d+) failed"
PASSED = r"(?:(?P<failed>\d+) failed, )?(?P<trials>\d+) passed"
FUZZED = r"(?:executed_units: +(?=\d+$)|^(?=\d+ inputs))(?P<trials>\d+)"
# Where a suite has several parts of so many seconds each, or compiles first, its size is a part of
# its share.
SUITES = (
    Suite(
        "S1",
        "process crash",
        program("faults/crash.py", size="--points"),
        TALLY,
        60,
        needs=("faults/crash.py",),
    ),
    Suite(
        "S2",
        "power loss, modelled",
        program("faults/cut.py", size="--states"),
        r"no failure in (?P<trials>\d+) states",
        200,
        needs=("faults/cut.py",),
    ),
    Suite(
        "S2",
        "power loss, mounted image",
        program("faults/image.py", size="--cuts"),
        r"(?P<failed>\d+) bad of (?P<trials>\d+) cuts",
        10,
        needs=("faults/image.py",),
    ),
    Suite(
        "S3",
        "I/O errors",
        program("faults/io_errors.py", size="--points"),
        TALLY,
        60,
        needs=("faults/io_errors.py",),
    ),
    Suite(
        "S4",
        "damage",
        program("suites/damage_trials.py", size="--trials"),
        r"(?P<trials>\d+) trials from seed",
        500,
        needs=("suites/damage_trials.py",),
    ),
    Suite(
        "S5",
        "fuzz",
        lambda n, s: [
            PYTHON,
            "-m",
            "tests.suites.sanitized",
            "fuzz",
            "--seconds",
            str(max(1, n // 5)),
        ],
        FUZZED,
        40,
        by_seconds=True,
    ),
    Suite(
        "S6",
        "properties, 1,000 examples",
        lambda n, s: [
            *pytest(
                "codec/test_codec_properties",
                "codec/test_codec_lattice",
                "codec/test_codec_nested",
                "codec/test_codec_octaves",
                "codec/test_codec_ratios",
                "leaf/test_tree",
                "leaf/test_grid",
            ),
            f"--hypothesis-seed={s}",
        ],
        PASSED,
        1,
        environment=(("HYPOTHESIS_PROFILE", "round"),),
    ),
    Suite(
        "S8",
        "threads of the encoder",
        lambda n, s: [
            PYTHON,
            "-m",
            "tests.suites.sanitized",
            "threads",
            "--seconds",
            str(max(1, n // 3)),
        ],
        r"(?P<trials>\d+) calls, (?P<failed>\d+) wrong",
        30,
        by_seconds=True,
    ),
    Suite(
        "S10",
        "exits",
        lambda n, s: pytest("save/test_exits"),
        PASSED,
        1,
        environment=(("EXIT_CASES", "all"),),
    ),
    Suite(
        "S14",
        "experiments",
        lambda n, s: [*pytest("evaluate/test_experiments"), "-m", "experiments"],
        PASSED,
        1,
        environment=(("EXPERIMENTS", "all"),),
    ),
    Suite(
        "S13",
        "endurance",
        program("suites/endurance.py", size="--seconds"),
        TALLY,
        60,
        by_seconds=True,
    ),
    Suite(
        "S17",
        "restarts within a process",
        program("suites/restarts.py", size="--restarts"),
        TALLY,
        100,
    ),
)


@dataclass(slots=True)
class Outcome:
    suite: Suite
    rounds: int = 0
    trials: int = 0
    failed: int = 0
    seconds: float = 0.0

    def row(self) -> str:
        bound = f"{3 / self.trials:.1e}" if self.trials and not self.failed else "-"
        told = (
            f"{self.trials:>12,} {self.failed:>7}"
            if self.trials or self.failed
            else f"{'-':>12} {self.failed:>7}"
        )
        return (
            f"{self.suite.name:<4} {self.suite.what:<26} {told} {bound:>9} {self.seconds:>8.0f}"
            f" {self.rounds:>7}"
        )


HEAD = f"{'':<4} {'suite':<26} {'trials':>12} {'failed':>7} {'3/n':>9} {'seconds':>8} {'rounds':>7}"


def soak(suite: Suite, seconds: float, rng: random.Random) -> Outcome:
    """Run rounds of a suite until its time is over; at least one, and none after one that
    failed.
    """
    outcome, size = Outcome(suite), suite.first
    if suite.by_seconds:
        size = max(1, round(seconds))
    while not outcome.failed:
        seed = rng.randrange(1 << 32)
        begin = time.monotonic()
        done = subprocess.run(
            [str(part) for part in suite.command(size, seed)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(suite.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.monotonic() - begin
        output = done.stdout + done.stderr
        found = (
            [match.groupdict() for match in re.finditer(suite.counts, output, re.MULTILINE)]
            if suite.counts
            else []
        )
        trials = sum(int(match["trials"]) for match in found)
        outcome.rounds += 1
        outcome.trials += trials
        outcome.failed += sum(int(match.get("failed") or 0) for match in found)
        outcome.seconds += took
        if done.returncode and not outcome.failed:
            outcome.failed = 1
        elif suite.counts and not trials and not outcome.failed and "skipped" not in output:
            output += "\nno figures were found in this output"
            outcome.failed = 1
        if outcome.failed:
            print(
                f"{suite.name} {suite.what}, seed {seed}, ended with"
                f" {done.returncode}:\n{output[-8000:]}",
                flush=True,
            )
        left = seconds - outcome.seconds
        if suite.by_seconds or not trials or left < took / 4:
            break
        size = max(suite.first // 4, round(size * min(left, 600) / took)) if suite.first > 1 else 1
    return outcome


def main(suites: Sequence[Suite] = SUITES) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of them together")
    parser.add_argument("--suites", nargs="*", default=[], help="only these, such as S1 S13")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    chosen = [suite for suite in suites if not asked.suites or suite.name in asked.suites]
    missing = [
        suite for suite in chosen if not all((TESTS / need).exists() for need in suite.needs)
    ]
    chosen = [suite for suite in chosen if suite not in missing]
    for suite in missing:
        print(f"{suite.name} {suite.what}: left out, {', '.join(suite.needs)} is not here")
    rng, end, outcomes = random.Random(asked.seed), time.monotonic() + 60 * asked.minutes, []
    for number, suite in enumerate(chosen):
        outcomes.append(
            soak(suite, max(1.0, (end - time.monotonic()) / (len(chosen) - number)), rng)
        )
        print(outcomes[-1].row(), flush=True)
    print(
        f"\nseed {asked.seed}, {asked.minutes:g} minutes\n{HEAD}",
        *[outcome.row() for outcome in outcomes],
        sep="\n",
    )
    return any(outcome.failed for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
