"""The codec in NumPy: an executable form of ``docs/reference/format.md``, section 4.

Read it beside that document. Names and order are the document's, no code is shared with the native
encoder, and no clarity is given up for speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.base import (
    BITMAP,
    DIFF,
    GRADIENT_LAW,
    LAW_BYTES,
    LAW_PARTS,
    LAWS,
    MEAN_LAW,
    METHOD_NAMES,
    ORDERED,
    PLANES,
    RAW,
    ROW_WIDTH,
    SPARSE,
    STEPS_LAW,
    STREAMS,
    TILE_BYTES,
    U8,
    U32,
    U64,
    UNCHANGED,
    Encoded,
)
from deltacheck.errors import DamagedStream
from tests.reference import law as laws
from tests.reference.law import Law

Words = NDArray[Any]  # unsigned, of 1, 2, 4 or 8 bytes, little endian
Bits = NDArray[np.bool_]

ESCAPE = 255  # in gaps: 255 more unchanged words; in values: the difference is in wide
SAMPLE_EVERY = 16  # tiles 0, 16, 32, .. are the sample
BYTE_COST = 8 * 256  # one byte at full cost, in 1/256 bit
ORDERED_WORD_BYTES = 2  # only such words are ever stored in another order (section 4.1)


class ReferenceCodec:
    """The executable specification. Bases are NumPy arrays."""

    run_bytes: int | None = 64 << 20

    def copy(self, current: NDArray[Any], out: NDArray[Any] | None) -> U8:
        return memory.copied(current, out)

    def host(self, base: NDArray[Any]) -> U8:
        return memory.as_bytes("base", base)

    def encode(
        self,
        current: NDArray[Any],
        base: NDArray[Any] | None,
        bounds: U64,
        word_bytes: int,
        *,
        ordered: bool = False,
        law: tuple[int, bytes] | None = None,
    ) -> tuple[Encoded, NDArray[Any] | None]:
        now = memory.as_bytes("current", current)
        bounds = memory.checked_bounds(bounds, now.size, word_bytes)
        shadow = None if base is None else memory.checked_base(base, now.size)
        rows: list[Row] = []
        streams: dict[str, list[U8]] = {name: [] for name in STREAMS}
        for chunk, part in enumerate(_chunks(bounds, word_bytes)):
            words = _words(now[part], word_bytes)
            before = None if shadow is None else _words(shadow[part], word_bytes)
            by_law = None if law is None else _encode_by_law(chunk, words, before, *law)
            row, chunk_streams = by_law or _encode_chunk(chunk, words, before, ordered)
            if row.method == UNCHANGED:
                continue
            rows.append(row)
            for name, content in chunk_streams.items():
                streams[name].append(content)
            # A chunk without a row equals its base, so only these chunks have to be copied. The
            # copy is of the words that were encoded: ``current`` may be written to meanwhile.
            if shadow is not None:
                shadow[part] = words.view(np.uint8)
        joined = {
            name: np.concatenate(parts)
            for name, parts in streams.items()
            if sum(p.size for p in parts)
        }
        return Encoded(np.array(rows, np.uint32).reshape(-1, ROW_WIDTH), joined), base

    def apply(self, encoded: Encoded, base: U8, bounds: U64, word_bytes: int) -> None:
        shadow = memory.checked_base(base, base.nbytes)
        bounds = memory.checked_bounds(bounds, shadow.size, word_bytes)
        parts = list(_chunks(bounds, word_bytes))
        for name in encoded.streams:
            if name not in STREAMS:
                raise DamagedStream(f"there is no stream {name!r}")
        # All rows are checked before any chunk is written.
        rows = _checked_rows(encoded.rows, np.diff(bounds), word_bytes)
        pieces = _cut(encoded.streams, rows, np.diff(bounds), word_bytes)
        for row, streams in zip(rows, pieces, strict=True):
            part = parts[row.chunk]
            words = _decode_chunk(row, streams, _words(shadow[part], word_bytes))
            shadow[part] = words.view(np.uint8)


class Row(NamedTuple):
    """One row of format.md 4.3."""

    chunk: int
    method: int
    changed: int
    gap_bytes: int
    wide_count: int

    @property
    def is_ordered(self) -> bool:
        """Return true if the words are stored in the order of their classes."""
        return self.streams != self.method

    @property
    def streams(self) -> int:
        """Return the method whose streams the chunk has."""
        return next((p for p, ordered in ORDERED.items() if ordered == self.method), self.method)


# Section 4 of the format: words, tiles and differences.


def _chunks(bounds: U64, word_bytes: int) -> Iterator[slice]:
    edges = [int(b) * word_bytes for b in bounds]
    for low, high in pairwise(edges):
        yield slice(low, high)


def _words(data: U8, word_bytes: int) -> Words:
    # Little endian, whatever the order of this machine is. The copy never changes with the base.
    return np.frombuffer(data.tobytes(), dtype=f"<u{word_bytes}")


def _tiles(words: NDArray[Any], word_bytes: int) -> list[NDArray[Any]]:
    """Return the tiles of an array that has one entry per word."""
    size = TILE_BYTES // word_bytes
    return [words[start : start + size] for start in range(0, words.size, size)]


def zigzag(current: Words, base: Words) -> Words:
    """Return ``z`` of every word: the zigzag code of the difference modulo ``2^bits``."""
    bits = 8 * current.itemsize
    d = current - base  # modulo 2^bits: NumPy arrays of unsigned integers wrap
    sign = d.view(f"<i{current.itemsize}") >> (bits - 1)
    z: Words = (d << d.dtype.type(1)) ^ sign.view(d.dtype)
    return z


def unzigzag(z: Words) -> Words:
    """Return the difference ``d`` of every ``z``."""
    unit = z.dtype.type(1)
    d: Words = (z >> unit) ^ (np.zeros_like(z) - (z & unit))
    return d


def rotate_left(words: Words) -> Words:
    """Rotate words of 2 and 4 bytes by one bit, so that the sign leaves the exponent's byte."""
    # The 8 exponent bits of bfloat16 and float32 then fill the top plane (section 4.2).
    if words.itemsize not in (2, 4):
        return words
    top = words.dtype.type(8 * words.itemsize - 1)
    rotated: Words = (words << words.dtype.type(1)) | (words >> top)
    return rotated


