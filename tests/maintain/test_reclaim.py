"""A segment that stays for little is freed: every step restores as before, whatever kill falls
between.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.compaction import reclaim
from deltacheck.save import root_writer
from deltacheck.store import collect
from deltacheck.store.files import arrays
from deltacheck.store.roots import tagging
from deltacheck.store.roots.opening import open_root
from tests.support.states import assert_same


def size(root: Path) -> int:
    return arrays.bytes_on_disk(root / "segments")


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """Four large leaves and a small one that never changes: the first segment stays for that alone
    once step 0 is gone.

    Then one leaf of them changes a little, so that a delta segment too is needed for the sake of
    one leaf.
    """
    root, states = tmp_path / "run", {}
    state: dict[str, Any] = {f"big{k}": torch.randn(300, 300) for k in range(4)} | {
        "small": torch.arange(7),
        "n": 0,
    }
    with Engine(root, policy=Policy.exact(max_chain_depth=1)) as engine:
        for step in range(4):
            states[step] = {
                k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()
            }
            engine.save(step, state).wait(timeout=240)
            for k in range(4) if step < 2 else [1]:
                state[f"big{k}"] += 1
            state["n"] += 1
    for step in (0, 1):
        root_writer.delete(open_root(root), step)
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    return root, states


def check(root: Path, states: dict[int, Any], steps: list[int]) -> None:
    assert deltacheck.open(root).steps() == steps
    assert deltacheck.open(root).verify(deep=True) == []
    with Engine(root) as engine:
        for step in steps:
            assert_same(states[step], engine.restore(step))


def test_the_space_that_one_small_leaf_holds_is_freed(run: tuple[Path, dict[int, Any]]) -> None:
    root, states = run
    tagging.put(open_root(root), 3, "kept")
    before = size(root)
    planned = reclaim(open_root(root), dry_run=True)
    assert size(root) == before
    done = reclaim(open_root(root))
    assert [one.old for one in done] == [one.old for one in planned]
    assert done[0].old.startswith("s0000000000-")
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    assert size(root) < 0.7 * before
    assert not {one.old for one in done} & set(open_root(root).store.segment_ids())
    check(root, states, [2, 3])
    assert deltacheck.open(root).tags() == {"kept": 3}
    assert_same(states[3]["small"], torch.as_tensor(deltacheck.open(root).restore("kept")["small"]))
    assert reclaim(open_root(root)) == ()


@pytest.mark.parametrize("below", [0.0, 0.6, 1.0])
def test_every_step_restores_as_before_however_much_is_rewritten(
    run: tuple[Path, dict[int, Any]], below: float
) -> None:
    root, states = run
    manifests = {step: open_root(root).manifest(step) for step in (2, 3)}
    done = reclaim(open_root(root), below=below)
    assert bool(done) == (below > 0)
    for step, before in manifests.items():
        after = open_root(root).manifest(step)
        assert (after.seq, after.nonce, after.leaves, after.tree) == (
            before.seq,
            before.nonce,
            before.leaves,
            before.tree,
        )
    check(root, states, [2, 3])
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    check(root, states, [2, 3])


def test_a_kill_at_any_moment_leaves_every_step_whole(
    run: tuple[Path, dict[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, states = run
    create, replace, write = arrays.create_file, arrays.replace_file, arrays.write_document
    for after in range(40):
        left = [after]

        def counted(change: Any, left: list[int] = left) -> Any:
            def call(*words: Any) -> Any:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                return change(*words)

            return call

        monkeypatch.setattr(arrays, "create_file", counted(create))
        monkeypatch.setattr(arrays, "replace_file", counted(replace))
        monkeypatch.setattr(arrays, "write_document", counted(write))
        try:
            reclaim(open_root(root), below=0.6)
            break
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
        assert deltacheck.open(root).verify(deep=after % 5 == 0) == []
    assert after > 3
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    check(root, states, [2, 3])


def test_nothing_is_rewritten_where_a_step_is_not_whole(run: tuple[Path, dict[int, Any]]) -> None:
    root, _ = run
    (root / "checkpoints" / "c0000000002" / "zarr.json").write_text("{}")
    before = size(root)
    with pytest.raises(errors.Damaged, match="nothing is rewritten"):
        reclaim(open_root(root), below=1)
    assert size(root) == before
    with pytest.raises(ValueError, match="share between 0 and 1"):
        reclaim(open_root(root), below=2)


def test_the_command_rewrites_and_collects(
    run: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, states = run
    assert main(["prune", str(root), "--compact", "--dry-run"]) == 0
    assert "would be rewritten" in capsys.readouterr().out
    assert main(["prune", str(root), "--compact", "--grace", "0", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert {one["old"] for one in done["rewritten"]} <= set(done["removed"])
    assert done["rewritten"]
    check(root, states, [2, 3])
