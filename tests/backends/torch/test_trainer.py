"""Hugging Face's packages: a training that is killed and goes on ends as the one that was not, with
nothing but the callback.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.paths import TESTS

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (find_spec("transformers") and find_spec("accelerate")),
        reason="transformers is not installed",
    ),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of tests/support/trainer_child.py, by scenario."""
    child = TESTS / "support" / "trainer_child.py"
    command = [sys.executable, str(child), str(tmp_path_factory.mktemp("trainer"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["killed_and_resumed", "peft"])
def test_a_killed_training_ends_with_the_same_bits(told: dict[str, Any], kind: str) -> None:
    if kind not in told:
        pytest.skip(f"{kind} is not installed")
    found = told[kind]
    assert found["killed"] == {"killed": 9}
    assert found["resumed"].pop("began_at") in (2, 4, 6)  # which was committed when the kill came
    assert found["whole"].pop("began_at") == 0
    # Whoever has not asked for a resume sees it.
    assert found["whole"].pop("logged") == []
    (line,) = found["resumed"].pop("logged")
    assert line.startswith("WARNING training continues from step ")
    assert found["resumed"] == found["whole"]


def test_the_callback_changes_nothing_about_the_training(told: dict[str, Any]) -> None:
    whole, bare = told["killed_and_resumed"]["whole"], told["bare"]
    for same in ("state", "random", "losses"):
        assert whole[same] == bare[same]
    assert whole["folders"] == ["deltacheck"]
    assert bare["folders"] == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


def test_a_trainer_without_the_callback_writes_its_own_checkpoints(told: dict[str, Any]) -> None:
    assert told["plain"] == ["checkpoint-2"]


def test_resume_from_checkpoint_takes_a_step_true_and_false(told: dict[str, Any]) -> None:
    found = told["asked_for"]
    assert [
        found[how]["began_at"] for how in ("whole", "finished", "named", "asked", "afresh")
    ] == [0, 8, 4, 8, 0]
    for how in ("finished", "named", "asked"):
        assert found[how]["state"] == found["whole"]["state"], how
    assert found["finished"]["losses"] == found["whole"]["losses"]
    ended = "WARNING nothing is trained: step 8"
    assert {how: found[how]["logged"] for how in found} == {
        "whole": [],
        "finished": ["WARNING training continues from step 8", ended],
        "named": ["INFO training continues from step 4"],
        "asked": ["INFO training continues from step 8", ended],
        "afresh": [],
    }


def test_of_a_peft_model_only_what_is_trained_is_saved(told: dict[str, Any]) -> None:
    if "peft" not in told:
        pytest.skip("peft is not installed")
    models = [leaf for leaf in told["peft_leaves"] if leaf.startswith("model/")]
    assert len(models) == 2
    assert all("lora" in leaf for leaf in models)


def test_frozen_weights_are_read_behind_the_training_from_the_second_save_on(
    told: dict[str, Any],
) -> None:
    assert told["partly_frozen"] == [False, True, True, True]


def test_every_and_save_total_limit_say_which_steps_there_are(told: dict[str, Any]) -> None:
    assert told["kept"] == [[], [7, 8]]


def test_the_best_model_is_loaded_at_the_end(told: dict[str, Any]) -> None:
    assert told["best"] == {"best": 2, "equal": True}


def test_what_would_not_be_saved_whole_is_refused(told: dict[str, Any]) -> None:
    found = told["refused"]
    assert "file 'config.json' of checkpoint-2 has" in found["large"]
    assert "raise DeltaCheckCallback(file_limit_bytes=...)" in found["large"]
    assert "Deaf._load_from_checkpoint does not call Trainer._load_from_check" in found["override"]
    assert "Elsewhere._save_checkpoint has not called Trainer" in found["elsewhere"]
    assert "step 4 is not saved" in found["elsewhere"]


def test_files_of_a_checkpoint_are_returned_and_older_ones_stay(told: dict[str, Any]) -> None:
    found = told["files"]
    expected = ["config.json", "generation_config.json", "own.txt", "trainer_state.json"]
    assert found["returned"] == sorted([*expected, "training_args.bin"])
    assert (found["own"], found["began_at"]) == ("4", 4)
    assert found["old"] == ["old.txt", "trainer_state.json"]
    assert found["folders"] == ["checkpoint-2", "deltacheck"]


def test_save_only_model_saves_no_optimizer(told: dict[str, Any]) -> None:
    assert told["files"]["leaves"] == ["files", "model", "trainer_state"]


def test_from_pretrained_loads_an_exported_step_and_its_files_come_back(
    told: dict[str, Any],
) -> None:
    assert told["files"]["model_folder"] == {"in_shards": True, "loaded": True, "imported": True}


def test_with_on_error_log_a_training_ends_without_the_step_that_failed(
    told: dict[str, Any],
) -> None:
    assert told["failing"] == {"ended": 8, "steps": [2, 6, 8]}


def test_loggers_get_the_cost_of_saves_and_the_state_does_not(told: dict[str, Any]) -> None:
    seen = told["reported"]["seen"]
    # A log follows each of eight steps, and every second one a save, which the next log reports.
    counts = [numbers.get("deltacheck/saves") for numbers in seen[:8]]
    assert counts == [None, None, 1, None, 1, None, 1, None]
    for numbers in filter(None, seen):
        assert numbers.keys() == {
            f"deltacheck/{key}" for key in ("saves", "bytes", "blocking_seconds", "durable_seconds")
        }
        assert numbers["deltacheck/bytes"] > 0
        assert isinstance(numbers["deltacheck/durable_seconds"], float)
    assert not any("deltacheck" in key for key in told["reported"]["logged"])


def test_an_accelerate_loop_that_is_killed_ends_with_the_same_bits(told: dict[str, Any]) -> None:
    found = told["accelerated"]
    assert found["killed"] == {"killed": 9}
    assert found["resumed"] == found["whole"]


def test_an_accelerate_loader_with_a_position_is_part_of_the_state(told: dict[str, Any]) -> None:
    if "data_position" not in told:
        pytest.skip("torchdata is not installed")
    found = told["data_position"]
    assert "use_seedable_sampler=True" in found["refused"]
    assert found["killed"]["differs"] == []


def test_each_example_goes_on_where_it_ended(told: dict[str, Any]) -> None:
    first = {"accelerate_loop.py": 5, "hf_trainer.py": 6}
    last = {"accelerate_loop.py": 12, "hf_trainer.py": 8}
    assert len(told["examples"]) == 4
    for begun, ended in zip(told["examples"][::2], told["examples"][1::2], strict=True):
        name = begun.partition(":")[0]
        assert begun == f"{name}: at step {first[name]}, from step 0"
        assert ended == f"{name}: at step {last[name]}, from step {first[name]}"
