"""Exact saves that know Adam's law: every bit, few bytes, and every tool on such roots."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import deltacheck
from deltacheck import MemoryTier, Policy
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.codec.base import GRADIENT_LAW, MEAN_LAW, STEPS_LAW
from deltacheck.errors import Damaged, LeafPruned
from deltacheck.maintain.compaction import compact
from deltacheck.save.partial_steps import remove_leaves
from deltacheck.store.roots.opening import open_root
from tests.golden.make import LawRun, described
from tests.support import forge
from tests.support.adam_run import AdamRun
from tests.support.merging import merge_newest
from tests.support.ranked_run import RankedRun, cells, rows
from tests.support.segment_files import methods

SHAPE = (320, 400)
LAW = Policy.exact(law=True)


class Narrow(AdamRun):
    """A run with bfloat16 gradients and the arithmetic of torch on a processor without FMA."""

    def advance(self, steps: int = 1, size: float = 1.0) -> None:
        f = np.float32
        for _ in range(steps):
            self.step += 1
            for number, master in enumerate(self.masters):
                g = self.gradient(number, size).astype(ml_dtypes.bfloat16).astype(f)
                m, v = self.first[number], self.second[number]
                m += f(0.1) * (g - m)
                v *= f(0.999)
                v += (f(0.001) * g) * g
                root = np.sqrt(v) / f((1 - 0.999**self.step) ** 0.5) + f(1e-8)
                master -= f(self.rate / (1 - 0.9**self.step)) * m / root


def save(engine: Engine, step: int, run: AdamRun) -> tuple[Any, int]:
    state = run.state()
    report = engine.save(step, state).result(timeout=240)
    assert report is not None
    return state, report.stored_bytes


@pytest.fixture
def run() -> Narrow:
    run = Narrow(SHAPE, parameters=2, rate=1e-4)
    run.advance(30)
    return run


def test_a_step_takes_little_more_than_its_gradients(tmp_path: Path, run: Narrow) -> None:
    saved, sizes = {}, []
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(5):
            saved[step], size = save(engine, step, run)
            sizes.append(size)
            run.advance()
    elements = 2 * SHAPE[0] * SHAPE[1]
    # 14 bytes an element in memory; the gradients have at most two.
    assert max(sizes[1:]) < 2.2 * elements < 0.25 * sizes[0]
    assert GRADIENT_LAW in methods(tmp_path / "root", 4)
    opened = deltacheck.open(tmp_path / "root")
    assert opened.verify(deep=True) == []
    for step, state in saved.items():
        assert described(opened.restore(step)) == described(state)
    manifest = opened.manifest(4)
    assert manifest.must_understand == ("derived", "law")
    assert manifest.contract == "exact"


def test_a_part_is_read_from_its_chunks(tmp_path: Path) -> None:
    run = Narrow((700, 500), parameters=1, rate=1e-4)  # five blocks
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(3):
            state, _ = save(engine, step, run)
            run.advance()
    opened = deltacheck.open(tmp_path / "root")
    for name in ("master", "exp_avg", "exp_avg_sq"):
        whole = state["optimizer"]["state"][0][name]
        path = f"optimizer/state/0/{name}"
        assert np.array_equal(opened.restore(2, [path])[path], whole)
        for part in (np.s_[0:1, :], np.s_[150:420, 3:9], np.s_[699:700, :]):
            assert np.array_equal(opened.restore(2, slices={path: part})[path], whole[part])


def test_float32_gradients_and_several_steps(tmp_path: Path) -> None:
    run = LawRun(SHAPE, parameters=2, rate=1e-4)
    run.advance(30)
    saved = {}
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step, updates in enumerate((0, 1, 1, 5, 0, 1)):
            run.advance(updates)
            saved[step], _ = save(engine, step, run)
    assert {GRADIENT_LAW, MEAN_LAW} <= methods(tmp_path / "root", 2)
    assert STEPS_LAW in methods(tmp_path / "root", 3)
    opened = deltacheck.open(tmp_path / "root")
    assert opened.verify(deep=True) == []
    for step, state in saved.items():
        assert described(opened.restore(step)) == described(state)


def test_a_state_without_a_law_is_exact(tmp_path: Path, run: Narrow) -> None:
    saved = {}
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(4):
            if step == 2:  # as after an optimizer that is none of Adam's
                run.first[0] = run.random.normal(0, 1, SHAPE).astype(np.float32)
                run.second[0][3, 5], run.masters[1][0, 0] = np.nan, np.inf
            saved[step], _ = save(engine, step, run)
            run.advance()
    opened = deltacheck.open(tmp_path / "root")
    for step, state in saved.items():
        assert described(opened.restore(step)) == described(state)


def test_a_resumed_run_goes_on_by_the_law(tmp_path: Path, run: Narrow) -> None:
    saved, size = {}, 0
    for step in range(4):
        with Engine(tmp_path / "root", policy=LAW) as engine:
            if step:
                assert described(engine.restore()) == described(saved[step - 1])
                run.advance()
            saved[step], size = save(engine, step, run)
    assert GRADIENT_LAW in methods(tmp_path / "root", 3)
    assert size < 2.5 * 2 * SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("rewrite", [compact, merge_newest])
def test_compacted_steps_stay_exact(tmp_path: Path, run: Narrow, rewrite: Any) -> None:
    saved = {}
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(4):
            saved[step], _ = save(engine, step, run)
            run.advance()
    assert rewrite(open_root(tmp_path / "root"))
    opened = deltacheck.open(tmp_path / "root")
    assert opened.verify(deep=True) == []
    for step in opened.steps():
        assert described(opened.restore(step)) == described(saved[step])


def test_a_chain_that_reaches_its_limit_begins_again(tmp_path: Path, run: Narrow) -> None:
    saved, kinds = {}, []
    policy = Policy.exact(law=True, max_chain_depth=2)
    with Engine(tmp_path / "root", policy=policy) as engine:
        for step in range(12):
            saved[step] = run.state()
            report = engine.save(step, saved[step]).result(timeout=240)
            assert report is not None
            leaves = {leaf.path: str(leaf.kind) for leaf in report.leaves}
            kinds.append(leaves["optimizer/state/0/master"])
            run.advance()
    # Four times the limit, or at least half of that: the limits of leaves are spread.
    first, second = (n for n, kind in enumerate(kinds) if kind == "keyframe")
    assert first == 0
    assert 4 < second <= 9
    opened = deltacheck.open(tmp_path / "root")
    for step, state in saved.items():
        assert described(opened.restore(step)) == described(state)


def test_groups_that_no_law_predicts_have_chains_of_the_usual_length(tmp_path: Path) -> None:
    run, kinds = Narrow(SHAPE, parameters=1, rate=1e-4), []
    run.advance(30)
    with Engine(tmp_path / "root", policy=Policy.exact(law=True, max_chain_depth=2)) as engine:
        for step in range(4):
            report = engine.save(step, run.state()).result(timeout=240)
            assert report is not None
            leaves = {leaf.path: str(leaf.kind) for leaf in report.leaves}
            kinds.append(leaves["optimizer/state/0/master"])
            run.advance(8)
    assert kinds[1:].count("keyframe") == 1


def test_a_memory_tier_holds_and_copies_such_steps(tmp_path: Path, run: Narrow) -> None:
    tier = MemoryTier(tmp_path / "memory", persist_every=2)
    with Engine(tmp_path / "root", policy=LAW, memory=tier) as engine:
        for step in range(5):
            state, _ = save(engine, step, run)
            run.advance()
        assert described(engine.restore(4)) == described(state)
        engine.persist()
    opened = deltacheck.open(tmp_path / "root")
    assert opened.verify(deep=True) == []
    assert described(opened.restore(4)) == described(state)


@pytest.mark.parametrize(("writers", "layout"), [(4, rows), (4, cells)])
def test_ranks_save_together_and_one_process_restores(
    tmp_path: Path, run: Narrow, writers: int, layout: Any
) -> None:
    saved = {}
    with RankedRun(tmp_path / "root", writers, layout, policy=LAW) as ranks:
        for step in range(3):
            saved[step] = copy.deepcopy(run.state())
            for report in ranks.save(step, run.state()):
                assert not isinstance(report, BaseException), report
            run.advance()
    opened = deltacheck.open(tmp_path / "root")
    assert opened.verify(deep=True) == []
    assert set(opened.manifest(2).must_understand) == {"derived", "tiles", "law"}
    for step, state in saved.items():
        assert described(opened.restore(step)) == described(state)


def test_a_flipped_bit_of_a_law_is_found(tmp_path: Path, run: Narrow) -> None:
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(3):
            save(engine, step, run)
            run.advance()
    opened = open_root(tmp_path / "root")
    folder = tmp_path / "root" / "segments" / opened.manifest(2).segments[-1].id
    files = [file for file in folder.glob("delta.*/c*") if file.is_file()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        for position in (0, len(content) // 2, len(content) - 1):
            content[position] ^= 4
            file.write_bytes(content)
            with pytest.raises(Damaged):
                deltacheck.open(tmp_path / "root").restore(2)
            content[position] ^= 4
        file.write_bytes(content)
    assert deltacheck.open(tmp_path / "root").verify(deep=True) == []


def test_a_law_without_its_feature_is_refused(tmp_path: Path, run: Narrow) -> None:
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(2):
            save(engine, step, run)
            run.advance()
    manifest = max((tmp_path / "root" / "checkpoints").glob("c*")) / "zarr.json"
    forge.forge_table(manifest, -1, lambda body: body.update(must_understand=[]))
    with pytest.raises(Damaged, match="chunks of the feature 'law'"):
        deltacheck.open(tmp_path / "root").restore(1)


@pytest.mark.parametrize(
    ("pattern", "members"), [("model/*", ("master",)), ("*/exp_avg", ("exp_avg", "master"))]
)
def test_a_step_that_loses_leaves_keeps_the_groups_that_others_need(
    tmp_path: Path, run: Narrow, pattern: str, members: tuple[str, ...]
) -> None:
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(3):
            state, _ = save(engine, step, run)
            run.advance()
    opened = open_root(tmp_path / "root")
    assert remove_leaves(opened, {opened.checkpoints()[-1].seq}, [pattern])
    reader = deltacheck.open(tmp_path / "root")
    assert reader.verify(deep=True) == []
    paths = [f"optimizer/state/0/{name}" for name in members]
    restored = reader.restore(2, paths)
    for name, path in zip(members, paths, strict=True):
        assert np.array_equal(restored[path], state["optimizer"]["state"][0][name])
    with pytest.raises(LeafPruned):
        reader.restore(2, ["optimizer/state/0/exp_avg_sq"])


def test_a_damaged_group_costs_the_steps_after_it(tmp_path: Path, run: Narrow) -> None:
    saved = {}
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(3):
            saved[step], _ = save(engine, step, run)
            run.advance()
    opened = open_root(tmp_path / "root")
    folder = tmp_path / "root" / "segments" / opened.manifest(1).segments[-1].id
    file = max(folder.glob("delta.*/c*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    reader = deltacheck.open(tmp_path / "root")
    for step in (1, 2):
        with pytest.raises(Damaged, match=r"master.*Steps that still restore: 0"):
            reader.restore(step)
    assert {finding.step for finding in reader.verify(deep=True)} == {1, 2}
    assert described(reader.restore(fallback=True)) == described(saved[0])


def test_logs_and_reports_count_what_is_predicted(
    tmp_path: Path, run: Narrow, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(3):
            save(engine, step, run)
            run.advance()
    root = str(tmp_path / "root")
    for command in (["log", root], ["show", root], ["diff", root, "0", "2"]):
        assert main(command) == 0, capsys.readouterr()
    assert main(["report", root, "--out", str(tmp_path / "report.html")]) == 0


@pytest.mark.parametrize(
    ("leaf", "edit"),
    [
        ("exp_avg", {"of": "optimizer/state/1/exp_avg"}),
        ("exp_avg", {"of": "optimizer/state/2/master"}),
        ("exp_avg", {"part": 3}),
        ("exp_avg", {"part": 0}),
        ("exp_avg", {"scale": 2.0}),
        ("master", {"part": 1}),
        ("master", {"how": "same"}),
    ],
)
def test_a_forged_group_is_refused(
    tmp_path: Path, run: Narrow, leaf: str, edit: dict[str, Any]
) -> None:
    with Engine(tmp_path / "root", policy=LAW) as engine:
        for step in range(2):
            save(engine, step, run)
            run.advance()
    manifest = max((tmp_path / "root" / "checkpoints").glob("c*")) / "zarr.json"
    forge.forge_manifest(
        manifest, lambda body: body["derived"][f"optimizer/state/0/{leaf}"].update(edit)
    )
    with pytest.raises(Damaged):
        deltacheck.open(tmp_path / "root").restore(1)
