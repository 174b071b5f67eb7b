"""Bad input: each row of the threat model (M1 to M12) gives a typed error or a right result.

Nothing outside the root is changed. Documents are forged with valid checksums (forge.py). Cases of
test_store.py, test_damage.py and test_tree.py are not repeated here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.codec import derivation
from deltacheck.codec.extension import native
from deltacheck.leaf.digest import leaf_digest
from deltacheck.store import documents
from deltacheck.store.files import arrays, chunk_files, native_files
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from tests.support import forge
from tests.support.stored_arrays import ReadableArray

NEWEST = "c0000000001"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two steps with a natural array of two shards, packed leaves and a delta with streams."""
    root = tmp_path_factory.mktemp("saved") / "root"
    big, ramp = torch.arange(300 * 250, dtype=torch.float32).reshape(300, 250), torch.arange(50.0)
    codes = np.array([0, 1, 600], np.uint16)
    with Engine(root) as engine:
        engine.save(0, {"w": big, "b": ramp, "same": ramp * 2, "n": [1, 2.5, "x"], "codes": codes})
        big.view(-1)[::7] += 1
        engine.save(
            1, {"w": big, "b": ramp + 1, "same": ramp * 2, "n": [1, 2.5, "x"], "codes": codes}
        )
    return root


@pytest.fixture
def root(saved: Path) -> Iterator[Path]:
    """Return the saved root. A test may change its documents, which are restored afterwards."""
    kept = {
        path: path.read_bytes()
        for path in (*saved.glob("checkpoints/c*/zarr.json"), *saved.glob("segments/s*/zarr.json"))
    }
    yield saved
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved root, which a test may change."""
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


def manifest_path(root: Path, name: str = NEWEST) -> Path:
    return root / "checkpoints" / name / "zarr.json"


def segments(root: Path) -> list[Path]:
    return [root / "segments" / ref.id for ref in deltacheck.open(root).manifest(1).segments]


def assert_refused(
    root: Path,
    match: str | None = None,
    error: type[Exception] = errors.DeltacheckError,
    **options: Any,
) -> None:
    with pytest.raises(error, match=match):
        deltacheck.open(root).restore(1, **options)


# --- M1: links, pipes, devices, other names -------------------------------------------------------


def a_link(path: Path) -> None:
    outside = path.parents[path.parts[::-1].index("root")] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def a_dangling_link(path: Path) -> None:
    remove(path)
    path.symlink_to("/nowhere/at/all")


def a_pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def a_device(path: Path) -> None:
    remove(path)
    path.symlink_to("/dev/zero")


def a_directory_or_file(path: Path) -> None:
    was_file = path.is_file()
    remove(path)
    path.mkdir() if was_file else path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path)


PLACES: dict[str, Callable[[Path], Path]] = {
    "checkpoint": lambda root: root / "checkpoints" / NEWEST,
    "segments": lambda root: root / "segments",
    "segment": lambda root: segments(root)[0],
    "leaves": lambda root: segments(root)[0] / "leaves",
    "array": lambda root: segments(root)[0] / "leaves" / "w",
    "chunk": lambda root: segments(root)[0] / "leaves" / "w" / "c.0.0",
    "packed chunk": lambda root: segments(root)[0] / "packed" / "float32" / "c.0",
    "stream folder": lambda root: next(segments(root)[1].glob("delta.0.*/c.0")).parent,
    "stream": lambda root: next(segments(root)[1].glob("delta.0.*/c.0")),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [a_link, a_dangling_link, a_pipe, a_device, a_directory_or_file])
def test_nothing_but_files_and_directories_of_the_root_is_opened(
    copied: Path, place: str, make: Callable[[Path], None]
) -> None:
    """TensorStore would follow the link, block on the pipe and read the device without end."""
    path = PLACES[place](copied)
    make(path)
    assert_refused(copied)
    with pytest.raises(errors.DeltacheckError):
        deltacheck.open(copied).restore()  # nor is an older step given without a word
    with contextlib.suppress(errors.DeltacheckError):
        assert deltacheck.open(copied).verify(deep=True)


@pytest.mark.parametrize("name", ["control", "checkpoints", "segments"])
def test_a_writer_does_not_write_through_a_link_out_of_the_root(
    copied: Path, name: str, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    shutil.move(copied / name, outside)
    (copied / name).symlink_to(outside)
    before = sorted((p, p.stat().st_mtime_ns) for p in outside.rglob("*"))
    with pytest.raises(errors.Damaged, match="leads out of the root"):
        Engine(copied)
    assert sorted((p, p.stat().st_mtime_ns) for p in outside.rglob("*")) == before


def test_the_lease_is_not_taken_through_a_link(copied: Path, tmp_path: Path) -> None:
    """A lease writes the name of its holder, which a link would write over another file."""
    victim = tmp_path / "precious"
    victim.write_text("precious")
    (copied / "control" / "zarr.json").unlink()
    (copied / "control" / "zarr.json").symlink_to(victim)
    with pytest.raises(errors.Damaged, match="not a regular file"):
        Engine(copied)
    assert victim.read_text() == "precious"
    (copied / "control" / "zarr.json").unlink()
    os.mkfifo(copied / "control" / "zarr.json")
    with pytest.raises(errors.Damaged, match="not a regular file"):
        Engine(copied)


def test_a_pipe_in_the_place_of_the_roots_own_document_hangs_nobody(copied: Path) -> None:
    (copied / "zarr.json").unlink()
    os.mkfifo(copied / "zarr.json")
    with pytest.raises(errors.Damaged, match="missing or damaged"):
        deltacheck.open(copied)


BAD_NAMES = [
    "..",
    ".",
    "",
    "../w",
    "/etc",
    "a/b",
    "w/../w",
    "zarr.json",
    "__w",
    "a\0b",
    "a\\b",
    "w\n",
    "w" * 300,
    "é",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_array_name_leads_anywhere_else(root: Path, name: str) -> None:
    forge.forge_table(
        manifest_path(root), 0, lambda table: table["leaves"]["w"]["key"].update(array=name)
    )
    assert_refused(root, error=errors.Damaged)


@pytest.mark.parametrize("name", [*BAD_NAMES, "float64", "object"])
def test_no_name_of_a_packed_array_leads_anywhere_else(root: Path, name: str) -> None:
    def edit(table: dict[str, Any]) -> None:
        table["packed"] = {name: table["packed"]["float32"]}
        for path in ("b", "same"):
            table["leaves"][path]["key"]["packed"] = name

    forge.forge_table(manifest_path(root), 0, edit)
    assert_refused(root, error=errors.Damaged)


@pytest.mark.parametrize("name", [*BAD_NAMES, "index", "values2"])
def test_no_name_of_a_stream_leads_anywhere_else(root: Path, name: str) -> None:
    def edit(table: dict[str, Any]) -> None:
        streams = table["parts"][0]["streams"]
        streams[name] = streams.pop(next(iter(streams)))

    forge.forge_table(manifest_path(root), -1, edit)
    assert_refused(root, error=errors.Damaged)


@pytest.mark.parametrize(
    "name",
    [
        *BAD_NAMES,
        "s1-0",
        "s0000000001-0000000g",
        "s0000000001-00000000/..",
        "c0000000001",
        "S0000000001-00000000",
    ],
)
def test_no_segment_id_leads_anywhere_else(root: Path, name: str) -> None:
    forge.forge_manifest(
        manifest_path(root), lambda manifest: manifest["segments"][0].update(id=name)
    )
    assert_refused(root, error=errors.Damaged)


def test_a_directory_of_another_name_is_no_step_and_no_segment(copied: Path) -> None:
    for name in ("c1", "c00000000011", "x0000000002", "c000000000a", "..."):
        shutil.copytree(copied / "checkpoints" / NEWEST, copied / "checkpoints" / name)
    shutil.copytree(segments(copied)[0], copied / "segments" / "s1")
    assert deltacheck.open(copied).steps() == [0, 1]
    assert len(open_root(copied).store.segment_ids()) == 2


def test_an_item_of_a_manager_root_that_leads_out_is_not_entered(tmp_path: Path) -> None:
    root = forge.unpack("manager", tmp_path / "root")
    for place in ("2", "2/default"):
        shutil.move(root / place, tmp_path / "moved")
        (root / place).symlink_to(tmp_path / "moved")
        with pytest.raises(errors.Damaged, match="leads out of the root"):
            deltacheck.open(root).restore()
        (root / place).unlink()
        shutil.move(tmp_path / "moved", root / place)
    (root / "latest").symlink_to(root / "2")  # not a step's name
    assert deltacheck.open(root).restore()["count"] == 2
    shutil.move(root / "deltacheck", tmp_path / "store")
    (root / "deltacheck").symlink_to(tmp_path / "store")
    with pytest.raises(errors.Damaged, match="leads out of the root"):
        deltacheck.open(root)


# --- M3: documents --------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    node: dict[str, Any] = {"t": "none"}
    for _ in range(levels):
        node = {"t": "list", "n": [node]}
    return node


def put(tree: dict[str, Any], node: Any) -> None:
    """Replace the list of numbers in the tree of the saved state."""
    next(pair for pair in tree["k"] if pair[0] == "n")[1] = node


TREES = {
    "no kind": {},
    "a kind that is a list": {"t": []},
    "too deep": nested(130),
    "much too deep": nested(300),
    "an integer with too many digits": {"t": "int", "v": "9" * 5000},
    "an integer that is none": {"t": "int", "v": "1.5"},
    "a float that is none": {"t": "float", "v": "0x"},
    "a NaN of too few bits": {"t": "float", "v": "nan:7f"},
    "a complex of three": {"t": "complex", "v": ["0x1p0"] * 3},
    "bytes that are not base64": {"t": "bytes", "v": "*"},
    "a pair of three": {"t": "dict", "k": [["a", {"t": "none"}, 1]]},
    "the same key twice": {"t": "dict", "k": [["a", {"t": "none"}], ["a", {"t": "int", "v": "1"}]]},
    "a key that is a list": {"t": "dict", "k": [[["a"], {"t": "none"}]]},
    "a key that is true": {"t": "dict", "k": [[True, {"t": "none"}]]},
    "children that are text": {"t": "list", "n": "abc"},
    "a deque of negative length": {"t": "deque", "n": [], "maxlen": -1},
    "a deque that holds more than it can": {"t": "deque", "n": [{"t": "none"}] * 2, "maxlen": 1},
    "a deque of huge length": {"t": "deque", "n": [], "maxlen": 2**70},
    "an owner that is a list": {"t": "array", "of": []},
    "a tag that is a number": {"t": "array", "of": "w", "tag": 1},
}


@pytest.mark.parametrize("name", TREES)
def test_a_skeleton_that_is_none_is_damage_before_a_leaf_is_read(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge.forge_manifest(manifest_path(root), lambda manifest: put(manifest["tree"], TREES[name]))
    monkeypatch.setattr(native_files, "start", None)  # nothing is read
    assert_refused(root, "skeleton|tree", errors.Damaged)


MANIFESTS: dict[str, forge.Edit] = {
    "negative step": lambda m: m.update(step=-1),
    "negative sequence number": lambda m: m.update(seq=-1),
    "sequence number of eleven digits": lambda m: m.update(seq=10**10),
    "huge step": lambda m: m.update(step=10**400, seq=10**400),
    "float for a step": lambda m: m.update(step=1.0),
    "true for a step": lambda m: m.update(step=True),
    "NaN": lambda m: m.update(time=float("nan")),
    "infinity": lambda m: m.update(time=float("inf")),
    "NaN in what is ignored": lambda m: m.update(colour=float("nan")),
    "features that are text": lambda m: m.update(must_understand="derived"),
    "features that are numbers": lambda m: m.update(must_understand=[1]),
    "another's number": lambda m: m.update(seq=0),
    "many axes": lambda m: m["leaves"]["b"].update(shape=[1] * 65, chunk=[1] * 65),
    "an empty leaf that is too large": lambda m: m["leaves"]["b"].update(
        shape=[0, 2**62], chunk=[1, 2**62]
    ),
    "an empty leaf of huge numbers": lambda m: m["leaves"]["b"].update(
        shape=[2**70, 0], chunk=[1, 1]
    ),
    "a chunk that is larger than the leaf by far": lambda m: m["leaves"]["b"].update(chunk=[2**50]),
    "a chunk above what a reader takes": lambda m: m["leaves"]["w"].update(
        shape=[2**25, 250], chunk=[2**25, 250]
    ),
    "segments of a missing base": lambda m: m["segments"].pop(0),
    "no segments": lambda m: m["segments"].clear(),
    "a base of the same shapes": lambda m: m["segments"][0].update(id="s0000000000-00000000"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_impossible_manifest_is_refused_whatever_vouches_for_it(root: Path, name: str) -> None:
    forge.forge_manifest(manifest_path(root), MANIFESTS[name])
    assert_refused(root)
    assert deltacheck.open(root).restore(0)


def extended(text: str, count: int) -> str:
    """Return base64 of ``count`` more bytes."""
    return base64.b64encode(base64.b64decode(text) + bytes(count)).decode()


TABLES: dict[str, tuple[int, forge.Edit]] = {
    "negative offset": (0, lambda t: t["leaves"]["b"]["key"].update(offset=-1)),
    "overlapping offsets": (0, lambda t: t["leaves"]["same"]["key"].update(offset=1)),
    "negative digests": (0, lambda t: t["leaves"]["b"].update(digests=-1)),
    "more digests": (0, lambda t: t.update(digests=extended(t["digests"], 16))),
    "a part of a digest": (0, lambda t: t.update(digests=extended(t["digests"], 1))),
    "no base64": (0, lambda t: t.update(digests="#" + t["digests"][1:])),
    "both whole and a delta": (0, lambda t: t["leaves"]["b"].update(delta=[[0, 0, 1]])),
    "a packed array that no leaf has": (0, lambda t: t["packed"].update(int8=5)),
    "more axes than an array can have": (
        0,
        lambda t: t["leaves"]["w"].update(shape=[300, 250] + [1] * 31, chunk=[1, 1] + [1] * 31),
    ),
    "a part that no leaf has": (1, lambda t: t["parts"].append(t["parts"][0])),
    "more rows": (1, lambda t: t["parts"][0].update(index=extended(t["parts"][0]["index"], 32))),
    "a part of a row": (
        1,
        lambda t: t["parts"][0].update(index=extended(t["parts"][0]["index"], 31)),
    ),
    "a negative part": (1, lambda t: t["leaves"]["w"].update(delta=[[-1, 0, 2]])),
    "negative run": (1, lambda t: t["leaves"]["w"].update(delta=[[0, 0, 3], [0, 3, -1]])),
    "a huge stream": (1, lambda t: t["parts"][0]["streams"].update(tiles=[2**62, "stream"])),
    "an empty stream": (1, lambda t: t["parts"][0]["streams"].update(tiles=[0, "stream"])),
    "a stream of another codec": (
        1,
        lambda t: t["parts"][0]["streams"].update(tiles=[12, "pickle"]),
    ),
    "its own base": (1, lambda t: t["leaves"]["w"].update(base=t["leaves"]["w"]["digest"])),
    "another's base": (1, lambda t: t["leaves"]["w"].update(base=t["leaves"]["b"]["base"])),
    "another dtype": (1, lambda t: t["leaves"]["w"].update(dtype="int32")),
    "another shape": (1, lambda t: t["leaves"]["w"].update(shape=[250, 300])),
}


@pytest.mark.parametrize("name", TABLES)
def test_an_impossible_table_is_refused_whatever_vouches_for_it(root: Path, name: str) -> None:
    number, edit = TABLES[name]
    forge.forge_table(manifest_path(root), number, edit)
    assert_refused(root, error=errors.Damaged)


def test_a_document_of_a_gibibyte_is_refused_before_it_is_read(root: Path) -> None:
    os.truncate(manifest_path(root), 1 << 30)
    assert_refused(
        root, f"more than the {documents.MAX_DOCUMENT_BYTES} that it may have", errors.Damaged
    )
    with pytest.raises(errors.Damaged, match="may have"):
        documents.from_zarr_json(bytes(documents.MAX_DOCUMENT_BYTES + 1), Manifest, "here")


@pytest.mark.parametrize("more", [b" ", b"\0", b"{}", b"x"])
def test_bytes_after_a_document_are_damage_or_white_space(root: Path, more: bytes) -> None:
    path = manifest_path(root)
    path.write_bytes(path.read_bytes() + more)
    if more.strip():
        assert_refused(root, error=errors.Damaged)
    else:
        deltacheck.open(root).restore(1)


@pytest.mark.parametrize("where", ["", "segments"])
def test_a_group_that_plain_zarr_reads_may_hold_anything_and_verify_says_so(
    copied: Path, where: str
) -> None:
    path = copied / "segments" / "zarr.json"
    for content in (b"[" * 100_000, b'{"zarr_format": NaN}', b""):
        path.write_bytes(content)
        assert deltacheck.open(copied).verify(redundant=True)
        deltacheck.open(copied).restore(1)


# --- M4: allocations ------------------------------------------------------------------------------

LIMITED = """
import resource, sys
import deltacheck, tensorstore, numpy
from deltacheck import errors
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30),) * 2)
try:
    deltacheck.open(sys.argv[1]).restore(1, **eval(sys.argv[2]))
