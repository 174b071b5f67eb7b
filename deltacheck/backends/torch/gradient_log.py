"""Checkpoints every few steps at a tenth of the bytes: the gradients are stored, and the optimizer
is replayed at restore.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.state import leaves, replica
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.restore import replay
from deltacheck.restore.replay import Limits
from deltacheck.save import logbook
from deltacheck.save.handle import SaveHandle, progress_of
from deltacheck.save.logbook import Base, Logbook, Update

log = logging.getLogger("deltacheck")

_NOT_OURS = (
    "_opt_called",
    "_warned_capturable_if_run_uncaptured",
)  # torch's own marks on an optimizer, no part of an update


class GradientLog:
    """Saves of one optimizer's training state through an engine, as gradients wherever that is
    proven
    to be exact.

    ``save`` takes the place of ``engine.save``. The first save stores the state itself; later ones
    store the gradients that the optimizer saw (after clipping, as ``step`` found them), everything
    that the optimizer does not own, and the digest that each of its tensors must have after a
    replay. Before such a save the same updates are done on a *replica* of the optimizer, and where
    one bit of it differs from the live state, the state itself is stored (``handle.report.note``
    says why, and the log).

    The price: the replica takes as much memory as weights and optimizer state (where those lie),
    the gradients since the last save are kept, and each optimizer step is done a second time at the
    save. ``max_replay_steps``, ``max_steps_per_save``: see ``deltacheck.restore.replay.Limits``. Raises
    ``ValueError`` for an engine whose policy is not exact.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        *,
        max_replay_steps: int = 16,
        max_steps_per_save: int = 4,
    ) -> None:
        if not engine._saver.is_exact:
            raise ValueError(
                "a gradient log needs an engine with Policy.exact(): a replay must begin with the"
                " state itself"
            )
        self._engine = engine
        self._optimizer = optimizer
        self._book = Logbook(Limits(max_replay_steps, max_steps_per_save), replica.digests, _read)
        self._seconds = 0.0  # that the hook has taken since the last save
        self._attributes = _attributes(optimizer)
        # Of steps in steps: where a class calls that of its base, torch calls the hooks for both
        self._depth = 0
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        engine.guard(optimizer)

    def save(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step``; arguments, result and errors as
        ``Engine.save`` has them.
        """
        begin = time.perf_counter()
        engine, book = self._engine, self._book
        self._depth = 0  # a step that raised has not come to its end
        flat = tree.flatten(state, leaves.describe)
        if _attributes(self._optimizer) != self._attributes:
            book.spoil("the optimizer has attributes that change and belong to no state of it")
        plan = book.plan(flat, engine._saver.standing(), lambda: replica.memory_of(self._optimizer))
        epoch = engine._saver.standing()[
            0
        ]  # from before: a save that fails from now on must not become a base
        handle = engine._save(
            step, plan.rest, metrics, more=plan.sources, replay=plan.replay, note=plan.note
        )
        if handle.state != "skipped":
            standing = (epoch, engine._saver.standing()[1])
            book.saved(plan, step, standing, lambda: self._based(step, flat, standing))
        progress_of(handle).add_blocking(
            max(0.0, time.perf_counter() - begin + self._seconds - handle.blocking_seconds)
        )
        self._seconds = 0.0
        return handle

    def restore(
        self,
        step: int | None = None,
        into: object = None,
        *,
        max_bytes: int | None = None,
        fallback: bool = False,
    ) -> Any:
        """As ``Engine.restore`` with the log's optimizer, whose class does the replay and whose
        tensors are not touched.

        The next save stores the state itself.
        """
        return self._engine.restore(
            step, into, optimizer=self._optimizer, max_bytes=max_bytes, fallback=fallback
        )

    def close(self) -> None:
        """Take no part in the optimizer's steps any more. The engine stays open."""
        for hook in self._hooks:
            hook.remove()
        self._book.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        begin = time.perf_counter()
        self._book.record(lambda number: _recorded(optimizer, number, args, kwargs))
        self._seconds += time.perf_counter() - begin

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._depth -= 1

    def _based(self, step: int, state: Flat, standing: tuple[int, int]) -> Base | None:
        """The save just begun as the base of the next ones; ``None`` where they cannot be replayed
        from it.
        """
        try:
            memory = replica.memory_of(self._optimizer)
        except UnsupportedLeaf:
            return None
        places = logbook.places(memory, state)
        if places is None:
            log.info(
                "step %d: the next save stores the state itself: this one has not all that the"
                " optimizer owns",
                step,
            )
            return None

        def clone(path: str, device: torch.device) -> torch.Tensor:
            value = memory.arrays[path]
            assert isinstance(value, torch.Tensor)
            return value.detach().clone()

        try:
            twin = replica.Replica(self._optimizer, memory.skeleton, clone)
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # a device that has no memory left says so with a RuntimeError
            log.warning(
                "step %d: there is no replica to replay on, and the next save stores the state"
                " itself: %s",
                step,
                error,
            )
            return None
        return Base(
            standing[1] - 1,
            step,
            replica.name_of(self._optimizer),
            memory.skeleton,
            places,
            twin,
            standing,
        )


def _recorded(optimizer: Optimizer, number: int, args: Any, kwargs: Any) -> Update:
    """What an update that is about to be made depends on. Raises ``UnsupportedLeaf`` where that
    cannot be stored exactly.
    """
    if len(args) > 1 or kwargs:  # the first is the optimizer
        raise UnsupportedLeaf("the optimizer's step was called with arguments, such as a closure")
    options = replica.options_of(optimizer)
    specs, gradients = {}, {}
    for parameter, weight in enumerate(replica.parameters(optimizer)):
        if weight.grad is not None:
            name = str(parameter)
            described = leaves.describe(weight.grad)
            assert described is not None
            specs[name] = LeafSpec.of(
                replay.input_path(number, name), described.shape, described.dtype
            )
            gradients[name] = weight.grad.detach().clone(memory_format=torch.contiguous_format)
    return Update(specs, gradients, options)


def _read(gradient: torch.Tensor) -> tuple[Any, bool]:
    """The log's own copy, which nobody writes to, can be read behind the training loop; a copy from
    a device must follow this thread's stream.
    """
    return partial(leaves.bytes_of, gradient), gradient.device.type == "cpu"


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    """The optimizer's own numbers and texts outside groups and state: a fresh optimizer has them as
    they were at first.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float | str) and name not in _NOT_OURS
    }
