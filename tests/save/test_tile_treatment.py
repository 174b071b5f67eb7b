"""Lossy and derived policies of several ranks: each tile keeps the promise of its leaf.

Every committed step is restored and judged by ``tests.support.promises``.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch.files import evaluation
from deltacheck.cli import main
from deltacheck.evaluate.comparison import contract, snapshot
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.contracts import Bounded, Promise, Reused
from deltacheck.save.ranks.rules import weaker
from deltacheck.save.treatment.signals import Signals, combined
from deltacheck.store.roots.opening import open_root
from tests.support.adam_run import BFLOAT16, AdamRun
from tests.support.promises import broken
from tests.support.ranked_run import RankedRun, at_once, cells, rows

MASTER, FIRST, SECOND = (f"optimizer/state/0/{n}" for n in ("master", "exp_avg", "exp_avg_sq"))


def of_hidden(**options: Any) -> Policy:
    policy = Policy.auto(derive=False, stable_from=0)
    assert policy.hidden is not None
    return replace(policy, hidden=replace(policy.hidden, **options))


class Saves:
    """A run, the ranks that save it, and what was live at each step."""

    def __init__(self, root: Path, run: AdamRun | None = None) -> None:
        # At this rate the lattice is finer than the weights, so that codes are stored.
        self.root, self.run = root, run or AdamRun(rate=1e-6)
        self.live: dict[int, Any] = {}
        self.run.advance(100)  # nothing is stable before

    def save(
        self,
        ranks: RankedRun,
        saves: int = 1,
        change: Callable[[Any], None] | None = None,
        metrics: Sequence[dict[str, float]] = ({},),
    ) -> Any:
        for _ in range(saves):
            self.run.advance(10)
            step, state = self.run.step, copy.deepcopy(self.run.state())
            if change is not None:
                change(state)
            self.live[step] = state
            results = at_once(
                ranks.size,
                lambda rank: ranks.save_on(rank, step, state, metrics[rank % len(metrics)]),  # noqa: B023
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        return self.manifest()

    def manifest(self, step: int | None = None) -> Any:
        return open_root(self.root).manifest(step)

    def until_stable(self, ranks: RankedRun) -> Any:
        for _ in range(12):
            if self.save(ranks).stage == "stable":
                return self.save(ranks, 2)
        raise AssertionError("the run never became stable")

    def problems(self, steps: Sequence[int] | None = None) -> list[str]:
        opened = deltacheck.open(self.root)
        return [
            f"step {step}: {problem}"
            for step in (steps or self.live)
            for problem in broken(
                self.live[step],
                opened.restore(step),
                opened.manifest(step),
                self.live.__getitem__,
                self.run.rate,
            )
        ]


POLICIES = {
    "derive": Policy.exact(derive=True),
    "auto": Policy.auto(derive=False),
    "bounded moments": of_hidden(moments="bounded"),
    "bounded weights": of_hidden(weights="bounded"),
}


@pytest.mark.parametrize(
    ("policy", "size", "layout"),
    [*((policy, 3, rows) for policy in POLICIES.values()), (POLICIES["auto"], 4, cells)],
    ids=[*POLICIES, "two axes"],
)
def test_every_step_keeps_the_promises_that_its_manifest_makes(
    tmp_path: Path, policy: Policy, size: int, layout: Any
) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, size, layout, policy=policy) as ranks:
        manifest = saves.save(ranks, 10)
        assert saves.problems() == []
        assert deltacheck.open(tmp_path).verify(deep=True) == []
    assert manifest.must_understand == ("derived", "tiles")
    if policy.hidden is None:
        assert not manifest.names_of("model/w0")
        assert manifest.contract == "exact"
        return
    assert manifest.stage == "stable"
    lattice = manifest.tiles[MASTER]
    # All ranks have decided alike: one lattice for the leaf, whoever writes a part of it.
    assert [rule.how for rule in lattice.forms] == ["lattice"]
    assert manifest.contracts[MASTER].terms == Bounded(32.0, "lr")
    assert (policy.hidden.weights == "bounded") == (not manifest.names_of("model/w0"))
    assert isinstance(manifest.contracts[FIRST].terms, Reused) == (
        policy.hidden.moments == "reused"
    )


@pytest.mark.parametrize("weights", ["exact", "bounded"])
def test_ranks_halve_a_lattice_in_the_same_save(tmp_path: Path, weights: str) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 3, rows, policy=of_hidden(moments="exact", weights=weights)) as ranks:
        saves.until_stable(ranks)
        forms = []
        for _ in range(10):
            saves.run.rate *= 0.8
            forms.append(saves.save(ranks).tiles[MASTER].forms)
    assert {len(rules) for rules in forms} == {1}
    halvings = [rules[0].halvings for rules in forms]
    assert set(halvings) == {0, 1, 2}
    assert halvings == sorted(halvings)
    opened = deltacheck.open(tmp_path)
    assert opened.verify(deep=True) == []
    for step in list(saves.live)[-2:]:
        manifest = opened.manifest(step)
        promise = manifest.contracts[MASTER]
        master = opened.restore(step)["optimizer"]["state"][0]["master"]
        live = saves.live[step]["optimizer"]["state"][0]["master"]
        rate = saves.live[step]["optimizer"]["param_groups"][0]["lr"]
        assert np.abs(master - live).max() <= 32 * rate
        assert promise.measured <= 32


def test_the_log_says_why_a_save_of_several_ranks_is_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 3, policy=of_hidden(moments="exact")) as ranks:
        saves.save(ranks, 3)
        saves.save(ranks, metrics=({"loss": math.nan},))
        saves.save(ranks, 2)
    assert main(["log", "--json", str(tmp_path)]) == 0
    rows_of_log = json.loads(capsys.readouterr().out)["steps"]
    causes = [
        {name for name in ("event", "lattice") if row["causes"][name] > 0} for row in rows_of_log
    ]
    assert causes == [set(), set(), set(), {"event"}, {"lattice"}, set()]


def test_one_rank_saves_what_a_process_alone_would(tmp_path: Path) -> None:
    stored = []
    for size in (1, 3):
        saves = Saves(tmp_path / str(size))
        with RankedRun(saves.root, size, policy=Policy.auto(derive=False)) as ranks:
            saves.save(ranks, 10)
        run = deltacheck.open(saves.root)
        stored.append({step: run.manifest(step).contracts.keys() for step in run.steps()})
    assert stored[0] == stored[1]


def nan(state: Any, name: str, row: int) -> None:
    state["optimizer"]["state"][0][name][row, 3] = np.nan


def far(state: Any, name: str, row: int) -> None:
    state["optimizer"]["state"][0][name][row, 3] = 3e7
    state["model"]["w0"][row, 3] = np.float32(3e7).astype(BFLOAT16)


@pytest.mark.parametrize(
    ("change", "name", "leaves"),
    [
        (nan, "exp_avg", {FIRST, SECOND}),
        (nan, "exp_avg_sq", {FIRST, SECOND}),
        (nan, "master", {MASTER}),
        (far, "master", {MASTER}),
    ],
)
def test_a_tile_that_cannot_keep_the_promise_is_exact_and_the_others_are_not(
    tmp_path: Path, change: Any, name: str, leaves: set[str]
) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 3, policy=Policy.auto(derive=False)) as ranks:
        saves.until_stable(ranks)
        manifest = saves.save(ranks, change=lambda state: change(state, name, 30))  # of rank 1
        for path in leaves:
            cut = manifest.tiles[path]
            assert cut.form == (0, -1, 0)
            assert cut.stored_dtype(1) == "float32"
            assert path in manifest.contracts
        saves.save(ranks, 2)
    assert saves.problems() == []
    assert deltacheck.open(tmp_path).verify(deep=True) == []


@pytest.mark.parametrize(
    "metrics", [{"loss": np.nan}, {"grad_norm": np.inf}, {"lr": 1e-2}, {}], ids=str
)
def test_an_event_that_one_rank_sees_is_an_event_of_all(
    tmp_path: Path, metrics: dict[str, float]
) -> None:
    saves = Saves(tmp_path)
    usual = {"loss": 1.0, "grad_norm": 1.0, "lr": saves.run.rate}
    with RankedRun(tmp_path, 3, policy=Policy.auto(derive=False)) as ranks:
        for _ in range(8):
            manifest = saves.save(ranks, metrics=[usual])
        assert manifest.stage == "stable"
        if not metrics:  # an event of the state, which every rank sees
            saves.run.rate *= 100
        manifest = saves.save(ranks, metrics=[usual, usual | metrics, usual])
    assert manifest.stage == "degraded"
    assert manifest.contract == "exact"
    assert saves.problems([manifest.step]) == []


def whole_master(path: str, shape: Sequence[int], rank: int, size: int) -> list[Any]:
    return [tiles.whole(shape)] if path == MASTER else rows(path, shape, rank, size)


def whole_everywhere(path: str, shape: Sequence[int], rank: int, size: int) -> list[Any]:
    return [tiles.whole(shape)]


def test_a_master_that_is_not_cut_like_its_weight_is_exact(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 3, whole_master, policy=Policy.auto(derive=False)) as ranks:
        manifest = saves.until_stable(ranks)
    assert MASTER not in manifest.contracts
    assert "optimizer/state/1/master" in manifest.contracts
    assert FIRST in manifest.contracts
    assert saves.problems() == []


def hybrid(path: str, shape: Sequence[int], rank: int, size: int) -> list[Any]:
    """Cut leaves over pairs of ranks, each of which holds a copy, as HSDP does."""
    return rows(path, shape, rank // 2, size // 2)


@pytest.mark.parametrize("layout", [whole_everywhere, hybrid])
def test_what_several_ranks_hold_is_written_parameter_by_parameter(
    tmp_path: Path, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bfloat16 weights alone are below the least part of this size, their masters are not.
    monkeypatch.setattr(sharding, "_SPREAD_BYTES", 64 * 96 * 4 // 3)
    saves = Saves(tmp_path, AdamRun(parameters=3))
    with RankedRun(tmp_path, 4, layout, policy=Policy.auto(derive=False)) as ranks:
        manifest = saves.until_stable(ranks)
        # The copies are compared with what was read, and not with the codes that were written.
        saves.save(ranks, 2)
    assert saves.problems() == []
    writers = set()
    for number in range(3):
        paths = [f"optimizer/state/{number}/{n}" for n in ("master", "exp_avg", "exp_avg_sq")]
        assert set(paths) <= manifest.contracts.keys()
        parts = {
            (manifest.tiles[path].cuts, manifest.tiles[path].lanes)
            for path in (*paths, f"model/w{number}")
        }
        assert len(parts) == 1
        writers.update(parts.pop()[1])
    assert writers == {0, 1, 2, 3}  # and the work is spread


def test_a_copy_that_differs_from_what_is_coded_fails_the_save(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 2, whole_everywhere, policy=Policy.auto(derive=False)) as ranks:
        before = saves.until_stable(ranks)
        state = saves.run.state()
        other = copy.deepcopy(state)
        other["optimizer"]["state"][0]["exp_avg"][5, 5] += 1
        owner = before.leaves[FIRST].lane
        states = [other if rank == owner else state for rank in range(2)]
        results = at_once(2, lambda rank: ranks.save_on(rank, 10**6, states[rank]))
        assert all("exp_avg" in str(r) and "differ" in str(r) for r in results), results
        assert saves.manifest().step == before.step


def test_the_promises_hold_after_each_change_of_the_number_of_ranks(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for size in (2, 4, 1):
        with RankedRun(tmp_path, size, policy=Policy.auto(derive=False)) as ranks:
            if saves.live:
                continued = ranks.resume(saves.run.state())
                if size == 1:  # the old tiles lie in the new ones
                    assert any(tiles.leaf_of(name) == MASTER for name in continued[0])
            manifest = saves.until_stable(ranks)
            assert {MASTER, FIRST, SECOND} <= manifest.contracts.keys()
    assert saves.problems() == []
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_rank_that_fails_in_its_save_leaves_no_step_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.save.job.segment_builder import SegmentBuilder

    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 3, policy=Policy.auto(derive=False), on_error="log") as ranks:
        before = saves.until_stable(ranks)
        finish = SegmentBuilder.finish

        def fail(builder: Any) -> Any:
            if builder._setup is ranks.savers[1]._setup:
                raise OSError("the disk of rank 1 is gone")
            return finish(builder)

        with monkeypatch.context() as patch:
            patch.setattr(SegmentBuilder, "finish", fail)
            with pytest.raises(Exception, match="rank 1"):
                saves.save(ranks)
        assert saves.manifest().step == before.step
        del saves.live[saves.run.step]
        manifest = saves.save(ranks, 3)
    assert manifest.stage == "stable"
    assert saves.problems() == []


def test_ranks_that_decide_differently_save_what_each_has_decided(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    with RankedRun(tmp_path, 3, policy=Policy.auto(derive=False)) as ranks:
        saves.until_stable(ranks)
        run_state = ranks.savers[1]._treatment._run
        run_state.scales[MASTER] = 1e-4  # of another lattice
        mixed = []
        for _ in range(4):
            for saver in ranks.savers:
                saver._treatment._run.saves = 5  # a save that samples no scale
            run_state.lattices.clear()
            run_state.stored_pairs.clear()  # moments that are stored anew
            manifest = saves.save(ranks)
            assert manifest.tiles[MASTER].form == (0, 1, 0)
            from_steps = manifest.tiles[FIRST].from_steps
            if from_steps:
                mixed.append(from_steps)
                assert from_steps[1] == manifest.step
                assert manifest.contracts[FIRST].from_step == min(from_steps) < manifest.step
                mixed_step = manifest.step
        assert mixed
    assert saves.problems() == []
    # `deltacheck eval` compares each tile with the step whose values it has.
    opened = deltacheck.open(tmp_path)
    manifest, live = opened.manifest(mixed_step), saves.live[mixed_step]
    check = partial(
        contract.check,
        _taken(live),
        _taken(opened.restore(mixed_step)),
        manifest.contracts,
        mixed_step,
        lambda step: _taken(saves.live[step]),
    )
    assert {leaf.path for leaf in check(cut=manifest.tiles) if leaf.problem} == set()
    cut = manifest.tiles[FIRST]
    newer = msgspec.structs.replace(cut, from_steps=(mixed_step,) * len(cut.from_steps))
    wrong = check(cut={**manifest.tiles, FIRST: newer})
    assert FIRST in {leaf.path for leaf in wrong if leaf.problem}


def _taken(state: Any) -> snapshot.Snapshot:
    return snapshot.take(evaluation.flat(state), evaluation.bytes_of)


def test_the_signals_of_all_ranks_are_the_worst_of_each() -> None:
    first = Signals(1.0, None, (1e-5,), "a", (0.1,), (("frozen", 0.5),), {"x": (4.0, 2)})
    second = Signals(2.0, 0.5, (1e-5,), "a", (0.3,), (), {"x": (2.0, 1), "y": (1.0, 1)})
    assert combined([first, second]) == Signals(
        2.0,
        0.5,
        (1e-5,),
        "a",
        (0.1, 0.3),
        (("frozen", 0.5),),
        {"x": (6.0, 3), "y": (1.0, 1)},
    )
    # A rate that only one rank has changes no other group's place.
    other = Signals(learning_rates=(1e-2, 1e-5))
    assert combined([Signals(learning_rates=(1e-5, 1e-5)), other]) == other
    stages = [Signals(learning_rates=(1e-5,)), Signals(), Signals(learning_rates=(2e-5, 1e-5))]
    assert combined(stages).learning_rates == (1e-5, 2e-5, 1e-5)
    bad = combined([first, Signals(loss=np.nan), second])
    assert np.isnan(bad.loss)
    assert combined([Signals(), Signals()]) == Signals()


def reused(age: int, drift: float | None, measured: float, from_step: int) -> Promise:
    return Promise(Reused(age, drift), measured, from_step)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (
            Promise(Bounded(32.0, "lr"), 9.0),
            Promise(Bounded(16.0, "lr"), 12.0),
            Promise(Bounded(32.0, "lr"), 12.0),
        ),
        (
            Promise(Bounded(32.0, "lr", 1e-6), 9.0),
            Promise(Bounded(32.0, "lr"), 12.0),
            Promise(Bounded(32.0, "lr", 1e-6), 12.0),
        ),
        (reused(30, 0.3, 0.1, 90), reused(40, 0.2, 0.2, 80), reused(40, 0.3, 0.2, 80)),
        (
            reused(30, None, 1.0, 90),
            reused(30, None, 0.0, 100),
            reused(30, None, 1.0, 90),
        ),
        (Promise(Bounded(0.5, "octaves"), 0.1), reused(30, 0.3, 0.1, 90), None),
        (Promise(Bounded(0.5, "octaves"), 0.1), Promise(Bounded(1.0, "l2"), 1.0), None),
        (reused(30, None, 0.1, 90), reused(30, 0.3, 0.1, 90), None),
    ],
)
def test_the_promise_of_a_leaf_is_the_weakest_of_its_parts(
    first: Promise, second: Promise, both: Promise | None
) -> None:
    assert weaker(first, second, 100) == weaker(second, first, 100) == both
    worst = weaker(replace_measured(first, np.nan), first, 100)
    assert worst is not None
    assert np.isnan(worst.measured)


def replace_measured(promise: Promise, measured: float) -> Promise:
    return Promise(promise.terms, measured, promise.from_step)
