"""Each benchmark runs in its quick form and writes its promised figures.

No test here depends on an absolute time.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numcodecs")  # comes with zarr


from benchmarks import layouts, optimizers, schedules
from benchmarks.__main__ import BENCHMARKS
from benchmarks.record import Figure, Result, Settings, Table, format_cell
from benchmarks.stream_bytes import leaf_bytes
from deltacheck.backends.torch import Engine
from deltacheck.report import history
from deltacheck.report.segment_cost import cost_of
from deltacheck.store.roots.opening import open_root

# The others have test files of their own; those of ranks are in tests/ranks.
NAMES = sorted(
    BENCHMARKS.keys() - {"encode", "stability", "compare", "restart", "launched", "rank_sizes"}
)


class Results(dict[str, dict[str, Any]]):
    """The JSON of each benchmark, which runs in its quick form when it is first asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, name: str) -> dict[str, Any]:
        result: Result = importlib.import_module(BENCHMARKS[name]).run(
            Settings(quick=True, folder=self._folders.mktemp(name))
        )
        self[name] = json.loads(json.dumps(result.as_json()))
        return self[name]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield Results(tmp_path_factory)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks` with the packages of this process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )


def rows(result: dict[str, Any], table: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a table, at least one."""
    table_rows: list[dict[str, Any]] = result["tables"][table]["rows"]
    assert table_rows
    return table_rows


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_has_a_unit_and_every_figure_a_verdict(name: str, results: Results) -> None:
    result = results[name]
    assert result["name"] == name
    assert result["about"]
    for table in result["tables"]:
        assert all(row.keys() == table["units"].keys() for row in table["rows"])
    for figure in result["figures"]:
        assert figure["holds"] == (figure["value"] <= figure["limit"])


def test_a_delta_is_smaller_than_a_keyframe_and_grows_with_the_steps_between(
    results: dict[str, dict[str, Any]],
) -> None:
    by_key = {(row["every"], row["leaves"]): row for row in rows(results["size"])}
    for row in by_key.values():
        assert 0 < row["steady"] < row["first save"] * 1.1 < 1.1 * 1.1
        # First moments hardly shrink by a delta, and those of the first save are the most regular.
        if row["leaves"] != "exp_avg":
            assert row["steady"] <= row["long run"] <= row["first save"]
            assert row["steady"] <= row["mean of these"] <= row["first save"]
        assert row["a delta save"] == pytest.approx(row["steady"] * row["in memory"])
    weights, later = by_key[1, "bf16 weights"], by_key[10, "bf16 weights"]
    assert 0 < weights["words changed"] < later["words changed"] < 1
    assert weights["steady"] < later["steady"] < by_key[10, "whole AdamW state"]["steady"]
    parts = ("bf16 weights", "fp32 master", "exp_avg", "exp_avg_sq")
    assert (
        sum(by_key[1, part]["in memory"] for part in parts)
        <= by_key[1, "whole AdamW state"]["in memory"]
    )


def test_each_layout_is_saved_under_each_policy(results: dict[str, dict[str, Any]]) -> None:
    tables = results["layouts"]["tables"]
    assert len(tables) == len(layouts.LAYOUTS)
    for number, layout in enumerate(layouts.LAYOUTS):
        assert tables[number]["title"].startswith(layout.name)
        table = {row["policy"]: row for row in rows(results["layouts"], number)}
        assert list(table) == list(layouts.POLICIES)
        # A first save of moments that are still zero may be smaller than those after it.
        assert all(0 < row[name] < 1.1 for row in table.values() for name in ("later", "all"))
        assert table["exact"]["pays from"] is None
    masters = {row["policy"]: row for row in rows(results["layouts"])}
    # The weights are computed, so they take nothing.
    assert masters["exact(derive=True)"]["all"] < 0.995 * masters["exact"]["all"]


@pytest.mark.parametrize(
    ("shares", "number"),
    [
        ([1.0, 0.5, 0.1, 0.1], 3),
        ([0.9, 0.5, 0.5, 0.5], 1),
        ([1.0, 0.5, 0.5, 0.5], None),
        ([0.9, 1.0, 0.5, 0.04], 4),
        ([1.0, 0.1, 1.0, 0.1], 4),
        ([1.0, 0.5, 0.5, 0.47], None),
    ],
)
def test_a_policy_pays_from_the_save_after_which_it_stays_smaller(
    shares: list[float], number: int | None
) -> None:
    assert layouts.pays_from(shares, [1.0, 0.5, 0.5, 0.5]) == number


def test_the_context_of_sizes_is_what_compressors_can_do(
    results: dict[str, dict[str, Any]],
) -> None:
    for row in rows(results["size"], 1):
        assert row["byte planes, zstd-3"] <= row["zstd-3"] < row["torch.save"]
        assert row["torch.save"] >= 1


def test_compression_is_compared_with_other_methods_for_each_class(
    results: dict[str, dict[str, Any]],
) -> None:
    by_key: dict[str, dict[str, Any]] = {}
    for row in rows(results["compression"]):
        by_key.setdefault(row["leaves"], {})[row["method"]] = row
    assert len(by_key) >= 5
    for methods in by_key.values():
        smaller = {name: row["times smaller"] for name, row in methods.items()}
        assert (
            1 < smaller["byte groups, no delta"] < smaller["ours"] <= smaller["ours, streams alone"]
        )
        assert smaller["xor"] < smaller["ours, streams alone"]
        assert methods["ours"]["MB/s"] is None or methods["ours"]["MB/s"] > 0


def test_blocking_is_part_of_what_a_save_takes(results: dict[str, dict[str, Any]]) -> None:
    ways = rows(results["blocking"])
    assert [row["way"] for row in ways] == [
        "torch.save + fsync",
        "auto, delta",
        "eager, delta",
        "auto, keyframe",
    ]
    base = ways[0]["blocking"]
    for row in ways:
        assert row["of torch.save"] == pytest.approx(row["blocking"] / base)
        assert row["blocking"] > 0
        assert row["told by the handle"] > 0
    for row in rows(results["blocking"], 1):
        assert 0 < row["until captured"] <= row["until durable"]


def test_the_cost_per_leaf_is_compared_with_torch_save(results: dict[str, dict[str, Any]]) -> None:
    by_way = {row["way"]: row for row in rows(results["leaf_counts"])}
    assert {"torch.save", "exact", "auto, weights stored"} <= by_way.keys()
    for row in by_way.values():
        assert row["of torch.save"] == pytest.approx(
            row["processor time"] / by_way["torch.save"]["processor time"]
        )
        assert row["processor time"] > 0


def test_an_exact_save_stores_less_than_that_of_dcp(results: dict[str, dict[str, Any]]) -> None:
    theirs, ours = rows(results["saving"])
    assert ours["stored, of the state"] < 1 < theirs["stored, of the state"]
    assert ours["processor time"] > 0


def test_memory_holds_at_least_the_shadow(results: dict[str, dict[str, Any]]) -> None:
    for row in rows(results["memory"]):
        assert row["extra memory"] >= 0.9 * row["state = shadow"]
        assert row["of shadow + cache"] == pytest.approx(
            row["extra memory"] / (row["state = shadow"] + row["host cache"])
        )


def test_restores_are_measured_at_each_depth(results: dict[str, dict[str, Any]]) -> None:
    by_key = rows(results["restoring"])
    assert [row["deltas on the keyframe"] for row in by_key] == [0, 0, 1, 1, 3, 3]
    assert all(
        row["restore"] > 0
        and row["of torch.load"] == pytest.approx(row["restore"] / row["torch.load"])
        for row in by_key
    )
    phases = {
        (row["deltas on the keyframe"], row["phase"]): row for row in rows(results["restoring"], 1)
    }
    assert [phases[depth, "decode deltas"]["bytes"] > 0 for depth in (0, 1, 3)] == [0, 1, 1]
    for name in ("tables", "digests", "copy", "other"):
        assert all(phases[depth, name]["processor time"] > 0 for depth in (0, 1, 3))


def test_encoding_is_measured_for_every_density_with_the_method_that_it_takes() -> None:
    encode = importlib.import_module("benchmarks.encode")
    with encode.threads_restored():
        for density, method in ((0.0, "unchanged"), (0.001, "sparse"), (1.0, "diff")):
            current, base = encode.state("float32", density, 2 << 20)
            assert (current != base).mean() == pytest.approx(density, abs=0.01)
            name, *shares, faults, decode, stored, rate = encode.measure(current, base, 2, 1)
            assert name == method
            assert all(share > 0 for share in (*shares, decode, rate))
            assert faults >= 0
            assert (stored == 0) == (density == 0)
        with ThreadPoolExecutor(1) as pool, pytest.raises(AssertionError, match="not equal"):
            encode.plain_read(current, base, 1, pool)


def test_each_call_of_the_codes_is_compared_with_numpy(
    results: dict[str, dict[str, Any]],
) -> None:
    by_key = rows(results["codes"])
    assert len(by_key) == len(results["codes"]["figures"]) == 5
    for row in by_key:
        assert row["of NumPy"] == pytest.approx(row["ns per element"] / row["NumPy, ns"])
        assert row["ns per element"] > 0


def test_the_profiler_is_measured_as_a_share_of_the_step(
    results: dict[str, dict[str, Any]],
) -> None:
    (row,) = rows(results["profiling"])
    between = row["a look"] + (row["interval"] - 1) * row["between looks"]
    assert row["of the step"] == pytest.approx(between / row["interval"] / row["training step"])
    assert 0 < row["between looks"] < row["a look"] < row["first look"] * 10
    assert results["profiling"]["figures"][0]["value"] == row["of the step"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_whole_run_counts_its_first_save(results: dict[str, dict[str, Any]]) -> None:
    for row in rows(results["schedules"]):
        assert 0 < row["changed"] < 1
        assert row["later"] < row["whole run"] < row["first"]
        # The first save weighs less in a longer run.
        assert row["later"] < row["over 200"] < row["whole run"]


def test_a_leaf_takes_the_bytes_that_its_part_of_a_stream_is_compressed_to(tmp_path: Path) -> None:
    """Two leaves of one stream have as many bytes before compression, but not after it."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=random)
    state = {"noise": noise, "plain": torch.zeros(1 << 16, dtype=torch.uint8)}
    with Engine(tmp_path) as engine:
        engine.save(0, state).wait()
        shift = torch.randint(0, 256, noise.shape, dtype=torch.uint8, generator=random)
        state = {"noise": noise + shift, "plain": state["plain"] + 1}
        engine.save(1, state).wait()
    opened = open_root(tmp_path)
    step = list(history.steps(opened, history.committed(opened, [])))[-1]
    assert step.states is not None
    segment = step.states["noise"].parts["noise"].chain[-1][0]
    sizes, estimated = leaf_bytes(segment), cost_of(segment).by_leaf
    assert sum(sizes.values()) == pytest.approx(sum(estimated.values()))
    assert sizes["plain"] < 0.05 * sizes["noise"]


@pytest.mark.parametrize("schedule", [schedules.cosine, schedules.linear])
def test_a_schedule_warms_up_and_ends_at_zero(schedule: Any) -> None:
    rate = schedule(2e-5, 400)
    assert rate(0) < rate(10) < rate(19)
    assert rate(20) > rate(200) > rate(399) > rate(400) == 0


def test_the_figures_of_a_schedule_are_those_of_the_smaller_policy_with_exact_weights() -> None:
    wholes = {2: 0.3, 8: 0.05}  # of fewer saves, and of more
    course = schedules.Course("a run", lambda folder: None, 1, 3, 0.01, wholes)  # type: ignore
    saved = {
        schedules.STORED: schedules.Saved([0.5, 0.02, 0.01, 0.01], [False, True, True, True]),
        schedules.PROFILED: schedules.Saved([0.5, 0.02, 0.004, 0.014], [False, True, True, True]),
        schedules.BOUNDED: schedules.Saved([0.5, 0.02, 0.004, 0.004], [False, True, True, True]),
    }
    figures = {figure.name: figure for figure in schedules.promises(course, saved)}
    assert figures["a run, auto, profile: later saves"].value == pytest.approx(0.009)
    assert figures["a run, auto, profile: later saves"].holds
    assert figures["a run, auto, profile: largest over the mean"].holds
    assert figures["a run, auto, profile: mean of 2 saves"].value == pytest.approx(0.26)
    whole = figures["a run, auto, profile: mean of 8 saves"]
    assert whole.value == pytest.approx((0.538 + 4 * 0.009) / 8)
    assert not whole.holds
    assert figures["a run, auto, profile, weights bounded: later saves"].limit == 0.005


def test_states_of_other_optimizers_than_adam_are_exact(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    result = optimizers.run(Settings(quick=True, folder=tmp_path, optimizers=True))
    torch.set_num_threads(threads)
    sizes, resumes = (rows(result.as_json(), table) for table in (0, 1))
    states = {(row["optimizer"], row["state"]): row for row in sizes}
    assert states["Lion", "exp_avg"]["contract"] == "exact"
    assert states["Muon", "momentum_buffer"]["contract"] == "exact"
    assert all(0 < row["entropy"] <= 1 for row in sizes if row["raw"] > 1024)
    bits = {(row["optimizer"], row["momentum"]): row["bits"] for row in resumes}
    assert {optimizer for optimizer, _ in bits} == {"Lion", "Muon"}
    assert 1 < bits["Muon", "within 0.6 octaves"] < 8
    for row in rows(result.as_json(), 2):
        # A decoder that knows more needs no more bits.
        assert 0 < row["and the weight's change"] <= row["given the last code"] < row["alone"] < 8


def test_without_a_device_there_are_no_figures_of_one(results: dict[str, dict[str, Any]]) -> None:
    assert results["device"]["about"] == "not measured: there is no CUDA device"
    assert results["device"]["figures"] == results["device"]["tables"] == []


def test_a_history_of_weights_is_smaller_than_what_was_written(
    results: dict[str, dict[str, Any]],
) -> None:
    (row,) = rows(results["history"])
    assert 0 < row["newest steps"] < row["on disk"] < row["written"]
    assert 1 <= row["bytes, median"] <= row["bytes, most"]
    assert 0 < row["weights changed a step"] < 1


def test_runs_of_one_base_share_its_files(results: dict[str, dict[str, Any]]) -> None:
    for row in rows(results["base_model"]):
        assert row["one run"] < row["eight runs"] < row["eight without a base"]
        assert row["eight, of one"] == pytest.approx(row["eight runs"] / row["one run"])


def test_import_brings_in_no_framework(results: dict[str, dict[str, Any]]) -> None:
    by_key = {row["import of"]: row for row in rows(results["importing"])}
    assert by_key["deltacheck"]["brings in"] == ""
    assert by_key["deltacheck"]["of numpy"] < 1
    assert by_key["numpy"]["of numpy"] == 1


def test_the_command_writes_figures_and_machine_and_reports_misses_by_its_exit_code(
    tmp_path: Path,
) -> None:
    file = tmp_path / "figures.json"
    result = command(
        "importing", "--quick", "--check", "--json", str(file), "--folder", str(tmp_path)
    )
    record = json.loads(file.read_text())
    missed = [f for b in record["benchmarks"] for f in b["figures"] if not f["holds"]]
    assert result.returncode == (1 if missed else 0), result.stderr
    assert record["quick"] is True
    assert record["machine"].keys() >= {
        "date",
        "processor",
        "cores",
        "memory_bytes",
        "file_system",
        "codec",
        "versions",
    }
    assert str(tmp_path) not in file.read_text()


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    result = command("speed")
    assert result.returncode == 2
    assert "no benchmark speed" in result.stdout


def test_a_missed_figure_is_a_verdict_and_cells_are_written_for_people() -> None:
    missed = Figure("bytes", 0.7, 0.65)
    assert not missed.holds
    result = Result("x", "y", [Table("t", {"a": "text", "b": "seconds"}, [["1", None]])], [missed])
    assert result.as_json()["tables"][0]["rows"] == [{"a": "1", "b": None}]
    assert [
        format_cell(0.0123, "seconds"),
        format_cell(0.5, "seconds"),
        format_cell(12.0, "seconds"),
    ] == [
        "12.3 ms",
        "500 ms",
        "12.00 s",
    ]
    assert [
        format_cell(0.021, "ratio"),
        format_cell(0.65, "ratio"),
        format_cell(2.5e6, "bytes"),
        format_cell(None, "ratio"),
    ] == [
        "2.10%",
        "65.0%",
        "2.5 MB",
        "",
    ]


def test_a_save_at_every_step_is_measured_in_memory_and_on_the_disk(
    results: dict[str, dict[str, Any]],
) -> None:
    by_key = {row["way"]: row for row in rows(results["every_step"])}
    assert by_key.keys() == {"memory", "memory, all to disk", "disk", "memory, by the law of Adam"}
    assert all(row["blocking"] > 0 and row["a save stores"] > 0 for row in by_key.values())
    assert by_key["memory, by the law of Adam"]["of the state"] < by_key["memory"]["of the state"]
    assert by_key["disk"]["copied after"] < by_key["memory"]["copied after"]


def test_states_of_adam_follow_from_the_states_before(results: dict[str, dict[str, Any]]) -> None:
    shares = {(row["optimizer"], row["run"]): row for row in rows(results["law"])}
    mixed = shares["MixedPrecisionAdamW", "rl_like"]
    assert mixed["m from g"] == mixed["v"] == 1
    assert mixed["weight"] > 0.95
    # The gradients are float32, so m is stored.
    assert shares["torch.optim, foreach", "float32"]["m from g"] == 0
    for row in rows(results["law"], 1):
        assert 0 < row["law"] < 0.5 * row["plain"]
        kinds = (row["gradients"], row["differences"], row["exceptions"])
        assert sum(kinds) == pytest.approx(row["law"])


def test_many_leaves_are_measured_with_orbax_and_with_deltacheck(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    from benchmarks import many_leaves

    for way in ("Orbax", "deltacheck"):
        seconds = many_leaves.measure(way, tmp_path / way, 120)  # checks what it has restored
        assert seconds.keys() == {"first save", "second save", "restore"}
        assert all(phase["processor"] > 0 for phase in seconds.values())
