"""Write the keyframes of a segment, and make the entries of its table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

import numpy as np

from deltacheck.codec.base import U64
from deltacheck.leaf.digest import chunk_digests, leaf_digest
from deltacheck.save.job.leaf_state import LeafSave, await_write
from deltacheck.save.job.setup import Setup
from deltacheck.save.progress import Progress
from deltacheck.store import layout
from deltacheck.store.files.arrays import Pending
from deltacheck.store.manifest import KeyframeAt, LeafRecord, SegmentRef
from deltacheck.store.segment import SegmentWriter, is_packed

# Keyframes that TensorStore holds encoded at a time take a quarter of the host cache, but not less
# or more than these. Larger: more writes at a time; smaller: less memory.
LEAST_KEYFRAME_WINDOW_BYTES = 8 << 20
KEYFRAME_WINDOW_BYTES = 32 << 20


_path: Callable[[LeafSave], str] = attrgetter("source.path")


class SegmentBuilder:
    """The table of one segment, entry by entry.

    Args:
        setup: The options of the saver.
        writer: The segment.
        progress: Receives a beat at every keyframe.
        cache_bytes: Most encoded bytes in memory.

    Attributes:
        segments: The segments that the step needs.
        records: Every stored leaf, changed or not, by path.
        whole_bytes: Bytes of the leaves that were written whole as arrays.
    """

    def __init__(
        self, setup: Setup, writer: SegmentWriter, progress: Progress, cache_bytes: int
    ) -> None:
        self.segments: set[str] = set()
        self.records: dict[str, LeafRecord] = {}
        self.whole_bytes = 0
        self._setup = setup
        self._writer = writer
        self._progress = progress
        share = min(KEYFRAME_WINDOW_BYTES, max(LEAST_KEYFRAME_WINDOW_BYTES, cache_bytes // 4))
        self._window_bytes = min(share, cache_bytes)

    def put_keyframes(self, keyframes: Iterable[LeafSave]) -> None:
        """Write whole leaves from their bases.

        Without a shadow to keep, each base is dropped as soon as it is written, and a leaf that
        equals its keyframe in an earlier segment is not written.
        """
        setup, writer = self._setup, self._writer
        # In the order of paths, so that the files do not depend on the order of the capture.
        leaves = sorted(keyframes, key=_path)
        names = layout.array_names(
            [
                _path(leaf)
                for leaf in leaves
                if leaf.stored_spec is not None and not is_packed(leaf.stored_spec)
            ]
        )
        window: deque[tuple[int, Pending]] = deque()
        for leaf in leaves:
            self._progress.beat()
            state = leaf.state
            assert state is not None  # it was captured
            spec = state.spec
            host = setup.codec.host(state.base)
            digests = chunk_digests(
                host, state.bounds, spec.word_bytes, range(state.bounds.size - 1)
            )
            if not setup.options.keeps_shadow:
                state.base = None
                # The content stands in an earlier segment, and without a delta chain on it.
                if state.key_segment and np.array_equal(digests, state.digests):
                    continue
            state.digests = digests
            if is_packed(spec):
                key = writer.put_packed(spec, host)
            else:
                write = writer.put_natural(spec, names[spec.path], host)
                state.base_write = write if setup.options.keeps_shadow else None
                key = KeyframeAt(array=names[spec.path])
                window.append((host.nbytes, write))
                # One write at least stays under way: a single leaf may exceed the window.
                while len(window) > 1 and sum(size for size, _ in window) > self._window_bytes:
                    await_write(window.popleft()[1], setup.options.io_timeout_seconds)
            leaf.changed_words, leaf.encoded_bytes = int(state.bounds[-1]), host.nbytes
            self.whole_bytes += host.nbytes
            state.begin_at(writer.id)
            self._enter(leaf, digests, key=key)

    def put_rows(self, leaves: Iterable[LeafSave]) -> None:
        """Enter the leaves whose rows are in the parts, and extend their chains."""
        for leaf in sorted((leaf for leaf in leaves if leaf.runs), key=_path):
            state, runs = leaf.state, leaf.runs
            assert state is not None  # it was encoded
            assert runs is not None
            chunks = (
                runs[0].chunks if len(runs) == 1 else np.concatenate([run.chunks for run in runs])
            ).astype(np.int64)
            tables = [run.digests for run in runs if run.digests is not None]
            # A codec on a device and a leaf without a base have digests from the encoding. The
            # others are computed from the base, which has the new content by now.
            digests = (
                np.concatenate(tables)
                if tables
                else chunk_digests(
                    self._setup.codec.host(state.base),
                    state.bounds,
                    state.spec.word_bytes,
                    chunks.tolist(),
                )
            )
            if chunks.size == state.digests.shape[0] == 1:
                state.digests = digests
            else:
                # A copy: the table of an earlier save, which may not be written yet, is this array.
                state.digests = state.digests.copy()
                state.digests[chunks] = digests
            if state.digest:
                state.delta_segments = [*state.delta_segments, self._writer.id]
                state.delta_bytes = [*state.delta_bytes, leaf.encoded_bytes]
            else:  # all chunks are in these rows
                state.begin_at(self._writer.id)
            delta = tuple((run.part, run.first_row, run.chunks.size) for run in runs)
            self._enter(leaf, digests, delta=delta)

    def record(self, leaves: Iterable[LeafSave]) -> None:
        """Record every stored leaf, changed or not, with the segments that its chain needs."""
        for leaf in leaves:
            spec, state = leaf.stored_spec, leaf.state
            if spec is None or state is None:
                continue
            self.segments.add(state.key_segment)
            self.segments.update(state.delta_segments)
            self.records[spec.path] = LeafRecord(spec.dtype, spec.shape, spec.chunk, state.digest)

    def finish(self) -> SegmentRef | None:
        """Make the segment durable; return ``None`` if no leaf changed, since there is none then.

        Raises:
            SaveFailed: The storage did not finish within ``io_timeout_seconds``.
        """
        if not self._writer.entries:
            return None
        return self._writer.finish(self._setup.options.io_timeout_seconds)

    def _enter(
        self,
        leaf: LeafSave,
        digests: U64,
        key: KeyframeAt | None = None,
        delta: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        state = leaf.state
        assert state is not None
        # Taken before the new digest replaces it. It is empty for a leaf without a base, whose rows
        # are an encoded keyframe (docs/reference/format.md, section 2).
        base_digest = state.digest if key is None else ""
        state.digest = leaf_digest(state.digests)
        leaf.entry = self._writer.enter(
            state.spec, state.digest, digests, base=base_digest, key=key, delta=delta
        )
