"""A training that saves without end: nothing leaks, nothing grows, and no kill loses a step that
was
acknowledged.

Half of the time one process saves and is left alone: its open files, threads and memory are
counted. In the other half processes save and are killed at random, each after some 200 saves.
Chains, collections and restores go on in both. Prints what it found; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltacheck import Keep, SaveOptions
from tests.support.paths import REPOSITORY

SAVES_PER_KILL = 200  # on average
COUNT_EVERY, RESTORE_EVERY = 10, 50
# Growth of resident memory in the later half of the steady part. Less cannot be distinguished from
# memory that malloc keeps.
MOST_GROWTH_BYTES = 8 << 20
MOST_GROWTH_BYTES_PER_HOUR = 1 << 20


@dataclass(frozen=True, slots=True)
class Count:
    """The resources of a process while no save was under way. ``disk``: bytes of its root."""

    seconds: float
    files: int
    threads: int
    memory: int
    disk: int

    @classmethod
    def now(cls, seconds: float, root: Path) -> Count:
        """Count the resources of this process."""
        from deltacheck.store.files.arrays import bytes_on_disk

        files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(seconds, files, threads, pages * os.sysconf("SC_PAGE_SIZE"), bytes_on_disk(root))


@dataclass(slots=True)
class Found:
    saves: int = 0
    kills: int = 0
    restores: int = 0
    counts: list[Count] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def grown(counts: list[Count]) -> list[str]:
    """Return the resources that grew in the later half of a process, beyond its first half."""
    if len(counts) < 8:
        return []
    early, late = counts[: len(counts) // 2], counts[len(counts) // 2 :]
    found = []
    for what in ("files", "threads"):
        before, after = (max(getattr(count, what) for count in part) for part in (early, late))
        if after > before:
            found.append(f"open {what}: {before} before, {after} after")
    most = max(
        MOST_GROWTH_BYTES, MOST_GROWTH_BYTES_PER_HOUR * (late[-1].seconds - late[0].seconds) / 3600
    )
    if slope(late) * (late[-1].seconds - late[0].seconds) > most:
        found.append(f"memory grows by {slope(late) * 3600 / (1 << 20):.1f} MiB an hour")
    before, after = (max(count.disk for count in part) for part in (early, late))
    if after > 1.5 * before:
        found.append(f"bytes on disk: at most {before} before, {after} after")
    return found


def slope(counts: list[Count]) -> float:
    """Bytes of memory a second, by least squares."""
    mean = sum(count.seconds for count in counts) / len(counts)
    spread = sum((count.seconds - mean) ** 2 for count in counts)
    return (
        sum((count.seconds - mean) * count.memory for count in counts) / spread if spread else 0.0
    )


def endure(root: Path, seconds: float, seed: int, saves_per_kill: int = SAVES_PER_KILL) -> Found:
    rng, found, begin = random.Random(seed), Found(), time.monotonic()
    _live(root, found, until=begin + seconds / 2, saves=None, rng=rng)
    found.failures += grown(found.counts)
    while not found.failures and (time.monotonic() < begin + seconds or not found.kills):
        _live(root, found, until=begin + seconds, saves=rng.randint(1, 2 * saves_per_kill), rng=rng)
    return found


def _live(root: Path, found: Found, until: float, saves: int | None, rng: random.Random) -> None:
    """One process. ``saves``: kill it after so many, or when the time is over; ``None``: let it end
    by itself then.
    """
    import deltacheck

    steady = saves is None
    command = [
        sys.executable,
        "-m",
        "tests.suites.endurance",
        "--child",
        str(root),
        *(["--until", str(until)] if steady else []),
    ]
    newest, done = -1, 0
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            what, *numbers = line.split()
            match what:
                case "saved":
                    newest, done = int(numbers[0]), done + 1
                case "count":
                    if steady:
                        found.counts.append(Count(float(numbers[0]), *map(int, numbers[1:])))
                case "restored":
                    found.restores += 1
                case _:
                    found.failures.append(line.strip())
            if saves is not None and (done >= saves or time.monotonic() > until) and done:
                time.sleep(rng.uniform(0, 0.05))
                child.kill()
                found.kills += 1
                saves = None
                newest = max(
                    [
                        newest,
                        *(
                            int(rest.split()[1])
                            for rest in child.stdout
                            if rest.startswith("saved ")
                        ),
                    ]
                )
                break
        errors = child.stderr.read()
    if steady and child.returncode:
        found.failures.append(f"the training ended with {child.returncode}: {errors[-500:]}")
    found.saves += done
    run = deltacheck.open(root)
    steps = run.steps()
    if newest not in steps:
        found.failures.append(f"step {newest} was acknowledged, but there are only {steps}")
    found.failures += [str(finding) for finding in run.verify()]
    found.failures += [str(finding) for finding in run.verify(steps[-1], deep=True)]


def child(root: Path, until: float) -> None:
    """Train and save: ``saved STEP``, ``count ...`` and ``restored STEP`` on stdout, anything else
    is a failure.
    """
    import torch

    import deltacheck
    from deltacheck import Policy
    from deltacheck.backends.torch import Engine

    torch.set_num_threads(1)
    with Engine(
        root,
        policy=Policy.exact(max_chain_depth=5),
        keep=Keep(last=4),
        options=SaveOptions(grace_seconds=0),
    ) as engine:
        first = max(engine.steps(), default=-1) + 1
        state: dict[str, Any] = (
            engine.restore()
            if first
            else {"w": torch.randn(120, 1000), "m": torch.zeros(120, 1000), "step": 0}
        )
        begin = time.monotonic()
        for step in range(first, sys.maxsize):
            rows = torch.randint(0, 120, (6,))
            state["m"][rows] = torch.randn(6, 1000)
            state["w"][rows] += 1e-3 * state["m"][rows]
            state["step"] = step
            handle = engine.save(step, state)
            if step % RESTORE_EVERY == 0:
                handle.wait()
                found = deltacheck.open(root).restore(step)
                same = all(
                    (found[name].view("i4") == state[name].numpy().view("i4")).all()
                    for name in ("w", "m")
                )
                print(
                    (
                        f"restored {step}"
                        if same and found["step"] == step
                        else f"step {step} is restored as something else"
                    ),
                    flush=True,
                )
            if step % COUNT_EVERY == 0:
                handle.wait()
                now = Count.now(time.monotonic() - begin, root)
                print(
                    f"count {now.seconds:.3f} {now.files} {now.threads} {now.memory} {now.disk}",
                    flush=True,
                )
            handle.wait()
            print(f"saved {step}", flush=True)
            if time.monotonic() > until:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--saves-per-kill", type=int, default=SAVES_PER_KILL, help="on average")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.until)
        return 0
    with tempfile.TemporaryDirectory(prefix="deltacheck-endurance-") as folder:
        found = endure(Path(folder) / "root", asked.seconds, asked.seed, asked.saves_per_kill)
    print(*found.failures, sep="\n", end="\n" if found.failures else "")
    print(
        f"S13, endurance, seed {asked.seed}: {found.saves} saves, {found.kills} kills,"
        f" {found.restores} restores compared"
    )
    if len(found.counts) >= 8:
        late = found.counts[len(found.counts) // 2 :]
        last = late[-1]
        print(
            f"  steady part: {last.seconds:.0f} s, {last.files} files open, {last.threads} threads,"
            f" {last.memory / (1 << 20):.0f} MiB resident, {slope(late) * 3600 / (1 << 20):+.2f}"
            " MiB an hour in its later half, at most"
            f" {max(count.disk for count in found.counts) / (1 << 20):.1f} MiB on disk"
        )
    print(f"  all {found.saves} tried {len(found.failures)} failed")
    return bool(found.failures)


if __name__ == "__main__":
    sys.exit(main())
