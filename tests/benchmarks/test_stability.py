"""The accounting of `benchmarks stability`: entropies, amortised keyframes, bytes, resumed runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("optax")


from benchmarks import entropy, quality, stability, ways
from benchmarks.record import Settings
from benchmarks.ways import Chain, Run, class_of
from benchmarks.workloads.recipe import tiny
from deltacheck import Policy
from deltacheck.store.files.arrays import bytes_on_disk


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def test_entropy_is_that_of_the_changes_if_they_are_fewer_than_the_values() -> None:
    random = np.random.default_rng(0)
    before = random.integers(0, 1 << 16, 100_000).astype(np.uint16)
    now = before.copy()
    moved = random.random(before.size) < 0.02
    now[moved] += 1
    share = moved.mean()
    expected = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8 * before.size
    assert entropy.leaf_bytes(before, now) == pytest.approx(expected)
    assert entropy.leaf_bytes(before, before) == 0
    assert entropy.bound_bytes(
        {"a": before, "b": before}, {"a": now, "b": before}
    ) == pytest.approx(expected)


def test_a_step_back_costs_as_much_as_a_step_forward_and_a_new_value_no_more_than_itself() -> None:
    before = np.full(4096, 1000, np.uint32)
    up, down = before.copy(), before.copy()
    up[::2] += 1
    down[::2] -= 1  # its high bytes borrow, and cost nothing
    assert entropy.leaf_bytes(before, up) == entropy.leaf_bytes(before, down) == 4096 / 8
    either = np.where(np.arange(4096) % 2, 1, -1).astype(np.int32).view(np.uint32)
    values = np.random.default_rng(1).integers(1, 1 << 31, 4096).astype(np.uint32)
    assert entropy.leaf_bytes(values, values + either) == 4096 / 8
    noise = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16).astype(np.uint32)
    assert entropy.leaf_bytes(noise, np.full_like(noise, 7)) == 0
    assert entropy.leaf_bytes(noise, noise[::-1].copy()) == pytest.approx(noise.nbytes, rel=0.01)


def test_words_are_the_bits_whichever_framework_holds_them() -> None:
    import jax.numpy as jnp

    values = [0.5, -0.0, 3.0]
    expected = [0x3F00, 0x8000, 0x4040]
    assert entropy.words_of(torch.tensor(values, dtype=torch.bfloat16)).tolist() == expected
    assert entropy.words_of(jnp.array(values, jnp.bfloat16)).tolist() == expected


def test_keyframes_are_amortised_over_the_deltas_that_follow_them() -> None:
    assert stability.amortised(10.0, 100.0, [(5, 9), (5, 9)]) == pytest.approx(0.9 * 10 + 0.1 * 100)
    assert stability.amortised(10.0, 100.0, [(1, 0), (3, 1)]) == pytest.approx(
        (1 - 2.5 / 4) * 10 + 2.5 / 4 * 100
    )


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_byte_of_a_save_is_counted_and_a_restore_gives_its_state_back(
    framework: str, tmp_path: Path
) -> None:
    run = Run(framework, tiny("lora", pretrain_steps=0))
    chain = Chain(framework, tmp_path / "root", Policy.exact())
    initial_bytes = bytes_on_disk(tmp_path / "root")
    masters = {}
    for _ in range(3):
        run.train(1)
        chain.save(run.workload.step, run.workload.state(), run.metrics(0.0))
        masters[run.workload.step] = run.masters()
    assert list(chain.bytes) == [1, 2, 3]
    assert sum(chain.bytes.values()) == bytes_on_disk(tmp_path / "root") - initial_bytes
    assert chain.settled() == [chain.bytes[2], chain.bytes[3]]
    assert chain.bytes[2] < chain.bytes[1] / 2  # the frozen weights are written once
    run.workload.load(chain.restore(2, run.workload.state()))
    assert run.workload.step == 2
    restored = run.masters()
    assert all(np.array_equal(restored[path], master) for path, master in masters[2].items())
    chain.close()


def test_the_steady_state_of_a_policy_with_stages_is_what_follows_the_first_stable_save() -> None:
    chain = Chain.__new__(Chain)
    chain.bytes, chain.stages = (
        {1: 100, 2: 90, 3: 50, 4: 7, 5: 9},
        {1: "warm", 2: "warm", 3: "stable", 4: "stable", 5: "stable"},
    )
    assert chain.settled() == [7, 9]
    chain.stages[5] = "degraded"
    assert chain.settled() == [7]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_classes_hold_the_same_parameters_and_moments_find_their_pair(framework: str) -> None:
    run = Run(framework, tiny("sft", pretrain_steps=0))
    run.train(1)
    words = run.words()
    counts = {name: sum(leaf.size for leaf in words[name].values()) for name in ways.CLASSES}
    assert len(set(counts.values())) == 1
    pairs = list(run.moments(run.workload.state()))
    assert len(pairs) == len(words[ways.MASTER])
    assert all(first.shape == second.shape and np.all(second >= 0) for _, first, second in pairs)
    assert any(np.any(first < 0) for _, first, _ in pairs)
    assert class_of("data/position") == class_of("rng") == ways.OTHER


def test_a_loss_is_worth_as_many_steps_as_the_run_needs_for_it() -> None:
    resume = quality.Resumed(10, "", 0.03, 0.1, 0.04, 1.0, 0.0, 0.0, 1.0, True)
    better = replace(resume, loss_change=-0.01, noise=-0.02)
    assert quality.lost_by_loss([resume, better], horizon=20) == pytest.approx(2.0)
    assert quality.lost_by_loss([replace(resume, progress=0.0)], horizon=20) is None
    assert quality.noise_sd([resume, better]) == pytest.approx(
        math.sqrt((0.04**2 + 0.02**2) / 2 / 2)
    )
    assert quality.loss_row("x", [resume, better], 20)[3:5] == [pytest.approx(0.01), 0.03]


def test_the_records_of_all_seeds_are_grouped_by_save() -> None:
    plan = quality.KillPlan(seeds=(1, 2), settle_steps=2, every=2, numbers=(1, 3), horizon=2)
    resume = quality.Resumed(10, "", 0.03, 0.1, 0.04, 1.0, 0.0, 0.0, 1.0, True)
    records = [replace(resume, step=step) for step in (2, 6, 2, 6)]
    steps = {
        number: [record.step for record in of_save]
        for number, of_save in quality.by_save(records, plan).items()
    }
    assert steps == {1: [2, 2], 3: [6, 6]}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"loss_change": 0.05}, ["x, auto, resumed from save 1, loss"]),
        ({"lost_steps": 0.6}, ["x, auto, resumed from save 1, lost steps"]),
        ({"lost_steps": 2.9, "stage": "stable"}, []),
        ({"lost_steps": 3.1, "stage": "stable"}, ["x, auto, resumed from save 1, lost steps"]),
    ],
)
def test_a_resume_from_an_early_save_that_loses_too_much_is_a_miss(
    changes: dict[str, Any], missed: list[str]
) -> None:
    plan = quality.KillPlan(seeds=(1,), settle_steps=2, every=2, numbers=(1, 3), horizon=2)
    good = quality.Resumed(2, "", 0.02, 0.1, 0.04, 0.5, 0.0, 0.0, 1.0, True)
    figures = stability.promised_early("x", [replace(good, **changes), good], plan)
    assert [figure.name for figure in figures if not figure.holds] == missed


def test_kills_in_a_row_that_lose_more_than_the_noise_are_a_miss() -> None:
    rows = [[name, 10, 0.0, 0.02, 0.02, 0.03] for name in quality.CHAINED]
    assert stability.promised_chain(rows).holds
    last = next(row for row in rows if row[0] == quality.AUTO_CHAIN)
    last[3] = 0.031
    assert not stability.promised_chain(rows).holds


def test_a_damaged_restore_is_seen_by_every_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact policy loses nothing, and the same restores with a wrong master are all detected."""
    plan = quality.KillPlan(seeds=(1,), settle_steps=2, every=2, numbers=(2,), horizon=2)
    recipe = tiny("sft", pretrain_steps=1)
    (sound,) = quality.resumed("torch", recipe, ways.WAYS[:1], plan, tmp_path / "sound")["exact"]
    assert (
        sound.step,
        sound.loss_change,
        sound.lost_steps,
        sound.restore_error,
        sound.element_change,
    ) == (4, 0, 0, 0, 0)
    assert sound.update == 1
    assert sound.forward_exact
    assert sound.noise != 0
    original = Chain.restore

    def damaged(self: Chain, step: int, like: Any) -> Any:
        state = original(self, step, like)
        state["optimizer"]["state"][0]["master"][0, 0] += 1.0
        state["model"]["norm.weight"][0] += 1.0
        return state

    monkeypatch.setattr(Chain, "restore", damaged)
    (broken,) = quality.resumed("torch", recipe, ways.WAYS[:1], plan, tmp_path / "broken")["exact"]
    assert broken.restore_error == pytest.approx(1.0 / recipe.rate, rel=0.01)
    assert broken.element_change > 1e4
    assert not broken.forward_exact
    assert broken.loss_change != 0


