"""Several torch ranks save one step, and any number of them restores it:
``Engine(process_group=...)``.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deltacheck
from deltacheck.codec.base import LAWS
from deltacheck.errors import LeafPruned
from deltacheck.store.files import arrays
from deltacheck.store.layout import seq_of
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import METHOD
from tests.ranks import jobs
from tests.ranks.launch import launch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run of four ranks."""
    root = tmp_path_factory.mktemp("four") / "run"
    contents = launch(jobs.save, 4, root, "fsdp", 3)
    return root, contents[0][0]


def copy_of(root: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(root, to / "copy"))


def test_a_step_of_four_ranks_opens_whole_without_torch_and_verifies_deep(
    saved: tuple[Path, dict],
) -> None:
    root, content = saved
    run = deltacheck.open(root)
    assert run.steps() == [0, 1, 2]
    restored = run.restore()
    assert jobs.same(jobs.whole(restored), content) == []
    assert restored["step"] == 2
    assert run.verify(deep=True) == []
    assert run.manifest().metrics["loss"] == pytest.approx(1 / 3)


def test_a_leaf_of_four_ranks_is_read_by_three_with_a_tenth_to_spare_at_most(
    tmp_path: Path,
) -> None:
    launch(jobs.large, 4, tmp_path / "run", True)
    for read, held, equal in launch(jobs.large, 3, tmp_path / "run", False):
        assert equal
        assert held <= read <= 1.1 * held


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_four_ranks_saved_any_number_restores_bit_for_bit_reading_what_it_holds(
    saved: tuple[Path, dict], tmp_path: Path, size: int
) -> None:
    root, content = copy_of(saved[0], tmp_path), saved[1]
    came = launch(jobs.resume, size, root, "fsdp", 2)
    for restored, read, held, _, _, step in came:
        assert jobs.same(restored, content) == []
        assert step == 2
        assert read == held or size in (2, 3)
    kinds = [leaf.kind for of in came for leaf in of[3][0].leaves]
    assert "unchanged" in kinds  # tiles of before that lie whole in a shard of now
    assert set(kinds) == {"unchanged"} or size in (2, 3)
    assert all(leaf.kind != "keyframe" for of in came for leaf in of[3][1].leaves)
    after = deltacheck.open(root)
    assert jobs.same(jobs.whole(after.restore(101)), came[0][4]) == []
    assert jobs.same(jobs.whole(after.restore(2)), content) == []
    assert after.verify(deep=True) == []


