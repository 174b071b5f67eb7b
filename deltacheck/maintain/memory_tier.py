"""The memory tier: the newest steps of a run are committed in memory and copied to the disk.

The *memory root* is an ordinary root in a directory that the machine keeps in memory. It is written
without syncs, and outlives a killed process. The *durable root* gets the steps in order from the
drain (``drain.py``), each whole and durable before it is listed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltacheck.errors import SaveFailed, StorageTimeout
from deltacheck.leaf.external_errors import typed
from deltacheck.maintain.drain import Drain, DrainRules
from deltacheck.maintain.tier_bond import Pairing, seq_at
from deltacheck.maintain.transfer import as_at
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.save_options import SaveOptions
from deltacheck.store import layout
from deltacheck.store.documents import Written, manifest_content, manifest_digest
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, take_lease
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root

# A save takes at most its leaves, one part in this number more, and these bytes for each leaf and
# for the save: encodings of bytes that do not shrink, tables and documents.
_MARGIN = 32
_LEAF_BYTES, _SAVE_BYTES = 8 << 10, 1 << 20


@typed
@dataclass(frozen=True, slots=True)
class MemoryTier:
    """The options of a memory tier: ``Engine(root, memory=MemoryTier(...))``.

    If there is no room for one more whole state, a save waits until steps are on the disk
    (``on_busy="skip"``: it is skipped). If that makes no room, the newest step is copied too, the
    memory is emptied, and the save is a whole one. So the memory must hold one whole state, and is
    useful from two on. See ``docs/how-to/every-step.md``.

    Args:
        path: A directory in memory, such as one below ``/dev/shm``, of this run alone. It outlives
            the process, not the machine.
        memory_bytes: The most bytes of files in it. Larger: a slow disk blocks training later, and
            chains grow longer; smaller: more memory for others. Default: half of what the file
            system has free at the start.
        persist_every: Copy the steps that this number divides, and the newest one at the end.
            Larger: fewer syncs and fewer steps on the disk; smaller: less is lost with the machine.
            The deltas between two such steps are copied, because the later step needs them.
        keep: The number of newest steps that stay in memory while there is room. Larger: more to
            go back to at once; smaller: less memory.
        on_stale: The action if the memory is another run's, or continues from another step than the
            newest on the disk. ``"refuse"``: raise ``ForeignMemory``; ``"discard"``: delete its
            steps with a warning, so that a run starts by itself. A memory that is only behind the
            disk is discarded in any case.

    Raises:
        ValueError: A number is below 1, or ``on_stale`` is another word.
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
        """Return a tier as it is, and a path as a tier with default options.

        Args:
            memory: A tier or a path.

        Returns:
            The tier.
        """
        return memory if isinstance(memory, MemoryTier) else cls(memory)


def most_bytes(leaf_bytes: int, leaves: int) -> int:
    """Return the most bytes that one save may write."""
    return leaf_bytes + leaf_bytes // _MARGIN + leaves * _LEAF_BYTES + _SAVE_BYTES


