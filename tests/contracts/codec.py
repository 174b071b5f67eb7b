"""The contract of ``deltacheck.codec.base.Codec`` as tests.

Subclass ``CodecContract`` and give it a ``codec`` fixture. Override ``held`` if the bases of the
codec are not NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltacheck.codec.base import (
    BITMAP,
    DIFF,
    ORDERED_BITMAP,
    ORDERED_SPARSE,
    PLANES,
    RAW,
    ROW_CHANGED,
    ROW_CHUNK,
    ROW_GAP_BYTES,
    ROW_METHOD,
    ROW_WIDE_COUNT,
    ROW_WIDTH,
    SPARSE,
    STREAMS,
    TILE_BYTES,
    U8,
    U64,
    Codec,
    Encoded,
)
from deltacheck.errors import DamagedStream
from tests.reference.codec import ReferenceCodec

# All word sizes of the format (format.md, section 4).
WORD_BYTES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """A run of chunks to encode.

    Args:
        why: The reason for the case, as its name.
        current: The bytes to encode, uint8, 1-D.
        base: The bytes before; ``None`` for a first save.
        bounds: The offsets of the chunks in words.
        word_bytes: Bytes of a word.
    """

    why: str
    current: U8
    base: U8 | None
    bounds: U64
    word_bytes: int

    def __str__(self) -> str:
        return f"{self.why}-{8 * self.word_bytes}-bit"


def words(count: int, word_bytes: int, seed: int = 0) -> NDArray[Any]:
    """Return words like those of a training: normally distributed floats, or random bits.

    Args:
        count: The number of words.
        word_bytes: Bytes of a word: 1, 2, 4 or 8. Words of 2 bytes are bfloat16 numbers, words of 4
            bytes are float32 numbers, and all others are random bits.
        seed: The seed of the generator. The same seed gives the same words.

    Returns:
        The words, unsigned integers of ``word_bytes`` bytes, ``(count,)``.
    """
    random = np.random.default_rng(seed)
    match word_bytes:
        case 2:
            # The upper half of a float32 is a bfloat16. Real weights decide which methods are
            # chosen.
            return (random.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(
                np.uint16
            )
        case 4:
            return random.standard_normal(count, np.float32).view(np.uint32)
        case _:
            return np.frombuffer(random.bytes(count * word_bytes), f"<u{word_bytes}").copy()


def moved(base: NDArray[Any], density: float, most: int, seed: int = 1) -> NDArray[Any]:
    """Return a copy in which a share of the words changed by 1 to ``most``, up or down.

    Args:
        base: The words, unsigned integers, 1-D.
        density: The share of the words to change, 0 to 1.
        most: The largest difference, at least 1. It must fit a signed word.
        seed: The seed of the generator. The same seed gives the same changes.

    Returns:
        The changed words, of the shape and dtype of ``base``.
    """
    random = np.random.default_rng(seed)
    current = base.copy()
    is_changed = random.random(base.size) < density
    steps = random.integers(1, most + 1, base.size) * random.choice([-1, 1], base.size)
    current[is_changed] += steps[is_changed].astype(f"<i{base.itemsize}").view(base.dtype)
    return current


def cases() -> Iterator[Case]:
    """Yield runs that together use all methods, all streams and all kinds of tiles.

    Yields:
        The runs, in an order that never changes.
    """
    for w in WORD_BYTES:
        tile = TILE_BYTES // w
        # Not a multiple of the tile, so that the last tile is shorter.
        base = words(3 * tile + 37, w)
        # A whole tile, an empty chunk, more than a tile, a partial one.
        cut = _bounds(0, tile, tile, 2 * tile + 5, base.size)
        # The step must fit a signed word, whatever its size.
        far = min(100_000, (1 << (8 * w - 1)) - 1)
        for name, current in {
            "nothing-changed": base.copy(),
            "few-changed": moved(base, 0.001, 3),
            "some-changed-far": moved(base, 0.01, far),
            "many-changed": moved(base, 0.2, 3),
            "most-changed": moved(base, 0.7, 3),
            "all-changed-a-little": moved(base, 1.0, 3),
            "all-changed-far": moved(base, 1.0, far),
            "all-new": words(base.size, w, seed=9),
        }.items():
            yield _case(name, current, base, cut, w)
        yield _case(
            "one-word", np.array([5], base.dtype), np.array([3], base.dtype), _bounds(0, 1), w
        )
        last = base.copy()
        last[-1] ^= 1
        yield _case("only-the-last-word-changed", last, base, _bounds(0, base.size), w)
        # The method is chosen from tiles 0, 16, 32, ... (format.md, 4.4). They see no change here,
        # so sparse is chosen. If its exact size is too large after all, the method is raw.
        unseen = np.zeros(9 * tile, base.dtype)
        unseen[tile : 8 * tile] = words(7 * tile, w)
        yield _case(
            "changes-outside-the-sample-too-large-for-sparse",
            unseen,
            np.zeros_like(unseen),
            _bounds(0, 9 * tile),
            w,
        )
        gaps = np.zeros(tile, base.dtype)
        # Gaps of 0, 253, 255 and more: from 255 on, a gap takes several bytes (format.md, 4.2).
        gaps[[0, 1, 255, 511, 512, 512 + 256, tile - 1]] = 1
        yield _case("gaps-around-the-escape", gaps, np.zeros_like(gaps), _bounds(0, tile), w)
        steps = np.zeros(tile, base.dtype)
        # Values are ``z - 1`` in a byte. From a difference of 128 on, ``z`` is above 255 and goes
        # to ``wide``.
        steps[:20:2] = (
            np.array([127, -127, 128, -128, 129, -129, 1, -1, 126, -126])
            .astype(f"<i{max(w, 2)}")
            .astype(f"<i{w}")
            .view(base.dtype)
        )
        yield _case("values-around-the-escape", steps, np.zeros_like(steps), _bounds(0, tile), w)
        yield Case("no-base", base.view(np.uint8), None, cut, w)
        yield Case("no-base-constant", np.full(tile * w, 7, np.uint8), None, _bounds(0, tile), w)
        yield Case("empty", np.empty(0, np.uint8), np.empty(0, np.uint8), _bounds(0), w)
    # NaNs with payloads, -0.0, 0.0, subnormals and infinity: floats compare otherwise than bits.
    odd = np.array([0x7FC00001, 0xFFC00002, 0x80000000, 0, 1, 0x007FFFFF, 0x7F800000], np.uint32)
    yield _case(
        "only-bits-that-floats-ignore", odd[[1, 0, 3, 2, 5, 4, 6]], odd, _bounds(0, odd.size), 4
    )


def _case(
    why: str, current: NDArray[Any], base: NDArray[Any], bounds: U64, word_bytes: int
) -> Case:
    return Case(why, current.view(np.uint8), base.view(np.uint8), bounds, word_bytes)


def _bounds(*offsets: int) -> U64:
    return np.array(offsets, np.uint64)


# Made at import: pytest needs the parameters when it collects the tests.
CASES = tuple(cases())


def same(one: Encoded, other: Encoded) -> bool:
    """Return True if two encodings are equal to the byte.

    Args:
        one: An encoding.
        other: The encoding to compare it with.

    Returns:
        ``True`` if rows, names of streams and streams are equal.
    """
    return (
        np.array_equal(one.rows, other.rows)
        and one.streams.keys() == other.streams.keys()
        and all(np.array_equal(one.streams[name], other.streams[name]) for name in one.streams)
    )


# --- damage: one case for every check of format.md 4.3 --------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that a decoder must refuse.

    Args:
        why: The reason for the case, as its name.
        encoded: The chunk.
        base: The bytes that it is applied to.
        bounds: The offsets of the chunks in words.
        word_bytes: Bytes of a word.
        says: Text that the error must contain.
    """

    why: str
    encoded: Encoded
    base: U8
    bounds: U64
    word_bytes: int
    says: str

    def __str__(self) -> str:
        return self.why


