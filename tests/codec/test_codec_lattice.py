"""Master weights as codes on a lattice: the bound, the cells of the exactly stored weights, and the
same bits everywhere.
"""

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import _native
from deltacheck.codec.lossy import lattice
from deltacheck.codec.lossy.lattice import LEAST_STEP, MOST_STEP
from tests.reference import codes as reference_codes

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

MASK = 2**64 - 1
MOST = float(np.finfo(np.float32).max)


# --- the plain telling: one element, Python's own numbers -----------------------------------------


def phase(number):
    z = number & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return ((z ^ z >> 31) >> 40) * 2.0**-24


def to_float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def told_plainly(x, step, number, halvings=0, spare_bits=0):
    u, first, width = phase(number), step * 2.0**halvings, 2.0**-halvings
    q = math.floor((x / first + u) * 2.0**halvings)
    code = q * 2**spare_bits
    if not -(2**31) <= code < 2**31:
        return None, None
    middle = ((q * width - u) + 0.5 * width) * first
    return code, to_float32(min(max(middle, -MOST), MOST))


def there_and_back(x, step, seed, weights=None, **form):
    coded = lattice.codes(x, step, seed, weights=weights, **form)
    return coded, lattice.values(coded.codes, step, seed, weights=weights, **form)


def forms():
    """Halvings and spare bits: none, and any others."""
    nested = st.tuples(
        st.integers(0, lattice.MOST_HALVINGS), st.integers(0, lattice.MOST_SPARE_BITS)
    )
    return st.one_of(st.just((0, 0)), nested).map(
        lambda form: {"halvings": form[0], "spare_bits": form[1]}
    )


def most_steps(step, form):
    """The spacing, or the largest one that a lattice can have after these halvings."""
    return min(step, MOST_STEP * 2.0 ** -form["halvings"])


def fitting(x, step, spare_bits=0):
    """Steps in which no value is refused."""
    return max(step, float(np.abs(x).max(initial=0)) * 2.0 ** (spare_bits - 30))


def finite_floats():
    return st.floats(width=32, allow_nan=False, allow_infinity=False)


def steps():
    return st.one_of(
        st.floats(LEAST_STEP, MOST_STEP),
        st.floats(-140, 120).map(lambda e: 2.0**e),
        st.sampled_from([LEAST_STEP, 2.0**-126, 1e-6, 16e-6, 1.0, MOST_STEP]),
    )


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32)


# --- what must hold -------------------------------------------------------------------------------


@given(
    st.lists(finite_floats(), min_size=1, max_size=70),
    steps(),
    st.integers(0, MASK),
    forms(),
    st.sampled_from(_native.instruction_sets()),
)
def test_every_code_is_the_cell_and_every_value_its_middle_as_the_definition_has_it(
    values, step, seed, form, kernels
):
    _native.use_instruction_set(kernels)
    x, step = np.array(values, np.float32), most_steps(step, form)
    coded, back = there_and_back(x, step, seed, **form)
    told = [told_plainly(float(value), step, seed + i, **form) for i, value in enumerate(x)]
    assert coded.codes.tolist() == [q or 0 for q, _ in told]
    assert coded.refused == sum(q is None for q, _ in told)
    errors = [
        abs(to - float(value)) for (q, to), value in zip(told, x, strict=True) if q is not None
    ]
    assert coded.largest_error == max(errors, default=0.0)
    kept = [q is not None for q, _ in told]
    assert np.array_equal(bits(back)[kept], bits([to for q, to in told if q is not None]))


@given(
    st.lists(finite_floats(), min_size=1, max_size=70),
    steps(),
    st.integers(0, MASK),
    # With more bits, not even 0 has a code of 32 bits in every phase.
    forms().filter(lambda form: form["halvings"] + form["spare_bits"] < 31),
)
def test_no_error_is_above_half_a_step_and_half_a_unit_in_the_last_place(values, step, seed, form):
    # The largest float32 has a code on the coarsest lattice only with few halvings and spare bits.
    x = np.array(values, np.float32) * np.float32(2.0**-38 if form["halvings"] else 1)
    step = most_steps(fitting(x, step, form["spare_bits"]), form)
    coded, back = there_and_back(x, step, seed, **form)
    back = back.astype(np.float64)
    with np.errstate(over="ignore"):
        ulp = np.spacing(np.minimum(np.abs(back), MOST).astype(np.float32)).astype(np.float64)
    # Sums with the phase round in units of the first spacing.
    rounding = 2.0**-50 * (np.abs(x.astype(np.float64)) + step * 2.0 ** form["halvings"])
    bound = step / 2 + ulp / 2 + rounding
    assert coded.refused == 0
    assert np.all(np.abs(back - x) <= bound)


