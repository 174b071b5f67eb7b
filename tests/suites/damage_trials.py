"""S4: damage of every kind in every kind of file of every kind of root, many thousand times. Never
a
silent wrong restore.

    python -m tests.suites.damage_trials [--trials 20000] [--seed N]
        [--repair | --every-bit [--stride N]]

Five small roots, a keyframe and four deltas each, lie in memory: a torch engine's, an Orbax
manager's, one under a policy (codes, contracts), one with groups and one that four ranks wrote in
tiles. A trial
damages one or two files, restores a step that they belong to, and puts them back. It ends in an
error of ours that names step, file and the steps that still restore, or in the very state that was
saved. Anything else fails it.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends import torch as torch_backend
from deltacheck.backends.torch import Engine
from deltacheck.leaf import grid
from deltacheck.leaf.spec import _standard_chunk
from deltacheck.maintain.repair import Repaired, repair, repair_root_document
from deltacheck.store import layout
from deltacheck.store.roots.opening import open_root
from tests.golden.make import LawRun
from tests.support.adam_run import AdamRun
from tests.support.memory import memory_folder
from tests.support.ranked_run import RankedRun, cells
from tests.support.states import differences

PAGE = 512  # bytes of a page that reads as zeros or ones: the files are as small
STEPS = 5

Door = Callable[[Path, int], Any]


@dataclass
class Subject:
    """One root, what each of its steps must give through each door, and a second run of the same
    kind to mix it with.
    """

    name: str
    root: Path
    other: Path
    doors: Mapping[str, tuple[Door, Mapping[int, Any]]]  # the first is the quick one
    files: dict[str, list[Path]] = field(default_factory=dict)  # by kind
    content: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(p for p in self.root.rglob("*") if p.is_file()):
            self.files.setdefault(kind_of(path.relative_to(self.root)), []).append(path)
            self.content[path] = path.read_bytes()
        for name, (door, wanted) in self.doors.items():
            for step, state in wanted.items():
                found = list(differences(state, door(self.root, step)))
                assert not found, f"{self.name}, {name}, step {step}, undamaged: {found[:3]}"


def kind_of(path: Path) -> str:
    """Return the kind of a file of a root, in words."""
    parts = path.parts[1:] if path.parts[0] == "deltacheck" else path.parts
    if parts[0] == layout.SEGMENTS and len(parts) > 2:
        inside = parts[2:]
        if inside == ("zarr.json",):
            return "segment table"
        what = {
            layout.LEAVES: "keyframe",
            layout.PACKED: "packed keyframes",
        }.get(inside[0], "stream")
        return what if inside[-1] != "zarr.json" else f"zarr.json of {what}"
    if parts[0] == layout.CONTROL:
        return "control"
    if parts in (("zarr.json",), ("commit_success.txt",)):
        return "root's zarr.json" if parts[0] == "zarr.json" else "Orbax's own"
    if parts[-1] == "zarr.json":
        return (
            "manifest"
            if layout.is_checkpoint_id(parts[-2]) or parts[0].isdigit()
            else "zarr.json of a group"
        )
    return "Orbax's own"


def step_of(path: Path, subject: Subject, rng: random.Random) -> int:
    """A step that a file belongs to."""
    wanted = next(iter(subject.doors.values()))[1]
    parts = path.relative_to(subject.root).parts
    steps = sorted(wanted)
    for part in parts:
        if layout.is_segment_id(part):
            first = min(layout.seq_of(part), len(steps) - 1)
            return steps[
                min(rng.randrange(first, len(steps)), rng.randrange(first, len(steps)))
            ]  # short chains: quick
        if layout.is_checkpoint_id(part):
            return steps[min(layout.seq_of(part), len(steps) - 1)]
    return int(parts[0]) if parts[0].isdigit() else rng.choice(steps)


# --- faults: each gives the new content of some files, ``None`` for one that is gone --------------

Fault = Callable[[Subject, str, Path, random.Random], dict[Path, "bytes | None"]]


def _bits(content: bytes, count: int, rng: random.Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(count):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _page(content: bytes, value: int, rng: random.Random) -> bytes:
    begin = rng.randrange(max(1, -(-len(content) // PAGE))) * PAGE
    return (
        content[:begin]
        + bytes([value]) * len(content[begin : begin + PAGE])
        + content[begin + PAGE :]
    )


def flip(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    return {path: _bits(subject.content[path], 1, rng)}


def flips(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    return {path: _bits(subject.content[path], rng.randrange(2, 17), rng)}


def truncate(
    subject: Subject, kind: str, path: Path, rng: random.Random
) -> dict[Path, bytes | None]:
    content = subject.content[path]
    return {path: content[: rng.randrange(max(1, len(content)))]}


def extend(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    return {path: subject.content[path] + rng.randbytes(rng.randrange(1, 64))}


def zero_page(
    subject: Subject, kind: str, path: Path, rng: random.Random
) -> dict[Path, bytes | None]:
    return {path: _page(subject.content[path], 0x00, rng)}


def ones_page(
    subject: Subject, kind: str, path: Path, rng: random.Random
) -> dict[Path, bytes | None]:
    return {path: _page(subject.content[path], 0xFF, rng)}


def delete(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    return {path: None}


def swap(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    other = rng.choice(subject.files[kind])
    return {path: subject.content[other], other: subject.content[path]}


def stale(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    """An older object of the same kind, and of the same name where there is one, in the place of a
    newer.
    """
    alike = [p for p in subject.files[kind] if p != path and p.name == path.name]
    same_array = [p for p in alike if p.parts[-3:-1] == path.parts[-3:-1]]
    return {path: subject.content[rng.choice(same_array or alike or [path])]}


def mix(subject: Subject, kind: str, path: Path, rng: random.Random) -> dict[Path, bytes | None]:
    """A file of another run of the same kind, as two backups restored into one directory
    leave it.
    """
    relative = path.relative_to(subject.root)
    seq = next((part[:11] for part in relative.parts if layout.is_segment_id(part)), None)
    there = [
        p
        for p in subject.other.rglob(path.name)
        if p.is_file() and kind_of(p.relative_to(subject.other)) == kind
    ]
    same = [p for p in there if seq is None or any(part.startswith(seq) for part in p.parts)]
    return (
        {path: rng.choice(same or there).read_bytes()} if there else flip(subject, kind, path, rng)
    )


FAULTS: list[Fault] = [
    flip,
    flips,
    truncate,
    extend,
    zero_page,
    ones_page,
    delete,
    swap,
    stale,
    mix,
]

# --- one trial ------------------------------------------------------------------------------------

MENDED = ("whole", "lost")
OUTCOMES = ("error", "harmless", *MENDED)
_WAY_OUT = re.compile(
    r"(?:Steps that still restore|Steps that it has|steps that restore then): ([0-9, .]+)|No other"
    r" step restores|It has no committed step"
)


@contextmanager
def damaged(subject: Subject, changes: Mapping[Path, bytes | None]) -> Iterator[None]:
    try:
        for path, content in changes.items():
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        yield
    finally:
        for path in changes:
            path.write_bytes(subject.content[path])


def judge(subject: Subject, door: str, step: int) -> tuple[str, str]:
    """Restore a step of the damaged root: the outcome, and what is to be said of it."""
    give, wanted = subject.doors[door]
    try:
        found = give(subject.root, step)
    except errors.DeltacheckError as error:
        return complain(str(error), error, subject, step) or ("error", str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return "untyped", f"{type(error).__name__}: {error}"
    wrong = list(differences(wanted[step], found))
    return ("SILENT", str(wrong[:2])) if wrong else ("harmless", "")


def complain(text: str, error: Exception, subject: Subject, step: int) -> tuple[str, str] | None:
    """Return the parts that an error message lacks: the step, a file, the remedy."""
    if isinstance(
        error, errors.UnsupportedFormat
    ):  # a version or feature that a flipped bit has made: the file is all that is known
        return None if str(subject.root) in text else ("unnamed", f"no file: {text}")
    if not isinstance(error, errors.Damaged | errors.StepNotFound) and "or has lost it" not in text:
        return "misnamed", f"{type(error).__name__}: {text}"
    lacks = (
        []
        if re.search(rf"step {step}\b", text) or "; steps that restore then: " in text
        else ["step"]
    )
    lacks += [] if str(subject.root) in text else ["file"]
    lacks += [] if _WAY_OUT.search(text) else ["way out"]
    return ("unnamed", f"no {', '.join(lacks)}: {text}") if lacks else None


def promised(text: str) -> list[int]:
    """The steps that an error says still restore."""
    found = re.search(r"Steps that still restore: ([0-9, ]+)$", text)
    return [int(word) for word in found[1].split(",")] if found else []


@dataclass
class Tally:
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # of kinds of file
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    promises: int = 0

    def enter(self, about: str, kind: str, fault: str, outcome: str, text: str) -> None:
        self.outcomes[kind, outcome] += 1
        self.faults[fault, outcome] += 1
        if outcome not in OUTCOMES:
            self.failures.append(f"{outcome}: {about}: {text}")

    @property
    def trials(self) -> int:
        return sum(self.outcomes.values())


def trial(subject: Subject, seed: int, tally: Tally) -> None:
    """One trial, which the seed decides."""
    rng = random.Random(seed)
    kinds = sorted(subject.files)
    # Array metadata, control and Orbax's own files are not read by a restore: fewer trials show
    # that they do no harm.
    kind = rng.choices(
        kinds,
        [
            1 if "zarr.json of" in kind or kind in ("control", "Orbax's own") else 6
            for kind in kinds
        ],
    )[0]
    path, fault = rng.choice(subject.files[kind]), rng.choice(FAULTS)
    step = step_of(path, subject, rng)
    names = list(subject.doors)
    door = names[0] if rng.random() < 0.95 else rng.choice(names)
    changes = {
        p: content
        for p, content in fault(subject, kind, path, rng).items()
        if content != subject.content[p]
    }
    about = (
        f"--seed {seed} --trials 1 --only {subject.name}: {fault.__name__} of"
        f" {path.relative_to(subject.root)}, step {step} by {door}"
    )
    with damaged(subject, changes):
        outcome, text = judge(subject, door, step)
        tally.enter(about, kind, fault.__name__, outcome, text)
        if outcome == "error" and len(changes) == 1 and promised(text) and rng.random() < 0.1:
            kept = rng.choice(promised(text))  # a step that the error promises
            outcome, text = judge(subject, names[0], kept)
            tally.promises += 1
            if outcome != "harmless":
                tally.failures.append(
                    f"{about}: promised that step {kept} still restores: {outcome} {text}"
                )


def mending(subject: Subject, seed: int, tally: Tally, folder: Path) -> None:
    """Damage a copy of the root, repair it: each step then restores as it was saved, or is named as
    lost; lossy, no other is left.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in sorted(subject.files) if kind not in ("control", "Orbax's own")]
    kind = rng.choice(kinds)
    path, fault, lossy = rng.choice(subject.files[kind]), rng.choice(FAULTS), rng.random() < 0.5
    about = (
        f"--repair --seed {seed} --trials 1 --only {subject.name}: {fault.__name__} of"
        f" {path.relative_to(subject.root)}, lossy={lossy}"
    )
    root = folder / "mended"
    shutil.copytree(subject.root, root)
    try:
        for victim, content in fault(subject, kind, path, rng).items():
            there = root / victim.relative_to(subject.root)
            there.unlink(missing_ok=True)
            if content is not None:
                there.write_bytes(content)
        done = Repaired()
        try:
            repair_root_document(root, done)
            repair(open_root(root), lossy=lossy, result=done)
        except errors.UnsupportedFormat as error:  # a version that a flipped bit has made
            tally.enter(about, kind, fault.__name__, "error", str(error))
            return
        names = list(subject.doors)
        give, wanted = subject.doors[names[0]]
        lost = {loss.step for loss in done.lost}
        outcome, text = ("lost" if lost else "whole"), ""
        for step in deltacheck.open(root).steps():
            try:
                wrong = list(differences(wanted[step], give(root, step)))
            except errors.DeltacheckError as error:
                if lossy or step not in lost:
                    outcome, text = "unmended", f"step {step}, lost are {lost}: {error}"
            else:
                outcome, text = ("SILENT", str(wrong[:2])) if wrong else (outcome, text)
        missing = set(wanted) - set(deltacheck.open(root).steps())
        if missing and None not in lost and not missing <= lost and kind != "manifest":
            outcome, text = "unmended", f"steps {missing} have gone, lost are {lost}"
        if lossy and outcome in MENDED and (found := deltacheck.open(root).verify(deep=True)):
            outcome, text = "unmended", f"verify finds {found[0]}"
        tally.enter(about, kind, fault.__name__, outcome, text)
    except Exception as error:  # noqa: BLE001 - as above
        tally.enter(about, kind, fault.__name__, "untyped", f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(root)
        shutil.rmtree(root.with_name("mended.damaged"), ignore_errors=True)


def every_bit(subject: Subject, tally: Tally, stride: int) -> None:
    """Flip every bit (each ``stride``-th) of every byte of metadata: documents and tables."""
    door = next(iter(subject.doors))
    for kind, paths in sorted(subject.files.items()):
        if "zarr.json" not in kind and kind not in (
            "manifest",
            "segment table",
            "control",
        ):
            continue
        for path in paths:
            content = subject.content[path]
            step = step_of(path, subject, random.Random(0))
            for bit in range(0, len(content) * 8, stride):
                changed = bytearray(content)
                changed[bit // 8] ^= 1 << bit % 8
                about = f"bit {bit} of {subject.name}/{path.relative_to(subject.root)}, step {step}"
                path.write_bytes(changed)
                tally.enter(about, kind, "every bit", *judge(subject, door, step))
            path.write_bytes(content)


# --- the roots ------------------------------------------------------------------------------------


@contextmanager
def small_leaves(pack_below: int = 12 << 10, chunk: int = 8 << 10) -> Iterator[None]:
    """Leaves of some KiB as if they were of many MiB: arrays of their own, several chunks."""
    before = grid.PACK_BELOW_BYTES, grid.CHUNK_BYTES
    grid.PACK_BELOW_BYTES, grid.CHUNK_BYTES = pack_below, chunk
    _standard_chunk.cache_clear()
    try:
        yield
    finally:
        grid.PACK_BELOW_BYTES, grid.CHUNK_BYTES = before
        _standard_chunk.cache_clear()


def _torch_states(seed: int) -> list[dict[str, Any]]:
    """Masters, their working copy and a replica of it, so that there is something to heal from."""
    generator = torch.Generator().manual_seed(seed)
    master, moment = (torch.randn(64, 80, generator=generator) for _ in range(2))
    bias = torch.randn(40, generator=generator)
    states = []
    for step in range(STEPS):
        weight = master.bfloat16()
        states.append(
            {
                "model": {"w": weight, "b": bias.clone()},
                "replica": weight.clone(),
                "optimizer": {
                    "master": master.clone(),
                    "m": moment.clone(),
                    "rng": torch.arange(16, dtype=torch.uint8),
                },
                "step": step,
            }
        )
        for leaf in (master, moment):
            moved = torch.rand(leaf.shape, generator=generator) < (0.02, 0.4, 1.0)[step % 3]
            leaf[moved] = leaf[moved] * 1.01
    return states


def _numpy(root: Path, step: int) -> Any:
    return deltacheck.open(root).restore(step)


def _truth(root: Path, steps: list[int]) -> dict[int, Any]:
    """Return an undamaged root as NumPy arrays.

    Another entry point compares them with the live states.
    """
    return {step: _numpy(root, step) for step in steps}


def engine_subject(folder: Path) -> Subject:
    roots = []
    for seed, name in enumerate(("root", "other")):
        states = _torch_states(seed)
        with Engine(folder / name) as engine:
            for step, state in enumerate(states):
                engine.save(step, state).result()
        roots.append((folder / name, dict(enumerate(states))))
    (root, saved), (other, _) = roots

    def by_engine(root: Path, step: int) -> Any:
        with Engine(root) as engine:
            return engine.restore(step)

    return Subject(
        "engine",
        root,
        other,
        {
            "open": (_numpy, _truth(root, [*saved])),
            "load": (torch_backend.load, saved),
            "Engine": (by_engine, saved),
        },
    )


def manager_subject(folder: Path) -> Subject:
    from orbax import checkpoint as ocp

    from deltacheck.backends import orbax as backend

    saved: dict[str, dict[int, Any]] = {}
    for seed, name in enumerate(("root", "other")):
        states = [_as_numpy(state) for state in _torch_states(seed)]
        with backend.manager(folder / name) as manager:
            for step, state in enumerate(states):
                manager.save(step, args=backend.DeltaSaveArgs(state))
            manager.wait_until_finished()
        saved[name] = dict(enumerate(states))

    def by_handler(root: Path, step: int) -> Any:
        handler = backend.DeltaCheckpointHandler(root, read_only=True)
        try:
            return handler.restore(root / str(step) / "default", backend.DeltaRestoreArgs())
        finally:
            handler.close()

    def by_load(root: Path, step: int) -> Any:
        return backend.load(root, step)

    logging.getLogger("absl").setLevel(logging.ERROR)
    assert ocp is not None
    root = folder / "root"
    return Subject(
        "manager",
        root,
        folder / "other",
        {
            "open": (_numpy, saved["root"]),
            "handler": (by_handler, saved["root"]),
            "load": (by_load, saved["root"]),
        },
    )


def _as_numpy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _as_numpy(value) for key, value in tree.items()}
    if not isinstance(tree, torch.Tensor):
        return tree
    if tree.dtype is not torch.bfloat16:
        return tree.numpy()
    import ml_dtypes

    return tree.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def policy_subject(folder: Path) -> Subject:
    roots = []
    for seed, name in enumerate(("root", "other")):
        run = AdamRun((64, 96), 1, seed=seed)
        run.advance(120)
        with Engine(folder / name, policy=Policy.auto(derive=False)) as engine:
            for _ in range(STEPS + 2):  # the last three are stable: codes, and their deltas
                run.advance(10)
                engine.save(run.step, run.state()).result()
        roots.append(folder / name)
    root, other = roots
    steps = deltacheck.open(root).steps()
    assert deltacheck.open(root).manifest().contracts
    saved = {step: torch_backend.load(root, step) for step in steps}
    return Subject(
        "policy",
        root,
        other,
        {"open": (_numpy, _truth(root, steps)), "load": (torch_backend.load, saved)},
    )


def law_subject(folder: Path) -> Subject:
    saved: dict[str, dict[int, Any]] = {}
    for seed, name in enumerate(("root", "other")):
        run, saved[name] = LawRun((64, 96), 1, seed=seed, rate=1e-4), {}
        run.advance(100)
        with Engine(folder / name, policy=Policy.exact(law=True)) as engine:
            for step in range(STEPS):
                saved[name][step] = run.state()
                engine.save(step, saved[name][step]).result()
                run.advance()
    root = folder / "root"
    assert "law" in deltacheck.open(root).manifest().must_understand
    loaded = {step: torch_backend.load(root, step) for step in range(STEPS)}
    return Subject(
        "law",
        root,
        folder / "other",
        {"open": (_numpy, saved["root"]), "load": (torch_backend.load, loaded)},
    )


def tiled_subject(folder: Path) -> Subject:
    saved: dict[str, dict[int, Any]] = {}
    for seed, name in enumerate(("root", "other")):
        states = [_as_numpy(state) for state in _torch_states(seed)]
        with RankedRun(folder / name, 4, cells) as run:
            for step, state in enumerate(states):
                reports = run.save(step, state)
                assert not any(isinstance(report, BaseException) for report in reports), reports
        saved[name] = dict(enumerate(states))
    root = folder / "root"
    assert deltacheck.open(root).manifest().tiles
    return Subject("tiled", root, folder / "other", {"open": (_numpy, saved["root"])})


SUBJECTS = {
    "engine": engine_subject,
    "manager": manager_subject,
    "policy": policy_subject,
    "law": law_subject,
    "tiled": tiled_subject,
}


@contextmanager
def built(*names: str) -> Iterator[list[Subject]]:
    """Roots in memory, where the machine has such a place."""
    folder = Path(tempfile.mkdtemp(prefix="damage-", dir=memory_folder()))
    level = logging.getLogger("deltacheck").level
    logging.getLogger("deltacheck").setLevel(logging.CRITICAL)
    try:
        with small_leaves():
            yield [SUBJECTS[name](folder / name.replace(" ", "-")) for name in names or SUBJECTS]
    finally:
        logging.getLogger("deltacheck").setLevel(level)
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first trial; each later one has the next"
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(SUBJECTS), help="this root; may be repeated"
    )
    parser.add_argument("--repair", action="store_true", help="repair each damaged root instead")
    parser.add_argument(
        "--every-bit", action="store_true", help="flip every single bit of all metadata instead"
    )
    parser.add_argument(
        "--stride",
        type=int,
        default=1,
        help="of --every-bit: each so many bits; 1 is the whole, hours",
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    torch.set_num_threads(1)
    tally, begin = Tally(), time.process_time()
    with built(*options.only or ()) as subjects:
        for subject in subjects:
            size = sum(map(len, subject.content.values()))
            print(f"{subject.name}: {len(subject.content)} files, {size / 1024:.0f} KiB")
        ready = time.process_time()
        if options.every_bit:
            for subject in subjects:
                every_bit(subject, tally, options.stride)
        for number in range(0 if options.every_bit else options.trials):
            # The slower two get a trial where the others get two.
            turn = number % (len(subjects) + 2) if len(subjects) == len(SUBJECTS) else number
            subject = subjects[turn % len(subjects)]
            if options.repair:
                mending(subject, seed + number, tally, subject.root.parent)
            else:
                trial(subject, seed + number, tally)
        seconds = time.process_time() - ready
    show(tally, seed, seconds, ready - begin)
    return 1 if tally.failures else 0


def show(tally: Tally, seed: int, seconds: float, before: float) -> None:
    for title, counts in (("kind of file", tally.outcomes), ("fault", tally.faults)):
        seen = sorted({outcome for _, outcome in counts})
        print(f"\n{title:<32}" + "".join(f"{outcome:>10}" for outcome in seen))
        for name in sorted({name for name, _ in counts}):
            print(f"{name:<32}" + "".join(f"{counts[name, outcome]:>10}" for outcome in seen))
    silent = sum(count for (_, outcome), count in tally.outcomes.items() if outcome == "SILENT")
    bound = (
        ""
        if silent
        else (
            f": below {3 / max(1, tally.trials):.1e} with 95 % confidence, for these kinds of"
            " damage"
        )
    )
    each = 1e3 * seconds / max(1, tally.trials)
    print(
        f"\n{tally.trials} trials from seed {seed} in {seconds:.0f} s of processor time ({each:.1f}"
        f" ms each; roots {before:.0f} s)"
    )
    print(
        f"{silent} silent{bound}; {len(tally.failures)} failures; {tally.promises} promised steps"
        " restored"
    )
    for failure in tally.failures[:20]:
        print(failure)


if __name__ == "__main__":
    sys.exit(main())
