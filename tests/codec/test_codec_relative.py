"""Lattice codes relative to a bfloat16 weight.

The bound, the codes of a weight that moves, and equal bits on every processor.
"""

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck.codec.lossy import reference_codes

_native = pytest.importorskip("deltacheck._native")
from deltacheck.codec.lossy import lattice, relative
from deltacheck.codec.lossy.lattice import LEAST_STEP, MOST_STEP

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

MASK = 2**64 - 1
MOST = float(np.finfo(np.float32).max)


def phase(number):
    z = number & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return ((z ^ z >> 31) >> 40) * 2.0**-24


def float_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def element(x, weight, step, number, most):
    """The code and the value of one element by the text of the format, in Python's own numbers.

    ``None`` if there is no code.
    """
    if weight & 0x7F80 == 0x7F80 or not math.isfinite(x):
        return None
    center = float_of(weight << 16)
    width = 2.0 ** (max(weight >> 7 & 0xFF, 1) - 134)
    if width <= step:
        return 0, center
    count = math.ceil(width / step) + 1
    if count > most:
        return None
    u = phase(number)
    lowest = math.floor((center - width / 2) / step + u)
    q = min(max(math.floor(x / step + u), lowest), lowest + count - 1)
    middle = np.array([min(max((q - u + 0.5) * step, -MOST), MOST)]).astype(np.float32)
    moved = reference_codes.in_cell(middle, np.array([weight], np.uint16))
    return q % count, float(moved[0])


def rounded(x):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(ml_dtypes.bfloat16)


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32)


def lists_of_floats(**options):
    return st.lists(st.floats(width=32, **options), min_size=1, max_size=70)


def steps():
    return st.one_of(
        st.floats(LEAST_STEP, MOST_STEP),
        st.floats(-140, 120).map(lambda e: 2.0**e),
        st.sampled_from([LEAST_STEP, 2.0**-126, 5e-5, 1.0, MOST_STEP]),
    )


kernels = pytest.mark.parametrize("kernels", _native.instruction_sets())


@given(
    lists_of_floats(),
    st.lists(st.integers(0, 65535), min_size=70, max_size=70),
    st.integers(-7, 17).map(lambda e: 2.0**e) | st.floats(0.01, 1e5),
    st.booleans(),
    st.integers(0, MASK),
    st.sampled_from(_native.instruction_sets()),
    st.sampled_from([np.uint8, np.uint16]),
)
def test_codes_and_values_are_those_of_the_definition(
    values, weights, ratio, is_cast, seed, kernels, dtype
):
    _native.use_instruction_set(kernels)
    x = np.array(values, np.float32)
    weight_bits = rounded(x).view(np.uint16) if is_cast else np.array(weights[: x.size], np.uint16)
    width = 2.0 ** (max(int(weight_bits[0]) >> 7 & 0xFF, 1) - 134)
    step = min(max(width / ratio, LEAST_STEP), MOST_STEP)
    coded = relative.codes(x, step, seed, weights=weight_bits, out=np.empty(x.size, dtype))
    expected = [
        element(float(value), int(weight), step, seed + i, 256 ** np.dtype(dtype).itemsize)
        for i, (value, weight) in enumerate(zip(x, weight_bits, strict=True))
    ]
    has_code = np.array([pair is not None for pair in expected])
    assert coded.codes.tolist() == [0 if pair is None else pair[0] for pair in expected]
    assert coded.refused == np.count_nonzero(~has_code)
    errors = [
        abs(pair[1] - float(value))
        for pair, value in zip(expected, x, strict=True)
        if pair is not None
    ]
    assert coded.largest_error == max(errors, default=0.0)
    for number in np.flatnonzero(has_code)[:5]:  # an element has the value that it has on its own
        place = slice(number, number + 1)
        single = relative.values(
            coded.codes[place], step, seed, weights=weight_bits[place], start=int(number)
        )
        assert bits(single) == bits(expected[number][1])


