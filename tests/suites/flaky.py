"""Run the tests again and again on a busy machine, and name those that depend on chance.

    python -m tests.suites.flaky --runs 5        # `make test` and `make rank-test`, five times each

Two processes for each core keep the machine busy: one computes, one writes and syncs. A quiet run
comes first, unless ``--usual`` names the results of an earlier one: from it a test's usual time is
known. The exit status is 1 if a test failed in any run. A test that took more than ``SLOW`` times
its usual time is printed, and fails nothing: it may wait for a time limit that nothing should
reach, or poll too rarely.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import REPOSITORY

TARGETS = ("test", "rank-test")
SLOW = 10.0
_LEAST_SECONDS = 5.0  # a test below is not called slow, whatever its usual time
_COMPUTE = "while True: sum(range(100_000))"
_WRITE = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.seek(0)
        file.write(os.urandom(4 << 20))
        os.fsync(file.fileno())
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test in one run: ``failure`` is empty if it passed or was skipped."""

    name: str
    seconds: float
    failure: str


def main() -> int:
    """Run the targets, print what failed or was slow, and return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--usual", type=Path, help="a folder with results of a quiet run")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "build/flaky")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    usual = {}
    for target in options.targets:
        file = (options.usual or options.results) / f"quiet-{target}.xml"
        if options.usual is None:
            run(target, file)
        usual |= {test.name: test.seconds for test in read_results(file.read_text())}
    failures = 0
    with busy():
        for number in range(1, options.runs + 1):
            for target in options.targets:
                file = options.results / f"busy-{target}-{number}.xml"
                begin = time.monotonic()
                status = run(target, file)
                minutes = (time.monotonic() - begin) / 60
                tests = read_results(file.read_text()) if file.exists() else []
                failed = [test for test in tests if test.failure]
                failures += len(failed) or int(status != 0)
                print(
                    f"run {number}, make {target}: {len(tests)} tests, {len(failed)} failed, "
                    f"exit status {status}, {minutes:.1f} min",
                    flush=True,
                )
                for test in failed:
                    print(f"  FAILED {test.name}\n    {test.failure}", flush=True)
                for test in slow(tests, usual):
                    print(
                        f"  SLOW {test.name}: {test.seconds:.1f} s, "
                        f"usually {usual[test.name]:.2f} s",
                        flush=True,
                    )
    print(f"{options.runs} runs of {', '.join(options.targets)}: {failures} failures")
    return int(failures > 0)


def run(target: str, results: Path) -> int:
    """Run a target of the Makefile once, and return its exit status.

    Args:
        target: The target, which must pass ``ARGS`` on to pytest.
        results: Where pytest writes its results, as JUnit XML. What it prints goes beside it.
    """
    results.unlink(missing_ok=True)
    with results.with_suffix(".log").open("wb") as log:
        return subprocess.run(
            ["make", target, f"ARGS=--junitxml={results}"],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def read_results(text: str) -> list[Result]:
    """Return the tests of a JUnit XML document. Two entries of one test (its failed tear-down) are
    one.
    """
    tests: dict[str, Result] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        found = [child for child in case if child.tag in ("failure", "error")]
        failure = "; ".join(
            (child.get("message") or child.tag).partition("\n")[0] for child in found
        )
        before = tests.get(name, Result(name, 0.0, ""))
        seconds = before.seconds + float(case.get("time") or 0)
        tests[name] = Result(name, seconds, before.failure or failure)
    return list(tests.values())


def slow(tests: list[Result], usual: Mapping[str, float]) -> list[Result]:
    """Return the tests that took more than ``SLOW`` times their usual seconds."""
    return [
        test
        for test in tests
        if test.seconds > _LEAST_SECONDS
        and test.seconds > SLOW * usual.get(test.name, float("inf"))
    ]


@contextmanager
def busy() -> Iterator[None]:
    """Keep every core busy with a process that computes and one that writes and syncs."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            command
            for core in range(os.cpu_count() or 1)
            for command in (
                [sys.executable, "-c", _COMPUTE],
                [sys.executable, "-c", _WRITE, str(Path(folder) / str(core))],
            )
        ]
        processes = [subprocess.Popen(command) for command in commands]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
