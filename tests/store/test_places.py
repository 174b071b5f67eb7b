"""The place contract over what can be had here: a local directory, TensorStore's memory, S3 on a
local server.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from deltacheck.store.files import storage
from deltacheck.store.files.storage import ObjectStore, Place
from deltacheck.testing.place import PlaceContract
from tests.support.s3_server import S3


class TestLocal(PlaceContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Place:
        return tmp_path


class TestMemory(PlaceContract):
    @pytest.fixture
    def folder(self) -> Place:
        return storage.of(f"memory://test/{secrets.token_hex(8)}", ObjectStore(lease_seconds=1.0))


class TestS3(PlaceContract):
    @pytest.fixture
    def folder(self, s3: S3) -> Place:
        return storage.of(
            f"s3://bucket/{secrets.token_hex(8)}",
            ObjectStore(lease_seconds=1.0, deadline_seconds=20),
        )