def damages() -> Iterator[Damage]:
    """Yield encodings with one error each, for all checks of section 4.3 of format.md.

    Yields:
        The damaged encodings, in an order that never changes.
    """
    # Chunk 0 is sound; chunk 1 has two whole tiles and one of 100 words and is the one to suffer.
    w, tile = 2, TILE_BYTES // 2
    base = words(2 * tile + 2 * tile + 100, w)
    bounds = _bounds(0, 2 * tile, base.size)

    def made(
        why: str, method: int, rows: Mapping[int, int], streams: Mapping[str, Any], says: str
    ) -> Damage:
        sound = _encoded_by(method, base, bounds)
        table = sound.rows.copy()
        for column, value in rows.items():
            table[1, column] = value
        changed = {name: content.copy() for name, content in sound.streams.items()}
        for name, edit in streams.items():
            stream = changed.get(name, np.empty(0, np.uint8))
            # An edit changes the stream in place, or returns a new one.
            result = edit(stream)
            changed[name] = stream if result is None else np.asarray(result, np.uint8)
        return Damage(why, Encoded(table, changed), base.view(np.uint8), bounds, w, says)

    # Chunk 1 is the last one, so its part is at the end of each stream.
    sparse = _encoded_by(SPARSE, base, bounds)
    entries = sparse.streams["tiles"].view("<u2").reshape(-1, 3)
    row = sparse.rows[1]

    def entry(tile_number: int, column: int, by: int) -> Any:
        def edit(content: U8) -> None:
            table = content.view("<u2").reshape(-1, 3)
            table[-3 + tile_number, column] = int(table[-3 + tile_number, column]) + by

        return edit

    def both(*edits: Any) -> Any:
        def edit(content: U8) -> None:
            for single_edit in edits:
                single_edit(content)

        return edit

    def put(position: int, value: int) -> Any:
        def edit(content: U8) -> None:
            content[position] = value

        return edit

    n = int(bounds[2] - bounds[1])
    yield made("a-method-that-is-never-stored", SPARSE, {ROW_METHOD: 0}, {}, "chunk 1: method 0")
    yield made("an-unknown-method", SPARSE, {ROW_METHOD: 11}, {}, "chunk 1: method 11")
    yield made(
        "more-changed-words-than-words", RAW, {ROW_CHANGED: n + 1}, {}, f"chunk 1: {n + 1} words"
    )
    yield made("a-chunk-that-is-not-there", SPARSE, {ROW_CHUNK: 2}, {}, "chunk 2: there are only 2")
    yield made("a-chunk-twice", SPARSE, {ROW_CHUNK: 0}, {}, "chunk 0: its row comes after")
    yield made("gap-bytes-under-bitmap", BITMAP, {ROW_GAP_BYTES: 1}, {}, "chunk 1: gap_bytes")
    yield made("gap-bytes-under-raw", RAW, {ROW_GAP_BYTES: 1}, {}, "chunk 1: gap_bytes")
    ordered = {ROW_METHOD: ORDERED_BITMAP}
    yield made(
        "gap-bytes-under-ordered-bitmap",
        BITMAP,
        ordered | {ROW_GAP_BYTES: 1},
        {},
        "chunk 1: gap_bytes",
    )
    yield made("wide-count-under-diff", DIFF, {ROW_WIDE_COUNT: 1}, {}, "chunk 1: wide_count")
    yield made("wide-count-under-planes", PLANES, {ROW_WIDE_COUNT: 1}, {}, "chunk 1: wide_count")
    for method, names in {
        SPARSE: ("tiles", "gaps", "values", "wide"),
        BITMAP: ("tiles", "bitmap", "values", "wide"),
        DIFF: ("diff0", "diff1"),
        PLANES: ("plane0", "plane1"),
        RAW: ("raw",),
    }.items():
        for name in names:
            yield made(
                f"{name}-too-short-{method}",
                method,
                {},
                {name: lambda c: c[:-1]},
                f"chunk 1: stream {name} ends",
            )
            yield made(
                f"{name}-missing-{method}",
                method,
                {},
                {name: lambda c: c[:0]},
                f"stream {name} ends",
            )
            yield made(
                f"{name}-too-long-{method}",
                method,
                {},
                {name: lambda c: np.append(c, c[:1])},
                f"stream {name} has 1 bytes",
            )
    yield made(
        "a-stream-that-no-method-of-the-rows-has",
        SPARSE,
        {},
        {"raw": lambda c: [1]},
        "stream raw has 1 bytes",
    )
    yield made(
        "a-stream-of-a-wider-word", DIFF, {}, {"diff2": lambda c: [1]}, "stream diff2 has 1 bytes"
    )
    yield made("an-unknown-stream", SPARSE, {}, {"diff8": lambda c: [1]}, "diff8")
    yield made(
        "tiles-own-more-words", SPARSE, {}, {"tiles": entry(1, 0, 1)}, "chunk 1: its tiles own"
    )
    yield made(
        "tiles-of-ordered-words-own-more-words",
        SPARSE,
        {ROW_METHOD: ORDERED_SPARSE},
        {"tiles": entry(1, 0, 1)},
        "chunk 1: its tiles own",
    )
    yield made(
        "tiles-own-fewer-gap-bytes",
        SPARSE,
        {},
        {"tiles": entry(0, 1, -1)},
        "gap bytes, its row says",
    )
    yield made(
        "tiles-own-more-wide",
        SPARSE,
        {},
        {"tiles": entry(2, 2, 1)},
        "wide differences, its row says",
    )
    yield made(
        "tiles-own-gap-bytes-under-bitmap",
        BITMAP,
        {},
        {"tiles": entry(0, 1, 1)},
        "gap bytes, its row says 0",
    )
    yield made(
        # The sums over all tiles are still right. Only a check tile by tile finds this damage.
        "a-word-moved-to-another-tile",
        SPARSE,
        {},
        {"tiles": both(entry(0, 0, 1), entry(1, 0, -1))},
        "chunk 1, tile 0",
    )
    yield made(
        "gap-bytes-moved-to-another-tile",
        SPARSE,
        {},
        {"tiles": both(entry(0, 1, 1), entry(1, 1, -1))},
        "chunk 1, tile 0",
    )
    yield made(
        "a-wide-moved-to-another-tile",
        SPARSE,
        {},
        {"tiles": both(entry(0, 2, 1), entry(1, 2, -1))},
        "are wide, its entry says",
    )
    gaps_at = sparse.streams["gaps"].size - int(row[ROW_GAP_BYTES])
    tile_gaps = gaps_at + int(entries[-3, 1])  # where the gaps of chunk 1, tile 1 begin
    yield made(
        "a-position-past-the-last-tile",
        SPARSE,
        {},
        {"gaps": put(-1, 200)},
        "chunk 1, tile 2: a position lies outside its 100 words",
    )
    yield made(
        "a-position-past-a-whole-tile",
        SPARSE,
        {},
        {"gaps": _push_over(gaps_at, int(entries[-3, 1]))},
        "tile 0: a position lies outside",
    )
    yield made("the-last-gap-does-not-end", SPARSE, {}, {"gaps": put(-1, 255)}, "chunk 1, tile 2")
    yield made(
        "a-gap-swallows-the-next", SPARSE, {}, {"gaps": put(tile_gaps, 255)}, "chunk 1, tile 1"
    )
    yield made(
        "a-value-says-wide",
        SPARSE,
        {},
        {"values": put(-1, 255)},
        "chunk 1, tile 2: 1 of its values are wide, its entry says 0",
    )
    yield made(
        "a-wide-without-its-value",
        SPARSE,
        {},
        {"values": lambda c: np.where(c == 255, 7, c)},
        "chunk 0, tile 0",
    )
    yield made(
        # A second form of the same content: equal states would no longer have equal bytes.
        "a-wide-that-fits-a-value",
        SPARSE,
        {},
        {"wide": lambda c: np.append(c[:-2], [255, 0])},
        "a wide difference fits",
    )
    yield made(
        "a-wide-of-zero",
        BITMAP,
        {},
        {"wide": lambda c: np.append(c[:-2], [0, 0])},
        "a wide difference fits",
    )
    yield made(
        "a-bit-too-many", BITMAP, {}, {"bitmap": _flip_clear_bit}, "chunk 0, tile 0: its bitmap has"
    )
    yield made(
        "an-unused-bit",
        BITMAP,
        {},
        {"bitmap": lambda c: np.append(c[:-1], c[-1] | 0x80)},
        "chunk 1: an unused bit",
    )
    yield made(
        "a-bit-in-another-tile",
        BITMAP,
        {},
        {"tiles": both(entry(0, 0, 1), entry(1, 0, -1))},
        "chunk 1, tile 0: its bitmap has",
    )

    # Bytes: 255 among the values would need a wide difference, and none is above 255.
    small = np.zeros(64, np.uint8)
    rows = np.array([[0, SPARSE, 1, 1, 1]], np.uint32)
    tiles = np.array([1, 1, 1], "<u2").view(np.uint8)
    full = {"tiles": tiles, "gaps": [3], "values": [255], "wide": [255]}
    streams = {name: np.array(content, np.uint8) for name, content in full.items()}
    yield Damage(
        "a-wide-byte",
        Encoded(rows, streams),
        small,
        _bounds(0, 64),
        1,
        "chunk 0, tile 0: a wide difference fits",
    )


