"""Old steps lose their optimizer beside a training, and keep their weights bit for bit."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.maintain import compaction
from deltacheck.save import partial_steps, root_writer
from deltacheck.store.files import arrays
from tests.support.states import assert_same, random_tensor

STEPS = 14


def states() -> Iterator[dict[str, Any]]:
    """Yield states of which 1 % of the weights and most of the optimizer change."""
    state = {
        "model": {"weight": random_tensor(torch.bfloat16, (200, 100), 0), "frozen": torch.ones(50)},
        "optimizer": {"exp_avg": torch.zeros(200, 100), "step": torch.tensor(0.0)},
    }
    for step in range(STEPS):
        yield copy.deepcopy(state)
        state["model"]["weight"].view(torch.int16)[step::100] ^= 1
        state["optimizer"]["exp_avg"] += torch.randn(200, 100)
        state["optimizer"]["step"] += 1


@pytest.fixture(autouse=True)
def rewrite_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_writer, "_STEPS_OF_REWRITE", 3)


def engine_of(root: Path, **keep: Any) -> Engine:
    # Short chains, so that most segments are older than those that the next save needs.
    policy = Policy.exact(max_chain_depth=3, merge_deltas=False)
    return Engine(root, policy=policy, options=SaveOptions(grace_seconds=0), keep=Keep(**keep))


def check(root: Path, saved: dict[int, dict[str, Any]], whole: set[int]) -> None:
    """Compare the weights of all steps, and everything of some."""
    opened = deltacheck.open(root)
    assert opened.verify(deep=True) == []
    with Engine(root) as engine:
        for step in opened.steps():
            weights = engine.restore(step, leaves="model")
            for name, tensor in saved[step]["model"].items():
                assert_same(weights[f"model/{name}"], tensor)
            if step in whole:
                assert_same(engine.restore(step), saved[step])
            else:
                with pytest.raises(errors.LeafPruned, match=f"step {step} "):
                    engine.restore(step)


def test_a_training_keeps_weights_of_all_steps_and_the_optimizer_of_the_newest(
    tmp_path: Path,
) -> None:
    saved = dict(enumerate(states()))
    for root, options in ((tmp_path / "all", {}), (tmp_path / "run", {"full_last": 2})):
        with engine_of(root, **options) as engine:
            for step, state in saved.items():
                engine.save(step, state).wait()
                if step == 4:
                    engine.tag(4, "good")
                if step == 8:
                    # A resume: the next save goes on from what was restored.
                    assert_same(engine.restore(), state)
    check(tmp_path / "run", saved, {4, STEPS - 2, STEPS - 1})
    sizes = {name: arrays.bytes_on_disk(tmp_path / name / "segments") for name in ("all", "run")}
    assert sizes["run"] < 0.7 * sizes["all"]
    # A process that goes on finds the steps of the one before.
    with engine_of(tmp_path / "run", full_last=1, leaves="model/weight") as engine:
        engine.restore(None)
        saved[STEPS] = saved[STEPS - 1]
        engine.save(STEPS, saved[STEPS]).wait()
        assert engine.restore(4)["optimizer"]["step"] == 4
        with pytest.raises(errors.LeafPruned, match="frozen"):
            engine.restore(3, leaves="model")
        assert engine.restore(3, leaves="model/weight").keys() == {"model/weight"}


def test_a_kill_at_any_moment_leaves_every_step_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, copies = tmp_path / "run", []

    def killed_around(function: Any) -> Any:
        """Copy the root as a kill before and after the call would leave it."""

        def wrapper(*arguments: Any, **options: Any) -> Any:
            for moment in ("before", "after"):
                if moment == "after":
                    result = function(*arguments, **options)
                copies.append((len(saved), tmp_path / f"killed-{len(copies)}"))
                shutil.copytree(root, copies[-1][1])
            return result

        return wrapper

    # Manifests that lose leaves, segments that are written again, and manifests that name these.
    monkeypatch.setattr(arrays, "replace_file", killed_around(arrays.replace_file))
    monkeypatch.setattr(compaction, "_rewritten", killed_around(compaction._rewritten))
    saved: dict[int, dict[str, Any]] = {}
    with engine_of(root, full_last=1) as engine:
        for step, state in enumerate(states()):
            saved[step] = state
            engine.save(step, state).wait()
            if step == 9:
                break
    monkeypatch.undo()
    assert len(copies) > 30
    for count, killed in copies[::5]:
        opened = deltacheck.open(killed)
        assert opened.steps() == list(range(count))
        with engine_of(killed, full_last=1) as engine:
            assert_same(engine.restore(), saved[count - 1])
            engine.save(count, saved[count - 1]).wait()
        check(killed, saved | {count: saved[count - 1]}, {count})


def test_a_step_that_cannot_be_reduced_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(*_: Any, **__: Any) -> Any:
        raise errors.Damaged("a segment has a wrong bit")

    monkeypatch.setattr(partial_steps, "partial_manifest", damaged)
    saved = dict(enumerate(states()))
    with engine_of(tmp_path, full_last=1) as engine:
        for step in range(3):
            engine.save(step, saved[step]).wait()
    assert "a segment has a wrong bit" in caplog.text
    check(tmp_path, saved, {0, 1, 2})


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be given with memory"):
        Engine(tmp_path / "run", memory=tmp_path / "memory", keep=Keep(full_last=1))
    with pytest.raises(ValueError, match="give both"):
        Engine(tmp_path / "run", keep=Keep(leaves="model"))
    with pytest.raises(ValueError, match="must be at least 1"):
        Engine(tmp_path / "run", keep=Keep(full_last=0))
    assert not (tmp_path / "run").exists()
