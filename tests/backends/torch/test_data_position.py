"""The position in the data comes back with the state."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from deltacheck.backends.torch import ResumableLoader
from deltacheck.errors import TreeMismatch
from tests.support.data_kills import present
from tests.support.paths import REPOSITORY


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Augmented(torch.utils.data.Dataset[float]):
    """Samples with random parts from every global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return index + (random.random() + float(np.random.rand()) + torch.rand(()).item()) / 3


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(range(10), 3, shuffle=True),
    "own generator": lambda: DataLoader(range(10), 3, shuffle=True, generator=torch.Generator()),
    "single samples": lambda: DataLoader(range(10), None, shuffle=True),
    "weighted": lambda: DataLoader(range(10), 3, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "iterable": lambda: DataLoader(Counted(), 3),
    "augmented": lambda: DataLoader(Augmented(), 3, shuffle=True),
    "not a DataLoader": lambda: range(5),
}


def values(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_new_process_continues_behind_each_batch(kind: str, replay: bool) -> None:
    torch.manual_seed(1)
    loader = ResumableLoader(LOADERS[kind](), seed=4, replay=replay)
    positions, order = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            order += values([batch])
            positions.append(loader.state_dict())
    assert (
        kind in ("iterable", "not a DataLoader")
        or order[: len(order) // 2] != order[len(order) // 2 :]
    )
    for used, position in enumerate(positions[:-1]):
        torch.manual_seed(used)  # of another process
        again = ResumableLoader(LOADERS[kind](), seed=4, replay=replay)
        again.load_state_dict(position)
        rest = []
        while again.epoch < 2:
            rest += values(again)
        assert rest == order[used:]


def test_the_generators_of_the_training_are_as_without_a_loader() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index, union-attr]
    loader = ResumableLoader(LOADERS["augmented"]())
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    list(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]  # type: ignore[index, union-attr]


def test_a_loop_that_was_left_begins_the_next_epoch() -> None:
    loader = ResumableLoader(LOADERS["shuffle"]())
    first = values(loader)
    assert loader.epoch == 1
    next(iter(loader))
    second = values(loader)
    assert (loader.epoch, sorted(itertools.chain(*second))) == (3, list(range(10)))
    assert second != first


def test_a_position_at_other_samples_is_refused_with_both_values() -> None:
    loader = ResumableLoader(DataLoader(range(10), 3, shuffle=True))
    next(iter(loader))
    within = loader.state_dict()
    other = ResumableLoader(DataLoader(range(10), 2, shuffle=True))
    with pytest.raises(TreeMismatch, match="batches 4, this loader has batches 5"):
        other.load_state_dict(within)
    with pytest.raises(TreeMismatch, match="seed 0, this loader has seed 1"):
        ResumableLoader(DataLoader(range(10), 3), seed=1).load_state_dict(within)
    list(loader)
    other.load_state_dict(loader.state_dict())  # between epochs, another batch size may follow
    assert (other.epoch, len(list(other))) == (2, 5)


@pytest.mark.timeout(400)
def test_killed_trainings_skip_and_repeat_no_sample(tmp_path: Path) -> None:
    # Those of Accelerate and Lightning: test_trainer.py, test_lightning.py. 100 kills of each:
    # ``make crash-test``.
    others = ("Accelerate", "Lightning", "StatefulDataLoader, 2")
    kinds = [kind for kind in present() if not kind.startswith(others)]
    command = [sys.executable, "-m", "tests.support.data_kills", str(tmp_path), "--kills", "2"]
    done = subprocess.run(
        [*command, "--kinds", *kinds],
        capture_output=True,
        text=True,
        timeout=380,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert {"DataLoader", "DataLoader, 2 workers", "a sampler", "rollouts"} <= results.keys()
    for result in results.values():
        assert result["kills"] == 2
        assert result["samples"] > 0
        assert not result["differs"]
