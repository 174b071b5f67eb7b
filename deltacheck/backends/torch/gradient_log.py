"""Checkpoints every few steps at a tenth of the bytes: the gradients are stored, and the optimizer is replayed at restore."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from deltacheck import replay, tree
from deltacheck.backends.torch import leaves, replica
from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.replica import Replica
from deltacheck.errors import UnsupportedLeaf
from deltacheck.handle import SaveHandle
from deltacheck.records import LeafSpec
from deltacheck.replay import Limits, Situation
from deltacheck.save import LeafSource
from deltacheck.store.schema import Replay, ReplayStep
from deltacheck.tree import Flat, Node

log = logging.getLogger("deltacheck")

_NOT_OURS = ("_opt_called", "_warned_capturable_if_run_uncaptured")  # torch's own marks on an optimizer, no part of an update


@dataclass(slots=True)
class _Update:
    """One step of the optimizer since the base. ``gradients``: by the parameter's number; ``None`` once they are stored."""

    options: Node
    specs: dict[int, LeafSpec]
    gradients: dict[int, torch.Tensor] | None


@dataclass(slots=True)
class _Base:
    """The checkpoint that is replayed from, and the replica that has come from it as far as ``updates`` say.

    ``places``: array path in the optimizer's memory -> leaf path. ``standing``: the saver's, after the last save of this log.
    """

    seq: int
    step: int
    memory: Node
    places: dict[str, str]
    replica: Replica
    standing: tuple[int, int]
    updates: list[_Update]
    replayed: int = 0  # of the updates: done on the replica

    @property
    def fresh(self) -> list[_Update]:
        return [update for update in self.updates if update.gradients is not None]


