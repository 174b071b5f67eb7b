"""The native codec alone: equal to the reference on anything, on any number of threads, with any
kernels, from any memory.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltacheck import _native
from deltacheck.codec import NativeCodec
from deltacheck.codec.base import (
    DIFF,
    ORDERED,
    PLANES,
    ROW_CHANGED,
    ROW_CHUNK,
    ROW_METHOD,
    STREAMS,
    TILE_BYTES,
    U8,
    Encoded,
)
from deltacheck.codec.native import Cut
from deltacheck.errors import DamagedStream
from tests.contracts.codec import CASES, DAMAGES, Case, moved, same, words
from tests.reference.codec import ReferenceCodec

pytestmark = pytest.mark.usefixtures("encoder_settings_restored")


def encode(codec, case, *, ordered=False):
    base = None if case.base is None else case.base.copy()
    return codec.encode(case.current, base, case.bounds, case.word_bytes, ordered=ordered)


def _bounds(words):
    return np.array([0, words], np.uint64)


@st.composite
def runs(draw):
    """Any run of up to three tiles and a bit in the cuts that are hardest: tile edges, empty
    chunks, single words.
    """
    w = draw(st.sampled_from([1, 2, 4, 8]))
    tile = TILE_BYTES // w
    length = draw(
        st.one_of(
            st.integers(0, 300),
            st.sampled_from([tile - 1, tile, tile + 1, 3 * tile, 3 * tile + 63]),
        )
    )
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    density = draw(st.sampled_from([0.0, 0.0005, 0.003, 0.02, 0.06, 0.07, 0.25, 0.5, 0.9, 1.0]))
    most = draw(st.sampled_from([1, 3, 127, 128, 129, 30_000, 2**31]))
    kind = draw(st.sampled_from(["noise", "floats", "zeros"]))
    base = {
        "noise": lambda: np.frombuffer(random.bytes(length * w), f"<u{w}").copy(),
        "floats": lambda: words(length, w, seed),
        "zeros": lambda: np.zeros(length, f"<u{w}"),
    }[kind]()
    current = moved(base, density, min(most, 2 ** (8 * w - 1) - 1), seed)
    if draw(st.booleans()):
        current[: length // 2] = np.frombuffer(random.bytes(length // 2 * w), f"<u{w}")
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    with_base = draw(st.booleans())
    bounds = np.array([0, *cuts, length], np.uint64)
    return Case(kind, current.view(np.uint8), base.view(np.uint8) if with_base else None, bounds, w)


@given(runs(), st.booleans(), st.sampled_from(_native.instruction_sets()), st.integers(1, 3))
def test_any_run_gives_the_bytes_of_the_reference_and_comes_back(case, ordered, kernels, threads):
    _native.use_instruction_set(kernels)
    _native.set_threads(threads)
    encoded, new_base = encode(NativeCodec(), case, ordered=ordered)
    assert same(encoded, encode(ReferenceCodec(), case, ordered=ordered)[0])
    if case.base is not None:
        assert np.array_equal(new_base, case.current)
    for codec in (NativeCodec(), ReferenceCodec()):
        decoded = np.zeros_like(case.current) if case.base is None else case.base.copy()
        codec.apply(encoded, decoded, case.bounds, case.word_bytes)
        assert np.array_equal(decoded, case.current)


@given(st.sampled_from(DAMAGES), st.data())
def test_any_flipped_byte_is_refused_by_both_or_means_the_same_to_both(damage, data):
    """From sound or damaged streams, one byte is changed: no read or write goes astray, and no
    codec is more lenient than another.
    """
    streams = {name: np.array(content) for name, content in damage.encoded.streams.items()}
    name = data.draw(st.sampled_from(sorted(streams)))
    rows = damage.encoded.rows.copy()
    if streams[name].size and data.draw(st.booleans()):
        streams[name][data.draw(st.integers(0, streams[name].size - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    else:
        rows[data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 4))] = data.draw(
            st.sampled_from([0, 1, 2, 5, 6, 7, 70_000, 2**32 - 1])
        )
    results = []
    for codec in (NativeCodec(), ReferenceCodec()):
        room = np.full(damage.base.size + 256, 0xA5, np.uint8)
        inside = room[128:-128]
        inside[:] = damage.base
        try:
            codec.apply(Encoded(rows, streams), inside, damage.bounds, damage.word_bytes)
            results.append(inside.tobytes())
        except DamagedStream as refusal:
            results.append(str(refusal))
        assert (room[:128] == 0xA5).all()
        assert (room[-128:] == 0xA5).all()
    assert results[0] == results[1]


@pytest.mark.parametrize("density", [0.001, 0.2])
def test_words_of_two_bytes_are_ordered_by_the_exponents_of_their_base(density):
    base = words(3 * TILE_BYTES, 2)
    # Small weights change more often than large ones.
    exponents = (base >> 7 & 255).astype(float)
    moves = np.random.default_rng(0).random(base.size) < density * 2 ** (124 - exponents)
    case = Case("", (base + moves).view(np.uint8), base.view(np.uint8), _bounds(base.size), 2)
    plain, ordered = encode(NativeCodec(), case)[0], encode(NativeCodec(), case, ordered=True)[0]
    assert ordered.rows[0, ROW_METHOD] == ORDERED[int(plain.rows[0, ROW_METHOD])]
    assert ordered.rows[0, ROW_CHANGED] == plain.rows[0, ROW_CHANGED]
    order = np.argsort(exponents, kind="stable")
    expected, _ = ReferenceCodec().encode(
        (base + moves)[order].view(np.uint8), base[order].view(np.uint8), case.bounds, 2
    )
    for name, stream in expected.streams.items():
        assert np.array_equal(ordered.streams[name], stream), name


@pytest.mark.parametrize("size", [1, 63, 512, 2111, 40_000])
@pytest.mark.parametrize("seed", range(4))
def test_saves_of_one_chunk_are_decoded_by_one_call_in_any_mixture_of_densities(size, seed):
    random = np.random.default_rng(seed)
    scales = random.choice([1e-3, 0.02, 0.3], size)
    base = (random.normal(0, scales).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    rows, offsets, streams, end = [], [], [], 0
    state = base
    for _ in range(8):
        density = random.choice([0.001, 0.005, 0.02, 0.3])
        changes = random.random(size) < density
        # Some changes move a word to another exponent.
        after = state + np.where(changes, random.choice([1, 3, 65535, 128, 1000], size), 0).astype(
            np.uint16
        )
        case = Case("", after.view(np.uint8), state.view(np.uint8), _bounds(size), 2)
        encoded, _ = encode(NativeCodec(), case, ordered=random.random() < 0.8)
        for row in encoded.rows:
            rows.append(row)
            offsets.append([0] * len(STREAMS))
            for column, name in enumerate(STREAMS):
                stream = encoded.streams.get(name, np.empty(0, np.uint8))
                streams.append(stream)
                offsets[-1][column] = end
                end += stream.size
        state = after
    decoded = base.view(np.uint8).copy()
    if rows:
        targets = np.tile(np.array([0, 0, size, 2], np.uint64), (len(rows), 1))
        refusal = _native.apply_rows(
            np.array(rows),
            targets,
            np.array(offsets, np.uint64),
            np.concatenate(streams),
            [decoded],
        )
        assert refusal is None
    assert np.array_equal(decoded.view(np.uint16), state)


@pytest.mark.parametrize("codec", [NativeCodec(), ReferenceCodec()], ids=["native", "reference"])
@pytest.mark.parametrize("word_bytes", [1, 4, 8])
def test_only_words_of_two_bytes_are_ordered(codec, word_bytes):
    base = words(TILE_BYTES, word_bytes)
    case = Case(
        "", moved(base, 0.01, 3).view(np.uint8), base.view(np.uint8), _bounds(base.size), word_bytes
    )
    encoded, _ = encode(codec, case, ordered=True)
    assert same(encoded, encode(codec, case)[0])
    rows = encoded.rows.copy()
    rows[0, ROW_METHOD] = ORDERED[int(rows[0, ROW_METHOD])]
    with pytest.raises(DamagedStream, match=f"chunk 0: words of {word_bytes} bytes cannot be"):
        codec.apply(Encoded(rows, encoded.streams), case.base.copy(), case.bounds, case.word_bytes)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_refusal_reads_the_same_as_the_references(damage):
    told = []
    for codec in (NativeCodec(), ReferenceCodec()):
        with pytest.raises(DamagedStream) as refusal:
            codec.apply(damage.encoded, damage.base.copy(), damage.bounds, damage.word_bytes)
        told.append(str(refusal.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("kernels", _native.instruction_sets())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bytes_depend_neither_on_threads_nor_on_kernels(kernels, threads):
    base = words(40 * TILE_BYTES // 2 + 1234, 2)
    current = np.concatenate(
        [
            part
            for k in range(8)
            for part in [moved(base[k::8], (0, 0.001, 0.3, 1.0)[k % 4], 300, k)]
        ]
    )
    bounds = np.append(np.arange(0, base.size, 5000, np.uint64), np.uint64(base.size))
    expected, _ = ReferenceCodec().encode(
        current.view(np.uint8), base.view(np.uint8).copy(), bounds, 2
    )
    _native.use_instruction_set(kernels)
    _native.set_threads(threads)
    encoded, _ = NativeCodec().encode(current.view(np.uint8), base.view(np.uint8).copy(), bounds, 2)
    assert same(encoded, expected)


def test_the_first_bad_chunk_is_named_on_any_number_of_threads():
    """Chunks are large enough for several threads to be at work when the first bad one comes, and
    all after it are bad, too.
    """
    base = words(60 * 20_000, 2)
    bounds = np.arange(0, base.size + 1, 20_000, dtype=np.uint64)
    encoded, _ = NativeCodec().encode(
        moved(base, 0.2, 3).view(np.uint8), base.view(np.uint8).copy(), bounds, 2
    )
    values = encoded.streams["values"].copy()
    values[int(encoded.rows[:50, ROW_CHANGED].sum()) :] = 255
    damaged = encoded._replace(streams={**encoded.streams, "values": values})
    for threads in (1, 2, 3):
        _native.set_threads(threads)
        for _ in range(30):
            with pytest.raises(DamagedStream, match="chunk 50, tile 0"):
                NativeCodec().apply(damaged, base.view(np.uint8).copy(), bounds, 2)


def test_a_chunk_of_many_tiles_of_every_kind_comes_back():
    """More than the usual chunk: the sample has several tiles, and a word's density differs from
    tile to tile.
    """
    tile = TILE_BYTES // 4
    base = words(40 * tile + 11, 4)
    current = base.copy()
    for k in range(40):
        part = slice(k * tile, (k + 1) * tile)
        current[part] = moved(
            base[part], (0, 0.0003, 0.01, 0.06, 0.07, 0.5, 1.0)[k % 7], 10 ** (k % 6), k
        )
    case = Case(
        "mixed", current.view(np.uint8), base.view(np.uint8), np.array([0, base.size], np.uint64), 4
    )
    encoded, _ = encode(NativeCodec(), case)
    assert same(encoded, encode(ReferenceCodec(), case)[0])
    decoded = case.base.copy()
    NativeCodec().apply(encoded, decoded, case.bounds, 4)
    assert np.array_equal(decoded, case.current)


@pytest.mark.parametrize("case", [c for c in CASES if "all-" in c.why or "some-" in c.why], ids=str)
def test_memory_may_lie_at_any_address(case):
    expected, _ = encode(NativeCodec(), case)
    for offset in (1, 3):
        current, base, decoded = (
            np.empty(case.current.size + 64, np.uint8)[offset : offset + case.current.size]
            for _ in range(3)
        )
        current[:], base[:], decoded[:] = case.current, case.base, case.base
        encoded, _ = NativeCodec().encode(current, base, case.bounds, case.word_bytes)
        assert same(encoded, expected)
        shifted = {
            name: np.concatenate([[np.uint8(0)] * offset, content])[offset:]
            for name, content in encoded.streams.items()
        }
        NativeCodec().apply(Encoded(encoded.rows, shifted), decoded, case.bounds, case.word_bytes)
        assert np.array_equal(decoded, case.current)


def test_any_contiguous_memory_is_taken_as_its_bytes():
    base = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)
    current = base.copy()
    current[3, 4] = -current[3, 4]
    current.flags.writeable = False
    bounds = np.array([0, 1200], np.uint64)
    for codec in (NativeCodec(), ReferenceCodec()):
        shadow = base.copy()
        encoded, returned = codec.encode(current, shadow, bounds, 4)
        assert returned is shadow
        assert np.array_equal(shadow, current)
        decoded = base.copy()
        codec.apply(encoded, decoded, bounds, 4)
        assert np.array_equal(decoded, current)


@pytest.mark.parametrize("codec", [NativeCodec(), ReferenceCodec()], ids=["native", "reference"])
def test_memory_that_cannot_be_updated_in_place_is_refused(codec):
    bounds = np.array([0, 32], np.uint64)
    fixed = np.zeros(32, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="base must be writable"):
        codec.encode(np.ones(32, np.uint8), fixed, bounds, 1)
    with pytest.raises(ValueError, match="base must be a C-contiguous"):
        codec.encode(np.ones(32, np.uint8), np.zeros(64, np.uint8)[::2], bounds, 1)
    with pytest.raises(ValueError, match="current must be a C-contiguous"):
        codec.encode(np.ones((8, 4), np.uint8).T, np.zeros(32, np.uint8), bounds, 1)
    with pytest.raises(ValueError, match="current must be a C-contiguous"):
        codec.encode([1, 2, 3], np.zeros(32, np.uint8), bounds, 1)


def test_callers_on_several_threads_do_not_disturb_each_other():
    _native.set_threads(3)
    chosen = [c for c in CASES if c.base is not None and c.current.size > TILE_BYTES]
    expected = [encode(ReferenceCodec(), case)[0] for case in chosen]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            results = list(pool.map(lambda case: encode(NativeCodec(), case)[0], chosen))
            assert all(same(one, other) for one, other in zip(results, expected, strict=True))


FORKED = """
import os, signal, threading, numpy as np
from deltacheck import _native
from deltacheck.codec import NativeCodec
_native.set_threads(3)
current = np.arange(1 << 16, dtype=np.uint16).astype(np.uint8)
bounds = np.arange(0, (1 << 16) + 1, 1 << 10, dtype=np.uint64)
def encode():
    encoded, _ = NativeCodec().encode(current, np.zeros(1 << 16, np.uint8), bounds, 1)
    streams = b"".join(stream.tobytes() for stream in encoded.streams.values())
    return encoded.rows.tobytes() + streams
