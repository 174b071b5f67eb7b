"""Write leaves that a step already has once more, whole: what compaction and repair share. Nothing
that is there is touched.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from deltacheck.codec.base import U8, U64
from deltacheck.leaf.spec import LeafSpec
from deltacheck.save.job.leaf_state import await_write
from deltacheck.store import layout
from deltacheck.store.manifest import KeyframeAt, LeafEntry, Manifest, SegmentRef
from deltacheck.store.root import Root
from deltacheck.store.segment import SegmentWriter, is_packed


class WholeLeaves:
    """A segment of keyframes. ``specs``: of all leaves that will be added. REQUIRES: the caller
    holds the lease.
    """

    def __init__(
        self, writer: SegmentWriter, specs: Sequence[LeafSpec], io_timeout_seconds: float
    ) -> None:
        self._writer = writer
        self._names = layout.array_names([spec.path for spec in specs if not is_packed(spec)])
        self._timeout_seconds = io_timeout_seconds
        self._entries: dict[str, LeafEntry] = {}
        self._tables: list[U64] = []
        self._rows = 0

    def add(self, spec: LeafSpec, digest: str, digests: U64, data: U8) -> None:
        """Write a leaf; when this returns its bytes are not needed any more. ``digests``: of its
        chunks.
        """
        if is_packed(spec):
            key = self._writer.put_packed(spec, data)
        else:
            await_write(
                self._writer.put_natural(spec, self._names[spec.path], data), self._timeout_seconds
            )
            key = KeyframeAt(array=self._names[spec.path])
        self._entries[spec.path] = LeafEntry(
            spec.dtype, spec.shape, spec.chunk, digest, self._rows, key=key
        )
        self._tables.append(digests)
        self._rows += digests.shape[0]

    def finish(self) -> SegmentRef:
        """Make the segment durable."""
        return self._writer.finish(
            self._entries, np.concatenate(self._tables), time.monotonic() + self._timeout_seconds
        )


def renewed(
    root: Root, manifest: Manifest, seq: int, segments: Sequence[SegmentRef], doing: str
) -> Manifest:
    """The same save as another checkpoint, on other segments: its nonce stays, and tags go by that.
    ``doing``: who wrote it, for people.
    """
    about = f"process {os.getpid()} on {socket.gethostname()}, {doing}"
    durability = root.store.durability.value
    return msgspec.structs.replace(
        manifest.on(segments), seq=seq, writer=about, durability=durability
    )
