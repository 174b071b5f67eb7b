"""Lattice codes relative to a bfloat16 weight.

The bound, the codes of a weight that moves, halvings that add a bit and change no other, and equal
bits on every processor.
"""

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import _native
from deltacheck.codec.lossy import lattice, nested
from deltacheck.codec.lossy.lattice import LEAST_STEP, MOST_STEP
from tests.codec.test_codec_lattice import MASK, MOST, bits, phase
from tests.reference import codes as reference_codes

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")


def float_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def rounded(x):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(ml_dtypes.bfloat16)


def lists_of_floats(**options):
    return st.lists(st.floats(width=32, **options), min_size=1, max_size=70)


kernels = pytest.mark.parametrize("kernels", _native.instruction_sets())


def element(x, weight, step, number, halvings, spare_bits, size):
    """The code and the value of one element by the text of the format, in Python's own numbers.

    ``None`` if there is no code.
    """
    if weight & 0x7F80 == 0x7F80 or not math.isfinite(x):
        return None
    first, u, b = step * 2.0**halvings, phase(number), float_of(weight << 16)
    exponent = max(weight >> 7 & 0xFF, 1)
    width, octave = 2.0 ** (exponent - 134), math.frexp(first)[1] - 1
    count = exponent - 133 - octave + halvings
    if count + spare_bits > size:
        return None
    if count <= 0:
        code, middle = 0, b + (u - 0.5) * width
    else:
        lowest = math.floor(((b - 0.5 * width) / first + u) * 2.0**halvings)
        q = math.floor((x / first + u) * 2.0**halvings)
        q = min(max(q, lowest), lowest + 2**count - 1)
        code = q % 2**count * 2**spare_bits
        middle = ((q + 0.5) * 2.0**-halvings - u) * first
    value = np.array([min(max(middle, -MOST), MOST)]).astype(np.float32)
    moved = reference_codes.in_cell(value, np.array([weight], np.uint16))
    return code, float(moved[0])


