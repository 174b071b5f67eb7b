"""Master weights on a lattice: the bound, the cells of the exactly stored weights, what is idempotent, and the same bits everywhere."""

import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

_native = pytest.importorskip("deltacheck._native")
from deltacheck.codec.lattice import LEAST_STEP, MOST_STEP, quantise  # noqa: E402

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

MASK = 2**64 - 1
MOST = float(np.finfo(np.float32).max)


# --- the plain telling: one element, Python's own numbers ----------------------------------------------------------------------


def phase(number):
    z = number & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return ((z ^ z >> 31) >> 40) * 2.0**-24


def to_float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def told_plainly(x, step, number):
    u = phase(number)
    middle = (math.floor(x / step + u) - u + 0.5) * step
    return to_float32(min(max(middle, -MOST), MOST))


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


# --- what must hold --------------------------------------------------------------------------------------------------------------


@given(
    st.lists(finite_floats(), min_size=1, max_size=70),
    steps(),
    st.integers(0, MASK),
    st.sampled_from(_native.instruction_sets()),
)
def test_every_value_is_the_middle_of_its_cell_as_the_definition_has_it(values, step, seed, kernels):
    _native.use_instruction_set(kernels)
    x = np.array(values, np.float32)
    found = quantise(x, step, seed)
    expected = [told_plainly(float(value), step, seed + i) for i, value in enumerate(x)]
    assert np.array_equal(bits(found.values), bits(expected))
    assert found.nonfinite == 0
    assert found.largest_error == max(abs(to - float(value)) for to, value in zip(expected, x, strict=True))


@given(st.lists(finite_floats(), min_size=1, max_size=70), steps(), st.integers(0, MASK))
def test_no_error_is_above_half_a_step_and_half_a_unit_in_the_last_place(values, step, seed):
    x = np.array(values, np.float32)
    moved = quantise(x, step, seed).values.astype(np.float64)
    with np.errstate(over="ignore"):
        ulp = np.spacing(np.minimum(np.abs(moved), MOST).astype(np.float32)).astype(np.float64)
    bound = step / 2 + ulp / 2 + 2.0**-50 * (np.abs(x.astype(np.float64)) + step)
    assert np.all(np.abs(moved - x) <= bound)


@given(
    st.lists(st.floats(-(2.0**22), 2.0**22), min_size=1, max_size=70), st.floats(-120, 100), st.integers(0, MASK), st.booleans()
)
def test_a_second_time_changes_nothing_where_float32_can_tell_the_cells_apart(steps_away, exponent, seed, with_weights):
    step = 2.0**exponent
    x = np.array([k * step for k in steps_away]).astype(np.float32)
    x = x[np.abs(x) <= 2.0**22 * step]
    weights = x.astype(ml_dtypes.bfloat16) if with_weights else None
    once = quantise(x, step, seed, weights).values
    assert np.array_equal(bits(quantise(once, step, seed, weights).values), bits(once))


@given(
    st.lists(finite_floats(), min_size=1, max_size=70),
    steps(),
    st.integers(0, MASK),
    st.sampled_from(_native.instruction_sets()),
)
def test_with_weights_a_value_casts_to_its_weight_and_is_no_farther_away(values, step, seed, kernels):
    _native.use_instruction_set(kernels)
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        weights = x.astype(ml_dtypes.bfloat16)
    free, held = quantise(x, step, seed).values, quantise(x, step, seed, weights).values
    with np.errstate(over="ignore"):
        assert np.array_equal(held.astype(ml_dtypes.bfloat16).view(np.uint16), weights.view(np.uint16))
    exact = x.astype(np.float64)
    assert np.all(np.abs(held - exact) <= np.abs(free - exact))


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_any_weight_that_is_no_nan_is_kept_whatever_the_value(kernels):
    """Weights and values that do not belong together, all 65536 weights: infinities, subnormals and zeros of both signs have cells, too."""
    _native.use_instruction_set(kernels)
    weights = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    no_nan = ~np.isnan(weights.astype(np.float32))
    for value in (0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-40):
        x = np.full(65536, value, np.float32)
        held = quantise(x, 1e-3, 7, weights).values
        assert np.isfinite(held).all()
        with np.errstate(over="ignore"):
            cast = held.astype(ml_dtypes.bfloat16).view(np.uint16)
        assert np.array_equal(cast[no_nan], weights.view(np.uint16)[no_nan])
        assert np.array_equal(bits(held[~no_nan]), bits(quantise(x, 1e-3, 7).values[~no_nan]))


