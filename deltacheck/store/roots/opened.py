"""Roots opened for writing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from deltacheck.store import layout
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, inside, remove_tree, take_lease
from deltacheck.store.lock.lease import Lease
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store


class Opened(NamedTuple):
    """A root that this process may write to.

    Attributes:
        store: Its segments.
        lease: The right to write; ``None`` if another process holds it for this one.
        next_seq: The sequence number of the next save.
    """

    store: Store
    lease: Lease | None
    next_seq: int

    def release(self) -> None:
        """Give the right to write back."""
        if self.lease is not None:
            self.lease.release()


def open_alone(path: Place, durability: Durability) -> Opened:
    """Create or open a root and take its lease.

    Raises what ``Store.create`` and ``take_lease`` raise.
    """
    store = create_store(path, durability=durability)
    # The lease comes before the sequence number, which no other writer can then take.
    lease = take_lease(path)
    try:
        return Opened(store, lease, Root(path, store).next_seq())
    # Also after Ctrl-C: a lease that is left behind would keep the root from its next writer.
    except BaseException:
        lease.release()
        raise


def remove_unused(root: Root) -> None:
    """Remove the files of a local root that holds neither steps nor segments.

    The directory of the root stays, because it may have been there before. The caller holds the
    lease, and has made the root.
    """
    path = root.path
    if not isinstance(path, Path):
        return
    documents = {"zarr.json"}
    expected = {
        layout.SEGMENTS: documents,
        layout.CHECKPOINTS: documents,
        # Last, because the lock is in it. A collection makes the group of tags.
        layout.CONTROL: documents | {f"{layout.TAGS}/zarr.json"},
    }
    for name, files in expected.items():
        folder = path / name
        inside(path, folder)
        present = {file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()}
        if not {str(file.relative_to(folder)) for file in present} <= files:
            return
    # First, because a root may lack this file before it is complete, but no other.
    (path / "zarr.json").unlink()
    for name in expected:
        remove_tree(path, path / name)
