"""Newest steps in memory, older ones on the disk: two roots of one run, and the thread that copies
committed steps from one to the other.

The *memory root* is an ordinary root in a directory that the machine keeps in memory, written
without syncs: what a killed process has committed there stays. The *durable root* gets its steps in
order, each by ``transfer``, so every step that it lists is whole and durable. A step leaves memory
when it is on the disk, or was never to go there, and is not among the newest.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deltacheck.errors import Damaged, ForeignMemory, SaveFailed, StorageTimeout
from deltacheck.maintain.transfer import as_at, transfer
from deltacheck.save.options import SaveOptions
from deltacheck.save.root_writer import RootWriter
from deltacheck.store import collect, layout
from deltacheck.store.deadline import Deadline, Pulse
from deltacheck.store.documents import (
    Written,
    check_place,
    manifest_content,
    manifest_digest,
    read_manifest,
)
from deltacheck.store.files import arrays
from deltacheck.store.files import storage as place
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, take_lease
from deltacheck.store.manifest import Brief, Manifest
from deltacheck.store.root import Root, Store

log = logging.getLogger("deltacheck")

# Group under control/: which durable root a memory root belongs to, and the name that this one has
# for it
BOND = "tier"
_LOOK_SECONDS = 0.05  # between two looks at what nobody tells of
_MARGIN = (
    32  # a save takes at most its leaves and one so many-th more, and for each leaf and each save:
)
_LEAF_BYTES, _SAVE_BYTES = 8 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Where newest steps lie in memory, and for how long: ``Engine(root, memory=MemoryTier(...))``.

    ``path``: a directory in memory, such as one below ``/dev/shm``, of this run alone; what is
    there outlives the process, not the machine. ``memory_bytes``: most bytes that files take there
    (default: half of what the file system has free at the start). Larger: a slow disk holds
    training up later, and chains grow longer; smaller: more memory for others. Where there is no
    room for one more whole state, a save waits until steps are on the disk (``on_busy="skip"``: is
    skipped); where that alone makes no room, the newest step goes to the disk, too, the memory is
    emptied, and the save is a whole one. So it must hold a whole state, and is of use from two on.
    ``persist_every``: copy only steps that this number divides to the disk, and the newest one at
    the end. Larger: fewer syncs and fewer steps on the disk, more of them lost with the machine;
    the deltas between two such steps are copied all the same, as the later one needs them.
    ``keep``: newest steps that stay in memory while there is room. Larger: more to go back to at
    once, more memory. ``on_stale``: when what is in memory is another run's, or goes on from
    another step than the newest on the disk: ``"refuse"`` to start, or ``"discard"`` it with a
    warning, which lets a run start by itself and loses those steps. What is only behind the disk,
    as on a machine that the run comes back to after it went on elsewhere, is discarded with a
    warning in any case.

    Raises ``ValueError`` for numbers below 1 and other words.
    """

    path: str | os.PathLike[str]
    memory_bytes: int | None = None
    persist_every: int = 1
    keep: int = 2
    on_stale: str = "refuse"

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "persist_every", "keep"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        if self.on_stale not in ("refuse", "discard"):
            raise ValueError(f"on_stale must be 'refuse' or 'discard', not {self.on_stale!r}")

    @classmethod
    def of(cls, memory: MemoryTier | str | os.PathLike[str]) -> MemoryTier:
        """A tier as it is; a path as a tier there with every option at its default. Raises
        ``ValueError`` as the constructor does.
        """
        return memory if isinstance(memory, MemoryTier) else cls(memory)


# --- decisions ------------------------------------------------------------------------------------


class Bond(NamedTuple):
    """What a memory root says of its durable root. ``root``: that one's random name; ``path``: for
    people; ``seq``, ``nonce``: of its newest checkpoint that this memory root has known, -1 and
    empty for none. ``boot``: the start of the machine (``collect.boot``) that it was written in.
    """

    root: str
    path: str
    seq: int
    nonce: str
    boot: str = ""


