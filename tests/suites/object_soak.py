"""Random saves, restores, collections and restarts on an object store that fails at random; what is
acknowledged must be there.

    python -m tests.suites.object_soak --faults 5000 --seed 1

Prints the seed, what was done and what a failure's replay is; ends with 1 at the first wrong
outcome.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.errors import RootBusy, SaveFailed, StepNotFound, StorageFailed
from deltacheck.store import collect
from deltacheck.store.files import object_path
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.roots.opening import open_root
from tests.support.paths import REPOSITORY
from tests.support.s3_server import S3, Fault

FOREVER = 1 << 30
KINDS = ("500", "503", "429", "after 500", "lost", "dropped", "truncated", "stale")
KEYS = ("", "/segments/", "/checkpoints/", "/control/", r"zarr\.json$", r"c[.0-9]*$")
STORAGE = ObjectStore(retries=3, deadline_seconds=20, lease_seconds=20)


class Soak:
    """One root under random faults, and the oracle: the states that each step may restore to."""

    def __init__(self, s3: S3, seed: int) -> None:
        self.s3 = s3
        self.random = random.Random(seed)
        self.address = f"s3://bucket/soak-{seed}-{secrets.token_hex(4)}"
        self.done: Counter[str] = Counter()
        self.faulted = 0
        self.state = {"w": torch.randn(40, 50), "large": torch.randn(300, 260), "step": 0}
        self.step = 0
        self.saved: dict[int, dict[str, Any]] = {}
        self.acknowledged: set[int] = set()
        self.kept: dict[int, int] = {}  # step -> sequence number, of those that may be deleted
        self.engine: Engine | None = Engine(
            self.address,
            storage=STORAGE,
            policy=Policy.exact(4),
        )

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def turn(self) -> None:
        """One act under faults, then, without any, a look at everything."""
        act = self.random.choices(
            (self.save, self.restore, self.reopen, self.collect, self.delete), (10, 3, 1, 2, 2)
        )[0]
        try:
            with self.s3.failing(*self.faults()):
                try:
                    act()
                    self.done[act.__name__] += 1
                except (SaveFailed, StorageFailed, RootBusy, StepNotFound) as error:
                    self.done[f"{act.__name__}: {type(error).__name__}"] += 1
                finally:
                    self.faulted += sum(kind != "ok" for _, _, kind in self.s3.seen())
        finally:
            self.look()

    def faults(self) -> list[Fault]:
        pick = self.random
        found = []
        for _ in range(pick.choice((1, 1, 2))):
            kind = pick.choice(KINDS)
            method = {"truncated": "GET", "stale": "LIST"}.get(kind) or pick.choice(
                ("PUT", "PUT", "GET", "ANY", "DELETE", "LIST")
            )
            times = pick.choice((1, 2, 5, FOREVER))
            hidden = f"(c|s)0*{pick.randrange(max(1, self.step))}[-/]"
            key = "" if method == "LIST" else pick.choice(KEYS)
            found.append(
                Fault(
                    kind,
                    key,
                    method,
                    times,
                    pick.randrange(12),
                    hidden,
                    every=pick.choice((1, 1, 2, 3)),
                )
            )
        return found

    def save(self) -> None:
        if self.engine is None:
            self.open()
        assert self.engine is not None
        self.step += 1
        self.state["step"] = self.step
        self.state["w"][0, 0] += 1
        self.state["large"][self.random.randrange(300), 0] += 0.25
        self.saved[self.step] = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.state.items()
        }
        self.engine.save(self.step, self.state).result(240)
        self.acknowledged.add(self.step)

    def restore(self) -> None:
        if self.engine is None:
            self.open()
        assert self.engine is not None
        step = self.random.choice([None, *sorted(self.acknowledged)])
        restored = self.engine.restore(step)
        self.compare(restored["step"], restored)
        if step is None:
            newest = max(self.acknowledged, default=0)
            assert restored["step"] >= newest, (
                f"restored {restored['step']} as the newest, {newest} was acknowledged"
            )

    def reopen(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.close()
        self.open()

    def open(self) -> None:
        self.engine = Engine(
            self.address,
            storage=STORAGE,
            policy=Policy.exact(4),
        )

    def collect(self) -> None:
        protected = set() if self.engine is None else self.engine._saver.chains.protected_segments()
        collect.collect(
            open_root(self.address, storage=STORAGE), grace_seconds=0, protected=protected
        )

    def delete(self) -> None:
        root = open_root(self.address, storage=STORAGE)
        old = [ref for ref in root.checkpoints()[:-2] if ref.step in self.acknowledged]
        if old:
            ref = self.random.choice(old)
            self.acknowledged.discard(ref.step)
            collect.delete_checkpoint(root, ref.seq)

    def look(self) -> None:
        """Every acknowledged step is listed, and every listed one restores to what was saved
        as it.
        """
        reader = deltacheck.open(self.address, storage=STORAGE)
        steps = reader.steps()
        assert self.acknowledged <= set(steps), (
            f"acknowledged and gone: {sorted(self.acknowledged - set(steps))}"
        )
        for step in {*steps[-1:], *self.random.sample(steps, min(1, len(steps)))}:
            self.compare(step, reader.restore(step))

    def compare(self, step: int, restored: dict[str, Any]) -> None:
        for name, value in self.saved[step].items():
            assert np.array_equal(np.asarray(restored[name]), np.asarray(value)), (
                f"step {step}, leaf {name}"
            )


def soak(s3: S3, seed: int, faults: int) -> Soak:
    """Run until so many requests have failed; raises ``AssertionError`` at a wrong outcome."""
    torch.manual_seed(seed)
    run = Soak(s3, seed)
    while run.faulted < faults:
        run.turn()
    for ref in deltacheck.open(run.address, storage=STORAGE).steps():
        run.compare(ref, deltacheck.open(run.address, storage=STORAGE).restore(ref))
    assert deltacheck.open(run.address, storage=STORAGE).verify(deep=True) == []
    run.close()
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="requests that fail, in all")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--per-root", type=int, default=250, help="of them on one root")
    given = parser.parse_args()
    seed = secrets.randbelow(1 << 30) if given.seed is None else given.seed
    object_path._FIRST_DELAY = "5ms"
    server = S3()
    os.environ.update(server.environment())
    server.make_bucket("bucket")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    done: Counter[str] = Counter()
    faulted, begin = 0, time.monotonic()
    try:
        while faulted < given.faults:
            print(
                f"seed {seed}, commit {commit}; replay: python -m tests.suites.object_soak --seed"
                f" {seed} --faults {given.per_root}",
                flush=True,
            )
            run = soak(server, seed, min(given.per_root, given.faults - faulted))
            faulted += run.faulted
            done += run.done
            seed += 1
    finally:
        server.close()
    acts = sum(done.values())
    print(
        f"{faulted} faulted requests in {acts} acts, {time.monotonic() - begin:.0f} s: no wrong"
        f" outcome (at most {3 / acts:.2g} of acts)"
    )
    for name, count in sorted(done.items()):
        print(f"  {count:6d} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
