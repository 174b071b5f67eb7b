"""Measure the speed of this machine at the work of a checkpoint.

A few hundred MB are written, read, copied and encoded, in a few seconds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltacheck.codec import NativeCodec, default_codec
from deltacheck.codec.base import U8, U64, Encoded
from deltacheck.leaf.spec import LeafSpec
from deltacheck.profile.planner import Machine
from deltacheck.store.files.arrays import bytes_on_disk
from deltacheck.store.files.background import TIMEOUT_SECONDS
from deltacheck.store.roots.opening import create_store
from deltacheck.store.segment import INDEX

FILE_BYTES = 64 << 20
STATE_BYTES = 32 << 20
# The best round counts, because other processes use the machine too.
ROUNDS = 3


def measure(folder: Path) -> Machine:
    """Measure the machine and the file system of a folder. Files are removed at the end.

    The state that is encoded is float32 with every word changed by about one part in a thousand,
    which is the most work for the encoder. Before a file is read, the system is asked to drop it
    from its cache. If it does not (``tmpfs``), the result is the speed of memory.

    Raises:
        OSError: If the folder cannot be written to.
    """
    with tempfile.TemporaryDirectory(prefix="deltacheck-probe-", dir=folder) as name:
        directory = Path(name)
        noise = np.random.default_rng(0).integers(0, 256, FILE_BYTES, dtype=np.uint8)
        write = FILE_BYTES / _best_seconds(lambda: _write(directory / "file", noise))
        read = FILE_BYTES / _best_seconds(lambda: _read(directory / "file"))
        target = np.zeros_like(noise)
        copy = FILE_BYTES / _best_seconds(lambda: np.copyto(target, noise))
        encode, apply = _codec_rates(directory / "root", write)
    return Machine(write=write, read=read, encode=encode, apply=apply, copy=copy)


def _best_seconds(action: Callable[[], object]) -> float:
    """Return the duration of the fastest of ``ROUNDS`` calls."""
    durations = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        durations.append(time.perf_counter() - start)
    return max(min(durations), 1e-9)


def _write(path: Path, content: U8) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(content.data)
        # Without it, the speed would be that of the page cache.
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(8 << 20):
            pass


def _codec_rates(root: Path, write: float) -> tuple[float, float]:
    """Return the bytes of state per second that are encoded, and that deltas are applied to.

    Encoding includes the entropy stage, which runs while a part is stored. Its time is therefore
    measured together with the writing, and the time of writing at ``write`` bytes per second is
    subtracted.
    """
    codec = default_codec()
    random = np.random.default_rng(1)
    before = random.standard_normal(STATE_BYTES // 4, np.float32)
    after = before * (1 + 1e-3 * random.standard_normal(before.size, np.float32))
    spec = LeafSpec.of("probe", before.shape, "float32")
    store = create_store(root)
    encode_seconds: list[float] = []
    apply_seconds: list[float] = []
    for seq in range(ROUNDS):
        # The encoder updates the base, so every round needs a copy.
        base = before.copy().view(np.uint8)
        start = time.perf_counter()
        encoded, _ = codec.encode(after.view(np.uint8), base, spec.bounds(), 4)
        compare_seconds = time.perf_counter() - start
        writer = store.writer(seq)
        for pending in writer.put_part(
            _index(encoded, spec.bounds()), {name: [data] for name, data in encoded.streams.items()}
        ):
            pending.result(timeout=TIMEOUT_SECONDS)
        write_seconds = bytes_on_disk(writer.path) / write
        elapsed_seconds = time.perf_counter() - start
        encode_seconds.append(max(compare_seconds, elapsed_seconds - write_seconds))
        apply_seconds.append(_apply_seconds(codec, encoded, before, spec.bounds()))
    store.close()
    return STATE_BYTES / min(encode_seconds), STATE_BYTES / min(apply_seconds)


def _index(encoded: Encoded, bounds: U64) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Convert the encoder's rows to rows of a part's index."""
    rows = encoded.rows
    index = np.zeros((rows.shape[0], len(INDEX)), np.uint32)
    index[:, 1] = rows[:, 0]
    index[:, 2] = np.diff(bounds)[rows[:, 0]]
    index[:, 3] = 4
    index[:, 4:] = rows[:, 1:]
    return index


def _apply_seconds(
    codec: NativeCodec,
    encoded: Encoded,
    before: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    bounds: U64,
) -> float:
    target = before.copy().view(np.uint8)
    start = time.perf_counter()
    codec.apply(encoded, target, bounds, 4)
    return time.perf_counter() - start
