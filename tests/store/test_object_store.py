"""A root on an object store that fails: what is acknowledged is stored, what is listed restores,
and nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Keep, Policy, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.errors import (
    ChainBroken,
    Damaged,
    NotACheckpointRoot,
    RootBusy,
    SaveFailed,
    StorageFailed,
)
from deltacheck.save import pipeline
from deltacheck.save.chains.chain_state import ChainState
from deltacheck.store import collect, layout
from deltacheck.store.commit import commit
from deltacheck.store.files import arrays, object_path, object_storage
from deltacheck.store.files import storage as place
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.files.storage import take_lease
from deltacheck.store.lock import object_lease
from deltacheck.store.lock.object_lease import ObjectLease
from deltacheck.store.roots.opening import create_store, open_root
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.store import Store
from tests.support.s3_server import S3, Fault
from tests.support.waiting import HANG_SECONDS, ShiftedClock, set_deadline

FOREVER = 1 << 30
STORAGE = ObjectStore(retries=2)

# Where a fault strikes: the objects of a save, by the end of their keys.
OBJECTS = {
    "data": r"/segments/s\d+-\w+/.*/c[.0-9]*$",
    "metadata": r"/segments/s\d+-\w+/.+/zarr\.json$",
    "table": r"/segments/s\d+-\w+/zarr\.json$",
    "manifest": r"/checkpoints/c\d+/zarr\.json$",
}
WRITE_FAULTS = ("500", "503", "429", "dropped", "lost", "after 500")
READ_FAULTS = ("500", "503", "429", "dropped", "truncated")
# The soak (tests/suites/object_soak.py) takes all of them everywhere.
WRITE_CASES = [
    *((kind, where) for kind in WRITE_FAULTS for where in ("data", "manifest")),
    *((kind, where) for kind in ("503", "lost") for where in ("metadata", "table")),
]
READ_CASES = [(kind, where) for kind in READ_FAULTS for where in ("data", "manifest")] + [
    ("truncated", "table")
]


class Run:
    """A training with its checkpoints, and what each must restore to."""

    def __init__(self, address: str, **options: Any) -> None:
        torch.manual_seed(1)
        self.address = address
        options = {
            "storage": STORAGE,
            "policy": Policy.exact(max_chain_depth=2),
        } | options
        self.engine = Engine(address, **options)
        self.state = {"large": torch.randn(300, 260), "small": torch.randn(10), "step": 0}
        self.step = self.newest = 0
        self.saved: dict[int, dict[str, Any]] = {}

    def save(self) -> int:
        """The next step, acknowledged."""
        self.step += 1
        self.state["large"][self.step % 300, 0] += (
            0.5  # one chunk's sparse streams, and no more objects than that
        )
        self.state["step"] = self.step
        self.saved[self.step] = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.state.items()
        }
        self.engine.save(self.step, self.state).result(240)
        self.newest = self.step
        return self.step

    def check(self, *steps: int) -> None:
        """These steps, by default all that a fresh reader lists, restore to what was saved; all
        others are whole, too.
        """
        reader = deltacheck.open(self.address, storage=STORAGE)
        for step in steps or reader.steps():
            restored = reader.restore(step)
            assert restored["step"] == self.saved[step]["step"]
            for name in ("large", "small"):
                assert np.array_equal(restored[name], self.saved[step][name].numpy())


@pytest.fixture(scope="module", autouse=True)
def _environment(s3_server: S3) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        patch.setattr(object_path, "_FIRST_DELAY", "5ms")
        yield


@pytest.fixture
def address() -> str:
    return f"s3://bucket/{secrets.token_hex(8)}/run"


class Runs:
    """A run that tests share, until it has many steps: each is read wherever a root is looked at as
    a whole.
    """

    MOST_STEPS = 6

    def __init__(self) -> None:
        self._run: Run | None = None

    def current(self) -> Run:
        if self._run is None or len(self._run.saved) >= self.MOST_STEPS:
            self.finish()
            self._run = Run(f"s3://bucket/{secrets.token_hex(8)}")
            self._run.save()
            self._run.save()
        return self._run

    def finish(self) -> None:
        if self._run is not None:
            self._run.check()
            self._run.engine.close()


@pytest.fixture(scope="module")
def runs(_environment: None) -> Iterator[Runs]:
    runs = Runs()
    yield runs
    runs.finish()


@pytest.fixture
def run(runs: Runs) -> Run:
    return runs.current()


# --- writing --------------------------------------------------------------------------------------


def of_oldest(root: Any, inner: str = "") -> ObjectPath:
    folder: ObjectPath = min((root / "segments").iterdir())
    for name in filter(None, inner.split("/")):
        folder = folder / name
    return folder


@pytest.mark.parametrize("inner", ["", "zarr.json", "leaves/w"], ids=["all", "table", "data"])
def test_a_save_finds_a_lost_base_by_one_listing_and_writes_whole_leaves(
    address: str, s3_server: S3, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of the bucket has removed the oldest objects under a live writer."""
    # Else a save goes on without the answer of a slow machine, and its commit finds the loss.
    monkeypatch.setattr(pipeline, "_LOOK_SECONDS", HANG_SECONDS)
    weights = torch.randn(300, 300)
    with Engine(address, storage=STORAGE) as engine:
        for step in range(4):
            weights[step] += 1
            with s3_server.failing():  # the log of requests begins here
                engine.save(step, {"w": weights}).result(240)
                requests = [(method, done) for method, _, done in s3_server.seen()]
            # At the save and before the commit. The first save looks for another course.
            assert requests.count(("LIST", "ok")) == (2 if step else 1)
        lost = of_oldest(engine.root, inner)
        lost.remove_tree()
        lost._bucket.write(lost.key, None).result()  # the object itself, if it is one
        report = engine.save(4, {"w": weights}).result(240)
        assert [leaf.kind.value for leaf in report.leaves] == ["keyframe"]
        assert "are gone" in report.note
        weights[5] += 1
        # A listing that lags is no proof of a loss.
        with s3_server.failing(Fault("stale", "", "LIST", times=FOREVER, hidden="segments")):
            report = engine.save(5, {"w": weights}).result(240)
        assert [leaf.kind.value for leaf in report.leaves] == ["delta"]
    assert (deltacheck.open(address, storage=STORAGE).restore(5)["w"] == weights.numpy()).all()