@given(
    lists_of_floats(),
    st.lists(st.integers(0, 65535), min_size=70, max_size=70),
    st.floats(0.01, 1e5),
    st.booleans(),
    st.integers(0, MASK),
    st.integers(0, lattice.MOST_HALVINGS),
    st.integers(0, lattice.MOST_SPARE_BITS),
    st.sampled_from(_native.instruction_sets()),
    st.sampled_from([np.uint8, np.uint16]),
)
def test_codes_and_values_are_those_of_the_definition(
    values, weights, ratio, is_cast, seed, halvings, spare_bits, kernels, dtype
):
    _native.use_instruction_set(kernels)
    x = np.array(values, np.float32)
    weight_bits = rounded(x).view(np.uint16) if is_cast else np.array(weights[: x.size], np.uint16)
    width = 2.0 ** (max(int(weight_bits[0]) >> 7 & 0xFF, 1) - 134)
    step = min(max(width / ratio, LEAST_STEP), MOST_STEP * 2.0**-halvings)
    form = {"halvings": halvings, "spare_bits": spare_bits}
    coded = nested.codes(x, step, seed, weights=weight_bits, out=np.empty(x.size, dtype), **form)
    size = 8 * np.dtype(dtype).itemsize
    expected = [
        element(float(value), int(weight), step, seed + i, halvings, spare_bits, size)
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
        single = nested.values(
            coded.codes[place],
            step,
            seed,
            weights=weight_bits[place],
            start=int(number),
            **form,
        )
        assert bits(single) == bits(expected[number][1])


def masters(count=1 << 16, scale=0.02):
    x = (np.random.default_rng(0).standard_normal(count) * scale).astype(np.float32)
    return x, rounded(x)


def entropy(symbols):
    shares = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.parametrize("spare_bits", [4, 7])
def test_a_halving_adds_one_bit_to_a_code_and_changes_no_other(spare_bits):
    x, weights = masters()
    step = 3e-4
    last = nested.codes(x, step, 1, halvings=0, weights=weights, spare_bits=spare_bits).codes
    nested_bits = rewritten_bits = 0.0
    for halvings in range(1, 5):
        step /= 2
        codes = nested.codes(
            x, step, 1, halvings=halvings, weights=weights, spare_bits=spare_bits - halvings
        ).codes
        assert codes.dtype == last.dtype == (np.uint8 if spare_bits == 4 else np.uint16)
        added = codes ^ last
        assert np.all((codes & last) == last)
        assert set(np.unique(added).tolist()) == {0, 1 << (spare_bits - halvings)}
        assert entropy(added) <= 1
        nested_bits += entropy(added)
        rewritten = nested.codes(x, step, 1, weights=weights).codes
        rewritten_bits += entropy(rewritten)
        last = codes
    assert rewritten_bits > 1.7 * nested_bits


@pytest.mark.parametrize("halvings", [0, 1, 4, 9])
def test_no_error_is_above_half_a_step_and_no_value_leaves_the_cell_of_its_weight(halvings):
    x, weights = masters()
    for step in (1e-5, 5e-5, 3e-4):
        coded = nested.codes(x, step, 3, halvings=halvings, spare_bits=5, weights=weights)
        restored = nested.values(
            coded.codes, step, 3, halvings=halvings, spare_bits=5, weights=weights
        )
        assert np.array_equal(rounded(restored).view(np.uint16), weights.view(np.uint16))
        error = np.abs(restored.astype(np.float64) - x)
        assert coded.largest_error == error.max() <= step / 2 + 1e-8
        assert coded.refused == 0


def test_a_weight_that_moves_to_its_neighbour_changes_no_code_of_a_value_in_the_same_cell():
    weights = (np.arange(0x3C80, 0x3CFF, dtype=np.uint16)).repeat(50)  # one exponent
    width = 2.0 ** ((0x3C80 >> 7) - 134)
    edge = (weights.astype(np.uint32) << 16).view(np.float32) + np.float32(width / 2)
    lower, upper = np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(1))
    for halvings in (0, 2):
        form = {"halvings": halvings, "spare_bits": 1}
        first = nested.codes(lower, width / 3.7, 3, weights=weights, **form)
        second = nested.codes(upper, width / 3.7, 3, weights=weights + np.uint16(1), **form)
        assert np.mean(first.codes == second.codes) > 0.9


@pytest.mark.parametrize("step", [1e-3, 1.5e-4])
@pytest.mark.parametrize("form", [{}, {"halvings": 3, "spare_bits": 2}], ids=["first", "halved"])
def test_values_keep_their_mean_through_restores(step, form):
    """A run that is killed again and again must not lose what its masters gain between two kills.

    The first lattice is coarser than all weights, the second than some.
    """
    start, _ = masters(20_000)
    gain, rounds, x = np.float32(1e-6), 40, start
    for seed in range(rounds):
        x = x + gain
        weights = rounded(x)
        coded = nested.codes(x, step, seed, weights=weights, **form)
        assert coded.largest_error <= step / 2 + 1e-8
        x = nested.values(coded.codes, step, seed, weights=weights, **form)
    gained = float((x - start).mean(dtype=np.float64)) / rounds
    # Values that are moved into the cells of their weights shift the mean by a part of a step.
    assert gained == pytest.approx(
        float(gain), abs=0.1 * float(gain) if step > 5e-4 else 0.03 * step
    )
    assert gained > 0.9 * float(gain)


def test_the_codes_of_a_full_rewrite_have_fewer_bits_than_those_without_a_weight():
    x, weights = masters(1 << 16)
    absolute = lattice.codes(x, 5e-5, 1, weights=weights)
    coded = nested.codes(x, 5e-5, 1, weights=weights)
    assert entropy(absolute.codes) > 10
    assert entropy(coded.codes) < 3.5
    assert coded.largest_error <= 5e-5 / 2 + 1e-8


