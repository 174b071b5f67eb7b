"""`deltacheck profile`: the same run from a root, from torch.save files and from a plain Orbax
manager gives the same profile.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltacheck import Checkpoints, Profile
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.torch_import import files
from deltacheck.cli import main
from deltacheck.profile.record import AdamRule

STEPS = range(5, 45, 5)


def states() -> Any:
    """A short real training in torch, one state after the other."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS[-1] + 1):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            yield (
                step,
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A root and a folder of files with the same steps."""
    (tmp_path / "files").mkdir()
    with Engine(tmp_path / "root") as engine:
        for step, state in states():
            engine.save(step, state, metrics={"loss": 1 / step, "grad_norm": 2.0})
            torch.save(state, tmp_path / "files" / f"epoch1-step_{step}.pt")
            engine.wait()
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_root_and_files_of_torch_give_the_same_profile(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = told(capsys, "profile", str(saved / "root"), "-o", str(saved / "a.json"))
    assert (
        told(capsys, "profile", str(saved / "files"), "-o", str(saved / "b.json"))["classes"]
        == about["classes"]
    )
    one, other = (Profile.read(saved / name) for name in ("a.json", "b.json"))
    assert one.leaves == other.leaves
    assert (one.source, one.interval_steps, one.optimizer) == (
        "root",
        5,
        AdamRule(0.9, 0.999, 1e-8),
    )
    assert one.loss.values == tuple(1 / step for step in STEPS)
    assert one.gradient_norm.steps == tuple(STEPS)
    assert (about["steps"], about["stable_start"], about["betas"]) == (
        len(STEPS),
        one.stable_start,
        [0.9, 0.999],
    )
    roles = {row["role"]: row for row in about["classes"]}
    assert roles["weight"]["density"] == 1
    assert roles["second_moment"]["drift_unit"] == "octaves"
    assert one.leaves["model/weight"].density.steps == tuple(STEPS)[1:]


def test_the_table_says_what_the_profile_says(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(saved / "root"), "--out", str(saved / "profile.json")]) == 0
    out = capsys.readouterr().out
    assert f"{len(STEPS)} steps, 5 apart" in out
    assert "second_moment" in out
    assert main(["profile", str(saved / "root"), "--out", str(saved / "profile.json")]) == 5
    assert "the file exists" in capsys.readouterr().err


def test_only_exact_steps_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore under this contract refuses steps with reused or bounded leaves."""
    asked, restore = [], Checkpoints.restore

    def watched(self: Checkpoints, step: int, **options: Any) -> Any:
        asked.append(options)
        return restore(self, step, **options)

    monkeypatch.setattr(Checkpoints, "restore", watched)
    assert main(["profile", str(saved / "root"), "-o", str(saved / "profile.json")]) == 0
    assert asked == [{"contract": "exact"}] * len(STEPS)


def test_a_plain_orbax_manager_is_read_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jax, ocp, optax = (pytest.importorskip(name) for name in ("jax", "orbax.checkpoint", "optax"))
    params = {
        "dense": jax.numpy.asarray(np.random.default_rng(0).standard_normal((48, 64)), np.float32)
    }
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in range(4):
            updates, state = optimizer.update({"dense": params["dense"] * 1e-3}, state, params)
            params = optax.apply_updates(params, updates)
            manager.save(step, args=ocp.args.StandardSave({"params": params, "opt_state": state}))
        manager.wait_until_finished()
    out = str(tmp_path / "profile.json")
    assert told(capsys, "profile", str(tmp_path / "run"), "-o", out)["betas"] is None
    Path(out).unlink()
    about = told(capsys, "profile", str(tmp_path / "run"), "-o", out, "--betas", "0.9,0.999")
    assert (about["steps"], about["betas"]) == (4, [0.9, 0.999])
    roles = {path: leaf.role for path, leaf in Profile.read(out).leaves.items()}
    assert roles["params/dense"] == "weight"
    assert sorted(roles.values()) == ["count", "first_moment", "second_moment", "weight"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 3, "nowhere"),
        (["empty"], 3, "empty"),
        (["one"], 3, "at least two"),
        (["two"], 4, "cannot be read without running code"),
        (["twice"], 2, "both step 1"),
        (["one", "--betas", "0.9"], 2, "0.9,0.999"),
        (["one", "--betas", "0.99,0.5"], 2, "B1"),
    ],
)
def test_what_is_no_series_of_steps_is_refused_in_one_line(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "one", "two", "twice"):
        Path(name).mkdir()
    torch.save({"w": torch.zeros(3)}, "one/step1.pt")
    # A type that weights_only refuses.
    torch.save({"w": torch.zeros(3), "day": datetime.date(2026, 1, 1)}, "two/step1.pt")
    Path("twice/step1.pt").touch(), Path("twice/other1.pt").touch()
    assert main(["profile", *words]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("profile.json").exists()


def test_files_are_sorted_by_the_last_number_in_their_name(tmp_path: Path) -> None:
    for name in ("run2-step100.pt", "run2-step20.pth", "notes.txt", "final.pt"):
        (tmp_path / name).touch()
    assert [step for step, _ in files(tmp_path)] == [20, 100]
    (tmp_path / "other-100.pt").touch()
    with pytest.raises(ValueError, match="both step 100"):
        files(tmp_path)
