"""The memory that lossy saves need of the run: values between saves, and access to leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltacheck.codec import adam_law
from deltacheck.codec.adam_law import Law
from deltacheck.codec.base import U8
from deltacheck.codec.leaf_memory import LeafMemory
from deltacheck.leaf.contracts import PeakRate
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import refresh
from deltacheck.policy.activity import Activity
from deltacheck.policy.decide import Decision, Lattice
from deltacheck.policy.events import Detector
from deltacheck.policy.parameters import Roles
from deltacheck.policy.stage import Stage
from deltacheck.save.job.source import LeafSource
from deltacheck.save.treatment.error_measures import Array, places_of_sample


@dataclass(frozen=True, slots=True)
class Shadow:
    """The stored form of a leaf, and its decoded content in the codec's form."""

    spec: LeafSpec
    data: Any


@dataclass(frozen=True, slots=True)
class LeafReader:
    """Access to leaves as they are now, and as they are stored.

    Args:
        memory_of: Return the memory that a content or a base lies in (``memories_of``).
        shadow: Return what is stored of a leaf, by path.
    """

    memory_of: Callable[[Any], LeafMemory]
    shadow: Callable[[str], Shadow | None]

    def host(self, content: Any) -> U8:
        """Return content in host memory, without a copy if possible."""
        return self.memory_of(content).host(content)

    def together(self, contents: Sequence[Any]) -> tuple[LeafMemory, list[Any]]:
        """Return contents in one memory: the one that all of them lie in, or that of the host."""
        memories = [self.memory_of(content) for content in contents]
        if all(memory == memories[0] for memory in memories):
            return memories[0], list(contents)
        on_host = [self.host(content) for content in contents]
        return self.memory_of(on_host[0]), on_host

    def live(self, source: LeafSource) -> Array:
        """Return the leaf's present values, 1-D: a view, to decide by."""
        return self.host(source.current()).view(source.spec.element.numpy)

    def sample(self, source: LeafSource) -> Array:
        """Return a sample of the leaf's present values (``error_measures``)."""
        content, spec = source.current(), source.spec
        places = places_of_sample(math.prod(spec.shape))
        return self.memory_of(content).picked(content, spec.element.numpy, places)

    def stored(self, path: str, spec: LeafSpec) -> Array | None:
        """Return the stored values of a leaf, 1-D; ``None`` if there are none of this form."""
        shadow = self.shadow(path)
        if shadow is None or shadow.spec != spec:
            return None
        return self.host(shadow.data).view(spec.element.numpy)

    def stored_sample(self, path: str, spec: LeafSpec) -> Array | None:
        """Return a sample of what is stored of a leaf: alone, or as the weight of a group.

        ``None``: there is nothing of these forms.
        """
        shadow, elements = self.shadow(path), math.prod(spec.shape)
        if shadow is None:
            return None
        places, group = places_of_sample(elements), adam_law.group_shape(elements)
        if shadow.spec == LeafSpec.of(path, group, "float32") and spec.dtype == "float32":
            places = adam_law.places_of(group, 0, places)
        elif shadow.spec != spec:
            return None
        return self.memory_of(shadow.data).picked(shadow.data, spec.element.numpy, places)


@dataclass(frozen=True, slots=True)
class StoredPair:
    """The time at which both moments of a parameter were stored.

    Attributes:
        step: The training step.
        count: The step count of the optimizer, ``None`` if the state does not hold it.
    """

    step: int
    count: int | None

    def age(self, step: int, count: int | None) -> int | None:
        """Return the age of the pair in updates, ``None`` if the run went back.

        The optimizer counts its updates. Steps are counted only if it does not, since they may be
        numbers of saves or of micro-batches. The age of a frozen parameter stays 0.
        """
        if step <= self.step or (count is None) != (self.count is None):
            return None
        if count is None or self.count is None:
            return step - self.step
        return count - self.count if count >= self.count else None


@dataclass(frozen=True, slots=True)
class Pairs:
    """The states of an optimizer, paired with leaves by content.

    Attributes:
        roles: The roles as names and shapes give them.
        result: The roles with what content has shown.
        evidence: What it has shown, as ``policy.roles.pair`` takes it.
        tries: The number of saves that were compared with the one before.
    """

    roles: Roles
    result: Roles
    evidence: Mapping[tuple[str, str], float] = field(default_factory=dict)
    tries: int = 0


