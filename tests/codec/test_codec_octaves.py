"""Moments on a logarithmic scale: the bound over all floats, zero, the dead band, and the bits of
the plain telling everywhere.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import _native
from deltacheck.codec.lossy import octaves
from tests.reference import codes as reference_codes

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

EVERY_PRECISION = range(8)  # fraction bits


def any_floats():
    return st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70).map(
        lambda b: np.array(b, np.uint32).view(np.float32)
    )


def live(random, count=5000):
    """Second moments as training has them, with subnormals and zeros among them."""
    v = (random.standard_normal(count) * 10.0 ** random.uniform(-8, 0, count)).astype(
        np.float32
    ) ** 2
    v[::97], v[1::97] = 0, np.arange(1, 1 + v[1::97].size, dtype=np.uint32).view(np.float32)
    return v


def distance(x, y):
    """On the scale: in octaves of the bits."""
    x, y = (reference_codes.octave(np.abs(z).view(np.uint32)) for z in (x, y))
    return np.abs(x - y) * 2.0**-23


def restored(values, **options):
    coded = octaves.codes(values, **options)
    return coded, octaves.values(coded.codes, fraction_bits=options["fraction_bits"])


# --- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction_bits", EVERY_PRECISION)
@given(any_floats())
def test_whatever_has_a_code_is_within_half_a_cell_of_it(fraction_bits, x):
    coded, back = restored(x, fraction_bits=fraction_bits)
    kept = coded.codes != 0
    half = 2.0 ** -(fraction_bits + 1)
    assert np.all(distance(x[kept], back[kept]) <= half)
    true = np.abs(np.log2(back[kept].astype(np.float64) / x[kept].astype(np.float64)))
    assert np.all(true <= math.log2(1 + half) + 1e-12)
    assert np.all(np.signbit(back[kept]) == np.signbit(x[kept]))
    assert np.all(back[~kept] == 0)


def test_subnormals_have_cells_like_all_others():
    x = np.arange(1, 1 << 23, 97, dtype=np.uint32).view(np.float32)
    for fraction_bits in (0, 2, 7):
        coded, back = restored(x, fraction_bits=fraction_bits)
        assert coded.refused == 0
        assert np.all(back > 0)


@pytest.mark.parametrize("fraction_bits", EVERY_PRECISION)
def test_zero_stays_zero_and_no_other_value_becomes_it(fraction_bits):
    x = np.array([0.0, -0.0, 2.0**-149, 2.0**-126, 2.0**-101, 2.0**-100, 1.0], np.float32)
    coded, back = restored(x, fraction_bits=fraction_bits)
    assert coded.refused == 0
    assert (back != 0).tolist() == [False, False] + 5 * [True]
    assert (coded.codes != 0).tolist() == (back != 0).tolist()
    assert not np.signbit(back).any()


@pytest.mark.parametrize(("fraction_bits", "end"), [(0, 2.0**106), (1, math.inf), (7, math.inf)])
def test_values_without_a_code_are_counted(fraction_bits, end):
    nan, most = float("nan"), float(np.finfo(np.float32).max)
    last = float(np.nextafter(np.float32(end), np.float32(0)))
    x = np.array([nan, math.inf, -math.inf, last, end, -1.0, 1.0, most], np.float32)
    coded, back = restored(x, fraction_bits=fraction_bits)
    expected = [False, False, False, True, False, False, True, end == math.inf]
    assert (coded.codes != 0).tolist() == (back != 0).tolist() == expected
    assert coded.refused == expected.count(False)


def test_codes_without_fraction_bits_take_a_byte():
    x = np.ones((3, 5), np.float32)
    sizes = [octaves.codes(x, fraction_bits=f).codes.dtype.itemsize for f in EVERY_PRECISION]
    assert sizes == [1] + 7 * [2]
    assert octaves.codes(x).codes.shape == octaves.values(octaves.codes(x).codes).shape == (3, 5)


# --- the dead band --------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction_bits", [0, 2, 3])
@pytest.mark.parametrize("cells", [0.5, 0.75, 2.0])
def test_a_base_code_is_kept_just_where_it_is_near_enough(fraction_bits, cells):
    random = np.random.default_rng(1)
    before = live(random)
    now = before * np.exp2(random.normal(0, 0.5, before.size)).astype(np.float32)
    dead_band = cells * 2.0**-fraction_bits
    base = octaves.codes(before, fraction_bits=fraction_bits).codes
    old = octaves.values(base, fraction_bits=fraction_bits)
    nearest = octaves.codes(now, fraction_bits=fraction_bits)
    coded, back = restored(now, fraction_bits=fraction_bits, base=base, dead_band=dead_band)
    keep = (base != 0) & (nearest.codes != 0)
    keep[keep] &= distance(old[keep], now[keep]) <= dead_band
    assert 0.1 < keep.mean() < 1
    assert np.array_equal(coded.codes, np.where(keep, base, nearest.codes))
    kept = coded.codes != 0
    assert distance(back[kept], now[kept]).max() <= dead_band
    true = np.abs(np.log2(back[kept].astype(np.float64) / now[kept].astype(np.float64)))
    assert true.max() < dead_band + 0.087


def test_values_that_drift_to_and_fro_keep_their_codes_under_a_dead_band():
    random = np.random.default_rng(2)
    before = live(random, 100_000)
    now = before * np.exp2(random.normal(0, 0.1, before.size)).astype(np.float32)
    base = octaves.codes(before).codes
    changed = [
        np.count_nonzero(octaves.codes(now, base=base, dead_band=d).codes != base) / base.size
        for d in (0.5, 0.75, 1.0)
    ]
    assert changed[0] > 5 * changed[1] > 5 * changed[2]


def test_a_base_that_is_zero_or_means_nothing_is_not_kept():
    x = np.array([1.0, 0.0, 1.0], np.float32)
    right = octaves.codes(x, fraction_bits=2).codes
    base = np.array([0, right[0], 0x7FFF], np.uint16)
    assert np.array_equal(octaves.codes(x, fraction_bits=2, base=base, dead_band=8.0).codes, right)


# --- the same bits everywhere ---------------------------------------------------------------------


@pytest.mark.parametrize("kernels", _native.instruction_sets())
@pytest.mark.parametrize("fraction_bits", EVERY_PRECISION)
def test_bits_are_those_of_the_plain_telling(fraction_bits, kernels):
    _native.use_instruction_set(kernels)
    random, form = np.random.default_rng(3), reference_codes.octave_form(fraction_bits)
    for count in (0, 1, 33, 3000):
        anything = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        near = np.clip(live(random, count), 0, 1)
        for x, base in (
            (anything, None),
            (
                anything,
                random.integers(0, 1 << 8 * np.dtype(form.dtype).itemsize, count, form.dtype),
            ),
            (near, 0),
        ):
            if base is not None and np.isscalar(base):
                base = octaves.codes(x * np.float32(1.2), fraction_bits=fraction_bits).codes
            coded = octaves.codes(x, fraction_bits=fraction_bits, base=base, dead_band=0.7)
            codes, refused = reference_codes.octave_codes(x, form, base, math.floor(0.7 * 2**23))
            assert np.array_equal(coded.codes, codes)
            assert coded.refused == refused
            back = octaves.values(codes, fraction_bits=fraction_bits)
            assert np.array_equal(
                back.view(np.uint32), reference_codes.octave_values(codes, form).view(np.uint32)
            )


@pytest.mark.parametrize("fraction_bits", [0, 3])
@pytest.mark.parametrize("count", [65536, 3 * 65536 + 5])
def test_bits_depend_neither_on_threads_nor_on_where_a_tensor_is_cut(count, fraction_bits):
    x = live(np.random.default_rng(4), count)
    base = octaves.codes(x * np.float32(1.3), fraction_bits=fraction_bits).codes
    found = []
    for threads in (1, 3):
        _native.set_threads(threads)
        found.append(octaves.codes(x, fraction_bits=fraction_bits, base=base))
        back = octaves.values(found[-1].codes, fraction_bits=fraction_bits)
    assert np.array_equal(found[0].codes, found[1].codes)
    assert found[0][1:] == found[1][1:]
    cut = count // 3
    rest = octaves.codes(x[cut:], fraction_bits=fraction_bits, base=base[cut:])
    assert np.array_equal(rest.codes, found[0].codes[cut:])
    assert np.array_equal(octaves.values(rest.codes, fraction_bits=fraction_bits), back[cut:])
    assert octaves.codes(x, fraction_bits=fraction_bits, base=base, out=base).codes is base
    assert np.array_equal(base, found[0].codes)


# --- refusals -------------------------------------------------------------------------------------

X, C = np.ones((4, 4), np.float32), np.ones((4, 4), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"values": X.astype(np.float64)}, "values must be"),
        ({"values": X[:, ::2]}, "values must be"),
        ({"fraction_bits": 8}, "fraction_bits must be from 0 to 7, not 8"),
        ({"fraction_bits": -1}, "fraction_bits must be"),
        ({"base": C.astype(np.uint16)}, "base must be"),
        ({"base": C[:2]}, r"base must have the shape of values, \(4, 4\), not \(2, 4\)"),
        ({"base": C, "dead_band": 0.4}, "dead_band must be from half a cell, 0.5, to 8.0, not 0.4"),
        ({"base": C, "dead_band": 8.1}, "dead_band must be"),
        ({"base": C, "dead_band": float("nan")}, "dead_band must be"),
        ({"out": X}, "out must be"),
        ({"out": np.broadcast_to(np.uint8(0), (4, 4))}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        octaves.codes(**{"values": X} | arguments)


@pytest.mark.parametrize(
    ("fraction_bits", "code"), [(1, 277 * 2 + 1), (3, 0x8000), (7, 277 * 128 + 1)]
)
def test_codes_that_no_value_has_are_refused(fraction_bits, code):
    bad = np.array([0, 1, code], np.uint16)
    with pytest.raises(ValueError, match="1 of 3 codes are no octave codes"):
        octaves.values(bad, fraction_bits=fraction_bits)


def test_the_extension_refuses_what_would_be_written_out_of_bounds():
    x, codes = np.zeros(4, np.float32), np.zeros(4, np.uint8)
    for call in (
        lambda: _native.octave_codes(x, None, 0, 0, codes[:3].copy()),
        lambda: _native.octave_codes(x, codes[:3].copy(), 0, 0, codes),
        lambda: _native.octave_codes(x, None, 1, 0, codes),
        lambda: _native.octave_codes(x, None, 8, 0, codes),
        lambda: _native.octave_values(codes, 1, x),
    ):
        with pytest.raises(ValueError, match="must"):
            call()
