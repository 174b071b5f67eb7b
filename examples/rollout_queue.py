"""Asynchronous reinforcement learning whose checkpoints lose no prompt and no rollout.

Workers are ahead of the training: prompts were drawn whose rollouts are not there yet, and rollouts
wait that no step has used. The position in the prompts alone would lose them. Copy ``RolloutQueue``
into your code, and let a step have its state.

    python examples/rollout_queue.py FOLDER --steps 10
    python examples/rollout_queue.py FOLDER --steps 20    # continues from step 10
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from deltacheck.backends.torch import Engine, ResumableLoader


class RolloutQueue:
    """A queue between workers that generate rollouts and the training.

    Its state has the position in the prompts, the prompts in the hands of workers, and the rollouts
    that wait. After a resume, these prompts are given out again before new ones, and the training
    gets the rollouts that waited. So each prompt is trained on once in each epoch.

    Workers are threads, or other processes behind a thread of this one. They iterate over the queue
    and call ``finish`` or ``give_back``. All other calls belong to the thread of the training.
    ``take`` draws the prompts, because a loader may use the global random generators, as the
    training does. A taken rollout counts as used: save after the step that has used it.

    Args:
        prompts: A loader with ``state_dict`` and ``load_state_dict`` that begins an epoch at each
            ``iter``, such as ``ResumableLoader`` or torchdata's ``StatefulDataLoader``.
        capacity: The largest number of prompts in the hands of workers plus waiting rollouts.
            Larger: workers wait less; smaller: rollouts are of newer weights, and saves are
            smaller.

    Raises:
        TypeError: ``prompts`` has no ``state_dict``.
        ValueError: ``capacity`` is less than 1.
    """

    def __init__(self, prompts: Any, *, capacity: int = 64) -> None:
        if not hasattr(prompts, "state_dict"):
            raise TypeError(
                f"prompts of type {type(prompts).__name__} have no state_dict; give"
                " ResumableLoader(prompts) or a StatefulDataLoader"
            )
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self._prompts = prompts
        self._capacity = capacity
        self._source: Iterator[Any] | None = None  # of the epoch under way
        self._next = 0  # the number of the next prompt
        self._in_hand: dict[int, Any] = {}  # number -> prompt
        self._ready: list[int] = []  # numbers of prompts in hand that no worker has yet
        self._waiting: dict[int, Any] = {}  # number -> rollout, in the order of their arrival
        self._is_closed = False
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield numbers and prompts for a worker, epoch after epoch, until ``close``.

        An iteration waits until the training takes rollouts. Any number of threads may iterate.
        """
        while (item := self._handed_out()) is not None:
            yield item

    def finish(self, number: int, rollout: Any) -> None:
        """Put the rollout of a prompt into the queue.

        Args:
            number: The number that came with the prompt.
            rollout: Anything that a state may have, such as a dict of tensors. The queue keeps it
                without a copy, so it must not be changed.

        Raises:
            ValueError: The number is not of a prompt in the hands of a worker.
        """
        with self._changed:
            self._require(number)
            del self._in_hand[number]
            self._waiting[number] = rollout
            self._changed.notify_all()

    def give_back(self, number: int) -> None:
        """Let another worker have a prompt, such as after a failure.

        Args:
            number: The number that came with the prompt.

        Raises:
            ValueError: The number is not of a prompt in the hands of a worker.
        """
        with self._changed:
            self._require(number)
            self._ready.append(number)
            self._changed.notify_all()

    def take(self, count: int = 1, timeout: float | None = None) -> list[Any]:
        """Wait for rollouts and take them out, in the order in which they were finished.

        Before and after, prompts are drawn for the workers, up to the capacity.

        Args:
            count: The number of rollouts, at most the capacity.
            timeout: The longest wait in seconds. Default: no limit.

        Returns:
            The rollouts.

        Raises:
            TimeoutError: There are not enough rollouts in time. None was taken.
            ValueError: ``count`` is larger than the capacity, so it would never be reached, or an
                epoch has no prompts.
        """
        if count > self._capacity:
            raise ValueError(f"count is {count}, more than the capacity of {self._capacity}")
        self._fill()
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiting) >= count, timeout):
                raise TimeoutError(
                    f"{len(self._waiting)} of {count} rollouts after {timeout} seconds"
                )
            numbers = list(self._waiting)[:count]
            rollouts = [self._waiting.pop(number) for number in numbers]
        self._fill()
        return rollouts

    def close(self) -> None:
        """End the iterations of the workers. ``finish`` and ``state_dict`` still work."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return position, prompts and rollouts of one moment as a part of a state.

        Returns:
            The nested state, without copies of prompts and rollouts.
        """
        with self._changed:
            return {
                "prompts": self._prompts.state_dict(),
                "next": self._next,
                # Text, because a key of a state dict that changes by number is no list.
                "in_hand": {str(number): prompt for number, prompt in self._in_hand.items()},
                "waiting": {str(number): rollout for number, rollout in self._waiting.items()},
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. Call it before ``take``.

        Args:
            state_dict: What ``state_dict`` returned before the save.

        Raises:
            ValueError: Prompts were drawn already.
        """
        with self._changed:
            if self._source is not None:
                raise ValueError("prompts were drawn already: load the state before take()")
            self._prompts.load_state_dict(state_dict["prompts"])
            self._next = int(state_dict["next"])
            self._in_hand = {int(key): value for key, value in state_dict["in_hand"].items()}
            self._ready = list(self._in_hand)
            self._waiting = {int(key): value for key, value in state_dict["waiting"].items()}
            self._changed.notify_all()

    def _handed_out(self) -> tuple[int, Any] | None:
        """Return the next prompt for a worker; ``None`` after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._ready))
            if self._is_closed:
                return None
            number = self._ready.pop(0)
            return number, self._in_hand[number]

    def _fill(self) -> None:
        """Draw prompts up to the capacity."""
        # Only this thread adds and removes, so the number of missing ones stays meanwhile.
        with self._changed:
            missing = self._capacity - len(self._in_hand) - len(self._waiting)
        for _ in range(missing):
            prompt = self._next_prompt()  # without the lock: it may take long
            with self._changed:
                self._in_hand[self._next] = prompt
                self._ready.append(self._next)
                self._next += 1
                self._changed.notify()

    def _next_prompt(self) -> Any:
        """Return the next prompt of this epoch, or the first of the next one."""
        # Twice: this epoch, or the loaded position, may be at its end.
        for _ in range(2):
            if self._source is None:
                self._source = iter(self._prompts)
            try:
                return next(self._source)
            except StopIteration:
                self._source = None
        raise ValueError("the prompts have an epoch without a prompt")

    def _require(self, number: int) -> None:
        if number not in self._in_hand:
            raise ValueError(
                f"prompt {number} is not in the hands of a worker: it was finished already, or is"
                " of a run before the resume"
            )


