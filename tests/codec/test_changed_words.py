"""Changed words are coded in few bytes, come back bit for bit, and are refused if damaged."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from deltacheck.codec import changed_words
from deltacheck.codec.base import U8
from deltacheck.codec.extension import native
from deltacheck.errors import DamagedStream
from tests.reference import changes

PIECE_BYTES = 2 * changes.PIECE
# 40 words, of which words 0, 19 and 39 change by 1, -2 and 300.
GOLDEN = "0c0000003ff038014893033a0ff58aa8"


def weights(size: int) -> np.ndarray:
    """Bfloat16 weights, as their bits."""
    values = np.random.default_rng(size).standard_normal(size, np.float32) * 0.02
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def arrays(size: int, density: float, word_bytes: int, span: int) -> tuple[U8, U8]:
    """Two arrays of words, of which a share differs by at most ``span``."""
    random = np.random.default_rng(size)
    word = f"<u{word_bytes}"
    before = random.integers(0, 1 << 8 * word_bytes, size, np.uint64).astype(word)
    if word_bytes == 2 and size > 1:
        before[: size // 2] = weights(size)[: size // 2]
    now = before.copy()
    changed = random.random(size) < density
    now[changed] += random.integers(-span, span + 1, changed.sum()).astype(word)
    return before.view(np.uint8), now.view(np.uint8)


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0, 0.002, 0.02, 0.5, 1])
def test_words_come_back(word_bytes: int, density: float) -> None:
    for size, span in ((1, 1), (63, 1), (64, 2), (500, 1 << 20), (7000, 2)):
        before, now = arrays(size, density, word_bytes, span)
        payload = changed_words.encode(before, now, word_bytes)
        assert (changed_words.decode(payload, before, word_bytes) == now).all()
        if word_bytes <= 2:
            word = f"<u{word_bytes}"
            assert bytes(payload) == changes.encode(before.view(word), now.view(word))


def test_the_bytes_of_this_format_stay() -> None:
    before = np.arange(40, dtype=np.uint16) * 1000
    now = before.copy()
    now[[0, 19, 39]] += np.array([1, 65534, 300], np.uint16)
    golden = np.frombuffer(bytes.fromhex(GOLDEN), np.uint8)
    assert bytes(changed_words.encode(before.view(np.uint8), now.view(np.uint8), 2)).hex() == GOLDEN
    assert (changed_words.decode(golden, before.view(np.uint8), 2) == now.view(np.uint8)).all()


def test_long_arrays_are_coded_in_pieces() -> None:
    """Each piece is coded as if it were alone, on as many threads as there are."""
    before = np.tile(weights(1 << 16), 65)
    now = before.copy()
    now[:: 1 << 12] += 1
    old, new = before.view(np.uint8), now.view(np.uint8)
    payload = changed_words.encode(old, new, 2)
    parts = (slice(PIECE_BYTES), slice(PIECE_BYTES, None))
    alone = [bytes(changed_words.encode(old[part], new[part], 2)) for part in parts]
    assert bytes(payload) == b"".join(alone)
    assert (changed_words.decode(payload, old, 2) == new).all()


@pytest.mark.parametrize("probability", [0.0005, 0.01, 0.3])
def test_the_bytes_are_near_the_entropy(probability: float) -> None:
    """A step of equal size changes small weights more often, as rounding to bfloat16 does."""
    random = np.random.default_rng(1)
    before = weights(300_000)
    exponent = before.astype(np.int64) >> 7 & 255
    share = np.minimum(1, probability * 2.0 ** (exponent.max() - 3 - exponent))
    changed = random.random(before.size) < share
    now = before.copy()
    now[changed] += random.choice(np.array([1, 65535], np.uint16), changed.sum())
    counts, of = (np.bincount(exponent[which], minlength=256) for which in (changed, changed >= 0))
    ratios = counts[counts > 0] / of[counts > 0]
    inner = np.clip(ratios, 1e-12, 1 - 1e-12)
    entropy = -(inner * np.log2(inner) + (1 - inner) * np.log2(1 - inner))
    bits = float((entropy * of[counts > 0]).sum()) + changed.sum()
    size = len(changed_words.encode(before.view(np.uint8), now.view(np.uint8), 2))
    assert bits / 8 < size < 1.03 * bits / 8 + 40


def test_damage_is_refused() -> None:
    before, now = arrays(20_000, 0.02, 2, 2)
    payload = changed_words.encode(before, now, 2)
    for bad in (payload[:0], payload[:3], payload[:-1], np.append(payload, np.uint8(0))):
        with pytest.raises(DamagedStream):
            changed_words.decode(bad, before, 2)
    for position in range(0, payload.size, 7):
        bad = payload.copy()
        bad[position] ^= 0x41
        # Some damage is found here, and the rest by the digests of files and tensors.
        with contextlib.suppress(DamagedStream):
            assert changed_words.decode(bad, before, 2).size == now.size
    # A piece that is longer, or ends in a zero, which no encoder writes.
    for tail in (b"\1", b"\0", b"\1" * 9):
        longer = (payload.size - 4 + len(tail)).to_bytes(4, "little") + bytes(payload[4:]) + tail
        with pytest.raises(DamagedStream, match="last change"):
            changed_words.decode(np.frombuffer(longer, np.uint8), before, 2)


def test_arrays_of_other_words_are_refused() -> None:
    odd = np.zeros(3, np.uint8)
    for word_bytes in (0, 2, 4):
        with pytest.raises(ValueError, match="whole words"):
            native.encode_changes(odd, odd, word_bytes)
        with pytest.raises(ValueError, match="whole words"):
            native.apply_changes(odd, odd, word_bytes)
    with pytest.raises(ValueError, match="same size"):
        native.encode_changes(odd, odd[:2], 1)
