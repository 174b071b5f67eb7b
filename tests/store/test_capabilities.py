"""Locks, syncs and renames that a file system lacks are named when a root is opened."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.errors import StorageFailed
from deltacheck.store.files import local_storage
from deltacheck.store.lock.capabilities import lacking

# As TensorStore words them.
MESSAGES = {
    "has no file locks": 'Failed to acquire lock on file: "/rename/fsync/zarr.json.__lock": Failed'
    " to lock file: Function not implemented [os_error_code='38']",
    "cannot sync a directory": "Error calling fsync on parent directory of: /lock/rename: Failed to"
    " fsync directory: Invalid argument [os_error_code='22']",
    "cannot rename a file": 'Failed to rename fd: 4 "/a/fsync.__lock" to: "/a/fsync": Function not'
    " implemented [os_error_code='38']",
}


def opened(root: Path, **options: Any) -> list[int]:
    with Engine(root, **options) as engine:
        engine.save(len(engine.steps()), {"w": torch.ones(3)}).wait()
        return engine.steps()


@pytest.mark.parametrize("fault", MESSAGES)
def test_what_tensorstore_cannot_do_is_named_and_a_retry_elsewhere_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError(MESSAGES[fault])

    with monkeypatch.context() as patch:
        patch.setattr(local_storage, "wait_for", refuse)
        with pytest.raises(StorageFailed, match=rf"{fault}.*guarantees\.md#file-systems"):
            opened(tmp_path / "r")
    assert opened(tmp_path / "r") == [0]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_root_without_locks_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(StorageFailed, match=r"has no file locks .*Lustre: -o flock"):
            opened(tmp_path)
    assert opened(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOLCK, r"has no file locks .*Lustre: -o flock"), (errno.EIO, "Input/output error")],
)
def test_a_tag_is_not_changed_without_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with Engine(tmp_path) as engine:
        engine.save(0, {"w": torch.ones(3)}).wait()
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", refuse)
            with pytest.raises(StorageFailed, match=says):
                engine.tag(0, "best")
        assert engine.tags() == {}
        engine.tag(0, "best")
        assert engine.tags() == {"best": 0}


def test_without_syncs_of_directories_only_the_lower_durability_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path)
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        StorageFailed, match=r'cannot sync .*accept that with SaveOptions\(durability="process"\)'
    ):
        opened(tmp_path)
    assert opened(tmp_path, options=SaveOptions(durability="process")) == [0, 1]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("Failed to rename: No space left on device [os_error_code='28']"),
        ValueError("Error writing \"/fsync/lock\": Invalid argument [os_error_code='22']"),
    ],
)
def test_other_errors_are_no_missing_capability(error: Exception) -> None:
    assert lacking(Path("/fsync/rename"), error) is None
