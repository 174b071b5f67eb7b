"""Roots on Azurite, Microsoft's emulator of Azure Blob Storage; skipped if it is not installed."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Keep, Mirror, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.errors import RootBusy, StorageFailed
from deltacheck.store.files import arrays, azure_bucket, object_storage, storage
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.files.storage import Place
from tests.cli.test_run import TOUCH, run, train, uninterrupted
from tests.cli.test_run import result as result_of
from tests.contracts.place import PlaceContract, at_once
from tests.store.test_azure_bucket import check_requests
from tests.support import azurite
from tests.support.azurite import Azurite
from tests.support.paths import REPOSITORY
from tests.support.waiting import HANG_SECONDS

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not azurite.is_installed(), reason="Azurite is not installed (npm install azurite)"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Azurite]:
    server = Azurite()
    server.make_container("bucket")
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def _environment(server: Azurite) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def address() -> str:
    return f"az://bucket/{secrets.token_hex(4)}/run"


@pytest.mark.usefixtures("quick_leases")
class TestAzurite(PlaceContract):
    @pytest.fixture
    def folder(self, address: str) -> Place:
        return storage.of(address)


def path_of(address: str, **options: Any) -> ObjectPath:
    path = storage.of(address, ObjectStore(**options))
    assert isinstance(path, ObjectPath)
    return path


def test_every_request_has_the_outcome_that_a_kvstore_has(address: str) -> None:
    check_requests(0, path_of(address))


def test_the_service_passes_the_self_test(address: str) -> None:
    object_storage.check_conditional_writes(path_of(address))
    assert path_of(address).keys() == []


# Each step is a function of the one before, so any kill is found in what follows.
TRAINING = """
import os, signal, sys, threading, torch
from deltacheck import Keep, SaveOptions
from deltacheck.backends.torch import Engine
state = {"w": torch.arange(90_000.0).reshape(300, 300), "step": 0}
with Engine(sys.argv[1], keep=Keep(last=4), options=SaveOptions(grace_seconds=0)) as engine:
    if engine.steps():
        state = engine.restore()
    while state["step"] < 12:
        state["step"] += 1
        state["w"][state["step"]] *= 1.5
        save = engine.save(state["step"], state)
        if state["step"] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        save.result(240)
