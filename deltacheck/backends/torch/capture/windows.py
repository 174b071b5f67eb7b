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
from deltacheck.codec.base import (
    HEAD_ENTRIES,
    LAW_BYTES,
    MORE_PIECES,
    ROW_WIDTH,
    STREAMS,
    TILE_ENTRY_BYTES,
    U8,
    U64,
    UNCHANGED,
    Encoded,
    EncodedGroup,
    GroupJob,
    GroupSpan,
)

# The struct Chunk of the extension.
CHUNK = np.dtype(
    [
        ("current", "<u8"),
        ("base", "<u8"),
        ("words", "<u4"),
        ("word_bytes", "<u2"),
        ("ordered", "u1"),
        ("method", "u1"),
        ("law", f"V{LAW_BYTES}"),
    ]
)
INTERFACE = 4  # of the extension, see module_cuda.cc
WINDOWS = 2  # at a time: one is computed while the other is copied to the host


def device_bytes(window_bytes: int) -> int:
    """Return the device memory that ``encode`` uses.

    Each window has a copy of what it reads, a payload, and a workspace, which ``window_bytes``
    limits.
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


def chunk_table(address: int, bounds: U64, word_bytes: int) -> NDArray[np.void]:
    """Return the table of the chunks of one content, without a base.

    Args:
        address: The address of its first word.
        bounds: uint64 ``(chunks + 1,)`` word offsets, ascending.
        word_bytes: Bytes of a word.
    """
    table = np.zeros(bounds.size - 1, CHUNK)
    # All factors are uint64: NumPy turns a mixture of uint64 and int64 into float64.
    table["current"] = np.uint64(address) + bounds[:-1] * np.uint64(word_bytes)
    table["words"], table["word_bytes"] = np.diff(bounds), word_bytes
    return table


def _cut(
    jobs: Sequence[GroupJob], window_bytes: int
) -> Iterator[tuple[list[GroupSpan], NDArray[np.void]]]:
    """Yield the chunks of all jobs in order, in runs of about ``window_bytes`` or less."""
    spans: list[GroupSpan] = []
    tables: list[NDArray[np.void]] = []
    size = 0
    for number, job in enumerate(jobs):
        words = np.diff(job.bounds)
        pieces = MORE_PIECES if job.ordered or job.law is not None else 1
        ends = np.cumsum(words * np.uint64(job.word_bytes * pieces)).astype(np.int64)
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
            bounds = job.bounds[first : stop + 1]
            table = chunk_table(job.current.data_ptr(), bounds, job.word_bytes)
            offsets = table["current"] - np.uint64(job.current.data_ptr())
            table["base"] = np.uint64(job.base.data_ptr()) + offsets
            table["ordered"] = job.ordered
            if job.law is not None:
                table["method"] = job.law[0]
                table["law"] = np.void(job.law[1])
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
    has_law = table["method"] != UNCHANGED
    more_pieces = sizes[has_law | (table["ordered"] != 0)]
    scratch_bytes = total + (MORE_PIECES - 1) * int(more_pieces.sum())
    # Always large enough, because no chunk is stored in more than its own bytes, apart from its law
    # and, of a few words, its exceptions.
    payload_bytes = total + (LAW_BYTES + TILE_ENTRY_BYTES) * int(has_law.sum())
    rows_at, digests_at, end = _places(chunks)
    host_table = device.pinned(table.nbytes)
    with device.aside() as stream:
        copies = _own_copies(device, jobs, spans, table)
        host_table.numpy()[:] = table.view(np.uint8)
        workspace = device.empty(device.native.workspace_bytes(chunks, scratch_bytes))
        payload = device.empty(max(1, payload_bytes))
        results = device.empty(end)
        address = results.data_ptr()
        device.native.encode(
            table=host_table.data_ptr(),
            chunks=chunks,
            bytes=scratch_bytes,
            workspace=workspace.data_ptr(),
            rows=address + rows_at,
            head=address,
            payload=payload.data_ptr(),
            payload_bytes=payload_bytes,
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
