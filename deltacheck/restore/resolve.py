"""Find the chains and formulas that the leaves of a step come from."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from deltacheck.errors import ContractNotMet, StepNotFound
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.contracts import RANK, name_of
from deltacheck.restore import replay
from deltacheck.restore.chain import Chain, Held, resolve_chains
from deltacheck.restore.content import check_budget
from deltacheck.restore.leaf_kinds import Formula, Leaf, Tiled
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root


def resolve_leaves(
    root: Root,
    manifest: Manifest,
    paths: Sequence[str] | None = None,
    *,
    stored: bool = False,
    max_bytes: int | None = None,
    held: Mapping[str, Held] | None = None,
    partly: Container[str] = (),
    boxes: Mapping[str, tiles.Box] | None = None,
) -> dict[str, Leaf]:
    """Where every asked leaf (by default all) comes from, each link checked by the digests that the
    tables carry.

    ``stored``: what a replay begins with and consumes, instead of what it gives; without it, a leaf
    that a replay gives is refused (``ReplayNeeded``). ``max_bytes``: the budget, which neither the
    leaves (but for those of which the caller wants a part, ``partly``) nor, beyond 64 MiB, the
    step's tables may exceed; nothing is opened before that is known. ``held``: what the caller has
    of leaves as they are stored, which is then not read again. ``boxes``: what is wanted of leaves
    that are wanted in part; tiles outside are left out.

    Raises ``ChainBroken`` or ``Damaged`` naming leaf, step and segment; ``StepNotFound`` for a leaf
    that the step does not have; ``BudgetExceeded``.
    """
    specs = manifest.specs
    inputs = set() if manifest.replay is None else manifest.replay.inputs
    every = [*specs, *sorted(inputs)] if stored else list(specs)
    wanted = every if paths is None else list(dict.fromkeys(paths))
    if not stored:
        replay.refuse(root, manifest, wanted)
    for path in wanted:
        if path not in specs and path not in inputs:
            near = sorted(specs, key=lambda p: (-_common_prefix(p, path), p))[:3]
            raise StepNotFound(
                f"step {manifest.step} has no leaf {path!r}; near it: {', '.join(map(repr, near))}"
            )
    boxes = boxes or {}
    check_budget(
        max_bytes,
        sum(
            specs[path].raw_bytes
            for path in wanted
            if path in specs and path not in partly and path not in boxes
        ),
    )
    needed = dict.fromkeys(wanted)
    for path in needed_by(manifest, wanted):
        needed.setdefault(path)
    numbers = {
        path: _numbers(manifest.tiles[path].cuts, boxes.get(path))
        for path in needed
        if path in manifest.tiles
    }
    names = {
        path: dict(zip(of, sharding.names_of(path, manifest.tiles[path].cuts, of), strict=True))
        for path, of in numbers.items()
    }
    kept = [path for path in needed if path in manifest.leaves] + [
        name for of in names.values() for name in of.values()
    ]
    chains = resolve_chains(root, manifest, kept, max_bytes, held)
    made: dict[str, Leaf] = {}

    def make(path: str) -> Leaf:
        if path not in made:
            derived = manifest.derived.get(path)
            if path in names:
                cuts = manifest.tiles[path].cuts
                made[path] = Tiled(
                    specs[path],
                    cuts,
                    {number: chains[name] for number, name in names[path].items()},
                )
            elif derived is None:
                made[path] = chains[path]
            else:
                made[path] = Formula(
                    specs[path], derived, chains.get(path), {p: make(p) for p in derived.sources}
                )
        return made[path]

    return {path: make(path) for path in wanted}


def _numbers(cuts: tiles.Cuts, box: tiles.Box | None) -> list[int]:
    """The tiles that a box touches; without one, all."""
    return (
        list(range(tiles.count(cuts)))
        if box is None
        else [one.number for one in tiles.overlaps(cuts, box)]
    )


def needed_by(manifest: Manifest, paths: Iterable[str]) -> list[str]:
    """The leaves of the tree that ``paths`` are computed from, themselves included."""
    found: dict[str, None] = {}
    way = list(paths)
    while way:
        path = way.pop()
        if path not in found:
            found[path] = None
            way += manifest.derived[path].sources if path in manifest.derived else ()
    return list(found)


def require_contract(
    manifest: Manifest, contract: str | None, paths: Iterable[str] | None = None
) -> None:
    """Refuse a step that cannot give leaves (by default all) under a contract at least as strong as
    ``contract``.

    ``contract``: ``"exact"``, ``"bounded"``, ``"reused"``; ``None`` takes whatever was saved.
    Raises ``ContractNotMet`` naming leaves, both contracts and the way out; ``ValueError`` for
    another word.
    """
    if contract is None:
        return
    if contract not in RANK:
        raise ValueError(f"contract must be one of {', '.join(RANK)}, not {contract!r}")
    wanted = manifest.contracts.keys() if paths is None else set(paths)
    weak = {
        path: promise
        for path, promise in sorted(manifest.contracts.items())
        if path in wanted and RANK.index(name_of(promise.terms)) > RANK.index(contract)
    }
    if weak:
        named = [
            f"leaf {path!r} is {name_of(promise.terms)} (measured {promise.measured:.3g})"
            for path, promise in weak.items()
        ]
        more = f"; and {len(named) - 3} more" if len(named) > 3 else ""
        raise ContractNotMet(
            f"step {manifest.step} cannot be restored as {contract}: {'; '.join(named[:3])}{more}."
            f" Restore it without contract={contract!r}, or save with a policy that keeps these"
            f" leaves {contract}"
        )


def stored_chains(leaves: Iterable[Leaf]) -> dict[str, Chain]:
    """Return the chains that leaves are read from, by the path that each is stored under."""
    return {chain.spec.path: chain for leaf in leaves for chain in leaf.stored_chains()}


def _common_prefix(a: str, b: str) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