"""


def expected(step: int) -> np.ndarray[Any, Any]:
    weights = torch.arange(90_000.0).reshape(300, 300)
    for row in range(1, step + 1):
        weights[row] *= 1.5
    return weights.numpy()


def test_a_killed_run_continues_and_every_step_is_whole(address: str) -> None:
    for kill_at in (3, 7, 0):
        words = [sys.executable, "-c", TRAINING, address, str(kill_at)]
        status = subprocess.run(words, cwd=REPOSITORY, timeout=HANG_SECONDS).returncode
        assert status == (-signal.SIGKILL if kill_at else 0)
    reader = deltacheck.open(address)
    assert reader.steps() == [9, 10, 11, 12]
    assert reader.verify(deep=True) == []
    for step in reader.steps():
        assert np.array_equal(reader.restore(step)["w"], expected(step))
    for words in (
        ["ls"],
        ["log"],
        ["verify", "--deep"],
        ["prune", "--whole"],
        ["prune", "--grace", "0"],
    ):
        assert main([words[0], address, *words[1:]]) == 0, words
    assert main(["branch", address, "10", "--to", f"{address}-branch"]) == 0
    for root in (address, f"{address}-branch"):
        assert deltacheck.open(root).verify(deep=True) == []
    assert np.array_equal(deltacheck.open(f"{address}-branch").restore()["w"], expected(10))


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_every_third_request_of_a_run_may_fail(
    address: str, server: Azurite, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = timedelta(milliseconds=5)
    monkeypatch.setattr(
        azure_bucket, "_BACKOFF", {"init_backoff": moment, "max_backoff": 10 * moment}
    )
    store = ObjectStore(retries=12, lease_seconds=600)
    options: dict[str, Any] = {"keep": Keep(last=2), "options": SaveOptions(grace_seconds=0)}
    weights = torch.randn(300, 260)
    with server.failing(fault, 3):
        with Engine(address, storage=store, **options) as engine:
            for step in range(6):
                weights[step] += 1
                engine.save(step, {"w": weights}).result(HANG_SECONDS)
        assert deltacheck.open(address, storage=store).steps() == [4, 5]
        assert {"GET", "PUT"} <= set(server.failed)
    reader = deltacheck.open(address)
    assert reader.verify(deep=True) == []
    assert np.array_equal(reader.restore()["w"], weights.numpy())


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_of_writers_whose_requests_fail_one_wins_and_knows_it(
    address: str, server: Azurite, fault: str
) -> None:
    folder = path_of(address, retries=12)
    with server.failing(fault, 3):
        won = at_once(lambda number: arrays.create_file(folder, "race", b"writer %d" % number), 6)
    assert won.count(True) == 1
    assert (folder / "race").read_bytes() == b"writer %d" % won.index(True)


def test_a_second_writer_is_refused(address: str) -> None:
    with Engine(address), pytest.raises(RootBusy, match="process"):
        Engine(address)


def test_a_mirror_and_published_versions(address: str, tmp_path: Path) -> None:
    weights = torch.randn(300, 260)
    with (
        Engine(tmp_path / "run", keep=Keep(last=3), options=SaveOptions(grace_seconds=0)) as engine,
        Mirror(tmp_path / "run", address) as mirror,
        deltacheck.Publisher(tmp_path / "run", f"{address}-versions") as publisher,
    ):
        for step in range(5):
            weights[step] += 1
            engine.save(step, {"model": {"w": weights}}).result(HANG_SECONDS)
            assert mirror.poll() == [step]
            publisher.poll()
            receiver = deltacheck.Receiver(f"{address}-versions")
            receiver.poll()
            (received,) = receiver.tensors.values()
            assert np.array_equal(received, weights.numpy())
    reader = deltacheck.open(address)
    assert reader.steps() == [2, 3, 4]
    assert reader.verify(deep=True) == []
    with Engine(address) as engine:
        assert torch.equal(engine.restore()["model"]["w"], weights)


def test_a_trainer_continues_on_another_machine(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root = f"az://bucket/{secrets.token_hex(4)}"
    killed = train("hf", tmp_path, "parts", "--root", root, more=[1], KILL_AT="5")
    assert killed.code == 128 + signal.SIGKILL, killed.err[-3000:]
    newest = deltacheck.open(root).latest_step()
    shutil.rmtree(tmp_path / "parts")
    again = train("hf", tmp_path, "parts", "--root", root, more=[1], KILL_AT="5")
    assert again.code == 0, again.err[-3000:]
    assert f"continues from step {newest}" in again.lines[1]
    assert result_of(tmp_path, "parts") == uninterrupted("hf", 1)


def test_a_wrong_key_and_a_missing_container_are_refused_before_the_start(tmp_path: Path) -> None:
    words = ["--", sys.executable, "-c", TOUCH, tmp_path / "started"]
    missing = run("--root", "az://no-such-container/run", *words)
    assert missing.code == 5
    assert "ContainerNotFound" in missing.err
    wrong = run("--root", "az://bucket/run", *words, AZURE_STORAGE_ACCOUNT_KEY="d3Jvbmc=")
    assert wrong.code == 5
    assert "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN" in wrong.err.replace("\n", " ")
    assert not (tmp_path / "started").exists()


def test_a_dead_endpoint_is_an_error_long_before_the_deadline(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}/devstoreaccount1"
    dead = ObjectStore(endpoint=endpoint, retries=1, deadline_seconds=3600)
    with pytest.raises(StorageFailed, match="refused a read"):
        deltacheck.open(address, storage=dead)