class GradientLog:
    """Saves of one optimizer's training state through an engine, as gradients wherever that is proven to be exact.

    ``save`` takes the place of ``engine.save``. The first save stores the state itself; later ones store the gradients that the
    optimizer saw (after clipping, as ``step`` found them), everything that the optimizer does not own, and the digest that each
    of its tensors must have after a replay. Before such a save the same updates are done on a *replica* of the optimizer, and
    where one bit of it differs from the live state, the state itself is stored (``handle.report.note`` says why, and the log).

    The price: the replica takes as much memory as weights and optimizer state (where those lie), the gradients since the last
    save are kept, and each optimizer step is done a second time at the save. ``max_replay_steps``, ``max_steps_per_save``: see
    ``deltacheck.replay.Limits``. Raises ``ValueError`` for an engine whose policy is not exact.
    """

    def __init__(
        self, engine: Engine, optimizer: Optimizer, *, max_replay_steps: int = 16, max_steps_per_save: int = 4
    ) -> None:
        if engine.contract != "exact":
            raise ValueError(f"a gradient log needs an engine with Policy.exact(); this one promises {engine.contract!r}")
        self._engine = engine
        self._optimizer = optimizer
        self._limits = Limits(max_replay_steps, max_steps_per_save)
        self._base: _Base | None = None
        self._spoiled: str | None = None  # why the updates since the last save cannot be replayed
        self._differed = 0
        self._seconds = 0.0  # that the hook has taken since the last save
        self._attributes = _attributes(optimizer)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        engine.guard(optimizer)

    def save(self, step: int, state: object, *, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step``; arguments, result and errors as ``Engine.save`` has them."""
        begin = time.perf_counter()
        flat = tree.flatten(state, leaves.describe)
        base, reason = self._base, self._why_direct()
        promised: dict[str, str] = {}
        if reason is None:
            assert base is not None
            promised, reason = self._replay(base, flat)
        if reason is None:
            assert base is not None
            handle = self._save_logged(base, step, flat, promised, metrics)
        else:
            handle = self._save_direct(step, flat, metrics, reason)
        handle._add_blocking(max(0.0, time.perf_counter() - begin + self._seconds - handle.blocking_seconds))
        self._seconds = 0.0
        return handle

    def restore(self, step: int | None = None, into: object = None, *, max_bytes: int | None = None) -> Any:
        """As ``Engine.restore`` with the log's optimizer, whose class does the replay and whose tensors are not touched.

        The next save stores the state itself.
        """
        return self._engine.restore(step, into, optimizer=self._optimizer, max_bytes=max_bytes)

    def close(self) -> None:
        """Take no part in the optimizer's steps any more. The engine stays open."""
        self._hook.remove()
        self._base = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- recording ------------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        base = self._base
        if base is None or self._spoiled is not None or len(base.fresh) > self._limits.max_steps_per_save:
            return
        begin = time.perf_counter()
        if len(base.fresh) == self._limits.max_steps_per_save:
            for update in base.fresh:  # the next save is direct: their gradients serve nobody
                update.gradients = {}
            base.updates.append(_Update({}, {}, {}))
        else:
            try:
                base.updates.append(_recorded(optimizer, len(base.updates), args, kwargs))
            except UnsupportedLeaf as error:
                self._spoiled = str(error)
        self._seconds += time.perf_counter() - begin

    # --- deciding -------------------------------------------------------------------------------------------------------------

    def _why_direct(self) -> str | None:
        base = self._base
        has_base = base is not None and base.standing == self._engine._saver.standing()
        fresh = len(base.fresh) if base is not None else 0
        logged = len(base.updates) - fresh if base is not None else 0
        spoiled = self._spoiled
        if spoiled is None and _attributes(self._optimizer) != self._attributes:
            spoiled = "the optimizer has attributes that change and belong to no state of it"
        return replay.why_direct(Situation(has_base, logged, fresh, self._differed, spoiled), self._limits)

    def _replay(self, base: _Base, flat: Flat) -> tuple[dict[str, str], str | None]:
        """Do the fresh updates on the replica: the digest of each leaf that the optimizer owns, or why they cannot be replayed."""
        try:
            live = replica.memory_of(self._optimizer)
        except UnsupportedLeaf as error:
            return {}, str(error)
        if _places(live, flat) != base.places:
            return {}, "the optimizer or the state has other tensors than at the checkpoint to replay from"
        try:
            for update in base.updates[base.replayed :]:
                assert update.gradients is not None  # only what was replayed is stored
                base.replica.update(update.options, update.gradients)
                base.replayed += 1
            twin = base.replica.memory()
        except Exception as error:  # noqa: BLE001 - an optimizer that cannot be copied is no reason to lose the checkpoint
            self._differed += 1
            return {}, f"{type(self._optimizer).__name__} cannot be replayed: {type(error).__name__}: {error}"
        found, wanted = replica.digests(twin), replica.digests(live)
        for path, digest in wanted.items():
            if found.get(path) != digest:
                self._differed += 1
                return {}, (
                    f"leaf {base.places[path]!r} has digest {digest}, replaying {len(base.updates)} updates gives {found.get(path)}: "
                    "another kernel, or something else than the optimizer wrote to it"
                )
        self._differed = 0
        return {base.places[path]: digest for path, digest in wanted.items()}, None

    # --- saving ---------------------------------------------------------------------------------------------------------------

    def _save_logged(
        self, base: _Base, step: int, flat: Flat, promised: dict[str, str], metrics: Mapping[str, float] | None
    ) -> SaveHandle:
        specs = {path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()}
        sources = {path: LeafSource(specs[path], _nothing, held=True) for path in promised}
        steps = []
        for update in base.updates:
            paths = {parameter: spec.path for parameter, spec in update.specs.items()}
            steps.append(ReplayStep({str(parameter): path for parameter, path in paths.items()}, update.options))
            for parameter, spec in update.specs.items():
                if update.gradients is None:
                    sources[spec.path] = LeafSource(spec, _nothing, held=True)
                else:
                    # The gradient is the log's own copy, which nobody writes to: it can be read behind the training loop, but
                    # for the copy from a device, which must follow this thread's stream.
                    own = update.gradients[parameter]
                    read = partial(leaves.bytes_of, own)
                    sources[spec.path] = LeafSource(spec, read, lazy=own.device.type == "cpu", whole=True)
        plan = Replay(base.seq, base.step, replica.name_of(self._optimizer), base.memory, base.places, tuple(steps), promised)
        rest = Flat(
            flat.skeleton,
            {path: value for path, value in flat.arrays.items() if path not in promised},
            {path: leaf for path, leaf in flat.leaves.items() if path not in promised},
        )
        handle = self._engine._save(step, rest, metrics, more=sources, replay=plan)
        if handle.state != "skipped":
            for update in base.updates:
                update.gradients = None
            base.standing = self._engine._saver.standing()
        return handle

    def _save_direct(self, step: int, flat: Flat, metrics: Mapping[str, float] | None, reason: str) -> SaveHandle:
        log.info("step %d stores the state itself: %s", step, reason)
        if self._differed == replay.GIVE_UP_AFTER and self._base is not None:
            log.warning("step %d: %s. The gradient log gives up: every save stores the state itself", step, reason)
        handle = self._engine._save(step, flat, metrics, note=f"the state itself is stored: {reason}")
        if handle.state != "skipped":
            self._base = self._based(handle, flat) if self._differed < replay.GIVE_UP_AFTER else None
            self._spoiled = None
        return handle

    def _based(self, handle: SaveHandle, flat: Flat) -> _Base | None:
        """The checkpoint just begun as the base of the next ones; ``None`` where they cannot be replayed from it."""
        try:
            memory = replica.memory_of(self._optimizer)
        except UnsupportedLeaf:
            return None
        places = _places(memory, flat)
        if places is None:
            log.info("step %d: the next save stores the state itself: it has not all that the optimizer owns", handle.step)
            return None

        def clone(path: str, device: torch.device) -> torch.Tensor:
            value = memory.arrays[path]
            assert isinstance(value, torch.Tensor)
            return value.detach().clone()

        twin = Replica(self._optimizer, memory.skeleton, clone)
        standing = self._engine._saver.standing()
        return _Base(standing[1] - 1, handle.step, memory.skeleton, places, twin, standing, [])


def _recorded(optimizer: Optimizer, number: int, args: Any, kwargs: Any) -> _Update:
    """What an update that is about to be made depends on. Raises ``UnsupportedLeaf`` where that cannot be stored exactly."""
    if len(args) > 1 or kwargs:  # the first is the optimizer
        raise UnsupportedLeaf("the optimizer's step was called with arguments, such as a closure")
    options = replica.options_of(optimizer)
    specs, gradients = {}, {}
    for parameter, weight in enumerate(replica.parameters(optimizer)):
        if weight.grad is not None:
            described = leaves.describe(weight.grad)
            assert described is not None
            specs[parameter] = LeafSpec.of(replay.input_path(number, str(parameter)), described.shape, described.dtype)
            gradients[parameter] = weight.grad.detach().clone(memory_format=torch.contiguous_format)
    return _Update(options, specs, gradients)


def _places(memory: Flat, state: Flat) -> dict[str, str] | None:
    """Which leaf of the state is which array of the memory, by where they lie; ``None`` where one is in no leaf."""
    lies = {(leaf.identity, leaf.shape, leaf.dtype): path for path, leaf in state.leaves.items() if leaf.identity is not None}
    places = {path: lies.get((leaf.identity, leaf.shape, leaf.dtype)) for path, leaf in memory.leaves.items()}
    found = {path: place for path, place in places.items() if place is not None}
    return found if len(found) == len(places) and len(set(found.values())) == len(found) else None


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    """The optimizer's own numbers and texts outside groups and state: a fresh optimizer has them as they were at first."""
    return {
        name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str) and name not in _NOT_OURS
    }


def _nothing() -> object:
    raise AssertionError("a held leaf is not read")
