"""An optimizer step that waits for a save copies the leaves that are not encoded yet."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltacheck import Policy, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.errors import SnapshotTorn
from deltacheck.leaf.spec import LeafSpec
from deltacheck.save.job.leaf_capture import LeafCapture
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.job.source import EarlyCopies, LeafSource, ViewedLeaf, itself
from deltacheck.save.treatment.lossy_save import read_together
from tests.support.segment_files import segment_files


def source_of(path: str, array: np.ndarray, **fields: Any) -> LeafSource:
    spec = LeafSpec(path, array.shape, "uint8", array.shape)
    return LeafSource(spec, partial(itself, array), **({"lazy": True, "is_view": True} | fields))


def test_leaves_are_copied_from_the_end_as_many_as_memory_allows() -> None:
    arrays = {name: np.full(100, number, np.uint8) for number, name in enumerate("abcd")}
    queue = deque(source_of(path, array) for path, array in arrays.items())
    copies = EarlyCopies(queue, 250)
    copies.make()
    for array in arrays.values():
        array[:] = 9
    assert [source.spec.path for source in queue] == ["a", "b"]
    taken = copies.take()
    assert [source.spec.path for source in taken] == ["c", "d"]
    assert [source.current().tolist() for source in taken] == [[2] * 100, [3] * 100]


def test_a_leaf_that_is_no_view_is_left_to_the_encoder() -> None:
    array = np.zeros(10, np.uint8)
    queue = deque([source_of("a", array), source_of("b", array, is_view=False)])
    copies = EarlyCopies(queue, 100)
    copies.make()
    assert len(queue) == 2
    assert not copies.take()


def test_a_copy_of_a_leaf_that_has_changed_is_an_error() -> None:
    def torn(content: object) -> None:
        raise SnapshotTorn("leaf 'a' was written to")

    copies = EarlyCopies(deque([source_of("a", np.zeros(10, np.uint8), check_content=torn)]), 100)
    copies.make()
    [source] = copies.take()
    with pytest.raises(SnapshotTorn, match="leaf 'a'"):
        source.current()


def test_a_leaf_whose_copy_is_interrupted_is_read_by_the_encoder() -> None:
    def interrupted() -> np.ndarray:
        raise KeyboardInterrupt

    spec = LeafSpec("a", (10,), "uint8", (10,))
    queue = deque([LeafSource(spec, interrupted, lazy=True, is_view=True)])
    copies = EarlyCopies(queue, 100)
    with pytest.raises(KeyboardInterrupt):
        copies.make()
    assert [source.spec.path for source in queue] == ["a"]
    assert not copies.take()


def test_leaves_that_are_read_for_another_are_copied_once() -> None:
    arrays = {name: np.full(100, number, np.uint8) for number, name in enumerate("abc")}
    viewed = {path: ViewedLeaf(source_of(path, array)) for path, array in arrays.items()}
    members = [viewed["a"].source(), viewed["b"].source()]
    both = read_together(
        members[0], lambda: np.concatenate([member.current() for member in members]), members
    )
    # There is room for three copies, not for four.
    copies = EarlyCopies(deque([viewed["c"].source(), both, members[1]]), 300)
    copies.make()
    for array in arrays.values():
        array[:] = 9
    assert [source.current().tolist() for source in copies.take()] == [
        [2] * 100,
        [0] * 100 + [1] * 100,
        [1] * 100,
    ]


def test_a_leaf_that_also_reads_what_is_no_view_is_left_to_the_encoder() -> None:
    view = ViewedLeaf(source_of("a", np.zeros(10, np.uint8))).source()
    other = source_of("b", np.zeros(10, np.uint8), is_view=False)
    copies = EarlyCopies(deque([read_together(view, view.current, [view, other])]), 100)
    copies.make()
    assert not copies.take()


def test_a_leaf_is_checked_where_it_was_read() -> None:
    """A copy was checked when it was made: later the training may write to the leaf."""
    array = np.zeros(10, np.uint8)

    def changed(content: np.ndarray) -> None:
        if content.any():
            raise SnapshotTorn("leaf 'a' was written to")

    def rechecked() -> None:
        changed(array)

    viewed = ViewedLeaf(source_of("a", array, check_content=changed, recheck=rechecked))
    source = viewed.source()
    source.check(source.current())
    array[:] = 1
    with pytest.raises(SnapshotTorn):
        source.check(source.current())
    array[:] = 0
    viewed.copy(np.empty(10, np.uint8))
    array[:] = 1
    content = source.current()
    source.check(content)
    assert not content.any()


def test_a_leaf_that_was_read_with_another_before_it_was_copied_is_checked_once() -> None:
    """Both moments are coded when the first is captured; then the training copies the second."""
    array = np.zeros(10, np.uint8)

    def changed(content: np.ndarray) -> None:
        if array.any():
            raise SnapshotTorn("leaf 'a' was written to")

    viewed = ViewedLeaf(source_of("a", array, check_content=changed))
    source = viewed.source()
    source.check(source.current())
    viewed.copy(np.empty(10, np.uint8))
    array[:] = 1
    source.check("its codes, made before the copy")


# --- whole saves ----------------------------------------------------------------------------------


def state_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()


class Held:
    """Holds the encoder in its first leaf of each save until a waiting thread has made copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[int] = []
        capture, hasten = LeafCapture.capture, SaveJob._hasten
        self._made = threading.Event()

        def held(capture_: LeafCapture, sources: deque[LeafSource]) -> None:
            if sources:
                first = deque([sources.popleft()])
                assert self._made.wait(240)
                capture(capture_, first)
            capture(capture_, sources)

        def hastened(job: SaveJob) -> None:
            before = len(job.lazy)
            hasten(job)
            self.copied.append(before - len(job.lazy))
            self._made.set()

        monkeypatch.setattr(LeafCapture, "capture", held)
        monkeypatch.setattr(SaveJob, "_hasten", hastened)

    def again(self) -> None:
        """Hold the next save, too."""
        self._made.clear()