def rotate_right(words: Words) -> Words:
    """Undo ``rotate_left``."""
    if words.itemsize not in (2, 4):
        return words
    top = words.dtype.type(8 * words.itemsize - 1)
    rotated: Words = (words >> words.dtype.type(1)) | (words << top)
    return rotated


def class_order(base: Words) -> NDArray[np.intp]:
    """Return the numbers of the words of a chunk in the order of the classes of their base."""
    # The top byte, which is the exponent of a bfloat16. Words of one class stay in their order.
    return np.argsort(rotate_left(base) >> 8, kind="stable")


# Section 4.2: streams.


def byte_planes(words: Words) -> list[U8]:
    """Return byte ``k`` of every word, for ``k`` = 0 (least significant) to ``w - 1``."""
    table = words.view(np.uint8).reshape(words.size, words.itemsize)
    return [np.ascontiguousarray(table[:, k]) for k in range(words.itemsize)]


def join_planes(planes: list[U8]) -> Words:
    """Return the words of byte planes."""
    return np.ascontiguousarray(np.stack(planes, axis=1)).view(f"<u{len(planes)}").reshape(-1)


def gap_code(changed: Bits) -> U8:
    """Return the gaps of one tile."""
    positions = np.flatnonzero(changed)
    # The first gap counts from the start of the tile, so that tiles can be decoded alone.
    gaps = np.diff(positions, prepend=-1) - 1
    last = np.cumsum(gaps // 255 + 1) - 1  # index of the byte that ends each gap
    code = np.full(int(last[-1]) + 1 if last.size else 0, ESCAPE, np.uint8)
    code[last] = gaps % 255
    return code


def values_code(z: Words) -> U8:
    """Return the values of the changed words of any number of tiles; ``z`` is of all words."""
    changed = z[z != 0]
    # A changed word has a difference of at least 1, so 1 to 255 take the bytes 0 to 254.
    small = changed <= 255
    code: U8 = np.where(small, changed - changed.dtype.type(1), changed.dtype.type(ESCAPE)).astype(
        np.uint8
    )
    return code


def wide_words(z: Words) -> Words:
    """Return the differences that do not fit into a byte."""
    return z[z > 255]


def tiles_table(tiles: list[Words], gaps: list[U8]) -> U8:
    """Return the table of tiles; ``gaps`` has one array per tile, empty ones under bitmap."""
    # Three uint16: a tile has at most 16384 words, so every count fits.
    table = [
        (np.count_nonzero(z), g.size, wide_words(z).size) for z, g in zip(tiles, gaps, strict=True)
    ]
    return np.array(table, "<u2").reshape(-1).view(np.uint8)


def bitmap_code(z: Words) -> U8:
    """Return one bit per word, set if it changed."""
    return np.packbits(z != 0, bitorder="little")


# Section 4.4: the choice of the method.


def log2_256(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ``L(x)``, 256 times the binary logarithm in integer arithmetic; ``x >= 1``."""
    # Integers only: a logarithm in floating point differs between processors.
    e = np.zeros_like(x)
    for bit in range(1, 64):
        e[x >= np.uint64(1 << bit)] = bit
    unit, top = np.uint64(1), np.uint64(31)
    m = np.where(e <= top, x << (top - np.minimum(e, top)), x >> (np.maximum(e, top) - top))
    r = e
    for _ in range(8):
        # ``m`` stays below 2^32, so its square fits into 64 bits.
        m, r = (m * m) >> top, r << unit
        carry = m >> np.uint64(32)
        m, r = m >> carry, r + carry
    return r


def cost(content: U8) -> int:
    """Return the expected size of a byte string after entropy coding, in 1/256 bit.

    It is the order-0 entropy (C. Shannon, 1948) with a correction for skewed histograms.
    """
    n = content.size
    if n == 0:
        return 0
    histogram = np.bincount(content).astype(np.uint64)
    h = histogram[histogram > 0]
    entropy = int(np.sum(h * (log2_256(np.array([n], np.uint64)) - log2_256(h))))
    # The skew term of section 4.4, which zstd was measured to need.
    t = int(h.max())
    skew = (n - t) * (2 * t - n) // n if 2 * t > n else 0
    return min(BYTE_COST * n, entropy + BYTE_COST * skew)


def choose(current: Words, base: Words | None) -> int:
    """Return the method with the least estimated cost, before step 7 compares exact sizes."""
    word_bytes = current.itemsize
    sample = _tiles(current, word_bytes)[::SAMPLE_EVERY]
    costs: dict[int, int] = {}  # in the document's order: the first of equals wins
    if base is not None:
        z = [
            zigzag(c, b)
            for c, b in zip(sample, _tiles(base, word_bytes)[::SAMPLE_EVERY], strict=True)
        ]
        every = np.concatenate(z)
        # Step 2 of section 4.4: changes that the sample misses are taken to be few.
        if not every.any():
            return SPARSE
        values = cost(values_code(every)) + cost(wide_words(every).view(np.uint8))
        costs[DIFF] = sum(cost(plane) for plane in byte_planes(every))
        costs[SPARSE] = cost(np.concatenate([gap_code(t != 0) for t in z])) + values
        costs[BITMAP] = cost(np.concatenate([bitmap_code(t) for t in z])) + values
    # At equal costs, the methods without a base lose, and planes lose against raw (section 4.4,
    # step 5).
    joined = np.concatenate(sample)
    costs[RAW] = BYTE_COST * joined.nbytes
    costs[PLANES] = sum(cost(plane) for plane in byte_planes(rotate_left(joined)))
    return min(costs, key=lambda method: costs[method])


# Encoding.


def _encode_chunk(
    chunk: int, current: Words, base: Words | None, ordered: bool
) -> tuple[Row, dict[str, U8]]:
    word_bytes = current.itemsize
    changed = current.size if base is None else int(np.count_nonzero(current != base))
    if changed == 0:
        return Row(chunk, UNCHANGED, 0, 0, 0), {}
    method = choose(current, base)
    if method in (SPARSE, BITMAP):
        assert base is not None
        z = zigzag(current, base)
        ordered = ordered and word_bytes == ORDERED_WORD_BYTES
        if ordered:
            z = z[class_order(base)]
        tiles = _tiles(z, word_bytes)
        gaps = [gap_code(t != 0) if method == SPARSE else np.empty(0, np.uint8) for t in tiles]
        wide = wide_words(z)
        positions = (
            {"gaps": np.concatenate(gaps)} if method == SPARSE else {"bitmap": bitmap_code(z)}
        )
        streams = {
            "tiles": tiles_table(tiles, gaps),
            **positions,
            "values": values_code(z),
            "wide": wide.view(np.uint8),
        }
        # Step 7 of section 4.4, with exact sizes of all streams instead of the estimate.
        if sum(content.size for content in streams.values()) < current.nbytes:
            gap_bytes = sum(g.size for g in gaps)
            return Row(
                chunk, ORDERED[method] if ordered else method, changed, gap_bytes, wide.size
            ), streams
        method = RAW
    if method == DIFF:
        assert base is not None
        streams = {f"diff{k}": plane for k, plane in enumerate(byte_planes(zigzag(current, base)))}
    elif method == PLANES:
        streams = {f"plane{k}": plane for k, plane in enumerate(byte_planes(rotate_left(current)))}
    else:
        streams = {"raw": current.view(np.uint8)}
    return Row(chunk, method, changed, 0, 0), streams


# Section 4.6: chunks that are predicted by a law.


def _encode_by_law(
    chunk: int, current: Words, base: Words | None, method: int, content: bytes
) -> tuple[Row, dict[str, U8]] | None:
    """Encode a chunk by a law; ``None`` if it is unchanged, or the law is no use."""
    assert base is not None
    if current.size % LAW_PARTS or np.array_equal(current, base):
        return None
    law = Law.of(content)
    _, m0, _ = np.split(base.view(np.float32), LAW_PARTS)
    _, m, v = np.split(current.view(np.float32), LAW_PARTS)
    header = {"law": np.frombuffer(content, np.uint8)}
    if method == STEPS_LAW:
        parts = (laws.later_weight(law, base, m, v), m0, laws.later_square(law, base))
        z = zigzag(current, np.concatenate(parts).view(np.uint32))
        planes = {f"diff{k}": plane for k, plane in enumerate(byte_planes(z))}
        return Row(chunk, method, int(np.count_nonzero(z)), 0, 0), header | planes
    if method == GRADIENT_LAW:
        gradients = laws.narrow_gradient(law, m0, m)
        prediction = laws.step(law, base, gradients, None)
        dense = {f"plane{k}": p for k, p in enumerate(byte_planes(rotate_left(gradients)))}
    else:
        prediction = laws.step(law, base, None, m)
        difference = zigzag(m.view(np.uint32), m0.view(np.uint32))
        dense = {f"diff{k}": plane for k, plane in enumerate(byte_planes(difference))}
    z = zigzag(current, prediction)
    tiles = _tiles(z, current.itemsize)
    gaps = [gap_code(tile != 0) for tile in tiles]
    gap_bytes, changed, wide = sum(g.size for g in gaps), int(np.count_nonzero(z)), wide_words(z)
    if gap_bytes + changed + wide.nbytes > current.size:
        return None
    exceptions = {
        "tiles": tiles_table(tiles, gaps),
        "gaps": np.concatenate(gaps),
        "values": values_code(z),
        "wide": wide.view(np.uint8),
    }
    return Row(chunk, method, changed, gap_bytes, wide.size), header | dense | exceptions


def _decode_by_law(row: Row, streams: dict[str, U8], base: Words) -> Words:
    """Return the chunk after one that is predicted by a law."""
    law = Law.of(streams["law"].tobytes())
    if not law.is_known:
        raise _refuse(row.chunk, "its law is not known")
    _, m0, _ = np.split(base, LAW_PARTS)
    if row.method == STEPS_LAW:
        z = join_planes([streams[f"diff{k}"] for k in range(base.itemsize)])
        w_step, m_step, v_step = np.split(unzigzag(z), LAW_PARTS)
        m = m0 + m_step
        v = laws.later_square(law, base).view(np.uint32) + v_step
        w = laws.later_weight(law, base, m.view(np.float32), v.view(np.float32))
        return np.concatenate([w.view(np.uint32) + w_step, m, v])
    sparse = row._replace(method=SPARSE)
    exceptions = unzigzag(_sparse_differences(sparse, streams, base.size, base.itemsize))
    if row.method == GRADIENT_LAW:
        gradients = rotate_right(join_planes([streams[f"plane{k}"] for k in range(2)]))
        return laws.step(law, base, gradients, None) + exceptions
    m = m0 + unzigzag(join_planes([streams[f"diff{k}"] for k in range(base.itemsize)]))
    return laws.step(law, base, None, m.view(np.float32)) + exceptions


# Decoding. Every check of section 4.3 comes before a word of the chunk is written.


def _refuse(chunk: int, why: str, tile: int | None = None) -> DamagedStream:
    return DamagedStream(
        f"chunk {chunk}: {why}" if tile is None else f"chunk {chunk}, tile {tile}: {why}"
    )


def _checked_rows(table: U32, words: U64, word_bytes: int) -> list[Row]:
    """Return the rows after a check that they describe chunks of the run.

    ``words[c]`` is the number of words of chunk ``c``.
    """
    rows = [Row(*(int(v) for v in line)) for line in table.reshape(-1, ROW_WIDTH)]
    # Chunks ascend strictly, so none can be written twice.
    before = -1
    for row in rows:
        if row.chunk >= words.size:
            raise _refuse(row.chunk, f"there are only {words.size} chunks")
        if row.chunk <= before:
            raise _refuse(row.chunk, f"its row comes after that of chunk {before}")
        before = row.chunk
        if row.streams not in (SPARSE, BITMAP, DIFF, PLANES, RAW, *LAWS):
            raise _refuse(row.chunk, f"method {row.method} is not known")
        if row.changed > words[row.chunk]:
            raise _refuse(
                row.chunk,
                f"{row.changed} words are said to have changed, there are only {words[row.chunk]}",
            )
        if row.is_ordered and word_bytes != ORDERED_WORD_BYTES:
            raise _refuse(
                row.chunk, f"words of {word_bytes} bytes cannot be {METHOD_NAMES[row.method]}"
            )
        if row.method in LAWS and (word_bytes != 4 or words[row.chunk] % LAW_PARTS):
            raise _refuse(
                row.chunk,
                f"{words[row.chunk]} words of {word_bytes} bytes cannot be"
                f" {METHOD_NAMES[row.method]}",
            )
        if row.gap_bytes and row.streams not in (SPARSE, GRADIENT_LAW, MEAN_LAW):
            raise _refuse(row.chunk, f"gap_bytes must be 0 under {METHOD_NAMES[row.method]}")
        if row.wide_count and row.streams not in (SPARSE, BITMAP, GRADIENT_LAW, MEAN_LAW):
            raise _refuse(row.chunk, f"wide_count must be 0 under {METHOD_NAMES[row.method]}")
    return rows


def _sizes(row: Row, words: int, word_bytes: int) -> dict[str, int]:
    """Return the bytes of each stream of a chunk, which follow from its row."""
    if row.method in LAWS:
        part = words // LAW_PARTS
        plain = Row(row.chunk, SPARSE, row.changed, row.gap_bytes, row.wide_count)
        if row.method == STEPS_LAW:
            return {"law": LAW_BYTES, **{f"diff{k}": words for k in range(word_bytes)}}
        dense = (
            {f"plane{k}": part for k in range(2)}
            if row.method == GRADIENT_LAW
            else {f"diff{k}": part for k in range(word_bytes)}
        )
        return {"law": LAW_BYTES, **dense, **_sizes(plain, words, word_bytes)}
    if row.streams in (SPARSE, BITMAP):
        positions = {"gaps": row.gap_bytes} if row.streams == SPARSE else {"bitmap": -(-words // 8)}
        tiles = -(-words * word_bytes // TILE_BYTES)
        return {
            "tiles": 6 * tiles,
            **positions,
            "values": row.changed,
            "wide": row.wide_count * word_bytes,
        }
    if row.method == RAW:
        return {"raw": words * word_bytes}
    return {f"{'diff' if row.method == DIFF else 'plane'}{k}": words for k in range(word_bytes)}


def _cut(
    streams: Mapping[str, U8], rows: list[Row], words: U64, word_bytes: int
) -> list[dict[str, U8]]:
    """Return each chunk's own part of every stream."""
    offsets = dict.fromkeys(STREAMS, 0)
    empty = np.empty(0, np.uint8)
    pieces = []
    for row in rows:
        piece = {}
        for name, size in _sizes(row, int(words[row.chunk]), word_bytes).items():
            stream = streams.get(name, empty)
            piece[name] = stream[offsets[name] : offsets[name] + size]
            offsets[name] += size
            if offsets[name] > stream.size:
                raise _refuse(row.chunk, f"stream {name} ends inside it")
        pieces.append(piece)
    # Bytes that no row owns would be content that no check has seen.
    for name, stream in streams.items():
        if stream.size != offsets[name]:
            raise DamagedStream(
                f"stream {name} has {stream.size - offsets[name]} bytes that belong to no chunk"
            )
    return pieces


def _decode_chunk(row: Row, streams: dict[str, U8], base: Words) -> Words:
    word_bytes = base.itemsize
    if row.method in LAWS:
        return _decode_by_law(row, streams, base)
    if row.method == RAW:
        return np.frombuffer(streams["raw"].tobytes(), base.dtype)
    if row.method == PLANES:
        return rotate_right(join_planes([streams[f"plane{k}"] for k in range(word_bytes)]))
    if row.method == DIFF:
        return base + unzigzag(join_planes([streams[f"diff{k}"] for k in range(word_bytes)]))
    differences = unzigzag(_sparse_differences(row, streams, base.size, word_bytes))
    if not row.is_ordered:
        return base + differences
    words = base.copy()
    words[class_order(base)] += differences
    return words


def _sparse_differences(row: Row, streams: dict[str, U8], words: int, word_bytes: int) -> Words:
    """Return ``z`` of every word, 0 if unchanged, after the checks of 4.3."""
    table = streams["tiles"].view("<u2").reshape(-1, 3).astype(np.int64)
    for column, stated in ((0, row.changed), (1, row.gap_bytes), (2, row.wide_count)):
        if table[:, column].sum() != stated:
            raise _refuse(
                row.chunk,
                f"its tiles own {table[:, column].sum()} {_TILE_COLUMNS[column]}, its row says"
                f" {stated}",
            )
    bits = (
        np.unpackbits(streams["bitmap"], bitorder="little")
        if row.streams == BITMAP
        else np.empty(0, np.uint8)
    )
    # With a fixed value of the unused bits, a bitmap has only one form.
    if bits[words:].any():
        raise _refuse(row.chunk, "an unused bit of the bitmap is set")
    wide = np.frombuffer(streams["wide"].tobytes(), f"<u{word_bytes}")
    z = np.zeros(words, f"<u{word_bytes}")
    size = TILE_BYTES // word_bytes
    gap_at = value_at = wide_at = 0
    for tile, (count, gap_bytes, wide_count) in enumerate(table.tolist()):
        tile_words = min(size, words - tile * size)
        if row.streams == SPARSE:
            positions = _gap_positions(
                row, tile, streams["gaps"][gap_at : gap_at + gap_bytes], count, tile_words
            )
        else:
            positions = np.flatnonzero(bits[tile * size : tile * size + tile_words])
            if positions.size != count:
                raise _refuse(
                    row.chunk, f"its bitmap has {positions.size} bits, its entry says {count}", tile
                )
        values = streams["values"][value_at : value_at + count].astype(z.dtype)
        escaped = values == ESCAPE
        if np.count_nonzero(escaped) != wide_count:
            raise _refuse(
                row.chunk,
                f"{np.count_nonzero(escaped)} of its values are wide, its entry says {wide_count}",
                tile,
            )
        tile_wide = wide[wide_at : wide_at + wide_count]
        # Such a difference has a shorter form, and an encoder never writes this one.
        if np.any(tile_wide <= 255):
            raise _refuse(row.chunk, "a wide difference fits a value", tile)
        values[~escaped] += z.dtype.type(1)
        values[escaped] = tile_wide
        z[tile * size + positions] = values
        gap_at, value_at, wide_at = gap_at + gap_bytes, value_at + count, wide_at + wide_count
    return z


_TILE_COLUMNS = ("changed words", "gap bytes", "wide differences")


def _gap_positions(row: Row, tile: int, code: U8, count: int, room: int) -> NDArray[np.int64]:
    """Return the positions of the changed words in a tile of ``room`` words."""
    # A byte below 255 ends a gap.
    ends = np.flatnonzero(code != ESCAPE)
    if ends.size != count or (code.size and ends[-1:].tolist() != [code.size - 1]):
        raise _refuse(row.chunk, f"its {code.size} gap bytes do not make {count} gaps", tile)
    # Every earlier changed word takes a place of its own.
    steps = np.cumsum(code.astype(np.int64))[ends] + np.arange(count)
    if count and steps[-1] >= room:
        raise _refuse(row.chunk, f"a position lies outside its {room} words", tile)
    return steps
