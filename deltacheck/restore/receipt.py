"""Read a step back from disk and compare it with the captured state."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deltacheck.errors import Damaged, ReceiptFailed
from deltacheck.leaf import tiles
from deltacheck.leaf.spec import batches
from deltacheck.restore import read
from deltacheck.restore.chain import resolve_chains
from deltacheck.store import layout
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store

# The values of the option `verify`. none: a save is not read back. commit: it is read back before
# the step exists, on the thread that commits.
WHEN = ("none", "commit")
# Leaves that are read back at a time. Larger: fewer calls; smaller: less memory beside the
# training.
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result of a successful read-back: disk and captured state have the same digests.

    Args:
        step: The training step.
        leaves: The number of leaves that were compared.
        raw_bytes: Their bytes in memory.
        seconds: Wall time of the read-back.
    """

    step: int
    leaves: int
    raw_bytes: int
    seconds: float


def check_when(verify: str) -> None:
    """Raise ``ValueError`` if a value of the option ``verify`` is unknown."""
    if verify not in WHEN:
        raise ValueError(f"verify must be one of {', '.join(WHEN)}, not {verify!r}")


def rebuild(
    store: Store, manifest: Manifest, live: Mapping[str, str], paths: Iterable[str]
) -> Receipt:
    """Read leaves of a step from disk and compare them with the captured state.

    Nothing that this process has in memory is used. The pages of the files are dropped from the
    system's cache first, if the system supports that.

    Args:
        store: The store of the root.
        manifest: The step.
        live: The digests of the captured leaves, computed from the input of the encoder.
        paths: The stored paths to read.

    Raises:
        ReceiptFailed: A leaf differs; names leaf and file.
    """
    begin = time.perf_counter()
    stored_paths = [path for path in paths if path in manifest.stored]
    for path in stored_paths:
        recorded = manifest.stored[path].digest
        # Compared before anything is read: here the encoder or the memory is at fault, and not the
        # storage.
        if live.get(path, recorded) != recorded:
            raise ReceiptFailed(
                f"step {manifest.step}, leaf {path!r}: the state had digest {live[path]} when it"
                f" was captured, what was encoded has {recorded}",
                leaf=tiles.leaf_of(path),
            )
    # The tables that the given store has opened come from before the read-back, so a new one opens
    # the files.
    fresh = Store(store.path)
    forget(store, manifest)
    raw_bytes = 0
    try:
        chains = resolve_chains(Root(store.path, fresh), manifest, stored_paths)
        for paths in batches(chains, lambda path: chains[path].spec.raw_bytes, _BATCH_BYTES):
            batch = {path: chains[path] for path in paths}
            data = read.read_chunks(batch)
            raw_bytes += sum(values.size for values in data.values())
    except Damaged as error:
        leaf = error.leaf or _leaf_in(fresh, manifest, error.file)
        prefix = "" if repr(leaf) in str(error) else f"leaf {leaf!r}: "
        message = (
            f"step {manifest.step} does not come back from disk as it was captured: {prefix}{error}"
        )
        raise ReceiptFailed(message, file=error.file, leaf=tiles.leaf_of(leaf)) from error
    return Receipt(manifest.step, len(stored_paths), raw_bytes, time.perf_counter() - begin)


def _leaf_in(store: Store, manifest: Manifest, file: str) -> str:
    """Return a leaf that needs a file, or any leaf if that cannot be read."""
    for ref in manifest.segments:
        if ref.id in Path(file).parts:
            try:
                return store.segment(ref).leaves_in(file)[0]
            except (Damaged, IndexError):
                break
    return next(iter(manifest.stored), "")


def forget(store: Store, manifest: Manifest) -> None:
    """Ask the system to drop cached pages of a step's segments, so that they are read from disk."""
    # This machine caches no pages of an object store.
    if not isinstance(store.path, Path):
        return
    for ref in manifest.segments:
        for folder, _, names in os.walk(store.path / layout.SEGMENTS / ref.id):
            for name in names:
                _forget_file(os.path.join(folder, name))


def _forget_file(path: str) -> None:
    try:
        # Neither a link nor a FIFO in the place of a file may be followed, or block this thread.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # the read that follows reports it
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # not supported here: cached pages are compared instead of the disk
    finally:
        os.close(descriptor)
