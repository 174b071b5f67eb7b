"""Arrays, read by the native module: what TensorStore would give, or a refusal, whatever a file
holds.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray

import deltacheck
from deltacheck import _native, errors
from deltacheck.backends.torch import Engine
from deltacheck.leaf import grid
from deltacheck.store.files import arrays, native_files
from deltacheck.store.files.arrays import ArraySpec, StreamWriter
from tests.support.oracle import REFUSED, read_by_tensorstore
from tests.support.stored_arrays import ReadableArray

Bytes = NDArray[np.uint8]
CODECS = ("store", "stream", "values")
_GUARD = 64  # bytes before and after what is read into


def noise(size: int, seed: int = 0) -> Bytes:
    # Repeated from here on: random numbers would take longer than what is done to them.
    numbers = np.random.default_rng(seed).geometric(0.05, min(size, (1 << 20) + 77))
    return np.resize(np.minimum(numbers, 255).astype(np.uint8), size)


def written(path: Path, data: Bytes, codec: str) -> ArraySpec:
    spec = ArraySpec.flat(data.size, "uint8", codec, {})
    if codec == "values":
        arrays.write(path, spec, data, arrays.context()).result(timeout=240)
    else:
        StreamWriter(path).write(path, spec, [data]).result(timeout=240)
    return spec


def sharded(path: Path, data: Bytes, codec: str, chunks: int = 4) -> ArraySpec:
    """Small chunks, so that many fit a test: written by TensorStore."""
    spec = ArraySpec(
        (data.size,),
        "uint8",
        (-(-data.size // chunks),),
        (-(-data.size // chunks) * chunks,),
        codec,
    )
    arrays.write(path, spec, data, arrays.context()).result()
    return spec


def native(path: Path, spec: ArraySpec, first: int = 0, stop: int | None = None) -> Bytes:
    """Return the content that the native reader gives; it writes nowhere else."""
    size = (spec.shape[0] if stop is None else stop) - first
    room = np.full(size + 2 * _GUARD, 0xA5, np.uint8)
    try:
        read = native_files.JoinedRead(path)
        out = room[_GUARD : room.size - _GUARD]
        array = native_files.StoredArray(path, spec.cells, spec.codec)
        read.add_box(array, [slice(first, first + size)], out)
        arrays.Reading(read, path, np.empty(0, np.uint8)).result()
    finally:
        assert (room[:_GUARD] == 0xA5).all()
        assert (room[room.size - _GUARD :] == 0xA5).all()
    content = room[_GUARD : room.size - _GUARD]
    assert np.array_equal(joined(path, spec, first, size), content)
    return content


def joined(path: Path, spec: ArraySpec, first: int, size: int) -> Bytes:
    """Return a part of an array, read as two ranges by one call."""
    read = native_files.JoinedRead(path)
    sizes = np.array([size // 3, size - size // 3], np.uint64)
    begins = np.array([first, first + size // 3], np.uint64)
    present = sizes > 0
    array = native_files.StoredArray(str(path), spec.cells, spec.codec)
    of = np.zeros(np.count_nonzero(present), np.int64)
    offsets = read.add([array], of, begins[present], sizes[present])
    assert (offsets == begins[present] - np.uint64(first)).all()
    out = np.empty(read.size, np.uint8)
    arrays.Reading(read, path, out).result()
    return out


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 40_000), st.integers(1, 9), st.data())
def test_any_part_of_any_stream_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    codec: str,
    size: int,
    chunks: int,
    data: st.DataObject,
) -> None:
    content, path = noise(size), tmp_path_factory.mktemp("any") / "s"
    spec = sharded(path, content, codec, chunks)
    first = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(first + 1, size))
    assert np.array_equal(native(path, spec, first, stop), content[first:stop])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, (1 << 20) + 1, (33 << 20) + 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_streams_of_several_files_are_read_by_any_number_of_threads(
    tmp_path: Path, codec: str, size: int, threads: int
) -> None:
    content, before = noise(size), _native.threads()
    spec = written(tmp_path / "s", content, codec)
    try:
        _native.set_threads(threads)
        assert np.array_equal(native(tmp_path / "s", spec), content)
        middle = (size // 3, size - size // 4)
        if middle[0] < middle[1]:
            assert np.array_equal(native(tmp_path / "s", spec, *middle), content[slice(*middle)])
    finally:
        _native.set_threads(before)


@pytest.mark.parametrize("apart", [0, 4 << 20])
def test_ranges_of_one_file_that_are_far_apart_are_asked_for_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: int
) -> None:
    """Else an object store would send all that lies between them."""
    monkeypatch.setattr(native_files, "_APART_BYTES", apart)
    content = noise(12 << 20)
    spec = written(tmp_path / "s", content, "stream")
    begins, size = np.array([5, 100, 6 << 20, (11 << 20) + 1], np.uint64), 50
    read = native_files.JoinedRead(tmp_path)
    sizes = np.full(len(begins), size, np.uint64)
    array = native_files.StoredArray(str(tmp_path / "s"), spec.cells, spec.codec)
    read.add([array], np.zeros(len(begins), np.int64), begins, sizes)
    assert len(read._files) == (3 if apart else 4)
    out = np.empty(read.size, np.uint8)
    arrays.Reading(read, tmp_path, out).result()
    assert np.array_equal(out, np.concatenate([content[b : b + size] for b in begins.tolist()]))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=0, max_size=2),
    st.integers(1, 40),
    st.lists(st.integers(1, 5), min_size=0, max_size=2),
    st.sampled_from(["uint8", "uint16", "float32", "float64", "bool"]),
    st.data(),
)
def test_a_keyframe_of_any_shape_is_read_whole_and_by_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    outer: list[int],
    rows: int,
    inner: list[int],
    dtype: str,
    data: st.DataObject,
) -> None:
    shape = (*outer, rows, *inner)
    chunk = (*[1] * len(outer), data.draw(st.integers(1, rows), "rows of a chunk"), *inner)
    times = data.draw(st.integers(1, 9), "chunks of a file")
    shard, room = list(chunk), times
    for axis in range(len(outer), -1, -1):  # as grid.shard_shape has them
        along = max(1, min(room, -(-shape[axis] // chunk[axis])))
        shard[axis], room = chunk[axis] * along, room // along
    spec = ArraySpec(shape, dtype, chunk, None if tuple(shard) == chunk else tuple(shard), "values")
    content = (
        np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 200, shape).astype(dtype)
    )
    path = tmp_path_factory.mktemp("any") / "k"
    arrays.write(path, spec, content, arrays.context()).result()
    array = ReadableArray(path, spec)
    number = data.draw(st.integers(0, grid.chunk_count(shape, chunk) - 1), "chunk")
    box = grid.box(shape, chunk, number)
    assert np.array_equal(array.read(), content)
    assert np.array_equal(array.read(box), content[box])
    nothing = (*box[:-1], slice(box[-1].stop, box[-1].stop))
    assert array.read(nothing).shape == content[nothing].shape
    assert np.array_equal(read_by_tensorstore(path, spec), content)


def test_a_box_that_is_no_run_of_chunks_is_refused_by_name(tmp_path: Path) -> None:
    spec = ArraySpec((4, 6), "uint8", (2, 6), None, "values")
    with pytest.raises(ValueError, match=r"\[\(0, 2\), \(1, 6\)\] of an array of shape \(4, 6\)"):
        ReadableArray(tmp_path, spec).read([slice(0, 2), slice(1, 6)])


def test_an_array_of_one_element_is_read(tmp_path: Path) -> None:
    for shape in ((6, 4), ()):
        spec = ArraySpec(shape, "float32", shape, None, "values")
        content = np.arange(24, dtype=np.float32)[: 24 if shape else 1].reshape(shape)
        arrays.write(tmp_path / str(len(shape)), spec, content, arrays.context()).result()
        found = ReadableArray(tmp_path / str(len(shape)), spec).read()
        assert np.array_equal(found, content)
        assert np.array_equal(read_by_tensorstore(tmp_path / str(len(shape)), spec), content)


def test_a_leaf_of_many_files_is_read_as_it_was_saved(tmp_path: Path) -> None:
    state = {
        "stacked": torch.randn(5, 700, 3000),
        "flat": torch.randn(9_000_001),
        "small": torch.randn(7, 9),
    }
    with Engine(tmp_path) as engine:
        engine.save(0, state).wait()
        restored = engine.restore()
    assert all(torch.equal(restored[name], value) for name, value in state.items())
    assert {file.name for file in tmp_path.rglob("stacked/c.*")} == {"c.0.0.0", "c.1.0.0"}


def test_a_restore_from_files_asks_tensorstore_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(300_000)}
    with Engine(tmp_path) as engine:
        for step in range(3):
            state["w"] += 1e-4
            engine.save(step, state).wait()
    monkeypatch.setattr(arrays, "ts", None)
    assert np.array_equal(deltacheck.open(tmp_path).restore()["w"], state["w"].numpy())


def test_a_child_that_was_forked_reads(tmp_path: Path) -> None:
    written(tmp_path / "s", noise(5000), "stream")
    code = """
    import os, pathlib, sys
    from deltacheck.store.files import arrays
    from tests.support.stored_arrays import ReadableArray
    spec = arrays.ArraySpec.flat(5000, "uint8", "stream", {})
    array = ReadableArray(pathlib.Path(sys.argv[1]), spec)
    before = array.read().tobytes()  # the threads are there
    child = os.fork()
    if child == 0:
        os._exit(0 if array.read().tobytes() == before else 1)
    print(os.waitpid(child, 0)[1])
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "s")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("codec", CODECS)
def test_a_process_ends_in_peace_while_reads_are_under_way(tmp_path: Path, codec: str) -> None:
    size = 4 << 20
    written(tmp_path / "s", noise(size), codec)
    code = """
    import pathlib, sys
    from deltacheck.store.files import arrays
    from tests.support.stored_arrays import ReadableArray
    spec = arrays.ArraySpec.flat(int(sys.argv[2]), "uint8", sys.argv[3], {})
    array = ReadableArray(pathlib.Path(sys.argv[1]), spec)
    under_way = [array.start() for _ in range(100)]
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "s"), str(size), codec]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_ends_in_peace_while_writes_are_under_way(tmp_path: Path) -> None:
    code = """
    import pathlib, sys
    import numpy as np
    from deltacheck.store.files import arrays
    content = np.random.default_rng(0).integers(0, 9, 4 << 20, np.uint8)
    spec = arrays.ArraySpec.flat(content.size, "uint8", "stream", {})
    writer = arrays.StreamWriter(pathlib.Path(sys.argv[1]))
    under_way = [
        writer.write(pathlib.Path(sys.argv[1]) / str(i), spec, [content]) for i in range(8)
    ]
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_where_no_thread_can_be_started_the_reader_reads_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(5000)
    spec = written(tmp_path / "s", content, "stream")

    def refuse(process: int) -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(native_files, "_readers", refuse)
    array = ReadableArray(tmp_path / "s", spec)
    assert np.array_equal(array.read(), content)
    (tmp_path / "s" / "c.0").unlink()
    with pytest.raises(errors.ChainBroken):
        array.read()


