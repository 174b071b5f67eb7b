"""States that are described as Megatron-Core describes them: saved and restored under other
parallelisms by the Engine. The strategies: ``test_megatron_core.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import deltacheck
from tests.ranks import megatron_jobs as jobs
from tests.ranks.launch import launch


@pytest.mark.timeout(600)
def test_pipeline_stages_that_the_engine_saved_come_back_under_tensor_parallelism_and_alone(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "root")
    sizes = launch(jobs.engine_save, 2, root, "pipeline", [1, 2])[0]
    assert sizes[1] - sizes[0] < sizes[0] / 10
    for size, kind in ((1, "pipeline"), (3, "tensor")):
        for found in launch(jobs.engine_load, size, root, kind, [1, 2], False):
            assert found == [([], (step, {"lr": 0.1}, ""), True) for step in (1, 2)]
    for rank, found in enumerate(launch(jobs.engine_load, 2, root, "pipeline", [2], True)):
        assert found == [([], (2, {"lr": 0.1}, f"of rank {rank}"), True)]
    saved = deltacheck.open(root).restore()
    assert saved["common"] == {"iteration": 2, "args": {"lr": 0.1}}
    assert saved["sharded"]["layers.weight"].shape == (jobs.LAYERS, jobs.ROWS, jobs.COLUMNS)
