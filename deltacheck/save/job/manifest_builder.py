"""Describe a save: its manifest for readers, and its report for the caller."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from deltacheck.codec.derivation import Derived
from deltacheck.leaf.contracts import PeakRate, Promise, weakest_of
from deltacheck.leaf.spec import LeafKind, LeafReport
from deltacheck.leaf.tree import Node
from deltacheck.save.job.leaf_state import LeafSave
from deltacheck.save.job.source import torn_between_reads
from deltacheck.store import layout
from deltacheck.store.documents import Written
from deltacheck.store.manifest import LeafRecord, Manifest, SegmentRef


@dataclass(frozen=True, slots=True)
class Terms:
    """Statements of a manifest beside the stored leaves.

    Args:
        derived: Leaves that are not stored, or not as they are, and how a restore computes them.
        contracts: The promises for leaves that are not exact.
        stage: The stage of the policy.
        digests: Digests of leaves as they were read to derive others from them, by path.
        reason: The reason for the stage.
        rates: The course of the learning rate of each parameter group.
    """

    derived: Mapping[str, Derived] = field(default_factory=dict)
    contracts: Mapping[str, Promise] = field(default_factory=dict)
    stage: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    rates: Mapping[str, PeakRate] = field(default_factory=dict)

    def check(self, records: Mapping[str, LeafRecord]) -> None:
        """Check that leaves were read as they are stored.

        Args:
            records: The stored leaves by path.

        Raises:
            SnapshotTorn: A leaf was written to between two reads.
        """
        for path, digest in self.digests.items():
            # A leaf that is stored as codes has the digest of these.
            if path in records and path not in self.derived and records[path].digest != digest:
                raise torn_between_reads(path, digest, records[path].digest)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A step to save, as the backend asked for it.

    Args:
        step: The training step.
        tree: The structure of the state.
        commit: Makes the step exist; called with the manifest on the committer thread.
        metrics: Values for the manifest and the report.
        note: A remark for the report.
        abandon: Called once, behind the training, if the save fails.
        begin: The time of the call, of ``time.perf_counter``.
    """

    step: int
    tree: Node
    commit: Callable[[Manifest], Written]
    metrics: Mapping[str, float]
    note: str = ""
    abandon: Callable[[BaseException], None] | None = None
    begin: float = field(default_factory=time.perf_counter)


def build_manifest(
    request: SaveRequest,
    seq: int,
    terms: Terms,
    segments: tuple[SegmentRef, ...],
    records: Mapping[str, LeafRecord],
    durability: str,
) -> Manifest:
    """Return the manifest of a step that is about to be committed under the number ``seq``."""
    # Two segments of one sequence number come from ranks that saved together, so this save goes on
    # from a step of several ranks.
    has_tiles = len({layout.seq_of(ref.id) for ref in segments}) < len(segments)
    manifest = Manifest(
        format=layout.FORMAT,
        version=layout.VERSION,
        seq=seq,
        step=request.step,
        # Tags name a save by its nonce: steps and sequence numbers can be used again.
        nonce=secrets.token_hex(8),
        time=time.time(),
        writer=f"process {os.getpid()} on {socket.gethostname()}",
        contract=weakest_of(terms.contracts.values()),
        segments=segments,
        # This process does not know the lanes of the earlier ranks, so one lane has all segments.
        lanes=(tuple(range(len(segments))),) if has_tiles else (),
        tree=request.tree,
        leaves=dict(records),
        # JSON has no infinities and no NaN.
        metrics={
            name: value if math.isfinite(value) else str(value)
            for name, value in request.metrics.items()
        },
        derived=dict(terms.derived),
        contracts=dict(terms.contracts),
        stage=terms.stage,
        stage_reason=terms.reason,
        rates=dict(terms.rates),
        durability=durability,
    )
    return msgspec.structs.replace(manifest, must_understand=manifest.features)


def leaf_report(leaf: LeafSave) -> LeafReport:
    """Return the report of a leaf."""
    if leaf.stored_spec is None:
        kind = LeafKind.DERIVED
    elif leaf.entry is None:
        kind = LeafKind.UNCHANGED
    else:
        kind = LeafKind.DELTA if leaf.entry.key is None else LeafKind.KEYFRAME
    form = leaf.stored_spec or leaf.source
    return LeafReport(
        leaf.source.path,
        kind,
        leaf.source.raw_bytes,
        leaf.encoded_bytes,
        form.raw_bytes // form.word_bytes,
        leaf.changed_words,
        leaf.cause,
    )
