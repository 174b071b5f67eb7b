"""Statistics of (current, base): equal to a plain telling in NumPy, bit for bit, on any processor
and number of threads.
"""

import subprocess
import sys
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import _native
from deltacheck.codec import TILE_BYTES
from deltacheck.codec.statistics import NUMBERS, Statistics, statistics
from deltacheck.errors import UnsupportedLeaf
from tests.contracts.codec import moved, words

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "complex64": np.dtype(np.complex64),
}
SPAN = 64 * TILE_BYTES


# --- the plain telling ----------------------------------------------------------------------------


def in_order(terms):
    """The sum of one chunk: lanes of a tile, added in halves; tiles of a span; spans. ``terms``:
    lists of spans of tiles.
    """
    total = np.float64(0)
    for span in terms:
        partial = np.float64(0)
        for tile in span:
            padded = np.concatenate([tile, np.zeros(-tile.size % 32)]).reshape(-1, 32)
            lanes = np.add.accumulate(padded, axis=0)[-1]
            while lanes.size > 1:
                lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
            partial = partial + lanes[0]
        total = total + partial
    return total


def cut(terms, item):
    """Spans of tiles."""
    spans = [terms[start : start + SPAN // item] for start in range(0, terms.size, SPAN // item)]
    return [
        [
            span[start : start + TILE_BYTES // item]
            for start in range(0, span.size, TILE_BYTES // item)
        ]
        for span in spans
    ]


@np.errstate(over="ignore", invalid="ignore")
def told_plainly(current, base, bounds, dtype):
    rows = []
    for low, high in pairwise(bounds):
        bits_now, bits_before = current[low:high], base[low:high]
        changed = np.count_nonzero(bits_now != bits_before)
        if dtype not in NUMBERS:
            rows.append((changed, 0, 0.0, 0.0, 0.0))
            continue
        computed = np.float64 if dtype == "float64" else np.float32
        now, before = (
            bits.view(DTYPES[dtype]).astype(computed) for bits in (bits_now, bits_before)
        )
        both = np.isfinite(now) & np.isfinite(before)
        before_kept = np.where(both, before, 0)
        d = (np.where(both, now, 0) - before_kept).astype(np.float64)
        b = before_kept.astype(np.float64)
        sums = [in_order(cut(x * x, bits_now.itemsize)) for x in (d, b)]
        rows.append((changed, np.count_nonzero(~np.isfinite(now)), *sums, np.abs(d).max(initial=0)))
    columns = np.array(rows, object).reshape(-1, 5).T
    return Statistics(
        *(column.astype(np.uint64 if k < 2 else np.float64) for k, column in enumerate(columns))
    )


def same(one, other):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)
    )


# --- what must hold -------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """Words of any kind, cut at the edges of tiles, blocks and groups of lanes; infinities, NaNs,
    subnormals and zeros of both signs.
    """
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    w = min(DTYPES[dtype].itemsize, 8)
    tile = TILE_BYTES // w
    length = draw(
        st.one_of(
            st.integers(0, 200),
            st.sampled_from([2048 // w - 1, 2048 // w + 33, tile, tile + 1, 2 * tile + 65]),
        )
    )
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["values", "noise"]))
    noise = np.frombuffer(random.bytes(length * w), f"<u{w}")
    base = words(length, w, seed) if kind == "values" else noise.copy()
    if dtype == "float16" and kind == "values":
        base = random.standard_normal(length).astype(np.float16).view(np.uint16)
    current = moved(
        base,
        draw(st.sampled_from([0.0, 0.01, 1.0])),
        draw(st.sampled_from([1, 100, 2 ** (8 * w - 1) - 1])),
        seed,
    )
    exponent = {
        "float16": 0x7C00,
        "bfloat16": 0x7F80,
        "float32": 0x7F800000,
        "float64": 0x7FF << 52,
    }.get(dtype)
    if exponent and length:
        for array in (current, base):
            for at in draw(st.lists(st.integers(0, length - 1), max_size=2)):
                array[at] = draw(
                    st.sampled_from(
                        [exponent, exponent + 1, exponent - 1, 1, 0, (1 << (8 * w - 1))]
                    )
                )
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    return dtype, current, base, np.array([0, *cuts, length], np.uint64)


@given(runs(), st.sampled_from(_native.instruction_sets()), st.integers(1, 3))
def test_any_run_has_the_bits_of_the_plain_telling(run, kernels, threads):
    dtype, current, base, bounds = run
    _native.use_instruction_set(kernels)
    _native.set_threads(threads)
    assert same(
        statistics(current, base, bounds, dtype), told_plainly(current, base, bounds, dtype)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_chunk_of_several_spans_has_the_same_bits_on_every_processor_and_number_of_threads(dtype):
    w = DTYPES[dtype].itemsize
    base = words((3 * SPAN + 5 * TILE_BYTES) // w + 7, w)
    current = moved(base, 0.5, 1000)
    bounds = np.array([0, 11, base.size], np.uint64)
    expected = told_plainly(current, base, bounds, dtype)
    assert expected.squared_difference[1] > 0
    for kernels in _native.instruction_sets():
        for threads in (1, 3):
            _native.use_instruction_set(kernels)
            _native.set_threads(threads)
            assert same(statistics(current, base, bounds, dtype), expected)


@pytest.mark.parametrize("kernels", _native.instruction_sets())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_of_16_bits_is_read_as_numpy_reads_it(dtype, kernels):
    _native.use_instruction_set(kernels)
    every = np.arange(65536, dtype=np.uint16)
    zeros = np.zeros_like(every)
    each = np.arange(every.size + 1, dtype=np.uint64)
    found = statistics(every, zeros, each, dtype)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        values = every.view(DTYPES[dtype]).astype(np.float64)
    finite = np.isfinite(values)
    assert np.array_equal(found.largest_difference, np.where(finite, np.abs(values), 0))
    assert np.array_equal(found.nonfinite, ~finite)
    # Not only one by one: in whole vectors, too.
    in_order_of_bits = np.where(finite, every, 0).astype(np.uint16)
    whole = np.array([0, every.size], np.uint64)
    assert same(
        statistics(in_order_of_bits, zeros, whole, dtype),
        told_plainly(in_order_of_bits, zeros, whole, dtype),
    )


def test_words_at_any_address_are_read_as_such():
    room = np.zeros(4 * 3000 + 1, np.uint8)
    current = room[1:]
    current[:] = words(3000, 4).view(np.uint8)
    base = moved(words(3000, 4), 0.3, 50)
    bounds = np.array([0, 1000, 3000], np.uint64)
    aligned = current.copy().view(np.uint32)
    assert same(
        statistics(current, base, bounds, "float32"), told_plainly(aligned, base, bounds, "float32")
    )


def test_a_pair_that_is_not_finite_is_counted_and_left_out():
    base = np.array([1, np.inf, 3, np.nan], np.float32)
    current = np.array([np.nan, 2, 5, -np.inf], np.float32)
    found = statistics(current, base, np.array([0, 4], np.uint64), "float32")
    assert [column.item() for column in found] == [4, 2, 4.0, 9.0, 2.0]


def test_a_difference_that_overflows_is_infinite_and_no_nan():
    most = np.finfo(np.float32).max
    found = statistics(
        np.full(64, most), np.full(64, -most), np.array([0, 64], np.uint64), "float32"
    )
    assert np.isinf(found.squared_difference[0])
    assert np.isinf(found.largest_difference[0])
    assert found.nonfinite[0] == 0
    assert found.squared_base[0] == 64 * float(most) ** 2


def test_subnormals_count_also_on_a_thread_that_flushes_them():
    """XLA and torch let a thread treat subnormals as zero; the bits must not depend on who
    calls.
    """
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        tiny = np.full(100, 5, np.uint32)
        found = statistics(tiny, np.zeros_like(tiny), np.array([0, 100], np.uint64), "float32")
    finally:
        torch.set_flush_denormal(False)
    assert found.largest_difference[0] == 5 * 2.0**-149
    assert found.squared_difference[0] == 100 * (5 * 2.0**-149) ** 2


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"base": np.zeros(3, np.float32)}, ValueError, "base has 12 bytes, current has 16"),
        ({"bounds": np.array([0, 3], np.uint64)}, ValueError, "bounds end at 3 words"),
        ({"bounds": np.array([0, 2, 1, 4], np.uint64)}, ValueError, "ascend"),
        (
            {"current": np.zeros((4, 2), np.float32)[:, 0]},
            ValueError,
            "current must be a C-contiguous",
        ),
        ({"dtype": "float31"}, UnsupportedLeaf, "float31"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, error, says):
    arguments = {
        "current": np.zeros(4, np.float32),
        "base": np.zeros(4, np.float32),
        "bounds": np.array([0, 4], np.uint64),
        "dtype": "float32",
    } | change
    with pytest.raises(error, match=says):
        statistics(**arguments)


def test_the_extension_refuses_what_would_be_read_out_of_bounds():
    eight = np.zeros(8, np.uint8)
    whole = np.array([0, 2], np.uint64)
    for current, base, bounds, elements in (
        (eight, eight[:4], whole, "float32"),
        (eight, eight, np.array([0, 3], np.uint64), "float32"),
        (eight, eight, whole, "float31"),
    ):
        with pytest.raises(ValueError, match=r"size|bounds|float31"):
            _native.statistics(current, base, bounds, elements)


def test_no_chunks_give_no_rows():
    empty = np.zeros(0, np.float32)
    assert [
        column.shape for column in statistics(empty, empty, np.zeros(1, np.uint64), "float32")
    ] == [(0,)] * 5
    assert [
        column.tolist() for column in statistics(empty, empty, np.zeros(2, np.uint64), "float32")
    ] == [[0]] * 5


def test_importing_needs_no_framework():
    code = (
        "import sys, deltacheck.codec.statistics, deltacheck.codec.lossy.lattice;"
        " print({'torch', 'jax'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