class Stale(NamedTuple):
    """Why what a memory root holds is not the newest of a run. ``is_behind``: all of it is older
    than the newest step on the disk.
    """

    why: str
    is_behind: bool


def stale(
    bond: Bond | None,
    held: Collection[tuple[int, str]],
    root: str,
    newest: tuple[int, str] | None,
    boot: str = "",
) -> Stale | None:
    """Whether what a memory root holds is not the newest of a run; ``None`` where it is, or where
    it
    holds nothing.

    ``held``: sequence number and nonce of its checkpoints. ``root``: the durable root's name;
    ``newest``: its newest checkpoint, with an empty nonce where that cannot be read. ``boot``: this
    start of the machine, empty where it cannot be told. Whoever wrote to the durable root without
    this memory root left a newest checkpoint there of which it knows nothing.
    """
    if not held:
        return None
    if bond is None:
        return Stale("it holds steps, but no note of which run it is the memory of", False)
    if bond.root != root:
        return Stale(f"it is the memory of another run, {bond.path}", False)
    if boot and bond.boot not in ("", boot):
        return Stale(
            "the machine was started anew since it was written, so it lies on a disk, and nothing"
            " of it was synced",
            False,
        )
    if newest is None:
        return (
            None
            if bond.seq < 0
            else Stale(
                "the run on the disk has lost the steps that this memory goes on from", False
            )
        )
    known = {*held, (bond.seq, bond.nonce)}
    if newest in known or (not newest[1] and newest[0] in {seq for seq, _ in known}):
        return None
    why = (
        f"the run on the disk went on without it: this memory does not know checkpoint {newest[0]},"
        " the newest there"
    )
    return Stale(why, max(seq for seq, _ in held) <= newest[0])


def next_due(
    briefs: Iterable[Brief], newest: int, every: int, wanted: Collection[int]
) -> Brief | None:
    """The next checkpoint to copy, oldest first. ``newest``: sequence number of the newest on the
    disk. ``wanted``: of those asked for.
    """
    due = [
        one for one in briefs if one.seq in wanted or (one.seq > newest and one.step % every == 0)
    ]
    return min(due, key=lambda one: one.seq, default=None)


def kept(
    briefs: Collection[Brief], newest: int, every: int, wanted: Collection[int], keep: int
) -> frozenset[int]:
    """The sequence numbers that stay in memory: the newest ones, and whatever is still to be
    copied.
    """
    due = {
        one.seq
        for one in briefs
        if one.seq in wanted or (one.seq > newest and one.step % every == 0)
    }
    return frozenset(due | set(sorted((one.seq for one in briefs), reverse=True)[:keep]))


def most_bytes(leaf_bytes: int, leaves: int) -> int:
    """What one save may write at most: every leaf whole, what encodings of bytes that do not shrink
    add, and documents.
    """
    return leaf_bytes + leaf_bytes // _MARGIN + leaves * _LEAF_BYTES + _SAVE_BYTES


# --- the two roots --------------------------------------------------------------------------------