def main() -> None:
    """Train on rollouts of two workers, and continue from the newest checkpoint."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folder")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    options = arguments.parse_args()

    torch.manual_seed(0)
    prompts = DataLoader(range(20), batch_size=None, shuffle=True)
    queue = RolloutQueue(ResumableLoader(prompts), capacity=8)
    model = torch.nn.Linear(8, 8)
    trained: list[int] = []  # the numbers of the prompts

    def generate() -> None:  # in as many threads as you want; each may serve a remote worker
        for number, prompt in queue:
            queue.finish(number, {"number": number, "tokens": torch.arange(8.0) + prompt})

    with Engine(options.folder) as engine:
        last_step = engine.latest_step() or 0
        if last_step:
            saved = engine.restore()
            model.load_state_dict(saved["model"])
            trained = saved["trained"].tolist()
            queue.load_state_dict(saved["rollouts"])  # before workers begin
            print(f"resumed from step {last_step}")
        workers = [threading.Thread(target=generate) for _ in range(2)]
        for worker in workers:
            worker.start()
        for step in range(last_step + 1, options.steps + 1):
            rollouts = queue.take(4)
            loss = model(torch.stack([rollout["tokens"] for rollout in rollouts])).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-4 * parameter.grad
                    parameter.grad = None
            trained += [rollout["number"] for rollout in rollouts]
            if step % options.every == 0:
                state = {
                    "model": model.state_dict(),
                    "trained": torch.tensor(trained),
                    "rollouts": queue.state_dict(),
                }
                engine.save(step, state)
                print(f"step {step}: {len(trained)} rollouts, loss {loss.item():.3f}")
        queue.close()
        for worker in workers:
            worker.join()
    waiting = [int(key) for part in ("in_hand", "waiting") for key in queue.state_dict()[part]]
    assert sorted(trained + waiting) == list(range(len(trained) + len(waiting)))
    print(f"each of {len(trained)} prompts was trained on once")


if __name__ == "__main__":
    main()
