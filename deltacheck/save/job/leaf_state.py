"""Records of one leaf: its chain between saves, and its part of one save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from deltacheck.codec.base import U32, U64
from deltacheck.errors import StorageTimeout
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import Policy
from deltacheck.policy.keyframes import needs_keyframe
from deltacheck.policy.merging import DeltasSinceKeyframe, can_merge, group_limits, is_dense
from deltacheck.store.files.arrays import Pending
from deltacheck.store.manifest import LeafEntry


@dataclass(slots=True)
class LeafState:
    """The chain of one leaf, as the newest captured save left it.

    Args:
        spec: The form of the stored content.
        bounds: Word offsets of the chunks, uint64 ``(chunks + 1,)``.
        base: The decoded content, in the codec's form. The next save encodes against it. ``None``:
            the next save writes the leaf whole.
        digests: Chunk digests, uint64 ``(chunks, 2)``.
        digest: The leaf digest.
        key_segment: The segment that holds the leaf whole.
        delta_segments: The segments that hold its deltas, oldest first.
        delta_bytes: Bytes that a restore decodes from each of them.
        merged_deltas: The number of deltas at the beginning that are results of a merge.
        is_merged: Whether deltas are merged. False: keyframes are written instead, until the next
            one, because they take fewer bytes.
        base_write: A write that still reads the memory of ``base``.
        is_whole: Whether each save stores the leaf whole, without a base, because that takes hardly
            more bytes than a delta.
        saves_until_estimate: Saves until that is decided again.
        is_group: Whether the leaf is a group, whose deltas a law may predict.
    """

    spec: LeafSpec
    bounds: U64
    base: Any = None
    digests: U64 = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    digest: str = ""
    key_segment: str = ""
    # Replaced and never changed in place: other threads read them without a lock.
    delta_segments: list[str] = field(default_factory=list)
    delta_bytes: list[int] = field(default_factory=list)
    merged_deltas: int = 0
    is_merged: bool = True
    base_write: Pending | None = None
    is_whole: bool = False
    saves_until_estimate: int = 0
    is_group: bool = False

    def begin_at(self, segment: str) -> None:
        """Begin a chain at a segment that holds the leaf whole."""
        self.key_segment, self.delta_segments, self.delta_bytes = segment, [], []
        self.merged_deltas, self.is_merged = 0, True

    def is_due(self, policy: Policy) -> bool:
        """Return true if the policy asks for a keyframe of this leaf."""
        # Without a base there is nothing to take a difference from, so the leaf is always due.
        return needs_keyframe(
            group_limits(policy, self.deltas) if self.is_group else policy,
            self.spec.path,
            self.spec.raw_bytes,
            None if self.base is None else self.delta_bytes,
            merges=self.may_merge and can_merge(policy) and not is_dense(self.deltas),
        )

    @property
    def may_merge(self) -> bool:
        """Return true if deltas are merged before the chain reaches a limit."""
        # No law predicts a merged delta, so it would be as large as many predicted ones.
        return self.is_merged and not self.is_group

    @property
    def deltas(self) -> DeltasSinceKeyframe:
        """Return the sizes of the deltas since the keyframe."""
        return DeltasSinceKeyframe(self.spec.raw_bytes, self.delta_bytes, self.merged_deltas)


class RowRun(NamedTuple):
    """Consecutive index rows of one leaf in one part.

    Args:
        part: Number of the part within the segment.
        first_row: Number of the first row within the part's index.
        chunks: The leaf's chunk number of each row, uint32 ``(rows,)``.
        digests: Digests of the chunks' new content, uint64 ``(rows, 2)``, if the codec computed
            them.
    """

    part: int
    first_row: int
    chunks: U32
    digests: U64 | None


@dataclass(slots=True)
class LeafSave:
    """One leaf's part of one save. It holds no source: captured memory must be free to go.

    Args:
        number: Position of the leaf among the sources; index rows refer to it.
        source: The leaf as the training has it.
        stored_spec: The form of what is stored. ``None``: nothing is stored, because a restore
            derives the leaf from others.
        state: The leaf's chain, set by the capture.
        runs: The encoded rows, in the order of their chunks.
        changed_words: Words that differ from the base, as the report counts them.
        encoded_bytes: Bytes before the entropy stage.
        live_digest: Digest of the captured content, if the save is read back.
        entry: The leaf's entry in the segment's table. ``None``: the leaf did not change.
        cause: Why it was written, see ``policy.causes``; empty if it was not.
        is_captured: Whether its source was read, or is being read.
    """

    number: int
    source: LeafSpec
    stored_spec: LeafSpec | None = None
    state: LeafState | None = None
    runs: list[RowRun] | None = None
    changed_words: int = 0
    encoded_bytes: int = 0
    live_digest: str = ""
    entry: LeafEntry | None = None
    cause: str = ""
    is_captured: bool = False


def await_write(pending: Pending, timeout: float) -> None:
    """Wait for a write, for at most ``timeout`` seconds.

    Raises:
        StorageTimeout: The write did not end in time.
        Exception: The error of the write itself.
    """
    try:
        pending.result(timeout=timeout)
    except TimeoutError:
        raise StorageTimeout(
            f"the storage did not finish a write within {timeout:g} s; it may hang"
        ) from None
