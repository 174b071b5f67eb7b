"""A run of several ranks, which are threads of this process, with NumPy states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacheck import Keep, Policy
from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes
from deltacheck.codec import default_codec
from deltacheck.leaf import sharding, tiles, tree
from deltacheck.leaf.sharding import HeldShards
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.restore.values import load_leaves
from deltacheck.save.chains.chain_state import Numbers
from deltacheck.save.ranks.joint import AgreedSave, Attempt, Joint, RankTiles
from deltacheck.save.ranks.replicas import digests_of
from deltacheck.save.save_options import SaveOptions, Settings
from deltacheck.save.saver import LeafSource, Saver
from deltacheck.save.treatment.signals import HeldState
from deltacheck.store.commit import commit
from deltacheck.store.documents import Written
from deltacheck.store.files.durability import Durability
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opened import open_alone
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root
from tests.contracts.ranks import Threads

Arrays: TypeAlias = dict[str, NDArray[Any]]
# The boxes that a rank has of a leaf, by path, shape, rank and number of ranks; none: the rank does
# not know of the leaf.
Layout: TypeAlias = Callable[[str, Sequence[int], int, int], Sequence[Box]]


def rows(path: str, shape: Sequence[int], rank: int, size: int) -> list[Box]:
    """Cut leaves along the first axis into equal parts, as FSDP2 does.

    The last parts are smaller or empty. All ranks hold leaves of one axis whole.
    """
    if len(shape) < 2:
        return [tiles.whole(shape)]
    part = -(-shape[0] // size)
    return [
        (
            slice(min(rank * part, shape[0]), min((rank + 1) * part, shape[0])),
            *tiles.whole(shape[1:]),
        )
    ]


def cells(path: str, shape: Sequence[int], rank: int, size: int) -> list[Box]:
    """Cut leaves along two axes: two parts along the last axis, the others along the first."""
    if len(shape) < 2:
        return [tiles.whole(shape)]
    (first,) = rows(path, (shape[0], shape[1]), rank // 2, size // 2)
    half = shape[-1] // 2
    last = slice(0, half) if rank % 2 == 0 else slice(half, shape[-1])
    return [(first[0], *tiles.whole(shape[1:-1]), last)]


def stages(path: str, shape: Sequence[int], rank: int, size: int) -> list[Box]:
    """Place each leaf whole on one rank."""
    return [tiles.whole(shape)] if sum(path.encode()) % size == rank else []


def at_once(size: int, action: Callable[[int], Any]) -> list[Any]:
    """Run ``action(rank)`` for all ranks in threads; return their results or exceptions."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = action(rank)
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            found[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class RankedRun:
    """Several ranks that save into one root.

    Args:
        size: The number of ranks.
        layout: Returns the boxes of a leaf that a rank holds.
        options: Fields of ``SaveOptions``.
    """

    def __init__(
        self,
        root: Path,
        size: int,
        layout: Layout = rows,
        depth: int = 16,
        durability: Durability = Durability.PROCESS,
        policy: Policy | None = None,
        **options: Any,
    ) -> None:
        store, self.lease, next_seq = open_alone(root, durability)
        self.root = Root(root, store)
        self.size, self.layout = size, layout
        ranks = Threads(size).ranks()
        self.joints = [Joint(one) for one in ranks]
        self.stores = [store, *(create_store(root, durability=durability) for _ in range(size - 1))]
        policy = policy or Policy.exact(max_chain_depth=depth, max_restore_ratio=None)
        # One number for each save: these threads have no numbers for merges.
        settings = Settings(policy, Keep(), SaveOptions(**options)).without_merges()
        self.savers = [
            Saver(one, default_codec(), settings, Numbers(next_seq)) for one in self.stores
        ]
        for joint, saver in zip(self.joints, self.savers, strict=True):
            joint.groups = saver.groups
        self.commit: Callable[[Manifest], Written] = lambda manifest: commit(
            root, manifest, durability
        )

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> list[Any]:
        """Save a state, and return the report or the exception of each rank."""
        return at_once(self.size, lambda rank: self.save_on(rank, step, state, metrics))

    def save_on(
        self, rank: int, step: int, state: Any, metrics: Mapping[str, float] | None = None
    ) -> Any:
        """Save the part of one rank, and wait until it is committed."""
        return self.begin_on(rank, step, state, metrics).result(240)

    def begin_on(
        self, rank: int, step: int, state: Any, metrics: Mapping[str, float] | None = None
    ) -> Any:
        joint, saver = self.joints[rank], self.savers[rank]
        flat = tree.flatten(state, describe_numpy)
        held = self.held(rank, flat)
        skeleton = tree.flatten(_only(state, held), describe_numpy).skeleton
        state_held = self.held_state(rank, flat, held, skeleton, metrics or {})
        signals = saver.signals(step, state_held)
        begun = joint.begin(step, saver.next_number(), held, skeleton, False, signals)
        assert begun is not None
        sources = {}
        for spec, part in parts_of(flat, begun.tiles):
            sources[spec.path] = LeafSource(spec, partial(numpy_bytes, part))
        attempt = Attempt(joint, begun, state_held)
        attempt.copies = self.copies(flat, begun)
        saver.number_from(begun.seq)
        commit = partial(attempt.commit, self.commit)
        return saver.save(
            step,
            begun.tree,
            dict(sorted(sources.items())),
            commit,
            metrics=metrics,
            agreed=attempt.agreed,
        )

    def copies(self, flat: tree.Flat, begun: AgreedSave) -> bytes:
        return digests_of(
            [_Copy(spec, numpy_bytes(part)) for spec, part in parts_of(flat, begun.copies)],
            begun.seq,
        )

    def held_state(
        self,
        rank: int,
        flat: tree.Flat,
        held: Mapping[str, HeldShards],
        skeleton: tree.Node,
        metrics: Mapping[str, float],
    ) -> HeldState:
        """Return the part of a state that a rank holds, for the decisions of a policy."""
        specs = {path: LeafSpec.of(path, one.shape, one.dtype) for path, one in held.items()}

        def values(path: str) -> list[Any]:
            array = np.asarray(flat.arrays[path])
            return [array[box].reshape(-1) for box in held[path].boxes]

        return HeldState.of(specs, skeleton, metrics, values)

    def held(self, rank: int, flat: tree.Flat) -> dict[str, HeldShards]:
        found = {
            path: tuple(self.layout(path, leaf.shape, rank, self.size))
            for path, leaf in flat.leaves.items()
        }
        return {
            path: HeldShards(flat.leaves[path].dtype, flat.leaves[path].shape, boxes)
            for path, boxes in found.items()
            if boxes
        }

    def resume(self, state: Any) -> list[list[str]]:
        """Continue from the newest step, and return the continued chains of each rank.

        Args:
            state: The state of the next save.
        """
        return [
            one if not isinstance(one, BaseException) else _raise(one)
            for one in at_once(self.size, partial(self._resume, state))
        ]

    def _resume(self, state: Any, rank: int) -> list[str]:
        manifest = self.root.manifest()
        held = self.held(rank, tree.flatten(state, describe_numpy))
        names = self.joints[rank].resume(manifest, held)
        paths = sorted({tiles.leaf_of(name) for name in names})
        chains = stored_chains(resolve_leaves(self.root, manifest, paths).values())
        stored: dict[str, Any] = {}
        load_leaves(resolve_leaves(self.root, manifest, paths), stored=stored)
        self.savers[rank].adopt(
            {n: chains[n] for n in names}, {n: stored[n] for n in names}, manifest
        )
        return names

    def close(self) -> None:
        for saver in self.savers:
            saver.close()
        for store in self.stores:
            store.close()
        if self.lease is not None:
            self.lease.release()

    def __enter__(self) -> RankedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Copy(NamedTuple):
    spec: LeafSpec
    data: Any

    def content(self) -> Any:
        return self.data


def parts_of(flat: tree.Flat, of_rank: RankTiles) -> Iterator[tuple[LeafSpec, Any]]:
    """Yield the spec and the values of some tiles."""
    for path, (cuts, numbers) in of_rank.items():
        array, leaf = np.asarray(flat.arrays[path]), flat.leaves[path]
        boxes = (
            [tiles.whole(leaf.shape)]
            if cuts is None
            else [tiles.box(cuts, number) for number in numbers]
        )
        for name, box in zip(sharding.names_of(path, cuts, numbers), boxes, strict=True):
            yield LeafSpec.of(name, tuple(s.stop - s.start for s in box), leaf.dtype), array[box]


def _raise(error: BaseException) -> Any:
    raise error


def _only(state: Any, paths: Mapping[str, Any], at: str = "") -> Any:
    """Return the part of nested dicts that a rank holds."""
    found = {}
    for key, value in state.items():
        path = f"{at}{tree.escape_key(key)}"
        if isinstance(value, dict):
            if part := _only(value, paths, f"{path}/"):
                found[key] = part
        elif not isinstance(value, np.ndarray) or path in paths:
            found[key] = value
    return found


def model_state(seed: int = 0) -> dict[str, Any]:
    """Return leaves of several chunks, small leaves, an empty leaf and numbers."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((700, 1000)).astype(np.float32)
    return {
        "model": {
            "big": weight,
            "bias": random.standard_normal(64).astype(np.float32),
            "empty": np.zeros((0, 4), np.int32),
            "ids": random.integers(0, 1000, (33, 7)),
            "scale": np.array(0.5, np.float32),
        },
        "optimizer": {"exp_avg": random.standard_normal((700, 1000)).astype(np.float32)},
        "step": seed,
    }


def nudge(
    state: dict[str, Any], share: float = 0.02, seed: int = 1, rows: slice = slice(None)
) -> None:
    """Change a share of the elements in some rows of the large leaves, in place."""
    random = np.random.default_rng(seed)
    for leaf in (state["model"]["big"], state["optimizer"]["exp_avg"]):
        part = leaf[rows]
        part[random.random(part.shape) < share] *= np.float32(1.01)
    state["step"] += 1