@dataclass(slots=True)
class RunState:
    """The knowledge of a run between its saves.

    Args:
        stage: The stage of the policy.
        reason: The reason for the stage, for people.
        detector: Finds events, such as a loss spike, after which everything is saved exactly.
        activity: Finds a new optimizer, and frozen and unfrozen parameters.
        zeroed: Parameters whose stored moments were found to be zero again, by name.
        drifts: Drifts of second moments in octaves, measured while the last save was captured.
        lattices: The lattice of each master, by path.
        scales: The root mean square of each master, by path, as it was sampled last.
        clocks: The time that spreads the writes of reused moments, by parameter group.
        stored_pairs: The time at which the reused moments of a parameter were stored, by name.
        counts: The optimizer's step count at the last save, by parameter name.
        phases: The number of the phases of all lattices: 0, or in a resumed run the step of the
            first of them, ``None`` before it.
        peaks: The course of the learning rate, by parameter group.
        turns: The roles of the leaves, and the places of their pairs (``refresh.turns``).
        proof: The roles before and after a proof by content that no capture has contradicted.
        doubts: What was not known of master weights at the last save, for people.
        pairs: The pairs of states and leaves since the last event, ``None`` before the first try.
        saves: The number of saves since the run began or was resumed.
        seconds: A few elements of the second moment of each parameter at the last save, by path.
        laws: The law of each group at the last save, by path.
    """

    stage: Stage = field(default_factory=Stage)
    reason: str = ""
    doubts: str = ""
    detector: Detector = field(default_factory=Detector)
    activity: Activity = field(default_factory=Activity)
    zeroed: set[str] = field(default_factory=set)
    drifts: list[float] = field(default_factory=list)
    lattices: dict[str, Lattice] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, refresh.Clock] = field(default_factory=dict)
    stored_pairs: dict[str, StoredPair] = field(default_factory=dict)
    counts: dict[str, int | None] = field(default_factory=dict)
    peaks: dict[str, PeakRate] = field(default_factory=dict)
    turns: tuple[Roles, dict[str, float]] | None = None
    phases: int | None = 0
    proof: tuple[Roles, Roles] | None = None
    pairs: Pairs | None = None
    saves: int = 0
    seconds: dict[str, Array] = field(default_factory=dict)
    laws: dict[str, Law] = field(default_factory=dict)

    def keep_lattice(self, path: str, decision: Decision) -> None:
        """Keep the lattice of a master for the next saves."""
        self.lattices[path] = Lattice(decision.spacing, decision.halvings, decision.spare_bits)

    def phases_at(self, step: int) -> int:
        """Return the number of the phases of lattices at a save.

        It stays until the next restore. The step of the first lattice after a restore is later than
        the restored one, so no earlier lattice of the run has this number.
        """
        if self.phases is None:
            self.phases = step
        return self.phases

    def reset(self, rates: Mapping[str, PeakRate]) -> None:
        """Forget the course of the run after a restore; scales and lattices stay valid.

        Args:
            rates: The course of the learning rate up to the restored step.
        """
        # The run that goes on may be another one, with other data or another learning rate.
        self.stage, self.detector, self.activity = Stage(), Detector(), Activity()
        self.zeroed.clear()
        self.drifts.clear()
        self.stored_pairs.clear()
        self.clocks.clear()
        self.counts.clear()
        self.seconds.clear()
        self.phases, self.pairs, self.saves = None, None, 0
        self.peaks = dict(rates)

    def turns_of(self, leaf_roles: Roles, specs: Mapping[str, LeafSpec]) -> dict[str, float]:
        """Return the places of the pairs in a period, computed once for each set of roles.

        Args:
            leaf_roles: The roles of all leaves. The finder of roles returns the same object as long
                as the leaves are the same.
            specs: The specs of whole leaves, so that ranks take the same turns.
        """
        if self.turns is None or self.turns[0] is not leaf_roles:
            self.turns = (leaf_roles, refresh.turns(leaf_roles, specs))
        return self.turns[1]

    def doubt_proof(self) -> None:
        """Discard the proof: a weight was not the cast of its master."""
        self.proof = None
