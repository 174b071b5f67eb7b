"""The session of an engine on its root: open, begin a save, commit, restore, delete and release.

An engine chooses one of four sessions when it is made. This one serves a process that saves alone;
``process_group.py`` adds the agreement with other ranks, ``memory_first.py`` a root in memory,
``memory_of_ranks.py`` both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.capture import tensor_codec
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.backends.torch.group.arrival import Arrival
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
from deltacheck.save.save_options import Settings
from deltacheck.save.saver import Saver
from deltacheck.save.treatment.signals import Agreed
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots import tagging
from deltacheck.store.roots.opened import Opened, open_alone
from deltacheck.store.roots.root import Root

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


class SingleProcessSession:
    """The session of an engine that saves alone.

    ``root`` is the durable root, ``live`` the root that saves are written to: the same, unless
    there is a memory tier.

    Args:
        path: The root, made if it does not exist.
        settings: The settings of all saves.
        settle_reads: Waits until no save under way reads the state any more.
    """

    # True: other ranks save the same step.
    is_of_ranks = False

    def __init__(self, path: Place, settings: Settings, settle_reads: Callable[[], None]) -> None:
        self._flatten = Flattener(tensor_codec.is_host)
        opened = self._open(path, settings)
        self.root = Root(path, opened.store)
        self.writer = RootWriter(
            self.root,
            opened.lease,
            settings.keep,
            grace_seconds=settings.options.grace_seconds,
            redate_after_seconds=settings.options.redate_after_seconds,
            rewrite=compaction.reclaim_history,
        )
        self._settle_reads = settle_reads
        with ExitStack() as on_failure:
            # The lease is taken already, and nobody could release it for an engine that was not
            # made.
            on_failure.callback(self.release)
            self.live = self._live_root(settings)
            # A memory tier may hold newer steps than the durable root, and each number is used
            # once.
            next_seq = opened.next_seq
            if self.live is not self.root:
                next_seq = max(next_seq, self.live.next_seq())
            self.saver = Saver(self.live.store, TorchCodec(), settings, Numbers(next_seq))
            on_failure.pop_all()
        self.writer.protect(self.saver.protected_segments)
        self.saver.on_resume = self.writer.course.follow

    def _open(self, path: Place, settings: Settings) -> Opened:
        return open_alone(path, settings.durability)

    def _live_root(self, settings: Settings) -> Root:
        return self.root

    # --- saves ------------------------------------------------------------------------------------

    def flatten(self, state: object) -> Flat:
        """Return the leaves and the skeleton of a state."""
        return self._flatten(state)

    def begin(
        self, step: int, flat: Flat, metrics: Mapping[str, float], *, is_whole: bool
    ) -> Attempt | None:
        """Begin a save, or return ``None`` if all ranks skip it.

        ``is_whole``: ``flat`` is the whole state, not the part that a gradient log leaves.
        """
        return Attempt(flat, self.writer.commit)

    def make_room(self, step: int, specs: Iterable[LeafSpec]) -> bool:
        """Wait until there is space for one more save, or return ``False`` to skip it."""
        return True

    def wait(self, timeout: float | None) -> None:
        """Wait until every save under way is committed, and raise the first unseen failure."""
        self.saver.wait(timeout)

    def persist(self, timeout: float | None) -> None:
        """Wait until the newest step is in the durable root."""
        self.saver.wait(timeout)

    def finish(self, timeout: float | None) -> None:
        """Do what ``persist`` does when this process ends, without other ranks."""
        self.persist(timeout)

    # --- steps ------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return self.root.steps()

    def latest_step(self) -> int | None:
        """Return the step that a restore without a number restores; ``None`` if there is none."""
        try:
            return self.find(None)[1].step
        except StepNotFound:
            return None

    def tag(self, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a committed step."""
        self.run_once(lambda: tagging.put(self.root, step, name, move=move))

    def untag(self, name: str) -> None:
        """Remove a tag."""
        self.run_once(lambda: tagging.remove(self.root, name))

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step."""
        self.run_once(lambda: self.writer.delete(step))

    def run_once(self, action: Callable[[], object]) -> None:
        """Run an action in one process, however many save together."""
        action()

    # --- restores ---------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest) -> tuple[Manifest, Any]:
        """Restore a step, and let the next save continue its chains.

        Returns:
            The manifest of the restored step, and the state.
        """
        self.saver.check_usable()
        # Saves under way compare with the shadow that the restore replaces.
        self.saver.wait()
        with self._no_deletion():

            def load(root: Root, manifest: Manifest) -> Any:
                self._require_digest(root, manifest, request.expected_digest)
                with damage.named(root, manifest):
                    return self._load(root, manifest, request)

            if request.fallback:
                return damage.newest_whole_of(self._roots_of(request.step), request.step, load)
            root, manifest = self.find(request.step)
            return manifest, self._load_or_durable(root, manifest, load)

    def restore_overlapped(self, request: RestoreRequest) -> tuple[Manifest, Any, Arrival]:
        """Restore the weights of a step, and begin to restore the state of its optimizers.

        Returns:
            The manifest of the restored step, the state, and the rest of it that arrives.
        """
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
        self._require_digest(root, manifest, request.expected_digest)
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

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step, a tag's save or the newest step, and its root."""
        return self.root, self.root.manifest(step)

    def _no_deletion(self) -> AbstractContextManager[object]:
        """Return a context in which no step that is being read is deleted by this process."""
        return contextlib.nullcontext()

    def _roots_of(self, step: int | str | None) -> list[Root]:
        return [self.root]

    def _require_digest(self, root: Root, manifest: Manifest, expected: str | None) -> None:
        root.require_digest(manifest, expected)

    def _load_or_durable(
        self, root: Root, manifest: Manifest, load: Callable[[Root, Manifest], Any]
    ) -> Any:
        return load(root, manifest)

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
        self.saver.adopt(chains, bases, manifest)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout: float | None) -> None:
        """Finish the saves under way and give the root back.

        If the time runs out, the saver's threads go on, and the last of them releases the root.
        """
        try:
            self.saver.close(timeout)
            self.live.store.close()
        finally:
            # Threads that still write need the lease, so the last of them releases it.
            self.saver.when_stopped(self.release)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, so that another may wait for its root."""
        self.writer.abandon()

    def release(self) -> None:
        """Give the root back. No save is under way."""
        self.writer.release()


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