@given(lists_of_floats(allow_nan=False, allow_infinity=False), steps(), st.integers(0, MASK))
def test_no_error_is_above_half_a_step_and_no_value_leaves_the_cell_of_its_weight(
    values, step, seed
):
    x = np.array(values, np.float32)
    weights = rounded(x)
    step = max(step, 2.0**-148, float(np.abs(x).max()) * 2.0**-22)
    coded = relative.codes(x, step, seed, weights=weights)
    is_finite = np.isfinite(weights.astype(np.float32))
    assert coded.refused == np.count_nonzero(~is_finite)
    x, weights, codes = x[is_finite], weights[is_finite], coded.codes
    if not is_finite.all():
        codes = relative.codes(x, step, seed, weights=weights).codes
    restored = relative.values(codes, step, seed, weights=weights)
    assert np.array_equal(rounded(restored).view(np.uint16), weights.view(np.uint16))
    exact = x.astype(np.float64)
    ulp = np.spacing(np.abs(restored)).astype(np.float64)
    bound = step / 2 + ulp / 2 + 2.0**-50 * (np.abs(exact) + step)
    assert np.all(np.abs(restored.astype(np.float64) - exact) <= bound)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.01, 2.0, 3.7, 8.0, 200.0])
def test_a_weight_that_moves_to_its_neighbour_changes_no_code_of_a_value_in_the_same_cell(ratio):
    """Otherwise each change of a weight would be a change of its master's code too."""
    weights = (np.arange(0x3C80, 0x3CFF, dtype=np.uint16)).repeat(50)  # one exponent
    width = 2.0 ** ((0x3C80 >> 7) - 134)
    edge = (weights.astype(np.uint32) << 16).view(np.float32) + np.float32(width / 2)
    lower, upper = np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(1))
    assert np.array_equal(rounded(upper).view(np.uint16), weights + 1)
    step = width / ratio
    first = relative.codes(lower, step, 3, weights=weights)
    second = relative.codes(upper, step, 3, weights=weights + np.uint16(1))
    cells = [lattice.codes(values, step, 3).codes for values in (lower, upper)]
    same = cells[0] == cells[1]
    assert np.array_equal(first.codes[same], second.codes[same])
    assert np.count_nonzero(same) > 0.9 * same.size
    assert (first.codes.max() > 0) == (ratio > 1)


def test_the_codes_of_a_full_rewrite_have_fewer_bits_than_those_without_a_weight():
    x = (np.random.default_rng(0).standard_normal(1 << 16) * 0.02).astype(np.float32)
    weights = rounded(x)

    def entropy(codes):
        shares = np.unique(codes, return_counts=True)[1] / codes.size
        return -(shares * np.log2(shares)).sum()

    absolute = lattice.codes(x, 5e-5, 1, weights=weights)
    coded = relative.codes(x, 5e-5, 1, weights=weights)
    assert entropy(absolute.codes) > 10
    assert entropy(coded.codes) < 3
    assert coded.largest_error <= 5e-5 / 2 + 1e-8


def test_a_step_that_no_weight_is_finer_than_needs_no_codes():
    x = (np.random.default_rng(0).standard_normal(5000) * 0.02).astype(np.float32)
    weights = rounded(x)
    assert relative.most_cells(weights, 2.0**-10) == 1
    coded = relative.codes(x, 2.0**-10, 1, weights=weights)
    assert not coded.codes.any()
    restored = relative.values(coded.codes, 2.0**-10, 1, weights=weights)
    assert np.array_equal(restored, weights.astype(np.float32))
    assert coded.largest_error == np.abs(restored.astype(np.float64) - x).max() > 0


