"""Test the planner: published formulas, the accuracy of predictions, and its verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.planning import verdict
from deltacheck.policy.keyframes import staggered
from deltacheck.profile import planner, probe
from deltacheck.profile.interval import daly_interval, waste, young_interval
from deltacheck.profile.planner import Machine, PlannedRun
from deltacheck.profile.rates import (
    LeafRate,
    Rates,
    at_interval,
    delta_bytes,
    keyframe_bytes,
    mean_bytes,
    mean_chain,
)
from deltacheck.report.data import collect
from deltacheck.report.root_rates import rates_of
from tests.support.adam_run import AdamRun

GB = 1e9
DISK = Machine(write=0.5 * GB, read=1 * GB, encode=2 * GB, apply=4 * GB, copy=10 * GB)
DAY = PlannedRun(step_seconds=1.0, mtbf_seconds=86400.0, restart_seconds=60.0)


def sparse(density: float = 0.01, size: int = 10**10) -> Rates:
    """Return a state of bfloat16 of which a share changes in ten steps, at 1.5 bytes a change."""
    return Rates(10.0, (LeafRate(size, 2, density, size / 2 * density * 1.5, size * 0.8),), 1e5)


def dense(share: float = 0.6, size: int = 10**10) -> Rates:
    """Return a state of float32 in which everything changes."""
    return Rates(10.0, (LeafRate(size, 4, 1.0, size * share, size * 0.9),), 1e5)


# --- the interval ---------------------------------------------------------------------------------


def least(waste: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a unimodal function by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if waste(a) < waste(b) else (a, high)
    return (low + high) / 2


def test_youngs_interval_is_the_published_formula() -> None:
    assert young_interval(50.0, 10_000.0) == pytest.approx(1000.0)


@pytest.mark.parametrize("cost", [0.01, 1.0, 60.0, 600.0, 3600.0])
@pytest.mark.parametrize("mtbf", [3600.0, 86400.0])
def test_dalys_interval_is_where_the_waste_is_least(cost: float, mtbf: float) -> None:
    best = least(lambda t: waste(t, cost, mtbf), 1e-3, 3 * mtbf)
    result = daly_interval(cost, mtbf)
    assert result == pytest.approx(best, rel=0.002 if cost < mtbf / 50 else 0.03)
    assert waste(result, cost, mtbf) <= waste(young_interval(cost, mtbf), cost, mtbf) + 1e-9


def test_where_a_checkpoint_costs_more_than_two_failures_apart_the_interval_is_the_mtbf() -> None:
    assert daly_interval(201.0, 100.0) == 100.0


def test_waste_without_failures_is_what_checkpoints_cost() -> None:
    assert waste(90.0, 10.0, 1e12) == pytest.approx(0.1)
    assert waste(1e9, 1.0, 1.0) == 1.0


def test_waste_is_that_of_a_simulated_run() -> None:
    interval, cost, mtbf, restart = 100.0, 8.0, 400.0, 15.0
    random = np.random.default_rng(0)
    seconds = progress = 0.0
    failure = random.exponential(mtbf)  # seconds until the next one
    for _ in range(40_000):
        while failure < interval + cost:
            seconds += failure
            failure = random.exponential(mtbf)
            while failure < restart:  # a restart may fail, too
                seconds += failure
                failure = random.exponential(mtbf)
            seconds, failure = seconds + restart, failure - restart
        seconds, progress, failure = (
            seconds + interval + cost,
            progress + interval,
            failure - interval - cost,
        )
    assert waste(interval, cost, mtbf, restart) == pytest.approx(1 - progress / seconds, rel=0.03)


# --- the chain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 8, 32, 100])
def test_the_mean_chain_is_that_of_the_staggered_limits(depth: int) -> None:
    real = statistics.fmean(staggered(f"layer.{k}.weight", depth) for k in range(4000))
    assert mean_chain(depth) == pytest.approx(real, rel=0.02)


# --- bytes ----------------------------------------------------------------------------------------

# Stored bytes an element at 1, 10 and 50 steps apart, as measured on our runs
# (docs/how-to/size-an-interval.md).
MEASURED = [
    pytest.param(2, 0.004, (0.006, 0.029, 0.068), id="bf16 weights, lr 1e-6"),
    pytest.param(2, 0.042, (0.046, 0.206, 0.388), id="bf16 weights, lr 2e-5"),
    pytest.param(4, 1.0, (1.3, 1.65, 1.9), id="fp32 master, lr 1e-6"),
    pytest.param(4, 1.0, (1.7, 2.2, 2.4), id="fp32 master, lr 2e-5"),
    pytest.param(4, 1.0, (2.05, 2.7, 2.9), id="second moment"),
]


@pytest.mark.parametrize(("width", "density", "measured"), MEASURED)
def test_the_laws_of_growth_meet_what_was_measured_within_a_quarter(
    width: int, density: float, measured: tuple[float, float, float]
) -> None:
    count = 1000
    rates = Rates(
        1.0, (LeafRate(count * width, width, density, measured[0] * count, width * count),), 0.0
    )
    for steps, expected in zip((10, 50), measured[1:], strict=True):
        result = delta_bytes(at_interval(rates, steps)) / count
        assert expected / 1.25 < result < expected * 1.25


@pytest.mark.parametrize("rates", [sparse(), sparse(0.4), dense()], ids=["sparse", "half", "dense"])
def test_a_longer_interval_never_makes_a_delta_smaller_nor_larger_than_a_whole_leaf(
    rates: Rates,
) -> None:
    sizes = [delta_bytes(at_interval(rates, steps)) for steps in (1, 2, 5, 10, 100, 10_000, 10**7)]
    assert sizes == sorted(sizes)
    assert 0.9 * keyframe_bytes(rates) < sizes[-1] <= keyframe_bytes(rates)
    assert at_interval(rates, 10) == rates


def test_a_mean_checkpoint_has_its_share_of_a_keyframe() -> None:
    rates = Rates(
        1.0, (LeafRate(1000, 4, 1.0, 100.0, 900.0), LeafRate(5000, 4, 0.0, 0.0, 5000.0)), 7.0
    )
    assert mean_bytes(rates, 0) == 900 + 7, (
        "every save writes what moves whole, and what never moves never again"
    )
    assert mean_bytes(rates, 1) == (900 + 100) / 2 + 7
    assert mean_bytes(rates, 8) == pytest.approx((900 + 6.5 * 100) / 7.5 + 7)


# --- the plan -------------------------------------------------------------------------------------


def test_sparse_changes_on_a_slow_disk_pay() -> None:
    plan = planner.plan(sparse(), replace(DISK, write=0.1 * GB), DAY)
    assert verdict(plan) == "deltas pay: fewer bytes and less time lost"
    deltas, asynchronous, synchronous, equal_bytes = plan.ways
    assert deltas.bytes < 0.15 * plan.state_bytes
    assert deltas.waste < asynchronous.waste < synchronous.waste
    assert equal_bytes.interval_steps > 4 * deltas.interval_steps


def test_deltas_will_not_pay_where_everything_changes_and_the_storage_is_fast() -> None:
    plan = planner.plan(dense(0.8), replace(DISK, write=20 * GB, read=20 * GB), DAY)
    assert verdict(plan) == "deltas will not pay"
    reasons = " ".join(plan.reasons)
    assert "the storage is faster than the encoder" in reasons
    assert "comparing and compressing takes 5 s, writing everything whole 0.5 s" in reasons
    assert "more than 70%" in reasons
    assert "no time is saved" in reasons


def test_a_fast_storage_leaves_only_the_bytes_to_save() -> None:
    plan = planner.plan(sparse(), replace(DISK, write=50 * GB, read=50 * GB), DAY)
    assert verdict(plan) == "deltas save bytes, but no time"


def test_a_run_has_one_whole_save_and_shares_are_those_of_the_state() -> None:
    plan = planner.plan(sparse(), DISK, DAY, interval_steps=10)
    assert plan.of_run(305) == (30, plan.keyframe_bytes + 29 * plan.ways[0].bytes)
    assert plan.of_run(3) == (1, plan.keyframe_bytes)
    share = plan.ways[0].bytes / plan.state_bytes
    assert plan.reasons[0].startswith(f"a checkpoint takes {share:.1%} of the state in the mean")


def test_an_interval_after_which_everything_has_changed_is_told() -> None:
    plan = planner.plan(dense(), DISK, DAY, interval_steps=10**6)
    assert not plan.saves_bytes
    assert any(
        "1e+06 steps are so long that nearly everything has changed" in reason
        for reason in plan.reasons
    )
    assert any("extrapolation" in reason for reason in plan.reasons)


def test_a_restore_limit_shortens_the_chain_and_is_met() -> None:
    free, tight = (
        planner.plan(
            dense(), DISK, DAY, interval_steps=10, max_restore_ratio=None, max_restore_seconds=limit
        )
        for limit in (None, 40.0)
    )
    assert tight.max_chain_depth < free.max_chain_depth == 32
    assert tight.ways[0].restore_seconds <= 40.0 < free.ways[0].restore_seconds
    rates = at_interval(dense(), 10)
    assert planner.restore_seconds(rates, DISK, DAY, tight.max_chain_depth + 1) > 40.0
    whole = planner.plan(dense(), DISK, DAY, interval_steps=10, max_restore_seconds=12.0)
    assert any("leaves no room for a delta" in reason for reason in whole.reasons)
    with pytest.raises(ValueError, match="without any delta, more than the 5 s that"):
        planner.plan(dense(), DISK, DAY, max_restore_seconds=5.0)


def test_where_everything_changes_a_restore_decodes_no_more_than_the_ratio_says() -> None:
    plans = {
        ratio: planner.plan(dense(), DISK, DAY, interval_steps=10, max_restore_ratio=ratio).ways[0]
        for ratio in (None, 3, 1)
    }
    assert plans[None].restore_seconds > 5 * plans[3].restore_seconds > 5 * plans[1].restore_seconds
    assert plans[None].bytes < plans[3].bytes < plans[1].bytes
    few = [
        planner.plan(sparse(), DISK, DAY, interval_steps=10, max_restore_ratio=ratio).ways[0]
        for ratio in (None, 6)
    ]
    assert few[0] == few[1], "32 deltas in which few words change hold less than that"


def test_saves_that_are_slower_than_their_interval_are_spread_or_charged() -> None:
    slow = replace(DISK, write=0.01 * GB)
    best = planner.plan(dense(), slow, DAY).ways[0]
    assert best.durable_seconds <= best.interval_steps * DAY.step_seconds + 1
    hurried = planner.plan(dense(), slow, DAY, interval_steps=10).ways[0]
    assert hurried.blocking_seconds > 500


@given(
    st.floats(0.001, 1.0), st.floats(1.0, 8.0), st.sampled_from([sparse(), sparse(0.3), dense()])
)
def test_more_speed_never_costs_and_more_failures_never_lengthen_the_interval(
    write: float, times: float, rates: Rates
) -> None:
    machine = replace(DISK, write=write * GB)
    slow, fast = (
        planner.plan(rates, m, DAY, interval_steps=50)
        for m in (machine, replace(machine, write=write * times * GB))
    )
    assert fast.ways[0].durable_seconds <= slow.ways[0].durable_seconds
    assert fast.ways[0].waste <= slow.ways[0].waste + 1e-12
    rare = planner.plan(rates, machine, replace(DAY, mtbf_seconds=DAY.mtbf_seconds * times))
    assert rare.daly_seconds >= planner.plan(rates, machine, DAY).daly_seconds
    parallel = planner.plan(rates, machine, replace(DAY, processes=4), interval_steps=50)
    assert parallel.ways[0].blocking_seconds <= slow.ways[0].blocking_seconds + 1e-9


@given(st.integers(0, 63))
def test_a_longer_chain_stores_less_and_restores_later(depth: int) -> None:
    a, b = (
        planner.plan(sparse(), DISK, DAY, interval_steps=10, max_chain_depth=d)
        for d in (depth, depth + 1)
    )
    assert b.ways[0].bytes <= a.ways[0].bytes
    assert b.ways[0].restore_seconds > a.ways[0].restore_seconds
    assert a.delta_bytes <= a.ways[0].bytes <= a.keyframe_bytes


@pytest.mark.parametrize("wrong", [{"write": 0.0}, {"read": -1.0}, {"encode": math.nan}])
def test_a_speed_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be more than 0"):
        Machine(**{**dataclasses.asdict(DISK), **wrong})


# --- real roots -----------------------------------------------------------------------------------


def train(root: Path, every: int, steps: int = 37) -> None:
    """Train a small model with AdamW, float32 masters and bfloat16 weights.

    The training does not depend on ``every``.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(3)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    with Engine(root, policy=Policy.exact(max_chain_depth=100, max_restore_ratio=None)) as engine:
        for step in range(steps):
            loss = (model(torch.randn(16, 300)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % every == 0:
                half = {
                    name: value.to(torch.bfloat16) for name, value in model.state_dict().items()
                }
                engine.save(
                    step,
                    {
                        "model": half,
                        "master": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    },
                ).wait()


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("planner")
    for every in (3, 12):
        train(folder / str(every), every)
    return {every: folder / str(every) for every in (3, 12)}


def stored_bytes(root: Path) -> float:
    """Return the mean bytes on disk of the checkpoints after the first."""
    return statistics.fmean(step.written_bytes for step in collect(root).steps[1:])


def test_what_a_root_stores_is_predicted_from_it_within_a_twentieth(roots: dict[int, Path]) -> None:
    rates = rates_of(collect(roots[3]))
    assert rates.interval_steps == 3
    assert delta_bytes(rates) == pytest.approx(stored_bytes(roots[3]), rel=0.05)


def test_what_a_root_stores_at_four_times_the_interval_is_predicted_within_a_quarter(
    roots: dict[int, Path],
) -> None:
    rates = at_interval(rates_of(collect(roots[3])), 12)
    assert delta_bytes(rates) == pytest.approx(stored_bytes(roots[12]), rel=0.25)


SPEEDS = [f"--speed={name}=1e9" for name in ("write", "read", "encode", "apply", "copy")]


def test_the_command_plans_from_a_root(
    roots: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(roots[3]), *SPEEDS, "--step-seconds", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("deltas ")
    assert "(Young), " in shown
    assert "whole, training waits" in shown


def test_one_table_compares_policies_at_the_interval_that_was_asked_for(
    roots: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(roots[12]), *SPEEDS, "--step-seconds", "1", "--interval-steps", "12"]
    line += ["--policy", "exact", "--policy", "auto"]
    assert main(line) == 0
    shown = capsys.readouterr()
    text, *told = shown.out[shown.out.index("METHOD") :].split("\n\n")
    assert told[-2] == "a restore under exact:\n  all leaves: every bit"
    assert told[-1].startswith("a restore under auto:\n  masters of bfloat16 weights: within 32")
    table = text.splitlines()
    rows = [re.split(r" {2,}", row) for row in table]
    assert [row[0] for row in rows] == [
        "METHOD",
        "exact",
        "auto",
        "whole, in background",
        "whole, training waits",
    ]
    assert {row[1] for row in rows[1:]} == {"12"}
    assert max(map(len, table)) <= 80
    assert main([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    exact, auto = document["compared"]
    # The headline, the table, and what is then measured agree.
    assert exact == document["ways"][0] | {"name": "exact"}
    assert exact["bytes"] == pytest.approx(stored_bytes(roots[12]), rel=0.05)
    assert auto["bytes"] < exact["bytes"] / 4
    assert document["unsteady"] == {}
    assert [row["policy"] for row in document["policies"]] == ["exact", "auto"]


def test_a_policy_that_bounds_nothing_is_missing_and_the_reason_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = np.zeros((300, 300), np.float32)
    with Engine(tmp_path) as engine:
        for step in range(3):
            weight[:, step] += 1
            engine.save(step, {"w": weight.copy()}).wait()
    line = ["plan", str(tmp_path), *SPEEDS, "--step-seconds", "1"]
    assert main([*line, "--policy", "exact", "--policy", "auto"]) == 0
    assert "auto is not in the table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["--step-seconds", "1"],
            "measure it with --probe FOLDER, or give --speed write=B --speed read=B",
        ),
        ([*SPEEDS, "--policy", "lossy"], "'lossy' is no policy"),
        (["--policy", "auto", SPEEDS[0]], "or give --speed read=B --speed encode=B"),
        ([*SPEEDS[1:], "--speed=write=0"], "such as write=1e9, not 'write=0'"),
        ([*SPEEDS, "--mtbf-hours", "0"], "--mtbf-hours must be more than 0"),
        ([*SPEEDS, "--profile", "profile.json"], "--profile goes with --policy auto"),
    ],
    ids=["no speed", "policy", "one speed", "speed of nothing", "failures", "profile"],
)
def test_misuse_of_plan_names_the_way_out(
    line: list[str], message: str, roots: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(roots[3]), *line]) == 2
    assert message in capsys.readouterr().err


def test_files_of_others_do_not_show_the_time_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        torch.save({"w": torch.ones(100) * step}, tmp_path / f"step-{step}.pt")
    line = ["plan", str(tmp_path), *SPEEDS, "--policy", "exact"]
    assert main(line) == 2
    assert "--step-seconds is needed" in capsys.readouterr().err
    assert main([*line, "--step-seconds", "1"]) == 0


def test_a_root_of_one_step_cannot_be_planned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(0, {"a": torch.ones(3)}).wait()
    assert main(["plan", str(tmp_path / "root"), *SPEEDS, "--step-seconds", "1"]) == 3
    assert "fewer than two steps" in capsys.readouterr().err


def test_a_probe_measures_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "STATE_BYTES", 1 << 20)
    result = probe.measure(tmp_path)
    assert all(1e5 < rate < 1e13 for rate in dataclasses.asdict(result).values())
    assert list(tmp_path.iterdir()) == []


def test_planning_needs_no_library_of_the_report() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; import deltacheck.cli.planning,"
        " deltacheck.cli.reporting, deltacheck.report.data"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_root_of_codes_is_planned_from_its_present_stage_and_its_whole_state(
    tmp_path: Path,
) -> None:
    run = AdamRun((96, 96), 3)
    run.advance(100)
    reports = []
    with Engine(
        tmp_path,
        policy=Policy.auto(
            derive=False, moments="bounded", max_chain_depth=100, max_restore_ratio=None
        ),
    ) as engine:
        for _ in range(14):
            run.advance(10)
            reports.append(engine.save(run.step, run.state()).result())
    rates = rates_of(collect(tmp_path))
    assert rates.state_bytes == reports[-1].raw_bytes
    delta = sum(leaf.delta_bytes for leaf in rates.leaves) + rates.tables_bytes
    assert delta == pytest.approx(
        statistics.fmean(report.stored_bytes for report in reports[-4:]), rel=0.2
    )
    assert delta < reports[0].stored_bytes / 2
