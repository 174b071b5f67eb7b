"""Open, save and restore an ``Engine`` that is one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.group import gloo
from deltacheck.backends.torch.state import descriptors, leaves, shards
from deltacheck.backends.torch.state.classes import build
from deltacheck.errors import RankFailed, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.restore import damage
from deltacheck.restore.fill import Request, StepReader
from deltacheck.restore.resolve import require_contract
from deltacheck.save.group import Group
from deltacheck.save.joint import Attempt
from deltacheck.save.saver import Saver
from deltacheck.store.documents import Written
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.opened import Opened, open_alone
from deltacheck.store.root import Root, Store

# Leaves up to this size are compared between the ranks that hold copies of them, at the first save.
# Larger: more copies that differ are found; smaller: a shorter first save.
_COMPARED_BYTES = 1 << 20


class RankGroup(Group):
    """One rank of a process group that saves to one root.

    Args:
        process_group: The ranks. Every one of them must construct this, in the same order as other
            new process groups.
        timeout_seconds: The longest wait for another rank. Larger: a slow rank is not taken for a
            lost one; smaller: the loss of a rank is noticed sooner.
    """

    def __init__(self, process_group: dist.ProcessGroup, timeout_seconds: float) -> None:
        ranks, self._groups = gloo.join(process_group, timeout_seconds)
        super().__init__(ranks)

    def open(self, path: Place, durability: Durability) -> Opened:
        """Open the root: rank 0 takes the lease, and every rank may then write its segments.

        Raises:
            RankFailed: Opening failed on a rank. Rank 0 raises the error itself.
        """
        opened: list[Opened] = []

        def take(_: list[Any]) -> int:
            opened.append(open_alone(path, durability))
            return opened[0].next_seq

        # Rank 0 alone at first: the others must not touch a root that it cannot open.
        next_seq = self.joint.agree(None, take)
        try:
            rank_root = (
                opened[0]
                if opened
                else Opened(Store.create(path, durability=durability), None, next_seq)
            )
            # Every rank waits here, so that none saves to a root that another one could not open.
            self.joint.agree(None, lambda _: None)
        except BaseException as error:
            if opened and opened[0].lease is not None:
                opened[0].lease.release()
            # The other ranks wait in the agreement above. A ``RankFailed`` comes from it, so they
            # know.
            if not isinstance(error, RankFailed):
                self.fail(error)
            raise
        return rank_root

    def flatten(self, state: object, *, target: bool = False) -> Flat:
        """Flatten a state with sharded leaves.

        Args:
            state: The state of this rank.
            target: The state is the target of a restore, which also fills replicas of objects.
        """
        with self.sharing_failure():
            return leaves.flatten(descriptors.by_key(state, replicas=target), shards.describe)

    def begin(self, saver: Saver, step: int, flat: Flat) -> Flat | None:
        """Agree on a save with the other ranks.

        Returns:
            The tiles that this rank writes, as leaves; ``None`` if a rank is busy and all skip the
            save.

        Raises:
            RankFailed: A rank failed, or the ranks disagree.
            DeltacheckError: The failure of an earlier save that was not raised yet. Every rank
                raises it in the same call.
        """
        with self.sharing_failure():
            # Failures of earlier saves are raised inside, too, so that every rank raises in this
            # call.
            if saver.options.on_busy == "wait":
                saver.settle()
            busy = bool(saver.pending())
            saver.raise_unseen()
            holdings = shards.held(flat)
        agreed_save = self.joint.begin(
            step, saver.standing()[1], holdings, flat.skeleton, busy, lambda: _copies(flat)
        )
        if agreed_save is None:
            return None
        # The ranks share one store, so none may use a lower number again.
        saver.number_from(agreed_save.seq)
        return shards.local_flat(flat, agreed_save.tiles, agreed_save.tree)

    def attempt(
        self, make: Callable[[Manifest], Written]
    ) -> tuple[Callable[[Manifest], Written], Callable[[BaseException], None]]:
        """Return the two ways to end a save that has begun: commit and abandon.

        The first commits the step of all ranks, for which rank 0 calls ``make``. The second reports
        a failure of this rank to the others.
        """
        attempt = Attempt(self.joint)
        return partial(attempt.commit, self.maker(make)), attempt.abandon

    def restore(
        self,
        root: Root,
        saver: Saver,
        step: int | str | None,
        target: Flat | None,
        contract: str | None,
        max_bytes: int | None,
        expected_digest: str | None,
    ) -> tuple[Manifest, Any]:
        """Restore a step on every rank; later saves continue from it.

        Args:
            root: The root.
            saver: The saver of this rank.
            step: The step, which must be the same on every rank.
            target: Filled with the part that this rank holds; ``None``: every rank gets the whole
                state.
            contract, max_bytes, expected_digest: As in ``Engine.restore``.

        Returns:
            The step's manifest and the state.

        Raises:
            RankFailed: A rank could not restore the step. That rank raises the error itself.
        """

        def choose(requests: list[Any]) -> str:
            if any(request != requests[0] for request in requests):
                raise ValueError(f"the ranks ask for different steps: {requests}")
            manifest = root.manifest(step)
            root.require_digest(manifest, expected_digest)
            return root.digest_of(manifest)

        # Rank 0 decides for all: another process may commit a step between the reads of two ranks.
        digest = self.joint.agree(step, choose)
        with self.sharing_failure():
            manifest = root.manifest(step)
            # Each rank reads the manifest itself. The digest proves that it is the one of rank 0.
            root.require_digest(manifest, digest)
            require_contract(manifest, contract)
            reader = StepReader(root, manifest, max_bytes=max_bytes, keep=target is not None)
            with damage.named(root, manifest):
                if target is None:
                    state = leaves.tree_of(manifest.tree, reader.whole())
                else:
                    state = _fill(reader, target)
        # No rank may continue from a step that another rank could not restore.
        self.joint.agree(None, lambda _: None)
        self.resume(saver, reader, target)
        return manifest, state

    def resume(self, saver: Saver, reader: StepReader, state: Flat | None) -> None:
        """Continue from a step that every rank has read with ``reader``.

        Args:
            saver: The saver of this rank.
            reader: Has read what this rank holds of the step.
            state: The state as the next save will have it; ``None`` if that is not known.
        """
        own_names = self.joint.resume(
            reader.manifest, None if state is None else shards.held(state)
        )
        # A tile of which this rank read only a part has no base, and is written whole.
        names = [name for name in own_names if name in reader.stored]
        saver.adopt(
            {name: reader.chains[name] for name in names},
            {name: reader.stored[name] for name in names},
            reader.manifest,
        )

    def filled(self, into: object, restored: object) -> object:
        """Return the result of a restore into ``into``, with its descriptors filled."""
        return descriptors.filled(into, restored)

    def close(self) -> None:
        """Destroy the process groups. No save may be running."""
        for group in self._groups:
            if dist.is_initialized():  # else the job has destroyed them already
                dist.destroy_process_group(group)
        self._groups = []


def _copies(flat: Flat) -> dict[str, str]:
    """Return the digests of small leaves that are whole on this rank."""
    small = {
        path: LeafSpec.of(path, leaf.shape, leaf.dtype)
        for path, leaf in flat.leaves.items()
        # Parts of a leaf may differ between ranks, copies of a whole leaf may not.
        if not isinstance(flat.arrays[path], DTensor | shards.Shard | shards.Shards)
    }
    return {
        path: digest_of(spec, leaves.bytes_of(flat.arrays[path]))
        for path, spec in small.items()
        if spec.raw_bytes <= _COMPARED_BYTES
    }


def _fill(reader: StepReader, target: Flat) -> Any:
    """Fill a target with the part of a step that it holds, and return its state."""
    manifest = reader.manifest
    # A rank holds only its own leaves. Those that its containers lack are found below.
    stored_path = match_targets(manifest, target, partly=True)
    parts = {
        (path, number): piece
        for path, value in target.arrays.items()
        for number, piece in enumerate(shards.pieces(value))
    }
    values = dict(target.arrays)

    def place(key: tuple[str, int], spec: LeafSpec, box: NDArray[Any]) -> None:
        piece, path = parts[key], key[0]
        new_value = shards.fill(piece, spec, box)
        # A sharded value stays as it is, because its local part was filled in place. A NumPy scalar
        # is replaced by a new one.
        if values[path] is piece.values:
            values[path] = new_value

    reader.boxes(
        {key: Request(stored_path[key[0]], piece.box) for key, piece in parts.items()}, place
    )
    owners = tree.array_paths(target.skeleton)
    skeleton = tree.pruned(manifest.tree, target.skeleton)
    missing = tree.array_paths(skeleton).keys() - owners.keys()
    if missing:
        raise TreeMismatch(f"leaf {min(missing)!r} of step {manifest.step} is not in the target")
    return tree.unflatten(skeleton, lambda path, owner, tag: values[owners[path]], build)
