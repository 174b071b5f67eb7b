"""Hugging Face's Trainer on two ranks: a killed training goes on and ends with the same bits,
files of checkpoints come back, and what cannot be saved is refused. With the real packages.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")),
        reason="transformers is not installed",
    ),
]

Told = dict[str, Any]


def results_of(kind: str, folder: Any) -> Told:
    """Return the results of tests/ranks/trainer_jobs.py, by scenario."""
    command = [sys.executable, "-m", "tests.ranks.trainer_jobs", kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    told: Told = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return results_of("ddp", tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Told:
    told: Told = results_of("fsdp", tmp_path_factory.mktemp("fsdp"))["fsdp"]
    return told


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Told:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    return results_of("zero", tmp_path_factory.mktemp("zero"))


def assert_killed(ranks: list[Told]) -> None:
    """Assert that rank 1 was killed; rank 0 was, too, unless it missed rank 1 before that."""
    assert ranks[1] == {"killed": 9}
    assert ranks[0] == {"killed": 9} or "error" in ranks[0]


def same(resumed: list[Told], whole: list[Told]) -> None:
    """Compare what a resumed run must have as the whole one has it, rank by rank."""
    # A kill may come after the last commit. Then nothing is trained, and Trainer loads no numbers.
    ended = resumed[0]["began_at"] == 8
    for name in ("state", "losses", "folders", *([] if ended else ["random"])):
        assert [rank[name] for rank in resumed] == [rank[name] for rank in whole], name


def files_at(step: int) -> dict[str, str]:
    names = ("after-0", "after-1", "before-0", "before-1")
    files = {f"{n}.json": json.dumps([n[:-2], int(n[-1]), step]) for n in names}
    return {**files, "inner/of-callback.json": "[]"}


def test_a_killed_training_ends_with_the_same_bits_on_every_rank(ddp: Told) -> None:
    found = ddp["ddp"]
    assert_killed(found["killed"])
    same(found["resumed"], found["whole"])
    random = {rank["random"] for rank in found["whole"]}
    assert len(random) == 2  # each rank has its own
    assert found["steps"] == [2, 4, 6, 8]


def test_a_peft_training_that_is_killed_at_random_ends_with_the_same_bits(ddp: Told) -> None:
    found = ddp["peft"]
    same(found["resumed"], found["whole"])


def test_the_callback_changes_nothing_about_the_training(ddp: Told) -> None:
    for whole, bare in zip(ddp["ddp"]["whole"], ddp["bare"], strict=True):
        assert [whole[name] for name in ("state", "random", "losses")] == [
            bare[name] for name in ("state", "random", "losses")
        ]
        assert whole["folders"] == ["deltacheck"]


def test_every_file_of_a_checkpoint_is_returned_on_every_rank(ddp: Told) -> None:
    for rank in ddp["ddp"]["resumed"]:
        assert rank["returned"] == files_at(rank["began_at"])


def test_saves_after_a_resume_are_changes(ddp: Told) -> None:
    for run in ("whole", "resumed"):
        first = [rank["deltas"][0] for rank in ddp["ddp"][run]]
        assert (min(first) > 0) == (run == "resumed"), (run, first)
        assert all(count > 0 for rank in ddp["ddp"][run] for count in rank["deltas"][1:])


def test_other_numbers_of_ranks_load_the_same_state(ddp: Told) -> None:
    found = ddp["other_ranks"]
    assert {rank["state"] for of in found.values() for rank in of} == {found["2"][0]["state"]}
    assert found["1"][0]["random"] == found["3"][0]["random"] == found["2"][0]["random"]
    assert found["3"][1]["random"] == found["2"][1]["random"] != found["2"][0]["random"]


def test_options_of_the_trainer_have_their_effect(ddp: Told) -> None:
    found = ddp["options"]
    assert found["limit"] == [6, 8]
    assert found["best"] == found["best of a finished run"] == [{"best": 2, "equal": True}] * 2
    assert found["only"] == ["files", "model", "trainer_state"]
    assert [rank["began_at"] for rank in found["only resumed"]] == [4, 4]


def test_what_would_be_lost_is_refused_by_name_on_every_rank(ddp: Told) -> None:
    found = ddp["refused"]
    for rank in found["large"]:
        assert "file 'large.bin' of checkpoint-4 has 2,000 bytes" in rank["error"]
    assert found["steps"] == [2]
    assert all("save_on_each_node=True" in rank["error"] for rank in found["each node"])


def test_a_killed_fsdp2_training_ends_with_the_same_bits(fsdp: Told) -> None:
    assert_killed(fsdp["killed"])
    same(fsdp["resumed"], fsdp["whole"])
    same(fsdp["random"]["resumed"], fsdp["random"]["whole"])  # PEFT, FULL_STATE_DICT, random kills
    assert len({rank["state"] for rank in fsdp["whole"]}) == 2  # each rank has its own shards
    for rank in fsdp["resumed"]:
        assert rank["returned"] == files_at(rank["began_at"])
        assert min(rank["deltas"]) > 0


def test_any_number_of_ranks_loads_what_fsdp2_has_sharded(fsdp: Told) -> None:
    assert len({rank["loaded"] for of in fsdp["loaded"].values() for rank in of}) == 1


def test_fsdp1_is_refused_before_the_first_step(fsdp: Told) -> None:
    for rank in fsdp["fsdp1"]:
        assert rank["error"].startswith("ValueError: DeltaCheckCallback cannot save a model that")
        assert 'use FSDP2: fsdp_config={"version": 2}' in rank["error"]


def test_killed_deepspeed_trainings_end_with_the_same_bits(zero: Told) -> None:
    assert_killed(zero["zero3"]["killed"])
    same(zero["zero3"]["resumed"], zero["zero3"]["whole"])
    same(zero["zero2"]["resumed"], zero["zero2"]["whole"])  # PEFT, random kills
    for rank in zero["zero3"]["resumed"]:
        assert rank["returned"] == files_at(rank["began_at"])
        assert min(rank["deltas"]) > 0
        assert rank["folders"] == ["deltacheck"]


def test_one_rank_goes_on_from_what_two_have_sharded_with_deepspeed(zero: Told) -> None:
    (rank,) = zero["zero3"]["by one"]
    assert rank["began_at"] == 8
    assert rank["losses"][:8] == zero["zero3"]["whole"][0]["losses"]
    assert len(rank["losses"]) == 9


def test_deepspeed_loads_the_best_model_at_the_end(zero: Told) -> None:
    assert [rank["best"] for rank in zero["zero1"]["best"]] == [2, 2]
    assert all(rank["equal"] and rank["leaves"] > 9 for rank in zero["zero1"]["best"])


def test_deepspeed_with_only_the_model_is_refused(zero: Told) -> None:
    for rank in zero["zero1"]["only"]:
        assert "only the model of DeepSpeed (save_only_model=True)" in rank["error"]