class Tier:
    """The memory root of an engine, and the thread that drains it. Made before the saver, which
    writes
    to ``root``; ``start`` after it.

    Raises ``ForeignMemory`` (naming both roots and the way out), ``RootBusy``,
    ``NotACheckpointRoot``, ``ValueError`` where one path is in the other, ``Damaged`` where a
    manifest in memory cannot be read.
    """

    def __init__(
        self,
        options: MemoryTier,
        durable: RootWriter,
        save_options: SaveOptions,
    ) -> None:
        path = place.local(options.path, "a memory tier").absolute()
        if isinstance(durable.root.path, Path):
            ours, theirs = path.resolve(), durable.root.path.resolve()
            if ours == theirs or ours in theirs.parents or theirs in ours.parents:
                raise ValueError(
                    f"the memory root {path} and the root {durable.root.path} must be two directories,"
                    " none in the other"
                )
        self.root = Root(path, Store.create(path, durability=Durability.PROCESS))
        self.lock = threading.Lock()  # nothing leaves memory while it is held
        self.retention = (
            threading.Lock()
        )  # nothing on the disk is deleted by retention while it is held
        self._writer = RootWriter(self.root, take_lease(path))
        self._options = options
        self._durable, self._durable_writer = durable.root, durable
        # The thread's own: a Root serves one thread.
        self._source, self._target = self.root.afresh(), durable.root.afresh()
        self._drain_writer = RootWriter(
            self._target, durable.lease, durable.retention, save_options.grace_seconds
        )
        self._patience_seconds = 2 * save_options.io_timeout_seconds
        self._pulse = Pulse(self._patience_seconds)
        # A compaction writes as much beside a save.
        self._saves_at_once = 1 if save_options.compact_after is None else 2
        self._changed = threading.Condition()
        self._wanted: set[int] = set()
        self._sizes: dict[str, int] = {}  # of committed segments in memory, bytes
        self._woken = self._stopping = self._ended = False
        self._is_idle = True
        self._is_emptying = False
        self._error: SaveFailed | None = None
        self._protected: Callable[[], set[str]] = set
        self._on_end: Callable[[], None] | None = None
        try:
            self._newest = self._claim()
            self.memory_bytes = options.memory_bytes or self._used() + _free_bytes(path) // 2
        except BaseException:
            self._writer.release()
            raise

    def start(self, protected: Callable[[], set[str]]) -> None:
        """Begin to drain. ``protected``: segments that the saver stands on."""
        self._protected = protected
        self._thread = threading.Thread(target=self._run, name="deltacheck-drain", daemon=True)
        self._thread.start()
        self.wake()  # for what a killed process has left

    # --- what an engine calls ---------------------------------------------------------------------

    def commit(self, manifest: Manifest) -> Written:
        """Commit a step in memory; the thread does what follows from it. The digest is that of the
        step on the disk, where it is to stay.
        """
        written = self._writer.commit(manifest)
        self._sizes |= {ref.id: ref.stored_bytes for ref in manifest.segments}
        self.wake()
        return Written(written.stored_bytes, durable_digest(self._durable, manifest))

    def make_room(
        self,
        step: int,
        save_bytes: int,
        under_way: Callable[[], int],
        start_over: Callable[[], None],
        *,
        wait: bool,
    ) -> bool:
        """Wait until one more save of at most ``save_bytes`` fits beside those ``under_way``;
        ``False`` where ``wait`` is not wanted.

        Where the newest steps themselves fill the memory, they go to the disk, the memory is
        emptied, and the next save is a whole one, which ``start_over`` tells the saver. Raises
        ``SaveFailed`` where not even that makes room, the drain's failure, ``StorageTimeout`` where
        nothing happens for twice ``io_timeout_seconds``.
        """
        self._pulse.beat()
        try:
            while True:
                saves = (
                    under_way()
                )  # first: a save that has ended since has woken the thread before
                idle, wanted = self._is_idle, save_bytes * (saves + self._saves_at_once)
                if self._used() + wanted <= self.memory_bytes:
                    return True
                if not wait:
                    return False
                self.raise_unseen()
                if idle and not saves:
                    if self._is_emptying:
                        raise SaveFailed(
                            f"step {step} is not saved: memory_bytes of {self.root.path} is"
                            f" {self.memory_bytes:,}, of which {self._used():,} are in use, and one"
                            f" save may take {wanted:,}. Give the tier more memory_bytes"
                        )
                    start_over()
                    with self._changed:
                        self._is_emptying = True
                        self._wanted |= {seq for seq in [self._last()] if seq > self._newest}
                    self.wake()
                self._await_change("a save waits for memory, and")
        finally:
            self._is_emptying = False

    def persist(self, manifest: Manifest | None, timeout: float | None) -> None:
        """Wait until a step in memory (``None``: the newest) is on the disk, whether it was to go
        there or not.

        Raises ``SaveFailed`` where it cannot be copied, ``TimeoutError``, ``StorageTimeout``.
        """
        deadline = Deadline.after(timeout)
        seq = self._last() if manifest is None else manifest.seq
        with self._changed:
            if seq > self._newest or manifest is not None:
                self._wanted.add(seq)
        self.wake()
        self._pulse.beat()
        while not self._is_idle:
            if deadline.left == 0:
                raise TimeoutError(
                    f"the newest steps are in memory, but not yet all in {self._durable.path} after"
                    f" {timeout} s"
                )
            self._await_change("steps wait to be copied, and", deadline.left)
        self.raise_unseen()

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step, in memory and on the disk. Raises as
        ``RootWriter.delete``; then nothing was deleted.
        """
        with self.lock:
            while not self._is_idle:
                self.lock.release()
                try:
                    self._await_change(
                        "a step that is to be deleted waits for others to be copied, and"
                    )
                finally:
                    self.lock.acquire()
            if step in self._durable.steps():
                self._durable_writer.delete(step)
                if step in self.root.steps():
                    self._writer.delete(step)
            else:
                self._writer.delete(step)
            self._newest = max(self._newest, self._note(self._durable))

    def raise_unseen(self) -> None:
        """Raise the failure of the drain that nobody was told of."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def release(self) -> None:
        """Give the memory root back. The thread has ended, or was never started."""
        self._writer.release()

    def wake(self) -> None:
        """There is something to do."""
        with self._changed:
            self._woken, self._is_idle = True, self._ended
            self._changed.notify_all()

    def stop(self, on_end: Callable[[], None]) -> None:
        """Copy what is to be copied and the newest step, then end; the last thing that happens is
        ``on_end``. REQUIRES: no save is under way.
        """
        with self._changed:
            self._on_end, self._stopping = on_end, True
            if (last := self._last()) > self._newest:
                self._wanted.add(last)
        self.wake()

    def await_end(self, timeout: float | None) -> None:
        """Wait for what ``stop`` began. Raises ``SaveFailed`` for what was not copied,
        ``TimeoutError``, ``StorageTimeout``.
        """
        deadline = Deadline.after(timeout)
        self._pulse.beat()
        while not self._ended:
            if deadline.left == 0:
                raise TimeoutError(
                    f"the newest steps are in memory, but not yet all in {self._durable.path} after"
                    f" {timeout} s"
                )
            self._await_change("steps wait to be copied, and", deadline.left)
        self.raise_unseen()

    def _await_change(self, what: str, left: float | None = None) -> None:
        if self._pulse.left <= 0:
            raise StorageTimeout(
                f"{what} nothing has happened in {self._durable.path} for"
                f" {self._patience_seconds:g} s; it may hang"
            )
        with self._changed:
            self._changed.wait(_LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS))

    def _last(self) -> int:
        """The newest sequence number in memory; -1: none."""
        return max((_seq_at(path) for path in self.root.manifest_paths()), default=-1)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._woken:
                    self._changed.wait()
                self._woken, stopping = False, self._stopping
            try:
                self._drain()
            except BaseException as error:  # noqa: BLE001 - a thread that dies silently would let memory run full
                failed = (
                    error
                    if isinstance(error, SaveFailed)
                    else SaveFailed(f"draining {self.root.path} failed: {error}")
                )
                failed.__cause__ = failed.__cause__ or (None if failed is error else error)
                log.error("%s", failed)
                with self._changed:
                    self._error = failed
            with self._changed:
                ends = stopping and not self._woken
            if ends and self._on_end is not None:
                self._on_end()  # before anybody hears of the end
            with self._changed:
                self._is_idle = ends or not self._woken
                self._ended = ends
                self._changed.notify_all()
            if ends:
                return

    def _drain(self) -> None:
        """Copy what is due, oldest first, and let go of what need not stay."""
        options = self._options
        self._trim()
        while (
            brief := next_due(self._briefs(), self._newest, options.persist_every, self._wanted)
        ) is not None:
            self._copy(brief)
            with self._changed:
                self._wanted.discard(brief.seq)
                self._error = None  # of this step, or of one before it: it has gone well since
            self._retain()
            self._trim()
            self._pulse.beat()

    def _copy(self, brief: Brief) -> None:
        path = (
            self._source.path / layout.CHECKPOINTS / layout.checkpoint_id(brief.seq) / "zarr.json"
        )
        there = self._target.path / layout.CHECKPOINTS / path.parent.name / "zarr.json"
        try:
            manifest = check_place(path, read_manifest(path), False)  # not kept: steps come and go
            if not (
                there.exists() and self._target.read(there).nonce == manifest.nonce
            ):  # else a kill came before the note
                late = brief.seq < self._newest
                self._durable_writer.check()
                transfer(
                    self._source,
                    manifest,
                    self._target,
                    self._durable_writer.check,
                    beat=self._pulse.beat,
                    again=late,
                )
            if brief.seq > self._newest:
                self._newest = brief.seq
                self._write_bond(
                    Bond(
                        self._identity, place.full_name(self._durable.path), brief.seq, brief.nonce
                    )
                )
        except Exception as error:
            raise SaveFailed(
                f"step {brief.step} is in {self.root.path}, which a power cut would take, and could"
                f" not be copied to {self._durable.path}; both are as they were, and the next save"
                f" tries it again. Cause: {type(error).__name__}: {error}"
            ) from error

    def _retain(self) -> None:
        if self._drain_writer.retention.keeps_all or not self.retention.acquire(blocking=False):
            return
        try:
            self._drain_writer.retain()
        except Exception:
            log.warning("older steps of %s could not be deleted", self._durable.path, exc_info=True)
        finally:
            self.retention.release()

    def _trim(self) -> None:
        with self.lock:
            briefs = self._briefs()
            keep = 0 if self._is_emptying else self._options.keep
            stay = kept(briefs, self._newest, self._options.persist_every, self._wanted, keep)
            for brief in briefs:
                if brief.seq not in stay:
                    self._writer.check()
                    collect.delete_checkpoint(self._source, brief.seq)
            collect.collect(
                self._source, grace_seconds=0, protected=self._protected(), newest=self._newest
            )
        with self._changed:
            self._changed.notify_all()

    def _briefs(self) -> list[Brief]:
        found, damaged = self._source.briefs()
        for error in damaged.values():
            raise error
        return sorted(found.values(), key=lambda one: one.seq)

    # --- what lies there --------------------------------------------------------------------------

    def _used(self) -> int:
        """Bytes of all files of the memory root but the few of its control group."""
        names = self.root.store.segment_ids()
        known = self._sizes
        segments = sum(
            known.get(name) or _bytes_of(self.root.path / layout.SEGMENTS / name) for name in names
        )
        self._sizes = {name: known[name] for name in names if name in known}
        return segments + _bytes_of(self.root.path / layout.CHECKPOINTS)

    def _claim(self) -> int:
        """Make sure that both roots are of one run; the newest sequence number on the disk."""
        self._identity = _identity(self._durable)
        briefs, damaged = self.root.briefs()
        held = {(brief.seq, brief.nonce) for brief in briefs.values()} | {
            (_seq_at(path), "") for path in damaged
        }
        found = stale(
            read_bond(self.root.path), held, self._identity, _newest(self._durable), collect.boot()
        )
        if found is None and damaged:
            found = Stale(f"it is damaged: {next(iter(damaged.values()))}", False)
        if found is not None:
            self._discard(found)
        seq = self._note(self._durable)
        collect.collect(
            self.root, grace_seconds=0, writer_is_dead=True
        )  # what a killed process has begun
        return seq

    def _discard(self, found: Stale) -> None:
        """Empty the memory root, if that is allowed."""
        memory, disk, steps = self.root.path, self._durable.path, self.root.steps()
        if read_bond(memory) is None or not (
            found.is_behind or self._options.on_stale == "discard"
        ):
            raise ForeignMemory(
                f"{memory} cannot be the memory of {disk}: {found.why}. Nothing was changed. Its"
                f" steps are {steps}, which deltacheck.open({str(memory)!r}) reads. To go on from"
                f" {disk}, remove {memory}, name another directory, or (for what was a memory root)"
                " say MemoryTier(on_stale='discard')"
            )
        log.warning(
            "%s, steps %s, is discarded: it cannot be the memory of %s: %s",
            memory,
            steps,
            disk,
            found.why,
        )
        for path in self.root.manifest_paths():
            collect.delete_checkpoint(self.root, _seq_at(path))

    def _note(self, durable: Root) -> int:
        newest = _newest(durable)
        seq, nonce = newest or (-1, "")
        self._write_bond(Bond(self._identity, place.full_name(durable.path), seq, nonce))
        return seq

    def _write_bond(self, bond: Bond) -> None:
        write_bond(self.root.path, bond)


