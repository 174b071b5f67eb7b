"""Changed words are coded in few bytes, come back bit for bit, and are refused if damaged."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from numcodecs import Zstd

from deltacheck.codec import changed_words
from deltacheck.codec.base import U8
from deltacheck.errors import DamagedStream


def arrays(size: int, density: float, word_bytes: int, span: int) -> tuple[U8, U8]:
    """Two arrays of words, of which a share differs by at most ``span``."""
    random = np.random.default_rng(size)
    word = f"<u{word_bytes}"
    before = random.integers(0, 1 << 8 * word_bytes, size, np.uint64).astype(word)
    now = before.copy()
    changed = random.random(size) < density
    now[changed] += random.integers(-span, span + 1, changed.sum()).astype(word)
    return before.view(np.uint8), now.view(np.uint8)


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0, 0.002, 0.02, 0.5, 1])
def test_words_come_back(word_bytes: int, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed_words, "_PIECE_WORDS", 3000)
    for size, span in ((1, 1), (500, 1 << 20), (7000, 2)):
        before, now = arrays(size, density, word_bytes, span)
        payload = np.frombuffer(changed_words.encode(before, now, word_bytes), np.uint8)
        assert (changed_words.decode(payload, before, word_bytes) == now).all()


@pytest.mark.parametrize("density", [0.05, 0.3])
def test_half_the_bytes_of_zstd_suffice(density: float) -> None:
    """Updates of post-training change bfloat16 weights by the least step."""
    before, now = arrays(200_000, density, 2, 1)
    size = len(changed_words.encode(before, now, 2))
    assert size < 0.5 * len(Zstd(level=1).encode(before ^ now))


def test_damage_is_refused() -> None:
    before, now = arrays(20_000, 0.02, 2, 2)
    payload = np.frombuffer(changed_words.encode(before, now, 2), np.uint8)
    for bad in (payload[:0], payload[:40], payload[:-1], np.append(payload, np.uint8(0))):
        with pytest.raises(DamagedStream):
            changed_words.decode(bad, before, 2)
    for position in range(0, payload.size, 7):
        bad = payload.copy()
        bad[position] ^= 0x41
        # Most damage is found here, and the rest by the digests of files and tensors.
        with contextlib.suppress(DamagedStream):
            assert changed_words.decode(bad, before, 2).size == now.size
    with pytest.raises(DamagedStream, match="beyond"):
        changed_words.decode(payload, before[:20_000], 2)
