"""The law of Adam: the bits of the reference everywhere, the search for it, groups, refusals."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from deltacheck import _native
from deltacheck.codec import adam_law, default_codec
from deltacheck.codec.adam_law import Law, Sample
from deltacheck.codec.base import GRADIENT_LAW, LAWS, MEAN_LAW, ROW_METHOD, STEPS_LAW, Encoded
from deltacheck.errors import DamagedStream
from tests.reference import law as reference
from tests.reference.codec import ReferenceCodec

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")

F32 = np.float32
FORMS = list(itertools.product(range(5), range(5), range(2)))


def state(count, seed=0):
    """Return weight, m and v as training has them."""
    random = np.random.default_rng(seed)
    w = (random.standard_normal(count) * 0.05).astype(F32)
    m = (random.standard_normal(count) * 1e-3).astype(F32)
    v = (random.standard_normal(count) ** 2 * 1e-5 + 1e-8).astype(F32)
    return w, m, v


def bfloat16(values):
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


def gradients(count, seed=1):
    return (np.random.default_rng(seed).standard_normal(count) * 3e-3).astype(F32)


def step(parts, gradient, *, rate=1e-4, eps=1e-8):
    """Return the next state, with the forms of torch."""
    w, m, v = parts
    content = Law(GRADIENT_LAW, 1, 1).content()
    law = reference.Law.of(content)
    m = reference.MEANS[1](law, m, gradient)
    v = reference.SQUARES[1](law, v, gradient)
    w = w * F32(1 - rate * 0.1) - F32(rate) * (m / (np.sqrt(v) + F32(eps)))
    return w, m, v


def run_of(before, now):
    """Return (current, base, bounds) of two groups."""
    bounds = np.arange(0, now.size + 1, now.shape[1] * now.shape[2]).astype(np.uint64)
    return now.reshape(-1).view(np.uint8), before.reshape(-1).view(np.uint8), bounds


def sample_of(before, now):
    """Return the elements of two groups of which a law is found."""
    places = adam_law.sample_places(now.size // 3)
    return Sample(before.reshape(-1)[places], now.reshape(-1)[places])


def encoded_by(codec, before, now, law):
    """Encode a group, and check base and inverse."""
    current, base, bounds = run_of(before, now)
    shadow = base.copy()
    encoded, _ = codec.encode(current, shadow, bounds, 4, law=(law.method, law.content()))
    assert shadow.tobytes() == current.tobytes()
    decoded = base.copy()
    codec.apply(encoded, decoded, bounds, 4)
    assert decoded.tobytes() == current.tobytes()
    return encoded


def assert_equal(first: Encoded, second: Encoded):
    assert first.rows.tolist() == second.rows.tolist()
    assert first.streams.keys() == second.streams.keys()
    for name, stream in first.streams.items():
        assert stream.tobytes() == second.streams[name].tobytes(), name


@pytest.mark.parametrize("name", _native.instruction_sets())
@pytest.mark.parametrize("method", LAWS)
def test_every_instruction_set_has_the_bytes_of_the_reference(name, method):
    _native.use_instruction_set(name)
    before = state(5000)
    groups = [adam_law.grouped(before), adam_law.grouped(step(before, bfloat16(gradients(5000))))]
    for mean, square, weight in FORMS:
        law = Law(
            method, mean, square, weight, eps=1e-9, rate=-1e-4, earlier=-3e-5, pull=-1e-6, scale=0.7
        )
        expected = encoded_by(ReferenceCodec(), *groups, law)
        assert_equal(encoded_by(default_codec(), *groups, law), expected)


@pytest.mark.parametrize("name", _native.instruction_sets())
@pytest.mark.parametrize("method", LAWS)
def test_any_bits_come_back_with_the_bytes_of_the_reference(name, method):
    """Subnormals, infinities and NaN included: of each NaN there is one bit pattern."""
    _native.use_instruction_set(name)
    random = np.random.default_rng(3)
    before = random.integers(0, 1 << 32, 9000, dtype=np.uint32).view(F32).reshape(1, 3, 3000)
    usual = np.arange(before.size).reshape(before.shape) % 50 > 0
    before = np.where(usual, adam_law.grouped(state(3000)), before)
    for mean, square, weight in FORMS:
        law = Law(method, mean, square, weight, eps=1e-9, rate=-1e-3, pull=-1e-5, keep=0.9999)
        content = reference.Law.of(law.content())
        base = before.reshape(-1).view(np.uint32)
        # Most elements follow the law, so the chunk is stored by it.
        now = reference.step(
            content, base, bfloat16(gradients(3000)).view(np.uint32)[:] >> 16, None
        )
        now = np.where(random.random(now.size) < 0.01, base, now).view(F32).reshape(before.shape)
        expected = encoded_by(ReferenceCodec(), before, now, law)
        assert_equal(encoded_by(default_codec(), before, now, law), expected)
        if mean == square == weight == 0:
            assert expected.rows[:, ROW_METHOD].tolist() == [method]


def test_the_number_of_threads_does_not_matter():
    before = state(700_000)
    groups = [
        adam_law.grouped(before),
        adam_law.grouped(step(before, bfloat16(gradients(700_000)))),
    ]
    results = []
    for threads in (1, 3):
        _native.set_threads(threads)
        results.append(encoded_by(default_codec(), *groups, Law(GRADIENT_LAW, 1, 1, rate=-1e-4)))
    assert_equal(*results)
    assert results[0].rows.shape[0] == 9


def test_a_fused_sum_is_rounded_once():
    random = np.random.default_rng(4)
    a, b, c = (
        (random.standard_normal(500) * 2.0 ** random.integers(-12, 12, 500)).astype(F32)
        for _ in range(3)
    )
    c[::2] = -(a[::2] * b[::2]) * F32(1 + 2.0**-22)  # almost everything cancels
    for x, y, z, result in zip(a, b, c, reference.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(result, F32(-np.inf)), np.nextafter(result, F32(np.inf))
        distance = abs(exact - Fraction(float(result)))
        assert all(distance <= abs(exact - Fraction(float(near))) for near in (below, above))


def test_subnormals_count_also_on_a_thread_that_flushes_them():
    torch = pytest.importorskip("torch")
    before = tuple(part * F32(1e-36) for part in state(3000))
    groups = [
        adam_law.grouped(before),
        adam_law.grouped(step(before, gradients(3000) * F32(1e-36))),
    ]
    law = Law(MEAN_LAW, rate=-1e-4)
    expected = encoded_by(ReferenceCodec(), *groups, law)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        _native.set_threads(1)
        assert_equal(encoded_by(default_codec(), *groups, law), expected)
    finally:
        torch.set_flush_denormal(False)


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.7312, 0.0371])
def test_clipped_bfloat16_gradients_are_found_and_stored(scale):
    before = state(200_000)
    now = step(before, bfloat16(gradients(200_000)) * F32(scale))
    groups = [adam_law.grouped(before), adam_law.grouped(now)]
    law = adam_law.find(sample_of(*groups), [(0.9, 0.999)], 1e-8, one_step=True)
    assert law is not None
    assert (law.method, law.mean) == (GRADIENT_LAW, 1)
    # Powers of two belong to the gradients.
    assert math.frexp(law.scale)[0] == pytest.approx(math.frexp(scale)[0], rel=1e-7)
    encoded = encoded_by(default_codec(), *groups, law)
    assert set(encoded.rows[:, ROW_METHOD].tolist()) == {GRADIENT_LAW}
    exceptions = sum(encoded.streams[name].size for name in ("gaps", "values"))
    assert exceptions < 0.1 * 200_000


def test_float32_gradients_follow_from_m():
    before = state(200_000)
    groups = [adam_law.grouped(before), adam_law.grouped(step(before, gradients(200_000)))]
    law = adam_law.find(sample_of(*groups), [(0.9, 0.95), (0.9, 0.999)], 1e-8, one_step=True)
    assert law is not None
    assert (law.method, law.beta2) == (MEAN_LAW, 0.999)
    assert law.rate == pytest.approx(-1e-4, rel=1e-3)
    again = adam_law.find(sample_of(*groups), [(0.9, 0.999)], 1e-8, one_step=True, last_law=law)
    assert again is not None
    assert again.square == law.square


def test_weights_follow_after_several_steps():
    before = now = state(100_000)
    for number in range(4):
        now = step(now, gradients(100_000, seed=number), rate=1e-3)
    groups = [adam_law.grouped(before), adam_law.grouped(now)]
    law = adam_law.find(sample_of(*groups), [(0.9, 0.999)], 1e-8, one_step=False)
    assert law is not None
    assert law.method == STEPS_LAW
    encoded = encoded_by(default_codec(), *groups, law)
    plain, _ = default_codec().encode(
        run_of(*groups)[0], run_of(*groups)[1].copy(), run_of(*groups)[2], 4
    )
    assert encoded.streams["diff2"].mean() < plain.streams["diff2"].mean()


def test_a_state_of_another_optimizer_has_no_law():
    before, now = adam_law.grouped(state(50_000)), adam_law.grouped(state(50_000, seed=5))
    assert adam_law.find(sample_of(before, now), [(0.9, 0.999)], 1e-8, one_step=True) is None
    assert adam_law.find(sample_of(before, now), [(0.9, 0.999)], 1e-8, one_step=False) is None
    now[0, 1, 7] = np.nan
    assert adam_law.find(sample_of(before, now), [(0.9, 0.999)], 1e-8, one_step=True) is None


def test_a_wrong_law_costs_bytes_and_no_bits():
    before, now = adam_law.grouped(state(50_000)), adam_law.grouped(state(50_000, seed=5))
    for method in (GRADIENT_LAW, MEAN_LAW):
        encoded = encoded_by(default_codec(), before, now, Law(method))
        assert not set(encoded.rows[:, ROW_METHOD].tolist()) & set(LAWS)
        assert_equal(encoded, encoded_by(ReferenceCodec(), before, now, Law(method)))
    encoded_by(default_codec(), before, now, Law(STEPS_LAW))


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 1000, 87381, 87382, 200_001])
def test_a_part_of_a_group_is_the_leaf(count):
    parts = [np.arange(count, dtype=F32) + 1000 * number for number in range(3)]
    group = adam_law.grouped(parts)
    blocks, _, size = group.shape
    assert group.shape == adam_law.group_shape(count)
    assert blocks * size - count < blocks
    for number, part in enumerate(parts):
        assert np.array_equal(adam_law.part_of(group, number, 0, count), part)
        some = slice(count // 3, 2 * count // 3)
        assert np.array_equal(adam_law.part_of(group, number, some.start, some.stop), part[some])


def test_a_chunk_of_a_group_is_a_block():
    from deltacheck.leaf.spec import LeafSpec

    for count in (5, 87381, 87382, 174_762, 174_763, 10_000_019):
        spec = LeafSpec.of("w", adam_law.group_shape(count), "float32")
        assert spec.chunk == (1, *spec.shape[1:])


# --- refusals -------------------------------------------------------------------------------------


def refusal(codec, encoded, before, now):
    _, base, bounds = run_of(before, now)
    with pytest.raises(DamagedStream) as caught:
        codec.apply(encoded, base.copy(), bounds, 4)
    return str(caught.value)


def test_damaged_laws_are_refused_with_the_same_words():
    before = state(5000)
    groups = [adam_law.grouped(before), adam_law.grouped(step(before, bfloat16(gradients(5000))))]
    groups[1][0, 0, ::100] += F32(1e-7)  # exceptions
    law = adam_law.find(sample_of(*groups), [(0.9, 0.999)], 1e-8, one_step=True)
    assert law is not None
    good = encoded_by(default_codec(), *groups, law)
    for position in (0, 4, 8, 12):  # forms, and the reserved number
        content = good.streams["law"].copy()
        content[position] = 77
        bad = Encoded(good.rows, {**good.streams, "law": content})
        texts = {refusal(codec, bad, *groups) for codec in (default_codec(), ReferenceCodec())}
        assert texts == {"chunk 0: its law is not known"}
    for name in ("law", "plane0", "values", "tiles"):
        bad = Encoded(good.rows, {**good.streams, name: good.streams[name][:-1]})
        texts = {refusal(codec, bad, *groups) for codec in (default_codec(), ReferenceCodec())}
        assert texts == {f"chunk 0: stream {name} ends inside it"}
    short = np.array([0, 5000], np.uint64)
    for codec in (default_codec(), ReferenceCodec()):
        with pytest.raises(DamagedStream, match="5000 words of 4 bytes cannot be gradient law"):
            codec.apply(good, np.zeros(20_000, np.uint8), short, 4)


def test_a_law_needs_words_of_four_bytes_and_a_base():
    current = np.zeros(24, np.uint8)
    bounds = np.array([0, 6], np.uint64)
    content = Law(MEAN_LAW).content()
    with pytest.raises(ValueError, match="method 9 cannot be asked for"):
        _native.encode(current, None, bounds, 4, MEAN_LAW, law=content)
    with pytest.raises(ValueError, match="method 9 cannot be asked for"):
        _native.encode(
            current, current.copy(), np.array([0, 12], np.uint64), 2, MEAN_LAW, law=content
        )
    with pytest.raises(ValueError, match="method 9 cannot be asked for"):
        _native.encode(current, current.copy(), bounds, 4, MEAN_LAW)
    with pytest.raises(ValueError, match="64 bytes"):
        _native.encode(current, current.copy(), bounds, 4, MEAN_LAW, law=b"short")
