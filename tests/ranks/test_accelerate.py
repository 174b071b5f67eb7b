"""Accelerate on two processes under DDP: what each has of its own comes back to it, and what they
share is saved once and loaded by any number of them.
"""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.accelerate import load_state, state_of
from deltacheck.errors import TreeMismatch
from tests.ranks.launch import launch
from tests.support.forked import digest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
SEEDABLE = {"use_seedable_sampler": True, "data_seed": 1}


class Count:
    """An object that is registered for checkpointing, with another value on each process."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Training:
    """A model with running averages, an optimizer, a scheduler and a loader."""

    def __init__(self, rank: int, positions: bool) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        os.environ["LOCAL_RANK"] = str(rank)
        loading = DataLoaderConfiguration(use_stateful_dataloader=positions, **SEEDABLE)
        self.accelerator = Accelerator(cpu=True, dataloader_config=loading)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(),
            torch.nn.Linear(8, 1),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        lines = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(list(lines), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.count = Count(100 + rank)
        self.accelerator.register_for_checkpointing(self.count)
        random.seed(rank)
        torch.manual_seed(rank)

    def steps(self, number: int) -> list[str]:
        """Train on some batches; return what they were."""
        batches = []
        for batch in self.loader:
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            batches.append(digest(batch))
            if len(batches) == number:
                break
        return batches

    def shared(self) -> str:
        """Return a digest of what all processes must have alike after a load."""
        unwrapped = self.accelerator.unwrap_model(self.model).state_dict()
        objects = [self.optimizer, self.scheduler, self.count]
        return digest([unwrapped, *(item.state_dict() for item in objects)])

    def own(self) -> str:
        return digest([torch.get_rng_state(), str(random.getstate())])

    def engine(self, root: Path) -> Engine:
        several = self.accelerator.num_processes > 1
        return Engine(root, process_group=dist.group.WORLD if several else None)


def save(rank: int, size: int, port: int, root: Path, positions: bool) -> dict[str, Any]:
    training = Training(rank, positions)
    training.steps(3)
    with training.engine(root) as engine:
        engine.save(3, state_of(training.accelerator)).wait()
    return {"shared": training.shared(), "own": training.own()}


def load(
    rank: int, size: int, port: int, root: Path, positions: bool, without: bool = False
) -> dict[str, Any]:
    training = Training(rank, positions)
    with training.engine(root) as engine:
        state = engine.restore()
        if without:
            del state["loaders"]
        try:
            load_state(training.accelerator, state)
        except TreeMismatch as error:
            return {"error": str(error)}
        result = {"shared": training.shared(), "own": training.own()}
        # The next step is a change of the one that was restored, or a whole one, and is equal.
        engine.save(4, state_of(training.accelerator)).wait()
    return result | {"batches": training.steps(2)}


def test_two_processes_load_what_they_have_saved(tmp_path: Path) -> None:
    saved = launch(save, 2, tmp_path / "root", True)
    loaded = launch(load, 2, tmp_path / "root", True)
    # The object that is registered is that of the first process, as in Accelerate's own files.
    assert [rank["shared"] for rank in loaded] == [saved[0]["shared"]] * 2
    assert [rank["own"] for rank in loaded] == [rank["own"] for rank in saved]
    assert saved[0]["own"] != saved[1]["own"]
    opened = deltacheck.open(tmp_path / "root")
    third, fourth = opened.restore(3), opened.restore(4)
    assert third["custom"]["0"]["value"] == fourth["custom"]["0"]["value"] == 100
    assert sorted(third["rng"]) == ["rank 0", "rank 1"]
    assert "0.weight" in third["models"]["0"]  # without the name of a wrapper


def test_one_process_loads_what_two_have_saved(tmp_path: Path) -> None:
    saved = launch(save, 2, tmp_path / "root", False)
    (loaded,) = launch(load, 1, tmp_path / "root", False)
    assert {key: loaded[key] for key in ("shared", "own")} == saved[0]
    # And two what one has saved: the second keeps the random states of its start.
    loaded = launch(load, 2, tmp_path / "root", False)
    assert [rank["shared"] for rank in loaded] == [saved[0]["shared"]] * 2
    assert loaded[0]["own"] == saved[0]["own"] != loaded[1]["own"]


def test_positions_of_another_number_of_processes_are_refused(tmp_path: Path) -> None:
    launch(save, 2, tmp_path / "root", True)
    (loaded,) = launch(load, 1, tmp_path / "root", True)
    assert "positions of data loaders of 2 processes, and 1 have other batches" in loaded["error"]
    (loaded,) = launch(load, 1, tmp_path / "root", True, True)
    assert len(loaded["batches"]) == 2


def test_what_is_not_ddp_is_refused() -> None:
    kind = SimpleNamespace(value="FSDP")
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=2)
    with pytest.raises(
        ValueError, match=r"type FSDP is not DDP.*Engine\(root, process_group="
    ) as e:
        state_of(accelerator)
    assert "\n" not in str(e.value)
