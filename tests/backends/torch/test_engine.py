"""The torch engine: what is saved is the state as of the call, and what is restored is that state,
bit for bit.
"""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import guard
from deltacheck.leaf.spec import LeafKind, LeafSpec
from deltacheck.restore.content import Loaded
from deltacheck.restore.values import unshared_paths
from deltacheck.save import progress, saver
from deltacheck.save.progress import Progress
from deltacheck.store.files.local_storage import LocalStorage
from tests.support.states import (
    TORCH_DTYPES,
    assert_same,
    bits,
    kinds,
    nudge,
    random_tensor,
    training_state,
)
from tests.support.waiting import WAIT_SECONDS, ShiftedClock, open_when_called


def test_every_dtype_shape_and_layout_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        str(dtype): {
            "3x5": random_tensor(dtype, (3, 5), 1),
            "0-d": random_tensor(dtype, (), 2),
            "empty": random_tensor(dtype, (0, 4), 3),
        }
        for dtype in TORCH_DTYPES
    }
    base = torch.arange(60.0).reshape(6, 10)
    state |= {
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    }
    state |= {
        "expanded": torch.ones(3, 1).expand(3, 4),
        "numpy": np.arange(5, dtype=np.uint16),
        "numpy scalar": np.float32(1.5),
    }
    with Engine(tmp_path) as engine:
        engine.save(1, state)
        engine.save(2, state)
        assert_same(state, engine.restore(1))
        assert_same(state, engine.restore(2))


def test_nested_state_with_every_python_scalar_comes_back(tmp_path: Path) -> None:
    state = {
        "a": [1, 2.5, None, "text", b"bytes", True, (1 + 2j)],
        0: {"b": ()},
        "nan": float("nan"),
        "big": 2**100,
        "empty": {},
    }
    with Engine(tmp_path) as engine:
        engine.save(0, state).wait()
        assert_same(state, engine.restore())


def test_module_and_optimizer_state_dicts_continue_training_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            schedule.step()

    def state() -> dict[str, Any]:
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        return {**{k: v.state_dict() for k, v in parts.items()}, "rng": torch.get_rng_state()}

    with Engine(tmp_path) as engine:
        train(3)
        engine.save(3, state())
        train(4)
        wanted = copy.deepcopy(state())
        restored = engine.restore(3)
        model.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])
        schedule.load_state_dict(restored["schedule"])
        torch.set_rng_state(restored["rng"])
        train(4)
        assert_same(wanted, state())


def test_some_leaves_are_restored_flat_and_the_next_save_goes_on_as_before(tmp_path: Path) -> None:
    tied = torch.randn(40, 30, dtype=torch.bfloat16)
    state = {"model": {"embed": tied, "head": tied, "scale": np.float32(2)}, "step": 3}
    with Engine(tmp_path) as engine:
        engine.save(0, {**state, "m": torch.zeros(5)}).wait()
        engine.save(1, {**state, "m": torch.ones(5)}).wait()
        restored = engine.restore(0, leaves=["model", "m*"])
        assert list(restored) == ["model/embed", "model/head", "model/scale", "m"]
        assert restored["model/embed"] is restored["model/head"]
        assert torch.equal(restored["model/head"], tied)
        assert restored["model/scale"] == np.float32(2)
        assert torch.equal(restored["m"], torch.zeros(5))
        assert list(engine.restore(leaves="m")) == ["m"]
        assert engine.restored_step == 1
        report = engine.save(2, {**state, "m": torch.ones(5)}).result()
        assert report is not None
        # Compared with save 1, and not with what was restored.
        assert {leaf.kind for leaf in report.leaves} == {LeafKind.UNCHANGED}
        with pytest.raises(errors.LeafNotFound, match="no leaf 'step'; near it"):
            engine.restore(leaves=["step"])
        with pytest.raises(ValueError, match="leaves= cannot be given with into="):
            engine.restore(into=state, leaves=["m"])


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weight = torch.randn(300, 400)
    with Engine(tmp_path) as engine:
        report = engine.save(0, {"head": weight, "embed": weight, "view": weight[:10]}).result(240)
        restored = engine.restore()
    assert report is not None
    assert sorted(leaf.path for leaf in report.leaves) == ["embed", "view"]
    assert restored["head"] is restored["embed"]
    assert bits(restored["view"]) == bits(weight[:10])