first, stop = encode(), threading.Event()
def keep_the_pool_busy():
    while not stop.is_set():
        encode()
busy = threading.Thread(target=keep_the_pool_busy)
busy.start()
codes = []
for _ in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if encode() == first else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
busy.join()
print(codes)
assert not any(codes)
"""


def test_a_child_can_encode_that_was_forked_while_its_parent_did():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=240, check=True)


@pytest.mark.parametrize("name", _native.instruction_sets())
def test_the_environment_chooses_the_kernels(name):
    say = "from deltacheck import _native; print(_native.instruction_set())"
    done = subprocess.run(
        [sys.executable, "-c", say],
        env={**os.environ, "DELTACHECK_ISA": name},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == name


def test_kernels_that_this_processor_lacks_are_refused_by_name():
    with pytest.raises(ValueError, match="pdp-11"):
        _native.use_instruction_set("pdp-11")


def test_the_extension_loads_without_a_framework():
    say = (
        "import sys, deltacheck.codec.native; sys.exit(any(name in sys.modules for name in ('jax',"
        " 'torch', 'jaxlib')))"
    )
    assert subprocess.run([sys.executable, "-c", say], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "sys.modules['deltacheck._native'] = None",
            "cannot be loaded .*: install a wheel, or build it",
        ),
        (
            "from deltacheck import _native; _native.INTERFACE = -1",
            "has interface -1, this package needs .*: build it again",
        ),
    ],
)
def test_an_extension_that_is_missing_or_stale_is_an_error_with_a_remedy(change, says):
    say = f"import sys; {change}; import deltacheck.codec"
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(says, done.stderr.splitlines()[-1])


def test_memory_is_what_the_output_needs():
    """A run of 64 MiB in which 1 % changed: no buffer of its size comes to life."""
    say = """
