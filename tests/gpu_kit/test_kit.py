"""The GPU kit where there is no GPU: what it refuses, and what it reports of failed steps."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.record import Figure, Result
from deltacheck.backends.torch import Engine
from deltacheck.save.job.save_job import SaveJob
from tests.gpu_kit import build, memory_saver, part, run
from tests.gpu_kit.steps import Context, Skipped, Step

GIGABYTE = 1 << 30
# Of each part that fits, the first steps, whose usual times it must hold.
_NEEDED = {1: 4, 3: 7, 4: 7, 5: 1, 6: 2, 8: 2}
FACTS = {"python": "3.11", "machine": platform.machine(), "cuda": "13.0"}


class Driver:
    """A CUDA driver with one device."""

    def __init__(self, **values: int) -> None:
        defaults = {"count": 1, "version": 13000, "major": 9, "memory": 80 * GIGABYTE}
        self.values = defaults | values

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        return self._set(count, self.values["count"])

    def cuDriverGetVersion(self, version: Any) -> int:
        return self._set(version, self.values["version"])

    def cuDeviceGet(self, device: Any, number: int) -> int:
        return self._set(device, number)

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        return self._set(value, {75: self.values["major"], 76: 0}[attribute])

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        return self._set(memory, self.values["memory"])

    def _set(self, reference: Any, value: int) -> int:
        reference._obj.value = value
        return 0


def context(folder: Path, seconds: float = 60.0, *, rehearse: bool = False) -> Context:
    return Context(folder, folder, time.monotonic() + seconds, rehearse)


def perform(folder: Path, *steps: Step, **options: Any) -> tuple[bool, list[Mapping[str, Any]]]:
    passed = part.perform(1, steps, context(folder, **options))
    return passed, json.loads((folder / "part-1.json").read_text())["steps"]


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        (None, "no GPU: there is no CUDA driver"),
        (Driver(count=0), "no GPU: the CUDA driver offers no device"),
        (Driver(version=12080), "an old driver: it supports CUDA 12.8"),
        (Driver(major=7), "compute capability 7.0"),
        (Driver(memory=4 * GIGABYTE), "too little device memory: 4 GiB"),
        (Driver(), ""),
    ],
)
def test_a_machine_that_cannot_run_the_kit_is_told_in_one_line(
    driver: Driver | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    reported = run._other_device(FACTS)
    assert reported.startswith(problem) if problem.startswith(("no", "an")) else problem in reported
    assert bool(reported) == bool(problem)
    assert "\n" not in reported


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"python": "9.9"}, "needs Python 9.9 or newer"),
        ({"machine": "other"}, "built for Linux on other"),
        ({}, ""),
    ],
)
def test_another_python_is_refused_with_status_3(
    facts: dict[str, str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "kit.json").write_text(json.dumps(FACTS | facts))
    monkeypatch.setattr(run, "KIT", tmp_path)
    monkeypatch.setattr(run, "_other_device", lambda kit: "no GPU")
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path / "out")])
    assert run.main() == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert (problem or "no GPU") in lines[0]
    assert not (tmp_path / "out").exists()


def test_every_step_leaves_a_line_and_the_failed_ones_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(context: Context) -> Result:
        raise ValueError("wrong bits")

    def skip(context: Context) -> Result:
        raise Skipped("no such tool")

    passed, records = perform(
        tmp_path,
        Step("fails", fail),
        Step("skips", skip),
        Step("lacks", fail, needs=("no_such_package",)),
        Step("too long", fail, seconds=1e6),
        Step("misses", lambda context: Result("r", "", [], [Figure("share", 0.5, 0.1)])),
        Step("works", lambda context: Result("r", "about", [])),
    )
    assert not passed
    assert [(record["title"], record["status"]) for record in records] == [
        ("fails", "FAILED"),
        ("skips", "skipped"),
        ("lacks", "skipped"),
        ("too long", "skipped"),
        ("misses", "missed"),
        ("works", "passed"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(records)
    assert "ValueError: wrong bits" in lines[0]
    assert "no_such_package is not installed" in lines[2]
    text = (tmp_path / "results.md").read_text()
    assert "wrong bits" in text
    assert "share: 50.0% (at most 10.0%: **missed**)" in text


def test_a_rehearsal_misses_no_figure(tmp_path: Path) -> None:
    missing = Step("m", lambda context: Result("r", "", [], [Figure("share", 0.5, 0.1)]))
    passed, [record] = perform(tmp_path, missing, rehearse=True)
    assert passed
    assert record["status"] == "passed"


def test_a_failed_device_check_ends_the_later_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(context: Context) -> Result:
        raise RuntimeError("other bytes than the host")

    def start(command: list[str], *arguments: object) -> int:
        assert command[3] == "1", "a part ran although the device check had failed"
        return int(not perform(tmp_path, Step("check", fail, checks_device=True))[0])

    monkeypatch.setattr(run, "_run", start)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--installed", "--rehearse", "--out", str(tmp_path)]
    )
    assert run.main() == 1
    output = capsys.readouterr().out
    assert output.count("skipped: the device check of part 1 failed") == len(run.PARTS) - 1


def test_parts_run_in_their_order_within_the_time_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    given: dict[int, float] = {}
    memory: list[Path] = []
    longest = math.inf

    def start(command: list[str], environment: object, log: Path, seconds: float) -> int:
        given[int(command[3])] = seconds
        clock[0] += min(seconds, longest)
        if "--memory" in command:
            memory.append(Path(command[command.index("--memory") + 1]))
            (memory[-1] / "left over").touch()
        return 0

    monkeypatch.setattr(run, "_run", start)
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run, "_other_device", lambda kit: "")
    command = ["run.py", "--installed", "--seconds", "450", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert run.main() == 0
    assert list(given) == [1, 3, 4, 5]
    # What is left for the last one, without the grace.
    left = 450 - sum(run.PARTS[part] for part in (1, 3, 4)) - run._GRACE_SECONDS
    assert list(given.values()) == [*(run.PARTS[part] for part in (1, 3, 4)), left]
    assert "part 6  skipped: no time is left, run it with --part 6" in capsys.readouterr().out
    assert not any(folder.exists() for folder in memory)
    given.clear()
    clock[0] = 0.0
    # A part that was asked for may have all of the time that is left.
    longest = 100.0
    monkeypatch.setattr(sys, "argv", [*command, "--part", "2", "--part", "6"])
    assert run.main() == 0
    assert list(given.items()) == [(6, 450 - run._GRACE_SECONDS), (2, 350 - run._GRACE_SECONDS)]


def test_the_parts_that_tell_most_fit_into_ten_minutes() -> None:
    parts = list(run.PARTS)
    fitting = parts[: parts.index(9)]
    assert sum(run.PARTS[part] for part in fitting) <= run.ALL_SECONDS - run._GRACE_SECONDS
    for number in fitting:
        steps = importlib.import_module(f"tests.gpu_kit.{part.MODULES[number - 1]}").STEPS
        # Of the steps that are skipped if those before them take their usual time.
        seconds = [step.seconds for step in steps]
        assert sum(seconds[: _NEEDED[number]]) <= run.PARTS[number], number


def test_a_save_that_a_pause_would_disturb_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = memory_saver.save_between_pauses(context(tmp_path / "works", rehearse=True))
    assert [row["equal steps"] for row in result.as_json()["tables"][0]["rows"]] == [4, 4]
    go = threading.Event()
    capture, close = SaveJob.capture, Engine.close

    def held(job: SaveJob, sources: Any) -> None:
        # What is captured within ``save`` may not wait.
        if any(source.lazy for source in list(sources)):
            assert go.wait(240)
        capture(job, sources)

    def released(engine: Engine) -> None:
        go.set()
        close(engine)

    monkeypatch.setattr(SaveJob, "capture", held)
    monkeypatch.setattr(Engine, "close", released)
    monkeypatch.setattr(Engine, "offload", lambda engine: None)
    with pytest.raises(AssertionError, match="offload returned while save 0 reads the state"):
        memory_saver.save_between_pauses(context(tmp_path / "fails", rehearse=True))


def test_the_stand_in_takes_content_away_unseen() -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))
    version, saver = weight._version, memory_saver.StandIn(lambda: [weight])
    saver.pause("training")
    assert weight.tolist() == [-1, -1, -1]
    saver.resume("training")
    assert weight.tolist() == [0, 1, 2]
    assert weight._version == version


def test_without_the_library_its_step_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_saver, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="torch_memory_saver is not installed"):
        memory_saver.save_between_pauses(context(tmp_path))


def test_each_goal_stands_beside_this_run_and_the_last_one(tmp_path: Path) -> None:
    name, never = "encode at 2 % of bfloat16, of copy bandwidth", "blocking of a save, JAX, 8 GB"
    step = Step("m", lambda context: Result("r", "", [], [Figure(name, 0.5, 0.7, at_least=True)]))
    perform(tmp_path, step)
    lines = (tmp_path / "goals.md").read_text().splitlines()
    [measured] = [line for line in lines if name in line]
    assert measured.startswith(f"| {name} | 50.0% | at least 70.0%: **missed** | 59.0%")
    assert f"| {never} | not measured | | never measured |" in lines
    assert all(line in (tmp_path / "results.md").read_text() for line in lines)
    perform(tmp_path, step, rehearse=True)
    assert "missed" not in (tmp_path / "goals.md").read_text()


def test_a_state_that_fits_is_saved_in_memory(tmp_path: Path) -> None:
    folder, memory = tmp_path / "disk", tmp_path / "memory"
    memory.mkdir()
    here = Context(folder, folder, 0.0, memory=memory)
    assert here.fast_folder(1) == memory
    assert here.fast_folder(1 << 60) == folder
    assert context(folder).fast_folder(1) == folder


def test_a_part_that_hangs_is_ended_and_its_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_GRACE_SECONDS", 0.5)
    perform(tmp_path, Step("works", lambda context: Result("r", "", [])))
    command = [sys.executable, "-c", "import time; time.sleep(60)", "1"]
    assert run._run(command, {}, tmp_path / "part-1.log", 0.5) == 1
    assert "STOPPED" in capsys.readouterr().out
    assert "works" in (tmp_path / "results.md").read_text()


def test_only_what_the_machine_lacks_is_installed() -> None:
    assert run._is_installed(Path("numpy-2.4.6-cp312-cp312-linux_x86_64.whl"))
    assert not run._is_installed(Path("no_such_package-1.0-py3-none-any.whl"))


def test_the_kit_without_nvcc_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="--without-cuda"):
        build.nvcc_release()