def test_dithered_values_keep_their_mean_through_restores_and_plain_ones_do_not():
    random = np.random.default_rng(0)
    start = (random.standard_normal(20_000) * 0.02).astype(np.float32)
    step, gain, rounds = 1e-3, np.float32(1e-6), 40
    assert relative.most_cells(rounded(start), step, dithered=True) == 1
    gained = {}
    for dithered in (False, True):
        x = start
        for seed in range(rounds):
            x = x + gain
            weights = rounded(x)
            coded = relative.codes(x, step, seed, weights=weights, dithered=dithered)
            assert coded.largest_error <= step / 2
            x = relative.values(coded.codes, step, seed, weights=weights, dithered=dithered)
        gained[dithered] = float((x - start).mean(dtype=np.float64)) / (rounds * float(gain))
    assert gained[True] == pytest.approx(1, abs=0.1)
    assert gained[False] < 0.5


@kernels
def test_any_weight_that_is_finite_is_kept_whatever_the_code(kernels):
    _native.use_instruction_set(kernels)
    weights = np.arange(65536, dtype=np.uint16)
    weights = weights[(weights & 0x7F80) != 0x7F80]
    for step in (LEAST_STEP * 3, 1e-7, 1e-3, 1e30, MOST_STEP):
        for dithered in (False, True):
            counts = reference_codes.cell_counts(weights, step, dithered)
            known = weights[counts <= 65536]
            for share in (0.0, 0.5, 1.0):
                codes = np.floor((counts[counts <= 65536] - 1) * share).astype(np.uint16)
                held = relative.values(codes, step, 7, weights=known, dithered=dithered)
                assert np.array_equal(rounded(held).view(np.uint16), known)


@kernels
def test_codes_that_no_value_has_are_refused(kernels):
    _native.use_instruction_set(kernels)
    weights = np.full(100, 0x3C80, np.uint16)
    step = 2.0 ** ((0x3C80 >> 7) - 134) / 7.5  # nine cells
    codes = np.full(100, 8, np.uint8)
    relative.values(codes, step, 0, weights=weights)
    for bad, weight_bits, spacing in (
        (9, 0x3C80, step),
        (1, 0x3C80, 1.0),
        (0, 0x7F80, step),
        (0, 0xFFC0, step),
        (0, 0x7F00, step),
    ):
        changed, others = codes.copy(), weights.copy()
        changed[-3], others[-3] = bad, weight_bits
        if spacing != step:
            changed[:-3] = changed[-2:] = 0
        for result in (
            lambda: relative.values(changed, spacing, 0, weights=others),  # noqa: B023
            lambda: relative.values(changed.astype(np.uint16), spacing, 0, weights=others),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="1 of 100 codes are no relative codes"):
                result()
        found = reference_codes.relative_values(changed, others, spacing, 0)[1]
        assert found == 1


def test_values_that_have_no_code_are_counted_and_are_in_no_error():
    x = np.array([np.inf, -np.inf, np.nan, 1.0, 3e38, 2.0, MOST], np.float32)
    weights = rounded(x).view(np.uint16)
    weights[5] = 0x7FC0  # a NaN beside a number
    coded = relative.codes(x, 1.0, 3, weights=weights, out=np.empty(7, np.uint16))
    assert coded.refused == 6  # 3e38 has too many cells, the largest float32 rounds to infinity
    assert coded.largest_error == 0
    assert not coded.codes.any()
    assert relative.most_cells(weights, 1.0) > relative.MOST_CELLS


def test_a_value_outside_of_the_cell_of_its_weight_is_told_by_its_error():
    x = np.full(40, 1.0, np.float32)
    x[7] = 1.5
    weights = np.full(40, 0x3F80, np.uint16)
    coded = relative.codes(x, 1e-4, 3, weights=weights)
    restored = relative.values(coded.codes, 1e-4, 3, weights=weights)
    assert coded.refused == 0
    assert coded.largest_error == pytest.approx(0.5 - 2.0**-8)
    assert coded.largest_error == np.abs(restored.astype(np.float64) - x).max()


