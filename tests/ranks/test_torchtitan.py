"""torchtitan with our checkpoint manager. `make titan-test` runs it, with torchtitan beside
.venv.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import titan_jobs as jobs
from tests.ranks.launch import launch

pytestmark = [
    pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed while it saved step 6."""
    folder = tmp_path_factory.mktemp("titan")
    launch(jobs.killed, 2, str(folder), seconds=300, lost={0, 1})
    return folder


@pytest.fixture(scope="module")
def noted(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "noted-0.json").read_text()))


@pytest.fixture(scope="module")
def resumed(folder: Path) -> list[dict[str, Any]]:
    return launch(jobs.resumed, 2, str(folder), seconds=300)


@pytest.fixture(scope="module")
def alone(folder: Path, resumed: object) -> dict[str, Any]:
    return dict(launch(jobs.alone, 1, str(folder), seconds=300)[0])


def test_a_run_killed_during_an_asynchronous_save_ends_with_the_same_bits(
    noted: dict[str, Any], resumed: list[dict[str, Any]]
) -> None:
    for rank in resumed:
        assert rank["loaded"]
        assert rank["step"] == 4
        assert rank["at"] == noted["4"]
        assert rank["end"] == noted["8"]


def test_keep_latest_k_keeps_the_newest_steps(resumed: list[dict[str, Any]]) -> None:
    for rank in resumed:
        assert rank["steps"] == [6, 8]
        # After the last step torchtitan removes no directory.
        assert rank["folders"] == ["step-4", "step-6", "step-8"]
        assert "step=4 not found: " in rank["removed"]
        assert "has steps [6, 8]" in rank["removed"]


def test_one_rank_loads_what_two_have_saved(noted: dict[str, Any], alone: dict[str, Any]) -> None:
    assert alone["loaded"]
    assert alone["end"] == noted["8"]


def test_load_only_saves_nothing(alone: dict[str, Any]) -> None:
    assert alone["unsaved"] is False


def test_an_initial_load_takes_the_model_of_another_run(
    noted: dict[str, Any], alone: dict[str, Any]
) -> None:
    loaded, step, digest = alone["initial"]
    assert loaded
    assert step == 0
    for name, value in noted["8"].items():
        if name.startswith("model."):
            assert digest[name] == value, name
        if name.startswith("optimizer.state."):
            assert digest[name] != value, name


def test_the_last_step_has_the_model_only_in_the_dtype_of_the_config(
    alone: dict[str, Any],
) -> None:
    assert alone["last"] == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], "bfloat16")


def test_a_run_of_torchtitans_own_manager_goes_on_with_ours(alone: dict[str, Any]) -> None:
    assert alone["native"] == (True, True)
    assert alone["mixed"] == (True, 6, True)
    assert alone["earlier"] == (True, True)


def test_what_is_not_supported_is_refused_before_the_first_step(alone: dict[str, Any]) -> None:
    remote, shadow, busy = alone["refused"]
    assert "DeltaStorageWriter has no on_busy: leave out SaveOptions(on_busy='skip')" in busy
    assert "is remote: use a local or shared directory" in remote
    assert "nowhere" in shadow
    assert alone["nothing written"]


def test_a_step_that_does_not_exist_is_not_loaded(alone: dict[str, Any]) -> None:
    assert alone["missing"] is False
    assert "step=5 not found" in alone["no step"]