@given(
    st.lists(finite_floats(), min_size=1, max_size=70),
    steps(),
    st.integers(0, MASK),
    st.sampled_from(_native.instruction_sets()),
)
def test_with_weights_a_value_casts_to_its_weight_and_is_no_farther_away(
    values, step, seed, kernels
):
    _native.use_instruction_set(kernels)
    x = np.array(values, np.float32)
    step = fitting(x, step)
    with np.errstate(over="ignore"):
        weights = x.astype(ml_dtypes.bfloat16)
    (free_coded, free), (coded, held) = (
        there_and_back(x, step, seed),
        there_and_back(x, step, seed, weights),
    )
    with np.errstate(over="ignore"):
        assert np.array_equal(
            held.astype(ml_dtypes.bfloat16).view(np.uint16), weights.view(np.uint16)
        )
    assert np.array_equal(coded.codes, free_coded.codes)
    exact = x.astype(np.float64)
    assert np.all(np.abs(held - exact) <= np.abs(free - exact))


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("step", [1e-10, 16e-6, 0.1])
def test_the_errors_are_those_of_the_values_that_a_restore_gives(step, with_weights):
    x = (np.random.default_rng(0).standard_normal(70_001) * 0.02).astype(np.float32)
    weights = x.astype(ml_dtypes.bfloat16) if with_weights else None
    coded, back = there_and_back(x, step, 9, weights)
    errors = np.abs(back.astype(np.float64) - x.astype(np.float64))
    assert coded.refused == 0
    assert coded.largest_error == errors.max() > 0


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_any_weight_that_is_no_nan_is_kept_whatever_the_code(kernels):
    """Weights and codes that do not belong together, all 65536 weights: infinities, subnormals and
    zeros of both signs have cells, too.
    """
    _native.use_instruction_set(kernels)
    weights = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    no_nan = ~np.isnan(weights.astype(np.float32))
    for code in (0, 1, -1, 2**31 - 1, -(2**31)):
        codes = np.full(65536, code, np.int32)
        for step in (1e-3, MOST_STEP, LEAST_STEP):
            held = lattice.values(codes, step, 7, weights=weights)
            assert np.isfinite(held).all()
            with np.errstate(over="ignore"):
                cast = held.astype(ml_dtypes.bfloat16).view(np.uint16)
            assert np.array_equal(cast[no_nan], weights.view(np.uint16)[no_nan])
            assert np.array_equal(
                bits(held[~no_nan]), bits(lattice.values(codes, step, 7)[~no_nan])
            )


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_a_cell_reaches_just_as_far_as_rounding_does(kernels):
    _native.use_instruction_set(kernels)
    weights = np.array([0x3F80, 0x3F81, 0x0000, 0x8000, 0x7F7F, 0xFF80], np.uint16)
    far = np.full(6, 2**31 - 1, np.int32)
    low, high = (
        bits(lattice.values(codes, MOST_STEP, 0, weights=weights)).tolist() for codes in (-far, far)
    )
    assert low == [0x3F7F8000, 0x3F808001, 0x00000000, 0x80008000, 0x7F7E8001, 0xFF7FFFFF]
    assert high == [0x3F808000, 0x3F817FFF, 0x00008000, 0x80000000, 0x7F7F7FFF, 0xFF7F8000]


def test_values_that_have_no_code_are_counted_and_are_in_no_error():
    x = np.array(
        [np.inf, -np.inf, np.nan, 2.0**31, -(2.0**31) - 512, 2.0**31 - 128, -(2.0**31), 1.0] * 20,
        np.float32,
    )
    coded = lattice.codes(x, 1.0, 3)
    assert (coded.codes != 0).tolist() == [False, False, False, False, False, True, True, True] * 20
    assert coded.refused == 100
    assert coded.largest_error <= 64.5  # half a step, and half a unit in the last place of 2^31


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_bits_are_those_of_the_plain_telling_on_any_kernels(kernels):
    _native.use_instruction_set(kernels)
    random = np.random.default_rng(8)
    for count in (0, 1, 31, 33, 1025, 66_000):
        x = random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        x[::2] = (random.standard_normal(x[::2].size) * 0.02).astype(np.float32)
        weights = random.integers(0, 1 << 16, count, dtype=np.uint16)
        for cells, step, *form in (
            (None, 16e-6, 0, 0),
            (weights, 1e-3, 0, 0),
            (weights, 1e30, 0, 0),
            (None, 2e-6, 3, 2),
            (None, 1e-9, 31, 7),
            (weights, 1e-5, 5, 1),
        ):
            named = dict(zip(("halvings", "spare_bits"), form, strict=True))
            found = lattice.codes(x, step, 77, weights=cells, **named)
            codes, *rest = reference_codes.lattice_codes(x, cells, step, 77, *form)
            assert np.array_equal(found.codes, codes)
            assert list(found[1:]) == rest
            back = lattice.values(codes, step, 77, weights=cells, **named)
            expected, bad = reference_codes.lattice_values(codes, cells, step, 77, *form)
            assert bad == 0
            assert np.array_equal(bits(back), bits(expected))
            any_codes = random.integers(-(1 << 31), 1 << 31, count).astype(np.int32)
            result = np.empty(count, np.float32)
            refused = _native.lattice_values(any_codes, cells, step, 77, result, *form)
            expected, bad = reference_codes.lattice_values(any_codes, cells, step, 77, *form)
            assert refused == bad
            assert np.array_equal(bits(result), bits(expected))
        live = weights & np.uint16(0xBFFF)  # finite ones
        for step, *form in ((16e-6, 0, 0), (1e30, 0, 0), (2e-6, 3, 2)):
            named = dict(zip(("halvings", "spare_bits"), form, strict=True))
            assert tuple(
                lattice.cast_errors(x, step, 77, weights=live, **named)
            ) == reference_codes.lattice_cast_errors(x, live, step, 77, *form)


