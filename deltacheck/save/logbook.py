"""What a gradient log remembers between saves, whatever the framework: the base, the updates since,
and what a save makes of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.replay import Limits, Situation
from deltacheck.save.job.source import Coded, LeafSource
from deltacheck.store.manifest import Replay, ReplayStep

log = logging.getLogger("deltacheck")

_NONE: Node = {"t": "dict", "k": []}


class Replica(Protocol):
    """The framework's twin of what the updates work on."""

    def update(self, options: Node, inputs: Mapping[str, Any]) -> None:
        """Do one update. ``inputs`` stay as they are."""
        ...

    def memory(self) -> Flat:
        """All that the updates work on."""
        ...


@dataclass(slots=True)
class Update:
    """One update since the base. ``specs``: input name -> its leaf; ``inputs``: copies of them,
    ``None`` once they are stored.
    """

    specs: dict[str, LeafSpec]
    inputs: dict[str, Any] | None
    options: Node = field(default_factory=lambda: _NONE)


@dataclass(slots=True)
class Base:
    """The checkpoint that is replayed from, and the replica that has come from it as far as
    ``replayed`` says.

    ``name``: of what computes the updates. ``places``: array path in the memory -> leaf path.
    ``standing``: the saver's, after the last save of this log.
    """

    seq: int
    step: int
    name: str
    memory: Node
    places: dict[str, str]
    replica: Replica
    standing: tuple[int, int]
    updates: list[Update] = field(default_factory=list)
    replayed: int = 0

    @property
    def fresh(self) -> list[Update]:
        """Those that no save has stored."""
        return [update for update in self.updates if update.inputs is not None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a save stores beside ``rest``. ``reason``: why the state itself is stored; then there is
    nothing beside it and no ``replay``.
    """

    rest: Flat
    sources: Mapping[str, LeafSource]
    replay: Replay | None
    reason: str | None

    @property
    def note(self) -> str:
        return "" if self.reason is None else f"the state itself is stored: {self.reason}"


class Logbook:
    """One log. ``digests``: the leaf digest of each array of a memory; ``read(input)``: how a save
    reads an input, and whether later.
    """

    def __init__(
        self,
        limits: Limits,
        digests: Callable[[Flat], dict[str, str]],
        read: Callable[[Any], tuple[Callable[[], Any], bool]],
    ) -> None:
        self._limits = limits
        self._digests = digests
        self._read = read
        self._base: Base | None = None
        self._spoiled: str | None = None
        self._differed = 0

    @property
    def listens(self) -> bool:
        """Whether an update can still be of use to the next save."""
        return (
            self._base is not None
            and self._spoiled is None
            and len(self._base.fresh) <= self._limits.max_steps_per_save
        )

    def record(self, make: Callable[[int], Update]) -> None:
        """Note an update. ``make(number)`` copies its inputs; where it raises ``UnsupportedLeaf``,
        the next save stores the state itself.
        """
        if self._base is None or not self.listens:
            return
        if len(self._base.fresh) == self._limits.max_steps_per_save:
            for (
                update
            ) in self._base.fresh:  # the next save stores the state itself: they serve nobody
                update.inputs = {}
            self._base.updates.append(Update({}, {}))
            return
        try:
            self._base.updates.append(make(len(self._base.updates)))
        except UnsupportedLeaf as error:
            self.spoil(str(error))

    def spoil(self, reason: str) -> None:
        """The next save stores the state itself."""
        self._spoiled = reason

    def plan(self, state: Flat, standing: tuple[int, int], memory: Callable[[], Flat]) -> Plan:
        """Decide what a save of ``state`` stores. ``memory()``: what the updates work on, as it is
        now.
        """
        base = self._base
        fresh = 0 if base is None else len(base.fresh)
        has_base = base is not None and base.standing == standing
        stored = 0 if base is None else len(base.updates) - fresh
        reason = replay.why_direct(
            Situation(has_base, stored, fresh, self._differed, self._spoiled), self._limits
        )
        promised: dict[str, str] = {}
        if reason is None and base is not None:
            try:
                promised, reason = self._prove(base, state, memory())
            except UnsupportedLeaf as error:
                reason = str(error)
        if reason is not None or base is None:
            return Plan(state, {}, None, reason)
        return self._logged(base, state, promised)

    def saved(
        self, plan: Plan, step: int, standing: tuple[int, int], rebase: Callable[[], Base | None]
    ) -> None:
        """Learn that a save has begun as planned. ``rebase()`` makes it the base where it stores
        the state itself; ``None``: it cannot be.
        """
        if plan.reason is not None:
            gave_up = self._differed >= replay.GIVE_UP_AFTER
            log.info("step %d stores the state itself: %s", step, plan.reason)
            if gave_up and self._base is not None:
                log.warning(
                    "step %d: %s. The gradient log gives up: every save stores the state itself",
                    step,
                    plan.reason,
                )
            self._base = None  # its memory first
            self._base = None if gave_up else rebase()
            self._spoiled = None
        elif self._base is not None:
            for update in self._base.updates:
                update.inputs = None
            self._base.standing = standing

    def forget(self) -> None:
        """Let go of everything: the next save stores the state itself."""
        self._base = None

    def _prove(self, base: Base, state: Flat, live: Flat) -> tuple[dict[str, str], str | None]:
        """Do the fresh updates on the replica: the digest of each leaf that they write, or why they
        cannot be replayed.
        """
        if places(live, state) != base.places:
            return (
                {},
                "the optimizer or the state has other arrays than at the checkpoint to replay from",
            )
        try:
            for update in base.updates[base.replayed :]:
                assert update.inputs is not None  # only what was replayed is stored
                base.replica.update(update.options, update.inputs)
                base.replayed += 1
            found = self._digests(base.replica.memory())
        except Exception as error:  # noqa: BLE001 - an update that cannot be done twice is no reason to lose the checkpoint
            self._differed += 1
            return {}, f"{base.name} cannot be replayed: {type(error).__name__}: {error}"
        wanted = self._digests(live)
        for path, digest in wanted.items():
            if found.get(path) != digest:
                self._differed += 1
                return (
                    {},
                    (
                        f"leaf {base.places[path]!r} has digest {digest}, replaying"
                        f" {len(base.updates)} updates gives {found.get(path)}: another kernel, or"
                        " something else than the updates wrote to it"
                    ),
                )
        self._differed = 0
        return {base.places[path]: digest for path, digest in wanted.items()}, None

    def _logged(self, base: Base, state: Flat, promised: dict[str, str]) -> Plan:
        sources = {
            path: _held(LeafSpec.of(path, leaf.shape, leaf.dtype))
            for path, leaf in state.leaves.items()
            if path in promised
        }
        for update in base.updates:
            for name, spec in update.specs.items():
                if update.inputs is None:
                    sources[spec.path] = _held(spec)
                else:
                    current, lazy = self._read(update.inputs[name])
                    sources[spec.path] = LeafSource(spec, current, lazy=lazy, whole=True)
        steps = tuple(
            ReplayStep({name: spec.path for name, spec in update.specs.items()}, update.options)
            for update in base.updates
        )
        rest = Flat(
            state.skeleton,
            {path: value for path, value in state.arrays.items() if path not in promised},
            {path: leaf for path, leaf in state.leaves.items() if path not in promised},
        )
        return Plan(
            rest,
            sources,
            Replay(base.seq, base.step, base.name, base.memory, base.places, steps, promised),
            None,
        )


def places(memory: Flat, state: Flat) -> dict[str, str] | None:
    """Which leaf of the state is which array of the memory, by where they lie; ``None`` where one
    is in no leaf.
    """
    lies = {
        (leaf.identity, leaf.shape, leaf.dtype): path
        for path, leaf in state.leaves.items()
        if leaf.identity is not None
    }
    all_of_it = {
        path: lies.get((leaf.identity, leaf.shape, leaf.dtype))
        for path, leaf in memory.leaves.items()
    }
    found = {path: place for path, place in all_of_it.items() if place is not None}
    return (
        found if len(found) == len(all_of_it) and len(set(found.values())) == len(found) else None
    )


def _held(spec: LeafSpec) -> LeafSource:
    """What is stored of the leaf already stays."""
    return LeafSource(spec, lambda: Coded(spec, None))
