"""Whatever the numbers, the cuts, the memory, the kernels and the threads: native bytes are the
reference's, and they come back.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltacheck import _native
from deltacheck.codec import NativeCodec
from deltacheck.codec.base import (
    BITMAP,
    DIFF,
    PLANES,
    RAW,
    ROW_METHOD,
    SPARSE,
    STREAMS,
    TILE_BYTES,
    Encoded,
)
from tests.contracts.codec import same
from tests.reference.codec import ReferenceCodec

# dtype -> bytes of a word: the widest power of two up to 8 that its elements are made of.
DTYPES = {
    np.dtype(np.float32): 4,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(np.float16): 2,
    np.dtype(ml_dtypes.float8_e4m3fn): 1,
    np.dtype(np.int8): 1,
    np.dtype(np.int32): 4,
    np.dtype(np.int64): 8,
    np.dtype(np.float64): 8,
    np.dtype(np.complex64): 8,
    np.dtype(np.complex128): 8,
}

# As bits of a float32, float16 and bfloat16, one after the other: NaNs with payloads and signs,
# -0.0, subnormals, infinities.
ODD = {
    4: [
        0x7FC00001,
        0xFFC00002,
        0x7F800001,
        0x80000000,
        0,
        1,
        0x807FFFFF,
        0x7F800000,
        0xFF800000,
        0xFFFFFFFF,
    ],
    2: [0x7E01, 0xFE02, 0x7FC1, 0xFFC2, 0x8000, 0, 1, 0x83FF, 0x7C00, 0x7F80],
    1: [0x7F, 0xFF, 0x80, 0, 1, 0x81],
    8: [
        0x7FF8000000000001,
        0xFFF8000000000002,
        0x8000000000000000,
        0,
        1,
        0x800FFFFFFFFFFFFF,
        0x7FF0000000000000,
        2**64 - 1,
    ],
}


pytestmark = pytest.mark.usefixtures("encoder_settings_restored")


def numbers(dtype: np.dtype[Any], count: int, random: np.random.Generator) -> NDArray[Any]:
    """As training leaves them, where the type has a scale; else all bits in use."""
    if dtype.kind in "iu":
        return np.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy()
    values = random.standard_normal(count)
    return (values + 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.uint64], int]:
    """(current, base, bounds, word_bytes): words of a dtype, some of them moved, some of them odd;
    any bounds.
    """
    dtype = draw(st.sampled_from(list(DTYPES)))
    width = DTYPES[dtype]
    tile = TILE_BYTES // dtype.itemsize
    count = draw(
        st.one_of(
            st.integers(0, 200),
            st.sampled_from([tile - 1, tile, tile + 1, 2 * tile + 63, 17 * tile + 1]),
        )
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = numbers(dtype, count, random).view(f"<u{width}")
    density = draw(st.sampled_from([0.0, 0.0003, 0.004, 0.03, 0.12, 0.5, 0.97, 1.0]))
    far = draw(st.sampled_from([1, 3, 127, 128, 129, 20_000, 2**40]))
    steps = (
        random.integers(-far, far + 1, base.size)
        .astype(np.int64)
        .view(np.uint64)
        .astype(base.dtype)
    )
    current = np.where(random.random(base.size) < density, base + steps, base)
    odd = np.array(ODD[width], base.dtype)
    for array in (current, base):
        chosen = random.random(array.size) < draw(st.sampled_from([0.0, 0.0, 0.01, 0.3]))
        array[chosen] = odd[random.integers(0, odd.size, int(chosen.sum()))]
    cuts = draw(st.lists(st.integers(0, base.size), max_size=5).map(sorted))
    return current, base, np.array([0, *cuts, base.size], np.uint64), width


def moved_to(content: NDArray[Any], offset: int) -> NDArray[np.uint8]:
    """The same bytes at an address that is ``offset`` past a multiple of 64."""
    room = np.empty(content.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + content.nbytes] = content.view(np.uint8)
    return room[start : start + content.nbytes]


KERNELS = st.sampled_from(_native.instruction_sets())
OFFSETS = st.sampled_from([0, 0, 1, 2, 7, 63])


@settings(max_examples=120)
@given(pairs(), KERNELS, st.integers(1, 4), OFFSETS, st.booleans(), st.booleans())
def test_native_bytes_are_the_references_and_every_bit_comes_back(
    pair: tuple[NDArray[Any], NDArray[Any], NDArray[np.uint64], int],
    kernels: str,
    threads: int,
    offset: int,
    with_base: bool,
    ordered: bool,
) -> None:
    current, base, bounds, width = pair
    _native.use_instruction_set(kernels)
    _native.set_threads(threads)
    shadow = moved_to(base, offset) if with_base else None
    encoded, returned = NativeCodec().encode(
        moved_to(current, offset), shadow, bounds, width, ordered=ordered
    )
    expected, _ = ReferenceCodec().encode(
        current.view(np.uint8),
        base.view(np.uint8).copy() if with_base else None,
        bounds,
        width,
        ordered=ordered,
    )
    assert same(encoded, expected)
    if shadow is not None:
        assert returned is shadow
        assert np.array_equal(shadow, current.view(np.uint8))
    decoded = moved_to(base if with_base else np.zeros_like(base), offset)
    NativeCodec().apply(encoded, decoded, bounds, width)
    assert np.array_equal(decoded, current.view(np.uint8))


@settings(max_examples=120)
@given(
    pairs(),
    st.sampled_from([SPARSE, BITMAP, DIFF, PLANES, RAW]),
    KERNELS,
    st.integers(1, 4),
    OFFSETS,
)
@example(
    (np.zeros(0, np.uint8), np.zeros(0, np.uint8), np.zeros(1, np.uint64), 1), SPARSE, "plain", 1, 0
)
def test_a_method_that_would_not_be_chosen_gives_the_same_bytes_everywhere_and_comes_back(
    pair: tuple[NDArray[Any], NDArray[Any], NDArray[np.uint64], int],
    method: int,
    kernels: str,
    threads: int,
    offset: int,
) -> None:
    current, base, bounds, width = pair
    now = current.view(np.uint8)

    def encode(kernels: str, threads: int, offset: int) -> Encoded:
        _native.use_instruction_set(kernels)
        _native.set_threads(threads)
        shadow = moved_to(base, offset)
        rows, streams = _native.encode(moved_to(now, offset), shadow, bounds, width, method)
        assert np.array_equal(shadow, now)
        return Encoded(
            rows,
            {
                name: stream
                for name, stream in zip(STREAMS, streams, strict=True)
                if stream is not None
            },
        )

    encoded = encode(kernels, threads, offset)
    assert same(encoded, encode("plain", 1, 0))
    assert set(encoded.rows[:, ROW_METHOD].tolist()) <= (
        {method, RAW} if method in (SPARSE, BITMAP) else {method}
    )
    for codec in (NativeCodec(), ReferenceCodec()):
        decoded = base.view(np.uint8).copy()
        codec.apply(encoded, decoded, bounds, width)
        assert np.array_equal(decoded, now)


@pytest.mark.parametrize("method", [SPARSE, BITMAP, DIFF, 6])
def test_a_method_that_needs_a_base_or_does_not_exist_is_refused(method: int) -> None:
    with pytest.raises(ValueError, match=f"method {method}"):
        _native.encode(np.zeros(4, np.uint8), None, np.array([0, 4], np.uint64), 1, method)
