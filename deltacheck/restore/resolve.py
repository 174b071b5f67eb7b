"""Find the chains and formulas that the leaves of a step come from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from deltacheck.errors import ContractNotMet, Damaged, LeafNotFound, LeafPruned, StepNotFound
from deltacheck.leaf import limits, sharding, tiles
from deltacheck.leaf.contracts import RANK, name_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.chain import KnownContent, resolve_chains
from deltacheck.restore.content import check_budget
from deltacheck.restore.leaf_kinds import Chain, Formula, GroupPart, Leaf, Tiled
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")

_BOUNDS_BYTES = 24  # memory of the bounds of a chunk while they are computed


def resolve_leaves(
    root: Root,
    manifest: Manifest,
    paths: Sequence[str] | None = None,
    *,
    max_bytes: int | None = None,
    held: Mapping[str, KnownContent] | None = None,
    partly: Container[str] = (),
    boxes: Mapping[str, tiles.Box] | None = None,
) -> dict[str, Leaf]:
    """Find the chains and formulas of leaves, and check each link by the digests of the tables.

    Args:
        root: The root.
        manifest: The step.
        paths: The leaves; ``None``: all.
        max_bytes: The budget; ``None``: the memory of the machine. It limits the size of the
            leaves, except for those in ``partly`` and ``boxes``, and the tables beyond 64 MiB.
            Nothing is opened before this is checked.
        held: Content of stored leaves that the caller already has, which is not read again.
        partly: Leaves of which only a part will be loaded.
        boxes: The boxes that will be loaded, for leaves of which only a box is needed. Tiles
            outside the box are not resolved.

    Returns:
        The leaves by path.

    Raises:
        LeafNotFound: The step does not have a leaf; names similar paths. ``LeafPruned``: retention
            has removed it.
        ChainBroken: A segment is missing or does not continue a chain; names leaf and step.
        Damaged: A table is damaged; names leaf, step and segment.
        BudgetExceeded: The leaves or the tables are too large.
    """
    specs = manifest.specs
    requested = list(specs if paths is None else dict.fromkeys(paths))
    # A leaf whose own place in the tree was removed may still hold the content of a tied one.
    unknown_paths = [path for path in requested if path not in specs]
    require_leaves(root, manifest, unknown_paths)
    if unknown_paths:
        raise no_leaf(manifest.step, unknown_paths[0], specs)
    boxes = boxes or {}
    whole_paths = [path for path in requested if path not in partly and path not in boxes]
    _refuse_large(root, manifest, requested, whole_paths, max_bytes)
    # Sources of formulas are resolved in the same call, so that each segment is opened once.
    required_paths = dict.fromkeys([*requested, *needed_by(manifest, requested)])
    names = _needed_tiles(manifest, requested, required_paths, boxes)
    stored_paths = [path for path in required_paths if path in manifest.leaves] + [
        name
        for path, tile_names in names.items()
        for number, name in tile_names.items()
        if manifest.tiles[path].stored_dtype(number) is not None
    ]
    chains = resolve_chains(root, manifest, stored_paths, max_bytes, held)
    leaves: dict[str, Leaf] = {}
    return {path: _leaf_at(path, manifest, chains, names, leaves) for path in requested}


def _refuse_large(
    root: Root, manifest: Manifest, paths: list[str], whole_paths: list[str], max_bytes: int | None
) -> None:
    """Raise ``BudgetExceeded`` if leaves, of which some are loaded whole, are too large."""
    specs, subject = manifest.specs, f"what is asked for of step {manifest.step}"
    segments = [ref.id for ref in manifest.segments]
    size = sum(specs[path].raw_bytes for path in whole_paths)
    check_budget(max_bytes, size)
    if max_bytes is None:
        limits.check_bytes(root.store.path, segments, size, subject)
    # Of boxes, too: the bounds of all chunks of a leaf are computed.
    chunks = sum(specs[path].chunk_count for path in paths)
    limits.check_tables(root.store.path, segments, chunks, chunks * _BOUNDS_BYTES, subject)


# Not a function inside its caller: one that calls itself refers to itself, and that cycle would
# keep the segments of the chains open, and pinned, until Python's garbage collector runs.
def _leaf_at(
    path: str,
    manifest: Manifest,
    chains: Mapping[str, Chain],
    names: Mapping[str, Mapping[int, str]],
    leaves: dict[str, Leaf],
) -> Leaf:
    """Return the leaf at a path, and add it and the leaves that it follows from to ``leaves``.

    Args:
        path: The leaf.
        manifest: The step.
        chains: The chains that are needed, by stored path.
        names: For each leaf in tiles, the stored path of each tile that is needed.
        leaves: The leaves so far. Several formulas may name the same leaf, which is made once.
    """
    # The recursion is short: a leaf follows from at most 8 others in a row
    # (docs/reference/format.md, section 3).
    if path not in leaves:
        derived = manifest.derived.get(path)
        if path in names:
            leaves[path] = Tiled(
                manifest.spec(path),
                manifest.tiles[path].cuts,
                {number: _tile_at(path, number, manifest, chains, names) for number in names[path]},
            )
        elif derived is None:
            leaves[path] = chains[path]
        elif derived.is_part:
            group = chains[derived.of or path]
            leaves[path] = GroupPart(manifest.spec(path), derived, group)
        else:
            source = _leaf_at(derived.of, manifest, chains, names, leaves) if derived.of else None
            leaves[path] = Formula(manifest.spec(path), derived, chains.get(path), source)
    return leaves[path]


def _tile_at(
    path: str,
    number: int,
    manifest: Manifest,
    chains: Mapping[str, Chain],
    names: Mapping[str, Mapping[int, str]],
) -> Leaf:
    """Return one tile of a leaf; the arguments are those of ``_leaf_at``."""
    name, rule = names[path][number], manifest.tiles[path].rule(number)
    if rule is None:
        return chains[name]
    if rule.is_part:
        group = chains[names[rule.of][number] if rule.of else name]
        return GroupPart(LeafSpec.of(name, rule.shape, rule.dtype), rule, group)
    # The source is cut alike, so the tile of the same number is the one at the same place.
    source = _tile_at(rule.of, number, manifest, chains, names) if rule.of else None
    return Formula(LeafSpec.of(name, rule.shape, rule.dtype), rule, chains.get(name), source)


def _needed_tiles(
    manifest: Manifest,
    requested: Iterable[str],
    required_paths: Iterable[str],
    boxes: Mapping[str, tiles.Box],
) -> dict[str, dict[int, str]]:
    """Return the stored paths of the tiles that are needed of each leaf in tiles, by their numbers.

    Args:
        manifest: The step.
        requested: The leaves that will be loaded.
        required_paths: These and the leaves that they are computed from.
        boxes: The boxes that will be loaded, as ``resolve_leaves`` takes them.

    Raises:
        Damaged: The manifest and the tables lack a digest of such a tile.
    """
    numbers: dict[str, set[int]] = {
        path: set() for path in required_paths if path in manifest.tiles
    }
    # Leaves that follow from tiles need them all; tiles follow from those at the same place only.
    whole = {
        source
        for path in required_paths
        if path in manifest.derived
        for source in manifest.derived[path].sources
    }
    pending = [
        (path, _numbers(manifest.tiles[path].cuts, None if path in whole else boxes.get(path)))
        for path in numbers
        if path in whole or path in set(requested)
    ]
    while pending:
        path, tile_numbers = pending.pop()
        numbers[path].update(tile_numbers)
        pending += [(source, tile_numbers) for source in manifest.tiles[path].sources]
    names: dict[str, dict[int, str]] = {}
    for path, tile_set in numbers.items():
        ordered = sorted(tile_set)
        manifest.require_digests(path, ordered)
        tile_names = sharding.names_of(path, manifest.tiles[path].cuts, ordered)
        names[path] = dict(zip(ordered, tile_names, strict=True))
    return names


def _numbers(cuts: tiles.Cuts, box: tiles.Box | None) -> list[int]:
    """Return the tiles that a box touches; without a box, all tiles."""
    return (
        list(range(tiles.count(cuts)))
        if box is None
        else [overlap.number for overlap in tiles.overlaps(cuts, box)]
    )


def needed_by(manifest: Manifest, paths: Iterable[str]) -> list[str]:
    """Return some leaves and the leaves that they are computed from."""
    required_paths: dict[str, None] = {}
    pending = list(paths)
    while pending:
        path = pending.pop()
        if path not in required_paths:
            required_paths[path] = None
            pending += manifest.sources_of(path)
    return list(required_paths)


def require_contract(
    manifest: Manifest, contract: str | None, paths: Iterable[str] | None = None
) -> None:
    """Raise an error if some leaves were saved under a weaker contract than the caller requires.

    Args:
        manifest: The step.
        contract: ``"exact"``, ``"bounded"`` or ``"reused"``; ``None``: accept any.
        paths: The leaves to check; ``None``: all.

    Raises:
        ContractNotMet: Names the leaves, both contracts and the alternatives.
        ValueError: ``contract`` is not a contract.
    """
    if contract is None:
        return
    if contract not in RANK:
        raise ValueError(f"contract must be one of {', '.join(RANK)}, not {contract!r}")
    # A leaf without a promise is exact, so only leaves with one can be too weak.
    checked = manifest.contracts.keys() if paths is None else set(paths)
    # `RANK` goes from the strongest contract to the weakest.
    weak = {
        path: promise
        for path, promise in sorted(manifest.contracts.items())
        if path in checked and RANK.index(name_of(promise.terms)) > RANK.index(contract)
    }
    if weak:
        descriptions = [
            f"leaf {path!r} is {name_of(promise.terms)} (measured {promise.measured:.3g})"
            for path, promise in weak.items()
        ]
        remainder = f"; and {len(descriptions) - 3} more" if len(descriptions) > 3 else ""
        raise ContractNotMet(
            f"step {manifest.step} cannot be restored as {contract}:"
            f" {'; '.join(descriptions[:3])}{remainder}."
            f" Restore it without contract={contract!r}, or save with a policy that keeps these"
            f" leaves {contract}"
        )


def require_leaves(root: Root, manifest: Manifest, paths: Iterable[str] | None = None) -> None:
    """Raise an error if retention has removed some leaves from a step.

    Args:
        root: The root, in which the newest step with the leaf is searched.
        manifest: The step.
        paths: The leaves that are needed; ``None``: all that were saved.

    Raises:
        LeafPruned: Names the first of these leaves, the step, and the newest step that has it.
    """
    if not manifest.absent:
        return
    names = manifest.absent if paths is None else sorted(filter(manifest.lacks, paths))
    if not names:
        return
    leaf = names[0]
    newest = _newest_with(root, leaf)
    step_text = "no step has it" if newest is None else f"the newest step that has it is {newest}"
    others = f" and {len(names) - 1} more" if names[1:] else ""
    raise LeafPruned(
        f"step {manifest.step} has no leaf {leaf!r}{others}: retention has removed it; {step_text}."
        f" Name the leaves to restore, all but {', '.join(map(repr, manifest.absent[:3]))}",
        leaf=leaf,
        step=manifest.step,
        newest_step=newest,
    )


def _newest_with(root: Root, leaf: str) -> int | None:
    """Return the newest step that has a leaf, or the arrays of a container."""
    for step in sorted(root.steps(), reverse=True):
        try:
            manifest = root.manifest(step)
        except (Damaged, StepNotFound):
            continue
        if any(path == leaf or path.startswith(f"{leaf}/") for path in manifest.arrays):
            return step
    return None


def stored_chains(leaves: Iterable[Leaf]) -> dict[str, Chain]:
    """Return the chains that leaves are read from, by the path that each is stored under."""
    return {chain.spec.path: chain for leaf in leaves for chain in leaf.stored_chains()}


def matches(path: str, pattern: str) -> bool:
    """Return True if a leaf path is named by a path, a subtree or an ``fnmatch`` pattern.

    ``*`` also matches ``/``. The empty name is the whole tree.
    """
    return is_below(path, pattern) or fnmatchcase(path, pattern)


def is_below(path: str, place: str) -> bool:
    """Return True if a leaf path is a place in the tree, or below it."""
    return not place or path == place or path.startswith(f"{place}/")


def select_paths(known_paths: Collection[str], names: Iterable[str], step: int) -> list[str]:
    """Return the paths that paths, subtrees and patterns name, each once, in the order of names.

    Args:
        known_paths: The leaves of the step.
        names: As ``matches`` takes them.
        step: The step, for the message.

    Raises:
        LeafNotFound: A name matches no leaf; names similar paths.
    """
    selected: dict[str, None] = {}
    for name in names:
        # A path needs no walk through all leaves of a large state.
        named = [name] if name in known_paths else [p for p in known_paths if matches(p, name)]
        if not named:
            raise no_leaf(step, name, known_paths)
        selected |= dict.fromkeys(named)
    return list(selected)


def no_leaf(step: int, name: str, known_paths: Iterable[str]) -> LeafNotFound:
    """Return the error for a leaf that a step does not have."""
    similar = sorted(known_paths, key=lambda path: (-_common_prefix(path, name), path))[:3]
    return LeafNotFound(
        f"step {step} has no leaf {name!r}; near it: {', '.join(map(repr, similar))}"
    )


def _common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix of two paths."""
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
