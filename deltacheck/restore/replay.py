"""Gradient logs: steps that are stored as the gradients since an earlier checkpoint.

The manifest of such a step names the leaves as they were in the earlier checkpoint (the *base*),
which takes no new bytes, and the inputs of each update since. ``Manifest.replay`` states how the
leaves of the tree are computed from them, and their digests. So the manifest has all that a restore
needs, and deleting the base affects no other step. The updates themselves belong to a framework
(``deltacheck/backends``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from deltacheck.codec.base import U8
from deltacheck.errors import ReplayDiffers, ReplayNeeded
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat, Node
from deltacheck.store.documents import read_manifest
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.roots.root import Root

_HASH_THREADS = 4

_Content = TypeVar("_Content")
# Consecutive saves whose replay gave other bits, after which no further replay is tried.
GIVE_UP_AFTER = 3


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Limits of a gradient log.

    Args:
        max_replay_steps: The most updates that a restore replays. Larger: fewer saves store the
            state itself, so fewer bytes; smaller: a shorter restore, and a step that depends on
            fewer segments.
        max_steps_per_save: The most updates between two saves that are logged. Larger: gradients of
            more updates are kept in memory; smaller: more saves store the state itself, which is
            smaller than about 4 updates.
    """

    max_replay_steps: int = 16
    max_steps_per_save: int = 4

    def __post_init__(self) -> None:
        if self.max_replay_steps < 1 or self.max_steps_per_save < 1:
            raise ValueError(
                "max_replay_steps and max_steps_per_save must be at least 1, "
                f"not {self.max_replay_steps} and {self.max_steps_per_save}"
            )


@dataclass(frozen=True, slots=True)
class LogSituation:
    """The state of a gradient log before a save.

    Args:
        has_base: The last save, which the saver still holds, belongs to the same log.
        replayed: Updates since the base that earlier saves have logged.
        fresh: Updates since the last save.
        differed: Consecutive saves whose replay gave other bits.
        spoiled: The reason for which an update since the last save cannot be stored, if any.
    """

    has_base: bool
    replayed: int
    fresh: int
    differed: int = 0
    spoiled: str | None = None


def why_direct(situation: LogSituation, limits: ReplayLimits) -> str | None:
    """Return the reason for which a save must store the state itself.

    Returns:
        The reason; ``None`` if the save may store gradients, provided that their replay is exact.
    """
    if situation.differed >= GIVE_UP_AFTER:
        return (
            f"the last {situation.differed} replays gave other bits than the optimizer; make a new"
            " log to try again"
        )
    if not situation.has_base:
        return "there is no checkpoint of this log yet to replay from"
    if situation.spoiled is not None:
        return situation.spoiled
    if situation.fresh == 0:
        return "the optimizer has made no step since the last checkpoint"
    if situation.fresh > limits.max_steps_per_save:
        return (
            f"there were more than max_steps_per_save={limits.max_steps_per_save} optimizer steps"
            " since the last checkpoint"
        )
    if situation.replayed + situation.fresh > limits.max_replay_steps:
        return f"a restore would replay more than max_replay_steps={limits.max_replay_steps} steps"
    return None


def input_path(update: int, name: str) -> str:
    """Return the stored path of an input of an update.

    No leaf of a tree has such a path: there a ``%`` is followed by two hexadecimal digits, or ends
    the key.
    """
    return f"%gradient/{update}/{name}"


def refuse(root: Root, manifest: Manifest, paths: Iterable[str]) -> None:
    """Raise ``ReplayNeeded`` if only a replay can compute one of the leaves."""
    logged = (
        []
        if manifest.replay is None
        else [path for path in paths if path in manifest.replay.digests]
    )
    if manifest.replay is not None and logged:
        raise ReplayNeeded(
            f"step {manifest.step} keeps leaf {logged[0]!r} and {len(logged) - 1} others as"
            f" gradients: restoring it replays {len(manifest.replay.steps)} updates of"
            f" {manifest.replay.update}. Restore it with that optimizer or update"
            " (GradientLog.restore, or Engine.restore(step, optimizer=...))."
            f" {way_out(root, manifest)}"
        )


def check(root: Root, manifest: Manifest, digests: Mapping[str, str], update: str) -> None:
    """Compare the digests of replayed leaves with those of the step.

    Args:
        root: The root.
        manifest: The step.
        digests: The digests of the replayed leaves, by path.
        update: A description of the update that was replayed.

    Raises:
        ReplayDiffers: A digest differs.
    """
    assert manifest.replay is not None
    wrong = [
        path for path, digest in manifest.replay.digests.items() if digests.get(path) != digest
    ]
    if wrong:
        first, rest = wrong[0], f" (and {len(wrong) - 1} other leaves)" if len(wrong) > 1 else ""
        raise ReplayDiffers(
            f"step {manifest.step}, leaf {first!r}{rest}: replaying {len(manifest.replay.steps)}"
            f" updates with {update} gives digest {digests.get(first)}, saved was"
            f" {manifest.replay.digests[first]} by {manifest.replay.update}."
            f" {way_out(root, manifest)}"
        )


def way_out(root: Root, manifest: Manifest) -> str:
    """Return a sentence about the newest earlier step that restores without a replay."""
    for ref in reversed(root.checkpoints()):
        # By sequence number and not by step: a resumed run repeats steps.
        if ref.seq < manifest.seq and read_manifest(ref.manifest_path).replay is None:
            return f"Newest earlier step that restores without a replay: {ref.step}"
    return "No earlier step restores without a replay"


class ContentReplica(Protocol):
    """A second instance of the content that an update changes, in memory of its own."""

    def update(self, options: Node, inputs: Mapping[str, Any]) -> None:
        """Do one update."""
        ...

    def memory(self) -> Flat:
        """Return the content after the updates so far."""
        ...


def replay_updates(
    root: Root,
    manifest: Manifest,
    plan: Replay,
    replica: ContentReplica,
    input_at: Callable[[str], Any],
    content_of: Callable[[Flat], tuple[_Content, dict[str, str]]],
    update_name: str,
) -> _Content:
    """Do the updates of a step, prove the result, and return it.

    Args:
        root: The root of the step; the message of an error names its other steps.
        manifest: The step.
        plan: The updates.
        replica: Holds the content that the updates begin with.
        input_at: Returns the input that is stored under a path.
        content_of: Returns the content of a memory, and the digest of each leaf.
        update_name: The name of the code that computes the updates now.

    Raises:
        ReplayDiffers: An update fails, or a leaf has another digest than the step promises.
    """
    try:
        for step in plan.steps:
            inputs = {name: input_at(path) for name, path in step.inputs.items()}
            replica.update(step.options, inputs)
        content, digests = content_of(replica.memory())
    # The update is code of a framework or of the user. Whatever it raises means that it cannot
    # replay the step here.
    except Exception as error:
        raise ReplayDiffers(
            f"step {manifest.step}: {len(plan.steps)} updates of {plan.update} cannot be replayed"
            f" with {update_name}: {type(error).__name__}: {error}."
            f" {way_out(root, manifest)}"
        ) from error
    # The replica names its arrays by their place in the memory, the manifest promises leaves.
    by_place = {plan.places.get(path, path): digest for path, digest in digests.items()}
    # No content is returned before every digest was compared (docs/reference/format.md, section 3).
    check(root, manifest, by_place, update_name)
    return content


def leaf_digests(leaves: Iterable[tuple[LeafSpec, U8]]) -> list[str]:
    """Return the digests of leaves in order, computed in a few threads."""
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda leaf: digest_of(*leaf), leaves))
