"""Enumerate or sample every legal state of a disk after a power cut in a recorded trace.

The model is that of Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014), at its
weakest, so that it includes what ext4, XFS and btrfs do in any of their modes:

* What was written to a file and not synced since may be there, not there, there up to any byte, or
  be the right number of zeros or of foreign bytes.
* A name that was created, renamed or removed, and whose directory was not synced since, may be as
  before or as after, independently of all others, but for two rules: operations on one name keep
  their order, and a directory is removed after what was in it. A rename is one act.
* To sync a file says nothing of its name, to sync a directory nothing of its own name in its
  parent. What cannot be reached is not there.

A crash between two syncs leaves a state that a crash just before the second may leave too. So the
points just before each sync, and the end, are all points there are.

Not in it: a disk that acknowledges a flush and forgets it, a failed sync, damage to what was
synced, and renames that are not atomic.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from tests.faults import shim

Tree = dict[str, bytes | None]  # path below the base -> content, None of a directory


class Op(NamedTuple):
    """One call that changed something, or a sync. Paths are relative to the base, ``""`` is the
    base; ``path`` of a mark is its text.
    """

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


def from_trace(records: Iterable[shim.Op]) -> list[Op]:
    """Return the recorded calls that changed something."""
    found = []
    for record in records:
        path, other = ("" if name == "." else name for name in (record.path, record.other))
        if record.error:
            continue
        if record.kind == "open" and record.created:
            found.append(Op("create", path))
        elif record.kind == "open" and record.flags & os.O_TRUNC:
            found.append(Op("truncate", path))
        elif record.kind == "write":
            found.append(Op("write", path, offset=record.offset, data=record.data[: record.result]))
        elif record.kind == "truncate":
            found.append(Op("truncate", path, offset=record.offset))
        elif record.kind in ("rename", "link", "unlink", "mkdir", "rmdir", "sync", "mark"):
            found.append(Op(record.kind, path, other))
        elif record.kind != "open":
            raise ValueError(f"the model knows nothing of {record}")
    return found


# --- the model ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Unit:
    """One act on names: ``sets``: (directory, name, file or ``None``); ``needs``: acts that must
    have happened; ``unsynced``: directories.
    """

    sets: tuple[tuple[int, str, int | None], ...]
    needs: tuple[int, ...]
    unsynced: set[int]


@dataclass(slots=True)
class File:
    """The changes of a file's content. ``synced``: the number of durable ones."""

    acts: list[Op] = field(default_factory=list)
    synced: int = 0

    def content(self, acts: int) -> bytes:
        found = bytearray()
        for act in self.acts[:acts]:
            if act.kind == "truncate":
                del found[act.offset :]
                found.extend(bytes(act.offset - len(found)))
            else:
                found.extend(bytes(max(0, act.offset - len(found))))
                found[act.offset : act.offset + len(act.data)] = act.data
        return bytes(found)

    def variants(self) -> list[bytes]:
        """Every content that a power cut may leave, the one that is expected first."""
        old, new = self.content(self.synced), self.content(len(self.acts))
        common = next(
            (k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        torn = [
            new[:cut]
            for cut in {(common + len(new)) // 2, len(new) - 1}
            if common <= cut < len(new)
        ]
        filled = [new[:common] + of * (len(new) - common) for of in (b"\0", b"\xa5")]
        return list(dict.fromkeys([new, old, *torn, *filled]))


class Disk:
    """The durable and the visible content of a disk during a trace.

    The base, number 0, is durable.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], int] = {}  # as the running system sees them
        self._durable: dict[tuple[int, str], int | None] = {}
        self._units: list[Unit] = []
        self._pending: dict[int, None] = {}  # numbers of units, in order
        self._last: dict[tuple[int, str], int] = {}  # the last unit that touched a name
        self._files: dict[int, File] = {}
        self._next = 1

    def apply(self, op: Op) -> None:
        if op.kind in ("create", "mkdir"):
            number = self._next
            self._next += 1
            if op.kind == "create":
                self._files[number] = File()
            self._act((*self._place(op.path), number))
        elif op.kind in ("write", "truncate"):
            number = self._find(op.path)
            if number is not None:
                self._files[number].acts.append(op)
        elif op.kind in ("unlink", "rmdir"):
            number = self._find(op.path)
            inner = (
                [k for k in self._pending if any(d == number for d, _, _ in self._units[k].sets)]
                if op.kind == "rmdir"
                else []
            )
            self._act((*self._place(op.path), None), needs=inner)
        elif op.kind == "link":
            self._act((*self._place(op.other), self._find(op.path)))
        elif op.kind == "rename":
            self._act((*self._place(op.path), None), (*self._place(op.other), self._find(op.path)))
        elif op.kind == "sync":
            number = self._find(op.path)
            if number in self._files:
                self._files[number].synced = len(self._files[number].acts)
            elif number is not None:
                self._sync_names(number)

    def _find(self, path: str) -> int | None:
        number: int | None = 0
        for name in path.split("/") if path else ():
            number = None if number is None else self._names.get((number, name))
        return number

    def _place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        number = self._find(folder)
        assert number is not None, f"the trace names {path}, whose directory it never made"
        return number, name

    def _act(self, *sets: tuple[int, str, int | None], needs: Sequence[int] = ()) -> None:
        before = [
            self._last[key]
            for d, name, _ in sets
            if (key := (d, name)) in self._last and self._last[key] in self._pending
        ]
        number = len(self._units)
        self._units.append(Unit(sets, (*needs, *before), {d for d, _, _ in sets}))
        self._pending[number] = None
        for d, name, to in sets:
            self._last[(d, name)] = number
            if to is None:
                self._names.pop((d, name), None)
            else:
                self._names[(d, name)] = to

    def _sync_names(self, directory: int) -> None:
        for number in list(self._pending):
            unit = self._units[number]
            unit.unsynced.discard(directory)
            if not unit.unsynced:
                self._make_durable(number)

    def _make_durable(self, number: int) -> None:
        if number not in self._pending:
            return
        for needed in self._units[number].needs:
            self._make_durable(needed)
        del self._pending[number]
        for d, name, to in self._units[number].sets:
            self._durable[(d, name)] = to

    # --- crash states ---

    def size(self) -> float:
        """An upper bound of the number of states that a cut may leave now."""
        return 2.0 ** len(self._pending) * math.prod(
            len(self._files[n].variants()) for n in self._dirty()
        )

    def _dirty(self) -> list[int]:
        return [n for n, file in self._files.items() if file.synced < len(file.acts)]

    def every(self) -> Iterator[Tree]:
        """Every state that a cut may leave now."""
        dirty = self._dirty()
        choices = [self._files[n].variants() for n in dirty]
        pending = list(self._pending)
        for kept in itertools.product((True, False), repeat=len(pending)):
            chosen = {number for number, keep in zip(pending, kept, strict=True) if keep}
            if all(
                need in chosen or need not in self._pending
                for number in chosen
                for need in self._units[number].needs
            ):
                for contents in itertools.product(*choices):
                    yield self._tree(chosen, dict(zip(dirty, contents, strict=True)))

    def some(self, rng: random.Random) -> Iterator[Tree]:
        """States drawn without end: as a journal leaves them (acts up to one of them), with few
        acts lost, with few kept, with any.
        """
        pending, dirty = list(self._pending), self._dirty()
        choices = [self._files[n].variants() for n in dirty]
        while True:
            way, cut = rng.randrange(4), rng.randint(0, len(pending))
            share = (1.0, 0.9, 0.1, 0.5)[way]
            wanted = [
                n
                for k, n in enumerate(pending)
                if rng.random() < share and not (way == 0 and k >= cut)
            ]
            chosen: set[int] = set()
            for number in wanted:
                if all(
                    need in chosen or need not in self._pending
                    for need in self._units[number].needs
                ):
                    chosen.add(number)
            yield self._tree(
                chosen, {n: rng.choice(of) for n, of in zip(dirty, choices, strict=True)}
            )

    def seen(self) -> Tree:
        """Return the files as the running system sees them."""
        return self._tree(
            set(self._pending), {n: file.content(len(file.acts)) for n, file in self._files.items()}
        )

    def _tree(self, kept: set[int], contents: Mapping[int, bytes]) -> Tree:
        names = dict(self._durable)
        for number in self._pending:
            if number in kept:
                for d, name, to in self._units[number].sets:
                    names[(d, name)] = to
        inside: dict[int, list[tuple[str, int]]] = {}
        for (d, name), to in names.items():
            if to is not None:
                inside.setdefault(d, []).append((name, to))
        tree: Tree = {}
        todo = [("", 0)]
        while todo:
            path, directory = todo.pop()
            for name, number in inside.get(directory, ()):
                full = f"{path}/{name}" if path else name
                file = self._files.get(number)
                if file is None:
                    tree[full] = None
                    todo.append((full, number))
                else:
                    tree[full] = (
                        contents[number] if number in contents else file.content(file.synced)
                    )
        return tree


@dataclass(frozen=True, slots=True)
class Cut:
    """A state after a power cut. ``marks``: what the program had said until then; ``point``: how
    many calls had been made.
    """

    point: int
    marks: tuple[str, ...]
    tree: Tree

    @property
    def digest(self) -> str:
        hash_ = xxhash.xxh3_128()
        for path, content in sorted(self.tree.items()):
            hash_.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
            hash_.update(content or b"")
        return str(hash_.hexdigest())


def cuts(trace: Sequence[Op], most: int, seed: int) -> Iterator[Cut]:
    """Yield at most ``most`` different states that a power cut at any moment of a trace may leave.

    All of them are yielded where there are no more. The moments take turns in an order drawn from
    ``seed``, and so are the states of each. Every fourth state is of the last moment, when most was
    acknowledged.
    """
    rng = random.Random(seed)
    *earlier, last = _points(trace)
    rng.shuffle(earlier)
    yielded: set[tuple[str, tuple[str, ...]]] = set()

    def fresh(point: int, tree: Tree) -> Cut | None:
        cut = Cut(point, tuple(op.path for op in trace[:point] if op.kind == "mark"), tree)
        key = (cut.digest, cut.marks)
        if key in yielded:
            return None
        yielded.add(key)
        return cut

    def turn() -> Iterator[Cut]:
        nonlocal running
        left = []
        for point, draws in running:
            for _ in range(50):  # in vain: what is left at this point is rare, or nothing
                tree = next(draws, None)
                if tree is None:
                    break
                if (cut := fresh(point, tree)) is not None:
                    left.append((point, draws))
                    yield cut
                    break
        running = left

    draws = {
        point: _draws(_disk(trace, point), random.Random(f"{seed}/{point}"))
        for point in (last, *earlier)
    }
    running = [(last, draws[last])]
    for number, point in enumerate(earlier, 1):
        running.append((point, draws[point]))
        if number % 3 == 0:
            running.append((last, draws[last]))

    def all_states() -> Iterator[Cut]:
        while running:
            yield from turn()

    yield from itertools.islice(all_states(), most)


def _draws(disk: Disk, rng: random.Random) -> Iterator[Tree]:
    drawn = disk.some(rng)
    return drawn if disk.size() > 4096 else itertools.chain([next(drawn)], disk.every())


def _points(trace: Sequence[Op]) -> list[int]:
    """Just before each sync that follows a change, and the end."""
    found, changed = [], False
    for number, op in enumerate(trace):
        if op.kind == "sync" and changed:
            found.append(number)
            changed = False
        changed = changed or op.kind != "sync"
    return [*found, len(trace)]


def _disk(trace: Sequence[Op], point: int) -> Disk:
    disk = Disk()
    for op in trace[:point]:
        disk.apply(op)
    return disk


def seen_at(trace: Sequence[Op], point: int) -> Tree:
    """Return the files that a restarted process finds after ``point`` calls."""
    return _disk(trace, point).seen()


def materialise(tree: Tree, folder: Path) -> None:
    """Put a state into an empty folder."""
    for path in sorted(path for path, content in tree.items() if content is None):
        (folder / path).mkdir(parents=True, exist_ok=True)
    for path, content in tree.items():
        if content is not None:
            descriptor = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)
