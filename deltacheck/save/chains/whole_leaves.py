"""Write stored leaves once more, whole, into a new segment: for compaction, repair and reclaiming.

No existing file is changed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import msgspec

from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import batches
from deltacheck.restore import read
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.job.leaf_state import await_write
from deltacheck.save.save_options import SaveOptions
from deltacheck.store import layout
from deltacheck.store.manifest import KeyframeAt, Manifest, SegmentRef
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import SegmentWriter, is_packed

# Bytes of leaves that are read together, so that many small leaves cost few calls.
_BATCH_BYTES = 16 << 20
# The longest wait of a command for one write to the storage, as a save has it by default.
IO_TIMEOUT_SECONDS = SaveOptions().io_timeout_seconds


def put_chains(writer: SegmentWriter, chains: Mapping[str, Chain]) -> None:
    """Write leaves of other segments as keyframes; hold a few of them in memory at a time.

    The caller must hold the lease.

    Args:
        writer: The segment.
        chains: The chains of the leaves, by path.

    Raises:
        Damaged: A stored leaf is damaged.
        ChainBroken: A segment of a chain is missing.
        SaveFailed: The storage hangs.
    """
    names = layout.array_names(
        [chain.spec.path for chain in chains.values() if not is_packed(chain.spec)]
    )
    paths = sorted(chains)
    for batch_paths in batches(paths, lambda path: chains[path].spec.raw_bytes, _BATCH_BYTES):
        batch = {path: chains[path] for path in batch_paths}
        data = read.read_chunks(batch)
        for path, chain in batch.items():
            spec = chain.spec
            if is_packed(spec):
                key = writer.put_packed(spec, data[path])
            else:
                # Leaf by leaf, so that memory holds one batch and not the whole model.
                write = writer.put_natural(spec, names[spec.path], data[path])
                await_write(write, IO_TIMEOUT_SECONDS)
                key = KeyframeAt(array=names[spec.path])
            writer.enter(spec, leaf_digest(chain.digests), chain.digests, key=key)


def write_whole(writer: SegmentWriter, chains: Mapping[str, Chain]) -> SegmentRef:
    """Write leaves as keyframes of a new segment, durably, as ``put_chains`` does."""
    put_chains(writer, chains)
    return writer.finish(IO_TIMEOUT_SECONDS)


def manifest_on(
    root: Root, manifest: Manifest, seq: int, segments: Sequence[SegmentRef], activity: str
) -> Manifest:
    """Return the manifest of the same save as another checkpoint, on other segments.

    Its nonce stays, because tags name a save by its nonce.

    Args:
        root: The root, which is now written with this durability.
        manifest: The manifest of the save.
        seq: The number of the new checkpoint.
        segments: The segments that hold its leaves.
        activity: A word for people on why it was written.
    """
    # For people only (docs/reference/format.md, section 3): nothing depends on it.
    writer = f"process {os.getpid()} on {socket.gethostname()}, {activity}"
    durability = root.store.durability.value
    content = manifest.on(segments)
    return msgspec.structs.replace(content, seq=seq, writer=writer, durability=durability)
