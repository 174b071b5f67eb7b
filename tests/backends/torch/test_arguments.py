"""Arguments of the engine that users get wrong, or that come from other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main


def test_a_step_may_be_an_integer_of_numpy(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        for step in (np.int64(3), np.int32(4)):
            engine.save(step, {"x": torch.full((2,), float(step))}).wait()
        assert engine.steps() == [3, 4]
        assert torch.equal(engine.restore(np.int64(3))["x"], torch.full((2,), 3.0))
        assert type(engine.restored_step) is int
        engine.tag(np.int64(3), "good")
        engine.delete(np.int64(4))
        assert engine.steps() == [3]


@pytest.mark.parametrize("step", [True, -1, 1.0, np.float32(1), "1", None])
def test_a_step_that_is_no_integer_is_refused(tmp_path: Path, step: Any) -> None:
    with Engine(tmp_path) as engine, pytest.raises(ValueError, match="step must be an integer"):
        engine.save(step, {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("policy", "remedy"), [("exact", r"Policy\.exact\(\)"), (1, r"Policy\.auto\(\)")]
)
def test_a_policy_that_is_none_is_refused_by_name(tmp_path: Path, policy: Any, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"policy must be a Policy.*{remedy}"):
        Engine(tmp_path, policy=policy)


@pytest.mark.parametrize("state", [lambda m: m, lambda m: {"model": m}], ids=["alone", "inside"])
def test_a_module_names_its_state_dict_as_the_remedy(tmp_path: Path, state: Any) -> None:
    with Engine(tmp_path) as engine, pytest.raises(errors.UnsupportedLeaf, match=r"state_dict\(\)"):
        engine.save(0, state(torch.nn.Linear(2, 2)))


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 3)


@pytest.mark.parametrize(
    "target",
    [
        lambda: torch.zeros(1, 3).expand(4, 3),
        lambda: torch.zeros(10).as_strided((4, 3), (1, 1)),
        _inference,
    ],
    ids=["expanded", "overlapping", "inference"],
)
def test_a_target_that_cannot_hold_the_content_is_refused_before_a_write(
    tmp_path: Path, target: Any
) -> None:
    with Engine(tmp_path) as engine:
        engine.save(0, {"a": torch.ones(2), "x": torch.arange(12.0).reshape(4, 3)}).wait()
        into = {"a": torch.zeros(2), "x": target()}
        with pytest.raises(errors.UnsupportedLeaf, match="leaf 'x' of the target"):
            engine.restore(into=into)
        assert not into["a"].any()
        assert not into["x"].any()


@pytest.mark.parametrize(
    "target",
    [
        lambda: torch.zeros(3, 4).t(),
        lambda: torch.zeros(10, 3)[2:6],
        lambda: torch.zeros(8, 6)[::2, ::2],
        # Strides that interleave and share nothing.
        lambda: torch.zeros(40).as_strided((4, 3), (3, 4)),
    ],
    ids=["transposed", "slice", "strided", "interleaved"],
)
def test_a_view_that_can_hold_the_content_is_filled(tmp_path: Path, target: Any) -> None:
    content = torch.arange(12.0).reshape(4, 3)
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": content}).wait()
        into = {"x": target()}
        engine.restore(into=into)
        assert torch.equal(into["x"], content)


def test_the_only_step_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(tmp_path) as engine:
        for step in (1, 2):
            engine.save(step, {"x": torch.zeros(2)}).wait()
    assert main(["prune", str(tmp_path), "1"]) == 0
    assert main(["prune", str(tmp_path), "2"]) == 2
    assert "nothing could be restored" in capsys.readouterr().err
    with Engine(tmp_path) as engine:
        assert engine.steps() == [2]
