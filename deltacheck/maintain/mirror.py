"""Keep a second copy of a memory root in another machine's memory.

Every step is copied as it appears, and deleted as it is deleted. A mirror is a memory root itself.
"""

from __future__ import annotations

import os
import time
from typing import Self

from deltacheck.errors import ForeignMemory, NotACheckpointRoot, StepNotFound
from deltacheck.leaf.external_errors import typed
from deltacheck.maintain.tier_bond import read_bond, write_bond
from deltacheck.maintain.transfer import transfer
from deltacheck.store import collect
from deltacheck.store.documents import check_place, read_manifest
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import take_lease
from deltacheck.store.roots.opening import create_store, open_root
from deltacheck.store.roots.root import Root


@typed
class Mirror:
    """A copy of a memory root, kept by another process than the one that writes there.

    A mirror takes the lease of the target, and no lock on the source. See
    ``docs/how-to/every-step.md``.

    Args:
        source: The memory root of an engine.
        target: Directory of the copy. It is created if it does not exist.
        durability: Durability of the copy. ``"process"`` (default): the copy survives the end of
            this process; use it for a copy in memory. ``"power"``: the copy also survives a power
            cut, but every step is synced, which is slower.

    Raises:
        NotACheckpointRoot: If ``source`` is not the memory root of an engine.
        ForeignMemory: If ``target`` holds the steps of another run.
        RootBusy: If another process writes to ``target``.
        StorageFailed: If one of them is in an object store.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        durability: str = "process",
    ) -> None:
        self._source = open_root(storage.local(source, "a mirror"))
        path = storage.local(target, "a mirror").absolute()
        # A root without a bond is an ordinary one. A copy of it could not prove later whose memory
        # it is.
        bond = read_bond(self._source.path)
        if bond is None or self._source.is_manager_root:
            raise NotACheckpointRoot(
                f"{source} is not the memory root of an engine: it does not name the run that it"
                " belongs to"
            )
        self._target = Root(path, create_store(path, durability=Durability.of(durability)))
        # The lease is taken before the target is read, so nobody writes between the check and the
        # first copy.
        self._lease = take_lease(path)
        try:
            target_bond = read_bond(path)
            if self._target.manifest_paths() and (
                target_bond is None or target_bond.root != bond.root
            ):
                raise ForeignMemory(
                    f"{path} cannot mirror {source}: it holds steps of another run. Remove it, or"
                    " name another directory"
                )
        except BaseException:
            self._lease.release()
            raise
        self._run = bond.root

    def poll(self) -> list[int]:
        """Copy the steps that are new at the source, and delete those that are deleted there.

        The copy is complete at every moment: new steps are copied before old ones are deleted. If
        the source itself does not exist any more, nothing is deleted.

        Returns:
            The training steps that were copied, oldest first.

        Raises:
            Damaged: If a step of the source cannot be read.
            ForeignMemory: If another run has replaced the source.
            RootBusy: If the lease of the target was lost.
        """
        briefs, damaged = self._source.briefs()
        for error in damaged.values():
            raise error
        # An unmounted memory looks like an empty one, and a mirror exists for exactly this loss.
        if not briefs:
            return []
        self._lease.check()
        # A save is identified by its sequence number and its nonce: a run that began anew repeats
        # the numbers.
        source_saves = {(brief.seq, brief.nonce) for brief in briefs.values()}
        target_saves = {(brief.seq, brief.nonce) for brief in self._target.briefs()[0].values()}
        replaced = {seq for seq, _ in target_saves - source_saves} & {
            seq for seq, _ in source_saves
        }
        # The new save needs the same name. This is the one case in which a copy is deleted first.
        for seq in replaced:
            collect.delete_checkpoint(self._target, seq)
        copied = []
        for path, brief in sorted(briefs.items(), key=lambda entry: entry[1].seq):
            if (brief.seq, brief.nonce) not in target_saves:
                try:
                    manifest = self._source.with_tables(
                        check_place(path, read_manifest(path), False)
                    )
                    transfer(self._source, manifest, self._target, again=True)
                except (FileNotFoundError, StepNotFound):
                    continue  # deleted since it was listed
                copied.append(brief.step)
        self._update_bond()
        # A replaced save is gone already, and its number now belongs to the new one.
        deleted = sorted({seq for seq, _ in target_saves - source_saves} - replaced)
        for seq in deleted:
            collect.delete_checkpoint(self._target, seq)
        if copied or deleted:
            # No grace period, as in the drain: readers hold a lock on what they have open.
            collect.collect(self._target, grace_seconds=0)
        return copied

    def _update_bond(self) -> None:
        """Copy the source's knowledge of the durable root.

        This happens after steps are copied and before any are deleted. A step is deleted from
        memory only once it is on disk, so the copy must know of the newer durable step first.
        """
        bond = read_bond(self._source.path)
        if bond is None:
            return
        if bond.root != self._run:
            raise ForeignMemory(
                f"{self._source.path} is now the memory of another run, {bond.path}; end this"
                " mirror"
            )
        target_bond = read_bond(self._target.path)
        # ``boot`` is that of the machine that wrote the document, so it may differ between copies.
        if target_bond is None or bond._replace(boot="") != target_bond._replace(boot=""):
            write_bond(self._target.path, bond)

    def run(self, *, poll_seconds: float = 0.2, timeout: float | None = None) -> int:
        """Poll until no new step has come for some time.

        Args:
            poll_seconds: Time between two polls in seconds. Shorter: less is lost with the
                source's machine; longer: fewer calls to the file system.
            timeout: End after this many seconds without a new step. ``None``: never end; 0: poll
                once.

        Returns:
            The number of steps that were copied.

        Raises:
            Damaged: If a step of the source cannot be read.
            ForeignMemory: If another run has replaced the source.
            RootBusy: If the lease of the target was lost.
        """
        count, last_copy = 0, time.monotonic()
        while True:
            copied = self.poll()
            count += len(copied)
            last_copy = time.monotonic() if copied else last_copy
            if timeout is not None and time.monotonic() - last_copy >= timeout:
                return count
            time.sleep(poll_seconds)

    def close(self) -> None:
        """Release the target. Further calls do nothing."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