# --- files that are not what they should be -------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_that_is_missing_breaks_the_chain(tmp_path: Path, codec: str) -> None:
    spec = written(tmp_path / "s", noise(2000), codec)
    (tmp_path / "s" / "c.0").unlink()
    with pytest.raises(
        errors.ChainBroken, match=r"lacks data that was committed: c\.0 is not there"
    ):
        ReadableArray(tmp_path / "s", spec).read()


def test_a_link_a_pipe_and_a_file_of_any_size_are_refused(tmp_path: Path) -> None:
    spec = written(tmp_path / "s", noise(2000), "stream")
    file, array = tmp_path / "s" / "c.0", ReadableArray(tmp_path / "s", spec)
    file.rename(tmp_path / "away")
    file.symlink_to(tmp_path / "away")
    with pytest.raises(errors.Damaged, match="cannot be read"):
        array.read()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(errors.Damaged, match="not a regular file"):
        array.read()
    file.unlink()
    (tmp_path / "away").rename(file)
    os.truncate(file, 1 << 30)
    with pytest.raises(errors.Damaged, match="more than the"):
        array.read()


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_and_every_shorter_file_is_refused(tmp_path: Path, codec: str) -> None:
    content = noise(150)
    spec = sharded(tmp_path / "s", content, codec, 3)
    file = tmp_path / "s" / "c.0"
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(errors.Damaged):
            native(tmp_path / "s", spec)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(errors.Damaged):
            native(tmp_path / "s", spec)
    file.write_bytes(whole)
    assert np.array_equal(native(tmp_path / "s", spec), content)