def test_steps_of_four_ranks_by_the_law_of_adam_are_restored_by_two_and_by_one(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    contents = dict(launch(jobs.by_law, 4, root, 0, 4)[0][1])
    for restored, continued in launch(jobs.by_law, 2, root, 4, 3):
        assert jobs.same(restored, contents[3]) == []
        contents |= continued
    opened = deltacheck.open(root)
    assert opened.steps() == list(contents)
    for step, content in contents.items():
        assert jobs.same(jobs.whole(opened.restore(step)), content) == []
    assert opened.verify(deep=True) == []
    # Each rank has predicted its shards of the step before, also after the other number of ranks.
    for step, writers in ((3, 4), (6, 2)):
        assert by_law_in(open_root(root), step) == writers


def by_law_in(root: Root, step: int) -> int:
    """Return the number of ranks whose segment of a step has chunks that a law predicts."""
    manifest = root.manifest(step)
    segments = [root.store.segment(ref) for ref in manifest.segments]
    return sum(
        any(
            np.isin(segment.part(number).index[:, METHOD], LAWS).any()
            for number in range(len(segment.table.parts))
        )
        for segment in segments
        if seq_of(segment.table.id) == manifest.seq
    )


def test_tensor_parallel_with_fsdp_restores_as_itself_and_in_one_process(tmp_path: Path) -> None:
    root = tmp_path / "run"
    content = launch(jobs.save, 4, root, "tp_fsdp", 2)[0][0]
    assert jobs.same(jobs.whole(deltacheck.open(root).restore()), content) == []
    for restored, read, held, reports, _, _ in launch(jobs.resume, 4, root, "tp_fsdp", 1):
        assert jobs.same(restored, content) == []
        assert read == held
        assert all(leaf.kind == "unchanged" for leaf in reports[0].leaves)
    assert deltacheck.open(root).verify(deep=True) == []


def test_what_every_rank_has_alike_is_written_once_and_the_work_is_shared(tmp_path: Path) -> None:
    came = launch(jobs.save, 2, tmp_path / "run", "plain", 2)
    written = [{leaf.path: leaf.raw_bytes for leaf in reports[0].leaves} for _, reports in came]
    assert not written[0].keys() & written[1].keys()
    assert written[0]
    assert written[1]
    sizes = [sum(of.values()) for of in written]
    assert max(sizes) <= 1.5 * min(sizes)
    assert jobs.same(jobs.whole(deltacheck.open(tmp_path / "run").restore()), came[0][0]) == []


def test_ranks_with_leaves_of_their_own_make_one_tree_and_get_their_part_back(
    tmp_path: Path,
) -> None:
    came = launch(jobs.stages, 3, tmp_path / "run")
    for restored, state, step, _ in came:
        assert (
            jobs.same(restored, {path: value for path, value in state.items() if path != "shared"})
            == []
        )
        assert step == 5
    whole = deltacheck.open(tmp_path / "run").restore()
    assert sorted(whole["layers"]) == ["0", "1", "2"]
    assert sorted(whole["rng"]) == ["rank 0", "rank 1", "rank 2"]
    large = [
        sum(size for path, size in written.items() if path.startswith("shared"))
        for _, _, _, written in came
    ]
    assert sum(large) == 24_000_000
    assert max(large) < 24_000_000


@pytest.mark.parametrize("where", ["describe", "shape", "encode", "write", "durable"])
def test_a_failure_of_one_rank_is_everyones_within_seconds_and_the_next_save_is_whole(
    tmp_path: Path, where: str
) -> None:
    came = launch(jobs.fail, 2, tmp_path / "run", where)
    causes = {
        "describe": "builtin_function_or_method",
        "shape": "leaf 'model/0.weight'",
        "encode": "the encoder of rank 1 broke",
        "write": "No space left",
        "durable": "Input/output error",
    }
    for told, steps, _, report in came:
        assert causes[where] in told
        assert steps == [0]
        assert report is not None
    assert "rank 1" in came[0][0]
    run = deltacheck.open(tmp_path / "run")
    assert run.steps() == [0, 2]
    assert jobs.same(jobs.whole(run.restore()), came[0][2]) == []
    assert run.verify(deep=True) == []


def test_with_on_error_log_all_ranks_agree_on_a_failure_and_go_on(tmp_path: Path) -> None:
    results = launch(jobs.tolerate, 2, tmp_path / "run", ["encode", "durable"])
    for states, reports, raised, steps, _ in results:
        assert states == ["committed"] + ["failed", "committed"] * 3
        assert [(step, failures) for step, failures, _ in reports] == [
            (0, 0),
            (2, 1),
            (4, 1),
            (22, 2),
        ]
        # Whole leaves on every rank, because no step has the base of the failed save.
        assert all(kinds == {"keyframe"} for _, _, kinds in reports)
        assert "2 saves in a row have failed (max_failures=2)" in raised
        assert "the save of step 21 failed" in raised
        assert steps == [0, 2, 4, 22]
    reader = deltacheck.open(tmp_path / "run")
    assert jobs.same(jobs.whole(reader.restore()), results[0][4]) == []
    assert reader.verify(deep=True) == []


def test_ranks_merge_deltas_in_place_of_keyframes_and_no_deletion_touches_a_merge(
    tmp_path: Path,
) -> None:
    root, first = tmp_path / "run", 0
    for size in (2, 1):
        results = launch(jobs.merge, size, root, 16)
        for kinds, merged_bytes in results:
            assert kinds[0] == {"delta" if first else "keyframe"}
            assert kinds[1:] == [{"delta"}] * 15
            assert merged_bytes > 0
        first += 16
        run = deltacheck.open(root)
        assert run.steps() == [first - 1, first]
        for step in run.steps():
            assert np.array_equal(run.restore(step)["w"], jobs.merged_content(step).numpy())
        assert run.verify(deep=True) == []
    # What ranks have merged is shorter than a chain of all saves.
    assert len(run.manifest().segments) < 16


def test_a_restore_tells_every_rank_of_a_failure_that_one_has_not_seen(tmp_path: Path) -> None:
    for first, second in launch(jobs.fail_then_restore, 2, tmp_path / "run"):
        assert "rank 1" in first or "Input/output error" in first
        assert second == ""


def test_a_killed_rank_leaves_the_newest_step_and_the_others_are_told_which_it_was(
    tmp_path: Path,
) -> None:
    came = launch(jobs.killed, 3, tmp_path / "run", lost={1})
    for told in (came[0], came[2]):
        assert len(told) == 2
        assert all("rank 1 was lost" in one for one in told)
    run = deltacheck.open(tmp_path / "run")
    assert run.steps() == [0]
    assert run.verify(deep=True) == []


def test_what_ranks_cannot_agree_on_is_refused_on_all_naming_it(tmp_path: Path) -> None:
    (first, steps), (second, _) = launch(jobs.disagree, 2, tmp_path / "run")
    for told in (first, second):
        assert "leaf 'lr' is float" in told[0]
        assert "process 1" in told[0]
        assert "leaf 'w' is float32[4] on rank 0, float32[5] on rank 1" in told[1]
        assert "rank 1 saves step 2" in told[2]
        assert "leaf 'w'" in told[3]
        assert "differ" in told[3]
    assert steps == []


def test_a_signal_to_one_rank_is_told_to_all_in_the_same_step(tmp_path: Path) -> None:
    number = signal.SIGUSR1
    assert launch(jobs.signalled, 2, tmp_path / "run") == [[0, number, number]] * 2


def test_a_save_that_goes_on_costs_the_ranks_two_exchanges(tmp_path: Path) -> None:
    came = launch(jobs.timed, 4, tmp_path / "run", 15)
    assert all(of["exchanges"] == 2 * 15 for of in came)
    made = came[0]["make"]
    added = statistics.median(
        commit - make for commit, make in zip(came[0]["commit"], made, strict=True)
    )
    print(
        f"commit of 4 ranks: {added * 1e3:.1f} ms beside"
        f" {statistics.median(made) * 1e3:.1f} ms of rank 0's own; begin "
        f"{statistics.median(came[0]['begin']) * 1e3:.1f} ms"
    )


def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "fsdp_training.py"
    said = []
    for size, steps in ((2, 4), (1, 7)):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(size),
            str(example),
        ]
        done = subprocess.run(
            [*command, str(tmp_path / "run"), "--steps", str(steps)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout.strip().splitlines()[-1])
    assert said == [
        "2 ranks, steps 0 to 3; checkpoints: [1, 3]",
        "1 ranks, steps 4 to 6; checkpoints: [1, 3, 5, 6]",
    ]


def test_types_of_containers_and_tensors_are_kept_by_several_ranks(tmp_path: Path) -> None:
    for rank, (counter, own, equal, part, whole) in enumerate(
        launch(jobs.types, 2, tmp_path / "run")
    ):
        assert counter == (Counter, Counter({3: 1}), torch.Size)
        assert own == ({f"rank {rank}": rank}, ["layer0", "layer1"])
        assert equal
        assert part == [rank + 1, rank + 1]
        assert whole == [1, 1, 2, 2]


def test_old_steps_of_ranks_lose_the_optimizer_and_keep_the_weights(tmp_path: Path) -> None:
    root = tmp_path / "run"
    # A resume on another number of ranks: the next save goes on from what was restored.
    results = [*launch(jobs.history, 2, root, 8), *launch(jobs.history, 3, root, 6)]
    contents = results[0][0] | results[2][0]
    run = deltacheck.open(root)
    assert run.steps() == list(range(14)) == sorted(contents)
    assert run.verify(deep=True) == []
    whole_steps = {4, 12, 13}  # one with a tag, and the newest
    for step, content in contents.items():
        weights = {path: value for path, value in content.items() if path.startswith("model/")}
        restored = run.restore(step, leaves=list(weights))
        assert jobs.same({path: np.asarray(restored[path]) for path in weights}, weights) == []
        if step in whole_steps:
            assert jobs.same(jobs.whole(run.restore(step)), content) == []
        else:
            with pytest.raises(LeafPruned, match=f"step {step} "):
                run.restore(step)
    # A restore of the ranks names the step, too.
    assert all("step 1 " in error for _, _, error in results)
    # Segments of steps that lost leaves were written again without them, beside the training.
    assert arrays.bytes_on_disk(root / "segments") < 0.8 * sum(size for _, size, _ in results)
