"""The place contract over what can be had here: a local directory, TensorStore's memory, S3 on a
local server.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place
from deltacheck.store.lock import object_lease
from tests.contracts.place import PlaceContract
from tests.support.s3_server import S3
from tests.support.waiting import SleepWatch


class TestLocal(PlaceContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Place:
        return tmp_path


@pytest.fixture
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders of leases renew them, and others look at them, far more often than they must."""
    renew = object_lease._renew
    monkeypatch.setattr(
        object_lease, "_renew", lambda lease, released, every: renew(lease, released, 0.02)
    )
    monkeypatch.setattr(object_lease, "time", SleepWatch(longest_seconds=0.02))


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
