"""Store the gradients of a step instead of its state, and replay the optimizer at a restore.

Checkpoints every few steps then take about a tenth of the bytes.
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
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.restore import replay
from deltacheck.restore.replay import ReplayLimits
from deltacheck.save import logbook
from deltacheck.save.handle import SaveHandle, progress_of
from deltacheck.save.logbook import Base, Logbook, LoggedUpdate

log = logging.getLogger("deltacheck")

# Marks that torch sets on an optimizer. They do not affect an update.
_IGNORED_ATTRIBUTES = ("_opt_called", "_warned_capturable_if_run_uncaptured")


@typed
class GradientLog:
    """Saves one optimizer's training state as gradients if that is proven to be exact.

    ``save`` replaces ``engine.save``. The first save stores the state itself. Later saves store the
    gradients that the optimizer saw (after clipping, as ``step`` received them), everything that
    the optimizer does not own, and the digest that each of its tensors must have after a replay.
    Before such a save, the same updates are done on a *replica* of the optimizer. If one bit of it
    differs from the live state, the state itself is stored, and ``handle.report.note`` and the log
    say why.

    The cost: the replica takes as much memory as weights and optimizer state, on the same devices.
    The gradients since the last save are kept. Each optimizer step is done a second time at the
    save.

    Args:
        engine: The engine, with ``Policy.exact()``.
        optimizer: The optimizer of the training.
        max_replay_steps: The most updates that a restore replays. Larger: fewer saves that store
            the state itself, so fewer bytes; smaller: a shorter restore, which depends on fewer
            segments.
        max_steps_per_save: The most updates between two saves that are logged. Larger: saves with
            longer intervals are logged too, but more gradients are kept in memory, and beyond about
            4 updates the state itself is smaller; smaller: less memory.

    Raises:
        ValueError: The policy of the engine is not exact, or several ranks save with it.
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
        if engine._session.group is not None:
            raise ValueError(
                "a gradient log and process_group= cannot be given together: a replay computes the"
                " whole state in one process, and each rank has only its shards and their"
                " gradients. Save with engine.save and Policy.auto(), which"
                " keeps the saves of several ranks small"
            )
        self._engine = engine
        self._optimizer = optimizer
        self._book = Logbook(
            ReplayLimits(max_replay_steps, max_steps_per_save), replica.digests, _read
        )
        self._seconds = 0.0  # spent in the hook since the last save
        self._attributes = _attributes(optimizer)
        # Depth of nested steps: if a class calls its base's step, torch calls the hooks for both.
        self._depth = 0
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # Known before its first step, so that the first save reads its tensors in the background
        # too.
        engine.guard(optimizer)

    def save(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step``.

        Args:
            step: The training step.
            state: The state, as ``Engine.save`` takes it. It must hold all that the optimizer owns,
                else the next save stores the state itself.
            metrics: Numbers to keep with the step.

        Returns:
            The handle of the save, as ``Engine.save`` returns it.

        Raises:
            UnsupportedLeaf, SaveFailed, StorageTimeout: As ``Engine.save`` raises them.
        """
        with self._engine._turn.of("save", postpones=True):
            return self._save(step, state, metrics)

    def _save(self, step: int, state: object, metrics: Mapping[str, float] | None) -> SaveHandle:
        begin = time.perf_counter()
        engine, book = self._engine, self._book
        self._depth = 0  # a step that raised did not reach the hook that resets this
        flat = leaves.flatten(state)
        if _attributes(self._optimizer) != self._attributes:
            book.spoil("the optimizer has attributes that change and belong to no state of it")
        # Gradients are of no use if the base that they follow is gone.
        engine._saver.renew_lost_base()
        # The plan compares the replica with the live tensors. It comes first, because it decides if
        # the save stores gradients or the state itself.
        plan = book.plan(flat, engine._saver.standing(), lambda: replica.memory_of(self._optimizer))
        # Read before the save: a save that fails from here on must not become a base.
        epoch = engine._saver.standing()[0]
        handle = engine._save(
            step, plan.rest, metrics, extra_sources=plan.sources, replay=plan.replay, note=plan.note
        )
        # The recorded updates of a skipped save belong to the next one.
        if handle.state != "skipped":
            standing = (epoch, engine._saver.standing()[1])
            book.saved(plan, step, standing, lambda: self._based(step, flat, standing))
        progress_of(handle).add_blocking(
            # The engine has added its own share of the time to the handle already.
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
        """Restore a step with the log's optimizer.

        The replay uses the class and the options of the optimizer. Its tensors are not changed. The
        next save stores the state itself.

        Args:
            step: The step; ``None``: the newest.
            into: A state to fill in place; ``None``: return a new one.
            max_bytes: Refuse to allocate more than this. A replay takes twice the state in
                addition.
            fallback: If the step is damaged, restore the newest step before it that is whole.

        Returns:
            The state, as ``Engine.restore`` returns it.

        Raises:
            ReplayDiffers: The replay does not give the bits that were saved.
            StepNotFound, TreeMismatch, Damaged, ChainBroken: As ``Engine.restore`` raises them.
        """
        return self._engine.restore(
            step, into, optimizer=self._optimizer, max_bytes=max_bytes, fallback=fallback
        )

    def close(self) -> None:
        """Remove the hooks from the optimizer and release the replica. The engine stays open."""
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
        # The step of a base class is a part of the update that its subclass has recorded.
        if self._depth > 1:
            return
        begin = time.perf_counter()
        self._book.record(lambda number: _recorded(optimizer, number, args, kwargs))
        self._seconds += time.perf_counter() - begin

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._depth -= 1

    def _based(self, step: int, state: Flat, standing: tuple[int, int]) -> Base | None:
        """Return the save just begun as the base of the next ones.

        Returns ``None`` if the next saves cannot be replayed from it.
        """
        try:
            memory = replica.memory_of(self._optimizer)
        # Training continues. Without a base, the next save stores the state itself.
        except UnsupportedLeaf:
            return None
        places = logbook.places(memory, state)
        if places is None:
            log.info(
                "step %d: the next save stores the state itself: this one does not have everything"
                " that the optimizer owns",
                step,
            )
            return None

        def clone(path: str, device: torch.device) -> torch.Tensor:
            value = memory.arrays[path]
            assert isinstance(value, torch.Tensor)
            # The copy stays on the device of the live tensor: other kernels may round differently.
            return value.detach().clone()

        try:
            twin = replica.OptimizerReplica(self._optimizer, memory.skeleton, clone)
        # A device without memory left raises a RuntimeError.
        except (RuntimeError, MemoryError) as error:
            log.warning(
                "step %d: there is no replica to replay on, and the next save stores the state"
                " itself: %s",
                step,
                str(error),
            )
            return None
        return Base(
            # ``standing[1]`` is the sequence number of the next save, so this save has the one
            # before.
            standing[1] - 1,
            step,
            replica.name_of(self._optimizer),
            memory.skeleton,
            places,
            twin,
            standing,
        )


def _recorded(optimizer: Optimizer, number: int, args: Any, kwargs: Any) -> LoggedUpdate:
    """Return everything that the update about to be done depends on.

    Raises:
        UnsupportedLeaf: It cannot be stored exactly.
    """
    if len(args) > 1 or kwargs:  # the first is the optimizer
        raise UnsupportedLeaf("the optimizer's step was called with arguments, such as a closure")
    options = replica.options_of(optimizer)
    specs, gradients = {}, {}
    # Parameters without a gradient are left out, because an optimizer skips them.
    for parameter, weight in enumerate(replica.parameters(optimizer)):
        if weight.grad is not None:
            name = str(parameter)
            leaf = leaves.describe(weight.grad)
            assert leaf is not None
            specs[name] = LeafSpec.of(replay.input_path(number, name), leaf.shape, leaf.dtype)
            # A copy, because ``zero_grad`` or the next backward pass overwrites the gradient. It is
            # contiguous, so that a save on the host can read it without a second copy.
            gradients[name] = weight.grad.detach().clone(memory_format=torch.contiguous_format)
    return LoggedUpdate(specs, gradients, options)


def _read(gradient: torch.Tensor) -> tuple[Any, bool]:
    """Return a function that reads a recorded gradient, and if it may run in the background.

    The log owns the copy, so nothing writes to it. But a copy from a device must follow the stream
    of this thread.
    """
    return partial(leaves.bytes_of, gradient), gradient.device.type == "cpu"


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    """Return the optimizer's own numbers and texts outside of groups and state.

    A new optimizer has their initial values, so a replay is only exact if they never change.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float | str) and name not in _IGNORED_ATTRIBUTES
    }
