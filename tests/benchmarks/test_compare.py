"""`python -m benchmarks compare`: two rivals on a tiny state, and the verdict on planted rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import deltacheck

torch = pytest.importorskip("torch")
pytest.importorskip("optax")


from benchmarks import compare, race
from benchmarks.compare import ASYNC, MOONCLIP, SAMPLES, TORCH_CHECKPOINTING, Entry
from benchmarks.race import Job
from benchmarks.rivals import (
    AUTO,
    BOUNDED,
    EXACT,
    RIVALS,
    OursTorchPostTraining,
    TorchSave,
)
from deltacheck.backends.torch import Engine

NAMES = ["torch.save", EXACT]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Entry]]:
    """Measure torch.save and deltacheck on the tiny RL state.

    It is done in this process, because the start of a Python process takes longer than all of it.
    """
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()

    def in_this_process(module: str, argument: str) -> Any:
        assert module == race.__name__
        return json.loads(json.dumps(race.perform(Job.read(argument))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "in_own_process", in_this_process)
        patch.setattr(
            compare,
            "RIVALS",
            {"torch": tuple(kind for kind in RIVALS["torch"] if kind.name in NAMES)},
        )
        folder = tmp_path_factory.mktemp("compare")
        yield list(compare.compare("tiny", ["rl_like"], 2, None, [""], folder, lambda line: None))
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def test_each_rival_is_measured_in_every_column_in_every_repeat(measured: list[Entry]) -> None:
    assert [entry.rival for entry in measured] == NAMES
    for entry in measured:
        assert entry.samples.keys() == SAMPLES.keys()
        assert all(len(values) == 2 for values in entry.samples.values())
        for name in ("blocking", "durable", "bytes", "forward", "complete"):
            assert min(entry.samples[name]) > 0
        assert entry.steady
        assert entry.raw_bytes > 0.9 * entry.torch_save_bytes > 0
    theirs, ours = measured
    assert theirs.samples["forward"] == theirs.samples["step"] == theirs.samples["complete"]
    assert ours.samples["forward"] != ours.samples["complete"]
    assert theirs.first_bytes == theirs.samples["bytes"][0] >= theirs.raw_bytes
    assert ours.middle("bytes") < ours.first_bytes < theirs.first_bytes  # a delta; keyframes
    assert len(ours.told_blocking) == 2
    assert not theirs.told_blocking


def test_the_page_holds_a_row_for_each_way_and_a_verdict_for_each_figure(
    measured: list[Entry], tmp_path: Path
) -> None:
    skipped = Entry(
        "torch", "rl_like", "torch_checkpointing", skipped="torch_checkpointing is not installed"
    )
    result = compare.summarize([*measured, skipped], "tiny", 2)
    assert "torch_checkpointing: skipped, torch_checkpointing is not installed" in result.about
    place = {
        "date": "2026-01-02T03",
        "processor": "P",
        "cores": 2,
        "memory_bytes": 1 << 30,
        "file_system": "ext4",
    }
    place |= {"load_average": 0.5, "versions": {"torch": "2"}}
    runs = [
        compare.Invocation("python -m benchmarks compare --size tiny", place),
        compare.Invocation("another run", place),
    ]
    text = compare.section([*measured, skipped], result, runs, "tiny")
    for expected in (
        "--size tiny`, 2026-01-02; P, 2 cores",
        "Reused from an earlier run: `another run`, 2026-01-02",
        "(compare-tiny.png)",
        "| torch.save |",
        f"| {EXACT}, torch |",
        "was skipped",
        "bytes, torch",
    ):
        assert expected in text
    tables = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len({len(cells) for cells in tables if len(cells) > 4}) == 1
    assert len([cells for cells in tables if len(cells) > 4]) == 1 + len(NAMES)
    compare.draw([*measured, skipped], tmp_path / "plot.png")
    assert 2_000 < (tmp_path / "plot.png").stat().st_size < 100_000


def test_a_rewritten_page_keeps_all_that_is_outside_the_marks() -> None:
    page = (
        "# Before\n<!-- compare small: begin -->\nold | table\n<!-- compare small: end -->\nafter\n"
    )
    assert compare.update_page(page, "small", "new\\1\n") == page.replace("old | table", "new\\1")
    with pytest.raises(ValueError, match="compare medium: begin"):
        compare.update_page(page, "medium", "new\n")


@pytest.mark.parametrize("size", ["small", "medium", "full"])
def test_the_page_of_this_tree_has_the_marks(size: str) -> None:
    assert compare.update_page(compare.PAGE.read_text(), size, "x\n") != compare.PAGE.read_text()


def test_a_lossless_rival_that_gives_other_bits_is_not_measured(tmp_path: Path) -> None:
    class Wrong(TorchSave):
        def restore(self, step: int, like: Any) -> Any:
            state = {"a": torch.arange(4.0)}
            state["a"][3] = -0.0
            return state

    class Run:
        framework = "torch"

        class workload:
            step = 1

            @staticmethod
            def state() -> dict[str, Any]:
                return {"a": torch.tensor([0.0, 1.0, 2.0, 0.0])}

    wrong = Wrong(tmp_path / "root", None, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="does not restore 'a'"):
        race._time_restores(wrong, Run(), 1)  # type: ignore[arg-type]


def test_before_a_save_earlier_ones_are_deleted_but_those_that_it_stands_on(tmp_path: Path) -> None:
    theirs = TorchSave(tmp_path / "theirs", None, None)  # type: ignore[arg-type]
    for step in (1, 2):
        theirs.delete_earlier()
        theirs.save(step, {"a": torch.zeros(3)}, {})
    assert [entry.name for entry in theirs.root.iterdir()] == ["2"]
    ours = ours_at(tmp_path / "ours", saves=2)
    ours.delete_earlier()
    assert deltacheck.open(ours.root).steps() == [0, 1]


def test_a_policy_without_stages_is_steady_once_its_chains_have_turned_over(tmp_path: Path) -> None:
    """Such a policy comes from a profile whose leaves are all too small to be inexact.

    An example are adapters beside a large frozen model.
    """
    assert not ours_at(tmp_path / "two", saves=2).settled()
    assert ours_at(tmp_path / "five", saves=5).settled()


def ours_at(root: Path, saves: int) -> OursTorchPostTraining:
    with Engine(root) as engine:
        for step in range(saves):
            engine.save(step, {"a": torch.full((300,), float(step))}).result()
    ours = object.__new__(OursTorchPostTraining)
    ours.root = root
    return ours


# --- the verdict ----------------------------------------------------------------------------------


def entry(
    framework: str,
    rival: str,
    blocking: float,
    stored: float,
    restore: float,
    peak: int,
    **more: Any,
) -> Entry:
    samples = {name: [1.0, 1.0, 1.0] for name in SAMPLES}
    samples |= {
        "blocking": [blocking, 9.0, 0.0],
        "bytes": [stored, stored, stored],
        "forward": [0.3 * restore, 0.0, 9.0],
        "step": [0.8 * restore, 0.0, 9.0],
        "complete": [restore, 0.0, 9.0],
        "cpu": [0.4 if rival == AUTO else 1.0] * 3,
    }
    return Entry(
        framework,
        "adamw",
        rival,
        samples=samples,
        peak=peak,
        torch_save_bytes=1000,
        raw_bytes=int(1e9),
        **more,
    )


moonclip = entry("torch", MOONCLIP, 0.1, 650, 1.0, 100)
GOOD = [
    entry("torch", "torch.save", 1.0, 1000, 1.0, 5),
    entry("torch", ASYNC["torch"], 0.2, 1000, 1.0, 100),
    entry("torch", EXACT, 0.1, 650, 1.0, 100),
    entry("torch", AUTO, 0.1, 10, 1.0, 100),
    entry("jax", ASYNC["jax"], 0.4, 900, 3.0, 100),
    entry("jax", EXACT, 0.1, 650, 1.5, 60),
    entry("jax", AUTO, 0.1, 10, 1.0, 60),
    entry("torch", BOUNDED, 0.02, 10, 1.0, 100),
    entry("torch", TORCH_CHECKPOINTING, 0.05, 1000, 1.0, 100),
    replace(moonclip, samples=moonclip.samples | {"cpu": [1.2] * 3}),
]

MISSES = [
    (
        7,
        {"blocking": [0.03] * 3},
        "blocking, torch, adamw, auto, weights bounded, of torch DCP async_save",
    ),
    (5, {"blocking": [0.11] * 3}, "blocking, jax, adamw, exact, of Orbax CheckpointManager async"),
    (2, {"loop loses": [1.1] * 3}, "loop loses, torch, adamw, exact, of torch DCP async_save"),
    (2, {"cpu": [1.1] * 3}, "processor time, torch, adamw, exact, of torch DCP async_save"),
    (2, {"bytes": [651.0] * 3}, "bytes, torch, adamw, exact, of torch.save"),
    (3, {"bytes": [11.0] * 3}, "bytes, torch, adamw, auto, of torch.save"),
    (6, {"bytes": [11.0] * 3}, "bytes, jax, adamw, auto, of torch.save"),
    (2, {"complete": [1.6] * 3}, "complete restore, torch, adamw, exact, of torch DCP async_save"),
    (3, {"forward": [0.4] * 3}, "until first forward, torch, adamw, auto, of torch.load"),
    (3, {"step": [0.9] * 3}, "until first step, torch, adamw, auto, of torch.load"),
    (
        6,
        {"complete": [3.1] * 3},
        "complete restore, jax, adamw, auto, of Orbax CheckpointManager async",
    ),
]


def test_figures_at_their_limits_are_no_misses() -> None:
    figures = compare.figures(GOOD)
    assert [figure.name for figure in figures if not figure.holds] == []
    # Blocking, bytes, restore, memory. torch: early restores, torch_checkpointing. exact: loss of
    # the loop and processor time, also beside moonclip; auto: processor time.
    assert len(figures) == 5 * 4 + 3 * 3 + 3 + 1


def test_a_small_state_is_restored_as_fast_as_the_rival_does() -> None:
    small = replace(GOOD[2], raw_bytes=int(46e6), samples=GOOD[2].samples | {"complete": [1.1] * 3})
    assert [figure.name for figure in compare.figures([GOOD[1], small]) if not figure.holds] == [
        "complete restore, torch, adamw, exact, of torch DCP async_save"
    ]


@pytest.mark.parametrize(("place", "samples", "name"), MISSES)
def test_a_planted_miss_is_named_and_no_other(
    place: int, samples: dict[str, list[float]], name: str
) -> None:
    rows = list(GOOD)
    rows[place] = replace(rows[place], samples={**rows[place].samples, **samples})
    assert [figure.name for figure in compare.figures(rows) if not figure.holds] == [name]


def test_blocking_twice_as_long_as_torch_checkpointing_is_a_miss() -> None:
    rows = [*GOOD[:8], replace(GOOD[8], samples={**GOOD[8].samples, "blocking": [0.04] * 3})]
    assert [figure.name for figure in compare.figures(rows) if not figure.holds] == [
        "blocking, torch, adamw, exact, of torch_checkpointing",
        "blocking, torch, adamw, auto, of torch_checkpointing",
    ]


def test_more_processor_time_than_moonclip_is_a_miss() -> None:
    rows = [*GOOD[:9], replace(GOOD[9], samples={**GOOD[9].samples, "cpu": [0.9] * 3})]
    assert [figure.name for figure in compare.figures(rows) if not figure.holds] == [
        "processor time, torch, adamw, exact, of moonclip"
    ]


def test_memory_beyond_the_rivals_and_a_run_that_never_was_steady_are_misses() -> None:
    rows = [
        *GOOD[:2],
        replace(GOOD[2], peak=111),
        replace(GOOD[3], steady=False),
        GOOD[4],
        replace(GOOD[5], peak=101),
    ]
    assert [figure.name for figure in compare.figures(rows) if not figure.holds] == [
        "peak memory, torch, adamw, exact, of torch DCP async_save",
        "bytes, torch, adamw, auto, of torch.save",
        "peak memory, jax, adamw, exact, of Orbax CheckpointManager async",
    ]


@pytest.mark.parametrize("missing", [False, True])
def test_check_exits_with_1_if_a_figure_is_missed_and_names_it(
    missing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = list(GOOD)
    if missing:
        rows[2] = replace(rows[2], samples={**rows[2].samples, "complete": [2.0] * 3})
    monkeypatch.setattr(compare, "compare", lambda *_: rows)
    app = typer.Typer()
    app.command()(compare.main)
    file = tmp_path / "figures.json"
    arguments = ["--states", "adamw", "--json", str(file), "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--check"])
    assert result.exit_code == (1 if missing else 0), result.output
    assert (
        "MISSED complete restore, torch, adamw, exact, of torch DCP async_save: 200.0%"
        in result.output
    ) == missing
    record = json.loads(file.read_text())
    assert (
        record["command"] == "python -m benchmarks compare --size small --states adamw --repeats 5"
    )
    assert [row["samples"]["bytes"] for row in record["entries"]] == [
        list(row.samples["bytes"]) for row in rows
    ]
    assert str(tmp_path) not in file.read_text()
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_entries_of_an_earlier_run_are_reused_and_summarized_with_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[str] = []

    def measured(module: str, argument: str) -> dict[str, Any]:
        job = json.loads(argument)
        jobs.append(job["rival"] or f"prepare {job['framework']}")
        return (
            {}
            if not job["rival"]
            else {"samples": GOOD[2].samples, "peak": 1, "torch_save_bytes": 1000}
        )

    monkeypatch.setattr(compare, "in_own_process", measured)
    monkeypatch.setattr(compare, "RIVALS", RIVALS)
    app = typer.Typer()
    app.command()(compare.main)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    header = {"command": "an earlier run", "machine": {"date": "2026-01-02"}}
    before.write_text(json.dumps(header | {"entries": [asdict(entry) for entry in GOOD[:2]]}))
    arguments = [
        "--states",
        "adamw",
        "--rivals",
        "torch.save,async,exact",
        "--json",
        str(after),
        "--also",
        str(before),
    ]
    result = CliRunner().invoke(app, [*arguments, "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert jobs == ["prepare torch", EXACT, "prepare jax", ASYNC["jax"], EXACT]
    record = json.loads(after.read_text())
    assert [entry["rival"] for entry in record["entries"]] == [
        "torch.save",
        ASYNC["torch"],
        EXACT,
        ASYNC["jax"],
        EXACT,
    ]
    assert record["also"] == [header]
    assert "holds blocking, torch, adamw, exact, of torch DCP async_save: 50.0%" in result.output
    assert '--rivals "torch.save,async,exact"' in record["command"]


def test_an_unknown_state_is_refused_with_those_that_there_are() -> None:
    app = typer.Typer()
    app.command()(compare.main)
    result = CliRunner().invoke(app, ["--states", "adam"])
    assert result.exit_code == 2
    assert "adamw, lora, rl_like" in result.output
