"""What a step of many ranks costs beside its data: the plan, the reports, the manifest. Metadata
only, replayed for every rank of a 70 B model.
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
from deltacheck.leaf.sharding import Held, Holdings
from deltacheck.leaf.tiles import Box
from deltacheck.save import joint
from deltacheck.save.joint import Assigned, Go, Hello, Report, Told
from deltacheck.store import documents, layout
from deltacheck.store.documents import manifest_content
from deltacheck.store.manifest import Manifest, SegmentRef

RANKS = 1024
_LIMIT_SECONDS, _LIMIT_BYTES = 5.0, 64 << 20
_DEPTH = 8  # saves whose segments a step stands on


class Leaf(NamedTuple):
    """``axis``: that tensor parallelism cuts; ``stage``: of eight in a row, by which a pipeline
    divides.
    """

    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    stage: int


def model(
    leaves: int, layers: int = 80, width: int = 8192, inner: int = 28672, heads_kv: int = 1024
) -> dict[str, Leaf]:
    """A decoder of 70 B parameters with its float32 master weights and Adam's moments, cut down or
    repeated to ``leaves`` leaves.
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
        f"layers.{n}.{name}": (*of, n) for n in range(layers) for name, of in blocks.items()
    }
    kinds = {
        "model": "bfloat16",
        "master": "float32",
        "exp_avg": "float32",
        "exp_avg_sq": "float32",
    }
    every = [
        (f"{kind}/{name}", Leaf(dtype, *of))
        for kind, dtype in kinds.items()
        for name, of in parameters.items()
    ]
    return {path: leaf._replace(stage=leaf.stage * 8 // layers) for path, leaf in every[:leaves]}


# What a rank holds: path, leaf, rank, ranks -> boxes.
Layout = Callable[[Leaf, int, int], Sequence[Box]]


def fsdp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Every leaf in equal parts of its first axis, over all ranks."""
    return [_cut(sharding.whole(leaf.shape), 0, rank, size)]


def hsdp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """The same within groups of 64 ranks, that hold the same."""
    return fsdp(leaf, rank % min(64, size), min(64, size))


def tp_fsdp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Tensor parallel over 8 ranks, the parts in equal parts of the first axis over the others."""
    box = sharding.whole(leaf.shape)
    if leaf.axis is not None:
        box = _cut(box, leaf.axis, rank % 8, 8)
    return [_cut(box, 0, rank // 8, size // 8)]


def pp(leaf: Leaf, rank: int, size: int) -> Sequence[Box]:
    """Pipeline over 8 stages, in each the leaves in equal parts over its ranks."""
    return fsdp(leaf, rank // 8, size // 8) if leaf.stage == rank % 8 else []


LAYOUTS: Mapping[str, Layout] = {"FSDP": fsdp, "HSDP": hsdp, "TP x FSDP": tp_fsdp, "PP x FSDP": pp}


def _cut(box: Box, axis: int, part: int, parts: int) -> Box:
    """As ``torch.chunk`` cuts: equal parts, of which the last ones are smaller, or empty."""
    start, stop = box[axis].start, box[axis].stop
    size = -(-(stop - start) // parts)
    at = slice(min(start + part * size, stop), min(start + (part + 1) * size, stop))
    return (*box[:axis], at, *box[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one save. Seconds on rank 0 but where it says each. ``bytes_up``, ``bytes_down``: messages
    to and from rank 0 in a save that plans.
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
        """Manifest and planning together."""
        return self.plan + self.merge + self.encode + self.check


class _Clock:
    def __init__(self) -> None:
        self._began = time.process_time()

    def lap(self) -> float:
        began, self._began = self._began, time.process_time()
        return self._began - began


def simulate(name: str, leaves: Mapping[str, Leaf], size: int) -> Cost:
    """Replay one save of ``size`` ranks that has to be planned, and the same save again."""

    @cache  # leaves are of few kinds, and what is measured is not how this is made
    def holds(leaf: Leaf, rank: int) -> Held:
        return Held(leaf.dtype, leaf.shape, tuple(LAYOUTS[name](leaf, rank, size)))

    sharding._cut.cache_clear()
    clock = _Clock()
    held = [
        {path: one for path, leaf in leaves.items() if (one := holds(leaf, rank)).boxes}
        for rank in range(size)
    ]
    clock.lap()
    told = [joint.encoded(Told(Holdings.of(one), None)) for one in held]
    each_held = clock.lap() / size
    holdings = [joint.decoded(one, Told).holdings for one in told]
    plan = sharding.plan(holdings)
    shares = sharding.shares(plan, size)
    assigned = [joint.encoded(Assigned(share, None)) for share in shares]
    planning = clock.lap()
    before = {path: sharding.Before(one.cuts, one.owners) for path, one in plan.items()}
    clock.lap()
    again = sharding.plan(holdings, before)
    replanning = clock.lap()
    assert all(
        again[path].cuts == one.cuts and (again[path].owners == one.owners).all()
        for path, one in plan.items()
    )
    mine = [joint.decoded(one, Assigned).share.tiles() for one in assigned]
    each_share = clock.lap() / size
    reports = [_encoded_report(rank, tiles_of) for rank, tiles_of in enumerate(mine)]
    clock.lap()
    manifest = joint.merged(
        _manifest(leaves), plan, [joint.decoded(one, Report) for one in reports]
    )
    merging = clock.lap()
    content = manifest_content(manifest)
    encoding = clock.lap()
    found = documents.from_zarr_json(content, Manifest, "the manifest about to be written")
    assert found == manifest
    checking = clock.lap()
    _resolve(found, held[size // 2])
    resolving = clock.lap()
    steady = [joint.encoded(Hello(0, 0, True, "0" * 32, False)) for _ in range(size)]
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
        bytes_up=sum(map(len, (*told, *reports, *steady))),
        bytes_down=sum(map(len, assigned)) + size * len(joint.encoded(Go(0, False, True, True))),
        steady_up=sum(map(len, (*reports, *steady))),
        most_tiles=max(sum(len(numbers) for _, numbers in one.values()) for one in mine),
    )


def _encoded_report(rank: int, mine: Mapping[str, tuple[Any, list[int]]]) -> bytes:
    """What a rank reports that has changed everything at each of the last saves."""
    count = sum(len(numbers) for _, numbers in mine.values())
    random = np.random.default_rng(rank)
    refs = tuple(
        SegmentRef(f"s{seq:010d}-{rank:08x}", random.bytes(16).hex(), 10**9)
        for seq in range(_DEPTH)
    )
    return joint.encoded(Report(_DEPTH, refs if count else (), random.bytes(16 * count).hex()))


def _manifest(leaves: Mapping[str, Leaf]) -> Manifest:
    """Rank 0's own, with the tree of all."""
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
    about = {"nonce": "0" * 16, "time": 0.0, "writer": "benchmark", "contract": "exact"}
    return Manifest(
        format=layout.FORMAT,
        version=layout.VERSION,
        seq=_DEPTH - 1,
        step=_DEPTH,
        segments=(),
        tree=tree,
        leaves={},
        **about,
    )


def _resolve(manifest: Manifest, held: Mapping[str, Held]) -> None:
    """What one rank does with a manifest before it reads: which tiles it needs, what they are, in
    which segments.
    """
    names = []
    for path, one in held.items():
        cut = manifest.tiles.get(path)
        for box in one.boxes:
            numbers = [] if cut is None else [o.number for o in tiles.overlaps(cut.cuts, box)]
            names += [path] if cut is None else sharding.names_of(path, cut.cuts, numbers)
    records = [manifest.stored[name] for name in names]
    assert len(records) == len(names)
    manifest.refs_of(names)


def run(settings: Settings) -> Result:
    most = settings.ranks or (128 if settings.quick else RANKS)
    return measure(
        sorted({max(8, most // 16), max(8, most // 4), max(8, most)}),
        settings.leaves or (40 if settings.quick else 1000),
    )


def measure(sizes: Sequence[int], count: int) -> Result:
    """Each layout at each number of ranks, 8 at least; of a model that has ``count`` leaves."""
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
            "bytes of all ranks together; messages: 2 from each rank where nothing has changed"
            " since the save before, 3 where it has",
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
    what = f"of {worst.ranks} ranks and {len(leaves)} leaves"
    return Result(
        "scale",
        f"the metadata of one save of a 70 B model (its first {len(leaves)} leaves), replayed in"
        " one process: no data, no network",
        tables,
        [
            Figure(
                f"planning and manifest {what}, slowest layout",
                worst.seconds,
                _LIMIT_SECONDS,
                "seconds",
            ),
            Figure(f"manifest {what}, largest", heaviest, _LIMIT_BYTES, "bytes"),
        ],
    )


def _growth(name: str, costs: Sequence[Cost]) -> tuple[str | float, ...]:
    small, large = costs[0], costs[-1]
    ratio = math.log(large.ranks / small.ranks)

    def exponent(a: float, b: float) -> float:
        return math.log(max(b, 1e-9) / max(a, 1e-9)) / ratio

    pairs = [(c.tiles, c.seconds, c.manifest_bytes, c.held, c.resolve) for c in (small, large)]
    return (name, *(exponent(a, b) for a, b in zip(*pairs, strict=True)))
