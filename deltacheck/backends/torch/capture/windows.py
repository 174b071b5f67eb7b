"""Encode tensors on an accelerator in windows.

Only changes and their digests are copied to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_copies import ALIGNED, Layout, copied, parts_of
from deltacheck.codec import default_codec
from deltacheck.codec.base import (
    HEAD_ENTRIES,
    ROW_WIDTH,
    STREAMS,
    U8,
    U64,
    Encoded,
    EncodedGroup,
    GroupJob,
    GroupSpan,
)
from deltacheck.leaf.digest import chunk_digests

# The struct Chunk of the extension.
CHUNK = np.dtype([("current", "<u8"), ("base", "<u8"), ("words", "<u4"), ("word_bytes", "<u4")])
INTERFACE = 3  # of the extension, see module_cuda.cc
WINDOWS = 2  # at a time: one is computed while the other is copied to the host


def device_bytes(window_bytes: int) -> int:
    """Return the device memory that ``encode`` uses.

    Each window has a copy of what it reads, a payload and a workspace.
    """
    return 3 * WINDOWS * window_bytes


class _EnqueuedCall(NamedTuple):
    """An enqueued call, with references to the memory that it uses until it is done."""

    spans: list[GroupSpan]
    chunks: int
    results: torch.Tensor  # head, rows, digests, in host memory once `computed`
    payload: torch.Tensor
    computed: torch.cuda.Event
    kept: tuple[object, ...]


def encode(
    device: Accelerator,
    jobs: Sequence[GroupJob],
    window_bytes: int,
    make_room: Callable[[int], None],
    all_read: Callable[[], None],
) -> Iterator[EncodedGroup]:
    """Encode jobs as ``GroupCodec.encode_group`` does.

    Args:
        device: The accelerator.
        jobs: ``current`` and ``base`` are uint8 tensors, 1-D, contiguous, on ``device``. Bases are
            updated in place.
        window_bytes: Bytes of a call. Larger: fewer calls; smaller: less device memory (see
            ``device_bytes``).
        make_room: Called with the bytes of each result before it is copied to the host.
        all_read: Called after the last call was enqueued.
    """
    windows = deque(_cut(jobs, window_bytes))
    running: deque[_EnqueuedCall] = deque()
    while windows or running:
        while windows and len(running) < WINDOWS:
            spans, table = windows.popleft()
            running.append(_enqueue(device, jobs, spans, table))
            # The reads of the state are enqueued by now, and ``hold`` orders later writes of the
            # training behind them.
            if not windows:
                all_read()
        yield _fetch(device, running.popleft(), make_room)


def _cut(
    jobs: Sequence[GroupJob], window_bytes: int
) -> Iterator[tuple[list[GroupSpan], NDArray[np.void]]]:
    """Yield the chunks of all jobs in order, in runs of about ``window_bytes`` or less."""
    spans: list[GroupSpan] = []
    tables: list[NDArray[np.void]] = []
    size = 0
    for number, job in enumerate(jobs):
        words = np.diff(job.bounds)
        ends = np.cumsum(words * np.uint64(job.word_bytes)).astype(np.int64)
        first = 0
        while first < words.size:
            before = int(ends[first - 1]) if first else 0
            stop = max(
                # At least one chunk, even if it is larger than a window.
                first + 1,
                int(np.searchsorted(ends, before + window_bytes - size, side="right")),
            )
            if size and int(ends[first]) - before > window_bytes - size:
                yield spans, np.concatenate(tables)
                spans, tables, size = [], [], 0
                continue
            table = np.zeros(stop - first, CHUNK)
            # All factors are uint64: NumPy turns a mixture of uint64 and int64 into float64.
            offsets = job.bounds[first:stop] * np.uint64(job.word_bytes)
            table["current"] = np.uint64(job.current.data_ptr()) + offsets
            table["base"] = np.uint64(job.base.data_ptr()) + offsets
            table["words"], table["word_bytes"] = words[first:stop], job.word_bytes
            spans.append(GroupSpan(number, first, stop - first))
            tables.append(table)
            size += int(ends[stop - 1]) - before
            first = stop
    if spans:
        yield spans, np.concatenate(tables)


def _own_copies(
    device: Accelerator,
    jobs: Sequence[GroupJob],
    spans: Sequence[GroupSpan],
    table: NDArray[np.void],
) -> list[torch.Tensor]:
    """Copy what a window reads, and let its table refer to the copies.

    The encoder reads a chunk several times. Without a copy, a write from another stream between two
    of these reads would make a chunk that does not decode to its digest.
    """
    sources, row = [], 0
    for span in spans:
        job = jobs[span.job]
        low, high = (
            int(job.bounds[chunk]) * job.word_bytes
            for chunk in (span.first_chunk, span.first_chunk + span.chunks)
        )
        sources.append(job.current[low:high])
    layout = Layout.of([source.numel() for source in sources])
    copies = parts_of(copied(device, sources, layout), layout)
    for span, source, copy in zip(spans, sources, copies, strict=True):
        rows = slice(row, row + span.chunks)
        offsets = table["current"][rows] - np.uint64(source.data_ptr())
        table["current"][rows] = np.uint64(copy.data_ptr()) + offsets
        row += span.chunks
    return copies


def _enqueue(
    device: Accelerator, jobs: Sequence[GroupJob], spans: list[GroupSpan], table: NDArray[np.void]
) -> _EnqueuedCall:
    sizes = table["words"].astype(np.int64) * table["word_bytes"]
    chunks, total = table.size, int(sizes.sum())
    rows_at, digests_at, end = _places(chunks)
    host_table = device.pinned(table.nbytes)
    with device.aside() as stream:
        copies = _own_copies(device, jobs, spans, table)
        host_table.numpy()[:] = table.view(np.uint8)
        workspace = device.empty(device.native.workspace_bytes(chunks, total))
        # Always large enough, because no chunk is stored in more than its own bytes.
        payload = device.empty(max(1, total))
        results = device.empty(end)
        address = results.data_ptr()
        device.native.encode(
            table=host_table.data_ptr(),
            chunks=chunks,
            bytes=total,
            workspace=workspace.data_ptr(),
            rows=address + rows_at,
            head=address,
            payload=payload.data_ptr(),
            payload_bytes=total,
            digests=address + digests_at,
            stream=stream,
        )
        host = device.pinned(end)
        host.copy_(results, non_blocking=True)
        computed = device.mark()
    return _EnqueuedCall(
        spans, chunks, host, payload, computed, (host_table, copies, workspace, results)
    )


def _fetch(
    device: Accelerator, window: _EnqueuedCall, make_room: Callable[[int], None]
) -> EncodedGroup:
    window.computed.synchronize()
    rows_at, digests_at, _ = _places(window.chunks)
    results = window.results.numpy()
    head = results[: HEAD_ENTRIES * 8].view(np.uint64)
    count, overflow, sizes = int(head[0]), int(head[1]), head[2:].tolist()
    used = sum(sizes)
    # Checked before these numbers are used as sizes, because they come from the device.
    if overflow or used > window.payload.numel() or count > window.chunks:
        raise RuntimeError(
            f"{count} rows and {used} bytes do not fit a window of {window.chunks} chunks; this is"
            " a defect"
        )
    make_room(used)
    host = device.pinned(used)
    with device.aside():
        host.copy_(window.payload[:used], non_blocking=True)
        fetched = device.mark()
    # Copied while the payload is under way, because torch uses the pinned memory again.
    rows = results[rows_at:].view(np.uint32)[: count * ROW_WIDTH].reshape(count, ROW_WIDTH).copy()
    digests: U64 = (
        results[digests_at : digests_at + count * 16].view(np.uint64).reshape(count, 2).copy()
    )
    fetched.synchronize()
    streams: dict[str, U8] = {}
    offset = 0
    for name, size in zip(STREAMS, sizes, strict=True):
        if size:
            streams[name] = host.numpy()[offset : offset + size]
        offset += size
    return EncodedGroup(window.spans, Encoded(rows, streams), {}, digests)


def _places(chunks: int) -> tuple[int, int, int]:
    """Return the offsets of rows and digests in the results of a call, and their end."""
    rows_at = -(-HEAD_ENTRIES * 8 // ALIGNED) * ALIGNED
    digests_at = rows_at + -(-chunks * ROW_WIDTH * 4 // ALIGNED) * ALIGNED
    return rows_at, digests_at, digests_at + chunks * 16


def defect(device: Accelerator) -> str:
    """Return the reason why the device encoder cannot be used; empty if it passes its test.

    It is run once for each device in a process, before the first use. A driver, compiler or
    processor that computes wrong bits would otherwise be noticed only at a restore.
    """
    native = device.native
    # A library of another build would read the table with another layout.
    if (INTERFACE, CHUNK.itemsize, HEAD_ENTRIES) != (
        native.INTERFACE,
        native.CHUNK_BYTES,
        native.HEAD_ENTRIES,
    ):
        return "the CUDA encoder is of another version than this package: build it again"
    problem: str | None = native.problem()
    if problem is not None:
        return problem
    try:
        return _wrong_on(device)
    # Errors of CUDA arrive as ``RuntimeError``. Saves then go on with the host encoder.
    except RuntimeError as error:
        return f"the CUDA encoder failed: {error}"


def _wrong_on(device: Accelerator) -> str:
    """Encode a small state, and return the first difference from the host encoder."""
    # A fixed seed, so that a failure can be repeated.
    random = np.random.default_rng(0)
    host = default_codec()
    jobs, expected = [], []
    # All widths of words, each with chunks of which few, some and most words change.
    for word_bytes in (1, 2, 4, 8):
        words = 40_000 // word_bytes
        bounds = np.array([0, words // 9, words // 3, words], np.uint64)
        before = random.integers(0, 1 << 20, words).astype(f"<u{word_bytes}")
        after = before.copy()
        for first, stop, share in zip(
            bounds[:-1].tolist(), bounds[1:].tolist(), (0.01, 0.3, 0.9), strict=True
        ):
            is_changed = random.random(stop - first) < share
            after[first:stop][is_changed] += random.integers(1, 1000, int(is_changed.sum())).astype(
                after.dtype
            )
        now, base = after.view(np.uint8), before.view(np.uint8)
        encoded, updated = host.encode(now, base.copy(), bounds, word_bytes)
        assert updated is not None
        expected.append(
            (encoded, updated, chunk_digests(now, bounds, word_bytes, encoded.rows[:, 0].tolist()))
        )
        with device.aside():
            current, shadow = (
                device.empty(now.size).copy_(torch.from_numpy(content.copy()))
                for content in (now, base)
            )
        jobs.append(GroupJob(current, shadow, bounds, word_bytes))
    for number, (job, (encoded, updated, digests)) in enumerate(zip(jobs, expected, strict=True)):
        [group] = encode(
            device, jobs[number : number + 1], 1 << 20, lambda size: None, lambda: None
        )
        is_equal = group.encoded.streams.keys() == encoded.streams.keys() and np.array_equal(
            group.encoded.rows, encoded.rows
        )
        is_equal = is_equal and all(
            np.array_equal(group.encoded.streams[name], encoded.streams[name])
            for name in encoded.streams
        )
        with device.aside():
            base = job.base.cpu().numpy()
        if not (
            is_equal
            and np.array_equal(base, updated)
            and group.digests is not None
            and np.array_equal(group.digests, digests)
        ):
            return (
                f"the CUDA encoder gave other bytes than the host's for words of {job.word_bytes}"
                " bytes; please report this"
            )
    return ""
