"""The changes to the set of steps of a root: commit, retention, deletion, collection, release.

A backend hands ``RootWriter.commit`` to its saver (or to the ranks that save together), and the
saver calls it on its committer thread once every segment of the step is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

import msgspec

from deltacheck.errors import StepNotFound, StepTagged
from deltacheck.policy.retention import Keep, Saved, partial_checkpoints, retained
from deltacheck.save import partial_steps
from deltacheck.store import collect
from deltacheck.store.commit import commit
from deltacheck.store.documents import Written
from deltacheck.store.lock.lease import Lease
from deltacheck.store.manifest import Brief, Manifest
from deltacheck.store.roots import tags
from deltacheck.store.roots.root import Root, newest_brief
from deltacheck.store.roots.wording import describe_steps, listed

log = logging.getLogger("deltacheck")

# Steps that lose leaves between two rewrites of segments. More: fewer looks at manifests; fewer:
# space is free sooner. A rewrite that includes more steps is no larger.
_STEPS_OF_REWRITE = 32


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of an engine root: its training step and its sequence number."""

    step: int
    seq: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """The checkpoints that stay and those that were deleted (or would be), oldest first.

    ``partial``: those that stay and have lost leaves (or would).
    """

    kept: tuple[Checkpoint, ...]
    deleted: tuple[Checkpoint, ...]
    partial: tuple[Checkpoint, ...] = ()


class Course:
    """A course: a save from which a run went on, and all saves that followed it.

    A run that restores a step goes on with the course of that step. Otherwise the first save
    decides: behind the newest step of the root it goes on with that step's course, too, since
    states are also restored by other means. At or before the newest step it begins a new course, as
    a program does that has forgotten to restore. Retention applies to one course only.

    Args:
        root: The root that the steps are in.
    """

    def __init__(self, root: Root) -> None:
        self._roots = [root]
        self._name: str | None = None

    def include(self, root: Root) -> None:
        """Look for earlier steps in another root, too."""
        self._roots.append(root)

    def follow(self, name: str) -> None:
        """Go on with a course, such as that of a restored step; empty: the first of the root."""
        self._name = name

    def assigned(self, manifest: Manifest) -> Manifest:
        """Return the manifest of a new save with its course."""
        if self._name is None:
            self._name = self._first(manifest)
        if manifest.course == self._name:
            return manifest
        return msgspec.structs.replace(manifest, course=self._name)

    def _first(self, manifest: Manifest) -> str:
        # Read anew, because a ``Root`` serves one thread.
        roots = [root.afresh() for root in self._roots]
        briefs = [brief for root in roots if (brief := newest_brief(root)) is not None]
        newest = max(briefs, key=lambda brief: brief.seq, default=None)
        if newest is None or manifest.step > newest.step:
            return "" if newest is None else newest.course
        steps = sorted({brief.step for root in roots for brief in root.briefs()[0].values()})
        log.warning(
            "%s has %d %s that this process has not restored (%s), and step %d does not follow"
            " them: it begins another course of the run. They stay whatever Keep(last=...) says. To"
            " go on with them, call restore() before the first save; to keep the runs apart, save"
            " to another root; to remove one: deltacheck prune ROOT STEP",
            self._roots[0].path,
            len(steps),
            "step" if len(steps) == 1 else "steps",
            listed(steps),
            manifest.step,
        )
        return manifest.nonce


