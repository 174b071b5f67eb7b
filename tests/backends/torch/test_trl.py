"""TRL's trainers: a training that is killed and goes on ends as the one that was not. `make
trl-test` runs it, with TRL beside .venv.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest

from deltacheck.backends.torch.weight_transfer.trl_transfer import PublishedWeights, Server
from tests.support.paths import TESTS

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (find_spec("trl") and find_spec("datasets")), reason="trl is not installed"
    ),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of tests/support/trl_child.py, by scenario."""
    child = TESTS / "support" / "trl_child.py"
    command = [sys.executable, str(child), str(tmp_path_factory.mktemp("trl"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def without_start(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in ("began_at", "logged")}


@pytest.mark.parametrize("kind", ["sft", "lora", "dpo", "grpo"])
def test_a_killed_training_ends_with_the_same_bits(told: dict[str, Any], kind: str) -> None:
    found = told[kind]
    assert found["killed"] == {"killed": 9}
    assert found["whole"]["began_at"] == 0
    assert found["resumed"]["began_at"] in (2, 4, 6)  # which was committed when the kill came
    assert without_start(found["resumed"]) == without_start(found["whole"])
    assert len(found["whole"]["losses"]) == 8
    assert found["whole"]["folders"] == [
        "README.md",
        "deltacheck",
    ]  # TRL's model card, and no folders checkpoint-N


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_killed_training_of_two_ranks_ends_with_the_same_bits(
    told: dict[str, Any], kind: str
) -> None:
    found = told[f"{kind}_ranks"]
    assert found["killed"] == [{"killed": 9}, {"killed": 9}]
    assert all(rank["began_at"] in (2, 4, 6) for rank in found["resumed"])
    for resumed, whole in zip(found["resumed"], found["whole"], strict=True):
        for same in ("state", "random", "losses"):
            assert resumed[same] == whole[same]
    assert len({rank["random"] for rank in found["whole"]}) == 2  # each rank has its own


def test_a_resume_gives_what_trl_gives_from_its_own_checkpoints(told: dict[str, Any]) -> None:
    theirs = told["sft_by_itself"]
    assert theirs["killed"] == {"killed": 9}
    assert theirs["resumed"]["began_at"] == 6
    for same in ("state", "random", "losses"):
        assert theirs["resumed"][same] == told["sft"]["resumed"][same]


def test_of_an_adapter_only_what_is_trained_is_saved(told: dict[str, Any]) -> None:
    models = [leaf for leaf in told["lora"]["leaves"] if leaf.startswith("model/")]
    assert len(models) == 2
    assert all("lora" in leaf for leaf in models)


def test_the_example_goes_on_where_it_ended(told: dict[str, Any]) -> None:
    assert told["examples"] == ["at step 6, from step 0", "at step 8, from step 6"]


@pytest.mark.filterwarnings("ignore")  # the module warns that it is experimental
def test_trl_finds_every_method_of_its_weight_transfer() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    names = [name for name in vars(WeightTransferProtocol) if not name.startswith("_")]
    assert "send_weights" in names
    for name in names:
        theirs, ours = getattr(WeightTransferProtocol, name), getattr(PublishedWeights, name)
        assert list(signature(ours).parameters) == list(signature(theirs).parameters)


@pytest.mark.filterwarnings("ignore")  # the module warns that it is experimental
def test_trl_finds_every_call_that_its_client_has() -> None:
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    for name in (name for name in vars(Server) if not name.startswith("_")):
        theirs, ours = signature(getattr(VLLMClient, name)), signature(getattr(Server, name))
        assert list(theirs.parameters)[: len(ours.parameters)] == list(ours.parameters)