def test_a_save_whose_base_goes_while_it_is_written_is_not_acknowledged(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.randn(300, 300)
    with Engine(address, storage=STORAGE) as engine:
        for step in range(2):
            weights[step] += 1
            engine.save(step, {"w": weights}).result(240)
        durable = ChainState.durable

        def purged(self: ChainState, job: Any, ref: Any) -> Any:
            of_oldest(engine.root, "leaves/w").remove_tree()
            monkeypatch.setattr(ChainState, "durable", durable)
            return durable(self, job, ref)

        monkeypatch.setattr(ChainState, "durable", purged)
        weights[2] += 1
        with pytest.raises(SaveFailed, match="are gone or have lost files"):
            engine.save(2, {"w": weights}).result(60)
        assert engine.save(3, {"w": weights}).result(240).leaves[0].kind.value == "keyframe"
    assert (deltacheck.open(address, storage=STORAGE).restore(3)["w"] == weights.numpy()).all()


@pytest.mark.parametrize(("kind", "where"), WRITE_CASES)
def test_a_save_outlives_a_fault_that_passes(
    run: Run, s3_server: S3, kind: str, where: str
) -> None:
    with s3_server.failing(Fault(kind, OBJECTS[where])):
        step = run.save()
        assert kind in {done for _, _, done in s3_server.seen()}
    run.check(step)


@pytest.mark.parametrize(("kind", "where"), WRITE_CASES)
def test_a_save_under_a_fault_that_lasts_is_all_or_nothing(
    run: Run, s3_server: S3, kind: str, where: str
) -> None:
    before = set(deltacheck.open(run.address, storage=STORAGE).steps())
    # A manifest that is there is read back.
    takes_effect = kind in ("lost", "after 500") and where == "manifest"
    outcome = (
        contextlib.nullcontext()
        if takes_effect
        else pytest.raises(SaveFailed, match="earlier steps are as they were")
    )
    with s3_server.failing(Fault(kind, OBJECTS[where], times=FOREVER)), outcome:
        run.save()
    acknowledged = {run.step} if takes_effect else set()
    assert set(deltacheck.open(run.address, storage=STORAGE).steps()) == before | acknowledged
    after = run.save()
    run.check(max(before), *acknowledged, after)


def test_every_third_reply_of_a_run_may_be_lost(address: str, s3_server: S3) -> None:
    with s3_server.failing(Fault("lost", "/", method="ANY", times=FOREVER, every=3)):
        run = Run(address, storage=ObjectStore(retries=12, deadline_seconds=30))
        run.save()
        run.save()
        run.engine.close()
    run.check()


def test_a_commit_whose_reply_is_lost_and_that_another_took_is_not_acknowledged(
    address: str, s3_server: S3
) -> None:
    run = Run(address)
    run.save()
    root = place.of(address, STORAGE)
    theirs = root / layout.CHECKPOINTS / layout.checkpoint_id(1)
    other = deltacheck.open(address, storage=STORAGE).manifest()
    taken = type(other)(
        **{name: getattr(other, name) for name in other.__struct_fields__}
        | {"seq": 1, "nonce": "0" * 16}
    )
    commit(root, taken)
    with (
        s3_server.failing(Fault("500", OBJECTS["manifest"])),
        pytest.raises(SaveFailed, match="two writers"),
    ):
        run.save()
    assert arrays.read_file(theirs / "zarr.json", 1 << 20).count(b'"nonce":"0000000000000000"') == 1
    run.engine.close()


def test_a_store_that_hangs_fails_the_save_within_its_deadline(address: str, s3_server: S3) -> None:
    options = SaveOptions()
    engine = Engine(address, storage=STORAGE, options=options)
    engine.save(0, {"w": torch.zeros(10)}).result(240)
    set_deadline(options, 0.5)
    with (
        s3_server.failing(Fault("hang", OBJECTS["data"], times=FOREVER)),
        pytest.raises(SaveFailed, match="deadline"),
    ):
        engine.save(1, {"w": torch.ones(10)}).result()
    set_deadline(options, 240.0)
    engine.save(2, {"w": torch.ones(10)}).result(240)
    engine.close()
    assert deltacheck.open(address, storage=STORAGE).steps() == [0, 2]


def test_closing_an_engine_whose_store_is_gone_waits_no_longer_than_the_deadline(
    address: str, s3_server: S3
) -> None:
    store = ObjectStore(retries=1)
    engine = Engine(address, storage=store)
    with s3_server.failing(Fault("hang", "/", method="ANY", times=FOREVER)):
        hurry(store)
        engine.close()


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "where"), READ_CASES)
def test_a_restore_outlives_a_fault_that_passes(
    run: Run, s3_server: S3, kind: str, where: str
) -> None:
    with s3_server.failing(Fault(kind, OBJECTS[where], "GET")):
        run.check(run.newest)
        assert kind in {done for _, _, done in s3_server.seen()}


