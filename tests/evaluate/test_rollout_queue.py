"""The queue of the example for asynchronous rollouts: nothing on its way is lost.

Killed trainings with this queue: ``tests/support/data_kills.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader

from deltacheck.backends.torch import Engine, ResumableLoader
from examples.rollout_queue import RolloutQueue


def queue_of(count: int, **options: Any) -> RolloutQueue:
    return RolloutQueue(ResumableLoader(DataLoader(range(count), None)), **options)


def begun(queue: RolloutQueue) -> None:
    """Let the queue draw its first prompts, as the first ``take`` of a training does."""
    with pytest.raises(TimeoutError, match="0 of 1 rollouts"):
        queue.take(1, timeout=0.01)


def test_what_workers_have_in_hand_is_given_out_again_and_what_waits_is_used(
    tmp_path: Path,
) -> None:
    queue = queue_of(5, capacity=5)
    begun(queue)
    drawn = [next(iter(queue)) for _ in range(4)]
    assert drawn == [(0, 0), (1, 1), (2, 2), (3, 3)]
    queue.finish(2, {"tokens": torch.arange(3)})
    queue.finish(0, "used")
    queue.finish(3, "waits")
    assert queue.take(1)[0]["tokens"].tolist() == [0, 1, 2]  # draws a prompt of the next epoch
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"rollouts": queue.state_dict()}).result()
        saved = engine.restore()["rollouts"]
    again = queue_of(5, capacity=5)
    again.load_state_dict(saved)
    assert again.take(2) == ["used", "waits"]
    workers = [iter(again), iter(again)]
    expected = [(1, 1), (4, 4), (5, 0), (6, 1), (7, 2)]
    assert [next(workers[number % 2]) for number in range(5)] == expected
    with pytest.raises(ValueError, match="prompt 2 is not in the hands"):
        again.finish(2, "of the killed run")
    with pytest.raises(ValueError, match="load the state before take"):
        again.load_state_dict(saved)


def test_a_worker_waits_for_room_and_ends_with_the_queue() -> None:
    queue = queue_of(5, capacity=2)
    begun(queue)
    worker = iter(queue)
    number, _ = next(worker)
    queue.give_back(number)
    assert [next(worker)[0], next(worker)[0]] == [1, 0]
    with pytest.raises(ValueError, match="more than the capacity of 2"):
        queue.take(3)
    queue.close()
    assert list(worker) == []


def test_a_queue_needs_prompts_with_a_position() -> None:
    with pytest.raises(TypeError, match=r"list have no state_dict; give ResumableLoader"):
        RolloutQueue([1, 2])
    with pytest.raises(ValueError, match="an epoch without a prompt"):
        queue_of(0).take()