def test_a_step_that_no_weight_is_finer_than_needs_no_codes():
    x, weights = masters(5000)
    assert nested.most_bits(weights, 2.0**-7, 0) == 0
    coded = nested.codes(x, 2.0**-7, 1, weights=weights)
    assert not coded.codes.any()
    restored = nested.values(coded.codes, 2.0**-7, 1, weights=weights)
    assert np.array_equal(restored, nested.drawn(1, weights=weights))
    assert np.array_equal(rounded(restored), weights)


@kernels
def test_bits_are_those_of_the_reference_on_any_kernels(kernels):
    _native.use_instruction_set(kernels)
    random = np.random.default_rng(8)
    for count in (0, 1, 31, 33, 1025, 66_000):
        x = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        x[::2] = (random.standard_normal(x[::2].size) * 0.02).astype(np.float32)
        weights = rounded(x).view(np.uint16)
        weights[::5] = random.integers(0, 1 << 16, weights[::5].size, dtype=np.uint16)
        for dtype, step, halvings, spare in (
            (np.uint8, 5e-5, 0, 0),
            (np.uint8, 5e-5, 3, 3),
            (np.uint8, 1e-3, 11, 7),
            (np.uint16, 1e-6, 5, 6),
            (np.uint8, 1e29, 2, 1),
            (np.uint16, 1e28, 31, 0) if count % 2 else (np.uint16, LEAST_STEP, 31, 2),
        ):
            form = {"halvings": halvings, "spare_bits": spare}
            coded = nested.codes(x, step, 77, weights=weights, out=np.empty(count, dtype), **form)
            codes, *errors = reference_codes.nested_codes(
                x, weights, step, 77, halvings, spare, np.dtype(dtype)
            )
            assert np.array_equal(coded.codes, codes)
            assert list(coded[1:]) == errors
            size = 8 * np.dtype(dtype).itemsize
            needed = reference_codes.nested_bits(weights, step, halvings)
            kept = ((weights & 0x7F80) != 0x7F80) & (needed + spare <= size)
            numbers = random.integers(0, 1 << 16, count) % (1 << np.clip(needed, 0, 16))
            some = (numbers << spare)[kept].astype(dtype)
            restored = nested.values(some, step, 77, weights=weights[kept], **form)
            expected, bad = reference_codes.nested_values(
                some, weights[kept], step, 77, halvings, spare
            )
            assert bad == 0
            assert np.array_equal(bits(restored), bits(expected))
            assert np.array_equal(rounded(restored).view(np.uint16), weights[kept])
            any_codes = random.integers(0, 1 << size, count).astype(dtype)
            result = np.empty(count, np.float32)
            refused = _native.nested_values(
                any_codes.view(np.uint8), weights, step, 77, result, halvings, spare
            )
            expected, bad = reference_codes.nested_values(
                any_codes, weights, step, 77, halvings, spare
            )
            assert refused == bad
            assert np.array_equal(bits(result), bits(expected))


@kernels
def test_codes_that_no_value_has_are_refused(kernels):
    _native.use_instruction_set(kernels)
    weights = np.full(100, 0x3C80, np.uint16)
    step = 2.0 ** ((0x3C80 >> 7) - 134) / 4  # three bits
    codes, form = np.full(100, 0b11100, np.uint8), {"halvings": 2, "spare_bits": 2}
    nested.values(codes, step, 0, weights=weights, **form)
    for bad, weight_bits in ((0b100000, 0x3C80), (0b11101, 0x3C80), (0, 0x7F80), (0, 0x7F00)):
        changed, others = codes.copy(), weights.copy()
        changed[-3], others[-3] = bad, weight_bits
        with pytest.raises(ValueError, match="1 of 100 codes are no relative codes"):
            nested.values(changed, step, 0, weights=others, **form)
        assert reference_codes.nested_values(changed, others, step, 0, 2, 2)[1] == 1


