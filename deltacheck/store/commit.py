"""The commit of a step: the creation of its manifest, and the fence against a second writer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from deltacheck.errors import RootBusy
from deltacheck.store import layout
from deltacheck.store.documents import Written, encode_manifest, manifest_digest, read_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.local_storage import list_directory
from deltacheck.store.files.storage import Place, inside, storage_of
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots import tags


def commit(
    root: Place,
    manifest: Manifest,
    durability: Durability = Durability.POWER,
    still_ours: Callable[[], None] | None = None,
    *,
    again: bool = False,
) -> Written:
    """Make a step exist by creating its manifest.

    Every segment that the manifest names must be durable. A writer that was taken for dead commits
    too late: what its step stands on may be deleted. So nothing is committed if another writer has
    taken the sequence number or has gone beyond it.

    Args:
        root: The root.
        manifest: The step.
        durability: Whether the manifest and the names of its directories are synced.
        still_ours: Raises an error if the right to write has been lost.
        again: The holder of the lease writes steps again, newer ones first, so newer steps are no
            sign of another writer.

    Returns:
        The size and the digest of the manifest.

    Raises:
        RootBusy: Another writer has committed since.
    """
    folder = inside(root, root / layout.CHECKPOINTS / layout.checkpoint_id(manifest.seq))
    storage = storage_of(root)
    content = encode_manifest(manifest)
    # A listing that lags cannot serve as a fence. There the time left of the lease bounds the wait
    # for the conditional creation, after which no other writer can have begun.
    fenced = storage.listing_is_current and not again
    if fenced:
        _fence(root, manifest, still_ours)
    folder.mkdir(exist_ok=True)
    # The step exists from here on.
    if not arrays.create_file(
        folder, "zarr.json", content, durability, storage.lease_seconds_left()
    ):
        raise RootBusy(
            f"checkpoint {folder.name} of {root} was committed by"
            f" {read_manifest(folder / 'zarr.json').writer}: two writers"
        )
    storage.exclude_from_written(len(content))
    if not storage.listing_is_current and still_ours is not None:
        # The request may have arrived after the end of the lease, and then nothing is acknowledged.
        # The step stays: whoever has the root by now may have built on it.
        still_ours()
    try:
        if fenced:
            # Another writer may have taken over between the first check and the creation.
            _fence(root, manifest, still_ours)
        # TensorStore has synced the directory of the manifest with it.
        durability.sync_directory(folder.parent)
    except BaseException:
        # The save fails, so the step must not be listed.
        _withdraw(root, manifest)
        raise
    return Written(len(content), manifest_digest(content))


def _withdraw(root: Place, manifest: Manifest) -> None:
    """Delete the manifest of a commit that has failed, unless a tag names the step by now.

    A tag may have been added since the manifest was created. What is tagged is never deleted, so
    the step then stays, although its save has failed.
    """
    with contextlib.ExitStack() as resources:
        # Where the lock cannot be had, the step is deleted all the same: the disk may be failing,
        # or the writer that has taken over may be deleting steps for seconds.
        with contextlib.suppress(Exception):
            resources.enter_context(tags.lock(root))
        with contextlib.suppress(OSError):
            if not tags.names_of(tags.read_all(root)[0], manifest):
                folder = root / layout.CHECKPOINTS / layout.checkpoint_id(manifest.seq)
                (folder / "zarr.json").unlink(missing_ok=True)


def _fence(root: Place, manifest: Manifest, still_ours: Callable[[], None] | None) -> None:
    """Refuse to commit beside another writer: a present holder of the root, or newer steps."""
    if still_ours is not None:
        still_ours()
    for entry in reversed(list_directory(Path(str(root / layout.CHECKPOINTS)))):
        if not layout.is_checkpoint_id(entry.name):
            continue
        if layout.seq_of(entry.name) <= manifest.seq:
            return
        if os.path.lexists(Path(entry.path) / "zarr.json"):
            raise RootBusy(
                f"{root} has been written by another since: step {manifest.step} would be"
                f" checkpoint {manifest.seq}, but there is {entry.name}. Nothing was committed;"
                " open the root again"
            )