def test_a_delta_covers_every_change_since_its_base(tmp_path: Path) -> None:
    state = training_state()
    saved = []
    with Engine(tmp_path, options=SaveOptions(max_pending=3)) as engine:
        for step in range(6):
            saved.append(copy.deepcopy(state))
            engine.save(step, state)
            nudge(state, 0.01 * step, seed=step)
        engine.wait(240)
        for step in (5, 0, 3, 1, 4, 2):
            assert_same(saved[step], engine.restore(step))


def test_a_zero_that_changes_its_sign_is_a_change(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1000), "y": torch.ones(1000)}
    with Engine(tmp_path) as engine:
        engine.save(0, state).wait(timeout=240)
        state["x"][7] = -0.0
        state["y"][3] = 2.0
        engine.save(1, state).wait(timeout=240)
        assert bits(engine.restore()["x"]) == bits(state["x"])


def test_what_did_not_change_is_not_written(tmp_path: Path) -> None:
    state = training_state()
    with Engine(tmp_path) as engine:
        first = engine.save(0, state)
        assert set(kinds(first).values()) == {LeafKind.KEYFRAME}
        state["model"]["head.bias"][3] += 1
        second = engine.save(1, state)
        assert {p for p, k in kinds(second).items() if k is LeafKind.DELTA} == {"model/head.bias"}
        third = engine.save(2, state)
        assert set(kinds(third).values()) == {LeafKind.UNCHANGED}
        assert len(list((tmp_path / "segments").glob("s*"))) == 2
        assert_same(state, engine.restore(2))


def test_a_leaf_that_changes_shape_or_dtype_gets_a_keyframe_and_the_others_stay_deltas(
    tmp_path: Path,
) -> None:
    state = {"grows": torch.zeros(4), "casts": torch.zeros(4), "stays": torch.zeros(4)}
    with Engine(tmp_path) as engine:
        engine.save(0, state)
        state = {
            "grows": torch.zeros(5),
            "casts": torch.zeros(4, dtype=torch.bfloat16),
            "stays": torch.ones(4),
            "new": torch.ones(1),
        }
        handle = engine.save(1, state)
        assert kinds(handle) == {
            "grows": "keyframe",
            "casts": "keyframe",
            "stays": "delta",
            "new": "keyframe",
        }
        assert_same(state, engine.restore(1))


def test_a_chain_never_grows_beyond_its_limit_and_keyframes_are_staggered(tmp_path: Path) -> None:
    state = {f"leaf{n}": torch.zeros(8) for n in range(12)}
    policy = Policy.exact(max_chain_depth=4, merge_deltas=False)
    with Engine(tmp_path, policy=policy) as engine:
        keyframes = []
        for step in range(12):
            for leaf in state.values():
                leaf += 1
            keyframes.append(
                sum(kind is LeafKind.KEYFRAME for kind in kinds(engine.save(step, state)).values())
            )
            assert_same(state, engine.restore())
    assert keyframes[0] == 12
    assert max(keyframes[1:]) < 12
    assert sum(keyframes[1:]) >= 2 * 12
    longest = max(len(deltacheck.open(tmp_path).manifest(step).segments) for step in range(12))
    assert longest <= 5


def test_depth_zero_writes_keyframes_only(tmp_path: Path) -> None:
    with Engine(tmp_path, policy=Policy.exact(max_chain_depth=0)) as engine:
        for step in range(2):
            assert kinds(engine.save(step, {"x": torch.full((3,), float(step))})) == {
                "x": "keyframe"
            }