class RootWriter:
    """The right of this process to change which steps of a root exist.

    Several ranks may write segments of one root, but only the process with the lease commits and
    deletes. Before each change the lease is checked: a process that was taken for dead must not
    delete what its successor needs.

    Args:
        root: The root. One ``Root`` serves one thread at a time.
        lease: The lease of the root, or ``None`` in a process that writes segments only.
        keep: The checkpoints and leaves that stay after a commit. Default: all.
        grace_seconds: The time that unneeded segments stay for readers.
        rewrite: Writes segments again without the leaves that no step needs, for a ``keep`` that
            removes leaves. It gets the root, the segments to leave alone, and those that it has
            examined before, to which it adds.
        course: The course of the run that saves belong to. Default: that of ``root``.
    """

    def __init__(
        self,
        root: Root,
        lease: Lease | None,
        keep: Keep | None = None,
        *,
        grace_seconds: float = 0.0,
        rewrite: Callable[[Root, Collection[str], set[str]], object] | None = None,
        course: Course | None = None,
    ) -> None:
        self.root = root
        self.course = course or Course(root)
        self.lease = lease
        self.keep = keep or Keep()
        self._grace_seconds = grace_seconds
        self._rewrite = rewrite
        # The checkpoints that have lost leaves or have none to lose, and the segments that were
        # rewritten or have little to lose: they need no further look.
        self._reduced_seqs: set[int] = set()
        self._examined: set[str] = set()
        self._steps_at_rewrite = 0
        self.after_commit: Callable[[Manifest], None] | None = None
        self._protected: list[Callable[[], Collection[str]]] = []

    def protect(self, segments: Callable[[], Collection[str]]) -> None:
        """Exclude segments from every collection. ``segments`` is called at each of them."""
        self._protected.append(segments)

    def check(self) -> None:
        """Raise ``RootBusy`` if the right to write has been lost."""
        assert self.lease is not None, "only the process with the lease commits and deletes"
        self.lease.check()

    def commit(self, manifest: Manifest) -> Written:
        """Make a step exist, then delete the checkpoints that ``keep`` does not name.

        ``after_commit(manifest)`` is called last, on the thread of the commit.
        The caller has made every segment of the step durable. A failure of the deletion is logged:
        the step exists, and the next commit deletes again.

        Raises:
            RootBusy: Another process writes to the root.
        """
        # Older checkpoints are deleted only after the commit: until then the newest of them may be
        # the only whole one.
        manifest = self.course.assigned(manifest)
        document = commit(self.root.path, manifest, self.root.store.durability, self.check)
        if not (self.keep.all_steps and self.keep.all_leaves):
            try:
                self.retain()
            except Exception:
                log.warning(
                    "step %d is committed, but older ones could not be deleted",
                    manifest.step,
                    exc_info=True,
                )
        if self.after_commit is not None:
            self.after_commit(manifest)
        return document

    def retain(self) -> None:
        """Delete what ``keep`` does not name, and collect the segments."""
        prune(self.root, self.keep, reduced_seqs=self._reduced_seqs, still_ours=self.check)
        # Checked again, since deletions may take long and the lease may be lost meanwhile.
        self.check()
        if not self.keep.all_leaves:
            self._rewrite_segments()
        self.collect()

    def _rewrite_segments(self) -> None:
        """Write segments again, once enough steps have lost leaves."""
        assert self._rewrite is not None, "such a keep needs a function that writes segments again"
        count = len(self._reduced_seqs)
        if count - self._steps_at_rewrite >= _STEPS_OF_REWRITE:
            self._steps_at_rewrite = count
            # The next save goes on from these, by their names.
            protected = {name for segments in self._protected for name in segments()}
            self._rewrite(self.root, protected, self._examined)

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step. Raises as ``delete`` of this module does."""
        delete(self.root, step, still_ours=self.check)

    def delete_checkpoint(self, seq: int) -> None:
        """Delete the checkpoint of a sequence number if it exists, and collect its segments."""
        if seq in [checkpoint.seq for checkpoint in self.root.checkpoints()]:
            collect.delete_checkpoint(self.root, seq)
            self.collect()

    def collect(self, grace_seconds: float | None = None, newest: int = -1) -> None:
        """Remove the segments that no step, no save under way and no reader needs.

        ``newest``: a sequence number that was committed, even if that step is deleted by now.
        """
        # Asked for at every collection, since the saves under way change the set.
        before = {name for segments in self._protected for name in segments()}
        # And again after the segments were listed: some of them may have been made since.
        after = (name for segments in self._protected for name in segments())
        collect.collect(
            self.root,
            grace_seconds=self._grace_seconds if grace_seconds is None else grace_seconds,
            protected=chain(before, after),
            newest=newest,
            still_ours=None if self.lease is None else self.lease.check,
        )

    def abandon(self) -> None:
        """Record that nobody refers to the owner, which gives the root back after its saves."""
        if self.lease is not None:
            self.lease.holding.is_abandoned = True

    def release(self) -> None:
        """Give the root back. The caller has ended its saves; a second call does nothing."""
        if self.lease is not None:
            self.lease.release()


def prune(
    root: Root,
    keep: Keep,
    *,
    reduced_seqs: set[int] | None = None,
    dry_run: bool = False,
    still_ours: Callable[[], None] | None = None,
) -> Pruned:
    """Delete the checkpoints that neither ``keep`` nor a tag names, oldest first.

    Then remove leaves from those that stay, if ``keep`` says so. A checkpoint with a tag keeps
    every leaf.

    Their segments stay until they are collected. A checkpoint whose manifest cannot be read is
    neither counted nor deleted. Nor is one of another course of the run than the newest.

    Args:
        root: The root. The caller holds its lease.
        keep: The rules.
        reduced_seqs: The sequence numbers of checkpoints that have lost leaves before. They are not
            looked at again, and new ones are added. Default: none.
        dry_run: Change nothing, and return what would be deleted.
        still_ours: Raises if the right to write has been lost.

    Returns:
        The checkpoints that stay and those that were deleted.

    Raises:
        Damaged: A tag cannot be read. Nothing is deleted.
        StepNotFound: The root is one of a ``CheckpointManager``, whose steps are Orbax's.
        RootBusy: The right to write has been lost.
    """
    if keep.all_steps and keep.all_leaves:
        return Pruned(_checkpoints(root.briefs()[0].values()), ())
    _refuse_manager(root)
    # Held from before the tags are read until the last deletion (docs/reference/format.md, section
    # 3.1). A tag that is added in between would name a deleted checkpoint.
    with tags.lock(root.store.path):
        briefs = root.briefs()[0].values()
        # By nonce, because a resumed run saves the same step numbers again.
        tagged = {tag.nonce for tag in tags.readable(root.store.path).values()}
        saved = [Saved(b.seq, b.step, b.nonce, b.metrics, b.course) for b in briefs]
        stay = retained(saved, keep, tagged)
        unneeded = _checkpoints(b for b in briefs if b.seq not in stay)
        if not dry_run:
            _delete_all(root, unneeded, still_ours)
        reduced: frozenset[int] = frozenset()
        if not keep.all_leaves:
            kept = [checkpoint for checkpoint in saved if checkpoint.seq in stay]
            reduced_seqs = set() if reduced_seqs is None else reduced_seqs
            older = partial_checkpoints(kept, keep, tagged) - reduced_seqs
            reduced = partial_steps.remove_leaves(
                root, older, keep.patterns, dry_run=dry_run, still_ours=still_ours
            )
            reduced_seqs |= older
    return Pruned(
        _checkpoints(b for b in briefs if b.seq in stay),
        unneeded,
        _checkpoints(b for b in briefs if b.seq in reduced),
    )


def delete(
    root: Root, step: int, *, dry_run: bool = False, still_ours: Callable[[], None] | None = None
) -> Pruned:
    """Delete every checkpoint of a training step. Its segments stay until they are collected.

    Args:
        root: The root. The caller holds its lease.
        step: The training step.
        dry_run: Change nothing, and return what would be deleted.
        still_ours: Raises if the right to write has been lost.

    Returns:
        The checkpoints that stay and those that were deleted.

    Raises:
        StepNotFound: There is no such step.
        StepTagged: The step has a tag, which the message names. Nothing is deleted.
        Damaged: A tag cannot be read. Nothing is deleted.
        RootBusy: The right to write has been lost.
    """
    _refuse_manager(root)
    # Held over the search for tags and the deletion, as in `prune`.
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
                f" take the tag away first: deltacheck tag ROOT --delete {names[0]}, or"
                f" engine.untag({names[0]!r})"
            )
        checkpoints = _checkpoints(briefs)
        if not dry_run:
            _delete_all(root, checkpoints, still_ours)
    return Pruned(_checkpoints(b for b in every if b.step != step), checkpoints)


def _delete_all(
    root: Root, checkpoints: Iterable[Checkpoint], still_ours: Callable[[], None] | None
) -> None:
    for checkpoint in checkpoints:
        # Checked before each: another process may take the root over while this one hangs.
        if still_ours is not None:
            still_ours()
        collect.delete_checkpoint(root, checkpoint.seq)


def _checkpoints(briefs: Iterable[Brief]) -> tuple[Checkpoint, ...]:
    return tuple(
        Checkpoint(brief.step, brief.seq) for brief in sorted(briefs, key=lambda brief: brief.seq)
    )


def _refuse_manager(root: Root) -> None:
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager: its steps are deleted by Orbax, see"
            " its options (max_to_keep)"
        )