except errors.DeltacheckError as error:
    print(type(error).__name__, error)
"""


def limited(root: Path, **options: Any) -> str:
    """Return the error of a restore in a process with 1 GiB beside its loaded code."""
    program = [sys.executable, "-c", LIMITED, str(root), repr(options)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def claim(root: Path, shape: list[int], chunk: list[int], leaf: str = "w") -> None:
    """Write another shape of a leaf into all documents, with valid digests."""
    digests = np.zeros((0, 2), np.uint64)

    def edit(table: dict[str, Any]) -> None:
        nonlocal digests
        entry = table["leaves"].get(leaf)
        if entry is None:
            return
        before = int(
            np.prod([-(-s // c) for s, c in zip(entry["shape"], entry["chunk"], strict=True)])
        )
        chunks = 1
        for s, c in zip(shape, chunk, strict=True):
            chunks *= -(-s // c)
        entry.update(shape=shape, chunk=chunk)
        if "key" in entry:
            more = (chunks - before) * 16
            table["digests"] = extended(table["digests"], more) if more < 1 << 20 else ""
            for other in table["leaves"].values():
                if other["digests"] > entry["digests"]:
                    other["digests"] += chunks - before
        rows = np.frombuffer(base64.b64decode(table["digests"]), "<u8").reshape(-1, 2)
        rows = rows[entry["digests"] :]
        if "key" in entry:
            digests = rows[:chunks].copy()
        else:
            ((part, first, count),) = entry["delta"]
            index = np.frombuffer(base64.b64decode(table["parts"][part]["index"]), "<u4")
            entry["base"] = leaf_digest(digests)
            if digests.size:
                digests[index.reshape(-1, 8)[first : first + count, 1]] = rows[:count]
        entry["digest"] = leaf_digest(digests)

    path = manifest_path(root)
    for number in range(len(segments(root))):
        forge.forge_table(path, number, edit)
    forge.forge_manifest(
        path,
        lambda manifest: manifest["leaves"][leaf].update(
            shape=shape, chunk=chunk, digest=leaf_digest(digests)
        ),
    )


def test_a_leaf_of_a_tebi_of_elements_is_refused_before_anything_is_opened(root: Path) -> None:
    claim(root, [2**30, 2**10], [2**8, 2**10])
    assert limited(root).startswith("BudgetExceeded")
    assert limited(root, max_bytes=1 << 20).startswith("BudgetExceeded")
    assert limited(root, slices={"w": (0, 0)}, max_bytes=1 << 20).startswith("BudgetExceeded")


def test_a_leaf_of_tiny_chunks_cannot_make_its_tables_larger_than_the_budget(root: Path) -> None:
    claim(root, [2**24, 1], [1, 1])
    assert "digests and indexes" in limited(root, slices={"w": (0, 0)}, max_bytes=1 << 20)


def test_what_the_machine_has_but_not_the_process_is_an_error_of_ours(root: Path) -> None:
    """A leaf of 2 GiB takes less than any machine has, but more than the process may."""
    claim(root, [2**29], [2**18])
    error = limited(root, max_bytes=1 << 40)
    assert error.startswith("BudgetExceeded")
    assert "this process cannot have the" in error


def test_a_formula_without_memory_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(*args: Any) -> Any:
        raise MemoryError

    root = forge.unpack("derived", tmp_path)
    monkeypatch.setattr(derivation, "compute", compute)
    with pytest.raises(errors.BudgetExceeded, match=r"this process cannot have the .* bytes"):
        deltacheck.open(root).restore()


def packed_bytes(content: bytes) -> bytes:
    return content + int(native.crc32c(np.frombuffer(content, np.uint8), False)).to_bytes(
        4, "little"
    )


def test_a_blosc_header_that_asks_for_more_than_the_chunk_is_refused(copied: Path) -> None:
    """A decoder that trusts it allocates 2 GiB for a file of 8 MiB, or ends the process."""
    path = segments(copied)[0] / "packed" / "float32" / "c.0"
    content = bytearray(path.read_bytes()[:-4])
    assert int.from_bytes(content[4:8], "little") == 400
    content[4:8] = (2**31 - 100).to_bytes(4, "little")
    path.write_bytes(packed_bytes(bytes(content)))
    assert "says that it has 2147483548 bytes" in limited(copied)


@pytest.mark.parametrize("place", ["chunk", "packed chunk", "stream"])
def test_a_file_that_is_larger_than_its_chunks_can_be_is_refused(copied: Path, place: str) -> None:
    """A reader of whole files would end the process."""
    os.truncate(PLACES[place](copied), 1 << 36)
    assert "that its chunks can take" in limited(copied)


def test_a_shard_whose_index_leads_out_of_it_is_refused(
    tmp_path: Path,
) -> None:
    spec = ArraySpec.flat(3 << 20, "uint8", "values", {})
    assert spec.shard is not None
    where = arrays.context()
    arrays.write(tmp_path / "a", spec, np.zeros(3 << 20, np.uint8), where).result()
    path = tmp_path / "a" / "c.0"
    content = bytearray(path.read_bytes())
    assert ReadableArray(tmp_path / "a", spec).read([slice(5, 9)]).size == 4
    index = packed_bytes(
        (len(content) - 3).to_bytes(8, "little")
        + bytes(content[-spec.file_count * 0 - 3 * 16 + 4 :][:0])
        + bytes(content)[-52 + 8 : -4]
    )
    path.write_bytes(bytes(content)[: -len(index)] + index)
    with pytest.raises(errors.Damaged, match="leads out of"):
        ReadableArray(tmp_path / "a", spec).read()
    os.truncate(path, 20)
    with pytest.raises(errors.Damaged, match="too short"):
        ReadableArray(tmp_path / "a", spec).read()


@pytest.mark.parametrize("codec", ["values", "stream", "store"])
@pytest.mark.parametrize("length", [1, 1000, (1 << 20) + 1, (3 << 20) + 3])
def test_no_file_that_we_write_is_larger_than_a_reader_takes(
    codec: str, length: int, tmp_path: Path
) -> None:
    spec = ArraySpec.flat(length, "uint8", codec, {})
    noise = np.frombuffer(np.random.default_rng(0).bytes(length), np.uint8)
    arrays.write(tmp_path / "a", spec, noise, arrays.context()).result()
    for path in (tmp_path / "a").glob("c.*"):
        os.close(chunk_files.open_file(path, spec.cells))
        assert path.stat().st_size <= spec.cells.most_bytes
    assert np.array_equal(ReadableArray(tmp_path / "a", spec).read(), noise)


# --- M5: chains -----------------------------------------------------------------------------------


def test_a_chain_of_ten_thousand_missing_segments_is_broken_and_not_followed(copied: Path) -> None:
    ids = [
        {"id": f"s{number:010d}-00000000", "digest": "0" * 32, "stored_bytes": 1}
        for number in range(10_000)
    ]
    forge.forge_manifest(
        manifest_path(copied), lambda manifest: manifest.update(segments=ids, seq=1)
    )
    assert_refused(copied, error=errors.Damaged)
    path = manifest_path(copied, "c0000010000")
    path.parent.mkdir()
    shutil.copy(manifest_path(copied), path)
    forge.forge_manifest(path, lambda manifest: manifest.update(seq=10_000))
    with pytest.raises(
        errors.ChainBroken, match=r"s0000000000-00000000 is not in .* still restore: 0"
    ):
        deltacheck.open(copied).restore()


def test_leaves_that_follow_from_each_other_for_ever_or_too_long_are_refused(
    tmp_path: Path,
) -> None:
    root = forge.unpack("derived", tmp_path)
    path = manifest_path(root)
    same = {"how": "same", "dtype": "bfloat16", "shape": [64, 96]}

    def chained(links: int) -> forge.Edit:
        def edit(manifest: dict[str, Any]) -> None:
            names = [f"x{number}" for number in range(links)]
            for name, of in zip(names, ["model/w0", *names], strict=False):
                manifest["derived"][name] = same | {"of": of}
                manifest["tree"]["k"].append([name, {"t": "array"}])

        return edit

    for links in (1, 7, 8, 3000):
        shutil.rmtree(root)
        forge.unpack("derived", tmp_path)
        forge.forge_manifest(path, chained(links))
        if links <= 7:
            found = deltacheck.open(root).restore(2)
            assert np.array_equal(found[f"x{links - 1}"], found["model"]["w0"])
        else:
            with pytest.raises(errors.Damaged, match="in a row"):
                deltacheck.open(root).restore(2)
    shutil.rmtree(root)
    forge.unpack("derived", tmp_path)
    for names in (["model/w0"], ["model/w0", "x"]):

        def circle(manifest: dict[str, Any], names: list[str] = names) -> None:
            for name, of in zip(names, [*names[1:], names[0]], strict=True):
                manifest["derived"][name] = same | {"of": of}
            manifest["tree"]["k"] += [[name, {"t": "array"}] for name in names[1:]]

        forge.forge_manifest(path, circle)
        with pytest.raises(errors.Damaged, match="cycle"):
            deltacheck.open(root).restore(2)


DERIVED: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown way": ("derived", {"how": "exec"}),
    "a cast to no float": ("derived", {"dtype": "int16"}),
    "a cast of a ghost": ("derived", {"of": "ghost"}),
    "another shape": ("derived", {"shape": [96, 64]}),
    "a huge shape": ("derived", {"shape": [2**40, 2**40]}),
    "a cast of nothing": ("derived", {"of": ""}),
    "zeros": ("derived", {"how": "zeros", "of": ""}),
    "a scale of no float32": ("derived", {"scale": 2.0}),
    "a lattice of no spacing": ("halved_int32 lattice", {"spacing": 0.0}),
    "a lattice too fine": ("halved_int32 lattice", {"spacing": 1e-300}),
    "a lattice too coarse": ("halved_int32 lattice", {"spacing": 1e39}),
    "a lattice in cells of no bfloat16": (
        "halved_int32 lattice",
        {"of": "optimizer/state/0/exp_avg"},
    ),
    "a lattice beside a weight that follows from it": ("halved_int32 lattice", {"of": "model/w0"}),
    "a lattice of another type": ("halved_int32 lattice", {"dtype": "float64"}),
    "a seed of 65 bits": ("halved_int32 lattice", {"seed": 2**64}),
    "a negative seed": ("halved_int32 lattice", {"seed": -1}),
    "too many halvings": ("halved_int32 lattice", {"halvings": 32}),
    "fewer than no halvings": ("halved_int32 lattice", {"halvings": -1}),
    "too many spare bits": ("halved_int32 lattice", {"spare_bits": 8}),
    "another number of spare bits": ("halved_int32 lattice", {"spare_bits": 7}),
    "a lattice that was too coarse": (
        "halved_int32 lattice",
        {"halvings": 31, "spacing": 1e30},
    ),
    "codes relative to nothing": ("halved lattice", {"of": ""}),
    "codes relative to no bfloat16": ("halved lattice", {"of": "optimizer/state/0/exp_avg"}),
    "relative codes of no spacing": ("halved lattice", {"spacing": 0.0}),
    "relative codes of another type": ("halved lattice", {"how": "ratio"}),
    "relative codes on a coarser lattice": ("halved lattice", {"spacing": 1e-3}),
    "relative codes of too many halvings": ("halved lattice", {"halvings": 32}),
    "relative codes of fewer than no halvings": ("halved lattice", {"halvings": -1}),
    "relative codes of too many spare bits": ("halved lattice", {"spare_bits": 8}),
    "relative codes of another number of spare bits": ("halved lattice", {"spare_bits": 4}),
    "relative codes of a lattice that was too coarse": (
        "halved lattice",
        {"halvings": 31, "spacing": 1e30},
    ),
    "values of a lattice without codes": ("drawn drawn", {"how": "lattice", "spacing": 1e-5}),
    "values drawn from nothing": ("drawn drawn", {"of": ""}),
    "values drawn from no bfloat16": ("drawn drawn", {"of": "optimizer/state/1/exp_avg"}),
    "drawn values of another type": ("drawn drawn", {"dtype": "bfloat16"}),
    "values drawn beside codes": ("drawn lattice", {"how": "drawn"}),
    "fractions that no octave has": ("drawn octaves", {"fraction_bits": 8}),
    "fractions of another type of codes": ("drawn octaves", {"fraction_bits": 0}),
    "an infinite scale": ("drawn octaves", {"scale": 1e39}),
    "ratios to nothing": ("policy ratio", {"of": ""}),
    "ratios to no float32": ("policy ratio", {"of": "model/w0"}),
    "ratios of another type": ("policy ratio", {"how": "octaves"}),
    "ratios of no spacing": ("policy ratio", {"spacing": 0.0}),
    "ratios too coarse": ("policy ratio", {"spacing": 2.0**33}),
    "ratios with a negative limit": ("policy ratio", {"limit": -1.0}),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_leaf_that_cannot_follow_as_it_says_is_damage(name: str, tmp_path: Path) -> None:
    (which, *how), about = DERIVED[name][0].split(), DERIVED[name][1]
    root = forge.unpack(which, tmp_path)
    path = sorted((root / "checkpoints").glob("c*/zarr.json"))[-1]

    def edit(manifest: dict[str, Any]) -> None:
        wanted = {
            "lattice": "0/master",
            "drawn": "1/master",
            "octaves": "exp_avg_sq",
            "ratio": "exp_avg",
        }.get(how[0] if how else "", "w0")
        leaf = next(leaf for leaf in manifest["derived"] if leaf.endswith(wanted))
        manifest["derived"][leaf].update(about)

    forge.forge_manifest(path, edit)
    with pytest.raises(errors.Damaged, match=r"leaf|row|cycle"):
        deltacheck.open(root).restore()


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"norm": "lr", "rate": -1e-6}, "is not one that a leaf can have"),
        ({"norm": "octaves", "rate": 1e-6}, "is not one that a leaf can have"),
    ],
)
def test_a_contract_with_a_rate_of_its_own_needs_the_norm_of_rates(
    terms: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    root = forge.unpack("drawn", tmp_path)
    path = sorted((root / "checkpoints").glob("c*/zarr.json"))[-1]

    def edit(manifest: dict[str, Any]) -> None:
        next(
            promise["terms"].update(terms)
            for promise in manifest["contracts"].values()
            if promise["terms"].get("norm") == "lr"
        )

    forge.forge_manifest(path, edit)
    with pytest.raises(errors.Damaged, match=problem):
        deltacheck.open(root).restore()


def test_a_rule_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    """The key may change the values."""
    root = forge.unpack("drawn", tmp_path)
    path = sorted((root / "checkpoints").glob("c*/zarr.json"))[-1]

    def edit(manifest: dict[str, Any]) -> None:
        next(iter(manifest["derived"].values()))["signed"] = True

    forge.forge_manifest(path, edit)
    with pytest.raises(errors.Damaged, match="unknown field `signed`"):
        deltacheck.open(root).restore()


def test_derived_leaves_need_their_feature(tmp_path: Path) -> None:
    root = forge.unpack("drawn", tmp_path)
    path = sorted((root / "checkpoints").glob("c*/zarr.json"))[-1]
    forge.forge_manifest(path, lambda manifest: manifest.update(must_understand=[]))
    with pytest.raises(errors.Damaged, match=r"features .* do not match"):
        deltacheck.open(root).restore()


def test_codes_that_no_value_has_are_damage(root: Path) -> None:
    """One of them lies above the octave of the largest float32."""

    def edit(manifest: dict[str, Any]) -> None:
        about = {"how": "octaves", "dtype": "float32", "shape": [3], "fraction_bits": 1}
        manifest.update(derived={"codes": about}, must_understand=["derived"])

    forge.forge_manifest(manifest_path(root), edit)
    assert_refused(root, "leaf 'codes': its stored codes do not follow the format", errors.Damaged)


# --- M6: indexes with right checksums -------------------------------------------------------------


def forge_index(root: Path, change: Callable[[Any], None]) -> None:
    """Rewrite the index of the newest segment with valid checksums."""

    def edit(table: dict[str, Any]) -> None:
        part = table["parts"][0]
        index = np.frombuffer(bytearray(base64.b64decode(part["index"])), "<u4").reshape(-1, 8)
        change(index)
        part["index"] = base64.b64encode(index.tobytes()).decode()

    forge.forge_table(manifest_path(root), -1, edit)


@pytest.mark.parametrize(
    "column", ["chunk", "words", "word_bytes", "method", "changed", "gap_bytes", "wide_count"]
)
@pytest.mark.parametrize("value", [0, 1, 3, 5, 6, 255, 2**16, 2**31, 2**32 - 1])
def test_no_number_in_an_index_is_believed(copied: Path, column: str, value: int) -> None:
    from deltacheck.store.segment import INDEX

    before = {
        path: array.copy()
        for path, array in deltacheck.open(copied).restore(1, leaves=["w", "b"]).items()
    }

    def change(index: Any) -> None:
        index[-1, INDEX.index(column)] = value

    forge_index(copied, change)
    try:
        after = deltacheck.open(copied).restore(1, leaves=["w", "b"])
    except errors.Damaged:
        return
    assert all(np.array_equal(after[path], before[path]) for path in before)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.__setitem__(slice(None), index[::-1].copy()),
        lambda index: index.__setitem__(1, index[0]),
    ],
)
def test_rows_out_of_order_or_twice_are_refused(
    copied: Path, change: Callable[[Any], None]
) -> None:
    forge_index(copied, change)
    assert_refused(copied, error=errors.Damaged)


# --- M7: what plain zarr says of an array ---------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.update(shape=[2**40, 2**20]),
        lambda about: about.update(data_type="int32"),
        lambda about: about.update(fill_value=7),
        lambda about: about.update(codecs=[{"name": "bytes"}]),
        lambda about: about["chunk_grid"]["configuration"].update(chunk_shape=[1, 1]),
        lambda about: about.update(
            chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}}
        ),
    ],
)
def test_what_an_arrays_own_document_says_neither_misleads_nor_goes_unnoticed(
    copied: Path, change: forge.Edit
) -> None:
    wanted = deltacheck.open(copied).restore(1)
    (stream,) = segments(copied)[1].glob("delta.0.stream")
    for array in (segments(copied)[0] / "leaves/w", segments(copied)[0] / "packed/float32", stream):
        path = array / "zarr.json"
        about = json.loads(path.read_bytes())
        change(about)
        path.write_text(json.dumps(about))
        found = deltacheck.open(copied).verify(redundant=True)
        assert any(str(path) in finding.problem for finding in found)
    np.testing.assert_equal(deltacheck.open(copied).restore(1), wanted)


# --- M12: another's manifest ----------------------------------------------------------------------


def test_a_stale_manifest_in_anothers_place_is_damage_and_no_older_step_is_given_silently(
    root: Path,
) -> None:
    shutil.copy(manifest_path(root, "c0000000000"), manifest_path(root))
    with pytest.raises(
        errors.Damaged, match=r"is the manifest of another checkpoint: of step 0.*still restore: 0"
    ):
        deltacheck.open(root).restore()
    with pytest.raises(errors.Damaged, match="is the manifest of another checkpoint"):
        deltacheck.open(root).restore(1)
    assert deltacheck.open(root).restore(0)


def test_a_slice_of_a_forged_leaf_takes_memory_for_no_other_chunk(tmp_path: Path) -> None:
    """No table is read of what it follows from, so only its chunks are counted."""
    root = forge.unpack("derived", tmp_path)

    def edit(manifest: dict[str, Any]) -> None:
        rows = {"dtype": "float32", "shape": [1 << 24, 1 << 18]}
        manifest["leaves"]["rows"] = rows | {"chunk": [1, 1 << 18], "digest": "0" * 32}
        manifest["derived"]["more"] = rows | {"how": "same", "of": "rows"}
        manifest["tree"]["k"] += [[name, {"t": "array"}] for name in ("more", "rows")]

    forge.forge_manifest(manifest_path(root, "c0000000000"), edit)
    step = deltacheck.open(root).steps()[0]
    for limits in (None, deltacheck.Limits(max_chunks=1 << 20)):
        opened = deltacheck.open(root, limits=limits)
        tracemalloc.start()
        try:
            with pytest.raises(errors.BudgetExceeded, match="16777216 chunks"):
                opened.restore(step, slices={"more": (0, 0)}, max_bytes=1 << 20)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