@pytest.mark.parametrize(("kind", "where"), READ_CASES)
def test_a_restore_under_a_fault_that_lasts_says_that_the_store_fails(
    run: Run, s3_server: S3, kind: str, where: str
) -> None:
    reader = deltacheck.open(run.address, storage=STORAGE)
    with (
        s3_server.failing(Fault(kind, OBJECTS[where], "GET", times=FOREVER)),
        pytest.raises(StorageFailed),
    ):
        reader.restore()
    run.check(run.newest)


@pytest.mark.parametrize("kind", ["503", "dropped"])
def test_a_listing_that_fails_is_never_an_empty_one(run: Run, s3_server: S3, kind: str) -> None:
    reader = deltacheck.open(run.address, storage=STORAGE)
    with s3_server.failing(Fault(kind, "", "LIST")):
        assert reader.steps()
    root = open_root(run.address, storage=STORAGE)
    before = root.store.segment_ids()
    with s3_server.failing(Fault(kind, "", "LIST", times=FOREVER)):
        for attempt in (
            reader.steps,
            reader.restore,
            reader.verify,
            lambda: collect.collect(root, grace_seconds=0),
        ):
            with pytest.raises(StorageFailed):
                attempt()
    assert root.store.segment_ids() == before


@pytest.mark.parametrize("where", ["data", "table", "manifest"])
def test_a_changed_byte_is_damage_and_no_failure_of_the_store(
    run: Run, s3_server: S3, where: str
) -> None:
    with (
        s3_server.failing(Fault("flipped", OBJECTS[where], "GET", times=FOREVER)),
        pytest.raises(Damaged),
    ):
        deltacheck.open(run.address, storage=STORAGE).restore()


def test_verify_does_not_take_a_store_that_fails_for_damage(run: Run, s3_server: S3) -> None:
    for where in ("data", "metadata", "table"):
        with (
            s3_server.failing(Fault("500", OBJECTS[where], "GET", times=FOREVER)),
            pytest.raises(StorageFailed),
        ):
            deltacheck.open(run.address, storage=STORAGE).verify(deep=True)


def test_a_missing_object_is_a_broken_chain(address: str) -> None:
    run = Run(address)
    step = run.save()
    run.engine.close()
    (segment,) = open_root(address, storage=STORAGE).manifest(step).segments
    folder = place.of(address, STORAGE) / layout.SEGMENTS / segment.id
    assert isinstance(folder, ObjectPath)
    data = next(
        key
        for key in folder.keys()  # noqa: SIM118 - a path, not a mapping
        if re.search("/c[.0-9]+$", key)
    )
    (folder / data.removeprefix(f"{folder.key}/")).unlink()
    with pytest.raises(ChainBroken):
        deltacheck.open(address, storage=STORAGE).restore()
    (folder / "zarr.json").unlink()
    with pytest.raises(ChainBroken):
        deltacheck.open(address, storage=STORAGE).restore()


# --- a store that is not there --------------------------------------------------------------------


def hurry(store: ObjectStore) -> None:
    """Let requests have a short deadline from now on, when the store is to fall silent."""
    object.__setattr__(store, "deadline_seconds", 0.5)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("attempt", [Engine, deltacheck.open], ids=["Engine", "open"])
def test_a_dead_endpoint_is_an_error_long_before_the_deadline(address: str, attempt: Any) -> None:
    dead = ObjectStore(endpoint=closed_port(), retries=2, deadline_seconds=3600)
    with pytest.raises(StorageFailed, match="refused a read"):
        attempt(address, storage=dead)


