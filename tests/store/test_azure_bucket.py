"""Containers of Azure: the client behaves as TensorStore's ``KvStore`` under ``ObjectPath``.

A container is the memory of obstore here. ``test_azurite.py`` has the same on Microsoft's emulator.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

import deltacheck
from deltacheck import Keep, Policy, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.errors import SaveFailed, StorageFailed
from deltacheck.store import files
from deltacheck.store.files import arrays, azure_bucket, background, object_storage, storage
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.files.object_client import ABSENT, written
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from tests.support.stored_arrays import ReadableArray
from tests.support.waiting import HANG_SECONDS, set_deadline, wait_until


class Container:
    """A container whose requests fail, wait and are counted, by the name of their method."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._lock = threading.Lock()
        # Each takes the request, which it may make, and returns or raises its outcome.
        self.faults: dict[str, Any] = {}
        self.calls: list[str] = []
        self.under_way = self.most_under_way = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "list":
            return method

        async def request(*words: Any, **options: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                self.under_way += 1
                self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                fault = self.faults.get(name)
                if fault is not None:
                    return await fault(partial(method, *words, **options))
                return await method(*words, **options)
            finally:
                with self._lock:
                    self.under_way -= 1

        return request


async def refused(_: Any) -> Any:
    raise GenericError("503 Server Busy\n\nDebug source:\nGeneric {}")


async def lost(request: Any) -> Any:
    """Make the request, and lose its reply."""
    await request()
    raise GenericError("connection closed")


async def silent(_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Container:
    container = Container()
    monkeypatch.setattr(azure_bucket, "AzureStore", lambda name, **options: container)
    return container


def path_of(scheme: str = "az", **options: Any) -> ObjectPath:
    path = storage.of(f"{scheme}://{secrets.token_hex(8)}/run", ObjectStore(**options))
    assert isinstance(path, ObjectPath)
    return path


# --- as TensorStore's key-value stores ------------------------------------------------------------


def outcome_of(path: ObjectPath, request: tuple[Any, ...], tags: dict[bytes, str]) -> Any:
    """Return what a request of one store says, with generations by their first appearance."""
    kind, name, *rest = request
    known = {label: tag for tag, label in tags.items()}

    def label(generation: bytes | None) -> str | None:
        if generation in (None, ABSENT):
            return None if generation is None else "absent"
        return tags.setdefault(generation, f"version {len(tags)}")

    key = path / name
    match kind:
        case "read":
            content, generation = key.read(known.get(rest[0], b""))
            return content, label(generation)
        case "part":
            reading = key.start_read(byte_range=rest[0])
            try:
                return key.finish_read(reading)[0]
            except StorageFailed as error:
                return str(error.__cause__).partition(":")[0]
        case "swap":
            return label(key.swap(rest[1], known.get(rest[0], ABSENT)))
        case "write":
            return key.write_bytes(rest[0])
        case "delete":
            key.unlink()
            return None
        case _:
            return [found.removeprefix(f"{path.key}/") for found in path.keys(*rest)]


def check_requests(seed: int, path: ObjectPath) -> None:
    """Send random requests to a bucket and to TensorStore's memory, and compare the outcomes."""
    draw = random.Random(seed)
    paths, tags = (path_of("memory"), path), ({}, {})
    outcomes: list[Any] = []
    names = ("a", "b", "dir/a", "dir.b", "dir0/c")
    for number in range(400):
        name, version = draw.choice(names), f"version {draw.randrange(max(1, len(tags[0])))}"
        content = b"%d " % number + bytes(draw.randrange(30))
        request = draw.choice(
            (
                ("read", name, draw.choice((version, "none"))),
                ("part", name, draw.choice((slice(0, 1), slice(3, 20), slice(-4, None)))),
                ("swap", name, draw.choice((version, version, "absent")), content),
                ("write", name, draw.choice((content, b""))),
                ("delete", name),
                ("list", "", *draw.choice(((), ("b",), ("a", "dir"), ("dir", "dir"), ("x",)))),
            )
        )
        first, second = (
            outcome_of(path, request, tag) for path, tag in zip(paths, tags, strict=True)
        )
        assert first == second, (number, request)
        outcomes.append((request[0], repr(first)))
    # Of each kind, different outcomes were seen.
    for kind in ("read", "part", "swap", "list"):
        assert len({seen for of, seen in outcomes if of == kind}) > 3


@pytest.mark.usefixtures("azure_in_memory")
@pytest.mark.parametrize("seed", range(5))
def test_every_request_has_the_outcome_that_a_kvstore_has(seed: int) -> None:
    check_requests(seed, path_of())


def test_a_conditional_write_whose_reply_is_lost_is_known_as_done(container: Container) -> None:
    path = path_of() / "x"
    container.faults["put_async"] = lost
    assert path.create(b"mine")
    generation = path.read()[1]
    assert not path.create(b"theirs")
    assert path.swap(b"next", generation) is not None
    assert path.swap(b"third", generation) is None
    assert path.read_bytes() == b"next"


def test_a_write_that_is_refused_is_an_error_in_the_words_of_the_service(
    container: Container,
) -> None:
    path = path_of() / "x"
    container.faults["put_async"] = refused
    for write in (path.create, path.write_bytes):
        with pytest.raises(StorageFailed, match=r"refused a write: UNKNOWN: 503 Server Busy$"):
            write(b"mine")
    assert not path.exists()


def test_an_unconditional_write_that_is_refused_is_no_success(container: Container) -> None:
    async def missing(_: Any) -> Any:
        raise FileNotFoundError("404 ResourceNotFound")

    container.faults["put_async"] = missing
    with pytest.raises(StorageFailed, match="ResourceNotFound"):
        (path_of() / "x").write_bytes(b"content")


def test_no_more_requests_are_under_way_than_allowed(container: Container) -> None:
    path = path_of(concurrency=3)
    gate, full = asyncio.Event(), threading.Event()

    async def wait(request: Any) -> Any:
        if container.under_way == 3:
            full.set()
        await gate.wait()
        return await request()

    container.faults["put_async"] = wait
    writes = [(path / str(number)).start_write(b"x") for number in range(12)]
    assert full.wait(HANG_SECONDS)
    azure_bucket._LOOP.call_soon_threadsafe(gate.set)
    for write in writes:
        write.result(HANG_SECONDS)
    assert container.most_under_way == 3
    assert len(path.keys()) == 12


def test_a_request_that_is_given_up_leaves_its_place_to_others(container: Container) -> None:
    path = path_of(concurrency=1, deadline_seconds=0.5)
    path.write_bytes(b"x")
    container.faults["get_async"] = silent
    with pytest.raises(StorageFailed, match=r"no answer to a read within 0\.5 s"):
        path.read_bytes()
    container.faults.clear()
    # It would wait for the only place otherwise, and so until its deadline.
    assert path.read_bytes() == b"x"


def test_the_end_of_the_process_waits_for_a_thread_of_the_client_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it is unwound there, and the process aborts."""
    entered, gate = threading.Event(), threading.Event()
    wake = azure_bucket._LOOP._write_to_self  # type: ignore[attr-defined]

    def wait() -> None:
        entered.set()
        assert gate.wait(HANG_SECONDS)
        wake()

    monkeypatch.setattr(azure_bucket._LOOP, "_write_to_self", wait)
    before = set(background._under_way)
    words = (azure_bucket._LOOP.call_soon_threadsafe, lambda: None)
    client = threading.Thread(target=words[0], args=words[1:])
    client.start()
    assert entered.wait(HANG_SECONDS)
    assert len(background._under_way - before) == 1
    gate.set()
    client.join()
    assert background._under_way <= before


def test_foreign_objects_beside_a_prefix_are_no_part_of_it(container: Container) -> None:
    path = path_of()
    for name in ("run", "run.b/x", "run0/x", "running"):
        container._store.put(name, b"x")
    assert path.keys() == []
    assert path.read_bytes() == b"x"  # the object of that name
    (path / "a").write_bytes(b"x")
    assert [key.name for key in path.iterdir()] == ["a"]


# --- arrays ---------------------------------------------------------------------------------------


def array() -> tuple[ArraySpec, np.ndarray[Any, Any]]:
    """Return an array of eight files."""
    values = np.random.default_rng(0).integers(0, 255, (64, 1 << 10), np.uint8)
    return ArraySpec(values.shape, "uint8", (8, 1 << 10), None, "values"), values


def start_array(path: ObjectPath) -> Any:
    spec, values = array()
    return arrays.write(path, spec, values, arrays.context(parent=storage.context(path)))


def test_the_memory_of_each_file_is_free_before_the_next_is_sent(container: Container) -> None:
    path, staged = path_of(concurrency=1), list[int]()

    async def look(request: Any) -> Any:
        if request.args[0].endswith(".0"):
            staged.append(len(await path._bucket._staging.list()))
        return await request()

    container.faults["put_async"] = look
    start_array(path / "array").result(HANG_SECONDS)
    assert staged == [7, 6, 5, 4, 3, 2, 1, 0]
    spec, values = array()
    assert np.array_equal(ReadableArray(path / "array", spec).read(), values)


@pytest.mark.parametrize("fault", [refused, "commit"], ids=["upload", "commit"])
def test_the_memory_of_an_array_is_free_after_a_failure(container: Container, fault: Any) -> None:
    path = path_of()
    if fault == "commit":

        async def fail() -> None:
            await path._bucket._staging.write(f"{path.key}/array/c.0.0", b"x")
            raise ValueError("INTERNAL: no memory")

        pending = (path / "array").stored(fail())
    else:
        container.faults["put_async"] = lambda request: (
            refused(request) if request.args[0].endswith(".0") else request()
        )
        pending = start_array(path / "array")
    with pytest.raises(ValueError, match=r"^(UNKNOWN: 503|INTERNAL: no memory)"):
        pending.result(HANG_SECONDS)
    # The first failure of several files is raised before the others have ended.
    wait_until(pending.done)
    container.faults.clear()
    assert path._bucket._staging.list().result() == []


def test_bytes_of_objects_are_counted_with_those_of_other_stores(container: Container) -> None:
    path = path_of()
    written.take()
    (path / "a").write_bytes(bytes(1000))
    (path / "b").create(bytes(200))
    start_array(path / "array").result(HANG_SECONDS)
    sizes = [len(container._store.get(key).bytes()) for key in path.keys()]  # noqa: SIM118
    assert written.take() == sum(sizes)
    (path / "a").unlink()
    assert written.take() == 0


# --- roots ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("azure_in_memory")
def test_a_run_is_saved_restored_pruned_and_verified() -> None:
    address, saved = f"az://{secrets.token_hex(8)}/run", {}
    weights = torch.randn(300, 260)
    options: dict[str, Any] = {
        "policy": Policy.exact(max_chain_depth=3),
        "keep": Keep(last=4),
        "options": SaveOptions(grace_seconds=0),
    }
    for begin in (0, 5):
        with Engine(address, **options) as engine:
            if begin:
                assert torch.equal(engine.restore()["w"], saved[begin - 1])
            for step in range(begin, begin + 5):
                weights[step] += 1
                saved[step] = weights.clone()
                assert engine.save(step, {"w": weights}).result(HANG_SECONDS).stored_bytes > 0
    reader = deltacheck.open(address)
    assert reader.steps() == [6, 7, 8, 9]
    assert reader.verify(deep=True) == []
    for step in reader.steps():
        assert np.array_equal(reader.restore(step)["w"], saved[step].numpy())
    for words in (
        ["ls"],
        ["log"],
        ["verify", "--deep"],
        ["repair"],
        ["prune", "--whole"],
        ["diff", "8", "9"],
    ):
        assert main([words[0], address, *words[1:]]) == 0, words


def test_a_save_whose_objects_are_refused_changes_nothing(container: Container) -> None:
    address = str(path_of())
    weights = torch.randn(300, 260)
    with Engine(address) as engine:
        engine.save(0, {"w": weights}).result(HANG_SECONDS)
        keys = path_keys(address)
        container.faults["put_async"] = refused
        weights += 1
        with pytest.raises(SaveFailed, match=r"earlier steps are as they were.*503 Server Busy"):
            engine.save(1, {"w": weights}).result(HANG_SECONDS)
        container.faults.clear()
        assert path_keys(address) == keys
        engine.save(2, {"w": weights}).result(HANG_SECONDS)
    assert deltacheck.open(address).steps() == [0, 2]
    assert np.array_equal(deltacheck.open(address).restore(2)["w"], weights.numpy())


def path_keys(address: str) -> list[str]:
    path = storage.of(address)
    assert isinstance(path, ObjectPath)
    return path.keys()


def test_a_store_that_hangs_fails_the_save_within_its_deadline(container: Container) -> None:
    options = SaveOptions()
    address = str(path_of())
    with Engine(address, options=options) as engine:
        engine.save(0, {"w": torch.zeros(10)}).result(HANG_SECONDS)
        set_deadline(options, 0.5)
        container.faults["put_async"] = silent
        with pytest.raises(SaveFailed, match="deadline"):
            engine.save(1, {"w": torch.ones(10)}).result()
        container.faults.clear()
        set_deadline(options, HANG_SECONDS)
        engine.save(2, {"w": torch.ones(10)}).result(HANG_SECONDS)
    assert deltacheck.open(address).steps() == [0, 2]


def test_a_container_that_ignores_conditions_is_refused(container: Container) -> None:
    async def careless(request: Any) -> Any:
        request.keywords["mode"] = "overwrite"
        return await request()

    container.faults["put_async"] = careless
    with pytest.raises(StorageFailed, match="does not honour conditional writes"):
        object_storage.check_conditional_writes(path_of())


# --- what is refused before the first step --------------------------------------------------------


@pytest.mark.parametrize("attempt", [Engine, deltacheck.open], ids=["Engine", "open"])
def test_a_missing_package_is_named(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, azure_bucket.__name__)
    monkeypatch.delattr(files, "azure_bucket")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(StorageFailed, match=r"obstore.*pip install 'deltacheck\[azure\]'"):
        attempt(str(path_of()))


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_account")
@pytest.mark.parametrize("attempt", [Engine, deltacheck.open], ids=["Engine", "open"])
def test_a_missing_account_names_the_variables(attempt: Any) -> None:
    with pytest.raises(
        StorageFailed,
        match=r"Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME.*AZURE_STORAGE_ACCOUNT_KEY or"
        r" AZURE_STORAGE_SAS_TOKEN",
    ):
        attempt(str(path_of()))


@pytest.mark.usefixtures("no_account")
def test_a_missing_key_names_the_variables(container: Container) -> None:
    async def no_token(_: Any) -> Any:
        raise GenericError("Error performing token request: no route")

    container.faults["get_async"] = no_token
    with pytest.raises(StorageFailed, match=r"token request.*AZURE_STORAGE_ACCOUNT_KEY"):
        deltacheck.open(str(path_of()))


def test_a_missing_container_is_not_an_empty_one(container: Container) -> None:
    async def missing(_: Any) -> Any:
        raise FileNotFoundError("404: <Code>ContainerNotFound</Code>")

    for method in ("get_async", "put_async", "delete_async"):
        container.faults[method] = missing
    path = path_of()
    for attempt in (path.read, path.unlink, lambda: path.create(b"x"), lambda: Engine(str(path))):
        with pytest.raises(StorageFailed, match="ContainerNotFound"):
            attempt()


def test_the_client_is_imported_for_azure_only(tmp_path: Path) -> None:
    program = (
        "import sys; from deltacheck.backends.torch import Engine\n"
        "for root in (sys.argv[1], 'memory://test/run'): Engine(root).close()\n"
        "sys.exit('obstore' in sys.modules)"
    )
    words = [sys.executable, "-c", program, tmp_path / "run"]
    assert subprocess.run(words, timeout=240).returncode == 0
