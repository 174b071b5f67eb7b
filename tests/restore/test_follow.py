"""Following a run: each committed step as its changes, without gaps, compared with digests."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine, apply
from deltacheck.restore.follow import new_steps
from deltacheck.store.roots.root import Root
from tests.support.adam_run import AdamRun
from tests.support.states import TORCH_DTYPES, assert_same, nudge, random_tensor, training_state
from tests.support.waiting import ShiftedClock


def weights(path: str) -> bool:
    return path.startswith("model/")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Engine, dict[str, Any]]]:
    with Engine(
        tmp_path / "run",
        policy=Policy.exact(max_chain_depth=3),
        options=SaveOptions(grace_seconds=0),
    ) as engine:
        yield engine, training_state()


def save(engine: Engine, state: dict[str, Any], step: int) -> None:
    engine.save(step, state).result(240)


def test_a_follower_that_applies_every_update_has_the_bits_of_every_step(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    mine: dict[str, Any] = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}}
    for step in range(8):  # over keyframes, too
        save(engine, state, step)
        update = follower.poll()
        assert update is not None
        assert (update.step, update.since) == (step, step - 1 if step else None)
        apply(update, mine, check=True)
        assert_same(mine["model"], state["model"])
        nudge(state, seed=step)
    assert follower.poll() is None


def test_an_update_holds_only_what_changed(run: tuple[Engine, dict[str, Any]]) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    save(engine, state, 0)
    first = follower.poll()
    assert first is not None
    assert set(first.changes) == {"model/embed.weight", "model/head.bias"}
    with torch.no_grad():
        state["model"]["embed.weight"].view(-1)[[3, 700]] += 1
    save(engine, state, 1)
    update = follower.poll()
    assert update is not None
    assert {
        path: change.positions.tolist()
        for path, change in update.changes.items()
        if change.positions is not None
    } == {"model/embed.weight": [3, 700]}
    assert update.changed_elements == 2


def test_an_update_reads_no_keyframe_and_no_delta_that_it_has_seen(
    run: tuple[Engine, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root)
    for step in range(3):
        save(engine, state, step)
        nudge(state, seed=step)
    follower.poll()
    save(engine, state, 3)
    from deltacheck.store import segment

    applied: list[str] = []

    original = segment.join_rows

    def join(read: Any, parts: Any, *rows: Any) -> Any:
        applied.extend(str(part.folder.name) for part in parts)
        return original(read, parts, *rows)

    monkeypatch.setattr(segment, "join_rows", join)
    monkeypatch.setattr(
        segment.Segment, "add_natural", lambda *_: pytest.fail("a keyframe was read")
    )
    update = follower.poll()
    assert update is not None
    assert set(applied) == {deltacheck.open(engine.root).manifest(3).segments[-1].id}


def test_steps_that_were_deleted_meanwhile_leave_no_gap(run: tuple[Engine, dict[str, Any]]) -> None:
    from deltacheck.store import collect
    from deltacheck.store.roots.opening import open_root

    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    save(engine, state, 0)
    mine = copy.deepcopy({"model": state["model"]})
    follower.poll()
    for step in range(1, 7):
        nudge(state, seed=step)
        save(engine, state, step)
    opened = open_root(engine.root)
    for step in range(6):
        collect.delete_checkpoint(opened, opened.manifest(step).seq)
    collect.collect(opened, grace_seconds=0)
    update = follower.poll()
    assert update is not None
    assert (update.step, update.since) == (6, 0)
    apply(update, mine, check=True)
    assert_same(mine["model"], state["model"])


def test_newest_only_leaves_out_what_was_committed_meanwhile(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    engine, state = run
    every, newest = (deltacheck.follow(engine.root, newest_only=only) for only in (False, True))
    save(engine, state, 0)
    assert [f.poll().step for f in (every, newest)] == [0, 0]  # type: ignore[union-attr]
    for step in (1, 2):
        nudge(state, seed=step)
        save(engine, state, step)
    assert [u.step for u in iter(every.poll, None)] == [1, 2]
    assert [u.step for u in iter(newest.poll, None)] == [2]


def test_a_damaged_step_is_an_error_and_the_one_after_it_comes_whole(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    save(engine, state, 0)
    follower.poll()
    nudge(state)
    save(engine, state, 1)
    newest = engine.root / "segments" / deltacheck.open(engine.root).manifest(1).segments[-1].id
    for file in newest.rglob("c.*"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(errors.Damaged, match="damaged"):
        follower.poll()
    engine._saver.chains.drop()
    save(engine, state, 2)
    update = follower.poll()
    assert update is not None
    assert (update.step, update.since) == (2, None)
    mine = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}}
    apply(update, mine, check=True)
    assert_same(mine["model"], state["model"])


def test_a_damaged_manifest_is_said_once(run: tuple[Engine, dict[str, Any]]) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root)
    save(engine, state, 0)
    follower.poll()
    save(engine, state, 1)
    manifest = engine.root / "checkpoints" / "c0000000001" / "zarr.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    with pytest.raises(errors.Damaged, match="c0000000001"):
        follower.poll()
    assert follower.poll() is None
    save(engine, state, 2)
    update = follower.poll()
    assert update is not None
    assert update.step == 2


def test_a_damaged_manifest_before_the_newest_step_does_not_matter_at_the_start(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    engine, state = run
    for step in range(2):
        save(engine, state, step)
    (engine.root / "checkpoints" / "c0000000000" / "zarr.json").write_bytes(b"{")
    update = deltacheck.follow(engine.root).poll()
    assert update is not None
    assert update.step == 1


def test_a_step_that_is_committed_during_a_look_is_delivered(
    run: tuple[Engine, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = run
    save(engine, state, 0)
    follower = deltacheck.follow(engine.root)
    follower.poll()
    listed = Root.manifest_paths

    def listed_before_a_commit(self: Root) -> list[Any]:
        paths = listed(self)
        monkeypatch.undo()
        save(engine, state, 2)
        return paths

    save(engine, state, 1)
    monkeypatch.setattr(Root, "manifest_paths", listed_before_a_commit)
    updates = [follower.poll() for _ in range(3)]
    assert [update and update.step for update in updates] == [1, 2, None]


def test_a_changed_tree_begins_again(run: tuple[Engine, dict[str, Any]]) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    save(engine, state, 0)
    follower.poll()
    state["model"]["adapter"] = torch.ones(3)
    save(engine, state, 1)
    update = follower.poll()
    assert update is not None
    assert update.since is None
    assert set(update.changes) == {"model/adapter", "model/embed.weight", "model/head.bias"}


def test_a_state_that_is_not_what_is_followed_is_refused_before_it_is_touched(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    save(engine, state, 0)
    update = follower.poll()
    assert update is not None
    zeros = {k: torch.zeros_like(v) for k, v in state["model"].items()}
    for mine, problem in (
        (
            {"model": {"head.bias": zeros["head.bias"]}},
            "'model/embed.weight' is followed, but not in the state",
        ),
        ({"model": zeros | {"more": torch.zeros(1)}}, "'model/more' of the state is not followed"),
        (
            {"model": zeros | {"embed.weight": torch.zeros(3)}},
            r"'model/embed.weight' is bfloat16\[700, 1000\] in step 0, float32",
        ),
    ):
        with pytest.raises(errors.TreeMismatch, match=problem):
            apply(update, mine)
    assert not zeros["head.bias"].any()


def test_a_check_sees_a_missed_update(run: tuple[Engine, dict[str, Any]]) -> None:
    engine, state = run
    follower = deltacheck.follow(engine.root, leaves=weights)
    save(engine, state, 0)
    mine = copy.deepcopy({"model": state["model"]})
    follower.poll()
    for step in (1, 2):
        nudge(state, seed=step)
        save(engine, state, step)
    assert follower.poll() is not None
    last = follower.poll()
    assert last is not None
    with pytest.raises(errors.Damaged, match="this copy has digest"):
        apply(last, mine, check=True)


def test_every_dtype_and_layout_is_followed_bit_for_bit(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        follower = deltacheck.follow(tmp_path)
        shapes = [(40, 30), (), (0, 3)]
        mine = {f"{d} {s}": random_tensor(d, s, seed=0) for d in TORCH_DTYPES for s in shapes}
        mine["turned"] = torch.randn(30, 40).T
        for step in range(2):
            state = {
                name: random_tensor(t.dtype, tuple(t.shape), seed=step + 1)
                for name, t in mine.items()
            }
            if step:  # few elements
                for name, tensor in state.items():
                    state[name] = mine[name].clone(memory_format=torch.contiguous_format)
                    state[name].view(-1)[: min(1, tensor.numel())] = tensor.reshape(-1)[
                        : min(1, tensor.numel())
                    ]
            engine.save(step, state).result(240)
            update = follower.poll()
            assert update is not None
            apply(update, mine, check=True)
            assert_same({k: v.contiguous() for k, v in mine.items()}, state)


def test_the_iterator_waits_for_the_next_step_and_ends_after_its_timeout(
    run: tuple[Engine, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = run

    def training() -> None:
        for step in range(3):
            save(engine, state, step)
            nudge(state, seed=step)

    thread = threading.Thread(target=training)
    clock = ShiftedClock()
    clock.after_sleep = lambda: None if thread.is_alive() else clock.advance(36_000)
    monkeypatch.setattr(new_steps, "time", clock)
    thread.start()
    follow = deltacheck.follow(engine.root, poll_seconds=0.01, timeout=36_000)
    steps = [update.step for update in follow]
    thread.join()
    assert steps[-1] == 2
    assert steps == sorted(set(steps))


def test_what_is_held_cannot_be_changed_through_an_update(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    engine, state = run
    save(engine, state, 0)
    update = deltacheck.follow(engine.root).poll()
    assert update is not None
    with pytest.raises(ValueError, match="read-only"):
        update.changes["model/head.bias"].values[0] = 1


def test_a_jax_tree_follows_a_torch_run_and_keeps_its_sharding(
    run: tuple[Engine, dict[str, Any]],
) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from deltacheck.backends.orbax import applied

    engine, state = run
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    mine: Any = {
        "model": {
            "embed.weight": jax.device_put(jnp.zeros((700, 1000), jnp.bfloat16), sharding),
            "head.bias": jnp.zeros(64, jnp.float32),
        }
    }
    follower = deltacheck.follow(engine.root, leaves=weights)
    for step in range(3):
        save(engine, state, step)
        update = follower.poll()
        assert update is not None
        mine = applied(update, mine, check=True)
        nudge(state, seed=step)
    assert mine["model"]["embed.weight"].sharding == sharding


def test_a_policy_that_is_not_exact_is_followed_as_a_restore_gives_it(tmp_path: Path) -> None:
    training = AdamRun()
    with Engine(tmp_path, policy=Policy.auto(derive=False)) as engine:
        follower = deltacheck.follow(tmp_path)
        mine = {path: np.zeros(()) for path in ()}
        for step in range(0, 60, 6):
            training.advance(6)
            engine.save(step, training.state()).result(240)
            update = follower.poll()
            assert update is not None
            for path, change in update.changes.items():
                if change.positions is None:
                    mine[path] = np.zeros(change.spec.shape, change.spec.element.numpy)
                change.apply(mine[path])
                change.check(mine[path])
            manifest = deltacheck.open(tmp_path).manifest()
            given = deltacheck.open(tmp_path).restore(leaves=list(mine))
            assert {path: array.tobytes() for path, array in mine.items()} == {
                p: a.tobytes() for p, a in given.items()
            }
        assert manifest.derived
        assert manifest.stage == "stable"
