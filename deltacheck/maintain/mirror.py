"""Keep a second copy of a memory root, on another machine's memory: every step as it appears, and
its deletion. A mirror is a memory root itself.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

from deltacheck.errors import ForeignMemory, NotACheckpointRoot, StepNotFound
from deltacheck.maintain.tier_bond import read_bond, write_bond
from deltacheck.maintain.transfer import transfer
from deltacheck.store import collect
from deltacheck.store.documents import check_place, read_manifest
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import take_lease
from deltacheck.store.root import Root, Store, open_root


class Mirror:
    """A copy of a memory root, kept by another process than the one that writes there; takes the
    target's lease, and no lock on the source.

    ``durability``: of the copy, ``"process"`` for one in memory.

    Raises ``NotACheckpointRoot`` where ``source`` is not the memory root of an engine,
    ``ForeignMemory`` where ``target`` is that of another run, ``RootBusy``, ``StorageFailed`` for
    an object store.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        durability: str = "process",
    ) -> None:
        self._source = open_root(storage.local(source, "a mirror"))
        path = Path(storage.local(target, "a mirror")).absolute()
        bond = read_bond(self._source.path)
        if bond is None or self._source.is_manager_root:
            raise NotACheckpointRoot(
                f"{source} is not the memory root of an engine: it does not say which run it"
                " belongs to"
            )
        self._target = Root(path, Store.create(path, durability=Durability.of(durability)))
        self._lease = take_lease(path)
        ours = read_bond(path)
        if self._target.manifest_paths() and (ours is None or ours.root != bond.root):
            self._lease.release()
            raise ForeignMemory(
                f"{path} cannot mirror {source}: it holds steps of another run. Remove it, or name"
                " another directory"
            )
        self._run = bond.root

    def poll(self) -> list[int]:
        """Copy the steps that are new at the source, delete those that have gone there; the
        training
        steps that were copied.

        The copy is complete in every moment: new steps come before old ones go. Where the source
        itself is gone, nothing is deleted. Raises ``Damaged`` for what cannot be read there,
        ``ForeignMemory`` where another run has taken its place, ``RootBusy``.
        """
        found, damaged = self._source.briefs()
        for error in damaged.values():
            raise error
        if not found:
            return []
        self._lease.check()
        wanted = {(brief.seq, brief.nonce) for brief in found.values()}
        held = {(brief.seq, brief.nonce) for brief in self._target.briefs()[0].values()}
        for seq in {seq for seq, _ in held - wanted} & {seq for seq, _ in wanted}:
            collect.delete_checkpoint(self._target, seq)  # the source was begun anew
        copied = []
        for path, brief in sorted(found.items(), key=lambda one: one[1].seq):
            if (brief.seq, brief.nonce) not in held:
                try:
                    transfer(
                        self._source,
                        check_place(path, read_manifest(path), False),
                        self._target,
                        again=True,
                    )
                except (FileNotFoundError, StepNotFound):
                    continue  # deleted since it was listed
                copied.append(brief.step)
        self._follow_bond()
        going = sorted(seq for seq, _ in held - wanted)
        for seq in going:
            collect.delete_checkpoint(self._target, seq)
        if copied or going:
            collect.collect(self._target, grace_seconds=0)
        return copied

    def _follow_bond(self) -> None:
        """Know as much of the disk as the source does: after the steps were copied, before any
        goes.
        """
        bond = read_bond(self._source.path)
        if bond is None:
            return
        if bond.root != self._run:
            raise ForeignMemory(
                f"{self._source.path} is the memory of another run now, {bond.path}; end this"
                " mirror"
            )
        held = read_bond(self._target.path)
        if held is None or bond._replace(boot="") != held._replace(boot=""):
            write_bond(self._target.path, bond)

    def run(self, *, poll_seconds: float = 0.2, timeout: float | None = None) -> int:
        """``poll`` until nothing new has come for ``timeout`` seconds (``None``: for ever; 0:
        once);
        how many steps were copied.

        ``poll_seconds``: between two looks; shorter: less is lost with the source's machine, more
        calls to the file system. Raises as ``poll``.
        """
        count, last = 0, time.monotonic()
        while True:
            copied = self.poll()
            count += len(copied)
            last = time.monotonic() if copied else last
            if timeout is not None and time.monotonic() - last >= timeout:
                return count
            time.sleep(poll_seconds)

    def close(self) -> None:
        """Give the target back. More than once does nothing."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