@pytest.mark.parametrize("kernels", _native.instruction_sets())
def test_a_cell_reaches_just_as_far_as_rounding_does(kernels):
    _native.use_instruction_set(kernels)
    weights = np.array([0x3F80, 0x3F81, 0x0000, 0x8000, 0x7F7F, 0xFF80], np.uint16)
    far_below, far_above = np.full(6, -MOST, np.float32), np.full(6, MOST, np.float32)
    low, high = (bits(quantise(x, 1.0, 0, weights).values).tolist() for x in (far_below, far_above))
    assert low == [0x3F7F8000, 0x3F808001, 0x00000000, 0x80008000, 0x7F7E8001, 0xFF7FFFFF]
    assert high == [0x3F808000, 0x3F817FFF, 0x00008000, 0x80000000, 0x7F7F7FFF, 0xFF7F8000]


def test_values_that_are_not_finite_stay_as_they_are_and_are_counted():
    x = np.array([np.inf, -np.inf, 1.0] * 20, np.float32)
    x.view(np.uint32)[5] = 0x7FA00001  # a signalling NaN with a payload
    found = quantise(x, 0.5, 3, np.zeros(60, np.uint16))
    assert found.nonfinite == 41
    kept = ~np.isfinite(x)
    assert np.array_equal(bits(found.values)[kept], bits(x)[kept])
    assert np.isfinite(found.largest_error)


@pytest.mark.parametrize("count", [0, 1, 63, 65536, 65537, 3 * 65536 + 5])
def test_bits_depend_neither_on_threads_nor_on_kernels_nor_on_where_a_tensor_is_cut(count):
    random = np.random.default_rng(0)
    x = (random.standard_normal(count) * 0.02).astype(np.float32)
    weights = x.astype(ml_dtypes.bfloat16)
    seed, step = MASK - 1000, 16e-6
    expected = quantise(x, step, seed, weights)
    for kernels in _native.instruction_sets():
        for threads in (1, 3):
            _native.use_instruction_set(kernels)
            _native.set_threads(threads)
            found = quantise(x, step, seed, weights)
            assert np.array_equal(bits(found.values), bits(expected.values))
            assert found[1:] == expected[1:]
    cut = count // 3
    rest = quantise(x[cut:], step, (seed + cut) & MASK, weights[cut:])
    assert np.array_equal(bits(rest.values), bits(expected.values[cut:]))
    assert quantise(x, step, seed, weights, out=x).values is x
    assert np.array_equal(bits(x), bits(expected.values))


def test_a_drift_far_below_the_step_is_kept_on_average():
    """Why there is a phase: rounding to a fixed lattice would leave every value where it was."""
    count, step, drift = 200_000, 1e-3, 2e-5
    x = (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32)
    before, after = (quantise(v, step, 11).values.astype(np.float64) for v in (x, x + np.float32(drift)))
    assert (after - before).mean() == pytest.approx(drift, rel=0.1)
    assert np.count_nonzero(after != before) < 0.03 * count


def test_subnormals_count_also_on_a_thread_that_flushes_them():
    torch = pytest.importorskip("torch")
    x = np.arange(100, dtype=np.uint32).view(np.float32)
    expected = quantise(x, 2.0**-147, 5)
    assert np.count_nonzero(bits(expected.values)) > 50
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = quantise(x, 2.0**-147, 5)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(bits(found.values), bits(expected.values))
    assert found.largest_error == expected.largest_error


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
        ({"out": np.zeros(16, np.float32)}, "out must be"),
        ({"out": np.broadcast_to(np.float32(0), (4, 4))}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        quantise(**{"values": X, "step": 1.0, "seed": 0} | arguments)


def test_an_output_that_overlaps_the_input_is_refused():
    room = np.zeros(10, np.float32)
    with pytest.raises(ValueError, match="share no memory"):
        quantise(room[:8], 1.0, 0, out=room[2:])


def test_the_extension_refuses_what_would_be_written_out_of_bounds():
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="out"):
        _native.quantise(x, None, 1.0, 0, x[:3].copy())
    with pytest.raises(ValueError, match="weights"):
        _native.quantise(x, np.zeros(3, np.uint16), 1.0, 0, x)