def durable_digest(durable: Root, manifest: Manifest) -> str:
    """``manifest_digest`` of a step in memory as it is, or will be, on the disk."""
    return manifest_digest(manifest_content(as_at(durable, manifest)))


def read_bond(root: Place) -> Bond | None:
    """What a root says of the root that it is the memory of; ``None`` where it says nothing that
    can be read.
    """
    try:
        about = json.loads(arrays.read_file(root / layout.CONTROL / BOND / "zarr.json", 1 << 20))[
            "attributes"
        ][layout.ATTRIBUTE]
        return Bond(
            str(about["root"]),
            str(about["path"]),
            int(about["seq"]),
            str(about["nonce"]),
            str(about["boot"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged):
        return None


def write_bond(root: Place, bond: Bond) -> None:
    """Let a root say this of itself, as of this start of the machine."""
    bond = bond._replace(boot=collect.boot())
    folder = root / layout.CONTROL / BOND
    folder.mkdir(exist_ok=True)
    arrays.replace_file(
        folder,
        "zarr.json",
        layout.group_json({layout.ATTRIBUTE: bond._asdict()}),
        Durability.PROCESS,
    )


def _identity(durable: Root) -> str:
    """The random name by which memory roots know a durable root; given to it where it has none."""
    folder, store = durable.store.path / layout.CONTROL / BOND, durable.store
    folder.mkdir(exist_ok=True)
    content = layout.group_json({layout.ATTRIBUTE: {"root": secrets.token_hex(16)}})
    if arrays.create_file(folder, "zarr.json", content, store.durability):
        store.durability.sync_directory(folder)
        store.durability.sync_directory(folder.parent)
    path = folder / "zarr.json"
    try:
        about = json.loads(arrays.read_file(path, 1 << 20))["attributes"][layout.ATTRIBUTE]
        return str(about["root"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(
            f"{path} is damaged: {error}. Remove it; memory roots of this run are refused then",
            file=path,
        ) from error


def _seq_at(manifest_path: Place) -> int:
    return layout.seq_of(manifest_path.parent.name)


def _newest(durable: Root) -> tuple[int, str] | None:
    """The newest checkpoint; its nonce is empty where its manifest cannot be read."""
    found, damaged = durable.briefs()
    every = [(brief.seq, brief.nonce) for brief in found.values()]
    every += [(_seq_at(path), "") for path in damaged]
    return max(every, default=None)


def _bytes_of(path: Path | Place) -> int:
    """Bytes of all files below a directory, of which others may be removed meanwhile."""
    size = 0
    for folder, _, files in os.walk(str(path)):
        for name in files:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return size


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
