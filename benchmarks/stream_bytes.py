"""The bytes that each leaf takes of a segment, by compressing its part of each stream alone.

``deltacheck.report`` divides the stored size of a chunk by the lengths of what is in it before
compression, because a report reads no data. Streams shrink by different factors: of first moments
about twice as much as of the places of changed weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deltacheck.codec import frames
from deltacheck.report.segment_cost import cost_of
from deltacheck.store.segment import Segment, stream_arrays


def leaf_bytes(segment: Segment) -> Mapping[str, float]:
    """Return the bytes of each leaf of a segment; those of deltas add up to their files.

    Args:
        segment: The segment, on this machine.
    """
    estimated = cost_of(segment).by_leaf
    compressed = {
        path: sum(
            _compressed_bytes(segment, number, first, first + count)
            for number, first, count in entry.delta
        )
        for path, entry in segment.table.leaves.items()
        if entry.delta
    }
    total = sum(compressed.values())
    scale = sum(estimated[path] for path in compressed) / total if total else 0.0
    return dict(estimated) | {path: scale * size for path, size in compressed.items()}


def _compressed_bytes(segment: Segment, number: int, first: int, stop: int) -> int:
    """Return the bytes of the streams of some rows, each compressed alone as its array is."""
    stored = stream_arrays(segment.table.parts[number]).get("store", {})
    streams = segment.part(number).streams(first, stop)
    return sum(
        stream.size if name in stored else len(frames.compress(np.ascontiguousarray(stream)))
        for name, stream in streams.items()
        if stream.size
    )
