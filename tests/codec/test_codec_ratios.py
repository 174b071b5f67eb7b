"""First moments in steps of a part of the root of their second moments: the bound, the law of Adam,
values without a code, and the bits of the reference everywhere.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import _native
from deltacheck.codec.lossy import ratios
from deltacheck.policy import adam
from tests.reference import codes as reference_codes

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

LIMIT = adam.moment_limit(0.9, 0.999)
LEAST = np.float32(2.0**-126)


def pair(random, count=5000):
    """Return both moments as training has them: any size of v, m within the law."""
    v = (random.standard_normal(count) * 10.0 ** random.uniform(-15, 3, count)).astype(np.float32)
    v = np.maximum(v * v, LEAST)
    m = random.uniform(-1, 1, count) ** 3 * np.sqrt(LIMIT * v.astype(np.float64)) * 0.999
    return m.astype(np.float32), v


def anything(random, count):
    return random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("step", [0.5, 0.07, 2.0])
def test_a_value_errs_by_half_a_step_and_obeys_the_law(step):
    m, v = pair(np.random.default_rng(1))
    coded = ratios.codes(m, v, step, limit=LIMIT)
    back = ratios.values(coded.codes, v, step, limit=LIMIT).astype(np.float64)
    error = np.abs(back - m) / np.sqrt(v.astype(np.float64))
    assert coded.refused == 0
    assert coded.largest_error == error.max() <= step / 2 * (1 + 1e-6)
    assert error.max() > step / 3
    assert adam.law_violations(back.astype(np.float32), v, LIMIT) == 0
    small = np.abs(m) < 0.499 * step * np.sqrt(v.astype(np.float64))
    assert small.any()
    assert np.all(coded.codes[small] == 0)
    assert np.all(back[coded.codes == 0] == 0)
    assert not np.signbit(back[coded.codes == 0]).any()


def test_values_obey_the_law_beside_any_second_moment():
    """It may be another one than that of the codes, or the codes may be of nothing."""
    random = np.random.default_rng(2)
    codes = random.integers(-127, 128, 5000).astype(np.int8)
    _, v = pair(random)
    back = ratios.values(codes, v, 0.5, limit=LIMIT)
    assert adam.law_violations(back, v, LIMIT) == 0
    assert np.all(np.sign(back) == np.sign(codes))
    # Without a limit, they need not.
    assert adam.law_violations(ratios.values(codes, v, 0.5), v, LIMIT) > 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.floats(2.0**-32, 2.0**32))
def test_whatever_has_a_code_is_within_half_a_step_of_it(m_bits, v_bits, step):
    m, v = (np.array([bits], np.uint32).view(np.float32) for bits in (m_bits, v_bits))
    coded = ratios.codes(m, v, step)
    if coded.refused:
        assert coded.codes[0] == 0
        return
    back = ratios.values(coded.codes, v, step)
    assert math.isfinite(back[0])
    if v[0] >= LEAST:
        root = math.sqrt(float(v[0]))
        slack = 2.0**-23 * abs(float(m[0]))
        assert abs(float(back[0]) - float(m[0])) <= step / 2 * root * (1 + 1e-12) + slack
    else:
        assert back[0] == 0
        assert abs(m[0]) < 2.0**-60


def test_values_without_a_code_are_counted():
    nan, inf = float("nan"), float("inf")
    m = np.array([nan, inf, -inf, 64, -63.7, 1e-19, 1e-18, 1, 0, 0, 1, 1], np.float32)
    v = np.array([1, 1, 1, 1, 1, 0, 0, 1e-40, nan, -1, nan, inf], np.float32)
    coded = ratios.codes(m, v, 0.5)
    assert coded.codes.tolist() == [0, 0, 0, 0, -127, 0, 0, 0, 0, 0, 0, 0]
    # The first three, 64, 1e-18 beside no second moment, and 1 beside one without a root.
    assert coded.refused == 8
    assert coded.largest_error == pytest.approx(0.2, abs=1e-5)


@pytest.mark.parametrize(
    ("code", "v"), [(-128, 1.0), (1, 0.0), (1, 1e-40), (-1, -1.0), (1, math.nan), (1, math.inf)]
)
def test_a_code_that_no_value_has_is_refused(code, v):
    codes, second = np.array([0, code], np.int8), np.array([1, v], np.float32)
    with pytest.raises(ValueError, match="1 of 2 codes are no ratio codes"):
        ratios.values(codes, second, 0.5)


@pytest.mark.parametrize("kernels", _native.instruction_sets())
@pytest.mark.parametrize(("step", "limit"), [(0.5, LIMIT), (0.5, 0.0), (2.0**-32, 1.0), (9.0, 4.0)])
def test_bits_are_those_of_the_reference(step, limit, kernels):
    _native.use_instruction_set(kernels)
    random = np.random.default_rng(3)
    for count in (0, 1, 33, 3000):
        for m, v in (
            pair(random, count),
            (anything(random, count), pair(random, count)[1]),
            (anything(random, count), anything(random, count)),
        ):
            coded = ratios.codes(m, v, step, limit=limit)
            codes, refused, largest = reference_codes.ratio_codes(m, v, step, limit)
            assert np.array_equal(coded.codes, codes)
            assert coded[1:] == (refused, largest)
            some = random.integers(-128, 128, count).astype(np.int8)
            back = np.empty(count, np.float32)
            bad = _native.ratio_values(some.view(np.uint8), v, step, limit, back)
            expected, expected_bad = reference_codes.ratio_values(some, v, step, limit)
            assert np.array_equal(back.view(np.uint32), expected.view(np.uint32))
            assert bad == expected_bad


def test_bits_depend_neither_on_threads_nor_on_where_a_tensor_is_cut():
    m, v = pair(np.random.default_rng(4), 3 * 65536 + 5)
    coded = []
    for threads in (1, 3):
        _native.set_threads(threads)
        coded.append(ratios.codes(m, v, 0.5, limit=LIMIT))
    assert np.array_equal(coded[0].codes, coded[1].codes)
    assert coded[0][1:] == coded[1][1:]
    cut = m.size // 3
    rest = ratios.codes(m[cut:], v[cut:], 0.5, limit=LIMIT)
    assert np.array_equal(rest.codes, coded[0].codes[cut:])
    back = ratios.values(coded[0].codes, v, 0.5, limit=LIMIT)
    assert np.array_equal(ratios.values(rest.codes, v[cut:], 0.5, limit=LIMIT), back[cut:])


X, C = np.ones((4, 4), np.float32), np.ones((4, 4), np.int8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": X.astype(np.float64)}, "values must be"),
        ({"second": X[:2]}, "second must have the shape of values"),
        ({"second": X.astype(np.float64)}, "second must be"),
        ({"step": 0.0}, "step must be from"),
        ({"step": math.nan}, "step must be from"),
        ({"limit": -1.0}, "limit must be at least 0"),
        ({"limit": math.nan}, "limit must be at least 0"),
        ({"out": C[:2]}, "out must be"),
        ({"out": X}, "out must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ratios.codes(**{"values": X, "second": X, "step": 0.5} | arguments)


def test_codes_of_another_type_are_refused():
    with pytest.raises(ValueError, match="codes must be"):
        ratios.values(C.view(np.uint8), X, 0.5)