def crc(content: bytes) -> bytes:
    """With its checksum after it, as whoever forges a file would make it."""
    return content + struct.pack("<I", _native.crc32c(np.frombuffer(content, np.uint8), False))


def shard(
    chunks: list[bytes],
    index: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = lambda places: places,
) -> bytes:
    body, places = b"", []
    for chunk in chunks:
        places.append((len(body), len(chunk)))
        body += chunk
    return body + crc(b"".join(struct.pack("<QQ", *place) for place in index(places)))


def frame(content: bytes) -> bytes:
    return bytes(Zstd(1).encode(content))


def blosc(content: bytes, **how: Any) -> bytes:
    return bytes(Blosc("lz4", 5, Blosc.BITSHUFFLE, **how).encode(np.frombuffer(content, "<u4")))


A, B = b"a" * 500, bytes(range(250)) * 2
MOST = (1 << 64) - 1


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (
            shard([crc(frame(A)), crc(frame(A + b"x"))]),
            "chunk 1: .*Destination buffer is too small",
        ),
        (
            shard([crc(frame(A)), crc(frame(A[:499]))]),
            "chunk 1: it decodes to 499 bytes and not to 500",
        ),
        (shard([crc(frame(A)), crc(frame(b""))]), "chunk 1: it decodes to 0 bytes"),
        (shard([crc(frame(A)), crc(b"")]), "chunk 1: it decodes to 0 bytes"),
        (
            shard([crc(frame(A)), crc(b"this is no frame at all")]),
            "chunk 1: Unknown frame descriptor",
        ),
        (shard([crc(frame(A)), b"abc"]), "chunk 1: it has no room for a checksum"),
        (
            shard([crc(frame(A)), crc(frame(A))], lambda p: [p[0], (p[1][0], MOST - 3)]),
            "chunk 1: the index leads out of the file",
        ),
        (
            shard([crc(frame(A)), crc(frame(A))], lambda p: [p[0], (MOST - 3, 9)]),
            "chunk 1: the index leads out of the file",
        ),
        (
            shard([crc(frame(A)), crc(frame(A))], lambda p: [p[0], (MOST, MOST)]),
            "chunk 1: it is not there",
        ),
        (
            shard([crc(frame(A)), crc(frame(A))], lambda p: [p[0], (p[1][0], p[1][1] + 1)]),
            "chunk 1: the index leads out of the file",
        ),
        (
            shard([crc(frame(A)), crc(frame(A) + b"\0" * 900)]),
            "chunk 1: it is longer than any encoding of it",
        ),
        (shard([crc(frame(A))]), "it is too short for the index|index leads out|checksum"),
        (b"", "it is too short for the index of its chunks"),
    ],
)
def test_a_forged_file_with_checksums_that_fit_is_refused_for_what_it_is(
    tmp_path: Path, file: bytes, says: str
) -> None:
    spec = ArraySpec((1000,), "uint8", (500,), (1000,), "stream")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "c.0").write_bytes(file)
    with pytest.raises(errors.Damaged, match=says):
        native(tmp_path / "s", spec)


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (blosc(A + b"abcd"), "its frame says that it has 504 bytes and not 500"),
        (blosc(A)[:-1], "it is no blosc frame"),
        (blosc(A) + b"x", "it is no blosc frame"),
        (b"", "it is no blosc frame"),
        (b"\0" * 16, "it is no blosc frame|says that it has 0 bytes"),
        (
            blosc(A)[:2] + bytes([blosc(A)[2] & 0x1F | 3 << 5]) + blosc(A)[3:],
            "its blosc frame cannot be decoded",
        ),  # says: zlib
        (
            blosc(A)[:20] + struct.pack("<I", 9) + blosc(A)[24:],
            "its blosc frame cannot be decoded",
        ),  # of its one block
        (
            blosc(A)[:16] + struct.pack("<I", 900) + blosc(A)[20:],
            "its blosc frame cannot be decoded",
        ),  # where it begins
        (b"\0" * 700, "it is longer than any encoding of it"),
    ],
)
def test_a_forged_blosc_frame_is_refused_for_what_it_is(
    tmp_path: Path, chunk: bytes, says: str
) -> None:
    spec = ArraySpec((125,), "uint32", (125,), None, "values")
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "c.0").write_bytes(crc(chunk))
    with pytest.raises(errors.Damaged, match=says):
        ReadableArray(tmp_path / "k", spec).read()


