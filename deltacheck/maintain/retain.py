"""Delete steps: those that a retention does not keep, or one that is named. Tagged steps stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deltacheck.errors import StepNotFound, StepTagged
from deltacheck.policy.retention import Retention, Saved, retained
from deltacheck.store import collect, tags
from deltacheck.store.root import Brief, Root, describe_steps


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of an engine root: training step and sequence number."""

    step: int
    seq: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """What stays and what was deleted (or would be), oldest first."""

    kept: tuple[Checkpoint, ...]
    deleted: tuple[Checkpoint, ...]


def prune(
    root: Root,
    retention: Retention,
    *,
    dry_run: bool = False,
    still_ours: Callable[[], None] | None = None,
) -> Pruned:
    """Delete the checkpoints that ``retention`` and no tag keeps, oldest first; segments go when
    they
    are collected.

    ``still_ours``: raises where the right to write has been lost. A checkpoint whose manifest
    cannot be read is neither counted nor deleted.

    REQUIRES: the caller holds the lease. Raises ``Damaged`` and deletes nothing where a tag cannot
    be read, ``StepNotFound`` in the root of a ``CheckpointManager``, whose steps are Orbax's;
    ``RootBusy``.
    """
    _refuse_manager(root)
    if retention.keeps_all:
        return Pruned(_named(root.briefs()[0].values()), ())
    with tags.lock(root.store.path):
        briefs = root.briefs()[0].values()
        tagged = {tag.nonce for tag in tags.readable(root.store.path).values()}
        stay = retained(
            [Saved(b.seq, b.step, b.nonce, b.metrics) for b in briefs], retention, tagged
        )
        going = _named(b for b in briefs if b.seq not in stay)
        for one in going if not dry_run else ():
            if still_ours is not None:
                still_ours()
            collect.delete_checkpoint(root, one.seq)
    return Pruned(_named(b for b in briefs if b.seq in stay), going)


def delete(
    root: Root, step: int, *, still_ours: Callable[[], None] | None = None
) -> tuple[Checkpoint, ...]:
    """Delete every checkpoint of a training step; segments go when they are collected. What was
    deleted, oldest first.

    REQUIRES: the caller holds the lease. Raises ``StepNotFound``, ``StepTagged`` (naming the tag
    and the way out) and deletes nothing then; ``Damaged`` where a tag cannot be read, ``RootBusy``.
    """
    _refuse_manager(root)
    with tags.lock(root.store.path):
        every = root.briefs()[0].values()
        briefs = [brief for brief in every if brief.step == step]
        if not briefs:
            raise StepNotFound(
                f"{root.path} has no step {step}."
                f" {describe_steps(sorted({brief.step for brief in every}))}"
            )
        nonces = {brief.nonce for brief in briefs}
        names = sorted(
            name for name, tag in tags.readable(root.store.path).items() if tag.nonce in nonces
        )
        if names:
            raise StepTagged(
                f"step {step} of {root.path} is tagged {', '.join(map(repr, names))}. To delete it,"
                f" take the tag away first: deltacheck untag ROOT {names[0]}, or"
                f" engine.untag({names[0]!r})"
            )
        going = _named(briefs)
        for one in going:
            if still_ours is not None:
                still_ours()
            collect.delete_checkpoint(root, one.seq)
    return going


def _named(briefs: Iterable[Brief]) -> tuple[Checkpoint, ...]:
    return tuple(
        Checkpoint(brief.step, brief.seq) for brief in sorted(briefs, key=lambda brief: brief.seq)
    )


def _refuse_manager(root: Root) -> None:
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager: its steps are deleted by Orbax, see"
            " its options (max_to_keep)"
        )
