"""Megatron-Core itself, in each version of `make megatron-test`: its save, load and resharding go
through our strategies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import megatron_core_jobs as jobs
from tests.ranks import megatron_jobs
from tests.ranks.launch import launch

# A folder for each version. `make megatron-test` installs and names it.
FOLDER = Path(os.environ.get("DELTACHECK_MEGATRON", "none"))
VERSIONS = sorted(path.name for path in FOLDER.glob("[0-9]*"))
OLDEST = "0.16"
SUPPORTED = [version for version in VERSIONS if version > OLDEST]
UNSUPPORTED = [version for version in VERSIONS if version < OLDEST]

pytestmark = [
    pytest.mark.skipif(not VERSIONS, reason="make megatron-test runs these"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", params=SUPPORTED)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def root(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed during its third save."""
    root = tmp_path_factory.mktemp(version)
    launch(jobs.killed, 2, str(FOLDER / version), str(root), seconds=300, lost={0, 1})
    return root


@pytest.fixture(scope="module")
def run(root: Path) -> list[dict[str, Any]]:
    """The notes of the ranks of the killed run."""
    return [json.loads((root / f"killed-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def resumed(version: str, root: Path, run: object) -> list[dict[str, Any]]:
    return launch(jobs.resumed, 2, str(FOLDER / version), str(root), seconds=300)


def test_the_queue_does_not_block_until_an_asynchronous_save_is_done(
    run: list[dict[str, Any]],
) -> None:
    for rank in run:
        assert rank["calls"] == [[], 1, [0], 2]


def test_a_run_killed_during_an_asynchronous_save_resumes_from_the_step_before(
    run: list[dict[str, Any]], resumed: list[dict[str, Any]]
) -> None:
    for number, (before, after) in enumerate(zip(run, resumed, strict=True)):
        assert after["newest"] == 2
        assert after["resumed"] == before["digests"]["2"]
        assert after["continued"] == before["digests"]["3"]
        assert after["note"] == f"rank {number} at 2"
        assert after["args"] == {"lr": 0.1, "betas": [0.9, 0.999]}
        assert after["content"] == jobs.RESHARDABLE


def test_the_distributed_optimizer_loads_under_other_parallelism_as_from_megatrons_own_format(
    resumed: list[dict[str, Any]],
) -> None:
    for rank in resumed:
        ours, theirs = rank["other parallelism"]
        assert ours == theirs
    # Each rank has its own half of the weights.
    assert resumed[0]["other parallelism"] != resumed[1]["other parallelism"]


def test_fully_parallel_saves_and_loads_give_the_same_bits(resumed: list[dict[str, Any]]) -> None:
    for rank in resumed:
        saved, loaded = rank["wrapped"]
        assert saved == loaded
        assert rank["mismatches"] == [[], []]


def test_a_directory_has_the_two_files_that_megatron_reads(
    resumed: list[dict[str, Any]],
) -> None:
    for rank in resumed:
        assert rank["files"] == ["common.pt", "metadata.json"]


def test_the_common_part_of_another_step_is_refused_and_the_directory_can_be_written_anew(
    resumed: list[dict[str, Any]],
) -> None:
    for rank in resumed:
        assert "iter_0000003/common.pt has digest" in rank["damaged"]
        assert "write_directory(" in rank["damaged"]
        assert rank["written anew"] == rank["other parallelism"][0]


def test_pipeline_stages_come_back_under_tensor_parallelism_and_alone(
    version: str, tmp_path: Path
) -> None:
    if version != SUPPORTED[-1]:
        pytest.skip("in the newest version")
    folder, root = str(FOLDER / version), str(tmp_path)
    sizes = launch(megatron_jobs.megatron_save, 2, folder, root, "pipeline", [1, 2, 3])[0]
    assert sizes[1] - sizes[0] < sizes[0] / 10
    assert sizes[2] - sizes[1] < sizes[0] / 10
    for size, kind, step in ((1, "pipeline", 1), (3, "tensor", 3)):
        for wrong, numbers, same in launch(
            megatron_jobs.megatron_load, size, folder, root, kind, step
        ):
            assert not wrong
            assert numbers == (step, {"lr": 0.1})
            assert same


@pytest.mark.parametrize("old", UNSUPPORTED)
def test_a_version_that_is_too_old_is_refused_at_the_first_save(old: str, tmp_path: Path) -> None:
    for text, version, exists in launch(jobs.refused, 2, str(FOLDER / old), str(tmp_path), ""):
        assert text.startswith(f"SaveFailed: megatron-core {version} cannot load a step")
        assert "it is older than 0.16" in text
        assert "Use megatron-core 0.16 to 0.19, or save" in text
        assert exists == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no file", "it does not read common.pt ("),
        ("no planner", "it has no megatron.core.dist_checkpointing.strategies.torch.MCoreSave"),
    ],
)
def test_a_later_version_that_could_not_load_a_step_is_refused_at_the_first_save(
    change: str, reason: str, tmp_path: Path
) -> None:
    folder = str(FOLDER / SUPPORTED[-1])
    for text, _, exists in launch(jobs.refused, 2, folder, str(tmp_path), change):
        assert reason in text
        assert exists == []
