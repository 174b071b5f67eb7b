"""Keep a second copy of a root: of a memory root in another machine's memory, or in a bucket.

Every step is copied as it appears, and deleted as it is deleted. A mirror of a memory root is a
memory root itself, one of an ordinary root an ordinary root.
"""

from __future__ import annotations

import os
from typing import Self

from deltacheck.errors import ForeignMemory, NotACheckpointRoot, StepNotFound
from deltacheck.leaf.external_errors import typed
from deltacheck.maintain import tier_bond
from deltacheck.maintain.transfer import transfer
from deltacheck.restore.follow.new_steps import polled
from deltacheck.save.save_options import SaveOptions
from deltacheck.store import collect
from deltacheck.store.documents import check_place, read_manifest
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, take_lease
from deltacheck.store.roots.opening import create_store, open_root
from deltacheck.store.roots.root import Root


@typed
class Mirror:
    """A copy of a root, kept by another process than the one that writes there.

    A mirror takes the lease of the target, and no lock on the source. See
    ``docs/how-to/every-step.md`` and ``docs/how-to/object-stores.md``.

    Args:
        source: The root of an engine, or its memory root: a local directory.
        target: The place of the copy, a directory or the address of a prefix of an object store. It
            is created if it does not exist. That of a memory root is a directory.
        durability: Durability of a copy in a directory. ``"process"``: the copy survives the end of
            this process; use it for a copy in memory. ``"power"``: the copy also survives a power
            cut, but every step is synced, which is slower. Default: ``"process"`` for a memory
            root, ``"power"`` for any other.

    Raises:
        NotACheckpointRoot: If ``source`` is not the root of an engine.
        ForeignMemory: If ``target`` holds the steps of another run, or newer ones.
        RootBusy: If another process writes to ``target``.
        StorageFailed: If ``source`` is in an object store, or ``target`` and ``source`` is a memory
            root, or the store refuses to be written to.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        durability: str | None = None,
    ) -> None:
        self._source = open_root(storage.local(source, "the source of a mirror"))
        if self._source.is_manager_root:
            raise NotACheckpointRoot(
                f"{source} is a root of Orbax's CheckpointManager, of which there are no mirrors:"
                " name the root of an engine"
            )
        bond = tier_bond.read_bond(self._source.path)
        self._is_memory = bond is not None
        if bond is None:
            path = storage.of(target).absolute()
        else:
            path = storage.local(target, "a mirror of a memory root").absolute()
        durability = durability or ("power" if bond is None else "process")
        self._target = Root(path, create_store(path, durability=Durability.of(durability)))
        # The lease is taken before the target is read, so nobody writes between the check and the
        # first copy.
        self._lease = take_lease(path)
        try:
            self._run = tier_bond.identity(self._source) if bond is None else bond.root
            self._check_target()
        except BaseException:
            self._lease.release()
            raise

    def _check_target(self) -> None:
        """Raise ``ForeignMemory`` if a copy would replace steps of another run, or newer ones."""
        source, target = self._source.path, self._target.path
        is_new, bond = not self._target.manifest_paths(), tier_bond.read_bond(target)
        if self._is_memory:
            is_ours = is_new or (bond is not None and bond.root == self._run)
        else:
            # A place that is refused gets no name.
            is_ours = bond is None and (is_new or tier_bond.has_identity(self._target))
            is_ours = is_ours and tier_bond.identity(self._target, self._run) == self._run
        if not is_ours:
            raise ForeignMemory(
                f"{target} cannot mirror {source}: it belongs to another run. Remove it, or name"
                " another place"
            )
        copied = tier_bond.newest_checkpoint(self._target)
        saved = tier_bond.newest_checkpoint(self._source)
        if not self._is_memory and copied is not None and saved is not None and copied > saved:
            raise ForeignMemory(
                f"{target} cannot mirror {source}: it has checkpoint {copied[0]}, and the newest of"
                f" the source is {saved[0]}, so the run went on there. Continue from {target}; if"
                " steps were deleted at the source instead, delete them in the copy, too"
            )

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
        missing = [
            (path, brief.step)
            for path, brief in sorted(briefs.items(), key=lambda entry: entry[1].seq)
            if (brief.seq, brief.nonce) not in target_saves
        ]
        copied = [step for path, step in missing if self._copy(path)]
        self._update_bond()
        # A replaced save is gone already, and its number now belongs to the new one.
        deleted = sorted({seq for seq, _ in target_saves - source_saves} - replaced)
        for seq in deleted:
            collect.delete_checkpoint(self._target, seq)
        if copied or deleted:
            # A memory has no room for a grace period: its readers hold a lock on what they have
            # open. An ordinary root has that of an engine.
            grace_seconds = 0 if self._is_memory else SaveOptions().grace_seconds
            collect.collect(self._target, grace_seconds=grace_seconds)
        return copied

    def _copy(self, path: Place) -> bool:
        """Copy the step of a manifest, and return whether it is still there."""
        try:
            manifest = self._source.with_tables(check_place(path, read_manifest(path), False))
            transfer(self._source, manifest, self._target, again=True)
        except (FileNotFoundError, StepNotFound):
            return False  # deleted since it was listed
        return True

    def _update_bond(self) -> None:
        """Copy a memory root's knowledge of the durable root.

        This happens after steps are copied and before any are deleted. A step is deleted from
        memory only once it is on disk, so the copy must know of the newer durable step first.
        """
        bond = tier_bond.read_bond(self._source.path) if self._is_memory else None
        if bond is None:
            return
        if bond.root != self._run:
            raise ForeignMemory(
                f"{self._source.path} is now the memory of another run, {bond.path}; end this"
                " mirror"
            )
        target_bond = tier_bond.read_bond(self._target.path)
        # ``boot`` is that of the machine that wrote the document, so it may differ between copies.
        if target_bond is None or bond._replace(boot="") != target_bond._replace(boot=""):
            tier_bond.write_bond(self._target.path, bond)

    def run(self, *, poll_seconds: float = 0.2, timeout: float | None = None) -> int:
        """Poll until no new step has come for some time.

        Args:
            poll_seconds: Time between two polls in seconds. Shorter: less is lost with the
                source's machine; longer: fewer calls to the file system.
            timeout: End after this many seconds without a new step. ``None``: never end; 0: copy
                the present steps.

        Returns:
            The number of steps that were copied.

        Raises:
            Damaged: If a step of the source cannot be read.
            ForeignMemory: If another run has replaced the source.
            RootBusy: If the lease of the target was lost.
        """
        return sum(map(len, polled(self.poll, poll_seconds, timeout)))

    def close(self) -> None:
        """Release the target. Further calls do nothing."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
