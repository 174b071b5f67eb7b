"""Segments removed by another program under a live writer: whole leaves are written, the loss is
reported, and every acknowledged step restores.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.save import pipeline
from deltacheck.save.chains.base_check import BaseCheck
from deltacheck.save.chains.chain_state import ChainState
from deltacheck.store.roots.opening import create_store, open_root
from deltacheck.store.roots.store import Store
from tests.support.states import assert_same
from tests.support.waiting import HANG_SECONDS


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save waits for its look, however slow the machine is."""
    monkeypatch.setattr(pipeline, "_LOOK_SECONDS", HANG_SECONDS)


def oldest(root: Path) -> None:
    shutil.rmtree(min((root / "segments").glob("s*")))


def tables(root: Path) -> None:
    for table in (root / "segments").glob("s*/zarr.json"):
        table.unlink()


def everything(root: Path) -> None:
    shutil.rmtree(root / "segments")


def data_of_the_oldest(root: Path) -> None:
    """Remove the data files and leave every document, as a purge by age of access may do."""
    for path in min((root / "segments").glob("s*")).rglob("*"):
        if path.is_file() and path.name != "zarr.json":
            path.unlink()


def end_of_a_data_file(root: Path) -> None:
    path = max(min((root / "segments").glob("s*")).rglob("c*"), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size - 100)


PURGES = [oldest, tables, everything, data_of_the_oldest, end_of_a_data_file]


@pytest.mark.parametrize("purge", PURGES)
def test_an_engine_writes_whole_leaves_and_says_so(
    tmp_path: Path, purge: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    weights, frozen = torch.randn(300, 300), torch.randn(300, 300)
    saved = {}
    with Engine(tmp_path / "run") as engine:
        for step in range(6):
            if step == 3:
                purge(engine.root)
            weights[step] += 1.0
            saved[step] = {"weights": weights.clone(), "frozen": frozen.clone()}
            with caplog.at_level(logging.WARNING, "deltacheck"):
                report = engine.save(step, {"weights": weights, "frozen": frozen}).result(240)
            is_whole = {leaf.path: leaf.kind.value for leaf in report.leaves}
            if step == 3:
                assert set(is_whole.values()) == {"keyframe"}
                assert "are gone" in report.note
                assert "are gone" in caplog.text
            elif step > 3:
                assert is_whole == {"weights": "delta", "frozen": "unchanged"}
                assert report.note == ""
    for step in (3, 4, 5):
        assert_same(deltacheck.open(tmp_path / "run").restore(step), _numpy(saved[step]))


def _numpy(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {path: value.numpy() for path, value in state.items()}


def test_a_save_whose_base_goes_while_it_is_written_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.randn(300, 300)
    engine = Engine(tmp_path / "run")
    engine.save(0, {"weights": weights}).result(240)
    durable = ChainState.durable

    def purged(self: ChainState, job: Any, ref: Any) -> Any:
        oldest(tmp_path / "run")
        monkeypatch.setattr(ChainState, "durable", durable)
        return durable(self, job, ref)

    monkeypatch.setattr(ChainState, "durable", purged)
    weights[0] += 1
    with pytest.raises(errors.SaveFailed, match="are gone"):
        engine.save(1, {"weights": weights}).result(60)
    report = engine.save(2, {"weights": weights}).result(240)
    assert [leaf.kind.value for leaf in report.leaves] == ["keyframe"]
    assert torch.equal(engine.restore(2)["weights"], weights)
    engine.close()
    assert deltacheck.open(tmp_path / "run").steps() == [0, 2]


def test_data_files_of_a_long_chain_are_looked_at_in_turn(tmp_path: Path) -> None:
    """A save that has no time for more looks at the oldest segment and at one of the others."""
    check, store = BaseCheck(), create_store(tmp_path / "run")
    weights = torch.randn(300, 300)
    with Engine(tmp_path / "run") as engine:
        for step in range(5):
            weights[step] += 1
            engine.save(step, {"weights": weights}).result(240)
    names = store.segment_ids()
    assert len(names) == 5
    for _ in names:
        assert check.lost(store, names) == []
    victim = max((tmp_path / "run" / "segments" / names[3]).rglob("c*"), key=_size)
    os.truncate(victim, _size(victim) - 1)
    assert {name for _ in names for name in check.lost(store, names)} == {names[3]}
    assert check.lost(store, names, seconds=60) == [names[3]]
    # A segment that this process has written has the size that it was written with.
    fresh = BaseCheck()
    for ref in open_root(tmp_path / "run").manifest().segments:
        fresh.wrote(ref)
    assert fresh.lost(store, names, seconds=60) == [names[3]]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def test_a_save_does_not_wait_for_a_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.randn(100)
    with Engine(tmp_path / "run") as engine:
        engine.save(0, {"weights": weights}).result(240)
        monkeypatch.setattr(pipeline, "_LOOK_SECONDS", 0.05)
        original = Store.missing_segments
        go = threading.Event()

        def hanging(self: Store, names: Any) -> list[str]:
            assert go.wait(HANG_SECONDS)
            return original(self, names)

        monkeypatch.setattr(Store, "missing_segments", hanging)
        handle = engine.save(1, {"weights": weights})
        go.set()
        handle.result(240)


@pytest.mark.parametrize("purge", PURGES)
def test_an_orbax_manager_writes_whole_leaves(
    tmp_path: Path, purge: Callable[[Path], None]
) -> None:
    pytest.importorskip("orbax.checkpoint")
    import numpy as np

    from deltacheck.backends import orbax as backend

    weights = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    saved = {}
    with backend.manager(tmp_path / "run") as manager:
        for step in range(5):
            if step == 2:
                purge(tmp_path / "run" / "deltacheck")
            weights[step] += 1
            saved[step] = weights.copy()
            manager.save(step, args=backend.DeltaSaveArgs({"weights": weights}))
            manager.wait_until_finished()
    for step in (2, 3, 4):
        restored = deltacheck.open(tmp_path / "run").restore(step)
        assert np.array_equal(restored["weights"], saved[step])
