"""The entropy stage: streams as zarr files of our own making, which TensorStore and zarr-python
read like any others.
"""

from __future__ import annotations

import errno
import gc
import heapq
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Zstd
from numpy.typing import NDArray

from deltacheck import _native, errors
from deltacheck.backends.torch import Engine
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import STREAM_CHUNK_BYTES, ArraySpec, StreamWriter
from deltacheck.store.files.background import Background
from deltacheck.store.segment import stream_codec
from tests.support.oracle import REFUSED, read_by_tensorstore
from tests.support.waiting import wait_until

Bytes = NDArray[np.uint8]
WHERE = arrays.context()
CHUNK = STREAM_CHUNK_BYTES
SHARD = 32 * CHUNK


@pytest.fixture(autouse=True)
def same_thread_count() -> Iterator[None]:
    before = _native.threads()
    yield
    _native.set_threads(before)


def kinds() -> dict[str, Callable[[int], Bytes]]:
    random = np.random.default_rng(3)
    return {
        "constant": lambda n: np.full(n, 7, np.uint8),
        "two values": lambda n: (random.random(n) < 0.3).astype(np.uint8),
        "nearly constant": lambda n: (random.random(n) < 0.01).astype(np.uint8),
        "values": lambda n: np.minimum(random.geometric(0.6, n), 255).astype(np.uint8),
        "skewed": lambda n: np.minimum(random.geometric(0.2, n), 255).astype(np.uint8),
        "gaps": lambda n: np.minimum(random.geometric(0.02, n), 255).astype(np.uint8),
        "rounded noise": lambda n: random.normal(128, 20, n).astype(np.uint8),
        "random": lambda n: random.integers(0, 256, n, np.uint8),
        "half random": lambda n: np.where(
            np.arange(n) < n // 2, random.integers(0, 256, n), 5
        ).astype(np.uint8),
        "noise and runs": lambda n: np.where(
            np.arange(n) % 997 < 700, random.normal(128, 9, n), 0
        ).astype(np.uint8),
        "repetitive": lambda n: np.resize(random.integers(0, 256, 331, np.uint8), n),
        "text": lambda n: np.resize(np.frombuffer(Path(__file__).read_bytes(), np.uint8), n),
        "counter": lambda n: np.arange((n + 3) // 4, dtype="<u4").view(np.uint8)[:n],
    }


def spec_of(data: Bytes, codec: str) -> ArraySpec:
    return ArraySpec.flat(data.size, "uint8", codec, {"stream": "values"})


def cut(data: Bytes, at: list[int]) -> list[Bytes]:
    return np.split(data, sorted(min(a, data.size) for a in at))


def written(path: Path, data: Bytes, codec: str, at: list[int] | None = None) -> ArraySpec:
    spec = spec_of(data, codec)
    StreamWriter(path).write(path, spec, cut(data, at or [])).result(timeout=240)
    return spec


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def read_back(path: Path, spec: ArraySpec) -> Bytes:
    """By TensorStore, which must not need us to read what we have written."""
    return read_by_tensorstore(path, spec)


@pytest.mark.parametrize("codec", ["stream", "store"])
@pytest.mark.parametrize(
    "size",
    [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 2, SHARD, SHARD + 1, 2 * SHARD + 12345],
)
def test_both_readers_get_the_bytes_back_around_every_boundary(
    tmp_path: Path, codec: str, size: int
) -> None:
    # Repeated from here on: random numbers would take longer than all else.
    data = np.resize(kinds()["skewed"](3 * CHUNK + 77), size)
    spec = written(
        tmp_path / "s", data, codec, [1, size // 3, size // 3, CHUNK, size - 1] if size else []
    )
    assert np.array_equal(read_back(tmp_path / "s", spec), data)
    assert np.array_equal(zarr.open_array(tmp_path / "s", mode="r")[...], data)


@pytest.mark.parametrize("size", [5, CHUNK, CHUNK + 1, 7 * CHUNK + 3, SHARD + CHUNK // 2])
def test_a_stored_stream_has_the_bytes_that_tensorstore_would_write(
    tmp_path: Path, size: int
) -> None:
    data = kinds()["random"](size)
    spec = written(tmp_path / "ours", data, "store", [size // 2])
    arrays.write(tmp_path / "theirs", spec, data, WHERE).result()
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@pytest.mark.parametrize("kind", list(kinds()))
@pytest.mark.parametrize("codec", ["stream", "store"])
def test_files_are_the_same_for_any_number_of_threads_and_pieces(
    tmp_path: Path, kind: str, codec: str
) -> None:
    data = kinds()[kind](5 * CHUNK + 77)
    found = []
    for threads, pieces in (
        (1, []),
        (2, [3, CHUNK, 4 * CHUNK + 1]),
        (5, list(range(0, data.size, 70_001))),
    ):
        _native.set_threads(threads)
        written(tmp_path / str(threads), data, codec, pieces)
        found.append(files(tmp_path / str(threads)))
    assert found[0] == found[1] == found[2]
    assert np.array_equal(read_back(tmp_path / "1", spec_of(data, codec)), data)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(kinds())),
    st.integers(0, 3 * CHUNK),
    st.lists(st.integers(0, 3 * CHUNK), max_size=6),
    st.sampled_from(["stream", "store"]),
)
def test_any_content_in_any_pieces_comes_back(
    tmp_path_factory: pytest.TempPathFactory, kind: str, size: int, at: list[int], codec: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "s"
    data = kinds()[kind](size)
    assert np.array_equal(read_back(path, written(path, data, codec, at)), data)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=12))
def test_small_streams_of_arbitrary_bytes_come_back(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("any") / "s"
    data = np.frombuffer(b"".join(pieces), np.uint8)
    spec = spec_of(data, "stream")
    StreamWriter(path).write(
        path, spec, [np.frombuffer(piece, np.uint8) for piece in pieces]
    ).result(timeout=240)
    assert np.array_equal(read_back(path, spec), data)
    assert np.array_equal(zarr.open_array(path, mode="r")[...], data)


def huffman_bytes(block: Bytes) -> float:
    """Return the size of a Huffman code of the block, without its table."""
    heap = [int(count) for count in np.bincount(block) if count]
    heapq.heapify(heap)
    bits = heap[0] if len(heap) == 1 else 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        bits += both
        heapq.heappush(heap, both)
    return bits / 8


@pytest.mark.parametrize("kind", list(kinds()))
@pytest.mark.parametrize("size", [40, 3000, 20_000, 300_000, CHUNK])
def test_a_frame_is_hardly_larger_than_the_best_of_the_three_ways(
    tmp_path: Path, kind: str, size: int
) -> None:
    data = kinds()[kind](size)
    written(tmp_path / "s", data, "stream")
    frame = (tmp_path / "s" / "c.0").stat().st_size - 4
    blocks = [data[at : at + (1 << 17)] for at in range(0, size, 1 << 17)]
    best = min(size, len(Zstd(level=1).encode(data)), sum(map(huffman_bytes, blocks)))
    # 3 %, and the header of the frame, and the table and headers of each block.
    assert frame <= 1.03 * best + 20 + 160 * len(blocks)


@pytest.mark.parametrize("pieces", [1, 7, 3000])
def test_only_a_stream_that_no_code_makes_smaller_is_stored_as_it_is(pieces: int) -> None:
    chosen = {
        kind: stream_codec(np.array_split(make(1 << 20), pieces)) for kind, make in kinds().items()
    }
    assert [kind for kind, codec in chosen.items() if codec == "store"] == ["random"]
    assert stream_codec([kinds()["random"](4000)]) == "stream"  # too few bytes to tell
    assert stream_codec([]) == "stream"


@pytest.mark.parametrize(("kind", "share"), [("values", 0.95), ("noise and runs", 1.0)])
def test_codes_and_runs_alone_are_smaller_than_what_zstd_finds_in_noise(
    tmp_path: Path, kind: str, share: float
) -> None:
    data = kinds()[kind](CHUNK)
    written(tmp_path / "s", data, "stream")
    size = (tmp_path / "s" / "c.0").stat().st_size
    assert size < share * len(Zstd(level=1).encode(data))
    # Without the runs, their bytes would take codes.
    blocks = [data[at : at + (1 << 17)] for at in range(0, CHUNK, 1 << 17)]
    assert size < sum(map(huffman_bytes, blocks)) * (0.9 if "runs" in kind else 1.01)


@pytest.mark.parametrize("codec", ["stream", "store"])
@pytest.mark.parametrize("size", [1000, 3 * CHUNK + 5])
def test_every_flipped_bit_is_found(tmp_path: Path, codec: str, size: int) -> None:
    data = kinds()["skewed"](size)
    spec = written(tmp_path / "s", data, codec)
    file = tmp_path / "s" / "c.0"
    good = file.read_bytes()
    random = np.random.default_rng(4)
    at = {
        0,
        3,
        4,
        5,
        8,
        len(good) - 1,
        len(good) - 4,
        len(good) - 5,
        len(good) - 20,
        *random.integers(0, len(good), 30).tolist(),
    }
    for position in at:
        bad = bytearray(good)
        bad[position] ^= 1 << int(random.integers(8))
        file.write_bytes(bad)
        with pytest.raises(REFUSED):
            read_back(tmp_path / "s", spec)
    file.write_bytes(good)
    assert np.array_equal(read_back(tmp_path / "s", spec), data)


@pytest.mark.parametrize("present", ["zarr.json", "c.0"])
def test_nothing_that_is_there_is_written_over(tmp_path: Path, present: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / present).write_bytes(b"mine")
    with pytest.raises((FileExistsError, ValueError), match=r"(?i)exists"):
        written(tmp_path / "s", kinds()["skewed"](1000), "stream")
    assert (tmp_path / "s" / present).read_bytes() == b"mine"


@pytest.mark.parametrize("level", [1, 7, 0])
def test_a_full_disk_is_an_error_on_any_number_of_threads(level: int) -> None:
    data = kinds()["skewed"](4 * CHUNK)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for threads in (1, 3):
            _native.set_threads(threads)
            for sharded, per_file in ((True, 4), (False, 1)):
                assert (
                    _native.write_stream_file(full, [data], CHUNK, per_file, sharded, level, 0)
                    == errno.ENOSPC
                )
    finally:
        os.close(full)


def test_a_failed_write_of_a_stream_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(1 << 18)}
    with Engine(tmp_path) as engine:
        engine.save(0, state).result()
        monkeypatch.setattr(_native, "write_stream_file", lambda *_: errno.ENOSPC)
        state["w"][5] = 1
        with pytest.raises(errors.SaveFailed, match="No space left"):
            engine.save(1, state).result()
        monkeypatch.undo()
        engine.save(2, state).result()
        assert torch.equal(engine.restore(2)["w"], state["w"])
        assert engine.steps() == [0, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        ([], CHUNK, 1, False, 1, 0),
        ([np.zeros(3, np.uint8)], 0, 1, False, 1, 0),
        ([np.zeros(3, np.uint8)], 2, 2, False, 1, 0),
        ([np.zeros(3, np.uint8)], 2, 2, True, 1, 1),
        ([np.zeros(3, np.uint8)], 2, 0, True, 1, 0),
        ([np.zeros(3, np.uint8)], 1 << 31, 1, False, 1, 0),
        ([np.zeros(3, np.uint8)], CHUNK, 1, False, 20, 0),
    ],
)
def test_impossible_cuts_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"a chunk must have|does not reach|the level must be"):
        _native.write_stream_file(-1, *arguments)


def test_crc32c_is_that_of_the_standard_and_the_same_by_instruction_and_by_table() -> None:
    # Check value of the CRC catalogue, and the first vector of RFC 3720, appendix B.4.
    assert _native.crc32c(np.frombuffer(b"123456789", np.uint8), by_table=True) == 0xE3069283
    assert _native.crc32c(np.zeros(32, np.uint8), by_table=True) == 0x8A9136AA
    data = kinds()["random"](40_000)
    for size in [*range(70), 12287, 12288, 12289, 24575, 24576, 24577, 39_990]:
        for start in (0, 1, 7):
            some = data[start : start + size]
            assert _native.crc32c(some, by_table=False) == _native.crc32c(some, by_table=True)


def test_work_in_the_background_tells_its_failure_and_its_threads_end_after_the_last() -> None:
    background = Background(2, "test-background")
    gate = threading.Event()
    seen: list[int] = []
    futures = [background.start(lambda n=n: (gate.wait(240), seen.append(n))[1]) for n in range(5)]  # type: ignore[misc]
    failing = background.start(lambda: [][0])
    assert not any(future.done() for future in futures)
    del background
    gc.collect()
    gate.set()
    with pytest.raises(IndexError):
        failing.result(timeout=10)
    assert [future.result(timeout=240) for future in futures] == [None] * 5
    assert sorted(seen) == list(range(5))
    wait_until(lambda: "test-background" not in [thread.name for thread in threading.enumerate()])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_threads_that_compress_yield_to_the_training(tmp_path: Path) -> None:
    def priority_of_a_thread(background: Background) -> int:
        seen: list[int] = []
        background.start(
            lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        ).result(timeout=240)
        return seen[0]

    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert priority_of_a_thread(Background(1, "test-background")) == own
    writer = StreamWriter(tmp_path)
    assert priority_of_a_thread(writer._background) == min(19, own + 5)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_work_in_the_background_is_still_done_when_the_interpreter_exits() -> None:
    code = """
        import atexit
        from deltacheck.store.files.background import Background
        background = Background(2, "test-background")
        atexit.register(lambda: background.start(lambda: print("done")).result())
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert told.stdout == "done\n", told.stderr
