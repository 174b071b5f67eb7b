"""The session of an engine: alone or with other ranks, with one root or with a memory tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.capture import tensor_codec
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.backends.torch.group import memory_of_ranks
from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.run_roots import MemoryFirst, OneRoot
from deltacheck.backends.torch.group.two_stages import TwoStages
from deltacheck.backends.torch.state import leaves, replica
from deltacheck.backends.torch.state.classes import build
from deltacheck.backends.torch.state.optimizers import OptimizerPlace, places_in
from deltacheck.backends.torch.state.repeated import Flattener
from deltacheck.errors import StepNotFound
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.maintain import compaction
from deltacheck.maintain.memory_tier import MemoryTier, Tier, most_bytes
from deltacheck.restore import damage
from deltacheck.restore.chain import Chain
from deltacheck.restore.fill import StepReader
from deltacheck.restore.resolve import (
    require_contract,
    require_leaves,
    resolve_leaves,
    select_paths,
)
from deltacheck.restore.values import load_leaves
from deltacheck.save.chains.chain_state import Numbers
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.save_options import SaveOptions, Settings
from deltacheck.save.saver import Saver
from deltacheck.save.treatment.signals import Agreed
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots import tagging
from deltacheck.store.roots.opened import Opened, open_alone
from deltacheck.store.roots.root import Root

if TYPE_CHECKING:
    # torch.distributed.tensor takes long to import, and most processes save alone.
    from deltacheck.backends.torch.group.collective import RankGroup

Commit = Callable[[Manifest], Written]


class Attempt(NamedTuple):
    """A save that may begin: the leaves that this process writes, and the call that commits it.

    ``agreed`` is the agreement with other ranks; ``None`` if there are none.
    """

    flat: Flat
    commit: Commit
    agreed: Agreed | None = None


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The arguments of ``Engine.restore``."""

    step: int | str | None
    target: object
    contract: str | None
    optimizer: torch.optim.Optimizer | None
    max_bytes: int | None
    fallback: bool
    expected_digest: str | None
    leaves: tuple[str, ...] | None = None


