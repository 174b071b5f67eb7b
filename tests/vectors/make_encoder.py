"""Writes encoder.json from the executable form: `python -m tests.vectors.make_encoder`.

Run it for new vectors only. A change in a line that is already there is a change of the format.
"""

import json
from pathlib import Path

import numpy as np

from tests.reference.codec import ReferenceCodec


def vectors():
    """name, current, base, chunk bounds; True at the end: ordered."""
    ones = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    up = ones.view(np.uint32).copy()
    up[1] += 1
    yield "the worked example of the format document", up, ones.view(np.uint32), [0, 4]
    base = np.arange(600, dtype=np.uint16)
    yield "nothing changed", base[:40], base[:40], [0, 40]
    current = base.copy()
    current[[0, 255, 511, 520]] += np.array([1, 65535, 200, 128], np.uint16)
    yield "gaps of 0, 254, 255 and values of 1, -1, 200, 128", current, base, [0, 600]
    yield "an unchanged chunk between two changed ones", current, base, [0, 10, 200, 600]
    yield (
        "bytes",
        np.array([5, 0, 255, 7, 7, 7], np.uint8),
        np.array([5, 255, 0, 7, 135, 6], np.uint8),
        [0, 6],
    )
    sign = np.array([0x7FC00001, 0x80000000, 0x00000001, 0x3F800000], np.uint32)
    yield (
        "a NaN payload, minus zero and a subnormal against zeros",
        sign,
        np.array([0x7FC00000, 0, 0, 0x3F800000], np.uint32),
        [0, 4],
    )
    wide = np.full(12, 1 << 40, np.uint64)
    yield (
        "eight-byte words that move far",
        wide + np.arange(12, dtype=np.uint64) ** 9 * 7,
        wide,
        [0, 12],
    )
    random = np.random.default_rng(1)
    half = np.zeros(64, np.uint16)
    moved = half.copy()
    moved[random.random(64) < 0.5] += 3
    yield "half of the words changed", moved, half, [0, 64]
    yield (
        "every word changed a little",
        np.arange(48, dtype=np.uint32) % 3 + 1,
        np.zeros(48, np.uint32),
        [0, 48],
    )
    noise = random.integers(0, 1 << 32, 24, np.uint32)
    smooth = (np.arange(24) % 4 + (127 << 23)).astype(np.uint32)
    yield "new values that are simpler than the difference", smooth, noise, [0, 24]
    yield "no base", np.array([1.0, 1.5, -2.0, 0.25] * 4, np.float32).view(np.uint32), None, [0, 16]
    yield "no base, a single word", np.array([7], np.uint16), None, [0, 1]
    few = np.zeros(3, np.uint16)
    yield "too small for the entry of a tile", few + np.array([0, 9, 0], np.uint16), few, [0, 3]
    yield "no base, every byte another", np.array([0x0123456789ABCDEF], np.uint64), None, [0, 1]
    weights = random.standard_normal(96).astype(np.float32).view(np.uint32) >> 16
    weights = weights.astype(np.uint16)
    rows = np.where(np.arange(96) % 16 == 3, weights + 2, weights).astype(np.uint16)
    yield "a few weights, in the order of their exponents", rows, weights, [0, 96], True
    rows = np.where(weights % 4 < 2, weights - 300 * (weights % 4), weights).astype(np.uint16)
    yield "many weights and far, in the order of their exponents", rows, weights, [0, 50, 96], True


def main() -> None:
    codec, made = ReferenceCodec(), []
    for name, current, base, bounds, *ordered in vectors():
        words = current.itemsize
        shadow = None if base is None else base.astype(f"<u{words}").view(np.uint8).copy()
        before = None if shadow is None else shadow.tobytes().hex()
        now = current.astype(f"<u{words}").view(np.uint8)
        encoded, _ = codec.encode(
            now, shadow, np.array(bounds, np.uint64), words, ordered=bool(ordered)
        )
        made.append(
            {
                "name": name,
                "word_bytes": words,
                "bounds": bounds,
                **({"ordered": True} if ordered else {}),
                "base": before,
                "current": now.tobytes().hex(),
                "rows": encoded.rows.tolist(),
                "streams": {
                    stream: content.tobytes().hex() for stream, content in encoded.streams.items()
                },
            }
        )
    entries = [
        "{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        + "\n}"
        for entry in made
    ]
    (Path(__file__).parent / "encoder.json").write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
