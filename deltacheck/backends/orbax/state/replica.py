"""What an update works on, a second time: in arrays of its own, made in the same way for the proof
at
a save and for a restore.

Both go through host bytes. So what JAX knows of an array beside its bits (a weak type, a layout,
where an input lay) cannot make the proof say another thing than the restore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax

from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.load import Read, Wanted, make, places_of, sharding_of
from deltacheck.codec.base import U8
from deltacheck.errors import ReplayDiffers, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.content import Loaded
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.restore.values import load_leaves
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.root import Root

Update: TypeAlias = Callable[..., Any]

_HASH_THREADS = 4


def name_of(update: Update) -> str:
    """What computes an update, as far as it has a name: whoever looks for the reason of other bits
    looks here first.
    """
    named = update if hasattr(update, "__qualname__") else type(update)
    return (
        f"{named.__module__}.{named.__qualname__} (jax {jax.__version__}, {jax.default_backend()})"
    )


class Replica:
    """Does ``update`` on ``memory``, whose arrays are the replica's own: the update may donate
    them.
    """

    def __init__(self, update: Update, memory: Any) -> None:
        self._update = update
        self._memory = memory

    def update(self, options: Node, inputs: Mapping[str, Any]) -> None:
        """One update. ``options``: skeleton of what it takes beside the memory; ``inputs``: its
        arrays by their paths.
        """
        self._memory = self._update(
            self._memory, *_inputs(options, {name: loaded(value) for name, value in inputs.items()})
        )

    def memory(self) -> Flat:
        return tree.flatten(self._memory, _untied, leaves.expand)


def owned(memory: Any) -> Any:
    """The same memory in arrays of its own."""
    with leaves.own_rules():
        flat = tree.flatten(memory, leaves.describe, leaves.expand)
        stored = {path: loaded(value) for path, value in flat.arrays.items()}
        return _memory(flat.skeleton, {path: path for path in stored}, stored, memory)


def replayed(
    root: Root, manifest: Manifest, plan: Replay, like: Any, update: Update, max_bytes: int | None
) -> Read:
    """The leaves of a step, those that the replay gives proven by their digests. ``like``: a memory
    of
    the same structure, whose containers and shardings are taken.

    Raises ``ReplayDiffers``, ``TreeMismatch``, and what reading raises.
    """
    found = resolve_leaves(root, manifest, stored=True)
    bases: dict[str, U8] = {}
    stored = load_leaves(found, max_bytes=max_bytes, stored=bases)
    try:
        with leaves.own_rules():
            memory = _memory(plan.memory, plan.places, stored, like)
    except TreeMismatch as error:
        raise TreeMismatch(
            f"step {manifest.step}: {error}. {replay.way_out(root, manifest)}"
        ) from None
    twin = Replica(update, memory)
    del memory  # an update that donates it frees it
    try:
        for step in plan.steps:
            twin.update(step.options, {name: stored[path] for name, path in step.inputs.items()})
        after = twin.memory()
        content = host(after)
    except Exception as error:
        raise ReplayDiffers(
            f"step {manifest.step}: {len(plan.steps)} updates of {plan.update} cannot be replayed"
            f" with {name_of(update)}: {type(error).__name__}: {error}."
            f" {replay.way_out(root, manifest)}"
        ) from error
    replay.check(
        root,
        manifest,
        {plan.places.get(path, path): digest for path, digest in _digests(content).items()},
        name_of(update),
    )
    given = {
        place: stored[place]._replace(data=content[path].data)
        for path, place in plan.places.items()
    }
    chains = stored_chains(leaf for path, leaf in found.items() if path not in plan.inputs)
    return Read(
        {path: value for path, value in stored.items() if path not in plan.inputs} | given,
        chains,
        bases,
    )


def host(flat: Flat) -> dict[str, Loaded]:
    """The bytes of every array."""
    with leaves.own_rules():
        return {path: loaded(value) for path, value in flat.arrays.items()}


def digests(flat: Flat) -> dict[str, str]:
    """The leaf digest of every array."""
    return _digests(host(flat))


def loaded(value: Any) -> Loaded:
    """An array as a restore would have read it."""
    if isinstance(value, Loaded):
        return value
    described = leaves.describe(value)
    assert described is not None
    spec = LeafSpec.of("", described.shape, described.dtype)
    return Loaded(spec, list(range(spec.chunk_count)), leaves.bytes_of(value))


def _digests(content: Mapping[str, Loaded]) -> dict[str, str]:
    def one(item: Loaded) -> str:
        return digest_of(item.spec, item.data)

    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(content, pool.map(one, content.values()), strict=True))


def _memory(
    skeleton: Node, places: Mapping[str, str], stored: Mapping[str, Loaded], like: Any
) -> Any:
    """A memory from what is stored, in the containers and shardings of ``like``. Raises
    ``TreeMismatch`` where those are others.
    """
    where = places_of(skeleton)
    numbers = tree.scalars(skeleton)
    asked: dict[str, Any] = {}
    leaves.map_leaves(asked.__setitem__, like)
    for path in sorted(asked.keys() ^ (where.keys() | numbers.keys())):
        here, there = ("is", "is not") if path in asked else ("is not", "is")
        raise TreeMismatch(
            f"leaf {path!r} {here} in what the update works on, and {there} in what was logged"
        )
    wanted = {
        path: Wanted(places[owner], tag, sharding_of(asked[path]))
        for path, (owner, tag) in where.items()
    }
    for path, one in wanted.items():
        described, spec = leaves.describe_target(asked[path]), stored[one.owner].spec
        if described is not None and (described.shape, described.dtype) != (spec.shape, spec.dtype):
            raise TreeMismatch(
                f"leaf {path!r} of what the update works on is"
                f" {described.dtype}{list(described.shape)}, {spec.dtype}{list(spec.shape)} was"
                " logged"
            )
    made = make(wanted, stored)
    return leaves.map_leaves(lambda path, leaf: made[path] if path in made else numbers[path], like)


def _inputs(skeleton: Node, stored: Mapping[str, Loaded]) -> tuple[Any, ...]:
    with leaves.own_rules():
        made = make(
            {path: Wanted(owner, tag, None) for path, (owner, tag) in places_of(skeleton).items()},
            stored,
        )
    built: Any = tree.unflatten(skeleton, lambda path, owner, tag: made[path])
    return tuple(built)


def _untied(value: object) -> ArrayLeaf | None:
    described = leaves.describe(value)
    return None if described is None else described._replace(identity=None)