def test_a_halving_takes_the_highest_spare_bit_of_a_code_and_changes_no_other():
    x = (np.random.default_rng(0).standard_normal(1 << 16) * 0.02).astype(np.float32)
    step, total_bits = 3e-4, 7
    plain = lattice.codes(x, step, 1).codes
    last = lattice.codes(x, step, 1, spare_bits=total_bits).codes
    assert np.array_equal(last, plain << total_bits)
    for halvings in range(1, total_bits + 1):
        step /= 2
        form = {"halvings": halvings, "spare_bits": total_bits - halvings}
        coded, back = there_and_back(x, step, 1, **form)
        added = coded.codes - last
        new_bits, counts = np.unique(added, return_counts=True)
        assert new_bits.tolist() == [0, 1 << (total_bits - halvings)]
        assert counts.min() > 0.49 * x.size
        assert coded.refused == 0
        error = np.abs(back.astype(np.float64) - x)
        assert coded.largest_error == error.max() <= step / 2 + 1e-8
        last = coded.codes


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_codes_with_a_spare_bit_that_is_not_zero_are_refused(kernels):
    _native.use_instruction_set(kernels)
    codes = np.full(100, -12, np.int32)
    lattice.values(codes, 1e-3, 0, halvings=3, spare_bits=2)
    codes[[3, 97]] = 6, -1
    with pytest.raises(ValueError, match="2 of 100 codes are no multiples of 4"):
        lattice.values(codes, 1e-3, 0, halvings=3, spare_bits=2)


def test_a_value_whose_code_has_no_room_for_its_spare_bits_is_refused():
    x = np.array([2.0**24 - 1, 2.0**24, -(2.0**24), -(2.0**24) - 2], np.float32)
    coded = lattice.codes(x, 1.0, 3, spare_bits=7)
    assert (coded.codes != 0).tolist() == [True, False, True, False]
    assert coded.refused == 2
    assert lattice.codes(x, 1.0, 3).refused == 0
    weights = x.astype(ml_dtypes.bfloat16)
    assert lattice.cast_errors(x, 1.0, 3, spare_bits=7, weights=weights).refused == 2


def test_cast_errors_are_those_of_the_weights_that_a_restore_casts():
    x = (np.random.default_rng(0).standard_normal(3 * 65536 + 7) * 0.02).astype(np.float32)
    x[[3, 70_000]] = np.nan, np.inf  # no code, so no error
    live = x.astype(ml_dtypes.bfloat16)
    live[[3, 70_000]] = 1.0
    coded = lattice.codes(x, 1e-3, 5)
    restored = lattice.values(coded.codes, 1e-3, 5).astype(ml_dtypes.bfloat16).astype(np.float64)
    errors = restored - live.astype(np.float64)
    errors[[3, 70_000]] = 0
    found = lattice.cast_errors(x, 1e-3, 5, weights=live)
    assert (found.refused, found.largest_error) == (2, coded.largest_error)
    assert found.sum_squared_error == pytest.approx((errors**2).sum(), rel=1e-12)
    assert found.sum_squared_weights == pytest.approx(
        (live.astype(np.float64) ** 2).sum(), rel=1e-12
    )
    assert found.sum_squared_error > 0
    live[9] = np.nan  # the caller sees that the promise cannot be kept
    assert np.isnan(lattice.cast_errors(x, 1e-3, 5, weights=live).sum_squared_error)


