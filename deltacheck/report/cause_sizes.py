"""Count the bytes of each save by the cause of their writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from deltacheck.leaf.spec import LeafKind
from deltacheck.policy.causes import CAUSES, MERGED, REST, cause_of
from deltacheck.report.history import Step
from deltacheck.store.manifest import Manifest
from deltacheck.store.segment import Segment


class HasLeafBytes(Protocol):
    """The sizes of the files of a segment, by leaf."""

    @property
    def by_leaf(self) -> Mapping[str, float]:
        """Leaf path -> bytes of its values."""
        ...


class CauseCounter:
    """A fold over the steps of a root in the order of their saves.

    Args:
        cost: Returns the sizes of the files of a segment.
    """

    def __init__(self, cost: Callable[[Segment], HasLeafBytes]) -> None:
        self._cost = cost
        self._before: Manifest | None = None
        self._promised: set[str] = set()

    def count(self, step: Step) -> dict[str, int]:
        """Return the bytes that the save of a step wrote, by cause.

        Returns:
            Cause -> bytes, with a key for each of ``CAUSES``, ``MERGED`` and ``REST``. The sum is
            the size of all files that the save added, and of what was merged before it.

        Raises:
            OSError: If a file cannot be read.
            Damaged: If an index cannot be read.
        """
        manifest, before = step.manifest, self._before
        promised = frozenset(self._promised)
        self._before = manifest
        self._promised |= manifest.contracts.keys()
        sizes = dict.fromkeys(CAUSES, 0.0)
        costs: dict[str, HasLeafBytes] = {}
        for path, state in (step.states or {}).items():
            new_parts = {
                name: part
                for name, part in state.parts.items()
                if part.kind is not LeafKind.UNCHANGED
            }
            if not new_parts:
                continue
            cause = cause_of(
                path,
                is_array=state.kind is LeafKind.KEYFRAME,
                before=before,
                manifest=manifest,
                promised=promised,
            )
            for name, part in new_parts.items():
                segment = part.chain[-1][0]
                if segment.id not in costs:
                    costs[segment.id] = self._cost(segment)
                sizes[cause] += costs[segment.id].by_leaf.get(name, 0.0)
        rounded = {cause: round(size) for cause, size in sizes.items()}
        rest = step.manifest.stored_bytes + step.manifest_bytes - sum(rounded.values())
        # In an object store, the recorded bytes may be too few: the process counts those of all its
        # writers together.
        return rounded | {MERGED: manifest.merged_bytes, REST: max(0, rest)}


def summary(causes: Mapping[str, int]) -> str:
    """Describe the causes of a save in a few words, the largest first.

    Args:
        causes: Cause -> bytes. Shares below 2 % are left out.
    """
    total = sum(causes.values())
    shares = sorted(
        ((size / total, cause) for cause, size in causes.items() if total), reverse=True
    )
    return ", ".join(f"{cause} {share:.0%}" for share, cause in shares if share >= 0.02)
