"""Recorded checkpoints, replayed through policies by the real saver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.policy.presets import NAMES, policy_of
from deltacheck.report.data import collect
from deltacheck.save.chains.compactor import Compactor
from tests.support.adam_run import AdamRun

pytestmark = pytest.mark.tools

STEPS = 16

LOSSY = "auto:derive=False"  # the policy of the run in `recorded`


def states() -> Any:
    run = AdamRun()
    for _ in range(STEPS):
        run.advance(10)
        yield run.step, run.state()


@pytest.fixture(scope="module", autouse=True)
def _merges_end_before_the_next_save() -> Iterator[None]:
    """Otherwise the time of a merge, on its own thread, decides which save follows it."""
    start = Compactor.start

    def start_and_wait(self: Compactor, plan: Any, manifest: Any) -> None:
        start(self, plan, manifest)
        self.wait(240)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compactor, "start", start_and_wait)
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoints in an exact root, in files of torch, and under a lossy policy."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "files").mkdir()
    engines = [
        Engine(folder / name, policy=policy)
        for name, policy in (("root", Policy.exact()), ("lossy", Policy.auto(derive=False)))
    ]
    for step, state in states():
        for engine in engines:
            engine.save(step, state, metrics={"loss": 1.0}).wait()
        tensors = tensors_of(state)
        torch.save(tensors, folder / "files" / f"step-{step}.pt")
    for engine in engines:
        engine.close()
    return folder


def tensors_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tensors_of(child) for key, child in value.items()}
    if isinstance(value, np.ndarray):
        if value.dtype.name == "bfloat16":
            return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(value.copy())
    return value


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    return {row["policy"]: row for row in json.loads(capsys.readouterr().out)["policies"]}


def test_a_replay_writes_what_the_run_itself_wrote(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes, causes and errors are those of the same policy during the run."""
    rows = replayed(capsys, str(recorded / "root"), "--policy", "exact", "--policy", LOSSY)
    for name, policy in (("root", "exact"), ("lossy", LOSSY)):
        steps = collect(recorded / name).steps
        made = rows[policy]["steps"]
        assert [row["step"] for row in made] == [step.step for step in steps]
        assert [row["stage"] for row in made] == [step.stage for step in steps]
        for row, step in zip(made, steps, strict=True):
            # Manifests hold names and times of different lengths.
            assert row["written_bytes"] == pytest.approx(step.written_bytes, rel=0.01)
            assert row["causes"]["changed"] == step.causes["changed"]
    lossy = rows[LOSSY]
    assert lossy["stable_from"] == next(
        step.step for step in collect(recorded / "lossy").steps if step.stage == "stable"
    )
    assert lossy["steady_bytes"] < rows["exact"]["steady_bytes"] / 2
    assert lossy["causes"]["refresh"] > 0 == rows["exact"]["causes"]["refresh"]
    errors = {(row["of"].split("/")[-1], row["contract"]): row for row in lossy["contracts"]}
    assert 0 < errors["master", "bounded"]["measured"] <= errors["master", "bounded"]["limit"]
    assert errors["exp_avg_sq", "reused"]["used"] <= 1


def test_files_of_torch_give_the_same(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "auto:moments=bounded"]
    ours, files = (
        replayed(capsys, str(recorded / name), *words)[words[1]] for name in ("root", "files")
    )
    assert files["stable_from"] == ours["stable_from"]
    assert files["causes"]["changed"] == ours["causes"]["changed"]
    assert files["contracts"] == ours["contracts"]


@pytest.mark.parametrize("longer", [0, 100])
def test_a_run_of_the_users_length_counts_its_first_saves(
    longer: int, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [step.written_bytes for step in collect(recorded / "lossy").steps]
    interval = collect(recorded / "lossy").steps[1].step - collect(recorded / "lossy").steps[0].step
    words = [str(recorded / "root"), "--policy", LOSSY, "--run-steps"]
    row = replayed(capsys, *words, str(interval * (len(written) + longer)))[LOSSY]
    assert row["run_saves"] == len(written) + longer
    assert row["run_bytes"] == pytest.approx(sum(written) + longer * row["steady_bytes"], rel=0.01)
    assert main(["plan", *words, str(interval * 4)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{LOSSY}: a run of {interval * 4} steps writes" in said
    share = sum(written[:4]) / 4 / row["raw_bytes"]
    assert re.search(r"in 4 saves, the first included: (\S+) % of the state each", said)[1] == (
        pytest.approx(f"{100 * share:.1f}")
    )


def test_a_policy_that_reused_no_moments_is_named(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(recorded / "root"), "--policy", "auto:stable_from=9999"]
    assert (
        main([*line, "--policy", LOSSY, "--policy", "auto:moments=bounded,stable_from=9999"]) == 0
    )
    warnings = capsys.readouterr().err.splitlines()
    assert [line for line in warnings if "reused no moments" in line] == [
        "deltacheck: warning: auto:stable_from=9999 reused no moments: no checkpoint was in the"
        " stable stage"
    ]


def test_a_folder_of_orbax_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    frozen = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in range(3):
            arrays = {"w": np.full((64, 64), step, np.float32), "frozen": frozen}
            manager.save(step, args=ocp.args.StandardSave(arrays))
        manager.wait_until_finished()
    rows = replayed(capsys, str(tmp_path / "run"), "--policy", "whole", "--policy", "exact")
    assert rows["whole"]["saves"] == rows["exact"]["saves"] == 3
    assert rows["exact"]["steady_bytes"] < rows["whole"]["steady_bytes"]


def test_the_tables_name_policies_causes_and_errors(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(recorded / "root")]
    assert main([*line, "--policy", "auto:weights=bounded", "--policy", "exact:derive=True"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("REFRESH", "LATTICE", "auto:weights=bounded", "OF LIMIT"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["root", "--policy", "lossy"], 2, "is no policy; choose from"),
        (["root", "--policy", "auto:moments=none"], 2, "moments must be one of"),
        (["root", "--policy", "exact:nothing=1"], 2, "unexpected keyword"),
        (["root", "--policy", "exact:nothing"], 2, "NAME=VALUE"),
        (["lossy", "--policy", "exact"], 5, "contract"),
        (["nowhere", "--policy", "exact"], 3, "nowhere"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(
    words: list[str], code: int, message: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recorded / words[0]), *words[1:]]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_every_named_policy_is_made() -> None:
    for name in NAMES:
        assert isinstance(policy_of(f"{name}:max_restore_ratio=9"), Policy)
