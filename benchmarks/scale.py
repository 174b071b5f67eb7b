"""The cost of a step of many ranks beside its data: plan, reports and manifest.

The metadata alone is replayed, for every rank of a 70 B model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.record import Figure, Result, Settings, Table, Unit
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.sharding import HeldShards, Holdings
from deltacheck.leaf.tiles import Box
from deltacheck.save.ranks import joint
from deltacheck.save.ranks.joint import Agreement, Assignment, Contribution, Report, SaveProposal
from deltacheck.store import documents, layout
from deltacheck.store.compact import LaneTables
from deltacheck.store.documents import manifest_content
from deltacheck.store.manifest import (
    KeyframeAt,
    LeafEntry,
    Manifest,
    SegmentRef,
    SegmentTable,
)

RANKS = 1024
_LIMIT_SECONDS, _LIMIT_BYTES = 1.0, 1 << 20
_DEPTH = 8  # saves whose segments a step refers to


class Leaf(NamedTuple):
    """A leaf of the model.

    ``axis``: the axis that tensor parallelism cuts. ``stage``: of a pipeline of eight stages.
    """

    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    stage: int


def model(
    leaves: int, layers: int = 80, width: int = 8192, inner: int = 28672, heads_kv: int = 1024
) -> dict[str, Leaf]:
    """Return the first leaves of a decoder of 70 B parameters.

    They include its float32 master weights and Adam's moments.
    """
    blocks = {
        "attention.wq": ((width, width), 0),
        "attention.wk": ((heads_kv, width), 0),
        "attention.wv": ((heads_kv, width), 0),
        "attention.wo": ((width, width), 1),
        "mlp.w1": ((inner, width), 0),
        "mlp.w2": ((width, inner), 1),
        "mlp.w3": ((inner, width), 0),
        "attention.norm": ((width,), None),
        "mlp.norm": ((width,), None),
    }
    parameters: dict[str, tuple[tuple[int, ...], int | None, int]] = {
        "embed.weight": ((128256, width), 0, 0),
        "head.weight": ((128256, width), 0, layers - 1),
        "norm.weight": ((width,), None, layers - 1),
    }
    parameters |= {
        f"layers.{n}.{name}": (*cut, n) for n in range(layers) for name, cut in blocks.items()
    }
    kinds = {
        "model": "bfloat16",
        "master": "float32",
        "exp_avg": "float32",
        "exp_avg_sq": "float32",
    }
    all_leaves = [
        (f"{kind}/{name}", Leaf(dtype, *parameter))
        for kind, dtype in kinds.items()
        for name, parameter in parameters.items()
    ]
    return {
        path: leaf._replace(stage=leaf.stage * 8 // layers) for path, leaf in all_leaves[:leaves]
    }


# The boxes of a leaf that a rank holds: leaf, rank, number of ranks -> boxes.
Layout = Callable[[Leaf, int, int], Sequence[Box]]


def fsdp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Cut every leaf into equal parts of its first axis, over all ranks."""
    return [_cut(tiles.whole(leaf.shape), 0, rank, size)]