class Tier:
    """The memory root of an engine, and the drain that copies its steps.

    It is made before the saver, which writes to ``root``; ``start`` comes after the saver.

    Args:
        options: The options of the tier.
        durable: The writer of the durable root.
        save_options: The options of all saves.
        patience_seconds: The time without any progress after which waiters give up. Default: twice
            ``io_timeout_seconds``.

    Raises:
        ForeignMemory: The memory holds steps that are not the newest of this run.
        RootBusy: Another process writes to the memory root.
        NotACheckpointRoot: The directory holds something else.
        ValueError: One root is in the other.
        Damaged: A manifest in memory cannot be read.
    """

    def __init__(
        self,
        options: MemoryTier,
        durable: RootWriter,
        save_options: SaveOptions,
        patience_seconds: float | None = None,
    ) -> None:
        path = storage.local(options.path, "a memory tier").absolute()
        _require_apart(path, durable.root.path)
        self.root = Root(path, create_store(path, durability=Durability.PROCESS))
        durable.course.include(self.root)
        self._writer = RootWriter(self.root, take_lease(path), course=durable.course)
        self._durable = durable
        self._sizes: dict[str, int] = {}  # bytes of committed segments in memory
        try:
            pairing = Pairing(self.root, durable.root, discards_stale=options.on_stale == "discard")
            # A Root serves one thread, so the drain gets its own.
            self.drain = Drain(
                RootWriter(self.root.afresh(), self._writer.lease),
                RootWriter(
                    durable.root.afresh(),
                    durable.lease,
                    durable.keep,
                    grace_seconds=save_options.grace_seconds,
                ),
                pairing,
                DrainRules(options.persist_every, options.keep),
                patience_seconds or 2 * save_options.io_timeout_seconds,
            )
            # Files that a killed process left are in use already, so the default adds them to half
            # of what is free.
            self.memory_bytes = options.memory_bytes or self.used_bytes() + _free_bytes(path) // 2
        except BaseException:
            self._writer.release()
            raise

    def start(self, protected: Callable[[], set[str]]) -> None:
        """Start the drain. ``protected``: the segments that the saver builds on."""
        self.drain.start(protected)

    def commit(self, manifest: Manifest) -> Written:
        """Commit a step in memory, and let the drain copy it.

        Returns:
            The written bytes, and the digest of the manifest as it is, or would be, on the disk.
        """
        manifest = self._writer.course.assigned(manifest)
        result = self._writer.commit(manifest)
        self._sizes |= {ref.id: ref.stored_bytes for ref in manifest.segments}
        self.drain.state.wake()
        return Written(result.stored_bytes, durable_digest(self._durable.root, manifest))

    def make_room(
        self,
        step: int,
        save_bytes: int,
        pending_saves: Callable[[], int],
        start_over: Callable[[], None],
        *,
        wait: bool,
        timeout: float | None = None,
    ) -> bool:
        """Wait until one more save of at most ``save_bytes`` fits beside the pending ones.

        If the newest steps themselves fill the memory, they are copied, the memory is emptied, and
        ``start_over`` makes the saver write whole leaves.

        Returns:
            True if there is room; ``False`` if there is none and ``wait`` is false.

        Raises:
            SaveFailed: Not even the empty memory has room, or the drain failed.
            StorageTimeout: Nothing has happened for twice ``io_timeout_seconds``, or there was no
                room within ``timeout`` seconds (default: any time).
        """
        state, deadline = self.drain.state, Deadline.after(timeout)
        state.pulse.beat()
        try:
            while True:
                # First: a save that has ended since then has woken the drain before.
                saves = pending_saves()
                is_idle, needed_bytes = state.is_idle, save_bytes * (saves + 1)
                if self.used_bytes() + needed_bytes <= self.memory_bytes:
                    return True
                if not wait:
                    return False
                state.raise_unseen()
                # Nothing will free memory by itself any more.
                if is_idle and not saves:
                    if self.drain.is_emptying:
                        raise SaveFailed(
                            f"step {step} is not saved: memory_bytes of {self.root.path} is"
                            f" {self.memory_bytes:,}, of which {self.used_bytes():,} are in use,"
                            f" and one save may take {needed_bytes:,}. Give the tier more"
                            " memory_bytes"
                        )
                    start_over()
                    self.drain.is_emptying = True
                    self.drain.request(self._last())
                    state.wake()
                if deadline.left == 0:
                    raise StorageTimeout(
                        f"step {step} is not saved: the steps in {self.root.path} were not copied"
                        f" to {self._durable.root.path} within {timeout:g} s. Give the tier more"
                        " memory_bytes, save less often, or allow more time (io_timeout_seconds)"
                    )
                state.await_change("a save waits for memory, and", deadline.left)
        finally:
            # This also holds after an error: the next save must find the usual number of steps in
            # memory.
            self.drain.is_emptying = False

    def persist(self, manifest: Manifest | None, timeout: float | None) -> None:
        """Wait until a step in memory (``None``: the newest) is on the disk, whatever the rules.

        Raises ``SaveFailed`` if it cannot be copied, ``TimeoutError``, ``StorageTimeout``.
        """
        state = self.drain.state
        if manifest is None:
            self.drain.request(self._last())
        else:
            # Also a step that is older than the newest on the disk: a tag is put on it.
            with state.changed:
                state.requested.add(manifest.seq)
        state.wake()
        state.await_copies(lambda: state.is_idle, timeout)

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step, in memory and on the disk.

        Raises what ``RootWriter.delete`` raises; then nothing was deleted.
        """
        state, lock = self.drain.state, self.drain.lock
        with self.drain.without_trimming():
            # The drain may be copying the step, and removes what it has copied.
            while not state.is_idle:
                lock.release()
                try:
                    state.await_change(
                        "a step that is to be deleted waits for others to be copied, and"
                    )
                finally:
                    lock.acquire()
            if step in self._durable.root.steps():
                # The disk first: if this fails, because of a tag for example, memory has not
                # changed either.
                self._durable.delete(step)
                if step in self.root.steps():
                    self._writer.delete(step)
            else:
                self._writer.delete(step)
            # The bond may name a checkpoint that is deleted now. A memory with an unknown newest
            # checkpoint would be refused at the next start.
            self.drain.record_newest()

    def raise_unseen(self) -> None:
        """Raise the failure of the drain that no call has raised."""
        self.drain.state.raise_unseen()

    def stop(self, on_end: Callable[[], None]) -> None:
        """Let the drain copy all that is due and the newest step, then call ``on_end`` and end.

        No save is under way.
        """
        self.drain.request(self._last())
        self.drain.state.stop(on_end)
        self.drain.state.wake()

    def await_end(self, timeout: float | None) -> None:
        """Wait for the end that ``stop`` began.

        Raises ``SaveFailed`` if a step was not copied, ``TimeoutError``, ``StorageTimeout``.
        """
        state = self.drain.state
        state.await_copies(lambda: state.has_ended, timeout)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, which gives the memory root back."""
        self._writer.abandon()

    def release(self) -> None:
        """Give the memory root back. The drain has ended, or was never started."""
        self._writer.release()

    def used_bytes(self) -> int:
        """Return the bytes of all files of the memory root but the few of its control group."""
        # The directory is listed each time, because the thread of the drain removes segments.
        # Committed segments never change, so their sizes are kept.
        names = self.root.store.segment_ids()
        sizes = self._sizes
        segments = sum(
            sizes.get(name) or _bytes_of(self.root.path / layout.SEGMENTS / name) for name in names
        )
        self._sizes = {name: sizes[name] for name in names if name in sizes}
        return segments + _bytes_of(self.root.path / layout.CHECKPOINTS)

    def _last(self) -> int:
        """Return the newest sequence number in memory, or -1."""
        return max((seq_at(path) for path in self.root.manifest_paths()), default=-1)


def durable_digest(durable: Root, manifest: Manifest) -> str:
    """Return ``manifest_digest`` of a step in memory as it is, or will be, on the disk."""
    return manifest_digest(manifest_content(as_at(durable, manifest)))


def _require_apart(memory: Path, durable: Place) -> None:
    if not isinstance(durable, Path):
        return
    # Links are resolved, or two names of one directory would pass.
    paths = memory.resolve(), durable.resolve()
    if paths[0] == paths[1] or paths[0] in paths[1].parents or paths[1] in paths[0].parents:
        raise ValueError(
            f"the memory root {memory} and the root {durable} must be two directories, none in the"
            " other"
        )


def _bytes_of(path: Path | Place) -> int:
    """Return the bytes of all files below a directory, of which some may be removed meanwhile."""
    size = 0
    for folder, _, files in os.walk(str(path)):
        for name in files:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return size


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    # ``f_bavail`` is what a process without privileges may use.
    return status.f_bavail * status.f_frsize
