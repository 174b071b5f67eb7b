"""Open, save and restore an ``Engine`` that is one of several ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.group import gloo
from deltacheck.backends.torch.group.run_roots import RunRoots
from deltacheck.backends.torch.state import descriptors, leaves, shards
from deltacheck.backends.torch.state.classes import build
from deltacheck.errors import Damaged, RankFailed, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.restore import damage
from deltacheck.restore.resolve import require_contract, require_leaves
from deltacheck.restore.values import Request, StepReader
from deltacheck.save.ranks.group import Group
from deltacheck.save.ranks.joint import Attempt
from deltacheck.save.ranks.rank_setup import RankSetup
from deltacheck.save.ranks.replicas import digests_of
from deltacheck.save.save_options import Settings
from deltacheck.save.saver import Saver
from deltacheck.store import layout
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opened import Opened, open_alone
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")


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

    def open(self, path: Place, settings: Settings, **further: object) -> Opened:
        """Open the root: rank 0 takes the lease, and every rank may then write its segments.

        Nothing is left behind if a rank has other options or does not see the folder of rank 0.

        Args:
            path: The root of this rank.
            settings: The settings of its saves.
            further: Other options of its engine that all ranks must have in common.

        Raises:
            RankFailed: The ranks differ in an option or in the folder, or opening failed on a rank.
                Rank 0 raises its own error itself.
            ValueError: More than one save may be under way.
        """
        # Shared, because the other ranks wait for this one already.
        with self.sharing_failure():
            # The ranks agree on one save at a time.
            if settings.options.max_pending != 1:
                raise ValueError("ranks that save together need max_pending=1")
        return self.open_together(
            path,
            RankSetup.of(path, settings, **further),
            lambda: open_alone(path, settings.durability),
            # Number 0, because the ranks take the highest number that one of them proposes.
            lambda: Opened(create_store(path, durability=settings.durability), None, 0),
            Opened.release,
        )

    def flatten(self, state: object, *, target: bool = False) -> Flat:
        """Flatten a state with sharded leaves.

        Args:
            state: The state of this rank.
            target: The state is the target of a restore, which also fills replicas of objects.
        """
        with self.sharing_failure():
            flat = leaves.flatten(descriptors.by_key(state, replicas=target), shards.describe)
            if target:
                leaves.require_writable(flat.arrays)
            return flat

    def tensors(self, state: object) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this rank's parts of a state, with the paths of the leaves."""
        for path, value in self.flatten(state).arrays.items():
            for piece in shards.pieces(value):
                if isinstance(piece.values, torch.Tensor):
                    yield path, piece.values

    def begin(
        self,
        saver: Saver,
        step: int,
        flat: Flat,
        metrics: Mapping[str, float],
        make_room: Callable[[int, Flat], bool] | None = None,
    ) -> tuple[Flat, Attempt] | None:
        """Agree on a save with the other ranks.

        Args:
            saver: The saver of this rank.
            step: The training step.
            flat: The state of this rank.
            metrics: Values that the caller of this rank reports.
            make_room: An agreement of all ranks that waits for the space that a save takes, from
                the step and the tiles of this rank; false: all skip the save. ``None``: none is
                needed.

        Returns:
            The tiles that this rank writes, as leaves, and the save that has begun; ``None`` if a
            rank is busy and all skip the save.

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
            held = None if saver.is_exact else shards.held_state(flat, metrics)
            seq = saver.proposed_number()
        attempt = self.begin_joint(saver, step, seq, holdings, flat.skeleton, held, busy=busy)
        if attempt is None:
            return None
        save = attempt.save
        try:
            local = shards.local_flat(flat, save.tiles, save.tree)
            # Now, because the training may change the copies once the save has returned.
            # Large copies take turns by the number of the save, not of its segments.
            number = save.seq // saver.settings.numbers_of_save
            attempt.copies = digests_of(shards.copies(flat, save.copies), number)
        except BaseException as error:
            if make_room is not None:
                self.fail(error)
            # The other ranks wait for what this one reports.
            attempt.abandon(error)
            raise
        # Outside of the block above: a failure of this agreement is one of every rank, and none
        # has begun to save.
        if make_room is not None and not make_room(step, local):
            return None
        return local, attempt

    def restore(
        self,
        places: RunRoots,
        saver: Saver,
        step: int | str | None,
        target: Flat | None,
        contract: str | None,
        max_bytes: int | None,
        expected_digest: str | None,
    ) -> tuple[Manifest, Any]:
        """Restore a step on every rank; later saves continue from it.

        Args:
            places: The roots that may hold the step.
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

        def choose(requests: list[Any]) -> list[tuple[int, int, str]]:
            _require_same(requests)
            return [
                (places.roots.index(root), manifest.seq, root.digest_of(manifest))
                for root, manifest in places.copies(step, expected_digest)
            ]

        # Rank 0 decides for all: another process may commit a step between the reads of two ranks.
        copies = self.joint.agree(step, choose, "restores")
        for number, seq, digest in copies:
            root, own_damage = places.roots[number], ""
            is_last = (number, seq, digest) == tuple(copies[-1])
            with self.sharing_failure():
                manifest = root.read(
                    root.path / layout.CHECKPOINTS / layout.checkpoint_id(seq) / "zarr.json"
                )
                # Each rank reads the manifest itself. The digest proves that it is the one of rank
                # 0.
                root.require_digest(manifest, digest)
                wanted = None if target is None else tree.array_nodes(target.skeleton)
                require_leaves(root, manifest, wanted)
                require_contract(manifest, contract)
                reader = StepReader(root, manifest, max_bytes=max_bytes, keep=target is not None)
                try:
                    with damage.named(root, manifest):
                        if target is None:
                            state = leaves.tree_of(manifest.tree, reader.whole())
                        else:
                            state = _fill(reader, target)
                except Damaged as error:
                    if is_last:
                        raise
                    own_damage = str(error)
            # No rank may continue from a step that another rank could not restore.
            damages = self.joint.agree(
                own_damage, lambda texts: [t for t in texts if t], "restores"
            )
            if not damages:
                break
            log.warning("%s. It is read from %s instead", damages[0], places.roots[-1].path)
        self.resume(saver, reader, target, is_base=places.is_base(root))
        return manifest, state

    def manifest(self, root: Root, step: int | str | None) -> Manifest:
        """Return the manifest of a step, the same on every rank.

        Args:
            root: The root.
            step: As in ``restore``.

        Raises:
            RankFailed: The ranks ask for different steps, or one of them could not read it. That
                rank raises the error itself.
        """

        def choose(requests: list[Any]) -> str:
            _require_same(requests)
            return root.digest_of(root.manifest(step))

        digest = self.joint.agree(step, choose, "restores")
        with self.sharing_failure():
            manifest = root.manifest(step)
            root.require_digest(manifest, digest)
        return manifest

    def resume(
        self, saver: Saver, reader: StepReader, state: Flat | None, *, is_base: bool = True
    ) -> None:
        """Continue from a step that every rank has read with ``reader``.

        Args:
            saver: The saver of this rank.
            reader: Has read what this rank holds of the step.
            state: The state as the next save will have it; ``None`` if that is not known.
            is_base: False: the step is not in the root that is saved to, so chains begin anew.
        """
        own_names = self.joint.resume(
            reader.manifest, None if state is None else shards.held(state)
        )
        # A tile of which this rank read only a part has no base, and is written whole.
        names = [name for name in own_names if name in reader.stored and is_base]
        saver.adopt(
            {name: reader.chains[name] for name in names},
            {name: reader.stored[name] for name in names},
            reader.manifest,
        )

    def filled(self, into: object, restored: object) -> object:
        """Return the result of a restore into ``into``, with its descriptors filled."""
        return descriptors.filled(into, restored)

    def highest(self, number: int) -> int:
        """Return the highest number of all ranks, each of which makes this call.

        Raises:
            RankFailed: A rank was lost or did not come in time.
        """
        value = torch.tensor(number)
        try:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._groups[0])
        # torch reports a broken connection and a timeout alike.
        except RuntimeError as error:
            raise RankFailed(
                "a rank was lost, or does not ask for signals at this step as the others do."
                f" {str(error).partition(chr(10))[0]}"
            ) from error
        return int(value)

    def close(self) -> None:
        """Destroy the process groups. No save may be running."""
        for group in self._groups:
            if dist.is_initialized():  # else the job has destroyed them already
                dist.destroy_process_group(group)
        self._groups = []


def _require_same(requests: list[Any]) -> None:
    """Raise ``RankFailed`` if the ranks ask for different steps."""
    if any(request != requests[0] for request in requests):
        raise RankFailed(f"the ranks ask for different steps: {requests}")


def _fill(reader: StepReader, target: Flat) -> Any:
    """Fill a target with the part of a step that it holds, and return its state."""
    manifest = reader.manifest
    # A rank holds only its own leaves. Those that its containers lack are found below.
    arrays = tree.array_nodes(target.skeleton)
    stored_path = match_targets(manifest, target, arrays, partly=True)
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
    skeleton = tree.pruned(manifest.tree, target.skeleton)
    missing = tree.array_paths(skeleton).keys() - arrays.keys()
    if missing:
        raise TreeMismatch(f"leaf {min(missing)!r} of step {manifest.step} is not in the target")
    return tree.unflatten(skeleton, lambda path, owner, tag: values[arrays[path].owner], build)