@pytest.mark.parametrize("attempt", [Engine, deltacheck.open], ids=["Engine", "open"])
def test_an_endpoint_that_never_answers_is_an_error_at_the_deadline(
    address: str, attempt: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = ObjectStore(
            endpoint=f"http://127.0.0.1:{server.getsockname()[1]}", deadline_seconds=0.5
        )
        with pytest.raises(StorageFailed, match=r"no answer to a read within 0\.5 s"):
            attempt(address, storage=silent)


def test_a_restore_from_a_store_that_falls_silent_ends(run: Run, s3_server: S3) -> None:
    store = ObjectStore(retries=1)
    reader = deltacheck.open(run.address, storage=store)
    reader.manifest()
    hurry(store)
    with (
        s3_server.failing(Fault("hang", OBJECTS["data"], "GET", times=FOREVER)),
        pytest.raises(StorageFailed),
    ):
        reader.restore()


def test_a_bucket_that_is_not_there_is_named_by_writer_and_reader() -> None:
    with pytest.raises(StorageFailed, match="NoSuchBucket"):
        Engine("s3://no-such-bucket/run", storage=STORAGE)
    with pytest.raises(StorageFailed, match="NoSuchBucket"):
        deltacheck.open("s3://no-such-bucket/run", storage=STORAGE)


def test_a_prefix_that_holds_something_else_is_not_written(address: str) -> None:
    root = place.of(address, STORAGE)
    arrays.replace_file(root, "notes.txt", b"mine")
    with pytest.raises(NotACheckpointRoot, match="not empty"):
        Engine(address, storage=STORAGE)


# --- conditional writes and one writer ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unconditional", "501"])
def test_nothing_is_written_to_a_store_without_conditional_writes(
    address: str, s3_server: S3, kind: str
) -> None:
    folder = place.of(address, STORAGE)
    assert isinstance(folder, ObjectPath)
    with (
        s3_server.failing(Fault(kind, "/", times=FOREVER)),
        pytest.raises(StorageFailed, match=r"conditional writes .*docs/how-to/object-stores\.md"),
    ):
        Engine(address, storage=STORAGE)
    assert folder.keys() == []


@pytest.mark.parametrize("kind", ["lost", "500"])
@pytest.mark.parametrize("skip", range(5))
def test_the_self_test_outlives_a_fault_of_any_of_its_writes(
    address: str, s3_server: S3, kind: str, skip: int
) -> None:
    folder = place.of(address, STORAGE)
    assert isinstance(folder, ObjectPath)
    with s3_server.failing(Fault(kind, "/probe-", skip=skip)):
        object_storage.check_conditional_writes(folder)
    assert folder.keys() == []


@pytest.mark.parametrize("kind", ["lost", "after 500", "500", "503", "dropped"])
def test_of_writers_whose_replies_are_lost_one_wins_and_knows_it(
    address: str, s3_server: S3, kind: str
) -> None:
    folder = place.of(address, ObjectStore(retries=8, deadline_seconds=30))
    with s3_server.failing(Fault(kind, "/race", times=FOREVER, every=3)):
        results: list[int] = []

        def create(number: int) -> None:
            if arrays.create_file(folder, "race", b"writer %d" % number):
                results.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 1
    assert (folder / "race").read_bytes() == b"writer %d" % results[0]


# Long enough that no thread renews a lease while a test runs.
LEASE_SECONDS = 3600.0
LOOKS = 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    """Return the clock of a writer that waits for a sign of life of another one."""
    clock = ShiftedClock()
    monkeypatch.setattr(object_lease, "time", clock)
    return clock


def lease_of(
    address: str, monkeypatch: pytest.MonkeyPatch, machine: str
) -> tuple[ObjectPath, ObjectLease]:
    """A lease as another machine would hold it."""
    root = place.of(address, ObjectStore(retries=2, lease_seconds=LEASE_SECONDS))
    assert isinstance(root, ObjectPath)
    monkeypatch.setattr(object_lease, "_machine", lambda: machine)
    # Nothing of what this process knows about its leases.
    monkeypatch.setattr(object_lease, "_held", {})
    monkeypatch.setattr(object_lease, "_nonces", set())
    lease = take_lease(root)
    assert isinstance(lease, ObjectLease)
    return root, lease


def test_a_writer_that_is_heard_of_keeps_the_root(
    address: str, monkeypatch: pytest.MonkeyPatch, clock: ShiftedClock
) -> None:
    _, first = lease_of(address, monkeypatch, "one")
    clock.after_sleep = lambda: first.renew() if len(clock.slept) == LOOKS // 3 else None
    with pytest.raises(RootBusy, match=f"process .* on {re.escape(socket.gethostname())}"):
        lease_of(address, monkeypatch, "two")
    assert len(clock.slept) == LOOKS // 3
    first.release()
    lease_of(address, monkeypatch, "two")[1].release()


def test_a_writer_that_fell_silent_is_replaced_and_cannot_commit(
    address: str, monkeypatch: pytest.MonkeyPatch, clock: ShiftedClock
) -> None:
    root, zombie = lease_of(address, monkeypatch, "one")  # it hangs, or is cut off
    held = dict(object_lease._held)
    _, heir = lease_of(address, monkeypatch, "two")
    assert clock.slept == [LEASE_SECONDS / LOOKS] * LOOKS
    assert heir.epoch == 2
    monkeypatch.setattr(object_lease, "_held", held)
    create_store(root)
    with pytest.raises(RootBusy, match="took over"):
        object_lease.seconds_left(root)
    zombie.release()  # gives nothing back that is not its own
    assert b'"epoch":2' in (root / layout.CONTROL / "zarr.json").read_bytes()
    assert b'"released"' not in (root / layout.CONTROL / "zarr.json").read_bytes()
    heir.release()


def test_a_save_of_a_writer_that_lost_its_lease_fails_and_says_who_has_it(address: str) -> None:
    run = Run(address)
    run.save()
    root = place.of(address, STORAGE)
    said = layout.group_json(
        {
            layout.ATTRIBUTE: {
                "holder": "process 7 on elsewhere",
                "nonce": "x",
                "epoch": 9,
                "seconds": 60,
            }
        }
    )
    arrays.replace_file(root / layout.CONTROL, "zarr.json", said)
    lease = run.engine._writer.lease
    assert isinstance(lease, ObjectLease)
    lease.renew()
    with pytest.raises(SaveFailed, match="process 7 on elsewhere"):
        run.save()
    run.engine.close()
    assert deltacheck.open(address, storage=STORAGE).steps() == [1]


@pytest.mark.parametrize("died", [True, False], ids=["died", "copied"])
def test_a_writer_that_died_here_or_that_wrote_a_copied_directory_is_not_waited_for(
    address: str, died: bool, clock: ShiftedClock
) -> None:
    root = place.of(address, STORAGE)
    claim: dict[str, Any] = {"holder": "process 999999999", "nonce": "x"}
    if died:
        machine = object_lease._machine()
        claim |= {"process": 999999999, "machine": machine, "epoch": 4, "seconds": 60}
    content = layout.group_json({layout.ATTRIBUTE: claim})
    arrays.replace_file(root / layout.CONTROL, "zarr.json", content)
    lease = take_lease(root)
    assert clock.slept == []
    assert isinstance(lease, ObjectLease)
    assert lease.epoch == (5 if died else 1)
    lease.release()


def test_an_engine_that_nobody_refers_to_gives_its_prefix_back(address: str) -> None:
    Engine(address, storage=STORAGE).save(1, {"x": torch.ones(3)})
    with Engine(address, storage=STORAGE) as engine:
        assert engine.steps() == [1]
        with pytest.raises(RootBusy, match=f"opened at {re.escape(__file__)}"):
            take_lease(engine._root.path)


def test_a_lease_that_this_process_dropped_is_not_waited_for(address: str) -> None:
    root = place.of(address, ObjectStore(retries=2, deadline_seconds=10, lease_seconds=3000))
    take_lease(root)
    take_lease(root).release()


def test_a_lease_that_another_thread_is_taking_is_not_taken_over(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = place.of(address, ObjectStore(lease_seconds=3000))
    swap, refused = ObjectPath.swap, []

    def swap_and_try(path: ObjectPath, *args: Any, **options: Any) -> bytes | None:
        monkeypatch.setattr(ObjectPath, "swap", swap)
        generation = swap(path, *args, **options)
        # The claim is stored, and the lease is not known yet.
        with pytest.raises(RootBusy, match=f"opened at {re.escape(__file__)}"):
            take_lease(root)
        refused.append(generation)
        return generation

    monkeypatch.setattr(ObjectPath, "swap", swap_and_try)
    lease = take_lease(root)
    assert len(refused) == 1
    lease.check()
    lease.release()


def test_a_lease_that_another_thread_is_giving_back_is_waited_for(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = place.of(address, ObjectStore(lease_seconds=3000))
    lease = take_lease(root)
    swap, wait_until_free = ObjectPath.swap, ObjectLease._wait_until_free
    has_looked = threading.Event()
    taker = ThreadPoolExecutor(1)
    taken: list[Future[Any]] = []

    class Released(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            has_looked.set()
            return super().wait(240)

    released = lease.holding.released = Released()

    def look(lease: ObjectLease) -> tuple[bytes, int]:
        found = wait_until_free(lease)
        # Nothing is left to wait for if the opener has waited for the release.
        has_looked.set()
        assert threading.Event.wait(released, 240)
        return found

    def look_and_swap(path: ObjectPath, *args: Any, **options: Any) -> bytes | None:
        monkeypatch.setattr(ObjectPath, "swap", swap)
        taken.append(taker.submit(take_lease, root))
        assert has_looked.wait(240)
        return swap(path, *args, **options)

    monkeypatch.setattr(ObjectPath, "swap", look_and_swap)
    monkeypatch.setattr(ObjectLease, "_wait_until_free", look)
    lease.release()
    taken[0].result(240).release()
    taker.shutdown()


@pytest.mark.parametrize("kind", ["lost", "after 500", "dropped", "503"])
def test_a_lease_is_kept_through_a_fault_of_its_renewal(
    address: str, s3_server: S3, kind: str
) -> None:
    root = place.of(address, STORAGE)
    lease = take_lease(root)
    assert isinstance(lease, ObjectLease)
    with s3_server.failing(Fault(kind, "/control/", times=FOREVER, every=2)):
        for _ in range(3):
            lease.renew()
    assert lease.seconds_left() > 0
    lease.release()
    assert b'"released":true' in (root / layout.CONTROL / "zarr.json").read_bytes()


def test_a_writer_that_cannot_renew_stops_committing_before_another_may_begin(
    address: str, s3_server: S3, clock: ShiftedClock
) -> None:
    root = place.of(address, ObjectStore(retries=0, lease_seconds=LEASE_SECONDS))
    lease = take_lease(root)
    assert isinstance(lease, ObjectLease)
    with s3_server.failing(Fault("500", "/control/", times=FOREVER)):
        clock.advance(LEASE_SECONDS)
        with pytest.raises(StorageFailed, match="could not be renewed"):
            lease.check()
    assert lease.seconds_left() > 0  # nobody took it meanwhile
    lease.release()


# --- a listing that lags behind -------------------------------------------------------------------


def test_a_listing_without_the_newest_step_hides_nothing(address: str, s3_server: S3) -> None:
    run = Run(address)
    for _ in range(3):
        run.save()
    run.engine.close()
    with s3_server.failing(
        Fault("stale", "", "LIST", times=FOREVER, hidden=r"c000000000[12]/|s000000000[12]-")
    ):
        reader = deltacheck.open(address, storage=STORAGE)
        assert reader.steps() == [1, 2, 3]
        assert reader.restore()["step"] == 3
        engine = Engine(address, storage=STORAGE)
        engine.restore()
        engine.save(4, run.state).result(240)
        engine.close()
    assert deltacheck.open(address, storage=STORAGE).steps() == [1, 2, 3, 4]


def test_a_step_that_was_read_once_is_not_lost_by_a_listing(
    address: str, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "AHEAD", 0)
    run = Run(address)
    for _ in range(3):
        run.save()
    reader = deltacheck.open(address, storage=STORAGE)
    assert reader.steps() == [1, 2, 3]
    with s3_server.failing(Fault("stale", "", "LIST", times=FOREVER, hidden=r"c000000000\d/")):
        assert reader.steps() == [1, 2, 3]
        collect.delete_checkpoint(open_root(address, storage=STORAGE), 1)
        assert reader.steps() == [1, 3]
    run.engine.close()


def test_nothing_is_deleted_because_one_listing_lacks_a_manifest(
    address: str, s3_server: S3
) -> None:
    run = Run(address)
    run.save()
    engine = run.engine
    for _ in range(2):
        engine._saver.chains.drop()
        run.save()
    engine.restore(1)  # the newest step alone stands on what only the oldest has besides it
    engine.save(4, run.saved[1]).result(240)
    collect.delete_checkpoint(engine._root, 0)
    engine.close()
    with s3_server.failing(Fault("stale", "", "LIST", times=FOREVER, hidden=r"c0000000003/")):
        root = open_root(address, storage=STORAGE)
        # Behind a gap of failed saves, not even asking by name finds it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_storage, "AHEAD", 0)
            found = collect.collect(root, grace_seconds=0)
        assert found.removed == ()
    assert collect.collect(open_root(address, storage=STORAGE), grace_seconds=0).removed == ()
    assert deltacheck.open(address, storage=STORAGE).verify(deep=True) == []


# --- the rest of what a root does -----------------------------------------------------------------


def test_segments_that_no_step_needs_go_at_the_second_collection(address: str) -> None:
    run = Run(address, keep=Keep(last=2), options=SaveOptions(grace_seconds=0))
    for _ in range(5):
        run.state["large"] = torch.randn(300, 260)
        run.save()
    run.engine.close()
    assert deltacheck.open(address, storage=STORAGE).steps() == [4, 5]
    root = open_root(address, storage=STORAGE)
    collect.collect(root, grace_seconds=0)
    collect.collect(root, grace_seconds=0)
    needed = {ref.id for step in (4, 5) for ref in root.manifest(step).segments}
    assert set(root.store.segment_ids()) == needed
    run.check()


@pytest.mark.parametrize("stop", range(4))
def test_a_collection_that_dies_at_any_request_leaves_every_step_readable(
    address: str, s3_server: S3, stop: int
) -> None:
    run = Run(address)
    for _ in range(3):
        run.engine._saver.chains.drop()
        run.save()
    run.engine.close()
    root = open_root(address, storage=STORAGE)
    collect.collect(root, grace_seconds=0)
    with s3_server.failing(Fault("500", "", "DELETE", times=FOREVER, skip=stop)):
        try:
            collect.delete_checkpoint(root, 0)
            collect.collect(root, grace_seconds=0)
            collect.collect(root, grace_seconds=0)
        except StorageFailed:
            pass
    reader = deltacheck.open(address, storage=STORAGE)
    assert reader.steps() == ([1, 2, 3] if stop == 0 else [2, 3])
    assert reader.verify(deep=True) == []
    for _ in range(2):
        collect.collect(open_root(address, storage=STORAGE), grace_seconds=0)
    assert len(open_root(address, storage=STORAGE).store.segment_ids()) == (3 if stop == 0 else 2)


def test_every_command_takes_an_address(address: str, tmp_path: Any) -> None:
    run = Run(address)
    for _ in range(3):
        run.save()
    run.engine.close()
    out = str(tmp_path / "step.npz")
    speeds = [f"--speed={name}=1e9" for name in ("write", "read", "encode", "apply", "copy")]
    for words in (
        ["ls"],
        ["show", "3"],
        ["log"],
        ["diff", "2", "3"],
        ["verify", "--deep"],
        ["repair"],
        ["report", "--out", str(tmp_path / "report.html")],
        ["plan", "--step-seconds", "1", *speeds],
        ["plan", "--policy", "exact"],
        ["export", "3", "--to", "npz", "--out", out],
        ["prune", "--whole"],
        ["prune", "--grace", "0"],
    ):
        assert main([words[0], address, *words[1:]]) == 0, words
    run.check()
    assert np.array_equal(np.load(out)["large"], run.saved[3]["large"].numpy())
    assert main(["ls", "ftp://bucket/run"]) == 2
    assert main(["ls", f"{address}/nothing"]) == 3


def test_files_are_imported_into_an_object_store(
    address: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"w": torch.randn(300, 260)}
    torch.save(weights, tmp_path / "model_3.pt")
    assert main(["import", address, str(tmp_path / "model_3.pt")]) == 0
    assert main(["import", address, str(tmp_path / "model_3.pt")]) == 2
    reader = deltacheck.open(address, storage=STORAGE)
    assert reader.steps() == [3]
    assert np.array_equal(reader.restore(3)["w"], weights["w"].numpy())
    # A folder of steps becomes the root of a manager, which commits by renaming.
    (tmp_path / "steps" / "1").mkdir(parents=True)
    torch.save(weights, tmp_path / "steps" / "1" / "x.pt")
    capsys.readouterr()
    assert main(["import", f"{address}-other", str(tmp_path / "steps")]) == 5
    assert f"needs a local directory, not {address}-other" in capsys.readouterr().err


def test_steps_are_tagged_pruned_and_followed_on_an_object_store(address: str) -> None:
    run = Run(address)
    follower = deltacheck.follow(address, storage=STORAGE)
    for _ in range(4):
        run.save()
        update = follower.poll()
        assert update is not None
        assert update.step == run.step
    run.engine.close()
    for words, steps in (
        (["tag", address, "1", "first"], [1, 2, 3, 4]),
        (["prune", address, "--keep-last", "1"], [1, 4]),
        (["show", address, "@first"], [1, 4]),
        (["tag", address, "--delete", "first"], [1, 4]),
        (["prune", address, "1"], [4]),
    ):
        assert main(words) == 0, words
        assert deltacheck.open(address, storage=STORAGE).steps() == steps
    run.check(4)
    assert main(["branch", address, "4", "--to", f"{address}-other"]) == 0
    assert deltacheck.open(f"{address}-other").verify(deep=True) == []


def test_a_store_that_fails_is_no_reason_to_fall_back_to_an_older_step(
    run: Run, s3_server: S3
) -> None:
    reader = deltacheck.open(run.address, storage=STORAGE)
    assert len(reader.steps()) > 1
    for where in ("data", "table", "manifest"):
        fault = Fault("503", OBJECTS[where], "GET", times=FOREVER)
        with s3_server.failing(fault), pytest.raises(StorageFailed):
            reader.restore(fallback=True)


def test_a_collection_ends_although_a_listing_goes_on_showing_what_it_deleted(
    address: str, s3_server: S3
) -> None:
    run = Run(address, keep=Keep(last=1), options=SaveOptions(grace_seconds=0))
    for _ in range(2):
        run.engine._saver.chains.drop()
        run.save()
    run.engine.close()
    root = open_root(address, storage=STORAGE)
    collect.collect(root, grace_seconds=0)
    # Deletions that the store says yes to and does not carry out, as seen through such a listing.
    with s3_server.failing(Fault("ignored", "/segments/", "DELETE", times=FOREVER)):
        collect.collect(root, grace_seconds=0)
    run.check()


def test_a_run_that_is_read_back_compacted_and_reclaimed_stays_whole(address: str) -> None:
    run = Run(address, keep=Keep(last=3), options=SaveOptions(verify="commit", grace_seconds=0))
    for _ in range(6):
        run.save()
    run.engine.close()
    assert main(["prune", address, "--compact", "--grace", "0"]) == 0
    assert main(["prune", address, "--grace", "0"]) == 0
    reader = deltacheck.open(address, storage=STORAGE)
    assert {4, 5, 6} <= set(reader.steps())
    assert reader.verify(deep=True) == []
    run.check()


def test_deltas_are_merged_behind_a_run_and_written_whole_on_an_object_store(address: str) -> None:
    run = Run(address, policy=Policy.exact(max_chain_depth=4))
    compactor = run.engine._saver.chains.compactor
    assert compactor is not None
    for _ in range(8):
        run.save()
        compactor.wait(240)
    run.engine.close()
    reader = deltacheck.open(address, storage=STORAGE)
    assert any(reader.manifest(step).merged_bytes for step in reader.steps())
    assert main(["prune", address, "--whole"]) == 0
    reader = deltacheck.open(address, storage=STORAGE)
    assert reader.verify(deep=True) == []
    run.check()


def test_a_root_is_loaded_as_the_tensors_of_either_framework(address: str) -> None:
    from deltacheck.backends import orbax
    from deltacheck.backends import torch as ours

    run = Run(address)
    step = run.save()
    run.engine.close()
    assert torch.equal(ours.load(address, storage=STORAGE)["large"], run.saved[step]["large"])
    assert np.array_equal(
        orbax.load(address, storage=STORAGE)["large"], run.saved[step]["large"].numpy()
    )


def test_a_file_in_the_place_of_torch_save_is_local() -> None:
    from deltacheck.backends import torch as ours

    with pytest.raises(StorageFailed, match="needs a local directory"):
        ours.save({"w": torch.zeros(3)}, "s3://bucket/model.pt")


def test_an_orbax_manager_says_that_it_needs_a_directory() -> None:
    from deltacheck.backends.orbax import manager

    with pytest.raises(StorageFailed, match=r"needs a local directory, not s3://bucket/x.*Engine"):
        manager("s3://bucket/x")


def test_a_copy_of_a_managers_root_is_not_taken_for_an_empty_root(
    address: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from deltacheck.backends import orbax

    with orbax.manager(tmp_path / "run") as manager:
        manager.save(0, args=orbax.DeltaSaveArgs({"x": np.ones(3)}))
        manager.wait_until_finished()
    path = place.of(address)
    for file in filter(Path.is_file, (tmp_path / "run").rglob("*")):
        (path / str(file.relative_to(tmp_path / "run"))).write_bytes(file.read_bytes())
    for command in ("ls", "verify", "repair", "prune"):
        assert main([command, address]) == 5
        assert f"needs a local directory, not {address}" in capsys.readouterr().err


def test_plain_zarr_reads_what_lies_on_the_store(address: str, tmp_path: Any) -> None:
    import zarr

    run = Run(address)
    run.save()
    run.engine.close()
    root = place.of(address, STORAGE)
    assert isinstance(root, ObjectPath)
    for key in root.keys():  # noqa: SIM118 - a path, not a mapping
        file = tmp_path / key.removeprefix(f"{root.key}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((root / key.removeprefix(f"{root.key}/")).read_bytes())
    (segment,) = open_root(address, storage=STORAGE).manifest().segments
    group = zarr.open_group(tmp_path / "segments" / segment.id, mode="r")
    assert np.array_equal(group["leaves/large"][...], run.saved[1]["large"].numpy())
    # A copy of a root is a root.
    assert deltacheck.open(tmp_path).verify(deep=True) == []


# --- addresses and what is asked of TensorStore ---------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        "s3://",
        "s3:///x",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "s3://b",
        "ftp://bucket/a",
        "s3://bucket/a\nb",
        "az://container/a\\b",
        "gs://-x/y",
    ],
)
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    scheme = wrong.partition(":")[0].replace("ftp", "s3")
    with pytest.raises(ValueError, match=f"{scheme}://BUCKET/PREFIX"):
        place.of(wrong)


def test_an_address_that_became_a_path_is_refused() -> None:
    from pathlib import Path

    with pytest.raises(ValueError, match="lost a slash"):
        deltacheck.open(Path("s3://bucket/run"))


def test_a_place_is_named_by_its_parts() -> None:
    root = place.of("gs://bucket/a/b/")
    assert isinstance(root, ObjectPath)
    assert str(root / "c") == "gs://bucket/a/b/c"
    assert (root / "c").parent == root
    assert (root / "c").name == "c"
    assert [str(p) for p in root.parents] == ["gs://bucket/a", "gs://bucket"]
    assert sorted([root / "b", root / "a"]) == [root / "a", root / "b"]


def test_google_storage_is_asked_for_as_tensorstore_wants_it() -> None:
    import tensorstore as ts

    root = place.of("gs://bucket/run", ObjectStore(retries=3, concurrency=5))
    assert isinstance(root, ObjectPath)
    assert root.spec == {"driver": "gcs", "bucket": "bucket", "path": "run/"}
    assert root.store.resources("gs") == {
        "gcs_request_retries": {"max_retries": 3, "initial_delay": "5ms", "max_delay": "8s"},
        "gcs_request_concurrency": {"limit": 5},
    }
    assert ts.KvStore.Spec(root.spec).to_json() == root.spec
    assert root.context.spec.to_json() == root.store.resources("gs")


def test_what_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    plain = ObjectStore()
    assert plain.spec("s3", "b") == {
        "driver": "s3",
        "bucket": "b",
        "path": "",
        "use_conditional_write": True,
    }
    assert plain.resources("s3")["aws_credentials"] == {"type": "default"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one/")
    assert plain.spec("s3", "b")["endpoint"] == "http://one"
    assert plain.spec("s3", "b")["aws_region"] == "us-east-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert plain.spec("s3", "b")["endpoint"] == "http://two"
    assert plain.spec("s3", "b")["aws_region"] == "eu-west-1"
    assert plain.resources("s3")["aws_credentials"] == {"type": "environment"}
    given = ObjectStore(endpoint="http://three", region="x", credentials="anonymous")
    assert given.spec("s3", "b")["endpoint"] == "http://three"
    assert given.resources("s3")["aws_credentials"] == {"type": "anonymous"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": -1},
        {"concurrency": 0},
        {"deadline_seconds": 0},
        {"lease_seconds": -1.0},
        {"credentials": "mine"},
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ObjectStore(**wrong)


def test_an_endpoint_without_a_scheme_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="endpoint 'host:9000' must begin with https://"):
        deltacheck.open(address, storage=ObjectStore(endpoint="host:9000"))


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_refusal_for_lack_of_access_names_the_credentials(scheme: str) -> None:
    answer = Future[None]()
    answer.set_exception(ValueError("PERMISSION_DENIED: Unknown [http_response_code='403']"))
    path = ObjectPath(scheme, "bucket", "run", ObjectStore())
    with pytest.raises(StorageFailed, match="Check the access to the bucket and"):
        path._await(answer, "read")


def test_a_root_can_be_read_by_its_store_alone(run: Run) -> None:
    root = Root(place.of(run.address, STORAGE), Store(place.of(run.address, STORAGE)))
    assert root.next_seq() == max(ref.seq for ref in root.checkpoints()) + 1


def test_a_commit_that_arrives_after_the_end_of_the_lease_is_not_acknowledged(
    address: str,
) -> None:
    """Found by the model of the lease (``make model-check``)."""
    run = Run(address)
    run.save()
    root = open_root(address, storage=STORAGE)
    manifest = msgspec.structs.replace(root.manifest(), seq=7, nonce=secrets.token_hex(16))
    looks: list[bool] = []

    def taken_over() -> None:
        looks.append(True)
        raise RootBusy("another writer has the root")

    with pytest.raises(RootBusy, match="another writer"):
        commit(root.path, manifest, still_ours=taken_over)
    assert looks == [True]
    # It stays: the other writer may have built on it.
    assert (root.path / layout.CHECKPOINTS / layout.checkpoint_id(7) / "zarr.json").is_file()
    run.engine.close()
