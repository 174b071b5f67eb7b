"""Copies of the arrays that a training's update works on.

A replica repeats the updates, at a save to prove that they can be replayed, and at a restore to
compute the state. Both make their arrays from host bytes. Therefore properties of a JAX array
other than its bits (a weak type, a layout, the device of an input) cannot make the proof and the
restore disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.load import Read, make
from deltacheck.backends.orbax.state.targets import ArrayRequest, places_of, sharding_of
from deltacheck.errors import TreeMismatch
from deltacheck.leaf import tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.content import Loaded
from deltacheck.restore.fill import StepReader
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.roots.root import Root

Update: TypeAlias = Callable[..., Any]


def name_of(update: Update) -> str:
    """Return the name of the code that computes an update.

    It appears in errors, because other code is the first reason to suspect for other bits.
    """
    code = update if hasattr(update, "__qualname__") else type(update)
    return f"{code.__module__}.{code.__qualname__} (jax {jax.__version__}, {jax.default_backend()})"


class ArrayReplica:
    """Applies ``update`` to arrays of its own.

    Args:
        update: The training's update, which may donate its arguments.
        memory: The first argument of the update. The replica owns its arrays.
    """

    def __init__(self, update: Update, memory: Any) -> None:
        self._update = update
        self._memory = memory

    def update(self, options: Node, inputs: Mapping[str, Any]) -> None:
        """Do one update.

        Args:
            options: The skeleton of the update's other arguments.
            inputs: The arrays of the other arguments, by path.
        """
        self._memory = self._update(
            self._memory,
            # Made anew for each update, because it may donate its inputs, and the log still has to
            # store the recorded ones.
            *_inputs(options, {name: as_loaded(value) for name, value in inputs.items()}),
        )

    def memory(self) -> Flat:
        """Return the content after the updates so far."""
        return tree.flatten(self._memory, _untied, leaves.expand)


def owned(memory: Any) -> Any:
    """Return a copy of a memory, made in the same way as at a restore."""
    with leaves.own_rules():
        flat = tree.flatten(memory, leaves.describe, leaves.expand)
        loaded = {path: as_loaded(value) for path, value in flat.arrays.items()}
        return _memory(flat.skeleton, {path: path for path in loaded}, loaded, memory)


def replayed(
    root: Root, manifest: Manifest, plan: Replay, like: Any, update: Update, max_bytes: int | None
) -> Read:
    """Return the leaves of a step, after replaying and proving those that are logged.

    Args:
        root: The root.
        manifest: The step.
        plan: The updates of the step.
        like: A memory of the same structure. Its containers and shardings are used.
        update: The training's update.
        max_bytes: Refuse to allocate more than this.

    Raises:
        ReplayDiffers: The replay gives other bits than were saved.
        TreeMismatch: ``like`` has another structure than the logged memory.
        Damaged, ChainBroken, BudgetExceeded: As ``StepReader.whole`` raises them.
    """
    reader = StepReader(root, manifest, max_bytes=max_bytes)
    # One read for the base and the inputs, so that both are verified before the first update.
    loaded = reader.whole(replay_inputs=True)
    try:
        with leaves.own_rules():
            memory = _memory(plan.memory, plan.places, loaded, like)
    except TreeMismatch as error:
        raise TreeMismatch(
            f"step {manifest.step}: {error}. {replay.way_out(root, manifest)}"
        ) from None
    replica = ArrayReplica(update, memory)
    del memory  # so that an update that donates it frees it
    content = replay.replay_updates(
        root,
        manifest,
        plan,
        replica,
        lambda path: loaded[path],
        _with_digests,
        name_of(update),
    )
    replayed_leaves = {
        place: loaded[place]._replace(data=content[path].data)
        for path, place in plan.places.items()
    }
    state = {path: value for path, value in loaded.items() if path not in plan.inputs}
    # The inputs belong to the replay and not to the state that the next save continues.
    chains = {path: chain for path, chain in reader.chains.items() if path not in plan.inputs}
    return Read(state | replayed_leaves, chains, reader.stored)


def digests(flat: Flat) -> dict[str, str]:
    """Return the leaf digest of every array."""
    return _with_digests(flat)[1]


def as_loaded(value: Any) -> Loaded:
    """Return an array as a restore would have read it."""
    if isinstance(value, Loaded):
        return value
    leaf = leaves.describe(value)
    assert leaf is not None
    spec = LeafSpec.of("", leaf.shape, leaf.dtype)
    # All chunks are listed, as after a restore of the whole leaf.
    return Loaded(spec, list(range(spec.chunk_count)), leaves.bytes_of(value))


def _with_digests(flat: Flat) -> tuple[dict[str, Loaded], dict[str, str]]:
    """Return the bytes and the leaf digest of every array."""
    with leaves.own_rules():
        content = {path: as_loaded(value) for path, value in flat.arrays.items()}
    hashed = replay.leaf_digests((item.spec, item.data) for item in content.values())
    return content, dict(zip(content, hashed, strict=True))


def _memory(
    skeleton: Node, places: Mapping[str, str], stored: Mapping[str, Loaded], like: Any
) -> Any:
    """Return a memory from stored leaves, in the containers and shardings of ``like``.

    Raises:
        TreeMismatch: ``like`` has other leaves than were logged.
    """
    logged = places_of(skeleton)
    numbers = tree.scalars(skeleton)
    present: dict[str, Any] = {}
    leaves.map_leaves(present.__setitem__, like)
    for path in sorted(present.keys() ^ (logged.keys() | numbers.keys())):
        present_verb, logged_verb = ("is", "is not") if path in present else ("is not", "is")
        raise TreeMismatch(
            f"leaf {path!r} {present_verb} in what the update works on, and {logged_verb} in what"
            " was logged"
        )
    requests = {
        path: ArrayRequest(places[owner], tag, sharding_of(present[path]))
        for path, (owner, tag) in logged.items()
    }
    for path, request in requests.items():
        target_leaf, spec = leaves.describe_target(present[path]), stored[request.owner].spec
        if target_leaf is not None and (target_leaf.shape, target_leaf.dtype) != (
            spec.shape,
            spec.dtype,
        ):
            raise TreeMismatch(
                f"leaf {path!r} of what the update works on is"
                f" {target_leaf.dtype}{list(target_leaf.shape)}, {spec.dtype}{list(spec.shape)} was"
                " logged"
            )
    arrays = make(requests, stored)

    def leaf_at(path: str, leaf: Any) -> Any:
        return arrays[path] if path in arrays else numbers[path]

    return leaves.map_leaves(leaf_at, like)


def _inputs(skeleton: Node, stored: Mapping[str, Loaded]) -> tuple[Any, ...]:
    """Return the other arguments of an update."""
    with leaves.own_rules():
        arrays = make(
            {
                # Uncommitted arrays follow the memory to its devices.
                path: ArrayRequest(owner, tag, None)
                for path, (owner, tag) in places_of(skeleton).items()
            },
            stored,
        )
    arguments: Any = tree.unflatten(skeleton, lambda path, owner, tag: arrays[path])
    return tuple(arguments)


def _untied(value: object) -> ArrayLeaf | None:
    leaf = leaves.describe(value)
    return None if leaf is None else leaf._replace(identity=None)
