"""The comparison of `deltacheck eval` finds errors that are planted into a restored state.

The state is that of a lossy step, with reused moments and bounded masters. Each error is small: one
element of one leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files import evaluation
from deltacheck.evaluate.comparison import contract, snapshot
from deltacheck.evaluate.comparison.snapshot import Snapshot
from tests.support.adam_run import AdamRun

pytestmark = pytest.mark.tools

WEIGHT, STATE = "model/w0", "optimizer/state/0"
MASTER, FIRST, SECOND = f"{STATE}/master", f"{STATE}/exp_avg", f"{STATE}/exp_avg_sq"


class Saved:
    """A run of which a step with reused moments is the last."""

    def __init__(self, root: Path) -> None:
        run, self.live = AdamRun(), dict[int, Snapshot]()
        with Engine(root, policy=Policy.auto(derive=False)) as engine:
            for _ in range(30):
                run.advance(10)
                self.live[run.step] = take(run.state())
                engine.save(run.step, run.state()).wait()
                self.manifest = deltacheck.open(root).manifest()
                promise = self.manifest.contracts.get(FIRST)
                if (
                    promise is not None
                    and promise.age(run.step) > 0
                    and MASTER in self.manifest.contracts
                ):
                    break
        self.restored = take(deltacheck.open(root).restore())

    def checked(self, restored: Snapshot) -> dict[str, str]:
        """Return the problem of each leaf that has one."""
        checks = contract.check(
            self.live[self.manifest.step],
            restored,
            self.manifest.contracts,
            self.manifest.step,
            self.live.__getitem__,
        )
        return {check.path: check.problem for check in checks if check.problem}


def take(state: Any) -> Snapshot:
    return snapshot.take(evaluation.flat(state), evaluation.bytes_of)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("planted"))


def test_a_correct_restore_has_no_problem_and_names_what_it_tested(saved: Saved) -> None:
    assert saved.checked(saved.restored) == {}
    checks = contract.check(
        saved.live[saved.manifest.step],
        saved.restored,
        saved.manifest.contracts,
        saved.manifest.step,
        saved.live.__getitem__,
    )
    tested = {check.exercise for check in checks} - {""}
    assert tested == {"master bounded", "first_moment reused", "second_moment reused"}
    assert contract.used_contracts(saved.manifest) == tested


def flip_bit(values: np.ndarray[Any, Any]) -> None:
    values.view(np.uint8)[123] ^= 1


def scaled(factor: float) -> Callable[[np.ndarray[Any, Any]], None]:
    def change(values: np.ndarray[Any, Any]) -> None:
        values[int(np.argmax(np.abs(values)))] *= factor

    return change


def zero(values: np.ndarray[Any, Any]) -> None:
    values[int(np.argmax(np.abs(values)))] = 0


def erase(values: np.ndarray[Any, Any]) -> None:
    """Set everything to zero; the promise permits it of an element with a small update."""
    values[:] = 0


def nan(values: np.ndarray[Any, Any]) -> None:
    values[7] = np.nan


def leave_cell(values: np.ndarray[Any, Any]) -> None:
    """Move the smallest element by less than the bound of its error."""
    values[int(np.argmin(np.abs(values)))] += np.float32(4e-5)


def move_far(values: np.ndarray[Any, Any]) -> None:
    values[99] += np.float32(1e-3)  # 100 learning rates


def swap(values: np.ndarray[Any, Any]) -> None:
    largest, smallest = int(np.argmax(np.abs(values))), int(np.argmin(np.abs(values)))
    values[[largest, smallest]] = values[[smallest, largest]]


@pytest.mark.parametrize(
    ("path", "plant"),
    [
        (WEIGHT, flip_bit),
        (WEIGHT, swap),
        (MASTER, leave_cell),
        (MASTER, move_far),
        (MASTER, nan),
        (MASTER, swap),
        (FIRST, scaled(-1.0)),
        (FIRST, scaled(2.0)),
        (FIRST, erase),
        (FIRST, nan),
        (FIRST, swap),
        (SECOND, scaled(2.0)),
        (SECOND, scaled(0.5)),
        (SECOND, zero),
        (SECOND, nan),
        (SECOND, swap),
    ],
)
def test_a_planted_error_is_found_and_its_leaf_is_named(
    path: str, plant: Callable[[np.ndarray[Any, Any]], None], saved: Saved
) -> None:
    values = saved.restored.arrays[path].copy()
    plant(values)
    wrong = replace(saved.restored, arrays={**saved.restored.arrays, path: values})
    problems = saved.checked(wrong)
    # A weight is also the cell of its master.
    assert path in problems
    assert problems.keys() <= {path, MASTER}


@pytest.mark.parametrize("path", [FIRST, SECOND, MASTER, WEIGHT])
def test_a_leaf_of_another_step_is_found(path: str, saved: Saved) -> None:
    other = saved.live[10].arrays[path]
    wrong = replace(saved.restored, arrays={**saved.restored.arrays, path: other})
    assert path in saved.checked(wrong)
