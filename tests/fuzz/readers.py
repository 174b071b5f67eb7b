"""Fuzz targets in Python: `documents`, the parser of manifests and tables, and `roots`, everything
that reads a whole root.

Each input follows from the seed and its number and can be run again alone: `python -m
tests.fuzz.readers roots --seed 7 --only 123`. Changed documents get right checksums and digests
again, so that mutation reaches what stands behind them. Whatever the input, the outcome must be a
`DeltacheckError` or a result; and where checksums were not made right again, the result must be
what was saved. The links that mutation leaves lead to a pipe that nobody writes to: who opens it
hangs, and is found by the alarm. Memory is limited: who takes more is killed.

`--atheris` lets coverage choose the inputs of `documents`, where atheris is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import deltacheck
from deltacheck import errors
from deltacheck.leaf import tree
from deltacheck.report import history
from deltacheck.store import documents
from deltacheck.store.files import arrays
from deltacheck.store.manifest import Manifest, SegmentTable
from deltacheck.store.roots.opening import open_root
from tests.fuzz import mutate
from tests.golden import make
from tests.support import forge
from tests.support.memory import memory_folder
from tests.support.stored_arrays import ReadableArray

BUDGET_BYTES = 64 << 20
MEMORY_BYTES = (
    2 << 30
)  # beside what the process has at the start: its budget, caches, threads and their arenas
SECONDS_A_TRIAL = 30
# What any input may take; the largest document of the golden roots has about 10 kB.
CPU_SECONDS, TAKEN_BYTES = 10.0, 512 << 20
ROOTS = (
    "engine",
    "policy",
    "drawn",
    "halved",
    "halved_int32",
    "derived",
    "law",
    "manager",
    "tiled",
)

Trial = Callable[[random.Random], None]


# --- documents ------------------------------------------------------------------------------------


def golden_documents() -> list[bytes]:
    """Every manifest and table of the golden roots."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ROOTS:
            root = forge.unpack(name, Path(folder) / name)
            found += [
                p.read_bytes()
                for p in sorted(root.rglob("zarr.json"))
                if b'"checksum"' in p.read_bytes()
            ]
    return found


def parse(content: bytes) -> None:
    """Read a document as either kind, and walk what was taken."""
    for kind in (Manifest, SegmentTable):
        with contextlib.suppress(errors.DeltacheckError):
            document = documents.from_zarr_json(content, kind, "here")
            if isinstance(document, Manifest):
                tree.scalars(document.tree)
                _ = document.raw_bytes, [document.digest_of(path) for path in document.specs]


def documents_trial() -> Trial:
    seeds = golden_documents()

    def trial(rng: random.Random) -> None:
        content = rng.choice(seeds)
        if rng.random() < 0.8:
            group = json.loads(content)
            with contextlib.suppress(
                LookupError, TypeError, AttributeError, RecursionError
            ):  # nothing left to seal
                for _ in range(rng.randrange(1, 4)):
                    mutate.mutate_json(group if rng.random() < 0.02 else forge.body_of(group), rng)
                content = forge.sealed(group)
        if rng.random() < 0.2:
            raw = bytearray(content)
            mutate.mutate_bytes(raw, rng)
            content = bytes(raw)
        parse(content)

    return trial


# --- roots ----------------------------------------------------------------------------------------


