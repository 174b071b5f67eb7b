"""Parts of the Orbax handler for several processes that one process can test: what it says to the
others, and its tiles. See ``tests/ranks``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from deltacheck.backends.orbax.group import collective
from deltacheck.backends.orbax.group.coordination import StoreChannel
from deltacheck.backends.orbax.state import leaves, pieces
from deltacheck.errors import RankFailed
from deltacheck.leaf import tree
from deltacheck.save.job.source import itself
from deltacheck.save.ranks.channel import consult
from deltacheck.save.ranks.rank_setup import RankSetup
from deltacheck.save.save_options import SaveOptions, Settings
from tests.contracts.ranks import Threads
from tests.support.ranked_run import at_once
from tests.support.waiting import HANG_SECONDS


class Store:
    """An in-memory coordination service, for threads that act as processes."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.longest = 0
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.kept, "keys are used once"
            self.kept[key] = value
            self.longest = max(self.longest, len(value))
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.kept, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.kept[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.kept = {
                name: value
                for name, value in self.kept.items()
                if name != key and not name.startswith(f"{key}/")
            }


def in_each(size: int, store: Any, talk: Callable[[StoreChannel], Any]) -> list[Any]:
    channels = [
        StoreChannel("deltacheck/x/0/begin", rank, size, store, HANG_SECONDS)
        for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(talk, channels))


def test_messages_longer_than_a_part_come_whole_and_nothing_stays_in_the_store() -> None:
    store, sizes = Store(), [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20]
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]

    def talk(channel: StoreChannel) -> list[bytes]:
        return [consult(channel, one, lambda got: [b"".join(got), *got[:-1]]) for one in sent]

    first, second, third = in_each(3, store, talk)
    assert first == [one * 3 for one in sent]
    assert second == third == sent
    assert store.longest <= (1 << 20) + 4
    assert store.kept == {}


def test_a_process_that_comes_late_learns_that_it_was_given_up_and_takes_part_again() -> None:
    store, given_up = Store(), threading.Event()

    def talk(channel: StoreChannel) -> list[str]:
        if channel.rank == 1:
            assert given_up.wait(HANG_SECONDS)
        else:
            channel._timeout_seconds = 0.05  # of this exchange alone
        with pytest.raises(RankFailed) as info:
            consult(channel, b"", lambda got: [b"", b""])
        channel._timeout_seconds = HANG_SECONDS
        given_up.set()
        return [str(info.value), consult(channel, b"again", lambda got: [got[1], got[0]]).decode()]

    for said, again in in_each(2, store, talk):
        assert said.startswith("rank 1: rank 1 was lost, or did not answer in time")
        assert again == "again"
    assert store.kept == {}


def test_a_process_whose_coordinator_is_gone_says_so_at_once() -> None:
    calls: list[str] = []

    class Gone:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: Any) -> None:
                calls.append(name)
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset by peer")

            return fail

    with pytest.raises(RankFailed, match=r"rank 0 was lost.*Connection reset"):
        consult(StoreChannel("x", 1, 2, Gone(), 600.0), b"", lambda got: [])
    assert len(calls) == len(set(calls))  # nothing is tried again


def test_tiles_are_cut_from_the_shards_that_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    state = {
        "cut": jax.device_put(values, NamedSharding(mesh, P("x", "y"))),
        "alike": jax.device_put(values, NamedSharding(mesh, P(None, "y"))),
        "keys": jax.device_put(jax.random.split(jax.random.key(3), 4), NamedSharding(mesh, P("x"))),
        "host": values[:, 0],
    }
    flat = tree.flatten(state, leaves.describe, leaves.expand)
    held = {
        path: [tuple((s.start, s.stop) for s in box) for box in one.boxes]
        for path, one in pieces.held(flat).items()
    }
    assert held["cut"] == [((0, 4), (0, 3)), ((0, 4), (3, 6)), ((4, 8), (0, 3)), ((4, 8), (3, 6))]
    assert held["alike"] == [
        ((0, 8), (0, 3)),
        ((0, 8), (3, 6)),
    ]  # each once, whichever devices have it
    assert held["keys"] == [((0, 2), (0, 2)), ((2, 4), (0, 2))]
    assert held["host"] == [((0, 8),)]
    own = {
        "cut": (((0, 2, 4, 8), (0, 3, 6)), [1, 3, 4]),
        "alike": (((0, 5, 8), (0, 3, 6)), [2]),
        "keys": (((0, 1, 2, 4), (0, 2)), [1, 2]),
        "host": (None, [0]),
    }
    data = np.asarray(jax.random.key_data(state["keys"]))
    expected = {
        "alike%@5,0": values[5:8, :3],
        "cut%@0,3": values[:2, 3:],
        "cut%@2,3": values[2:4, 3:],
        "cut%@4,0": values[4:, :3],
        "host": values[:, 0],
        "keys%@1,0": data[1:2],
        "keys%@2,0": data[2:],
    }

    def copied(values: Any) -> Any:
        return {name: partial(itself, part) for name, part in values.items()}

    for copier in (None, copied):
        found = pieces.sources(flat, own, copier)
        assert list(found) == list(expected)
        for name, part in expected.items():
            assert found[name].spec.shape == part.shape
            assert leaves.bytes_of(found[name].current()).tobytes() == part.tobytes(), name
            assert not found[name].lazy or copier is not None
    whole = pieces.sources(flat, {"cut": (((0, 4, 8), (0, 3, 6)), [2])}, copied)["cut%@4,0"]
    assert whole.lazy  # a shard, as it lies in host memory
    assert leaves.bytes_of(whole.current()).tobytes() == values[4:, :3].tobytes()
    # The processor stands in for an accelerator.
    monkeypatch.setattr(leaves, "is_on_accelerators", lambda value: isinstance(value, jax.Array))
    monkeypatch.setattr(leaves, "is_viewable", lambda value: False)
    found = pieces.sources(flat, own, copied)
    assert {name for name in found if found[name].is_own} == expected.keys() - {"host"}
    for name, part in expected.items():
        assert leaves.bytes_of(found[name].current()).tobytes() == part.tobytes(), name


@pytest.mark.parametrize("difference", ["", "option", "folder"])
def test_processes_compare_options_and_folders_before_their_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    channels = dict(enumerate(Threads(2).ranks()))
    monkeypatch.setattr(collective.coordination, "join", lambda name, seconds: channels[int(name)])
    taken: list[int] = []

    def take() -> str:
        # The probe is gone before the store is made.
        assert not list(tmp_path.rglob("probe-*"))
        taken.append(1)
        return "first"

    def open_group(rank: int) -> object:
        store = tmp_path / (f"of {rank}" if difference == "folder" else "run") / "deltacheck"
        options = SaveOptions(verify="commit" if rank and difference == "option" else "none")
        setup = RankSetup.of(store, Settings.of(None, None, options))
        group = collective.RankGroup(str(rank), 60.0)
        return group.open_together(store, setup, take, lambda: "other", pytest.fail)

    results = at_once(2, open_group)
    if not difference:
        assert results == ["first", "other"]
        return
    for result in results:
        assert isinstance(result, RankFailed)
        if difference == "option":
            assert "verify='commit' instead of 'none'" in str(result)
        else:
            assert f"{tmp_path}/of 0/deltacheck" in str(result)
            assert f"{tmp_path}/of 1/deltacheck" in str(result)
    assert not taken
    assert list(tmp_path.iterdir()) == []
