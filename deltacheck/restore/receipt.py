"""Rebuild a step from disk and compare it with the state as it was captured: what of a save is
true, shown and not concluded.
"""

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
from deltacheck.store.root import Root, Store

# Whether and when a save is read back. none: never. commit: before the step exists, on the thread
# that commits. receipt: after it, behind.
WHEN = ("none", "commit", "receipt")
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a step was rebuilt from disk as it was captured. ``leaves``: how many, of
    ``raw_bytes`` in memory; ``seconds``: it took.
    """

    step: int
    leaves: int
    raw_bytes: int
    seconds: float


def check_when(verify: str) -> None:
    if verify not in WHEN:
        raise ValueError(f"verify must be one of {', '.join(WHEN)}, not {verify!r}")


def rebuild(
    store: Store, manifest: Manifest, live: Mapping[str, str], paths: Iterable[str]
) -> Receipt:
    """Rebuild leaves of a step from disk. ``live``: the digest of each captured leaf, of what was
    handed to the encoder.

    Nothing that this process has in memory is used, and the files' pages are dropped from the
    system's cache first (where it can: they are written). Raises ``ReceiptFailed`` naming leaf and
    file.
    """
    begin = time.perf_counter()
    wanted = [path for path in paths if path in manifest.stored]
    for path in wanted:
        recorded = manifest.stored[path].digest
        if live.get(path, recorded) != recorded:
            raise ReceiptFailed(
                f"step {manifest.step}, leaf {path!r}: the state had digest {live[path]} when it"
                f" was captured, what was encoded has {recorded}",
                leaf=tiles.leaf_of(path),
            )
    fresh = Store(store.path, store.threads)
    forget(store, manifest)
    raw_bytes = 0
    try:
        chains = resolve_chains(Root(store.path, fresh), manifest, wanted)
        for paths in batches(chains, lambda path: chains[path].spec.raw_bytes, _BATCH_BYTES):
            batch = {path: chains[path] for path in paths}
            data = read.read_chunks(
                batch, {path: list(range(one.spec.chunk_count)) for path, one in batch.items()}
            )
            raw_bytes += sum(values.size for values in data.values())
    except Damaged as error:
        leaf = error.leaf or _leaf_in(fresh, manifest, error.file)
        named = "" if repr(leaf) in str(error) else f"leaf {leaf!r}: "
        message = (
            f"step {manifest.step} does not come back from disk as it was captured: {named}{error}"
        )
        raise ReceiptFailed(message, file=error.file, leaf=tiles.leaf_of(leaf)) from error
    return Receipt(manifest.step, len(wanted), raw_bytes, time.perf_counter() - begin)


def _leaf_in(store: Store, manifest: Manifest, file: str) -> str:
    """A leaf that needs a file."""
    for ref in manifest.segments:
        if ref.id in Path(file).parts:
            try:
                return store.segment(ref).leaves_in(file)[0]
            except (Damaged, IndexError):
                break
    return next(iter(manifest.stored), "")


def forget(store: Store, manifest: Manifest) -> None:
    """Ask the system to drop the pages of a step's segments, so that they are read from the
    disk.
    """
    if not isinstance(store.path, Path):
        return
    for ref in manifest.segments:
        for folder, _, names in os.walk(store.path / layout.SEGMENTS / ref.id):
            for name in names:
                _forget_file(os.path.join(folder, name))


def _forget_file(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # reading it will say so
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, AttributeError):
        pass  # a file system or system without it: the pages are checked instead of the disk
    finally:
        os.close(descriptor)
