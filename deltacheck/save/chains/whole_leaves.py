"""Write stored leaves once more, whole, into a new segment: for compaction, repair and reclaiming.

No existing file is changed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from deltacheck.codec.base import U8, U64
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import LeafSpec, batches
from deltacheck.restore import read
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.job.leaf_state import await_write
from deltacheck.save.save_options import SaveOptions
from deltacheck.store import layout
from deltacheck.store.manifest import KeyframeAt, LeafEntry, Manifest, SegmentRef
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import SegmentWriter, is_packed

# Bytes of leaves that are read together, so that many small leaves cost few calls.
_BATCH_BYTES = 16 << 20
# The longest wait of a command for one write to the storage, as a save has it by default.
IO_TIMEOUT_SECONDS = SaveOptions().io_timeout_seconds


class RewrittenLeaves:
    """A segment of leaves of earlier segments. The caller must hold the lease.

    Args:
        writer: The segment.
        specs: All leaves that will be added as keyframes.
        io_timeout_seconds: The longest wait for the storage.
    """

    def __init__(
        self,
        writer: SegmentWriter,
        specs: Sequence[LeafSpec],
        io_timeout_seconds: float = IO_TIMEOUT_SECONDS,
    ) -> None:
        self._writer = writer
        self._names = layout.array_names([spec.path for spec in specs if not is_packed(spec)])
        self._timeout_seconds = io_timeout_seconds
        self._entries: dict[str, LeafEntry] = {}
        self._tables: list[U64] = []
        self._rows = 0

    def add_whole(self, spec: LeafSpec, digest: str, digests: U64, data: U8) -> None:
        """Write a leaf; its bytes are not needed after the return.

        Args:
            spec: The leaf.
            digest: The leaf digest.
            digests: Its chunk digests, uint64 ``(chunks, 2)``.
            data: Its bytes, uint8, 1-D.
        """
        if is_packed(spec):
            key = self._writer.put_packed(spec, data)
        else:
            write = self._writer.put_natural(spec, self._names[spec.path], data)
            # Leaf by leaf, so that memory holds one batch and not the whole model.
            await_write(write, self._timeout_seconds)
            key = KeyframeAt(array=self._names[spec.path])
        self._enter(
            spec.path,
            LeafEntry(spec.dtype, spec.shape, spec.chunk, digest, self._rows, key=key),
            digests,
        )

    def add_chains(self, chains: Mapping[str, Chain]) -> None:
        """Write leaves of other segments; hold a few of them in memory at a time.

        Args:
            chains: The chains of the leaves, by path.

        Raises:
            Damaged: A stored leaf is damaged.
            ChainBroken: A segment of a chain is missing.
        """
        paths = sorted(chains)
        for batch_paths in batches(paths, lambda path: chains[path].spec.raw_bytes, _BATCH_BYTES):
            batch = {path: chains[path] for path in batch_paths}
            data = read.read_chunks(
                batch, {path: list(range(chain.spec.chunk_count)) for path, chain in batch.items()}
            )
            for path, chain in batch.items():
                self.add_whole(chain.spec, leaf_digest(chain.digests), chain.digests, data[path])

    def add_delta(
        self,
        spec: LeafSpec,
        base: str,
        digest: str,
        digests: U64,
        delta: tuple[tuple[int, int, int], ...],
        since: int,
    ) -> None:
        """Enter a merged delta, whose rows are in parts of the writer.

        Args:
            spec: The leaf.
            base: The leaf digest before the delta.
            digest: The leaf digest after it.
            digests: The chunk digests of the rows, uint64 ``(rows, 2)``.
            delta: The runs of rows.
            since: The sequence number of the oldest segment that it replaces.
        """
        entry = LeafEntry(
            spec.dtype, spec.shape, spec.chunk, digest, self._rows, base, None, delta, since
        )
        self._enter(spec.path, entry, digests)

    def _enter(self, path: str, entry: LeafEntry, digests: U64) -> None:
        self._entries[path] = entry
        self._tables.append(digests)
        self._rows += digests.shape[0]

    def finish(self) -> SegmentRef:
        """Make the segment durable."""
        deadline = time.monotonic() + self._timeout_seconds
        return self._writer.finish(self._entries, np.concatenate(self._tables), deadline)


def write_whole(writer: SegmentWriter, chains: Mapping[str, Chain]) -> SegmentRef:
    """Write leaves as keyframes of a new segment, durably.

    Args:
        writer: The segment.
        chains: The chains of the leaves, by path.

    Raises:
        Damaged: A stored leaf is damaged.
        ChainBroken: A segment of a chain is missing.
        SaveFailed: The storage hangs.
    """
    segment = RewrittenLeaves(writer, [chain.spec for chain in chains.values()])
    segment.add_chains(chains)
    return segment.finish()


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
