"""verify reads each chain once, a share of it where asked, goes on where it was; and a restore
falls back where asked, and says so.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain import survey, verify
from deltacheck.restore import read
from deltacheck.restore.chain import resolve_chains
from deltacheck.store.roots.opening import open_root
from deltacheck.store.segment import Segment
from tests.support.states import assert_same

LEAVES, STEPS = 12, 8


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    """Leaves that change a little each time: keyframes at steps 0 and 4, deltas in between."""
    state = {f"leaf{n}": torch.arange(n, n + 3000) for n in range(LEAVES)}
    saved = {}
    with Engine(tmp_path / "run", policy=Policy.exact(max_chain_depth=3)) as engine:
        for step in range(STEPS):
            for leaf in state.values():
                leaf[step] += 7
            saved[step] = {path: leaf.clone() for path, leaf in state.items()}
            engine.save(step, state).result(240)
    return tmp_path / "run", saved


def spoil(root: Path, seq: int) -> Path:
    (segment,) = (root / "segments").glob(f"s{seq:010d}-*")
    (stream,) = (segment / "delta.0.stream").glob("c*")
    content = bytearray(stream.read_bytes())
    content[len(content) // 2] ^= 1
    stream.write_bytes(content)
    return stream


def test_a_deep_check_reads_each_table_and_applies_each_delta_once(
    run: tuple[Path, dict[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = run
    opened: Counter[str] = Counter()
    applied: Counter[str] = Counter()
    original, begin = read._check_link, Segment.__init__

    def check(item: Any) -> None:
        applied[f"{item.chain.key[0].id} {item.chain.spec.path}"] += 1
        original(item)

    def init(self: Segment, path: Path, ref: Any, *others: Any) -> None:
        opened[ref.id] += 1
        begin(self, path, ref, *others)

    monkeypatch.setattr(read, "_check_link", check)
    monkeypatch.setattr(Segment, "__init__", init)
    assert deltacheck.open(root).verify(deep=True) == []
    assert set(opened.values()) == {1}
    assert len(applied) == LEAVES * STEPS
    assert set(applied.values()) == {1}


def test_a_damaged_delta_harms_the_steps_from_it_to_the_next_keyframe(
    run: tuple[Path, dict[int, Any]],
) -> None:
    root, _ = run
    stream = spoil(root, 2)
    found = deltacheck.open(root).verify(deep=True)
    assert {finding.step for finding in found} == {2, 3}
    assert all(stream.parent.parent.name in finding.problem for finding in found)
    assert {finding.step for finding in deltacheck.open(root).verify(3, deep=True)} == {3}
    assert deltacheck.open(root).verify(5, deep=True) == []


@pytest.mark.parametrize("lost_bytes", [1, 100, None])
def test_a_data_file_that_was_cut_is_found_without_a_deep_check(
    run: tuple[Path, dict[int, Any]], lost_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = run
    reads: list[Any] = []
    original = read.follow_links
    monkeypatch.setattr(
        read, "follow_links", lambda *args, **more: reads.append(args) or original(*args, **more)
    )
    assert deltacheck.open(root).verify() == []
    assert not reads  # no data is read while the sizes are right
    (segment,) = (root / "segments").glob("s0000000005-*")
    (stream,) = (segment / "delta.0.stream").glob("c*")
    if lost_bytes is None:
        stream.unlink()
    else:
        stream.write_bytes(stream.read_bytes()[:-lost_bytes])
    assert {finding.step for finding in deltacheck.open(root).verify()} == {5, 6, 7}
    assert {finding.leaf for finding in deltacheck.open(root).verify()} <= {
        f"leaf{n}" for n in range(LEAVES)
    }


def test_a_sample_is_drawn_by_its_seed_and_a_scrub_goes_through_all_of_them(
    run: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    root, _ = run
    spoil(root, 2)
    opened = open_root(root)
    one, same = (verify.check(opened, subset=0.25, seed=3) for _ in range(2))
    assert one == same
    assert 0.25 * one.all_bytes <= one.checked_bytes < 0.35 * one.all_bytes
    progress = tmp_path / "scrub.json"
    damaged, read_bytes = set(), 0
    for _ in range(4):
        done = verify.check(opened, subset=0.25, resume=progress)
        damaged |= set(done.findings)
        read_bytes += done.checked_bytes
        if done.remaining_bytes == 0:
            break
    assert done.remaining_bytes == 0
    assert read_bytes >= done.all_bytes
    assert {finding.step for finding in damaged} == {2, 3}
    # What was damaged is read again, until it is not.
    assert {finding.step for finding in verify.check(opened, resume=progress).findings} == {2, 3}


def test_an_interrupted_scrub_goes_on_where_it_was(
    run: tuple[Path, dict[int, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = run
    progress = tmp_path / "scrub.json"
    monkeypatch.setattr(verify, "BATCH_BYTES", 60_000)
    original, walks = read.follow_links, []

    def follow(chains: Any) -> Any:
        walks.append(len(chains))
        if len(walks) == 4:
            raise KeyboardInterrupt
        return original(chains)

    monkeypatch.setattr(read, "follow_links", follow)
    with pytest.raises(KeyboardInterrupt):
        deltacheck.open(root).verify(deep=True, resume=progress)
    done = len(json.loads(progress.read_text())["deltacheck_scrub"]["done"])
    assert done == sum(walks[:3])
    walks.clear()
    walks.extend([0] * 4)
    assert deltacheck.open(root).verify(deep=True, resume=progress) == []
    assert sum(walks) == 2 * LEAVES - done
    assert (
        verify.check(open_root(root), deep=True, resume=progress).checked_bytes > 0
    )  # all was done: it begins anew
    progress.write_text("[]")
    with pytest.raises(ValueError, match="not the progress of a scrub"):
        deltacheck.open(root).verify(resume=progress)


def test_chains_that_have_grown_are_read_again(
    run: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    root, saved = run
    progress = tmp_path / "scrub.json"
    first = verify.check(open_root(root), subset=0.5, seed=0, resume=progress)
    with Engine(root) as engine:
        state = engine.restore()
        state["leaf0"][5] += 1
        engine.save(STEPS, state).result(240)
    second = verify.check(open_root(root), resume=progress)
    assert second.checked_bytes >= first.all_bytes - first.checked_bytes
    assert second.remaining_bytes == 0
    assert saved


def test_the_command_takes_a_share_and_refuses_what_is_none(
    run: tuple[Path, dict[int, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    assert main(["verify", str(root), "--subset", "10%"]) == 0
    assert " are left" in capsys.readouterr().out
    for wrong in ("0", "101%", "some"):
        assert main(["verify", str(root), "--subset", wrong]) == 2
    with pytest.raises(ValueError, match="subset must be"):
        deltacheck.open(root).verify(subset=2.0)


def test_a_survey_gives_each_step_the_links_that_a_restore_finds(
    run: tuple[Path, dict[int, Any]],
) -> None:
    root, saved = run
    with Engine(root) as engine:
        engine.restore(5)  # a fork: another step 6 on the chain of step 5
        engine.save(6, {path: leaf + 1 for path, leaf in saved[5].items()}).result(240)
    opened = open_root(root)
    manifests = [opened.read(ref.manifest_path) for ref in opened.checkpoints()]
    found = survey.survey(opened, manifests)
    assert (found.broken, found.lost) == ([], {})
    for manifest in manifests:
        chains = resolve_chains(opened, manifest, manifest.leaves)
        for lineage in found.lineages:
            for use in lineage.uses:
                if use.seq == manifest.seq:
                    wanted = chains.pop(lineage.path)
                    assert [link[0].id for link in lineage.links[: use.links]] == [
                        wanted.key[0].id,
                        *wanted.delta_segments,
                    ]
                    np.testing.assert_array_equal(
                        survey.tables(lineage).digests[use.links - 1], wanted.digests
                    )
        assert not chains


# --- falling back ---------------------------------------------------------------------------------


def test_a_fallback_takes_the_newest_whole_step_and_says_which(
    run: tuple[Path, dict[int, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    root, saved = run
    spoil(root, 6)
    with Engine(root) as engine:
        with pytest.raises(
            errors.Damaged, match=r"step 7 of .*Steps that still restore: 0, 1, 2, 3, 4, 5"
        ):
            engine.restore()
        assert engine.restored_step is None
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
        assert_same(engine.restore(fallback=True), saved[5])
        assert engine.restored_step == 5
        assert "the newest step is damaged: step 5 of" in caplog.text
        report = engine.save(8, {path: leaf + 1 for path, leaf in saved[5].items()}).result(240)
        assert all(leaf.kind == "delta" for leaf in report.leaves)  # on the chain of step 5
    reader = deltacheck.open(root)
    given = reader.restore(7, ["leaf3"], fallback=True)
    np.testing.assert_array_equal(given["leaf3"], saved[5]["leaf3"])
    assert reader.restored_step == 5
    assert "step 7 is damaged: step 5 of" in caplog.text
    reader.restore(4, fallback=True)
    assert reader.restored_step == 4


def test_a_fallback_passes_a_manifest_that_cannot_be_read(
    run: tuple[Path, dict[int, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    root, saved = run
    for seq in (7, 6):
        (root / "checkpoints" / f"c{seq:010d}" / "zarr.json").write_bytes(b"{}")
    for asked in (None, 7):
        reader = deltacheck.open(root)
        with pytest.raises(errors.Damaged):
            reader.restore(asked)
        np.testing.assert_equal(
            reader.restore(asked, fallback=True),
            {path: leaf.numpy() for path, leaf in saved[5].items()},
        )
        assert reader.restored_step == 5
    assert "c0000000007" in caplog.text


def test_a_fallback_without_a_whole_step_raises_what_the_asked_one_did(
    run: tuple[Path, dict[int, Any]],
) -> None:
    root, _ = run
    for file in (root / "segments").rglob("c*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(errors.Damaged, match="step 7 of"):
        deltacheck.open(root).restore(fallback=True)
    with pytest.raises(errors.StepNotFound):
        deltacheck.open(root).restore(99, fallback=True)


def test_a_manager_falls_back_and_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from deltacheck.backends import orbax as backend

    with backend.manager(tmp_path) as manager:
        for step in (10, 20, 30):
            manager.save(step, args=backend.DeltaSaveArgs({"w": np.arange(3000) + step}))
        manager.wait_until_finished()
        assert backend.restore_whole(manager).step == 30
        (tmp_path / "30" / "default" / "zarr.json").write_bytes(b"{}")
        (segment,) = (tmp_path / "deltacheck" / "segments").glob("s0000000001-*")
        (segment / "zarr.json").unlink()
        found = backend.restore_whole(manager)
        assert found.step == 10
        np.testing.assert_array_equal(found.tree["w"], np.arange(3000) + 10)
        assert "step 30 is damaged: step 10 of" in caplog.text
        with pytest.raises(errors.StepNotFound, match="has no step 25"):
            backend.restore_whole(manager, step=25)
        with pytest.raises(errors.Damaged, match=r"step 20 of .*Steps that still restore: 10"):
            manager.restore(20, args=backend.DeltaRestoreArgs())
