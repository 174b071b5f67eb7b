"""How fast this machine is at what a checkpoint does: a few hundred MB written, read, copied and
encoded, in a few seconds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltacheck.codec import default_codec
from deltacheck.codec.base import U8, U64, Codec, Encoded
from deltacheck.leaf.spec import LeafSpec
from deltacheck.profile.planner import Machine
from deltacheck.store.files.arrays import TIMEOUT_SECONDS, bytes_on_disk
from deltacheck.store.root import Store
from deltacheck.store.segment import INDEX

FILE_BYTES = 64 << 20
STATE_BYTES = 32 << 20
ROUNDS = 3  # the best of them: others use the machine too


def measure(folder: Path) -> Machine:
    """Measure in ``folder``, on its file system, and remove what was written. Raises ``OSError``.

    What is encoded is float32 of which every word changed by a part in a thousand: the most work
    that there is. Reading follows after the system was asked to forget the file; where it does not
    (``tmpfs``), the figure is that of memory.
    """
    with tempfile.TemporaryDirectory(prefix="deltacheck-probe-", dir=folder) as name:
        place = Path(name)
        noise = np.random.default_rng(0).integers(0, 256, FILE_BYTES, dtype=np.uint8)
        write = FILE_BYTES / _best(lambda: _write(place / "file", noise))
        read = FILE_BYTES / _best(lambda: _read(place / "file"))
        target = np.zeros_like(noise)
        copy = FILE_BYTES / _best(lambda: np.copyto(target, noise))
        encode, apply = _codec_rates(place / "root", write)
    return Machine(write=write, read=read, encode=encode, apply=apply, copy=copy)


def _best(action: Callable[[], object]) -> float:
    """Seconds."""
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)


def _write(path: Path, content: U8) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(content.data)
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(8 << 20):
            pass


def _codec_rates(root: Path, write: float) -> tuple[float, float]:
    """Bytes of state per second that are encoded, the entropy stage included, and that deltas are
    applied to.
    """
    codec = default_codec()
    random = np.random.default_rng(1)
    before = random.standard_normal(STATE_BYTES // 4, np.float32)
    now = before * (1 + 1e-3 * random.standard_normal(before.size, np.float32))
    spec = LeafSpec.of("probe", before.shape, "float32")
    store = Store.create(root)
    found: list[tuple[float, float]] = []
    for seq in range(ROUNDS):
        base = before.copy().view(np.uint8)
        begin = time.perf_counter()
        encoded, _ = codec.encode(now.view(np.uint8), base, spec.bounds(), 4)
        compared = time.perf_counter() - begin
        writer = store.writer(seq)
        for pending in writer.put_part(
            _index(encoded, spec.bounds()), {name: [data] for name, data in encoded.streams.items()}
        ):
            pending.result(timeout=TIMEOUT_SECONDS)
        storing = bytes_on_disk(writer.path) / write
        seconds = max(compared, time.perf_counter() - begin - storing)
        found.append((seconds, _apply_seconds(codec, encoded, before, spec.bounds())))
    store.close()
    encode, apply = (min(of) for of in zip(*found, strict=True))
    return STATE_BYTES / encode, STATE_BYTES / apply


def _index(encoded: Encoded, bounds: U64) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """The encoder's rows as rows of a part's index."""
    rows = encoded.rows
    index = np.zeros((rows.shape[0], len(INDEX)), np.uint32)
    index[:, 1] = rows[:, 0]
    index[:, 2] = np.diff(bounds)[rows[:, 0]]
    index[:, 3] = 4
    index[:, 4:] = rows[:, 1:]
    return index


def _apply_seconds(
    codec: Codec[U8],
    encoded: Encoded,
    before: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    bounds: U64,
) -> float:
    target = before.copy().view(np.uint8)
    begin = time.perf_counter()
    codec.apply(encoded, target, bounds, 4)
    return time.perf_counter() - begin
