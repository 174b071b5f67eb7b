"""One lossy save: the promises that its captures make, and the leaves of one parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from deltacheck.codec.derivation import Derived
from deltacheck.codec.leaf_memory import HostMemory, LeafMemory
from deltacheck.leaf.contracts import PeakRate, Promise
from deltacheck.leaf.digest import leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import Policy
from deltacheck.policy.decide import Decision, Situation
from deltacheck.policy.parameters import Parameter
from deltacheck.save.job.manifest_builder import Terms
from deltacheck.save.job.source import Coded, LeafSource, torn_between_reads
from deltacheck.save.treatment.error_measures import Array, octaves_apart, sample
from deltacheck.save.treatment.run_state import LeafReader, RunState

# The share of the elements of a sample that drift is measured on: the median over all second
# moments needs few of each, and they are kept between saves.
_DRIFT_STRIDE = 8


@dataclass(frozen=True, slots=True)
class LossySave:
    """One save, and the promises for its leaves that are not stored as they are.

    It lives until the commit and therefore holds no leaf: memory that the training has released
    (JAX releases a state at every step) must be free to go once it is captured.

    Args:
        policy: The policy of the saver.
        step: The training step.
        stage: The name of the stage.
        run: The memory of the run; captures update it.
        reader: Access to leaves.
        reason: The reason for the stage.
        rates: The course of the learning rate of each parameter group.
    """

    policy: Policy
    step: int
    stage: str
    run: RunState
    reader: LeafReader
    _digests: dict[str, str] = field(default_factory=dict)
    _derived: dict[str, Derived] = field(default_factory=dict)
    _contracts: dict[str, Promise] = field(default_factory=dict)
    reason: str = field(default="", kw_only=True)
    rates: Mapping[str, PeakRate] = field(default_factory=dict, kw_only=True)

    def terms(self) -> Terms:
        """Return the terms for the manifest. The caller must have captured every source."""
        stage = self.stage if self.policy.hidden is not None else ""
        reason = self.reason if stage else ""
        return Terms(self._derived, self._contracts, stage, self._digests, reason, self.rates)

    def read(self, source: LeafSource) -> Array:
        """Return a copy of a leaf's values, 1-D, equal at every call of this save.

        The terms compare its digest with the stored leaf too: what is derived from one content must
        not be stored beside another.

        Raises:
            SnapshotTorn: The leaf has changed since the save, or since the last call.
        """
        host = HostMemory(self.reader.host)
        content: Array = self._checked(source, source.current(), host, is_own=False)
        return content.view(source.spec.element.numpy)

    def held(self, source: LeafSource) -> Any:
        """Return the content of a leaf as ``read`` does, in the memory that it lies in.

        It is no copy if nothing writes to the leaf.
        """
        current = source.current()
        memory = self.reader.memory_of(current)
        if source.is_own and source.spec.path in self._digests:
            return memory.held(current, is_own=True)
        return self._checked(source, current, memory, is_own=source.is_own)

    def _checked(
        self, source: LeafSource, current: Any, memory: LeafMemory, *, is_own: bool
    ) -> Any:
        """Return content that stays as it is, and is that of every other call of this save."""
        content, path = memory.held(current, is_own=is_own), source.spec.path
        digest = leaf_digest(memory.digests(content, source.spec))
        # A device has read the leaf only now, since the digests have come to the host.
        source.check(content)
        earlier = self._digests.setdefault(path, digest)
        if digest != earlier:
            raise torn_between_reads(path, earlier, digest)
        return content

    def digest(self, source: LeafSource) -> str:
        """Return the digest of a leaf, which is read if that has not been done in this save."""
        if source.spec.path not in self._digests:
            self.held(source)
        return self._digests[source.spec.path]

    def promise(self, path: str, derived: Derived, promise: Promise | None) -> None:
        """Record how a restore computes a leaf, and the contract of a leaf that is not exact."""
        self._derived[path] = derived
        if promise is not None:
            self._contracts[path] = promise

    def share_equal(self, sources: Mapping[str, LeafSource]) -> dict[str, LeafSource]:
        """Return sources that store equal leaves of one number once.

        Optimizers keep the same step count for every parameter.
        """
        owners: dict[tuple[LeafSpec, bytes], LeafSource] = {}
        shared = {}
        for path, source in sources.items():
            content = self.reader.live(source).tobytes()
            # The path is left out of the key, since it differs between equal leaves.
            owner = owners.setdefault((replace(source.spec, path=""), content), source)
            if owner is not source:
                capture = partial(self._capture_same, source, owner)
                shared[path] = read_together(source, capture, [source, owner])
        return shared

    def _capture_same(self, source: LeafSource, owner: LeafSource) -> Any:
        live, spec = self.read(source), source.spec
        # They were equal when the save was planned; lazy leaves may have changed since.
        if live.tobytes() != self.read(owner).tobytes():
            return source.current()
        digest = self._digests[spec.path]
        derived = Derived("same", spec.dtype, spec.shape, digest, of=owner.spec.path)
        self.promise(spec.path, derived, None)
        return Coded(None, None)

    def watch(self, source: LeafSource, rescale: float | None) -> LeafSource:
        """Return a source that stores a second moment exactly, and measures its drift.

        Args:
            source: The second moment.
            rescale: As in ``note_drift``.
        """
        return read_together(source, partial(self._capture_watched, source, rescale), [source])

    def _capture_watched(self, source: LeafSource, rescale: float | None) -> Any:
        if source.spec.dtype == "float32":
            self.note_drift(source.spec.path, self.reader.live(source), rescale)
        return source.current()

    def note_drift(self, path: str, values: Array, rescale: float | None) -> None:
        """Measure the drift of a second moment since the last save, on a few elements.

        Args:
            path: Its path.
            values: Its values, 1-D.
            rescale: The factor by which reuse would multiply the moment of the last save. Without
                it, the growth from zero of a young moment would look like drift. ``None``: that
                moment could not be reused, so its drift does not count.
        """
        elements = sample(values)[::_DRIFT_STRIDE].copy()
        last, self.run.seconds[path] = self.run.seconds.get(path), elements
        if rescale is None or last is None or last.size != elements.size:
            return
        drift = octaves_apart(elements, last * np.float32(rescale))
        if drift is not None:
            self.run.drifts.append(drift)


@dataclass(frozen=True, slots=True)
class ParameterSave:
    """The leaves of one parameter at one save.

    Args:
        save: The save.
        parameter: The paths of the parameter's leaves.
        situation: Hyperparameters and state of the parameter.
        decisions: How each leaf is kept, by path.
        sources: The leaves, by path.
    """

    save: LossySave
    parameter: Parameter
    situation: Situation
    decisions: Mapping[str, Decision]
    sources: Mapping[str, LeafSource]

    def spec(self, path: str) -> LeafSpec:
        """Return the form of a live leaf."""
        return self.sources[path].spec

    def live(self, path: str) -> Array:
        """Return a copy of the values of a leaf, 1-D (``LossySave.read``)."""
        return self.save.read(self.sources[path])

    def together(self, *paths: str) -> tuple[LeafMemory, list[Any]]:
        """Return a memory, and the contents of leaves there (``LossySave.held``)."""
        contents = [self.save.held(self.sources[path]) for path in paths]
        return self.save.reader.together(contents)

    def digest(self, path: str) -> str:
        """Return the digest of a leaf (``LossySave.digest``)."""
        return self.save.digest(self.sources[path])

    def exactly(self, path: str) -> Any:
        """Return the content that stores a leaf as it is."""
        return self.sources[path].current()

    def derived(self, path: str, decision: Decision, **fields: Any) -> Derived:
        """Return how a restore computes a leaf that is kept as decided, with further fields."""
        spec = self.spec(path)
        names = ("of", "spacing", "seed", "fraction_bits", "limit", "halvings", "spare_bits")
        decided = {name: getattr(decision, name) for name in names}
        return Derived(decision.how, spec.dtype, spec.shape, **decided | fields)


def read_together(
    source: LeafSource, current: Callable[[], Any], group: Sequence[LeafSource]
) -> LeafSource:
    """Return ``source`` with another capture, which reads the ``group`` with it.

    It is read as early as the first of them must be read.
    """
    # If one of them were read later, training could change it between the two reads.
    views = {id(view): view for member in group for view in member.views}
    return replace(
        source,
        current=current,
        lazy=all(member.lazy for member in group),
        is_own=all(member.is_own for member in group),
        # Without all of them, nothing is gained by a copy.
        views=tuple(views.values()) if all(member.views for member in group) else (),
    )