@pytest.mark.parametrize("count", [0, 1, 63, 65536, 65537, 3 * 65536 + 5])
def test_bits_depend_neither_on_threads_nor_on_where_a_tensor_is_cut(count):
    x = (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)
    weights = x.astype(ml_dtypes.bfloat16)
    seed, step = MASK - 1000, 16e-6
    found = []
    for threads in (1, 3):
        _native.set_threads(threads)
        coded, back = there_and_back(x, step, seed, weights)
        found.append((coded, back))
    (one, values), (three, again) = found
    assert np.array_equal(one.codes, three.codes)
    assert one[1:] == three[1:]
    assert np.array_equal(bits(values), bits(again))
    cut = count // 3
    rest = lattice.codes(x[cut:], step, seed, weights=weights[cut:], start=cut)
    assert np.array_equal(rest.codes, one.codes[cut:])
    part = lattice.values(rest.codes, step, seed, weights=weights[cut:], start=cut)
    assert np.array_equal(bits(part), bits(values[cut:]))
    assert lattice.codes(x, step, seed, out=one.codes).codes is one.codes
    assert (
        lattice.values(one.codes, step, seed, weights=weights, out=one.codes.view(np.float32)).size
        == count
    )
    assert np.array_equal(one.codes.view(np.uint32), bits(values))


def test_a_drift_far_below_the_step_is_kept_on_average_and_flips_few_codes():
    """The phase is needed: rounding to a fixed lattice would leave every value unchanged."""
    count, step, drift = 200_000, 1e-3, 2e-5
    x = (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)
    (first, before), (second, after) = (
        there_and_back(v, step, 11) for v in (x, x + np.float32(drift))
    )
    assert (after.astype(np.float64) - before.astype(np.float64)).mean() == pytest.approx(
        drift, rel=0.1
    )
    flipped = np.count_nonzero(first.codes != second.codes)
    assert 0.01 * count < flipped < 0.03 * count  # a part of drift / step of them
    assert np.abs(first.codes - second.codes).max() == 1


def test_subnormals_count_also_on_a_thread_that_flushes_them():
    torch = pytest.importorskip("torch")
    x = np.arange(100, dtype=np.uint32).view(np.float32)
    expected, values = there_and_back(x, 2.0**-147, 5)
    assert np.count_nonzero(bits(values)) > 50
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found, back = there_and_back(x, 2.0**-147, 5)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(bits(back), bits(values))
    assert np.array_equal(found.codes, expected.codes)
    assert found[1:] == expected[1:]


X = np.zeros((4, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"values": X.astype(np.float64)}, "values must be"),
        ({"values": X[:, ::2]}, "values must be"),
        ({"step": 0.0}, "step must be from"),
        ({"step": float("nan")}, "step must be from"),
        ({"step": 1e39}, "step must be from"),
        ({"seed": -1}, "seed must be from"),
        ({"seed": 1 << 64}, "seed must be from"),
        ({"weights": np.zeros(16, np.uint16)}, "weights must be"),
        ({"weights": X}, "weights must be"),
        ({"start": -1}, "start must not be negative"),
        ({"halvings": -1}, "halvings must be from 0 to 31"),
        ({"halvings": 32}, "halvings must be from 0 to 31"),
        ({"spare_bits": -1}, "spare_bits must be from 0 to 7"),
        ({"spare_bits": 8}, "spare_bits must be from 0 to 7"),
        ({"halvings": 2, "step": 1e38}, "cannot have been halved 2 times"),
        ({"out": np.zeros(16, np.int32)}, "out must be"),
        ({"out": X}, "out must be"),
        ({"out": np.broadcast_to(np.int32(0), (4, 4))}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        lattice.codes(**{"values": X, "step": 1.0, "seed": 0} | arguments)


def test_codes_that_are_no_int32_are_refused():
    with pytest.raises(ValueError, match="codes must be"):
        lattice.values(X.astype(np.int64), 1.0, 0)


def test_the_extension_refuses_what_would_be_written_out_of_bounds():
    x, codes, weights = np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros(3, np.uint16)
    for call, says in (
        (lambda: _native.lattice_codes(x, None, 1.0, 0, codes[:3].copy(), 0, 0), "out"),
        (lambda: _native.lattice_codes(x, weights, 1.0, 0, codes, 0, 0), "weights"),
        (lambda: _native.lattice_codes(x, None, 1.0, 0, codes, 32, 0), "halvings"),
        (lambda: _native.lattice_cast_errors(x, weights, 1.0, 0, 0, 0), "weights"),
        (lambda: _native.lattice_cast_errors(x, weights, 1.0, 0, 0, 8), "spare_bits"),
        (lambda: _native.lattice_values(codes, None, 1.0, 0, x[:3].copy(), 0, 0), "out"),
        (lambda: _native.lattice_values(codes, weights, 1.0, 0, x, 0, 0), "weights"),
        (lambda: _native.lattice_values(codes, None, 1.0, 0, x, 0, 8), "spare_bits"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