def test_values_that_have_no_code_are_counted_and_are_in_no_error():
    x = np.array([np.inf, -np.inf, np.nan, 1.0, 3e38, 2.0, MOST], np.float32)
    weights = rounded(x).view(np.uint16)
    weights[5] = 0x7FC0  # a NaN beside a number
    coded = nested.codes(
        x, 0.25, 3, halvings=2, spare_bits=0, weights=weights, out=np.empty(7, np.uint16)
    )
    assert coded.refused == 6  # 3e38 has too many bits, the largest float32 rounds to infinity
    assert coded.largest_error < 2.0**-8
    assert not coded.codes.any()
    assert nested.most_bits(weights, 0.25, 2) > nested.MOST_BITS


@pytest.mark.parametrize("count", [0, 65537, 3 * 65536 + 5])
def test_bits_depend_neither_on_threads_nor_on_where_a_tensor_is_cut(count):
    x, weights = masters(count)
    seed, step = MASK - 1000, 16e-6
    results = []
    for threads in (1, 3):
        _native.set_threads(threads)
        coded = nested.codes(x, step, seed, halvings=2, spare_bits=2, weights=weights)
        values = nested.values(coded.codes, step, seed, halvings=2, spare_bits=2, weights=weights)
        results.append((coded, values))
    (first, values), (second, repeated) = results
    assert np.array_equal(first.codes, second.codes)
    assert first[1:] == second[1:]
    assert np.array_equal(bits(values), bits(repeated))
    cut = count // 3
    out = np.empty_like(first.codes[cut:])
    tail = nested.codes(
        x[cut:], step, seed, halvings=2, spare_bits=2, weights=weights[cut:], start=cut, out=out
    )
    assert np.array_equal(tail.codes, first.codes[cut:])
    part = nested.values(
        tail.codes, step, seed, halvings=2, spare_bits=2, weights=weights[cut:], start=cut
    )
    assert np.array_equal(bits(part), bits(values[cut:]))


X, W = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.uint16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": X.astype(np.float64)}, "values must be"),
        ({"step": 0.0}, "step must be from"),
        ({"seed": -1}, "seed must be from"),
        ({"halvings": -1}, "halvings must be from 0 to 31"),
        ({"halvings": 32}, "halvings must be from 0 to 31"),
        ({"spare_bits": -1}, "spare_bits must be from 0 to 7"),
        ({"spare_bits": 8}, "spare_bits must be from 0 to 7"),
        ({"halvings": 2, "step": 1e38}, "cannot have been halved 2 times"),
        ({"weights": W[:2]}, "weights must be"),
        ({"start": -1}, "start must not be negative"),
        ({"out": X.astype(np.int32)}, "out must be a numpy array of uint8 or uint16"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, message):
    valid = {"values": X, "step": 1.0, "seed": 0, "halvings": 1, "spare_bits": 0, "weights": W}
    with pytest.raises(ValueError, match=message):
        nested.codes(**valid | arguments)


def test_the_extension_refuses_what_would_be_written_out_of_bounds():
    x, weights, codes = np.zeros(4, np.float32), np.zeros(4, np.uint16), np.zeros(4, np.uint8)
    for call, message in (
        (lambda: _native.nested_codes(x, weights, 1.0, 0, codes[:3].copy(), 1, 0), "out"),
        (lambda: _native.nested_codes(x, weights[:3].copy(), 1.0, 0, codes, 1, 0), "weights"),
        (lambda: _native.nested_codes(x, weights, 1.0, 0, codes, 32, 0), "halvings"),
        (lambda: _native.nested_values(codes, weights, 1.0, 0, x[:3].copy(), 1, 0), "weights"),
        (lambda: _native.nested_values(codes[:3].copy(), weights, 1.0, 0, x, 1, 0), "out"),
        (lambda: _native.nested_values(codes, weights, 1.0, 0, x, 1, 8), "spare_bits"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_least_and_the_largest_spacing_are_taken():
    x, weights = masters(100)
    assert nested.codes(x, LEAST_STEP, 0, halvings=0, spare_bits=0, weights=weights).refused == 100
    coded = nested.codes(x, MOST_STEP, 0, halvings=0, spare_bits=0, weights=weights)
    assert not coded.codes.any()
    assert lattice.MOST_STEP == MOST_STEP
