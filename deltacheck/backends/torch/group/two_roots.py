"""The steps of a memory root and of its durable root, seen as those of one run."""

from __future__ import annotations

import contextlib

from deltacheck.errors import Damaged, StepNotFound
from deltacheck.maintain.memory_tier import Tier, durable_digest
from deltacheck.store import layout
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots import tagging
from deltacheck.store.roots.root import Root


class TwoRoots:
    """The steps of a run whose newest steps are in memory.

    Args:
        live: The memory root.
        durable: The durable root, which has the tags.
    """

    def __init__(self, live: Root, durable: Root) -> None:
        self.live, self.durable = live, durable
        # Copies are read in this order.
        self.roots = (live, durable)

    def steps(self) -> list[int]:
        """Return the steps in memory and in the durable root, ascending."""
        return sorted({*self.durable.steps(), *self.live.steps()})

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step and its root: the memory, if both have it."""
        if isinstance(step, str):
            return self.durable, self.durable.manifest(step)
        candidates: list[tuple[Root, Manifest]] = []
        for root in (self.live, self.durable):
            with contextlib.suppress(StepNotFound):
                candidates.append((root, root.manifest(step)))
        if not candidates:
            steps = ", ".join(map(str, self.steps())) or "none"
            raise StepNotFound(
                f"neither {self.live.path} nor {self.durable.path} has"
                f" {'any step' if step is None else f'step {step}'}; steps: {steps}"
            )
        # For equal numbers ``max`` returns the first candidate, the memory, which is faster to
        # read.
        return max(candidates, key=lambda candidate: candidate[1].seq)

    def require_digest(self, root: Root, manifest: Manifest, expected: str | None) -> None:
        """Raise ``Damaged`` unless a step has the digest that the caller has kept."""
        # The digest that a save reports is that of the durable manifest, also while the step is
        # only in memory, where its manifest differs.
        is_live = root is self.live and expected is not None
        digest = durable_digest(self.durable, manifest) if is_live else None
        root.require_digest(manifest, expected, digest)

    def durable_form(self, manifest: Manifest) -> Manifest | None:
        """Return the copy of a step in the durable root, or ``None`` if none can be read."""
        name = layout.checkpoint_id(manifest.seq)
        try:
            durable = self.durable.read(self.durable.path / layout.CHECKPOINTS / name / "zarr.json")
        # Not copied yet, deleted, or damaged too: the caller reports the first failure.
        except (FileNotFoundError, Damaged):
            return None
        # A resumed run may have used the number again; only the nonce identifies a save.
        return durable if durable.nonce == manifest.nonce else None

    def copies(
        self, step: int | str | None, expected_digest: str | None
    ) -> list[tuple[Root, Manifest]]:
        """Return the newest save of a step in each root that has it, the memory first.

        Raises ``StepNotFound``, and ``Damaged`` if it has not the digest that is expected.
        """
        root, manifest = self.find(step)
        self.require_digest(root, manifest, expected_digest)
        durable = None if root is self.durable else self.durable_form(manifest)
        return [(root, manifest)] + ([] if durable is None else [(self.durable, durable)])

    def is_base(self, root: Root) -> bool:
        """Return true if saves can go on from the segments of a root."""
        # Segments of the durable root are no base for saves in memory: chains begin anew there.
        return root is self.live

    def tag(self, tier: Tier, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a step of the durable root; a step that is only in memory is copied there first."""
        # The lock is held so that nothing deletes the copy before it has its tag.
        with tier.drain.retention_lock:
            root, manifest = self.find(step)
            if root is self.live and self.durable_form(manifest) is None:
                tier.persist(manifest, None)
            tagging.put(self.durable, step, name, move=move)