class Roots:
    """The golden roots, one of which is changed, read and put in order again at each trial."""

    def __init__(self, folder: Path) -> None:
        self.expected = json.loads((forge.GOLDEN / "expected.json").read_text())
        self.pristine = {name: forge.unpack(name, folder / "pristine" / name) for name in ROOTS}
        self.roots = {name: folder / "roots" / name for name in ROOTS}
        for name, root in self.roots.items():
            shutil.copytree(self.pristine[name], root)
        outside = folder / "outside"
        outside.mkdir()
        for name in ("zarr.json", "c", "c.0", "c.0.0", "c.1", "c.1.0"):
            os.mkfifo(outside / name)
        self.outside = outside / "zarr.json"

    def trial(self, rng: random.Random) -> None:
        name = rng.choice(ROOTS)
        root, store = (
            self.roots[name],
            self.roots[name] / ("deltacheck" if name == "manager" else ""),
        )
        steps = sorted(map(int, self.expected[name]))
        victim = rng.randrange(len(steps))
        step = steps[victim]
        manifest = deltacheck.open(root).manifest(step)
        at = root / "checkpoints" / f"c{manifest.seq:010d}" / "zarr.json"
        if name == "manager":
            at = root / str(step) / "default" / "zarr.json"
        number = rng.randrange(len(manifest.segments))
        segment = store / "segments" / manifest.segments[number].id
        honest = False

        def edit(body: Any) -> None:
            for _ in range(rng.randrange(1, 4)):
                mutate.mutate_json(body, rng)

        try:
            kind = rng.random()
            if kind < 0.35:
                forge.forge_manifest(at, edit)
            elif kind < 0.65:
                forge.forge_table(at, number, edit, store)
            elif kind < 0.8:
                self.change_array(root, manifest, number, rng)
            else:
                honest = True
                files = sorted(p for p in [at, *segment.rglob("*")] if p.is_file())
                mutate.mutate_file(rng.choice(files), rng, self.outside)
        except RecursionError:
            pass
        try:
            self.read(name, root, at, steps, step, rng, honest)
        finally:
            for path in (at.parents[1] if name == "manager" else at.parent, segment):
                restore_folder(path, self.pristine[name] / path.relative_to(root))

    @staticmethod
    def change_array(root: Path, manifest: Manifest, number: int, rng: random.Random) -> None:
        """Change the content of an array, with its checksums right again."""
        segment = open_root(root).store.segment(manifest.segments[number])
        path, spec = rng.choice(sorted(segment.array_specs().items(), key=lambda one: str(one[0])))
        where = arrays.context()
        values = np.array(ReadableArray(path, spec).read())
        if values.ndim == 2 and values.dtype == np.uint32 and rng.random() < 0.7:
            column = values[:, rng.randrange(8)]
            column[rng.randrange(len(column))] = rng.choice(
                [n for n in mutate.NUMBERS if isinstance(n, int) and 0 <= n < 2**32]
            )
        else:
            flat = values.reshape(-1).view(np.uint8)
            flat[rng.randrange(flat.size)] ^= np.uint8(1 << rng.randrange(8))
        shutil.rmtree(path)
        arrays.write(path, spec, values, where).result()

    def read(
        self,
        name: str,
        root: Path,
        at: Path,
        steps: list[int],
        step: int,
        rng: random.Random,
        honest: bool,
    ) -> None:
        expected = self.expected[name]
        refused = errors.DeltacheckError
        with contextlib.suppress(refused):
            opened = deltacheck.open(root)
            opened.steps()
            for asked in (step, rng.choice(steps), None):
                with contextlib.suppress(refused):
                    found = opened.restore(asked, max_bytes=BUDGET_BYTES)
                    if honest:
                        # Without its manifest a step was never committed, or is deleted: the newest
                        # is then another.
                        gone = asked is None and not os.path.lexists(at)
                        wanted = [
                            expected[str(step)]
                            for step in (steps if gone else [steps[-1] if asked is None else asked])
                        ]
                        assert make.described(found) in wanted, f"step {asked} came back wrong"
            with contextlib.suppress(refused):
                manifest = opened.manifest(step)
                tree.scalars(manifest.tree)
                history.leaf_states(
                    manifest, [open_root(root).store.segment(ref) for ref in manifest.segments]
                )
                path, spec = rng.choice(sorted(manifest.specs.items()))
                box = [
                    slice(0, size, 1) if rng.random() < 0.5 else slice(size // 2, size // 2 + 1)
                    for size in spec.shape
                ]
                opened.restore(step, slices={path: box}, max_bytes=BUDGET_BYTES)
            # With the default limits, which follow from the files.
            with contextlib.suppress(refused):
                opened.restore(step)
            with contextlib.suppress(refused):
                opened.verify(deep=rng.random() < 0.2)
        if rng.random() < 0.2:
            from deltacheck.backends.torch import load

            with contextlib.suppress(refused):
                load(root, step, max_bytes=BUDGET_BYTES)


def restore_folder(path: Path, pristine: Path) -> None:
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(pristine, path)


# --- driver ---------------------------------------------------------------------------------------


def peak_bytes() -> int:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def limit_memory() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def run(
    target: str, trial: Trial, seed: int, seconds: float, runs: int | None, only: int | None
) -> None:
    limit_memory()
    end, done = time.monotonic() + seconds, 0
    number = only or 0
    while time.monotonic() < end and (runs is None or done < runs):
        again = (
            f"run again with: python -m tests.fuzz.readers {target} --seed {seed} --only {number}"
        )
        faulthandler.dump_traceback_later(SECONDS_A_TRIAL, exit=True)
        began, before = time.process_time(), peak_bytes()
        try:
            trial(random.Random(f"{seed}-{number}"))
            taken, spent = peak_bytes() - before, time.process_time() - began
            assert spent < CPU_SECONDS, f"{spent:.1f} s of processor time"
            assert taken < TAKEN_BYTES, f"{taken} bytes of memory"
        except BaseException:
            print(f"{target}: broken by input {number}; {again}", file=sys.stderr, flush=True)
            raise
        if only is not None:
            print("passed")
            return
        done, number = done + 1, number + 1
        NOTE.write_text(f"{target}: the process died at the next input after this one; {again}\n")
    faulthandler.cancel_dump_traceback_later()
    print(
        f"{target}: {done} inputs, seed {seed}, no finding: below {3 / max(done, 1):.1e} a trial"
        " with 95 % confidence",
        flush=True,
    )


NOTE = Path(
    os.environ.get("DELTACHECK_FUZZ_NOTE", os.devnull)
)  # survives where the process does not


def guided(seconds: float) -> None:
    """`documents` under atheris."""
    import atheris  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as corpus:
        for number, content in enumerate(golden_documents()):
            (Path(corpus) / str(number)).write_bytes(content)
        atheris.instrument_func(documents.from_zarr_json)

        def one(data: bytes) -> None:
            parse(data)
            with contextlib.suppress(
                ValueError, KeyError, TypeError, AttributeError, RecursionError
            ):
                parse(forge.sealed(json.loads(data)))

        atheris.Setup(
            [sys.argv[0], corpus, f"-max_total_time={int(seconds)}", "-max_len=20000"], one
        )
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=("documents", "roots"))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--only", type=int)
    parser.add_argument("--atheris", action="store_true")
    given = parser.parse_args()
    if given.atheris and given.target == "documents":
        return guided(given.seconds)
    # Memory has three times as many roots in a second.
    with tempfile.TemporaryDirectory(prefix="deltacheck-fuzz-", dir=memory_folder()) as folder:
        trial = documents_trial() if given.target == "documents" else Roots(Path(folder)).trial
        run(given.target, trial, given.seed, given.seconds, given.runs, given.only)


if __name__ == "__main__":
    main()