@kernels
def test_bits_are_those_of_the_reference_on_any_kernels(kernels):
    _native.use_instruction_set(kernels)
    random = np.random.default_rng(8)
    for count in (0, 1, 31, 33, 1025, 66_000):
        x = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        x[::2] = (random.standard_normal(x[::2].size) * 0.02).astype(np.float32)
        weights = rounded(x).view(np.uint16)
        weights[::5] = random.integers(0, 1 << 16, weights[::5].size, dtype=np.uint16)
        for dtype, step in (
            (np.uint8, 5e-5),
            (np.uint8, 1e-3),
            (np.uint16, 1e-6),
            (np.uint8, 1e30),
            (np.uint16, 1e30),
        ):
            dithered = dtype == np.uint16 or step == 1e-3
            coded = relative.codes(
                x, step, 77, weights=weights, dithered=dithered, out=np.empty(count, dtype)
            )
            codes, *errors = reference_codes.relative_codes(
                x, weights, step, 77, np.dtype(dtype), dithered
            )
            assert np.array_equal(coded.codes, codes)
            assert list(coded[1:]) == errors
            counts = reference_codes.cell_counts(weights, step, dithered)
            kept = ((weights & 0x7F80) != 0x7F80) & (counts <= 65536)
            random_codes = random.integers(0, 1 << 16, count) % np.minimum(counts, 65536)
            some = random_codes[kept].astype(np.uint16)
            restored = relative.values(some, step, 77, weights=weights[kept], dithered=dithered)
            expected, bad = reference_codes.relative_values(some, weights[kept], step, 77, dithered)
            assert bad == 0
            assert np.array_equal(bits(restored), bits(expected))


@pytest.mark.parametrize("count", [0, 65536, 65537, 3 * 65536 + 5])
def test_bits_depend_neither_on_threads_nor_on_where_a_tensor_is_cut(count):
    x = (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)
    weights, seed, step = rounded(x), MASK - 1000, 16e-6
    results = []
    for threads in (1, 3):
        _native.set_threads(threads)
        coded = relative.codes(x, step, seed, weights=weights)
        results.append((coded, relative.values(coded.codes, step, seed, weights=weights)))
    (first, values), (second, repeated) = results
    assert np.array_equal(first.codes, second.codes)
    assert first[1:] == second[1:]
    assert np.array_equal(bits(values), bits(repeated))
    cut = count // 3
    tail = relative.codes(
        x[cut:], step, seed, weights=weights[cut:], start=cut, out=np.empty_like(first.codes[cut:])
    )
    assert np.array_equal(tail.codes, first.codes[cut:])
    part = relative.values(tail.codes, step, seed, weights=weights[cut:], start=cut)
    assert np.array_equal(bits(part), bits(values[cut:]))


X, W = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.uint16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": X.astype(np.float64)}, "values must be"),
        ({"step": 0.0}, "step must be from"),
        ({"seed": -1}, "seed must be from"),
        ({"weights": W[:2]}, "weights must be"),
        ({"weights": X}, "weights must be"),
        ({"start": -1}, "start must not be negative"),
        ({"out": X.astype(np.int32)}, "out must be a numpy array of uint8 or uint16"),
        ({"out": np.zeros(16, np.uint8)}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        relative.codes(**{"values": X, "step": 1.0, "seed": 0, "weights": W} | arguments)


def test_codes_of_another_type_are_refused():
    with pytest.raises(ValueError, match="codes must be a numpy array of uint8 or uint16"):
        relative.values(X.astype(np.int32), 1.0, 0, weights=W)


def test_the_extension_refuses_what_would_be_written_out_of_bounds():
    x, weights, codes = np.zeros(4, np.float32), np.zeros(4, np.uint16), np.zeros(4, np.uint8)
    for call, message in (
        (lambda: _native.relative_codes(x, weights, 1.0, 0, codes[:3].copy(), True), "out"),
        (lambda: _native.relative_codes(x, weights[:3].copy(), 1.0, 0, codes, True), "weights"),
        (lambda: _native.relative_values(codes, weights, 1.0, 0, x[:3].copy(), True), "weights"),
        (lambda: _native.relative_values(codes[:3].copy(), weights, 1.0, 0, x, True), "out"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