def test_a_new_process_continues_the_chain_of_the_step_that_it_restored(tmp_path: Path) -> None:
    state = training_state()
    with Engine(tmp_path) as engine:
        engine.save(0, state)
        nudge(state)
        engine.save(1, state)
    older = deltacheck.open(tmp_path).manifest(0)
    with Engine(tmp_path) as engine:
        restored = engine.restore(0)
        restored["model"]["head.bias"][0] += 1
        handle = engine.save(1, restored)
        assert kinds(handle)["model/embed.weight"] == "unchanged"
        assert set(older.segments) < set(deltacheck.open(tmp_path).manifest(1).segments)
        assert_same(restored, engine.restore(1))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_an_engine_that_restored_nothing_starts_with_keyframes(tmp_path: Path) -> None:
    state = training_state()
    with Engine(tmp_path) as engine:
        engine.save(0, state)
    with Engine(tmp_path) as engine:
        assert set(kinds(engine.save(1, state)).values()) == {LeafKind.KEYFRAME}


# --- capture --------------------------------------------------------------------------------------


def stepped_optimizer() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    layer = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    return layer, optimizer


def test_the_next_optimizer_step_waits_until_its_tensors_are_captured(
    tmp_path: Path, slow_encoder: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    monkeypatch.setattr(progress, "time", clock)
    layer, optimizer = stepped_optimizer()
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        wanted = copy.deepcopy(layer.state_dict())
        handle = engine.save(0, {"model": layer.state_dict(), "optimizer": optimizer.state_dict()})
        assert handle.state == "started"
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder, clock)
        optimizer.step()
        assert slow_encoder.is_set()
        assert handle.state != "started"
        assert not torch.equal(layer.weight, wanted["weight"])
        assert_same(wanted, engine.restore(0)["model"])
        assert handle.blocking_seconds // WAIT_SECONDS == 1


def test_an_optimizer_is_known_from_its_first_step_on(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer = torch.nn.Linear(5, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 5)).sum().backward()
    with Engine(tmp_path) as engine:
        assert engine.save(0, layer.state_dict()).wait(
            timeout=240
        )  # nobody owns it yet: copied eagerly, the encoder is not asked
        optimizer.step()
        handle = engine.save(1, layer.state_dict())
        assert handle.state == "started"
        slow_encoder.set()
        handle.wait(timeout=240)


def test_tensors_of_unknown_owner_are_captured_before_save_returns(tmp_path: Path) -> None:
    state = {"ema": torch.randn(1000, 1000), "buffer": np.arange(10)}
    wanted = copy.deepcopy(state)
    with Engine(tmp_path) as engine:
        engine.save(0, state)
        state["ema"].data.zero_()
        state["buffer"][:] = 0
        assert_same(wanted, engine.restore(0))


