"""Receipts: a save is read back from disk and compared with the state as it was captured, and a
fault on the way never passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.save.handle import progress_of
from deltacheck.store.segment import SegmentWriter
from tests.support.states import assert_same, nudge, training_state


def save_twice(root: Path, **options: Any) -> tuple[Engine, Any, dict[str, Any]]:
    """A keyframe, whole, then whatever the test has prepared for the delta after it."""
    state = training_state()
    engine = Engine(root, **options)
    engine.save(0, state).wait(timeout=240)
    nudge(state)
    return engine, engine.save(1, state), state


def test_a_receipt_says_that_what_a_save_wrote_was_rebuilt(tmp_path: Path) -> None:
    engine, handle, state = save_twice(tmp_path, options=SaveOptions(verify="commit"))
    handle.wait(timeout=240)
    assert handle.receipt.step == 1
    changed = sum(leaf.raw_bytes for leaf in handle.report.leaves if leaf.changed)
    assert handle.receipt.raw_bytes == changed
    engine.close()
    assert_same(Engine(tmp_path).restore(), state)


def test_without_verify_there_is_no_receipt(tmp_path: Path) -> None:
    engine, handle, _ = save_twice(tmp_path)
    handle.wait(timeout=240)
    assert handle.receipt is None
    engine.close()
    with pytest.raises(ValueError, match="verify must be one of none, commit"):
        Engine(tmp_path, options=SaveOptions(verify="always"))


def flipped(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy[copy.size // 2] ^= 4
    return copy


def between_encode_and_write(monkeypatch: pytest.MonkeyPatch, saves: list[int]) -> None:
    original = SegmentWriter.put_part

    def put_part(self: SegmentWriter, index: Any, streams: Any) -> Any:
        if saves:
            streams = {
                name: [flipped(piece) if piece.size else piece for piece in of]
                for name, of in streams.items()
            }
        return original(self, index, streams)

    monkeypatch.setattr(SegmentWriter, "put_part", put_part)


def between_write_and_commit(monkeypatch: pytest.MonkeyPatch, saves: list[int]) -> None:
    original = SegmentWriter.finish

    def finish(self: SegmentWriter, *args: Any) -> Any:
        ref = original(self, *args)
        if saves:
            file = max(
                (p for p in self.path.rglob("c*") if p.is_file()), key=lambda p: p.stat().st_size
            )
            file.write_bytes(flipped(np.fromfile(file, np.uint8)).tobytes())
        return ref

    monkeypatch.setattr(SegmentWriter, "finish", finish)


def in_the_encoder(monkeypatch: pytest.MonkeyPatch, saves: list[int]) -> None:
    """The shadow and the digests made of it agree with what is written, and not with the training's
    state.
    """
    original = TorchCodec.encode

    def encode(self: TorchCodec, current: Any, *arguments: Any, **options: Any) -> Any:
        source = flipped(current) if saves and current.size > 1000 else current
        return original(self, source, *arguments, **options)

    monkeypatch.setattr(TorchCodec, "encode", encode)


FAULTS = (between_encode_and_write, between_write_and_commit, in_the_encoder)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_flip_on_the_way_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    saves: list[int] = []
    fault(monkeypatch, saves)
    state = training_state()
    with Engine(tmp_path, options=SaveOptions(verify="commit")) as engine:
        engine.save(0, state).result(240)
        saves.append(1)
        nudge(state)
        with pytest.raises(errors.SaveFailed, match=r"step 1.*leaf '"):
            engine.save(1, state).result(60)
        saves.clear()
        assert engine.steps() == [0]
        engine.save(2, state).result(240)  # whole leaves
        assert_same(engine.restore(2), state)


def test_without_verify_the_encoders_fault_would_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the live state is needed: all data on disk agrees with itself."""
    saves: list[int] = []
    in_the_encoder(monkeypatch, saves)
    state = training_state()
    with Engine(tmp_path) as engine:
        engine.save(0, state).result(240)
        saves.append(1)
        nudge(state)
        engine.save(1, state).result(240)
    assert deltacheck.open(tmp_path).verify(deep=True) == []
    assert not torch.equal(
        Engine(tmp_path).restore(1)["model"]["embed.weight"], state["model"]["embed.weight"]
    )


def test_a_manager_reads_back_what_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("orbax.checkpoint")
    from deltacheck.backends import orbax as backend
    from deltacheck.backends.orbax.manager import handler_of

    saves: list[int] = []
    between_write_and_commit(monkeypatch, saves)
    value = np.arange(300_000, dtype=np.float32)
    with backend.manager(tmp_path, save_options=SaveOptions(verify="commit")) as manager:
        manager.save(0, args=backend.DeltaSaveArgs({"w": value}))
        manager.wait_until_finished()
        saves.append(1)
        manager.save(1, args=backend.DeltaSaveArgs({"w": value * 2}))
        (item,) = handler_of(manager)._items.values()
        progress_of(item._last.handle).wait_for_end(60)
        with pytest.raises(
            errors.DeltacheckError, match="leaf 'w'"
        ):  # by Orbax's own wait, or by our next save
            _ = (
                manager.wait_until_finished(),
                manager.save(2, args=backend.DeltaSaveArgs({"w": value * 3})),
            )
        saves.clear()
        assert manager.all_steps() == [0]
        manager.save(3, args=backend.DeltaSaveArgs({"w": value * 3}))
        manager.wait_until_finished()
    np.testing.assert_array_equal(deltacheck.open(tmp_path).restore(3)["w"], value * 3)
