"""Arithmetic on boxes and cuts, compared with NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck.leaf import tiles
from deltacheck.store.manifest import Tiles

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def cut_shapes(draw: st.DrawFn) -> tiles.Cuts:
    shape = draw(shapes)
    return tuple(
        (0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=4))), size)
        if size > 1
        else (0, 1)
        for size in shape
    )


@st.composite
def cut_shapes_and_boxes(draw: st.DrawFn) -> tuple[tiles.Cuts, tiles.Box]:
    cuts = draw(cut_shapes())
    edges = [
        sorted(draw(st.tuples(st.integers(0, along[-1]), st.integers(0, along[-1]))))
        for along in cuts
    ]
    return cuts, tuple(slice(a, b) for a, b in edges)


@given(cut_shapes())
def test_the_tiles_of_a_leaf_cover_it_once_and_have_names_of_their_own(cuts: tiles.Cuts) -> None:
    shape = tiles.shape_of(cuts)
    covered = np.zeros(shape, int)
    names = []
    for number in range(tiles.count(cuts)):
        box = tiles.box(cuts, number)
        covered[box] += 1
        names.append(tiles.name("a/b", box))
        assert tiles.numbered(cuts, names[-1]) == number
        assert tiles.leaf_of(names[-1]) == "a/b"
        assert tiles.is_name(names[-1])
    assert (covered == 1).all()
    assert len(set(names)) == len(names)
    assert tiles.is_possible(cuts)
    digests = "".join(f"{number:032x}" for number in range(len(names)))
    of = Tiles("float32", cuts, digests, tuple(range(len(names))))
    assert of.names("a/b") == names
    assert of.records() == [of.record(number) for number in range(len(names))]
    assert [record.lane for record in of.records()] == list(range(len(names)))


@given(cut_shapes_and_boxes())
def test_overlaps_put_every_element_of_a_box_together_from_its_tiles(
    given_: tuple[tiles.Cuts, tiles.Box],
) -> None:
    cuts, box = given_
    leaf = np.arange(math.prod(tiles.shape_of(cuts))).reshape(tiles.shape_of(cuts))
    out = np.full(leaf[box].shape, -1)
    numbers = []
    for one in tiles.overlaps(cuts, box):
        part = leaf[tiles.box(cuts, one.number)][one.in_tile]
        assert part.size
        assert (out[one.in_box] == -1).all()
        out[one.in_box] = part
        numbers.append(one.number)
    assert np.array_equal(out, leaf[box])
    assert numbers == sorted(numbers)


@given(shapes, st.data())
def test_the_boxes_of_a_range_are_its_elements_in_order_and_few(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    leaf = np.arange(size).reshape(shape)
    boxes = list(tiles.boxes_of_range(shape, first, stop))
    found = np.concatenate([np.zeros(0, int), *[leaf[box].reshape(-1) for box in boxes]])
    assert np.array_equal(found, np.arange(first, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize(
    "cuts", [(), ((0,),), ((1, 2),), ((0, 2, 2),), ((0, 3, 2),), ((0, 4), (0,)), ((0, 0),)], ids=str
)
def test_impossible_cuts_are_told(cuts: tiles.Cuts) -> None:
    assert not tiles.is_possible(cuts)


@pytest.mark.parametrize(
    "name",
    [
        "w%@",
        "w%@0",
        "w%@0,0,0",
        "w%@0,3",
        "w%@00,0",
        "w%@-1,0",
        "w%@4,0",
        "w%@\u0660,0",
        "w%@" + "9" * 5000 + ",0",
    ],
)
def test_a_name_of_no_tile_is_none(name: str) -> None:
    cuts = ((0, 2, 4), (0, 6))
    with pytest.raises(LookupError):
        tiles.numbered(cuts, name)
    assert [tiles.numbered(cuts, f"w%@{a},{b}") for a, b in itertools.product((0, 2), (0,))] == [
        0,
        1,
    ]


def test_an_escaped_name_is_that_of_no_tile() -> None:
    assert tiles.leaf_of("model/w%25") == "model/w%25"