class Session:
    """The session of an engine on its roots: open, begin a save, commit, restore and release.

    It is composed of who saves and of where: ``group`` agrees with other ranks, ``roots`` is one
    root or a memory tier in front of it.

    Args:
        path: The durable root, made if it does not exist.
        settings: The settings of all saves, the same on every rank.
        settle_reads: Waits until no save under way reads the state any more.
        group: The ranks that save together, every one of which makes the same calls in the same
            order; ``None``: this process saves alone.
        memory: The memory tier, with the same options on every rank; ``None``: there is none.

    Raises:
        ValueError: The options cannot be combined.
        ForeignMemory: The memory holds steps that are not the newest of this run.
        RankFailed: The ranks differ in an option or in a folder, or one of them failed.
    """

    def __init__(
        self,
        path: Place,
        settings: Settings,
        settle_reads: Callable[[], None],
        *,
        group: RankGroup | None = None,
        memory: MemoryTier | None = None,
    ) -> None:
        self._flatten = Flattener(tensor_codec.is_host)
        self._settle_reads = settle_reads
        self.group = group
        with ExitStack() as on_failure:
            # Nobody could release what an engine has taken that was not made.
            if group is not None:
                on_failure.callback(group.close)
            opened = _opened(path, settings, group, memory)
            self.root = Root(path, opened.store)
            self.writer = RootWriter(
                self.root,
                opened.lease,
                settings.keep,
                grace_seconds=settings.options.grace_seconds,
                redate_after_seconds=settings.options.redate_after_seconds,
                rewrite=compaction.reclaim_history,
            )
            on_failure.callback(self.writer.release)
            self.roots = _roots(self.root, self.writer, settings.options, group, memory)
            on_failure.callback(self.roots.release)
            self.live = self.roots.live
            # A memory tier may hold newer steps than the durable root, and each number is used
            # once.
            next_seq = opened.next_seq
            if memory is not None:
                next_seq = max(next_seq, self.live.next_seq())
            self.saver = Saver(self.live.store, TorchCodec(), settings, Numbers(next_seq))
            on_failure.pop_all()
        self.writer.protect(self.saver.protected_segments)
        self.saver.on_resume = self.writer.course.follow
        if group is not None:
            group.joint.groups = self.saver.groups
            group.joint.compactions = self.saver.compactions
            # The saver of rank 0 does not know the segments of other ranks, which a collection
            # must spare.
            self.writer.protect(lambda: group.protected(self.root.store))
        if isinstance(self.roots, MemoryFirst) and self.roots.tier is not None:
            # The drain may remove segments, so it must know those that the savers build on.
            self.roots.tier.start(self._bases_in_memory)

    def _bases_in_memory(self) -> set[str]:
        own = self.saver.protected_segments()
        return own if self.group is None else own | self.group.protected(self.live.store)

    @property
    def is_of_ranks(self) -> bool:
        """True if other ranks save the same step."""
        return self.group is not None

    # --- saves ------------------------------------------------------------------------------------

    def flatten(self, state: object) -> Flat:
        """Return the leaves and the skeleton of a state."""
        return self._flatten(state) if self.group is None else self.group.flatten(state)

    def begin(
        self, step: int, flat: Flat, metrics: Mapping[str, float], *, is_whole: bool
    ) -> Attempt | None:
        """Begin a save, or return ``None`` if all ranks skip it.

        ``is_whole``: ``flat`` is the whole state, not the part that a gradient log leaves.
        """
        group, roots = self.group, self.roots
        if group is None:
            return Attempt(flat, roots.commit)
        assert is_whole, "a gradient log refuses ranks"
        make_room: Callable[[int, Flat], bool] | None = None
        if isinstance(roots, MemoryFirst):
            make_room = partial(memory_of_ranks.make_room, group, roots, self.saver)
            # A failed copy is raised before a new save begins, as a failed save is.
            with group.sharing_failure():
                roots.raise_unseen()
        begun = group.begin(self.saver, step, flat, metrics, make_room)
        if begun is None:
            return None
        tiles, attempt, agreed = begun
        make = group.maker(roots.commit, self.live.store.path)
        return Attempt(tiles, partial(attempt.commit, make), agreed)

    def make_room(self, step: int, specs: Iterable[LeafSpec]) -> bool:
        """Wait until there is space for one more save, or return ``False`` to skip it."""
        # Ranks agree on the space when a save begins.
        if self.group is not None or not isinstance(self.roots, MemoryFirst):
            return True
        self.saver.check_usable()
        # A failed copy is raised before a new save begins, as a failed save is.
        self.roots.raise_unseen()
        sizes = [spec.raw_bytes for spec in specs]
        largest = most_bytes(sum(sizes), len(sizes))
        return self.roots.make_room(self.saver, step, largest, self.saver.start_over)

    def wait(self, timeout: float | None) -> None:
        """Wait until every save under way is committed, and raise the first unseen failure."""
        self.saver.wait(timeout)
        # Of ranks, only rank 0 knows; it shares the failure when the next save begins.
        if self.group is None:
            self.roots.raise_unseen()

    def persist(self, timeout: float | None) -> None:
        """Wait until the newest step is in the durable root."""
        if self.group is None or not isinstance(self.roots, MemoryFirst):
            self.finish(timeout)
            return
        # One deadline for both waits.
        deadline, roots = Deadline.after(timeout), self.roots
        with self.group.sharing_failure():
            self.saver.wait(timeout)
        self.group.call_on_first(lambda: roots.persist(deadline), "persists")

    def finish(self, timeout: float | None) -> None:
        """Do what ``persist`` does, without other ranks, which may have ended."""
        deadline = Deadline.after(timeout)
        self.saver.wait(timeout)
        if isinstance(self.roots, MemoryFirst):
            self.roots.persist(deadline)

    # --- steps ------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return self.roots.steps()

    def latest_step(self) -> int | None:
        """Return the step that a restore without a number restores; ``None`` if there is none."""
        try:
            return self.find(None)[1].step
        except StepNotFound:
            return None

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step, a tag's save or the newest step, and its root."""
        return self.roots.find(step)

    def tag(self, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a committed step."""
        self.run_once(lambda: self.roots.tag(step, name, move=move))

    def untag(self, name: str) -> None:
        """Remove a tag."""
        self.run_once(lambda: tagging.remove(self.root, name))

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step."""
        self.run_once(lambda: self.roots.delete(step))

    def run_once(self, action: Callable[[], object]) -> None:
        """Run an action in one process; every rank waits for it and raises its failure."""
        if self.group is None:
            action()
        else:
            self.group.call_on_first(action)

    # --- restores ---------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest) -> tuple[Manifest, Any]:
        """Restore a step, and let the next save continue its chains.

        Returns:
            The manifest of the restored step, and the state. Each rank reads what its target holds.
        """
        if self.group is not None:
            return self._restore_of_ranks(self.group, request)
        self.saver.check_usable()
        # Saves under way compare with the shadow that the restore replaces.
        self.saver.wait()
        with self.roots.without_deletion():

            def load(root: Root, manifest: Manifest) -> Any:
                self.roots.require_digest(root, manifest, request.expected_digest)
                with damage.named(root, manifest):
                    return self._load(root, manifest, request)

            if request.fallback:
                candidates = self.roots.candidates(request.step)
                return damage.newest_whole_of(candidates, request.step, load)
            root, manifest = self.find(request.step)
            return manifest, self.roots.load(root, manifest, load)

    def _restore_of_ranks(self, group: RankGroup, request: RestoreRequest) -> tuple[Manifest, Any]:
        # A failed save of one rank is raised on all ranks, before they begin to restore.
        with group.sharing_failure():
            self.saver.check_usable()
            self.saver.wait()
            if request.fallback or (request.optimizer, request.leaves) != (None, None):
                raise ValueError(
                    "a process group restores without fallback=, optimizer= and leaves=; for some"
                    " leaves use deltacheck.open(root).restore(leaves=...)"
                )
        target = None
        if request.target is not None:
            # Saves under way may still read the tensors that are about to be filled.
            self._settle_reads()
            target = group.flatten(request.target, target=True)
        with self.roots.without_deletion():
            manifest, state = group.restore(
                self.roots,
                self.saver,
                request.step,
                target,
                request.contract,
                request.max_bytes,
                request.expected_digest,
            )
            if isinstance(self.roots, MemoryFirst):
                # The next save of any rank may build on these segments, and the drain trims the
                # memory.
                group.segments = frozenset(ref.id for ref in manifest.segments)
        return manifest, state if target is None else group.filled(request.target, state)

    def restore_overlapped(self, request: RestoreRequest) -> tuple[Manifest, Any, Arrival]:
        """Restore the weights of a step, and begin to restore the state of its optimizers.

        Returns:
            The manifest of the restored step, the state, and the rest of it that arrives.
        """
        if self.group is not None:
            # They agree on the result of a restore, which they would not know yet.
            raise ValueError(
                "process_group and overlap=True cannot be given together yet; restore without it"
            )
        if isinstance(self.roots, MemoryFirst):
            # The memory may be trimmed while the restore reads it.
            raise ValueError(
                "memory and overlap=True cannot be given together yet; restore without it"
            )
        self.saver.check_usable()
        self.saver.wait()
        places = places_in(request.target)
        _require_overlap(request, places)
        root, manifest = self.find(request.step)
        if manifest.replay is not None:
            raise ValueError(
                f"step {manifest.step} is replayed from gradients, which needs the whole state at"
                " once; restore it without overlap=True"
            )
        self.roots.require_digest(root, manifest, request.expected_digest)
        require_leaves(root, manifest)
        require_contract(manifest, request.contract)
        reader = StepReader(root, manifest, max_bytes=request.max_bytes)
        with damage.named(root, manifest):
            stages = TwoStages(
                reader, manifest, request.target, places, request.max_bytes, self._settle_reads
            )
            state = stages.first()

        def rest() -> None:
            with damage.named(root, manifest):
                stages.second()
            # No save begins before this thread has ended.
            self._adopt(root, manifest, reader.chains, reader.stored)

        optimizers = [place.optimizer for place in places]
        return manifest, state, Arrival(manifest.step, optimizers, rest)

    def _load(self, root: Root, manifest: Manifest, request: RestoreRequest) -> Any:
        """Return the state of a step, verified, and make the step the base of the next save."""
        if request.leaves is not None:
            return _some_leaves(root, manifest, request, request.leaves)
        require_contract(manifest, request.contract)
        target = None if request.target is None else leaves.flatten(request.target)
        if target is not None:
            leaves.require_writable(target.arrays)
        # Compared before anything is read, so that a mismatch costs nothing and changes nothing.
        arrays = {} if target is None else tree.array_nodes(target.skeleton)
        require_leaves(root, manifest, None if target is None else arrays)
        saved_paths = None if target is None else match_targets(manifest, target, arrays)

        def target_memory() -> dict[str, NDArray[np.uint8]]:
            if target is None or saved_paths is None:
                return {}
            # Saves under way may still read the tensors that are about to be filled.
            self._settle_reads()
            # A replay computes leaves in an order of its own, so it does not fill targets directly.
            if manifest.replay is not None:
                return {}
            memory = {
                saved_paths[path]: leaves.memory_of(value) for path, value in target.arrays.items()
            }
            return {path: array for path, array in memory.items() if array is not None}

        reader = StepReader(root, manifest, max_bytes=request.max_bytes)
        loaded = reader.whole(replay_inputs=request.optimizer is not None, into=target_memory)
        inputs: set[str] = set()
        if manifest.replay is not None and request.optimizer is not None:
            loaded |= replica.replayed(root, manifest, manifest.replay, loaded, request.optimizer)
            # Recorded gradients are no leaves of the tree, so no later save continues their chains.
            inputs = manifest.replay.inputs
        if target is None or saved_paths is None:
            state = leaves.tree_of(manifest.tree, loaded, stored=reader.stored)
        else:
            values = leaves.filled(
                target.arrays, {path: loaded[saved_paths[path]] for path in target.arrays}
            )
            state = tree.unflatten(
                manifest.tree, lambda path, owner, tag: values[arrays[path].owner], build
            )
        chains = {
            name: chain
            for name, chain in reader.chains.items()
            if tiles.leaf_of(name) not in inputs
        }
        self._adopt(root, manifest, chains, reader.stored)
        return state

    def _adopt(
        self,
        root: Root,
        manifest: Manifest,
        chains: Mapping[str, Chain],
        bases: Mapping[str, NDArray[np.uint8]],
    ) -> None:
        if not self.roots.is_base(root):
            chains, bases = {}, {}
        self.saver.adopt(chains, bases, manifest)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout: float | None) -> None:
        """Finish the saves under way, copy the newest step, and give the roots back.

        If the time runs out, the saver's threads go on, and the last of them releases the roots.
        No rank waits for another.
        """
        deadline = Deadline.after(timeout)
        try:
            self.saver.close(timeout)
            self.live.store.close()
        finally:
            # Threads that still write need the lease, and may still commit a step in memory, so
            # the last of them ends the copies and releases the roots.
            self.saver.when_stopped(self._stop)
            if not self.saver.pending():
                self.roots.await_end(deadline)

    def _stop(self) -> None:
        # No agreement comes any more, and torch's groups belong to this thread, not the drain's.
        if self.group is not None:
            self.group.close()
        self.roots.stop(self.release)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, so that another may wait for its roots."""
        self.writer.abandon()
        self.roots.abandon()

    def release(self) -> None:
        """Give the groups and the roots back. No save is under way."""
        self.roots.release()
        if self.group is not None:
            self.group.close()
        self.writer.release()


def _opened(
    path: Place, settings: Settings, group: RankGroup | None, memory: MemoryTier | None
) -> Opened:
    if group is None:
        return open_alone(path, settings.durability)
    # An engine with another memory tier, or with none, is refused instead of waited for.
    return group.open(path, settings, memory=memory_of_ranks.common_options(memory))


def _roots(
    root: Root,
    writer: RootWriter,
    options: SaveOptions,
    group: RankGroup | None,
    memory: MemoryTier | None,
) -> OneRoot | MemoryFirst:
    if memory is None:
        return OneRoot(root, writer)
    if group is not None:
        return memory_of_ranks.open_memory(group, root, writer, options, memory)
    tier = Tier(memory, writer, options)
    return MemoryFirst(tier.root, root, tier)


def _some_leaves(
    root: Root, manifest: Manifest, request: RestoreRequest, names: Iterable[str]
) -> dict[str, object]:
    """Return some leaves of a step by path. The next save goes on as before."""
    nodes = tree.array_nodes(manifest.tree)
    names = list(names)
    require_leaves(root, manifest, names)
    paths = select_paths(nodes, names, manifest.step)
    owners = list(dict.fromkeys(nodes[path].owner for path in paths))
    require_contract(manifest, request.contract, owners)
    resolved = resolve_leaves(root, manifest, owners, max_bytes=request.max_bytes)
    loaded = load_leaves(resolved, max_bytes=request.max_bytes)
    # Tied leaves are one tensor, as in the whole tree.
    values = {
        node: leaves.place(loaded[node.owner], node.tag)
        for node in dict.fromkeys(nodes[path] for path in paths)
    }
    return {path: values[nodes[path]] for path in paths}


def _require_overlap(request: RestoreRequest, places: Sequence[OptimizerPlace]) -> None:
    """Raise ``ValueError`` if a restore cannot overlap with training."""
    if not places:
        raise ValueError(
            "overlap=True needs `into` with a torch optimizer in the place of its state dict, whose"
            " step waits for its state: into={'model': model.state_dict(), 'optimizer': optimizer}."
            " Restore for another optimizer without overlap=True"
        )
    if request.fallback or request.optimizer is not None:
        raise ValueError(
            "overlap=True cannot be given with fallback=True or optimizer=: damage may be found"
            " after the weights are in use, and a replay needs the whole state at once"
        )