def _push_over(start: int, count: int) -> Any:
    """Return an edit that makes the gaps of a tile as large as their bytes allow."""

    def edit(content: U8) -> None:
        part = content[start : start + count]
        # A byte 255 continues a gap. Changing it would change the number of gaps.
        part[part != 255] = 254

    return edit


def _flip_clear_bit(content: U8) -> None:
    position = int(np.flatnonzero(content != 255)[0])
    # ``x | (x + 1)`` sets the lowest clear bit of ``x``.
    content[position] = content[position] | (int(content[position]) + 1)


def _encoded_by(method: int, base: NDArray[Any], bounds: U64) -> Encoded:
    """Encode two chunks of 16-bit words by a given method, with parts of the reference codec."""
    from tests.reference import codec as reference

    # Chosen so that gaps above 255 and wide differences occur in every tile but the last, which has
    # neither.
    current = moved(base, 0.01, 400)
    current[-100:] = base[-100:]
    current[-90] += 1
    current[-3] += 2
    rows: list[tuple[int, ...]] = []
    streams: dict[str, list[U8]] = {name: [] for name in STREAMS}
    # A codec chooses the method itself. Here it is forced, so that every check can be reached.
    for chunk in range(bounds.size - 1):
        part = slice(int(bounds[chunk]), int(bounds[chunk + 1]))
        z = reference.zigzag(current[part], base[part])
        tiles = [
            z[offset : offset + TILE_BYTES // 2] for offset in range(0, z.size, TILE_BYTES // 2)
        ]
        gaps = [
            reference.gap_code(t != 0) if method == SPARSE else np.empty(0, np.uint8) for t in tiles
        ]
        wide = reference.wide_words(z)
        positions = method in (SPARSE, BITMAP)
        chunk_streams: dict[str, U8] = {}
        if positions:
            chunk_streams = {
                "tiles": reference.tiles_table(tiles, gaps),
                "values": reference.values_code(z),
                "wide": wide.view(np.uint8),
            }
            chunk_streams |= (
                {"gaps": np.concatenate(gaps)}
                if method == SPARSE
                else {"bitmap": reference.bitmap_code(z)}
            )
        elif method == DIFF:
            chunk_streams = {f"diff{k}": plane for k, plane in enumerate(reference.byte_planes(z))}
        elif method == PLANES:
            chunk_streams = {
                f"plane{k}": plane
                for k, plane in enumerate(
                    reference.byte_planes(reference.rotate_left(current[part]))
                )
            }
        else:
            chunk_streams = {"raw": current[part].view(np.uint8)}
        rows.append(
            (
                chunk,
                method,
                int(np.count_nonzero(z)),
                sum(g.size for g in gaps),
                wide.size if positions else 0,
            )
        )
        for name, content in chunk_streams.items():
            streams[name].append(content)
    return Encoded(
        np.array(rows, np.uint32),
        {name: np.concatenate(parts) for name, parts in streams.items() if parts},
    )


DAMAGES = tuple(damages())


# Bounds and bytes of a word that do not fit 64 bytes, and a part of the error.
MISFITS = [
    (_bounds(0, 16), 3, "word_bytes"),
    (_bounds(0, 16), 0, "word_bytes"),
    (_bounds(0, 15), 4, "bounds end at 15"),
    (_bounds(0, 17), 4, "bounds end at 17"),
    (_bounds(1, 16), 4, "ascend from 0"),
    (_bounds(0, 12, 8, 16), 4, "ascend from 0"),
    (np.array([0, 16], np.int64), 4, "uint64"),
    (np.empty(0, np.uint64), 4, "bounds"),
]


class CodecContract:
    """Tests that every codec must pass."""

    @pytest.fixture
    def codec(self) -> Codec[Any]:
        """Return the codec to test. A subclass must override this fixture.

        Returns:
            The codec.
        """
        raise NotImplementedError("give the suite a `codec` fixture")

    def held(self, data: U8) -> Any:
        """Return a new array of the codec's own kind with these bytes.

        Args:
            data: The bytes, uint8, 1-D.

        Returns:
            The array. By default it is a NumPy array.
        """
        return data.copy()

    def encoded(self, codec: Codec[Any], case: Case) -> tuple[Encoded, Any]:
        """Return the encoding of a case and the new base, in memory of the codec's kind.

        Args:
            codec: The codec to test.
            case: The run of chunks to encode.

        Returns:
            The encoding, and the new base; ``None`` for a case without a base.
        """
        base = None if case.base is None else self.held(case.base)
        return codec.encode(self.held(case.current), base, case.bounds, case.word_bytes)

    # --- encode -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_the_bytes_are_those_of_the_reference(self, codec: Codec[Any], case: Case) -> None:
        expected, _ = ReferenceCodec().encode(
            case.current,
            None if case.base is None else case.base.copy(),
            case.bounds,
            case.word_bytes,
        )
        assert same(self.encoded(codec, case)[0], expected)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_the_new_base_is_current_bit_for_bit(self, codec: Codec[Any], case: Case) -> None:
        _, base = self.encoded(codec, case)
        if case.base is None:
            assert base is None
        else:
            assert np.array_equal(codec.host(base), case.current)

    def test_an_unchanged_chunk_has_no_row(self, codec: Codec[Any]) -> None:
        base = np.zeros(3000, np.uint8)
        current = base.copy()
        current[1500] = 1
        encoded, _ = codec.encode(
            self.held(current), self.held(base), _bounds(0, 1000, 2000, 3000), 1
        )
        assert encoded.rows.tolist() == [[1, SPARSE, 1, 2, 0]]

    def test_without_a_base_every_chunk_is_stored_and_counts_all_its_words(
        self, codec: Codec[Any]
    ) -> None:
        encoded, base = codec.encode(
            self.held(np.zeros(4000, np.uint8)), None, _bounds(0, 600, 1000), 4
        )
        assert base is None
        assert encoded.rows[:, [ROW_CHUNK, ROW_CHANGED]].tolist() == [[0, 600], [1, 400]]
        assert set(encoded.rows[:, ROW_METHOD].tolist()) <= {PLANES, RAW}

    def test_a_chunk_never_takes_more_than_its_own_bytes(self, codec: Codec[Any]) -> None:
        for case in CASES:
            encoded, _ = self.encoded(codec, case)
            # Chunks without a change have no row and store nothing.
            stored_words = np.diff(case.bounds)[encoded.rows[:, ROW_CHUNK]]
            assert (
                sum(stream.size for stream in encoded.streams.values())
                <= int(stored_words.sum()) * case.word_bytes
            )

    def test_chunks_are_encoded_alone(self, codec: Codec[Any]) -> None:
        base = words(9000, 4)
        current = moved(base, 0.05, 300)
        bounds, single_call = (
            _bounds(0, 4000, 9000),
            self.encoded(codec, _case("whole", current, base, _bounds(0, 4000, 9000), 4))[0],
        )
        streams: dict[str, list[U8]] = {}
        for low, high in ((0, 4000), (4000, 9000)):
            case = _case("part", current[low:high], base[low:high], _bounds(0, high - low), 4)
            for name, content in self.encoded(codec, case)[0].streams.items():
                streams.setdefault(name, []).append(content)
        assert bounds.size - 1 == single_call.rows.shape[0]
        assert same(
            single_call,
            Encoded(
                single_call.rows, {name: np.concatenate(parts) for name, parts in streams.items()}
            ),
        )

    def test_results_outlive_the_next_call(self, codec: Codec[Any]) -> None:
        case = next(c for c in CASES if str(c) == "some-changed-far-32-bit")
        first, _ = self.encoded(codec, case)
        snapshot = Encoded(
            first.rows.copy(), {name: content.copy() for name, content in first.streams.items()}
        )
        for _ in range(3):
            self.encoded(
                codec,
                _case("other", words(20_000, 4, 5), words(20_000, 4, 6), _bounds(0, 20_000), 4),
            )
        assert same(first, snapshot)

    # --- bases ------------------------------------------------------------------------------------

    def test_a_copy_is_independent_of_its_source(self, codec: Codec[Any]) -> None:
        source = self.held(np.arange(64, dtype=np.uint8))
        copied = codec.copy(source, None)
        _, copied = codec.encode(self.held(np.zeros(64, np.uint8)), copied, _bounds(0, 64), 1)
        assert codec.host(source).tolist() == list(range(64))
        assert not codec.host(copied).any()

    @pytest.mark.parametrize("size", [64, 32], ids=["that-fits", "that-does-not-fit"])
    def test_a_copy_into_given_memory_holds_current(self, codec: Codec[Any], size: int) -> None:
        out = self.held(np.zeros(size, np.uint8))
        copied = codec.copy(self.held(np.arange(64, dtype=np.uint8)), out)
        assert codec.host(copied).tolist() == list(range(64))

    # --- misuse -----------------------------------------------------------------------------------

    @pytest.mark.parametrize(("bounds", "word_bytes", "says"), MISFITS)
    def test_misuse_is_refused_before_anything_is_touched(
        self, codec: Codec[Any], bounds: U64, word_bytes: int, says: str
    ) -> None:
        base = self.held(np.zeros(64, np.uint8))
        with pytest.raises(ValueError, match=says):
            codec.encode(self.held(np.ones(64, np.uint8)), base, bounds, word_bytes)
        assert not codec.host(base).any()

    def test_a_base_of_another_length_is_refused(self, codec: Codec[Any]) -> None:
        with pytest.raises(ValueError, match="base"):
            codec.encode(
                self.held(np.zeros(64, np.uint8)),
                self.held(np.zeros(60, np.uint8)),
                _bounds(0, 16),
                4,
            )


class DecoderContract(CodecContract):
    """Tests that a codec must pass which also decodes: it has ``apply``."""

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_apply_gives_back_every_bit(self, codec: Any, case: Case) -> None:
        encoded, _ = self.encoded(codec, case)
        decoded = np.zeros_like(case.current) if case.base is None else case.base.copy()
        codec.apply(encoded, decoded, case.bounds, case.word_bytes)
        assert np.array_equal(decoded, case.current)

    @pytest.mark.parametrize(("bounds", "word_bytes", "says"), MISFITS)
    def test_misuse_of_apply_is_refused(
        self, codec: Any, bounds: U64, word_bytes: int, says: str
    ) -> None:
        nothing = Encoded(np.empty((0, ROW_WIDTH), np.uint32), {})
        with pytest.raises(ValueError, match=says):
            codec.apply(nothing, np.zeros(64, np.uint8), bounds, word_bytes)

    @pytest.mark.parametrize("damage", DAMAGES, ids=str)
    def test_damage_is_refused_before_its_chunk_is_written(
        self, codec: Any, damage: Damage
    ) -> None:
        # A margin on both sides shows writes outside of the base.
        guarded = np.full(damage.base.size + 256, 0xA5, np.uint8)
        target = guarded[128:-128]
        target[:] = damage.base
        with pytest.raises(DamagedStream) as refusal:
            codec.apply(damage.encoded, target, damage.bounds, damage.word_bytes)
        assert damage.says in str(refusal.value)
        assert (guarded[:128] == 0xA5).all()
        assert (guarded[-128:] == 0xA5).all()
        # The last chunk is the damaged one, or comes after it.
        last = int(damage.bounds[-2]) * damage.word_bytes
        assert np.array_equal(target[last:], damage.base[last:])
