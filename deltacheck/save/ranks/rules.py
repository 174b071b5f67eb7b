"""The rules and the promises of several ranks, put together for the manifest of all.

A rank treats its tiles like leaves. Therefore its rules name tiles, and its promises are of tiles.
The manifest states rules that name leaves, and one promise for each leaf: the weakest of its tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.derivation import Derived
from deltacheck.errors import RankFailed
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.contracts import Bounded, PeakRate, Promise, Reused, name_of
from deltacheck.leaf.sharding import Plan
from deltacheck.leaf.structs import inspect_types
from deltacheck.store.manifest import NO_DIGEST, Manifest, Tiles


class RankRules(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rules of one rank's leaves and tiles, as a message to rank 0.

    Attributes:
        derived: How leaves and tiles follow from stored content, by stored path.
        contracts: The promises for those that are not exact, by stored path.
        codes: The element types of the codes that are stored of them, by stored path.
        contents: The digests of those that follow from stored content, as they were read.
        rates: The course of the learning rate of its parameter groups.
    """

    derived: dict[str, Derived] = {}
    contracts: dict[str, Promise] = {}
    codes: dict[str, str] = {}
    contents: dict[str, str] = {}
    rates: dict[str, PeakRate] = {}

    @classmethod
    def of(cls, manifest: Manifest, contents: Mapping[str, str]) -> RankRules:
        """Return the rules in the manifest of one rank, in which tiles are leaves.

        Args:
            manifest: The manifest.
            contents: The digests of leaves and tiles as they were read, by stored path.
        """
        digests = {name: contents[name] for name in manifest.derived if name in contents}
        codes = {
            name: manifest.leaves[name].dtype
            for name in manifest.derived
            if name in manifest.leaves
        }
        return cls(
            dict(manifest.derived), dict(manifest.contracts), codes, digests, dict(manifest.rates)
        )


inspect_types(RankRules)


def stored_digest(manifest: Manifest, name: str) -> str:
    """Return the digest of a leaf or tile in a report.

    It is that of what is stored, else that of the content, else ``NO_DIGEST``.

    Args:
        manifest: The manifest of one rank, in which tiles are leaves.
        name: The path of the leaf or the tile.
    """
    record = manifest.leaves.get(name)
    return record.digest if record is not None else manifest.derived[name].digest or NO_DIGEST


def rules_of_tiles(
    tiled: Tiles, path: str, owners: Sequence[int], rules: Sequence[RankRules], step: int
) -> Tiles:
    """Return a leaf in tiles with the rules of its tiles.

    Args:
        tiled: The leaf, without rules.
        path: Its path.
        owners: The rank that writes each tile.
        rules: The rules of each rank.
        step: The training step.
    """
    if not any(rank.derived for rank in rules):
        return tiled
    forms: dict[tuple[Derived, str], int] = {}
    form, from_steps = [], []
    for name, owner in zip(tiled.names(path), owners, strict=True):
        rule, promise = rules[owner].derived.get(name), rules[owner].contracts.get(name)
        from_steps.append(step if promise is None else promise.from_step)
        if rule is None:
            form.append(-1)
            continue
        common = msgspec.structs.replace(
            rule,
            shape=tiled.shape,
            # The digest of a tile stands among those of the leaf's tiles.
            digest="",
            of=tiles.leaf_of(rule.of),
        )
        form.append(forms.setdefault((common, rules[owner].codes.get(name, "")), len(forms)))
    known_steps = [from_step for from_step in from_steps if from_step is not None]
    is_mixed = len(known_steps) == len(from_steps) and len(set(known_steps)) > 1
    return msgspec.structs.replace(
        tiled,
        forms=tuple(rule for rule, _ in forms),
        codes=tuple(codes for _, codes in forms),
        # Mostly, all ranks have decided alike.
        form=tuple(form) if forms and any(form) else (),
        from_steps=tuple(known_steps) if is_mixed else (),
    )


def promises_of_leaves(rules: Sequence[RankRules], step: int) -> dict[str, Promise]:
    """Return the promise for each leaf of which any tile is not exact.

    Args:
        rules: The rules of each rank.
        step: The training step.

    Raises:
        RankFailed: Two tiles of a leaf have promises that no single one covers.
    """
    promises: dict[str, Promise] = {}
    for rank, of_rank in enumerate(rules):
        for name, promise in of_rank.contracts.items():
            path = tiles.leaf_of(name)
            earlier = promises.get(path)
            if earlier is None:
                promises[path] = promise
                continue
            weakest = weaker(earlier, promise, step)
            if weakest is None:
                raise RankFailed(
                    f"rank {rank} promises {name_of(promise.terms)} ({promise.allowed}) for its"
                    f" part of leaf {path!r}, another rank {name_of(earlier.terms)}"
                    f" ({earlier.allowed}): the ranks have decided differently. The step is not"
                    " saved; restart them with one version of deltacheck and one policy"
                )
            promises[path] = weakest
    return promises


def weaker(first: Promise, second: Promise, step: int) -> Promise | None:
    """Return a promise for a leaf of a step whose parts have these two; ``None`` if there is none.

    Largest errors, relative errors and medians of a whole are at most those of its worst part.
    """
    measured = _larger(first.measured, second.measured)
    if isinstance(first.terms, Bounded) and isinstance(second.terms, Bounded):
        if first.terms.norm != second.terms.norm:
            return None
        limit = max(first.terms.limit, second.terms.limit)
        # In the larger unit, neither error is larger than it was measured.
        rate = max(first.terms.rate or 0.0, second.terms.rate or 0.0) or None
        return Promise(Bounded(limit, first.terms.norm, rate), measured)
    if isinstance(first.terms, Reused) and isinstance(second.terms, Reused):
        drifts = (first.terms.max_drift, second.terms.max_drift)
        if (drifts[0] is None) != (drifts[1] is None):
            return None
        limit_steps = max(first.terms.max_age_steps, second.terms.max_age_steps)
        drift = None if drifts[0] is None or drifts[1] is None else max(drifts[0], drifts[1])
        from_step = min(p.from_step for p in (first, second) if p.from_step is not None)
        age = max(first.age(step), second.age(step))
        age_steps = None if age == step - from_step else age
        return Promise(Reused(limit_steps, drift), measured, from_step, age_steps)
    return None


def _larger(first: float, second: float) -> float:
    # ``max`` would pass over a NaN that comes second.
    return first if first >= second or math.isnan(first) else second


def content_digests(
    digests: NDArray[np.bytes_], plan: Plan, rules: Sequence[RankRules]
) -> NDArray[np.bytes_]:
    """Return the digest of each tile's content as its writer has read it; zeros if it is unknown.

    Args:
        digests: The digests in the reports, ``S32 (tiles,)``.
        plan: The tiles of all ranks.
        rules: The rules of each rank.
    """
    if not any(rank.derived for rank in rules):
        return digests
    contents = digests.copy()
    first = 0
    for path, leaf_plan in plan.items():
        count = leaf_plan.owners.size
        names = sharding.names_of(path, leaf_plan.cuts, range(count))
        for number, (name, owner) in enumerate(zip(names, leaf_plan.owners.tolist(), strict=True)):
            if name in rules[owner].derived:
                digest = rules[owner].contents.get(name, NO_DIGEST)
                contents[first + number] = digest.encode("ascii")
        first += count
    return contents
