"""Steps that are kept as the gradients since an earlier checkpoint: when that is done, and what
their
restore must prove.

The manifest of such a step names what is stored: the leaves as that checkpoint (the *base*) has
them, which costs no bytes, and the inputs of every update since. ``Manifest.replay`` says how the
tree's leaves are computed from them, and the digest that each must have then. So the manifest has
all that a restore needs, as any other, and deleting the base harms nobody. The updates themselves
belong to a framework: ``deltacheck/backends``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltacheck.errors import ReplayDiffers, ReplayNeeded
from deltacheck.store.documents import read_manifest
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root

GIVE_UP_AFTER = (
    3  # saves in a row whose replay gave other bits: replaying the next would only cost time
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a gradient log may go.

    ``max_replay_steps``: most updates that a restore replays. Larger: fewer saves that store the
    state itself, so fewer bytes; a longer restore, and a step that depends on more segments.
    ``max_steps_per_save``: most updates between two saves that are logged. Larger: gradients of
    more updates are kept in memory, and beyond about 4 storing the state itself is smaller.
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
class Situation:
    """What is known before a save.

    ``replayed``: updates since the base that earlier saves have logged; ``fresh``: those since the
    last save. ``has_base``: the last save, which the saver still has, was of the same log.
    ``differed``: saves in a row whose replay gave other bits. ``spoiled``: why an update since the
    last save cannot be stored.
    """

    has_base: bool
    replayed: int
    fresh: int
    differed: int = 0
    spoiled: str | None = None


def why_direct(situation: Situation, limits: Limits) -> str | None:
    """Why a save stores the state itself; ``None`` where it may store the gradients, if the replay
    proves to be exact.
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
    """The leaf path of an update's input. No leaf of a tree has it: in those ``%`` stands before
    two hexadecimal digits, or alone.
    """
    return f"%gradient/{update}/{name}"


def refuse(root: Root, manifest: Manifest, paths: Iterable[str]) -> None:
    """Raise ``ReplayNeeded`` where one of the leaves is stored only as what a replay begins
    with.
    """
    wanted = (
        []
        if manifest.replay is None
        else [path for path in paths if path in manifest.replay.digests]
    )
    if manifest.replay is not None and wanted:
        raise ReplayNeeded(
            f"step {manifest.step} keeps leaf {wanted[0]!r} and {len(wanted) - 1} others as"
            f" gradients: restoring it replays {len(manifest.replay.steps)} updates of"
            f" {manifest.replay.update}. Restore it with that optimizer or update"
            " (GradientLog.restore, or Engine.restore(step, optimizer=...))."
            f" {way_out(root, manifest)}"
        )


def check(root: Root, manifest: Manifest, found: Mapping[str, str], update: str) -> None:
    """Raise ``ReplayDiffers`` where a replayed leaf has another digest than the step promises.
    ``update``: what computed it now.
    """
    assert manifest.replay is not None
    wrong = [path for path, digest in manifest.replay.digests.items() if found.get(path) != digest]
    if wrong:
        first, others = wrong[0], f" (and {len(wrong) - 1} other leaves)" if len(wrong) > 1 else ""
        raise ReplayDiffers(
            f"step {manifest.step}, leaf {first!r}{others}: replaying {len(manifest.replay.steps)}"
            f" updates with {update} gives digest {found.get(first)}, saved was"
            f" {manifest.replay.digests[first]} by {manifest.replay.update}."
            f" {way_out(root, manifest)}"
        )


def way_out(root: Root, manifest: Manifest) -> str:
    """Which other step restores without a replay, in words."""
    for ref in reversed(root.checkpoints()):
        if ref.seq < manifest.seq and read_manifest(ref.manifest_path).replay is None:
            return f"Newest earlier step that restores without a replay: {ref.step}"
    return "No earlier step restores without a replay"