def test_the_whole_benchmark_runs_and_measures_every_policy(tmp_path: Path) -> None:
    result = json.loads(json.dumps(stability.run(Settings(quick=True, folder=tmp_path)).as_json()))
    tables = [table["rows"] for table in result["tables"]]
    sizes, classes, losses, weights, verdicts, early, chains = tables
    assert [(row["policy"], row["save"]) for row in early] == [
        (policy, save) for policy in ("exact", "auto") for save in (1, 2)
    ]
    assert [row["loss change"] for row in early[:2]] == [0, 0]  # exact
    assert all(row["loss change"] != 0 for row in early[2:])
    assert [row["inexact at each resume"] for row in chains] == list(quality.CHAINED)
    assert chains[0]["loss change"] == 0  # with nothing inexact
    assert chains[-1]["loss change"] != 0
    names = [way.name for way in ways.WAYS]
    for table in (sizes, losses, weights):
        assert [row["policy"] for row in table] == names
    assert sizes[0]["order-0 entropy, lossless"] < sizes[0]["steady"] < sizes[0]["amortised"] < 1
    assert all(row["stored over entropy"] > 1 for row in classes)
    assert {row["restored with"] for row in verdicts} >= {"m zero", "v zero, m kept"}
    zero = next(row for row in verdicts if row["restored with"] == "v zero, m kept")
    assert zero["accepted"] == "no"
    assert zero["against the law"] > 0
    exact = {
        figure["name"]: figure["holds"]
        for figure in result["figures"]
        if "after a resume" in figure["name"]
    }
    assert [holds for name, holds in exact.items() if ", exact," in name] == [True]
