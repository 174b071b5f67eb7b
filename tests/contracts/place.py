"""The contract of a place for roots, as tests: a local or mounted directory, or an object store.

Subclass ``PlaceContract`` and give it a ``folder`` fixture: an empty existing directory, or an
address in an object store. To test a store:

    class TestMyStore(PlaceContract):
        @pytest.fixture
        def folder(self):
            store = ObjectStore(endpoint="https://...")
            return storage.of(f"s3://bucket/{secrets.token_hex(8)}", store)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deltacheck.errors import ChainBroken, Damaged, RootBusy
from deltacheck.store import layout
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.arrays import ArraySpec, StreamWriter
from deltacheck.store.files.chunk_files import ArrayFile
from deltacheck.store.files.storage import Place, take_lease
from deltacheck.store.lock.lease import Lease
from deltacheck.store.roots.opening import create_store
from tests.support.stored_arrays import ReadableArray

# Enough threads that several of them meet in the same call.
WRITERS = 16
# In bytes: more than any file that the tests read with this bound.
MOST = 1 << 20


def made(folder: Place, *names: str) -> Place:
    """Create a directory below ``folder``.

    Args:
        folder: The directory or prefix.
        *names: The names of the directories below it, the outermost first.

    Returns:
        The innermost directory.
    """
    for name in names:
        folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def at_once(work: Callable[[int], object], count: int = WRITERS) -> list[object]:
    """Call ``work(0)``, ``work(1)``, ... in threads at the same moment; return the results.

    Args:
        work: The function, which gets the number of its thread.
        count: The number of threads.

    Returns:
        The results, in the order of the numbers.
    """
    # Threads would otherwise begin one after the other, and seldom meet.
    start = threading.Barrier(count)

    def wait(number: int) -> object:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(wait, range(count)))


class PlaceContract:
    """Tests that each place must pass. The fixture ``folder`` is an empty place."""

    def test_a_file_is_created_once_and_keeps_what_it_was_created_with(self, folder: Place) -> None:
        assert arrays.create_file(folder, "a", b"first")
        assert not arrays.create_file(folder, "a", b"second")
        assert arrays.read_file(folder / "a", MOST) == b"first"

    def test_of_many_writers_that_create_a_file_one_wins(self, folder: Place) -> None:
        won = at_once(lambda number: arrays.create_file(folder, "a", b"writer %d" % number))
        assert won.count(True) == 1
        assert arrays.read_file(folder / "a", MOST) == b"writer %d" % won.index(True)

    def test_writers_of_different_files_do_not_meet(self, folder: Place) -> None:
        assert all(at_once(lambda number: arrays.create_file(folder, f"a{number}", b"x")))

    def test_what_was_written_is_read_at_once(self, folder: Place) -> None:
        for size in (0, 1, 70_000):
            content = bytes(size * [7])
            arrays.replace_file(folder, "a", content)
            assert arrays.read_file(folder / "a", MOST) == content
            assert storage.size_of(folder / "a") == size

    def test_a_missing_file_is_not_found(self, folder: Place) -> None:
        with pytest.raises(FileNotFoundError):
            arrays.read_file(folder / "a", MOST)
        with pytest.raises(FileNotFoundError):
            (folder / "a").read_bytes()
        assert not (folder / "a").is_file()
        assert not (folder / "a").exists()

    def test_a_file_that_is_larger_than_it_may_be_is_refused(self, folder: Place) -> None:
        arrays.replace_file(folder, "a", bytes(11))
        assert arrays.read_file(folder / "a", 11) == bytes(11)
        with pytest.raises(Damaged, match="11 bytes"):
            arrays.read_file(folder / "a", 10)

    def test_a_reader_never_sees_half_a_file(self, folder: Place) -> None:
        # Large enough that a write in place would take several steps, which a reader could see.
        contents = [bytes([number]) * 200_000 for number in range(4)]
        arrays.replace_file(folder, "a", contents[0])
        stop_event = threading.Event()
        contents_read: list[bytes] = []

        def read() -> None:
            while not stop_event.is_set():
                contents_read.append((folder / "a").read_bytes())

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(12):
            arrays.replace_file(folder, "a", contents[number % 4])
        stop_event.set()
        reader.join()
        assert contents_read
        assert set(contents_read) <= set(contents)

    def test_a_deleted_file_is_gone_and_can_be_created_anew(self, folder: Place) -> None:
        arrays.replace_file(folder, "a", b"old")
        (folder / "a").unlink()
        assert not (folder / "a").is_file()
        (folder / "a").unlink(missing_ok=True)
        assert arrays.create_file(folder, "a", b"new")
        assert (folder / "a").read_bytes() == b"new"

    def test_directories_are_those_that_hold_something(self, folder: Place) -> None:
        assert storage.subdirectories(folder / "none") == []
        # The last name is that of a segment.
        for name in ("b", "a", "a.b", "s0000000001-abcdef01"):
            arrays.replace_file(made(folder, "under", name), "zarr.json", b"{}")
        directories = storage.subdirectories(folder / "under")
        assert directories == sorted(
            folder / "under" / name for name in ("b", "a", "a.b", "s0000000001-abcdef01")
        )
        assert (folder / "under").is_dir()
        assert not (folder / "none").is_dir()

    def test_a_tree_is_removed_whole_and_nothing_beside_it(self, folder: Place) -> None:
        # In an object store, all of these keys begin with "a". Only what is below "a/" may go.
        for names in (("a",), ("a", "b", "c"), ("a.b",), ("ab",)):
            arrays.replace_file(made(folder, "under", *names), "x", b"1")
        storage.remove_tree(folder, folder / "under" / "a")
        assert [directory.name for directory in storage.subdirectories(folder / "under")] == [
            "a.b",
            "ab",
        ]
        assert (folder / "under" / "ab" / "x").read_bytes() == b"1"
        storage.remove_tree(folder, folder / "under" / "a", ignore_errors=True)

    def test_names_of_leaves_are_names_of_files(self, folder: Place) -> None:
        names = list(
            layout.array_names(
                # Keys that a file system or an address would read differently: separators, another
                # case, more than 255 bytes, and characters with a meaning in URLs.
                ["a/b", "a.b", "A.b", "ü", "a b", "100%", "x" * 300, ".", "a:b?c#d&e=f+g"]
            ).values()
        )
        for number, name in enumerate(names):
            arrays.replace_file(made(folder, name), "zarr.json", b"%d" % number)
        assert [(folder / name / "zarr.json").read_bytes() for name in names] == [
            b"%d" % n for n in range(len(names))
        ]
        assert {directory.name for directory in storage.subdirectories(folder)} == set(names)

    def test_an_array_is_read_as_it_was_written(self, folder: Place) -> None:
        values = np.arange(5000, dtype=np.float32).reshape(50, 100)
        spec = ArraySpec.natural((50, 100), "float32", (16, 100), {})
        context = arrays.context(parent=storage.context(folder))
        arrays.write(folder / "array", spec, values, context).result(timeout=240)
        assert np.array_equal(ReadableArray(folder / "array", spec).read(), values)
        rows = ReadableArray(folder / "array", spec).read([slice(20, 30), slice(0, 100)])
        assert np.array_equal(rows, values[20:30])

    def test_a_stream_is_read_as_it_was_written(self, folder: Place) -> None:
        pieces = [np.full(700_000, number, np.uint8) for number in range(4)]
        spec = ArraySpec.flat(2_800_000, "uint8", "stream", {})
        writer = StreamWriter(folder)
        writer.write(folder / "stream", spec, pieces).result(timeout=240)
        writer.close()
        assert np.array_equal(ReadableArray(folder / "stream", spec).read(), np.concatenate(pieces))

    @pytest.mark.parametrize("chunks", [1, 3])
    def test_a_file_of_an_array_of_which_nothing_is_wanted_has_its_size_and_index(
        self, folder: Place, chunks: int
    ) -> None:
        values = np.random.default_rng(0).integers(0, 255, chunks << 20, np.uint8)
        spec = ArraySpec.flat(values.size, "uint8", "store", {})
        context = arrays.context(parent=storage.context(folder))
        arrays.write(folder / "array", spec, values, context).result(timeout=240)
        content = (folder / "array" / "c.0").read_bytes()
        file = ArrayFile(folder / "array", "c.0", 0, 0, spec.cells)
        (descriptor,) = storage.storage_of(folder).open_array_files([file])
        try:
            assert os.fstat(descriptor).st_size == len(content)
            index_bytes = spec.cells.index_bytes
            assert (index_bytes > 0) == (chunks > 1)
            index = os.pread(descriptor, index_bytes, len(content) - index_bytes)
            assert index == content[len(content) - index_bytes :]
        finally:
            os.close(descriptor)

    def test_missing_data_is_an_error_and_not_zeros(self, folder: Place) -> None:
        values = np.arange(100, dtype=np.uint8)
        spec = ArraySpec.flat(100, "uint8", "store", {})
        context = arrays.context(parent=storage.context(folder))
        arrays.write(folder / "array", spec, values, context).result(timeout=240)
        # zarr reads a missing chunk as fill values. A reader of checkpoints must not.
        (folder / "array" / "c.0").unlink()
        with pytest.raises(ChainBroken):
            ReadableArray(folder / "array", spec).read()

    def test_damaged_data_is_an_error(self, folder: Place) -> None:
        spec = ArraySpec.flat(100, "uint8", "store", {})
        context = arrays.context(parent=storage.context(folder))
        arrays.write(folder / "array", spec, np.arange(100, dtype=np.uint8), context).result(
            timeout=240
        )
        content = bytearray((folder / "array" / "c.0").read_bytes())
        # One bit, which the checksum of the chunk must find.
        content[50] ^= 1
        arrays.replace_file(folder / "array", "c.0", bytes(content))
        with pytest.raises(Damaged):
            ReadableArray(folder / "array", spec).read()

    def test_a_store_is_made_once_and_then_found(self, folder: Place) -> None:
        create_store(folder).close()
        before = (folder / "zarr.json").read_bytes()
        create_store(folder).close()
        assert (folder / "zarr.json").read_bytes() == before

    def test_one_writer_has_the_lease(self, folder: Place) -> None:
        create_store(folder).close()
        lease = take_lease(folder)
        with pytest.raises(RootBusy, match="process"):
            take_lease(folder)
        lease.release()
        lease.release()
        take_lease(folder).release()

    def test_of_many_that_want_the_lease_one_gets_it(self, folder: Place) -> None:
        create_store(folder).close()
        leases: list[Lease] = []

        def take(number: int) -> bool:
            try:
                leases.append(take_lease(folder))
            except RootBusy:
                return False
            return True

        assert at_once(take, 4).count(True) == 1
        leases[0].release()