import resource, numpy as np
from deltacheck.codec import NativeCodec
base = np.ones(64 << 20, np.uint8); current = base.copy(); current[::400] = 2
bounds = np.arange(0, (64 << 20) // 4 + 1, 1 << 18, dtype=np.uint64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
encoded, _ = NativeCodec().encode(current, base, bounds, 4)
stored = sum(s.nbytes for s in encoded.streams.values())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, stored)
"""
    used, stored = map(
        int,
        subprocess.run(
            [sys.executable, "-c", say], capture_output=True, text=True, check=True
        ).stdout.split(),
    )
    assert used < stored + (16 << 20)


def test_the_methods_of_a_training_step_are_those_that_the_documents_name():
    """float32 state with every word moved is kept as planes of differences, a first save as planes
    of values.
    """
    base = words(1 << 16, 4)
    bounds = np.array([0, 1 << 16], np.uint64)
    stepped = moved(base, 1.0, 3000)
    assert (
        NativeCodec()
        .encode(stepped.view(np.uint8), base.view(np.uint8).copy(), bounds, 4)[0]
        .rows[0, ROW_METHOD]
        == DIFF
    )
    assert (
        NativeCodec().encode(base.view(np.uint8), None, bounds, 4)[0].rows[0, ROW_METHOD] == PLANES
    )


def leaves_of_all_widths() -> list[tuple[U8, U8, Cut]]:
    """Leaves before and after: sparse, dense, equal, empty, of several chunks."""
    random = np.random.default_rng(3)
    leaves = []
    for number, count in enumerate((1, 3000, 0, 5000, 70_000, 3000)):
        word_bytes = (1, 2, 4, 8)[number % 4]
        before = random.integers(0, 256, count * word_bytes, dtype=np.uint8)
        after = before.copy()
        if number != 1:
            changed = random.integers(0, max(1, count), count // (2 if number % 2 else 200))
            after.reshape(count, word_bytes)[changed] ^= 5
        bounds = np.unique(np.array([0, count // 3, count], np.uint64))
        leaves.append((after, before, Cut(bounds, word_bytes, number == 5)))
    return leaves


def test_many_leaves_in_one_call_give_what_each_gives_alone() -> None:
    leaves, codec = leaves_of_all_widths(), NativeCodec()
    alone = [
        codec.encode(after, before.copy(), cut.bounds, cut.word_bytes, ordered=cut.ordered)[0]
        for after, before, cut in leaves
    ]
    bases = [before.copy() for _, before, _ in leaves]
    encoded = codec.encode_many([a for a, _, _ in leaves], bases, [cut for _, _, cut in leaves])
    first = np.cumsum([0, *(cut.bounds.size - 1 for _, _, cut in leaves)]).tolist()
    rows = [part.rows.copy() for part in alone]
    for table, start in zip(rows, first, strict=False):
        table[:, ROW_CHUNK] += start
    assert np.array_equal(encoded.rows, np.concatenate(rows))
    assert len(encoded.rows) > 5
    names = {name for part in alone for name in part.streams}
    assert encoded.streams.keys() == names
    for name in names:
        pieces = [part.streams[name] for part in alone if name in part.streams]
        assert np.array_equal(encoded.streams[name], np.concatenate(pieces)), name
    for base, (after, _, _) in zip(bases, leaves, strict=True):
        assert np.array_equal(base, after)


@pytest.mark.parametrize(
    ("base", "cut", "message"),
    [
        (np.zeros(7, np.uint8), Cut(np.array([0, 2], np.uint64), 4), "7 bytes"),
        (np.zeros(8, np.uint8), Cut(np.array([0, 3], np.uint64), 4), "bounds end at 3"),
        (np.zeros(8, np.uint8), Cut(np.array([0, 2], np.uint64), 3), "word_bytes"),
        (np.frombuffer(bytes(8), np.uint8), Cut(np.array([0, 2], np.uint64), 4), "writable"),
    ],
)
def test_misuse_of_one_of_many_leaves_is_refused_before_any_changes(
    base: U8, cut: Cut, message: str
) -> None:
    first, ones = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    fits = Cut(np.array([0, 2], np.uint64), 4)
    with pytest.raises(ValueError, match=message):
        NativeCodec().encode_many([ones, ones], [first, base], [fits, cut])
    assert not first.any()