def test_a_write_that_breaks_the_promise_of_the_guard_fails_the_save_and_not_the_training(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer, optimizer = stepped_optimizer()
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        handle = engine.save(0, layer.state_dict())
        with torch.no_grad():
            layer.weight.zero_()
        slow_encoder.set()
        with pytest.raises(errors.SnapshotTorn, match=r"'weight'.*before_update\(\)"):
            handle.wait(timeout=30)
        assert engine.steps() == []
        engine.save(1, layer.state_dict()).wait(timeout=240)
        assert_same(layer.state_dict(), engine.restore(1))


@pytest.mark.parametrize(
    "wait", [lambda engine: engine.before_update(), lambda engine: engine.lock().__enter__()]
)
def test_before_update_and_lock_wait_for_the_capture(
    tmp_path: Path,
    slow_encoder: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    wait: Callable[[Engine], None],
) -> None:
    layer, optimizer = stepped_optimizer()
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        wanted = copy.deepcopy(layer.state_dict())
        engine.save(0, layer.state_dict())
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        wait(engine)
        assert slow_encoder.is_set()
        layer.weight.data.zero_()
        assert_same(wanted, engine.restore(0))


def test_eager_capture_is_done_when_save_returns_whoever_owns_the_tensors(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer, optimizer = stepped_optimizer()
    with Engine(tmp_path, options=SaveOptions(capture="eager")) as engine:
        engine.guard(optimizer)
        wanted = copy.deepcopy(layer.state_dict())
        engine.save(0, layer.state_dict())
        layer.weight.data.zero_()
        assert_same(wanted, engine.restore(0))


def test_a_tiny_host_cache_gives_the_same_checkpoint(tmp_path: Path) -> None:
    state = training_state()
    with Engine(tmp_path, options=SaveOptions(host_cache_bytes=1000)) as engine:
        engine.save(0, state)
        nudge(state, 0.5)
        engine.save(1, state).wait(timeout=240)
        assert_same(state, engine.restore(1))
    segment = deltacheck.open(tmp_path).manifest(1).segments[-1].id
    assert len(list((tmp_path / "segments" / segment).glob("delta.*"))) > 1


def test_a_small_save_makes_four_files_and_syncs_each_directory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": torch.randn(50, 50) for number in range(30)}
    synced = []
    sync = LocalStorage.sync_directory

    def noted(storage: LocalStorage) -> None:
        synced.append(storage.path.relative_to(tmp_path).as_posix())
        sync(storage)

    with Engine(tmp_path) as engine:
        engine.save(0, state).wait(timeout=240)
        before = set(tmp_path.rglob("*"))
        for tensor in state.values():
            tensor[0] += 1
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "sync_directory", noted)
            engine.save(1, state).wait(timeout=240)
    segment = f"segments/{deltacheck.open(tmp_path).manifest(1).segments[-1].id}"
    made = {path for path in tmp_path.rglob("*") if path not in before and path.is_file()}
    assert {path.relative_to(tmp_path).as_posix() for path in made} == {
        f"{segment}/zarr.json",
        f"{segment}/delta.0.stream/zarr.json",
        f"{segment}/delta.0.stream/c.0",
        "checkpoints/c0000000001/zarr.json",
    }
    # TensorStore syncs the directory of the manifest.
    folders = [segment, f"{segment}/delta.0.stream", "segments", "checkpoints"]
    assert sorted(synced) == sorted(folders)


# --- handles, back-pressure, ends -----------------------------------------------------------------


def test_a_handle_passes_through_its_states_in_order(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        handle = engine.save(4, training_state(), metrics={"loss": 2})
        for state in ("captured", "encoded", "durable", "committed"):
            assert handle.wait(state, timeout=240) is handle
        report = handle.result()
        assert report is not None
        assert (report.step, dict(report.metrics)) == (4, {"loss": 2.0})
        assert report.raw_bytes == sum(leaf.raw_bytes for leaf in report.leaves)
        on_disk = sum(
            f.stat().st_size
            for f in (
                *(tmp_path / "segments").rglob("s*/**/*"),
                *(tmp_path / "checkpoints").rglob("c*/*"),
            )
            if f.is_file()
        )
        assert report.stored_bytes == on_disk
        assert handle.exception() is None
    with pytest.raises(ValueError, match="finished"):
        handle.wait("finished")


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the committer thread back before it finishes a segment, until the event is set."""
    from deltacheck.save.job import save_job

    go = threading.Event()
    original = save_job.SaveJob.finish_segment

    def finish(self: Any) -> Any:
        assert go.wait(240)
        return original(self)

    monkeypatch.setattr(save_job.SaveJob, "finish_segment", finish)
    return go


def test_a_save_is_skipped_while_too_many_are_under_way_if_the_user_said_so(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    with Engine(tmp_path, options=SaveOptions(on_busy="skip", max_pending=1)) as engine:
        engine.save(0, {"x": torch.zeros(3)})
        skipped = engine.save(1, {"x": torch.ones(3)})
        assert skipped.state == "skipped"
        assert skipped.result() is None
        slow_disk.set()
        engine.wait(240)
        assert engine.steps() == [0]


def test_save_waits_for_room_and_the_handle_says_how_long(
    tmp_path: Path, slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    monkeypatch.setattr(saver, "time", clock)
    with Engine(tmp_path, options=SaveOptions(max_pending=1)) as engine:
        first = engine.save(0, {"x": torch.zeros(3)})
        open_when_called(monkeypatch, Progress, "wait_until", slow_disk, clock)
        second = engine.save(1, {"x": torch.ones(3)})
        assert slow_disk.is_set()
        assert first.done()
        assert second.blocking_seconds // WAIT_SECONDS == 1
        engine.wait(240)
        assert engine.steps() == [0, 1]


def test_two_saves_may_be_under_way_and_the_later_stands_on_the_earlier(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    state = training_state()
    with Engine(tmp_path, options=SaveOptions(max_pending=2)) as engine:
        engine.save(0, state)
        nudge(state)
        second = engine.save(1, state)
        second.wait("encoded", timeout=240)
        assert engine.steps() == []
        slow_disk.set()
        assert_same(state, engine.restore(1))


def test_closing_finishes_what_is_under_way_and_gives_the_root_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.save(0, training_state())
    engine.close()
    engine.close()
    assert deltacheck.open(tmp_path).steps() == [0]
    with pytest.raises(errors.SaveFailed, match="closed"):
        engine.save(1, {})
    Engine(tmp_path).close()


def test_threads_and_hooks_are_gone_after_close(tmp_path: Path) -> None:
    hooks, threads = len(guard._guards), threading.active_count()
    for _ in range(3):
        with Engine(tmp_path) as engine:
            engine.save(0, {"x": torch.zeros(2)})
    gc.collect()
    assert len(guard._guards) == hooks
    assert threading.active_count() <= threads  # those of earlier tests may have ended since


# --- restore --------------------------------------------------------------------------------------


def test_restore_into_fills_the_targets_own_tensors(tmp_path: Path) -> None:
    state = training_state()
    # More than one thread copies, and memory in another order than the leaf's.
    state["model"] |= {"large": torch.randn(3, 700_001), "turned": torch.randn(5, 7).t()}
    target = copy.deepcopy(state)
    nudge(target, 0.9)
    for name in ("large", "turned"):
        target["model"][name].zero_()
    tensor = target["model"]["embed.weight"]
    versions = {name: value._version for name, value in target["model"].items()}
    with Engine(tmp_path) as engine:
        engine.save(0, state)
        back = engine.restore(into=target)
    assert back["model"]["embed.weight"] is tensor
    # torch must know of the writes, since saves of other engines rely on it.
    assert all(target["model"][name]._version > versions[name] for name in versions)
    assert back["step"] == state["step"]
    assert_same(state, back)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(extra=torch.zeros(1)), r"leaf 'extra' of the target is not in step 7"),
        (
            lambda s: s["model"].pop("head.bias"),
            r"leaf 'model/head.bias' of step 7 is not in the target",
        ),
        (
            lambda s: s["model"].update({"head.bias": torch.zeros(65)}),
            r"'model/head.bias' is float32\[64\] in step 7, float32\[65\] in the target",
        ),
        (
            lambda s: s["model"].update({"head.bias": torch.zeros(64).half()}),
            r"float32\[64\] in step 7, float16\[64\] in the target",
        ),
    ],
)
def test_restore_refuses_a_target_that_does_not_match_and_leaves_it_alone(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    state = training_state()
    target = copy.deepcopy(state)
    nudge(target, 0.9)
    change(target)
    before = copy.deepcopy(target)
    with Engine(tmp_path) as engine:
        engine.save(7, state)
        with pytest.raises(errors.TreeMismatch, match=message):
            engine.restore(into=target)
    assert_same(before, target)


def test_restored_tensors_are_the_callers_own(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1000)}
    with Engine(tmp_path) as engine:
        engine.save(0, state)
        restored = engine.restore()
        restored["x"] += 1
        engine.save(1, restored).wait()
        assert_same({"x": torch.ones(1000)}, engine.restore(1))
        assert_same({"x": torch.zeros(1000)}, engine.restore(0))


@pytest.mark.parametrize(
    "policy", [Policy.exact(), Policy.exact(derive=True)], ids=["exact", "derive"]
)
@pytest.mark.parametrize("by", ["engine", "load"])
def test_no_restored_tensor_shares_memory_with_another_or_with_what_the_next_save_compares(
    tmp_path: Path, policy: Policy, by: str
) -> None:
    master = torch.randn(600, 512)  # larger than what is read together
    state = {
        "model": {"w": master.bfloat16(), "tied": torch.zeros(3), "small": torch.randn(50, 3)},
        "optimizer": {
            "state": {
                0: {"master": master, "exp_avg": torch.randn(600, 512), "step": torch.tensor(3.0)}
            }
        },
        "counts": [torch.full((2000,), 7), torch.full((2000,), 7)],
        "numpy": np.arange(100_000.0),
    }
    state["model"]["again"] = state["model"]["tied"]
    with Engine(tmp_path, policy=policy) as engine:
        engine.save(0, state).wait()
        found = engine.restore() if by == "engine" else deltacheck.backends.torch.load(tmp_path)
        tensors = [found["model"][name] for name in ("w", "tied", "small")] + found["counts"]
        tensors += list(found["optimizer"]["state"][0].values())
        assert found["model"]["again"] is found["model"]["tied"]
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        for tensor in tensors:
            tensor.add_(1)
        found["numpy"] += 1
        assert_same(deltacheck.backends.torch.load(tmp_path), state)
        engine.save(1, found).wait()
        assert_same(engine.restore(1), found)
        assert_same(engine.restore(0), state)


def test_memory_is_given_away_only_where_a_leaf_has_all_of_it_alone() -> None:
    def loaded(data: np.ndarray[Any, Any]) -> Loaded:
        return Loaded(LeafSpec.of("x", data.shape, "uint8"), [0], data)

    alone, kept, block, twice = (np.zeros(10, np.uint8) for _ in range(4))
    foreign = torch.zeros(10, dtype=torch.uint8).numpy()
    found = {
        "alone": alone,
        "kept": kept,
        "part": block[:9],
        "one": twice,
        "other": twice.view(),
        "foreign": foreign,
    }
    assert unshared_paths(
        {path: loaded(data) for path, data in found.items()}, {"kept": kept.view()}
    ) == {"alone"}


def test_a_restore_that_would_exceed_the_budget_is_refused_before_it_allocates(
    tmp_path: Path,
) -> None:
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.zeros(1000)})
        with pytest.raises(errors.BudgetExceeded, match=r"4000 bytes.*max_bytes=3999"):
            engine.restore(max_bytes=3999)
        engine.restore(max_bytes=4000)


def test_a_save_draws_nothing_from_the_random_states_of_the_program(tmp_path: Path) -> None:
    def states() -> list[object]:
        words = np.random.get_state()[1]  # type: ignore[index]
        return [random.getstate(), words.tobytes(), torch.get_rng_state().tolist()]  # type: ignore[union-attr]

    before = states()
    with Engine(tmp_path / "run") as engine:
        state = {"w": torch.arange(40_000.0), "few": torch.ones(3)}
        for step in range(3):
            state["w"][step] = -1.0
            engine.save(step, state).wait()
        engine.restore(into=state)
    assert states() == before


def test_listeners_get_the_report_of_each_commit_and_cannot_harm_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[Any] = []

    def fail(report: Any) -> None:
        raise OSError("the monitor is gone")

    with Engine(tmp_path / "root") as engine:
        engine.on_commit(fail)
        engine.on_commit(reports.append)
        handles = [engine.save(step, {"weights": torch.full((9,), step)}) for step in (1, 2)]
        engine.wait()
        assert [report.step for report in reports] == [1, 2]
        assert reports[1].digest == handles[1].result().digest
    assert engine.steps() == [1, 2]
    assert caplog.messages.count("a listener failed on step 2") == 1
