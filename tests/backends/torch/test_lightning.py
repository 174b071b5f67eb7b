"""Lightning with ``plugins=[DeltaCheckIO()]``: its files come and go as before, and what they stand
for are steps.
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
        not (find_spec("lightning") or find_spec("pytorch_lightning")),
        reason="Lightning is not installed",
    ),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of tests/support/lightning_child.py, by scenario."""
    child = TESTS / "support" / "lightning_child.py"
    command = [sys.executable, str(child), str(tmp_path_factory.mktemp("lightning"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_killed_training_ends_with_the_same_bits(told: dict[str, Any]) -> None:
    found = told["killed_and_resumed"]
    assert found["killed"] == {"killed": 9}
    assert found["whole"]["step"] == 12
    assert found["whole"]["files"] == [
        "deltacheck",
        *(f"epoch={epoch}.ckpt" for epoch in range(4)),
        "last.ckpt",
    ]
    # Files may be more: where last.ckpt had not been written when the kill came, Lightning does an
    # epoch again under a new name.
    for same in ("state", "step", "steps"):
        assert found["resumed"][same] == found["whole"][same]


def test_killed_trainings_skip_and_repeat_no_sample(told: dict[str, Any]) -> None:
    # "lightning", not "pytorch_lightning"
    for kind, result in told["data_position"].items():
        assert result.get("differs") == [], (kind, result)


def test_loggers_get_the_cost_of_all_saves(told: dict[str, Any]) -> None:
    found = told["reported"]
    assert found["saves"] >= 4
    assert sum(numbers["deltacheck/saves"] for numbers in found["seen"]) == found["saves"]
    for numbers in found["seen"]:
        assert numbers.keys() == {
            f"deltacheck/{key}" for key in ("saves", "bytes", "blocking_seconds", "durable_seconds")
        }


def test_what_lightning_removes_is_a_step_no_more(told: dict[str, Any]) -> None:
    files = [name for name in told["removed"]["files"] if name.endswith(".ckpt")]
    assert len(files) == len(told["removed"]["steps"]) == 2


def test_names_are_those_of_lightning_although_saves_are_under_way(told: dict[str, Any]) -> None:
    for case, (stock, ours) in told["same_names"].items():
        assert ours == stock, case


def test_a_link_that_is_removed_or_replaced_leaves_the_step_of_its_target(
    told: dict[str, Any],
) -> None:
    assert told["links"] == {"last.ckpt": [1.0], "best.ckpt": [0.0]}


def test_a_save_of_anybody_else_is_there_when_it_returns(told: dict[str, Any]) -> None:
    assert told["killed_after_a_save"]["process"] == {"killed": 9}
    assert told["killed_after_a_save"]["steps"] == {"hpc_ckpt_1.ckpt": 2, "mine.ckpt": 2}


def test_a_save_after_the_training_gives_the_root_back(told: dict[str, Any]) -> None:
    assert told["outside"]["threads"] == []
    assert told["outside"]["steps"] == [12]


def test_a_plugin_that_has_saved_can_be_pickled_with_its_trainer(told: dict[str, Any]) -> None:
    assert told["outside"]["copy is equal"]


def test_the_first_save_after_a_resume_writes_changes(told: dict[str, Any]) -> None:
    assert told["continued"]["written"] < 20_000 < told["continued"]["whole"]
    assert told["continued"]["equal"]


def test_a_checkpoint_comes_back_as_lightning_made_it(told: dict[str, Any]) -> None:
    found = told["content"]
    assert found["parameters"] == {"width": 8, "extra": {"list": [1, 2.5, None], "text": "a"}}
    assert {
        "callbacks",
        "epoch",
        "global_step",
        "loops",
        "lr_schedulers",
        "optimizer_states",
        "state_dict",
    } <= set(found["keys"])
    assert found["own"] == ["deltacheck.rng"]  # which Lightning never sees
    assert found["weights"]


def test_a_hyperparameter_that_is_an_object_is_refused_before_the_training(
    told: dict[str, Any],
) -> None:
    found = told["refused"]
    assert "'hyper_parameters/extra/folder' is of type pathlib." in found["message"]
    assert "OmegaConf.to_container(config)" in found["message"]
    assert found["left"] == []


def test_weights_are_averaged_once_the_last_save_has_read_them(told: dict[str, Any]) -> None:
    assert told["averaged"] == [12]


def test_a_file_of_lightning_itself_is_read_without_running_its_code(told: dict[str, Any]) -> None:
    found = told["foreign"]
    assert found["read"] == [1.0, 1.0]
    assert found["replaced"] == [0.0, 0.0]
    assert found["removed"]
    assert "cannot be read without running code from it" in found["refused"]
    assert not found["unpickled"]


def test_a_failed_save_is_raised_by_the_next_and_leaves_the_file_as_it_was(
    told: dict[str, Any],
) -> None:
    assert "the save of step 2 failed" in told["failing"]["raised"]
    assert told["failing"]["kept"] == [1.0] * 4


def test_on_error_log_leaves_no_file_and_raises_too_many_failures(told: dict[str, Any]) -> None:
    assert told["logged"]["files"] == ["0.ckpt", "2.ckpt"]
    assert "2 saves in a row have failed" in told["logged"]["raised"]


def test_the_example_goes_on_where_it_ended(told: dict[str, Any]) -> None:
    if told["examples"] is None:
        pytest.skip("the example needs the package lightning")
    assert told["examples"] == ["at epoch 1, from the beginning", "at epoch 2, resumed"]
