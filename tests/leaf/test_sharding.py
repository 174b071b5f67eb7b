"""Distribution of tiles over ranks: each element once, balanced, and stable between plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacheck import errors
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.sharding import Before, HeldShards, Holdings, Planned
from deltacheck.leaf.tiles import Box

MIB = 1 << 20


def box(*edges: tuple[int, int]) -> Box:
    return tuple(slice(a, b) for a, b in edges)


def planned(
    held: Sequence[dict[str, HeldShards]], before: dict[str, Before] | None = None
) -> dict[str, Planned]:
    holdings = [Holdings.of(one) for one in held]
    assert [one.held() for one in holdings] == list(held)
    return sharding.plan(holdings, before)


def boxes_of(one: Planned) -> list[Box]:
    return (
        [tiles.whole(one.shape)]
        if one.cuts is None
        else [tiles.box(one.cuts, n) for n in range(tiles.count(one.cuts))]
    )


def loads(plan: dict[str, Planned], size: int) -> np.ndarray:
    found = np.zeros(size, np.int64)
    for one in plan.values():
        for number, of in enumerate(boxes_of(one)):
            found[one.owners[number]] += (
                math.prod(s.stop - s.start for s in of) * dtype_named(one.dtype).item_bytes
            )
    return found


def assert_right(plan: dict[str, Planned], held: Sequence[dict[str, HeldShards]]) -> None:
    """Assert that each element is written once by a rank that holds it, and shares fit the plan."""
    for path, one in plan.items():
        covered = np.zeros(one.shape, int)
        for number, of in enumerate(boxes_of(one)):
            covered[of] += 1
            mine = held[one.owners[number]][path].boxes
            assert 0 in one.shape or sharding.find(of, mine) is not None
        assert (covered == 1).all()
    shares = [share.tiles() for share in sharding.shares(plan, len(held))]
    for path, one in plan.items():
        for rank, share in enumerate(shares):
            cuts, numbers = share.get(path, (one.cuts, []))
            assert cuts == one.cuts
            assert numbers == np.flatnonzero(one.owners == rank).tolist()


@st.composite
def holdings(draw: st.DrawFn) -> list[dict[str, HeldShards]]:
    """Draw grids of ranks that hold leaves cut along some axes and replicated along others."""
    grid = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    size = math.prod(grid)
    held: list[dict[str, HeldShards]] = [{} for _ in range(size)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        axes = [
            draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) if shape else None
            for _ in grid
        ]
        for rank in range(size):
            of = [slice(0, s) for s in shape]
            for axis, at, parts in zip(axes, np.unravel_index(rank, grid), grid, strict=True):
                if axis is not None:
                    start, width = of[axis].start, of[axis].stop - of[axis].start
                    part = -(-width // parts)
                    of[axis] = slice(
                        start + min(int(at) * part, width), start + min((int(at) + 1) * part, width)
                    )
            held[rank][f"leaf{number}"] = HeldShards(draw(st.just("float32")), shape, (tuple(of),))
    return held


@given(holdings(), st.integers(0, 1 << 30))
@settings(max_examples=25)
def test_every_element_has_one_writer_whatever_the_order_of_the_leaves(
    held: list[dict[str, HeldShards]], seed: int
) -> None:
    plan = planned(held)
    assert_right(plan, held)
    mixed = [
        dict(random.Random(seed + rank).sample(list(one.items()), len(one)))
        for rank, one in enumerate(held)
    ]
    again = planned(mixed)
    assert list(again) == list(plan) == sorted(plan)
    assert all(
        again[p].cuts == plan[p].cuts and (again[p].owners == plan[p].owners).all() for p in plan
    )


@given(holdings(), holdings())
@settings(max_examples=25)
def test_a_plan_after_another_is_right_too_and_the_same_where_nothing_changed(
    held: list[dict[str, HeldShards]], other: list[dict[str, HeldShards]]
) -> None:
    first = planned(held)
    before = {path: Before(one.cuts, one.owners) for path, one in first.items()}
    same = planned(held, before)
    assert all(
        same[p].cuts == first[p].cuts and (same[p].owners == first[p].owners).all() for p in first
    )
    assert_right(planned(other, before), other)


@pytest.mark.parametrize("seed", range(4))
def test_replicated_leaves_are_spread_evenly(seed: int) -> None:
    rng, size = random.Random(seed), 5
    shapes = {f"w{n}": (rng.randrange(1, 4000), rng.choice((64, 1024, 8192))) for n in range(40)}
    held = [
        {
            path: HeldShards("float32", shape, (tiles.whole(shape),))
            for path, shape in shapes.items()
        }
    ] * size
    plan = planned(held)
    assert_right({p: one for p, one in plan.items() if math.prod(one.shape) < 100_000}, held)
    found = loads(plan, size)
    tile = max(
        math.prod(s.stop - s.start for s in of) * 4 for one in plan.values() for of in boxes_of(one)
    )
    assert found.max() <= 4 / 3 * found.mean() + tile


def test_what_a_rank_must_write_alone_counts_before_what_it_shares() -> None:
    big = (8 * MIB // 4,)
    mine = {"own": HeldShards("float32", big, (tiles.whole(big),))}
    both = {f"shared{n}": HeldShards("float32", (MIB,), (tiles.whole((MIB,)),)) for n in range(2)}
    plan = planned([mine | both, both])
    assert [plan[f"shared{n}"].owners.tolist() for n in range(2)] == [[1], [1]]


def test_a_small_leaf_that_all_hold_stays_whole_and_a_large_one_is_shared() -> None:
    held = [
        {
            "s": HeldShards("float32", (100, 100), (tiles.whole((100, 100)),)),
            "l": HeldShards("uint8", (64, MIB), (tiles.whole((64, MIB)),)),
        }
    ] * 4
    plan = planned(held)
    assert plan["s"].cuts is None
    assert plan["l"].cuts == ((0, 16, 32, 48, 64), (0, MIB))
    assert sorted(plan["l"].owners.tolist()) == [0, 1, 2, 3]


def rows(count: int, size: int, path: str = "w") -> list[dict[str, HeldShards]]:
    edges = [count * rank // size for rank in range(size + 1)]
    return [
        {path: HeldShards("float32", (count, 8), (box((a, b), (0, 8)),))}
        for a, b in itertools.pairwise(edges)
    ]


def test_old_cuts_stay_where_the_new_shards_are_made_of_them() -> None:
    four = planned(rows(16, 4))["w"]
    two = planned(rows(16, 2), {"w": Before(four.cuts)})["w"]
    assert two.cuts == four.cuts
    assert two.owners.tolist() == [0, 0, 1, 1]
    one = planned(rows(16, 1), {"w": Before(four.cuts)})["w"]
    assert one.cuts == four.cuts


def test_old_tiles_that_no_new_shard_cuts_stay_beside_the_new_ones() -> None:
    four = planned(rows(12, 4))["w"]  # cut at 3, 6, 9
    three = planned(rows(12, 3), {"w": Before(four.cuts)})["w"]  # 4, 8: 0-3 and 9-12 stay
    assert three.cuts == ((0, 3, 4, 6, 8, 9, 12), (0, 8))
    assert_right({"w": three}, rows(12, 3))


def test_old_cuts_go_where_keeping_them_would_make_too_many_tiles() -> None:
    fine = tuple(range(0, 1001, 2))
    found = planned(rows(1000, 3), {"w": Before((fine, (0, 8)))})["w"]
    assert found.cuts == ((0, 333, 666, 1000), (0, 8))


def test_old_cuts_of_another_shape_mean_nothing() -> None:
    assert planned(rows(12, 2), {"w": Before(((0, 5, 10), (0, 8)))})["w"].cuts == (
        (0, 6, 12),
        (0, 8),
    )


def test_a_writer_stays_while_it_holds_its_tile() -> None:
    held = [{f"w{n}": HeldShards("float32", (64,), (tiles.whole((64,)),)) for n in range(6)}] * 3
    before = {f"w{n}": Before(None, np.array([2])) for n in range(6)}
    assert {int(one.owners[0]) for one in planned(held, before).values()} == {2}
    gone = planned(held[:2], before)
    assert {int(one.owners[0]) for one in gone.values()} == {0, 1}


def test_an_empty_shard_and_an_empty_leaf_are_somebodys() -> None:
    held = rows(2, 4)  # ranks 0 and 2 have nothing
    assert planned(held)["w"].owners.tolist() == [1, 3]
    none = [
        {
            "e": HeldShards("float32", (0, 4), (tiles.whole((0, 4)),)),
            "s": HeldShards("float32", (), ((),)),
        }
    ] * 2
    plan = planned(none)
    assert (plan["e"].cuts, plan["s"].cuts) == (None, None)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([rows(8, 2)[0], {}], r"leaf 'w' of shape \[8, 8\]: no rank holds \[4:8, 0:8\] of it"),
        (
            [
                {"w": HeldShards("float32", (8,), (box((0, 8)),))},
                {"w": HeldShards("bfloat16", (8,), (box((0, 8)),))},
            ],
            r"leaf 'w' is float32\[8\] on rank 0, bfloat16\[8\] on rank 1",
        ),
        (
            [
                {"w": HeldShards("float32", (8,), (box((0, 8)),))},
                {"w": HeldShards("float32", (9,), (box((0, 8)),))},
            ],
            r"leaf 'w' is float32\[8\] on rank 0, float32\[9\] on rank 1",
        ),
        (
            [
                {"w": HeldShards("float32", (8,), (box((0, 4)),))},
                {"w": HeldShards("float32", (8,), (box((4, 9)),))},
            ],
            r"leaf 'w' of shape \[8\]: the shard of rank 1 is \[4:9\], which is not in it",
        ),
        (
            [
                {"w": HeldShards("float32", (8, 8), (box((0, 8), (0, 4)),))},
                {"w": HeldShards("float32", (8, 8), (box((0, 4), (4, 8)),))},
            ],
            r"no rank holds \[4:8, 4:8\] of it",
        ),
        ([{"w": HeldShards("float32", (8,), (box((-1, 8)),))}], "rank 0 is.*not in it"),
        ([{"w": HeldShards("float32", (8,), (box((5, 3)),))}], "rank 0 is.*not in it"),
    ],
)
def test_what_does_not_fit_together_is_refused_naming_leaf_and_ranks(
    held: list[dict[str, HeldShards]], message: str
) -> None:
    with pytest.raises(errors.RankFailed, match=message):
        planned(held)