def saved(root: Path, held: Held | None, policy: Policy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save two steps of a training, and return the second state and what is restored of it."""
    model, optimizer = state_of(0)
    with Engine(root, policy=policy) as engine:
        engine.guard(model)
        engine.guard(optimizer)
        for step in range(2):
            if held is not None:
                held.again()
            live = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected = {
                "model": {k: v.clone() for k, v in model.state_dict().items()},
                "optimizer": [
                    {k: v.clone() for k, v in s.items()}
                    for s in optimizer.state_dict()["state"].values()
                ],
            }
            handle = engine.save(step, live)
            train(model, optimizer)  # its hook waits, and may overwrite everything after it
            handle.result()
        return expected, engine.restore(1)


@pytest.mark.parametrize(
    "policy", [Policy.exact(), Policy.auto(moments="exact")], ids=["exact", "auto"]
)
def test_the_step_overwrites_the_state_at_once_and_the_save_has_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    saved(tmp_path / "plain", None, policy)
    with monkeypatch.context() as patch:
        held = Held(patch)
        expected, restored = saved(tmp_path / "held", held, policy)
    assert held.copied[-1] > 20
    for name, tensor in expected["model"].items():
        assert torch.equal(restored["model"][name], tensor), name
    for kept, live in zip(
        restored["optimizer"]["state"].values(), expected["optimizer"], strict=True
    ):
        for name, tensor in live.items():
            assert torch.equal(kept[name], tensor), name
    # The files do not depend on where a leaf was read.
    assert arrays_of(tmp_path / "held") == arrays_of(tmp_path / "plain")


@pytest.mark.parametrize("moments", ["bounded", "reused", "exact"])
def test_files_of_a_lossy_save_do_not_depend_on_where_a_leaf_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    policy = Policy.auto(moments=moments, stable_from=0)
    saved(tmp_path / "plain", None, policy)
    with monkeypatch.context() as patch:
        held = Held(patch)
        saved(tmp_path / "held", held, policy)
    assert held.copied[-1] > 20
    assert arrays_of(tmp_path / "held") == arrays_of(tmp_path / "plain")


def arrays_of(root: Path) -> dict[str, bytes]:
    """Return the arrays of all segments. Tables have the order in which leaves were captured."""
    files = segment_files(root)
    return {name: content for name, content in files.items() if not name.endswith("zarr.json")}


def test_a_write_before_the_copy_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = state_of(0)
    with Engine(tmp_path, options=SaveOptions(on_error="log")) as engine:
        engine.guard(model)
        engine.guard(optimizer)
        engine.save(0, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}).result()
        held = Held(monkeypatch)
        handle = engine.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        with torch.no_grad():
            list(model.parameters())[-1].add_(1)
        engine.before_update()
        with pytest.raises(SnapshotTorn, match="leaf 'model/"):
            handle.result()
        assert held.copied
        assert engine.steps() == [0]