def test_a_forged_index_may_name_a_chunk_twice_and_gives_what_it_names(tmp_path: Path) -> None:
    spec = ArraySpec((1000,), "uint8", (500,), (1000,), "stream")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "c.0").write_bytes(
        shard([crc(frame(A)), crc(frame(B))], lambda places: [places[1], places[1]])
    )
    assert (
        native(tmp_path / "s", spec).tobytes()
        == B + B
        == read_by_tensorstore(tmp_path / "s", spec).tobytes()
    )


def test_a_frame_that_asks_for_a_large_window_takes_no_memory(tmp_path: Path) -> None:
    spec = ArraySpec((500,), "uint8", (500,), None, "stream")
    # A frame without a single segment: its window is 2^31 bytes and more, its one block is 500
    # bytes as they stand.
    header = b"\x28\xb5\x2f\xfd" + b"\x00" + b"\xa8"
    block = (500 << 3 | 0 << 1 | 1).to_bytes(3, "little") + A
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "c.0").write_bytes(crc(header + block))
    try:
        found: Any = native(tmp_path / "s", spec)
    except errors.Damaged as error:
        assert "Frame requires too much memory" in str(error)  # noqa: PT017 - either is right
    else:
        assert found.tobytes() == A


def test_random_forgeries_are_refused_or_read_alike_by_both_readers(tmp_path: Path) -> None:
    seed = int(os.environ.get("NATIVE_FILES_SEED", "5"))
    random = np.random.default_rng(seed)
    content = noise(1200, 3)
    agreed = refused = 0
    for trial in range(150):
        path = tmp_path / str(trial)
        spec = sharded(path, content, CODECS[trial % len(CODECS)], 3)
        file = path / "c.0"
        whole = file.read_bytes()
        cells = spec.cells
        index = np.frombuffer(whole[-(16 * cells.chunks + 4) : -4], "<u8").reshape(-1, 2)
        chunks = [bytearray(whole[int(at) : int(at + size) - 4]) for at, size in index]
        one = chunks[random.integers(len(chunks))]
        for _ in range(int(random.integers(0, 4))):
            one[random.integers(len(one))] = random.integers(256)
        if random.random() < 0.3:
            del one[random.integers(len(one)) :]
        file.write_bytes(shard([crc(bytes(chunk)) for chunk in chunks]))
        if spec.codec == "values" and any(
            int.from_bytes(chunk[4:8], "little") != cells.chunk_bytes for chunk in chunks
        ):
            # TensorStore allocates as much as a header of blosc asks for.
            with pytest.raises(errors.Damaged):
                native(path, spec)
            continue
        try:
            found = native(path, spec)
        except errors.Damaged:
            refused += 1
            with pytest.raises(REFUSED):
                read_by_tensorstore(path, spec)
        else:
            agreed += 1
            assert np.array_equal(found, read_by_tensorstore(path, spec)), (
                f"NATIVE_FILES_SEED={seed}, trial {trial}"
            )
    assert agreed > 20
    assert refused > 20
