"""The saves after the first take little work for each leaf on the training thread, and every change
of the state is still seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture.tensor_codec import is_host
from deltacheck.backends.torch.state import leaves, repeated
from deltacheck.backends.torch.state.repeated import Flattener, KnownFlat
from deltacheck.codec import fingerprints, object_loops
from deltacheck.save.pipeline import Pipeline, PlannedLater


class Run:
    """AdamW with some small parameters, and a state that also has leaves of other kinds."""

    def __init__(self, parameters: int) -> None:
        self.parameters = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(parameters)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        self.steps = 0
        self.step()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.randn(3, 4)
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": {f"w{n}": p.detach() for n, p in enumerate(self.parameters)},
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "numpy": np.arange(3) + self.steps,
            "transposed": torch.arange(6).reshape(2, 3).t() + self.steps,
            "steps": self.steps,
        }


def calls_of_a_later_save(folder: Path, parameters: int) -> int:
    """Return the calls, of Python and of C, that the training thread makes in the third save."""
    run = Run(parameters)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with Engine(folder) as engine:
        engine.guard(run.optimizer)
        for number in range(3):
            state = run.state()
            if number == 2:
                sys.setprofile(count)
            try:
                handle = engine.save(number, state)
            finally:
                sys.setprofile(None)
            handle.wait()
            run.step()
    return calls


def test_the_work_of_a_save_on_the_training_thread_hardly_grows_with_its_leaves(
    tmp_path: Path,
) -> None:
    few = calls_of_a_later_save(tmp_path / "few", 10)
    many = calls_of_a_later_save(tmp_path / "many", 60)
    # Each parameter has four leaves. Only the dictionary of its optimizer state takes a call.
    assert many - few < 50 * 4 * 0.6


def test_every_save_of_a_known_state_comes_back(tmp_path: Path) -> None:
    run = Run(3)
    saved = []
    with Engine(tmp_path) as engine:
        engine.guard(run.optimizer)
        for number in range(4):
            engine.save(number, run.state())
            engine.wait()
            saved.append(
                {
                    k: v.clone()
                    for k, v in leaves.flatten(run.state()).arrays.items()
                    if isinstance(v, torch.Tensor)
                }
            )
            run.step()
        for number, expected in enumerate(saved):
            restored = engine.restore(number)
            assert restored["steps"] == number + 1
            assert (restored["numpy"] == np.arange(3) + number + 1).all()
            values = leaves.flatten(restored).arrays
            assert all(torch.equal(values[path], value) for path, value in expected.items())


def resized(state: dict[str, Any]) -> None:
    state["model"]["w0"] = state["model"]["w0"][:2].clone()


def transposed(state: dict[str, Any]) -> None:
    state["model"]["w0"].t_()


def tied(state: dict[str, Any]) -> None:
    state["rng"] = state["other"]


def as_integers(state: dict[str, Any]) -> None:
    state["model"]["w0"] = state["model"]["w0"].view(torch.int32)


def negated(state: dict[str, Any]) -> None:
    # Its memory has the opposite of its values.
    state["model"]["w0"] = torch._neg_view(state["model"]["w0"])


def as_parameter(state: dict[str, Any]) -> None:
    state["model"]["w0"] = torch.nn.Parameter(state["model"]["w0"])


def of_two_axes(state: dict[str, Any]) -> None:
    state["numpy"] = state["numpy"].reshape(1, -1)


def no_longer_tied(state: dict[str, Any]) -> None:
    state["same square"] = state["square"].T


@pytest.mark.parametrize("guards", [True, False], ids=["torch-compares", "python-compares"])
@pytest.mark.parametrize(
    "change",
    [
        resized,
        transposed,
        tied,
        as_integers,
        negated,
        as_parameter,
        of_two_axes,
        no_longer_tied,
    ],
    ids=lambda change: change.__name__,
)
def test_a_leaf_of_another_form_is_described_again(
    change: Callable[[dict[str, Any]], None], guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "_has_guards", lambda: guards)
    run, flatten, square = Run(2), Flattener(is_host), np.arange(4).reshape(2, 2)

    def state() -> dict[str, Any]:
        arrays = {"square": square, "same square": square}
        return {**run.state(), **arrays, "other": torch.get_rng_state()}

    flatten(state())
    # Other memory for some of the leaves is no change.
    assert isinstance(flatten(state()), KnownFlat)
    changed = state()
    change(changed)
    flat, expected = flatten(changed), leaves.flatten(changed)
    assert not isinstance(flat, KnownFlat)
    assert flat.skeleton == expected.skeleton
    assert list(flat.arrays) == list(expected.arrays)


def test_a_leaf_that_can_no_longer_be_kept_is_refused_by_save(tmp_path: Path) -> None:
    kept = {"a": torch.zeros(3), "b": torch.zeros(3), "c": np.zeros(3)}
    with Engine(tmp_path) as engine:
        for number in range(2):
            engine.save(number, kept)
        with pytest.raises(errors.UnsupportedLeaf, match="leaf 'b'"):
            engine.save(2, {**kept, "b": torch.zeros(3).to_sparse()})
        with pytest.raises(errors.UnsupportedLeaf, match="leaf 'b'"):
            engine.save(2, {**kept, "b": torch.zeros(3, device="meta")})
        with pytest.raises(errors.UnsupportedLeaf, match="leaf 'c'"):
            engine.save(2, {**kept, "c": np.zeros(3, np.dtype(float).newbyteorder())})


def test_tensors_without_memory_are_read_as_other_leaves(tmp_path: Path) -> None:
    # Their address is that of an empty parameter, which is guarded.
    empty = torch.nn.Parameter(torch.zeros(0))
    optimizer = torch.optim.SGD([empty], lr=0.1)
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        for number in range(2):
            engine.save(number, {"empty": empty, "view": torch.zeros(3)[:0]})
            engine.wait()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def shortened(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


@pytest.mark.parametrize("spoil", [freed, shortened])
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_a_tensor_whose_memory_is_freed_is_refused_and_saved_when_it_is_back(
    tmp_path: Path, spoil: Any, capture: Any
) -> None:
    """Offloads free the storage of a weight, and fill it again. Meanwhile it has no content."""
    weight, kept = torch.nn.Parameter(torch.arange(3000.0)), torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = {"weight": weight, "kept": kept}
    with Engine(tmp_path, options=SaveOptions(capture=capture)) as engine:
        engine.guard(optimizer)
        # At the first save, and at one whose form is known.
        for number in (0, 2):
            content = weight.detach().clone()
            weight.data = spoil(torch.zeros(3000))
            with pytest.raises(errors.UnsupportedLeaf, match=r"leaf 'weight'.* and not 12000.*"):
                engine.save(number, state)
            weight.data = content
            for step in (number, number + 1):
                engine.save(step, state).wait()
                assert torch.equal(engine.restore(step)["weight"], content)
        assert engine.steps() == [0, 1, 2, 3]


def test_a_save_is_described_after_an_overlapped_restore_has_arrived(tmp_path: Path) -> None:
    class Arrival:
        def wait(self, timeout: float | None) -> None:
            with torch.no_grad():
                run.parameters[0].add_(1)

        def release(self) -> None:
            pass

    run = Run(2)
    with Engine(tmp_path) as engine:
        engine.guard(run.optimizer)
        for number in range(2):
            engine.save(number, run.state()).wait()
        engine._open.arrival = Arrival()  # type: ignore[assignment]
        engine.save(2, run.state()).wait()


def test_a_save_that_was_given_up_before_its_plan_lets_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun_late(self: Pipeline, save: PlannedLater) -> None:
        self.give_up(save.progress, errors.StorageTimeout("the storage may hang"))
        start(self, save)

    start = Pipeline.start
    run = Run(2)
    with Engine(tmp_path, options=SaveOptions(on_error="log")) as engine:
        engine.guard(run.optimizer)
        engine.save(0, run.state()).wait()
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "start", begun_late)
            handle = engine.save(1, run.state())
        with pytest.raises(errors.SaveFailed):
            handle.wait()
        assert engine._saver._planned.wait(240)
        assert engine.steps() == [0]


@pytest.mark.parametrize("size", [1, 7, 8, 33, 64 << 10, (64 << 10) + 1, 300_003])
def test_a_fingerprint_covers_a_leaf(size: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    before = fingerprints.fingerprint_of(content, 5)
    assert before == fingerprints.fingerprint_of(content.copy(), 5)
    # A contiguous write of two strides meets a block, whatever its place.
    width = 1 if size <= 64 << 10 else 2 * (size // 64)
    for begin in {0, size // 2, size - width}:
        changed = content.copy()
        changed[begin : begin + width] ^= 1
        assert fingerprints.fingerprint_of(changed, 5) != before


def moved(run: Run) -> None:
    run.parameters[0].data = torch.zeros(3, 4)


def moment_moved(run: Run) -> None:
    run.optimizer.state[run.parameters[0]]["exp_avg"].set_(torch.zeros(3, 4))


def moment_replaced(run: Run) -> None:
    run.optimizer.state[run.parameters[0]]["exp_avg"] = torch.zeros(3, 4)


def with_another_parameter(run: Run) -> None:
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5))]})


def without_state(run: Run) -> None:
    run.optimizer.state.clear()


@pytest.mark.parametrize(
    "change",
    [moved, moment_moved, moment_replaced, with_another_parameter, without_state],
    ids=lambda change: change.__name__,
)
def test_the_guarded_memory_is_that_of_the_optimizers_at_each_save(
    change: Callable[[Run], None], tmp_path: Path
) -> None:
    run, flatten = Run(3), Flattener(is_host)
    with Engine(tmp_path / "one") as engine:
        engine.guard(run.optimizer)
        for number in range(5):
            if number == 3:
                change(run)
            flat = flatten(run.state())
            known = flat.tensors if isinstance(flat, KnownFlat) else None
            assert number in (0, 3) or known is not None
            owned = engine._guard.owned(known)
            # The first look of another engine has nothing to compare with.
            with Engine(tmp_path / f"other {number}") as other:
                other.guard(run.optimizer)
                assert owned == other._guard.owned()


def test_the_guarded_memory_is_the_same_set_as_long_as_nothing_moves(tmp_path: Path) -> None:
    run, flatten = Run(3), Flattener(is_host)
    sets = []
    with Engine(tmp_path) as engine:
        engine.guard(run.optimizer)
        for _ in range(4):
            flat = flatten(run.state())
            sets.append(engine._guard.owned(flat.tensors if isinstance(flat, KnownFlat) else None))
            run.step()
    # Saves compare it by identity with that of the last save.
    assert all(addresses is sets[0] for addresses in sets)


def test_a_leaf_that_an_optimizer_has_replaced_is_guarded_no_longer(tmp_path: Path) -> None:
    run, flatten = Run(3), Flattener(is_host)
    moments = [run.optimizer.state[parameter]["exp_avg"] for parameter in run.parameters]
    with Engine(tmp_path) as engine:
        engine.guard(run.optimizer)
        for number in range(4):
            if number == 3:
                run.optimizer.state[run.parameters[0]]["exp_avg"] = torch.zeros(3, 4)
            flat = flatten({"moments": moments})
            owned = engine._guard.owned(flat.tensors if isinstance(flat, KnownFlat) else None)
            assert (moments[0].data_ptr() in owned) == (number < 3)


def test_numbers_are_read_of_many_objects_in_one_call() -> None:
    texts = ["a" * number for number in range(20)]
    out = np.empty(20, np.uint64)
    object_loops.read_numbers(texts, len, out)
    assert out.tolist() == list(range(20))
    object_loops.read_numbers(texts, len, out, lambda number: number + 2**63)
    assert out.tolist() == [number + 2**63 for number in range(20)]
    for objects, first, error in (
        (texts, lambda text: -1, OverflowError),
        (texts, lambda text: 1 / 0, ZeroDivisionError),
        (texts[:-1], len, ValueError),
    ):
        with pytest.raises(error):
            object_loops.read_numbers(objects, first, out)
