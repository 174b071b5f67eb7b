"""Explore the models of the commit protocol with Spin, and see that they catch each planted bug.

    python -m tests.suites.model_check                # every configuration
    python -m tests.suites.model_check --quick        # smaller sizes, for CI
    python -m tests.suites.model_check lease-ignored  # one bug, and the steps to its violation

A model without a bug must have no violation, and every statement of it must be reached in some
configuration. A model with a bug must have a violation. Needs ``spin`` and a C compiler; without
them this prints one line and exits with 0 (``--required``: with 1).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.support.paths import TESTS

MODELS = TESTS / "model"
_MEMORY_MIB = 6000  # of one search
_DEPTH = 100_000
# The statements that only a planted bug reaches are compiled out. What remains is read from the
# report of each search: `commit.pml:12, state 3, "x = 0"`.
_UNREACHED = re.compile(r'^\s+(\w+\.pml):(\d+), state \d+, "(.*)"$', re.MULTILINE)
_ROLES = ("WITH_COLLECTOR", "WITH_TAGGER", "WITH_READER")


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model with its size.

    Attributes:
        name: The name in reports.
        model: The file, without its suffix.
        defines: The preprocessor's definitions.
    """

    name: str
    model: str
    defines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one search.

    Attributes:
        states: Number of different states.
        depth: Length of the longest path; with an error, that of the path to it.
        seconds: Time of the search.
        error: What was violated; empty: nothing.
        unreached: Lines whose statements were never executed.
        trail: The path to the violation, one step a line.
    """

    states: int
    depth: int
    seconds: float
    error: str
    unreached: frozenset[tuple[str, int]]
    trail: str = ""


def _size(writers: int, saves: int, crashes: int, faults: int = 0) -> tuple[str, ...]:
    sizes = {"WRITERS": writers, "SAVES": saves, "CRASHES": crashes, "FAULTS": faults}
    return tuple(f"{name}={value}" for name, value in sizes.items())


# Reader, tagger and collector are explored beside the writers one or two at a time: all at once
# exceed the memory of a small machine at this size.
FULL = (
    # The longest first: two searches run at a time.
    Configuration("no-locks", "commit", _size(3, 3, 2)),
    Configuration("locks", "commit", ("LOCKS", *_size(3, 3, 2, 1))),
    Configuration("reader", "commit", ("LOCKS", "WITH_READER", *_size(3, 3, 2))),
    Configuration("tagger", "commit", ("LOCKS", "WITH_TAGGER", *_size(3, 3, 2))),
    Configuration("collector", "commit", ("LOCKS", "WITH_COLLECTOR", *_size(3, 3, 2))),
    Configuration("everyone", "commit", ("LOCKS", *_ROLES, *_size(2, 2, 1, 1))),
    Configuration("process", "commit", ("LOCKS", "PROCESS", "WITH_READER", *_size(2, 2, 2))),
    Configuration("blind", "commit", ("BLIND", *_size(2, 4, 0))),
    # Each writer has three timers, so three writers make one commit each.
    Configuration("lease", "lease", ("WRITERS=3", "COMMITS=1", "CRASHES=2")),
    Configuration("lease-commits", "lease", ("WRITERS=2", "COMMITS=2", "CRASHES=2")),
)
QUICK = (
    Configuration("locks", "commit", ("LOCKS", *_size(2, 3, 1, 1))),
    Configuration("everyone", "commit", ("LOCKS", *_ROLES, *_size(1, 2, 1))),
    Configuration("collector", "commit", ("LOCKS", "WITH_COLLECTOR", *_size(2, 2, 1, 1))),
    Configuration("process", "commit", ("LOCKS", "PROCESS", "WITH_READER", *_size(1, 2, 1))),
    Configuration("no-locks", "commit", _size(2, 3, 1)),
    Configuration("blind", "commit", ("BLIND", *_size(2, 3, 0))),
    Configuration("lease", "lease", ("WRITERS=2", "COMMITS=1", "CRASHES=1")),
)

_LOCKS = Configuration("locks", "commit", ("LOCKS", *_size(2, 2, 2, 1)))
_CUTS = Configuration("cuts", "commit", ("LOCKS", *_size(2, 2, 1)))
_THREE = Configuration("three saves", "commit", ("LOCKS", *_size(2, 3, 1, 1)))
_TAGGER = Configuration("tagger", "commit", ("LOCKS", "WITH_TAGGER", *_size(2, 2, 2, 1)))
_READER = Configuration("reader", "commit", ("LOCKS", "WITH_READER", *_size(2, 2, 0)))
_PROCESS = Configuration("process", "commit", ("LOCKS", "PROCESS", "WITH_READER", *_size(1, 2, 1)))
_UNLOCKED = Configuration("no-locks", "commit", _size(2, 3, 0))
_BLIND = Configuration("blind", "commit", ("BLIND", *_size(2, 3, 0)))
_LEASE = Configuration("lease", "lease", ("WRITERS=2", "COMMITS=2", "CRASHES=0"))

# Bugs of tests/suites/planted.py that concern the protocol, and the smallest model that shows each.
PLANTED = {
    "data-not-synced": _CUTS,
    "synced-before-it-is-written": _CUTS,
    "directories-not-synced": _CUTS,
    "way-to-the-root-not-synced": _CUTS,
    "commit-before-data": _CUTS,
    "timeout-ignored": _LOCKS,
    "error-swallowed": _LOCKS,
    "lease-ignored": _LOCKS,
    "sequence-number-reused": _CUTS,
    "collection-takes-saves-under-way": _UNLOCKED,
    "collection-forgets-what-is-protected": _THREE,
    "collection-passes-over-what-it-cannot-read": _THREE,
    "segments-gone-before-their-step": _CUTS,
    "collection-takes-what-a-reader-has-pinned": _READER,
    "fence-ignored": _BLIND,
    "content-not-compared-with-its-digest": _PROCESS,
}
# Bugs that are planted in the models only.
OWN = {
    "acknowledged-before-the-sync": _CUTS,
    "deletion-not-synced": _CUTS,
    "one-look": _UNLOCKED,
    "prune-without-the-lock-of-tags": _TAGGER,
    "tag-without-the-lock": _TAGGER,
    "tag-not-synced": _TAGGER,
    "tag-before-its-step-is-durable": _TAGGER,
    "way-to-the-tags-not-synced": _TAGGER,
    "tagged-step-withdrawn": _TAGGER,
    "lease-counted-from-the-reply": _LEASE,
    "expiry-not-awaited": _LEASE,
    "renewed-without-a-condition": _LEASE,
    "manifest-created-without-a-condition": _LEASE,
    "commit-not-checked-afterwards": _LEASE,
    "deleted-without-a-check": _LEASE,
}
# Planted bugs that the models leave out, with the reason.
OUTSIDE = {
    "orbax-renames-not-synced": "the commit is Orbax's rename, in a manager root",
    "memory-let-go-before-it-is-copied": "the memory tier is not in the models",
    "memory-of-another-run-taken": "the memory tier is not in the models",
    "half-a-copy-taken-for-a-segment": "the memory tier is not in the models",
    "index-unchecked": "content of an array, no step of the protocol",
    "base-not-compared": "content of an array, no step of the protocol",
    "merge-not-proven": "content of arrays, no step of the protocol",
    "checksum-not-compared": "content of a document, no step of the protocol",
    "numbers-compared-and-not-bits": "content of an array, no step of the protocol",
}


def missing_tools() -> list[str]:
    """Return the programs that a search needs and that are not installed."""
    return [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


def search(configuration: Configuration, bug: str = "", *, shortest: bool = False) -> Outcome:
    """Explore every state of a model.

    Args:
        configuration: The model and its size.
        bug: A planted bug; empty: none.
        shortest: Breadth first, so that the path to a violation is the shortest.

    Raises:
        RuntimeError: The search did not end: it ran out of memory or depth, or did not compile.
    """
    defines = [f"-D{define}" for define in configuration.defines]
    if bug:
        defines.append(f"-D{bug.upper().replace('-', '_')}")
    with tempfile.TemporaryDirectory(prefix="deltacheck-model-") as folder:
        model = f"{configuration.model}.pml"
        shutil.copy(MODELS / model, folder)
        _run(["spin", "-a", *defines, model], folder)
        # Every transition reads global state, so partial order reduction has nothing to reduce, and
        # it does not go together with the `provided` clauses. COLLAPSE is exact, unlike bit states.
        flags = ["-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DNOREDUCE", f"-DMEMLIM={_MEMORY_MIB}"]
        _run(["gcc", *flags, *(["-DBFS"] if shortest else []), "-o", "pan", "pan.c"], folder)
        begin = time.monotonic()
        report = _run(["./pan", f"-m{_DEPTH}"], folder)
        seconds = time.monotonic() - begin
        trail = ""
        if "errors: 0" not in report and bug:
            trail = _run(["spin", "-t", "-p", "-k", f"{model}.trail", *defines, model], folder)
    return _parse(configuration, report, seconds, trail)


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _parse(configuration: Configuration, report: str, seconds: float, trail: str) -> Outcome:
    states = re.search(r"(\d+) states, stored", report)
    depth = re.search(r"depth reached (\d+), errors: (\d+)", report)
    error = re.search(r"^pan:1: (.*)$", report, re.MULTILINE)
    if states is None or depth is None or ("Search not completed" in report and error is None):
        raise RuntimeError(f"{configuration.name}: the search did not end: {report[-2000:]}")
    path = error and re.search(r"\(at depth (\d+)\)", error[1])
    return Outcome(
        int(states[1]),
        int((path or depth)[1]),
        seconds,
        error[1] if error else "",
        frozenset(
            (file, int(line))
            for file, line, statement in _UNREACHED.findall(report)
            if statement != "-end-"
        ),
        trail,
    )


def never_reached(
    outcomes: Iterable[tuple[Configuration, Outcome]],
) -> list[tuple[str, int]]:
    """Return the lines that no configuration of their model reaches, ascending.

    The lines after ``/* --- properties`` are reached by a violation only. A line of an inline
    counts as not reached if one copy of it is not; those marked ``some copies`` are left out.
    """
    common: dict[str, frozenset[tuple[str, int]]] = {}
    for configuration, outcome in outcomes:
        model = configuration.model
        common[model] = common.get(model, outcome.unreached) & outcome.unreached
    return sorted(place for lines in common.values() for place in lines if _must_be_reached(*place))


def _must_be_reached(file: str, number: int) -> bool:
    lines = (MODELS / file).read_text().splitlines()
    properties = next(k for k, line in enumerate(lines, 1) if "--- properties" in line)
    return number < properties and "some copies" not in lines[number - 1]


def check_sound(configurations: Iterable[Configuration], jobs: int) -> bool:
    """Explore the models without bugs, print a line for each, and return whether all hold."""
    wanted = list(configurations)
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(zip(wanted, pool.map(search, wanted), strict=True))
    for configuration, outcome in outcomes:
        print(
            f"{configuration.name}: {outcome.states:,} states, depth {outcome.depth},"
            f" {outcome.seconds:.1f} s, {outcome.error or '0 errors'}"
            f" [{configuration.model}.pml {' '.join(configuration.defines)}]",
            flush=True,
        )
    missed = never_reached(outcomes)
    print(f"statements that no configuration reaches: {missed or 'none'}")
    return not missed and not any(outcome.error for _, outcome in outcomes)


def check_bugs(names: Iterable[str], jobs: int) -> bool:
    """Explore the models with one bug each, and return whether every bug is caught."""
    bugs = {name: (PLANTED | OWN)[name] for name in names}

    def caught(name: str) -> Outcome:
        return search(bugs[name], name, shortest=True)

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = dict(zip(bugs, pool.map(caught, bugs), strict=True))
    for name, outcome in outcomes.items():
        what = f"caught after {outcome.depth} steps" if outcome.error else "NOT CAUGHT"
        print(f"{name}: {what} ({bugs[name].name}, {outcome.states:,} states)", flush=True)
    if len(outcomes) == 1:
        print("\n".join(outcome.trail for outcome in outcomes.values()))
    count = sum(bool(outcome.error) for outcome in outcomes.values())
    print(f"{count} of {len(bugs)} bugs violate their model")
    return count == len(bugs)


def main(arguments: list[str]) -> int:
    """Check the models; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bugs", nargs="*", choices=[[], *PLANTED, *OWN], metavar="BUG")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--required", action="store_true", help="fail without Spin")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time (default: 2)")
    options = parser.parse_args(arguments)
    missing = missing_tools()
    if missing:
        print(
            f"SKIPPED: the models were not checked, for want of {' and '.join(missing)}"
            " (on Debian: apt-get install spin gcc)"
        )
        return int(options.required)
    begin = time.monotonic()
    holds = True
    if not options.bugs:
        holds = check_sound(QUICK if options.quick else FULL, options.jobs)
    holds = check_bugs(options.bugs or [*PLANTED, *OWN], options.jobs) and holds
    print(f"{time.monotonic() - begin:.0f} s")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