def hsdp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Cut as FSDP does within groups of 64 ranks; all groups hold the same."""
    return fsdp(leaf, rank % min(64, size), min(64, size))


def tp_fsdp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Cut by tensor parallelism over 8 ranks, then each part along its first axis."""
    box = tiles.whole(leaf.shape)
    if leaf.axis is not None:
        box = _cut(box, leaf.axis, rank % 8, 8)
    return [_cut(box, 0, rank // 8, size // 8)]


def pp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Divide leaves over a pipeline of 8 stages, and cut them over the ranks of a stage."""
    return fsdp(leaf, rank // 8, size // 8) if leaf.stage == rank % 8 else []


LAYOUTS: Mapping[str, Layout] = {"FSDP": fsdp, "HSDP": hsdp, "TP x FSDP": tp_fsdp, "PP x FSDP": pp}


def _cut(box: Box, axis: int, part: int, parts: int) -> Box:
    """Cut as ``torch.chunk`` does: into equal parts, of which the last are smaller or empty."""
    start, stop = box[axis].start, box[axis].stop
    size = -(-(stop - start) // parts)
    bounds = slice(min(start + part * size, stop), min(start + (part + 1) * size, stop))
    return (*box[:axis], bounds, *box[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one save.

    Seconds are those of rank 0, except ``held``, ``share`` and ``resolve``, which are those of each
    rank. ``bytes_up``, ``bytes_down``: messages to and from rank 0 in a save that plans.
    """

    layout: str
    ranks: int
    leaves: int
    tiles: int
    plan: float
    again: float
    merge: float
    encode: float
    check: float
    held: float
    share: float
    resolve: float
    manifest_bytes: int
    bytes_up: int
    bytes_down: int
    steady_up: int
    most_tiles: int

    @property
    def seconds(self) -> float:
        """Seconds of planning and manifest together."""
        return self.plan + self.merge + self.encode + self.check


class _Clock:
    """A clock of processor time."""

    def __init__(self) -> None:
        self._lap_start = time.process_time()

    def lap(self) -> float:
        """Return the seconds since the last call."""
        start, self._lap_start = self._lap_start, time.process_time()
        return self._lap_start - start


def simulate(name: str, leaves: Mapping[str, Leaf], size: int) -> Cost:
    """Replay one save of ``size`` ranks that must be planned, and the same save again."""

    @cache  # leaves are of few kinds, and their creation is not measured
    def holds(leaf: Leaf, rank: int) -> HeldShards:
        return HeldShards(leaf.dtype, leaf.shape, tuple(LAYOUTS[name](leaf, rank, size)))

    sharding._cut.cache_clear()
    clock = _Clock()
    held = [
        {path: part for path, leaf in leaves.items() if (part := holds(leaf, rank)).boxes}
        for rank in range(size)
    ]
    clock.lap()
    messages = [joint.encoded(Contribution(Holdings.of(parts), None)) for parts in held]
    each_held = clock.lap() / size
    holdings = [joint.decoded(message, Contribution).holdings for message in messages]
    plan = sharding.plan(holdings)
    shares = sharding.shares(plan, size)
    assigned = [joint.encoded(Assignment(share, None)) for share in shares]
    planning = clock.lap()
    before = {path: sharding.Before(cut.cuts, cut.owners) for path, cut in plan.items()}
    clock.lap()
    second_plan = sharding.plan(holdings, before)
    replanning = clock.lap()
    assert all(
        second_plan[path].cuts == cut.cuts and (second_plan[path].owners == cut.owners).all()
        for path, cut in plan.items()
    )
    tiles_by_rank = [joint.decoded(message, Assignment).share.tiles() for message in assigned]
    each_share = clock.lap() / size
    reports = [_encoded_report(rank, rank_tiles) for rank, rank_tiles in enumerate(tiles_by_rank)]
    clock.lap()
    decoded_reports = [joint.decoded(message, Report) for message in reports]
    manifest = joint.merged(_manifest(leaves), plan, decoded_reports)
    merging = clock.lap()
    content = manifest_content(manifest)
    encoding = clock.lap()
    decoded = documents.from_zarr_json(content, Manifest, "the manifest about to be written")
    assert decoded == manifest
    checking = clock.lap()

    @cache  # a reader opens each segment once, for the chains of its tiles
    def table_of(ref: SegmentRef) -> SegmentTable:
        rank = int(ref.id[-8:], 16)
        return _table(ref.id, tiles_by_rank[rank], decoded_reports[rank])

    # Twice: the first time makes the tables, which are decoded for the chains of the tiles anyway.
    _resolve(decoded.read_with(LaneTables(decoded, table_of)), held[size // 2])
    decoded.read_with(LaneTables(decoded, table_of))
    clock.lap()
    _resolve(decoded, held[size // 2])
    resolving = clock.lap()
    steady = [joint.encoded(SaveProposal(0, 0, True, "0" * 32, False)) for _ in range(size)]
    return Cost(
        layout=name,
        ranks=size,
        leaves=len(leaves),
        tiles=sharding.owners_of(plan).size,
        plan=planning,
        again=replanning,
        merge=merging,
        encode=encoding,
        check=checking,
        held=each_held,
        share=each_share,
        resolve=resolving,
        manifest_bytes=len(content),
        bytes_up=sum(map(len, (*messages, *reports, *steady))),
        bytes_down=sum(map(len, assigned))
        + size * len(joint.encoded(Agreement(0, False, True, True))),
        steady_up=sum(map(len, (*reports, *steady))),
        most_tiles=max(
            sum(len(numbers) for _, numbers in rank_tiles.values()) for rank_tiles in tiles_by_rank
        ),
    )


def _encoded_report(rank: int, rank_tiles: Mapping[str, tuple[Any, list[int]]]) -> bytes:
    """Encode the report of a rank whose leaves all changed at each of the last saves."""
    count = sum(len(numbers) for _, numbers in rank_tiles.values())
    random = np.random.default_rng(rank)
    refs = tuple(
        SegmentRef(f"s{seq:010d}-{rank:08x}", random.bytes(16).hex(), 10**9)
        for seq in range(_DEPTH)
    )
    return joint.encoded(Report(_DEPTH, refs if count else (), random.bytes(16 * count).hex()))


def _manifest(leaves: Mapping[str, Leaf]) -> Manifest:
    """Create rank 0's own manifest, with the tree of all leaves."""
    groups: dict[str, list[str]] = {}
    for path in leaves:
        kind, name = path.split("/")
        groups.setdefault(kind, []).append(name)
    tree = {
        "t": "dict",
        "k": [
            [kind, {"t": "dict", "k": [[n, {"t": "array"}] for n in names]}]
            for kind, names in groups.items()
        ],
    }
    header = {"nonce": "0" * 16, "time": 0.0, "writer": "benchmark", "contract": "exact"}
    return Manifest(
        format=layout.FORMAT,
        version=layout.VERSION,
        seq=_DEPTH - 1,
        step=_DEPTH,
        segments=(),
        tree=tree,
        leaves={},
        **header,
    )


def _table(
    name: str, rank_tiles: Mapping[str, tuple[Any, list[int]]], report: Report
) -> SegmentTable:
    """Return the table of one of a rank's segments, with an entry of each of its tiles."""
    names = [
        stored
        for path, (cuts, numbers) in rank_tiles.items()
        for stored in sharding.names_of(path, cuts, numbers)
    ]
    digests = [report.digests[32 * i : 32 * (i + 1)] for i in range(len(names))]
    entries = {
        stored: LeafEntry("float32", (1,), (1,), digest, 0, key=KeyframeAt("a"))
        for stored, digest in zip(names, digests, strict=True)
    }
    return SegmentTable(layout.FORMAT, layout.VERSION, name, entries, 0)


def _resolve(manifest: Manifest, held: Mapping[str, HeldShards]) -> None:
    """Find the tiles that one rank needs, their records and their segments."""
    names = []
    for path, part in held.items():
        cut = manifest.tiles.get(path)
        for box in part.boxes:
            if cut is None:
                names.append(path)
            else:
                numbers = [overlap.number for overlap in tiles.overlaps(cut.cuts, box)]
                names += sharding.names_of(path, cut.cuts, numbers)
    records = [manifest.stored[name] for name in names]
    assert len(records) == len(names)
    assert all(record.digest for record in records)
    manifest.refs_of(names)


def run(settings: Settings) -> Result:
    """Measure each layout at three numbers of ranks."""
    largest = settings.ranks or (128 if settings.quick else RANKS)
    return measure(
        sorted({max(8, largest // 16), max(8, largest // 4), max(8, largest)}),
        settings.leaves or (40 if settings.quick else 1000),
    )


def measure(sizes: Sequence[int], count: int) -> Result:
    """Measure each layout at each number of ranks, at least 8, for ``count`` leaves."""
    leaves = model(count)
    costs = [simulate(name, leaves, size) for name in LAYOUTS for size in sizes]
    first: dict[str, Unit] = {"layout": "text", "ranks": "count", "tiles": "count"}
    seconds: dict[str, Unit] = dict.fromkeys(
        ("plan", "plan again", "merge", "encode", "check", "sum"), "seconds"
    )
    size: dict[str, Unit] = {
        "manifest": "bytes",
        "to rank 0, planned": "bytes",
        "from it": "bytes",
        "to rank 0, else": "bytes",
    }
    each: dict[str, Unit] = {
        "tell": "seconds",
        "take its share": "seconds",
        "find its tiles": "seconds",
        "most tiles": "count",
    }
    tables = [
        Table(
            "on rank 0, seconds of one core",
            first | seconds,
            [
                (c.layout, c.ranks, c.tiles, c.plan, c.again, c.merge, c.encode, c.check, c.seconds)
                for c in costs
            ],
        ),
        Table(
            "bytes of all ranks together; messages: 2 from each rank if the plan is unchanged since"
            " the save before, else 3",
            {k: first[k] for k in ("layout", "ranks")} | size,
            [
                (c.layout, c.ranks, c.manifest_bytes, c.bytes_up, c.bytes_down, c.steady_up)
                for c in costs
            ],
        ),
        Table(
            "on each rank",
            {k: first[k] for k in ("layout", "ranks")} | each,
            [(c.layout, c.ranks, c.held, c.share, c.resolve, c.most_tiles) for c in costs],
        ),
    ]
    rows = [_growth(name, [c for c in costs if c.layout == name]) for name in LAYOUTS]
    units: dict[str, Unit] = {"layout": "text"} | dict.fromkeys(
        ("tiles", "sum", "manifest", "tell", "find its tiles"), "number"
    )
    tables.append(
        Table(
            f"growth from {sizes[0]} to {sizes[-1]} ranks: exponent of the number of ranks (1:"
            " linear)",
            units,
            rows,
        )
    )
    largest = [c for c in costs if c.ranks == max(sizes)]
    worst = max(largest, key=lambda c: c.seconds)
    heaviest = max(c.manifest_bytes for c in largest)
    case = f"of {worst.ranks} ranks and {len(leaves)} leaves"
    return Result(
        "scale",
        f"the metadata of one save of a 70 B model (its first {len(leaves)} leaves), replayed in"
        " one process: no data, no network",
        tables,
        [
            Figure(
                f"planning and manifest {case}, slowest layout",
                worst.seconds,
                _LIMIT_SECONDS,
                "seconds",
            ),
            Figure(f"manifest {case}, largest", heaviest, _LIMIT_BYTES, "bytes"),
        ],
    )


def _growth(name: str, costs: Sequence[Cost]) -> tuple[str | float, ...]:
    small, large = costs[0], costs[-1]
    ratio = math.log(large.ranks / small.ranks)

    def exponent(a: float, b: float) -> float:
        return math.log(max(b, 1e-9) / max(a, 1e-9)) / ratio

    pairs = [(c.tiles, c.seconds, c.manifest_bytes, c.held, c.resolve) for c in (small, large)]
    return (name, *(exponent(a, b) for a, b in zip(*pairs, strict=True)))
