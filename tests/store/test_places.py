"""The place contract over what can be had here: a local directory, TensorStore's memory, S3 on a
local server, Azure over the memory of its client.
"""

from __future__ import annotations

import secrets
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltacheck import _native
from deltacheck.errors import ChainBroken, Damaged
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.files.object_path import ObjectPath
from deltacheck.store.files.storage import Place
from tests.contracts.place import PlaceContract
from tests.support.s3_server import S3
from tests.support.stored_arrays import ReadableArray


class TestLocal(PlaceContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Place:
        return tmp_path


@pytest.mark.usefixtures("quick_leases")
class TestMemory(PlaceContract):
    @pytest.fixture
    def folder(self) -> Place:
        return storage.of(f"memory://test/{secrets.token_hex(8)}")


@pytest.mark.usefixtures("quick_leases")
class TestS3(PlaceContract):
    @pytest.fixture
    def folder(self, s3: S3) -> Place:
        return storage.of(f"s3://bucket/{secrets.token_hex(8)}")


@pytest.mark.usefixtures("quick_leases", "azure_in_memory")
class TestAzure(PlaceContract):
    @pytest.fixture
    def folder(self) -> Place:
        return storage.of(f"az://{secrets.token_hex(8)}/run")


@pytest.mark.usefixtures("azure_in_memory")
@pytest.mark.parametrize("scheme", ["memory", "az"])
class TestShards:
    """Parts of a shard of an object store, which are asked for by their range."""

    @pytest.fixture
    def shard(self, scheme: str) -> tuple[Place, ArraySpec, NDArray[np.uint8]]:
        folder = storage.of(f"{scheme}://shards/{secrets.token_hex(8)}/array")
        spec = ArraySpec((1600,), "uint8", (100,), (1600,), "store")
        values = np.random.default_rng(0).integers(0, 255, 1600, np.uint8)
        context = arrays.context(parent=storage.context(folder))
        arrays.write(folder, spec, values, context).result(timeout=240)
        return folder, spec, values

    @pytest.mark.parametrize("part", [(0, 100), (150, 420), (1599, 1600), (0, 900), (0, 1600)])
    def test_any_part_is_what_was_written(self, shard: Any, part: tuple[int, int]) -> None:
        folder, spec, values = shard
        assert np.array_equal(
            ReadableArray(folder, spec).read([slice(*part)]), values[slice(*part)]
        )

    def test_only_a_small_part_is_asked_for_by_its_range(
        self, shard: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, spec, _ = shard
        asked: list[object] = []
        start = ObjectPath.start_read

        def start_read(self: Any, unless: bytes = b"", byte_range: Any = None) -> Any:
            asked.append(byte_range)
            return start(self, unless, byte_range)

        monkeypatch.setattr(ObjectPath, "start_read", start_read)
        ReadableArray(folder, spec).read([slice(110, 290)])
        # The index has 16 bytes for each chunk, and each chunk 4 for its checksum.
        assert asked == [slice(-(16 * 16 + 4), None), slice(104, 312)]
        asked.clear()
        ReadableArray(folder, spec).read([slice(0, 900)])
        assert asked == [None]

    @pytest.mark.parametrize(
        ("edit", "says"),
        [
            (lambda shard: shard[:100], "lacks bytes of its chunks|too short for the index"),
            (lambda shard: with_entry(shard, 1, 2**64 - 1, 2**64 - 1), "it is not there"),
            (lambda shard: with_entry(shard, 1, 2**60, 104), "more than the .* can take"),
            (lambda shard: with_entry(shard, 1, 0, 104), None),
            (lambda shard: shard[:150] + b"x" + shard[151:], "checksum"),
            (lambda shard: shard[:-1] + b"x", "the checksum of its index does not fit"),
        ],
        ids=["short", "absent", "far away", "another chunk", "changed", "index changed"],
    )
    def test_a_damaged_shard_is_refused(self, shard: Any, edit: Any, says: str | None) -> None:
        folder, spec, values = shard
        file = folder / "c.0"
        file.write_bytes(edit(file.read_bytes()))
        array = ReadableArray(folder, spec)
        if says is None:  # digests of chunks find it
            assert np.array_equal(array.read([slice(100, 200)]), values[:100])
        else:
            with pytest.raises(Damaged, match=says):
                array.read([slice(100, 200)])

    def test_a_shard_that_is_missing_breaks_the_chain(self, shard: Any) -> None:
        folder, spec, _ = shard
        (folder / "c.0").unlink()
        with pytest.raises(ChainBroken, match=r"c\.0 is not there"):
            ReadableArray(folder, spec).read([slice(100, 200)])


def with_entry(shard: bytes, chunk: int, offset: int, size: int) -> bytes:
    """Return a shard whose index has another entry, with a valid checksum."""
    index = bytearray(shard[-(16 * 16 + 4) : -4])
    index[16 * chunk : 16 * chunk + 16] = struct.pack("<QQ", offset, size)
    crc = _native.crc32c(np.frombuffer(index, np.uint8), False)
    return shard[: -(16 * 16 + 4)] + bytes(index) + crc.to_bytes(4, "little")
