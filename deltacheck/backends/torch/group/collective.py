"""What an ``Engine`` does otherwise where it is one of several ranks: open, begin, commit and
restore with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.group import gloo as ranks
from deltacheck.backends.torch.state import descriptors, leaves, shards
from deltacheck.errors import RankFailed, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.restore import damage
from deltacheck.restore.fill import Request, StepReader
from deltacheck.restore.resolve import require_contract
from deltacheck.save.joint import Attempt, Joint
from deltacheck.save.saver import Saver
from deltacheck.store.documents import Written
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.opened import Opened, open_alone
from deltacheck.store.root import Root, Store

# Leaves up to this size are compared between the ranks that have copies of them, when these first
# save. Larger: finds more that differs; a longer first save.
_COMPARED_BYTES = 1 << 20


class Together:
    """One rank's part in the saves of a process group."""

    def __init__(self, process_group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._ranks, self._groups = ranks.join(process_group, timeout_seconds)
        self.joint = Joint(self._ranks)
        self.segments: frozenset[str] = frozenset()  # of the newest step of all ranks, on rank 0

    def open(self, path: Place, durability: Durability) -> Opened:
        """Rank 0 takes the root; every rank may then write its parts to it. Raises what opening
        raises, or ``RankFailed``.
        """
        opened: list[Opened] = []

        def take(_: list[Any]) -> int:
            opened.append(open_alone(path, durability))
            return opened[0].next_seq

        next_seq = self.joint.agree(None, take)
        try:
            mine = (
                opened[0]
                if opened
                else Opened(Store.create(path, durability=durability), None, next_seq)
            )
            self.joint.agree(None, lambda _: None)
        except BaseException as error:
            if opened and opened[0].lease is not None:
                opened[0].lease.release()
            if not isinstance(error, RankFailed):
                self._fail(error)
            raise
        return mine

    def flatten(self, state: object, *, target: bool = False) -> Flat:
        """Take a state with sharded leaves apart. ``target``: of a restore."""
        with self.telling():
            return tree.flatten(descriptors.by_key(state, replicas=target), shards.describe)

    def begin(self, saver: Saver, step: int, flat: Flat) -> Flat | None:
        """Agree on a save with the other ranks: what this one writes, or ``None`` where one of them
        is
        busy and all skip it.

        Raises the failure of an earlier save that nobody has been told of, on every rank in the
        same call; ``RankFailed``.
        """
        with self.telling():
            if saver.options.on_busy == "wait":
                saver.settle()
            busy = bool(saver.pending())
            saver.raise_unseen()
            held = shards.held(flat)
        begun = self.joint.begin(
            step, saver.standing()[1], held, flat.skeleton, busy, lambda: _copies(flat)
        )
        if begun is None:
            return None
        saver.number_from(begun.seq)
        return shards.local_flat(flat, begun.tiles, begun.tree)

    def attempt(
        self, make: Callable[[Manifest], Written]
    ) -> tuple[Callable[[Manifest], Written], Callable[[BaseException], None]]:
        """How a save that has begun ends: with a commit of all, for which rank 0 calls ``make``, or
        by telling the others of a failure.
        """

        def make_all(every: Manifest) -> Written:
            written = make(every)
            self.segments = frozenset(ref.id for ref in every.segments)
            return written

        attempt = Attempt(self.joint)
        return partial(attempt.commit, make_all), attempt.abandon

    def first(self, action: Callable[[], object]) -> None:
        """Let rank 0 do something; every rank waits for it, and raises ``RankFailed`` where it
        fails.
        """

        def act(_: list[Any]) -> None:
            action()

        self.joint.agree(None, act)

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
        """Restore a step on every rank, each what its target holds of it; later saves go on from
        there.
        """

        def choose(asked: list[Any]) -> str:
            if any(one != asked[0] for one in asked):
                raise ValueError(f"the ranks ask for different steps: {asked}")
            manifest = root.manifest(step)
            root.require_digest(manifest, expected_digest)
            return root.digest_of(manifest)

        digest = self.joint.agree(step, choose)
        with self.telling():
            manifest = root.manifest(step)
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
        own = self.joint.resume(reader.manifest, None if state is None else shards.held(state))
        names = [name for name in own if name in reader.stored]
        saver.adopt(
            {name: reader.chains[name] for name in names},
            {name: reader.stored[name] for name in names},
            reader.manifest,
        )

    def given(self, into: object, restored: object) -> object:
        """What a restore into a state gives its caller."""
        return descriptors.filled(into, restored)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """A failure of this rank, before the ranks agree, is one of all."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(RankFailed):  # which the others raise
            self.joint.fail(error)

    def close(self) -> None:
        """Give the groups back; REQUIRES: no save is under way."""
        for group in self._groups:
            if dist.is_initialized():  # else the job has ended them already
                dist.destroy_process_group(group)
        self._groups = []


def _copies(flat: Flat) -> dict[str, str]:
    """The digests of small leaves that are whole on this rank."""
    small = {
        path: LeafSpec.of(path, leaf.shape, leaf.dtype)
        for path, leaf in flat.leaves.items()
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
    stored_path = match_targets(manifest, target, partly=True)
    parts = {
        (path, number): piece
        for path, value in target.arrays.items()
        for number, piece in enumerate(shards.pieces(value))
    }
    values = dict(target.arrays)

    def place(key: tuple[str, int], spec: LeafSpec, box: NDArray[Any]) -> None:
        piece, path = parts[key], key[0]
        filled = shards.fill(piece, spec, box)
        if values[path] is piece.values:
            values[path] = filled

    reader.boxes(
        {key: Request(stored_path[key[0]], piece.box) for key, piece in parts.items()}, place
    )
    owners = tree.array_paths(target.skeleton)
    skeleton = tree.pruned(manifest.tree, target.skeleton)
    missing = tree.array_paths(skeleton).keys() - owners.keys()
    if missing:
        raise TreeMismatch(f"leaf {min(missing)!r} of step {manifest.step} is not in the target")
    return tree.unflatten(skeleton, lambda path, owner, tag: values[owners[path]])
