"""The restores of an engine, alone or with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.run_roots import MemoryFirst, RunRoots
from deltacheck.backends.torch.group.two_stages import TwoStages
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.classes import build
from deltacheck.backends.torch.state.optimizers import OptimizerPlace, places_in
from deltacheck.leaf import tree
from deltacheck.restore import damage
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.restore.resolve import (
    require_contract,
    require_leaves,
    resolve_leaves,
    select_paths,
)
from deltacheck.restore.values import StepReader, load_leaves
from deltacheck.save.saver import Saver
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

if TYPE_CHECKING:
    # torch.distributed.tensor takes long to import, and most processes save alone.
    from deltacheck.backends.torch.group.collective import RankGroup


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The arguments of ``Engine.restore``."""

    step: int | str | None
    target: object
    contract: str | None
    max_bytes: int | None
    fallback: bool
    expected_digest: str | None
    leaves: tuple[str, ...] | None = None


class Restores:
    """The restores of one session, each of which the next save goes on from.

    Args:
        roots: The roots of the run.
        saver: The saver of this process.
        settle_reads: Waits until no save under way reads the state any more.
        group: The ranks that restore together; ``None``: this process restores alone.
    """

    def __init__(
        self,
        roots: RunRoots,
        saver: Saver,
        settle_reads: Callable[[], None],
        group: RankGroup | None,
    ) -> None:
        self._roots, self._saver, self._group = roots, saver, group
        self._settle_reads = settle_reads

    def restore(self, request: RestoreRequest) -> tuple[Manifest, Any]:
        """Restore a step, and let the next save continue its chains.

        Returns:
            The manifest of the restored step, and the state. Each rank reads what its target holds.
        """
        if self._group is not None:
            return self._restore_of_ranks(self._group, request)
        self._saver.check_usable()
        # Saves under way compare with the shadow that the restore replaces.
        self._saver.wait()
        with self._roots.without_deletion():

            def load(root: Root, manifest: Manifest) -> Any:
                self._roots.require_digest(root, manifest, request.expected_digest)
                with damage.named(root, manifest):
                    return self._load(root, manifest, request)

            if request.fallback:
                candidates = self._roots.candidates(request.step)
                return damage.newest_whole(candidates, request.step, load)
            root, manifest = self._roots.find(request.step)
            return manifest, self._roots.load(root, manifest, load)

    def _restore_of_ranks(self, group: RankGroup, request: RestoreRequest) -> tuple[Manifest, Any]:
        # A failed save of one rank is raised on all ranks, before they begin to restore.
        with group.sharing_failure():
            self._saver.check_usable()
            self._saver.wait()
            if request.fallback or request.leaves is not None:
                raise ValueError(
                    "a process group restores without fallback= and leaves=; for some leaves use"
                    " deltacheck.open(root).restore(leaves=...)"
                )
        target = None
        if request.target is not None:
            # Saves under way may still read the tensors that are about to be filled.
            self._settle_reads()
            target = group.flatten(request.target, target=True)
        with self._roots.without_deletion():
            manifest, state = group.restore(
                self._roots,
                self._saver,
                request.step,
                target,
                request.contract,
                request.max_bytes,
                request.expected_digest,
            )
            if isinstance(self._roots, MemoryFirst):
                # The next save of any rank may build on these segments, and the drain trims the
                # memory.
                group.segments = frozenset(ref.id for ref in manifest.segments)
        return manifest, state if target is None else group.filled(request.target, state)

    def restore_overlapped(self, request: RestoreRequest) -> tuple[Manifest, Any, Arrival]:
        """Restore the weights of a step, and begin to restore the state of its optimizers.

        Returns:
            The manifest of the restored step, the state, and the rest of it that arrives.
        """
        if self._group is not None:
            # They agree on the result of a restore, which they would not know yet.
            raise ValueError(
                "process_group and overlap=True cannot be given together yet; restore without it"
            )
        if isinstance(self._roots, MemoryFirst):
            # The memory may be trimmed while the restore reads it.
            raise ValueError(
                "memory and overlap=True cannot be given together yet; restore without it"
            )
        self._saver.check_usable()
        self._saver.wait()
        places = places_in(request.target)
        _require_overlap(request, places)
        root, manifest = self._roots.find(request.step)
        self._roots.require_digest(root, manifest, request.expected_digest)
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
            self.adopt(root, manifest, reader.chains, reader.stored)

        optimizers = [place.optimizer for place in places]
        return manifest, state, Arrival(manifest.step, optimizers, rest)

    def _load(self, root: Root, manifest: Manifest, request: RestoreRequest) -> Any:
        """Return the state of a step, verified, and make the step the base of the next save."""
        if request.leaves is not None:
            return _some_leaves(root, manifest, request, request.leaves)
        require_contract(manifest, request.contract)
        reader = StepReader(root, manifest, max_bytes=request.max_bytes)
        if request.target is None:
            require_leaves(root, manifest)
            state = leaves.tree_of(manifest.tree, reader.whole(), stored=reader.stored)
        else:
            target = leaves.flatten(request.target)
            leaves.require_writable(target.arrays)
            # Compared before anything is read, so that a mismatch costs and changes nothing.
            arrays = tree.array_nodes(target.skeleton)
            require_leaves(root, manifest, arrays)
            saved_paths = match_targets(manifest, target, arrays)
            values = leaves.read_into(target.arrays, reader, saved_paths, self._settle_reads)
            state = tree.unflatten(
                manifest.tree, lambda path, owner, tag: values[arrays[path].owner], build
            )
        self.adopt(root, manifest, reader.chains, reader.stored)
        return state

    def adopt(
        self,
        root: Root,
        manifest: Manifest,
        chains: Mapping[str, Chain],
        bases: Mapping[str, NDArray[np.uint8]],
    ) -> None:
        if not self._roots.is_base(root):
            chains, bases = {}, {}
        self._saver.adopt(chains, bases, manifest)


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
    if request.fallback:
        raise ValueError(
            "overlap=True cannot be given with fallback=True: damage may be found after the weights"
            " are in use"
        )
