"""The store: safe names, strict documents, one winner in every race."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.store import documents, layout
from deltacheck.store.commit import commit
from deltacheck.store.documents import encode_manifest
from deltacheck.store.files import arrays
from deltacheck.store.manifest import Manifest, SegmentTable

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(
        st.one_of(
            texts,
            st.sampled_from(
                [
                    "",
                    ".",
                    "..",
                    "a.",
                    "a/",
                    "a.b",
                    "a/b",
                    "A/b",
                    "zarr.json",
                    "__x",
                    "é",
                    "x" * 4096,
                ]
            ),
        ),
        unique=True,
        max_size=12,
    )
)
def test_array_names_are_safe_and_unique_even_without_case(paths: list[str]) -> None:
    names = layout.array_names(paths)
    assert len({name.lower() for name in names.values()}) == len(paths)
    for name in names.values():
        assert set(name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-%~"
        )
        assert 0 < len(name) < 255
        assert not name.endswith(".")
        assert not name.startswith((".", "__"))
        assert name != "zarr.json"


def test_ordinary_paths_give_readable_names() -> None:
    names = layout.array_names(["params/layers/0/mlp.w1", "params/head"])
    assert names == {
        "params/layers/0/mlp.w1": "params.layers.0.mlp.w1",
        "params/head": "params.head",
    }


def test_hostile_leaf_names_are_only_data(tmp_path: Path) -> None:
    names = [
        "",
        ".",
        "..",
        "../../up",
        "/abs",
        "a\0b",
        "new\nline",
        "é",
        "e\u0301",
        "x" * 4000,
        "zarr.json",
        "__init__",
        "CON",
        "a",
        "A",
        "a.b",
        "%2F",
    ]
    state: dict[Any, Any] = {
        name: torch.full((1,), float(number)) for number, name in enumerate(names)
    }
    state |= {
        name + "-big": torch.full((300, 300), float(number)) for number, name in enumerate(names)
    }
    state["a"] = {"b": torch.zeros(300, 300), 0: torch.ones(1), "0": torch.zeros(1)}
    with Engine(tmp_path / "root") as engine:
        engine.save(0, state)
        back = engine.restore()
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) for name in state if name != "a")
    assert [p.name for p in tmp_path.iterdir()] == ["root"]
    assert deltacheck.open(tmp_path / "root").verify(deep=True) == []


@pytest.mark.parametrize(
    "length", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (4 << 20) + 1024, 70 << 20]
)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128"])
def test_one_dimensional_arrays_are_cut_evenly_because_zarr_pads_the_last_chunk(
    length: int, dtype: str
) -> None:
    spec = arrays.ArraySpec.flat(length, dtype, "store", {})
    chunks = -(-length // spec.chunk[0])
    assert chunks * spec.chunk[0] - length < max(2, chunks)  # elements of padding
    assert spec.chunk[0] * np.dtype(dtype).itemsize <= arrays.STREAM_CHUNK_BYTES
    assert spec.shard is None or spec.shard[0] % spec.chunk[0] == 0


def test_exactly_one_of_many_writers_creates_a_file(tmp_path: Path) -> None:
    for trial in range(10):
        folder = tmp_path / str(trial)
        folder.mkdir()
        wins: list[int] = []
        start = threading.Barrier(6)

        def race(
            number: int,
            folder: Path = folder,
            wins: list[int] = wins,
            start: threading.Barrier = start,
        ) -> None:
            start.wait()
            if arrays.create_file(folder, "zarr.json", str(number).encode()):
                wins.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        assert (folder / "zarr.json").read_text() == str(wins[0])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Engine(tmp_path) as engine:
        engine.save(0, {"w": torch.randn(600, 600), "b": torch.zeros(3), "n": {"x": 1}})
        engine.save(1, {"w": torch.randn(600, 600), "b": torch.zeros(3), "n": {"x": 2}})
    return tmp_path


def test_a_taken_sequence_number_cannot_be_committed_again(root: Path) -> None:
    manifest = deltacheck.open(root).manifest(1)
    with pytest.raises(errors.RootBusy, match="two writers"):
        commit(root, manifest)
    assert deltacheck.open(root).manifest(1) == manifest


def body_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    group = json.loads(path.read_text())
    return group, group["attributes"]["deltacheck"]


def sealed(group: dict[str, Any]) -> bytes:
    """The document with a checksum that is right again: what a forger, or a bug, would write."""
    body = group["attributes"]["deltacheck"]
    body.pop("checksum", None)
    body["checksum"] = documents._checksum(body)
    return json.dumps(group).encode()


def edits() -> dict[str, Any]:
    return {
        "negative shape": lambda m: m["leaves"]["w"].update(shape=[-1, 600]),
        "huge shape": lambda m: m["leaves"]["w"].update(shape=[1 << 40, 1 << 40]),
        "wrong rank of chunk": lambda m: m["leaves"]["w"].update(chunk=[1]),
        "column chunk": lambda m: m["leaves"]["w"].update(chunk=[2, 2]),
        "zero chunk": lambda m: m["leaves"]["w"].update(chunk=[0, 600]),
        "unknown dtype": lambda m: m["leaves"]["w"].update(dtype="object"),
        "float for integer": lambda m: m.update(step=1.5),
        "text for integer": lambda m: m["leaves"]["w"].update(shape=["many"]),
        "missing key": lambda m: m.pop("tree"),
        "leaf without place": lambda m: m["leaves"].update(ghost=m["leaves"]["w"]),
        "place without leaf": lambda m: m["leaves"].pop("w"),
        "segment outside": lambda m: m["segments"][0].update(id="../../../etc"),
        "absolute segment": lambda m: m["segments"][0].update(id="/etc/passwd"),
        "segments twice": lambda m: m["segments"].append(m["segments"][0]),
        "segments reversed": lambda m: m["segments"].reverse(),
        "segment from the future": lambda m: m["segments"][-1].update(id="s0000009999-00000000"),
        "tree of nonsense": lambda m: m.update(tree={"t": "exec", "v": "import os"}),
        "tree ties to nowhere": lambda m: m["tree"]["k"][0][1].update(of="ghost"),
    }


@pytest.mark.parametrize("name", list(edits()))
def test_an_impossible_manifest_is_refused_even_with_a_right_checksum(
    root: Path, name: str
) -> None:
    path = root / "checkpoints" / "c0000000001" / "zarr.json"
    group, manifest = body_of(path)
    edits()[name](manifest)
    path.write_bytes(sealed(group))
    with pytest.raises(errors.DeltacheckError):
        deltacheck.open(root).restore(1)
    deltacheck.open(root).restore(0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"attributes": {"deltacheck": []}}',
        b"[" * 100_000,
        b'{"a": 1, "a": 2}',
    ],
)
def test_a_manifest_that_is_no_document_is_damage(root: Path, content: bytes) -> None:
    (root / "checkpoints" / "c0000000001" / "zarr.json").write_bytes(content)
    with pytest.raises(errors.Damaged, match="c0000000001"):
        deltacheck.open(root).restore()


@pytest.mark.parametrize(
    ("before", "after"), [('"step":1', '"step":2'), ('"contract":"exact"', '"contract":"bounded"')]
)
def test_a_document_that_says_another_thing_in_the_same_form_is_damage(
    root: Path, before: str, after: str
) -> None:
    """One digit or letter: valid JSON of a possible manifest, which only its checksum can tell from
    the one that was committed.
    """
    path = root / "checkpoints" / "c0000000001" / "zarr.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(errors.Damaged, match="its checksum is"):
        deltacheck.open(root).restore()
    assert deltacheck.open(root).steps() == [0]


def test_a_key_that_stands_twice_is_damage(root: Path) -> None:
    path = root / "checkpoints" / "c0000000001" / "zarr.json"
    text = path.read_text().replace('"step":1', '"step":7,"step":1')
    path.write_text(text)
    with pytest.raises(errors.Damaged, match="same key twice"):
        deltacheck.open(root).manifest(1)


def test_unknown_keys_are_ignored_and_unknown_features_refused(root: Path) -> None:
    path = root / "checkpoints" / "c0000000001" / "zarr.json"
    group, manifest = body_of(path)
    manifest["colour"] = "blue"
    path.write_bytes(sealed(group))
    deltacheck.open(root).restore(1)
    manifest["must_understand"] = ["blue"]
    path.write_bytes(sealed(group))
    with pytest.raises(errors.UnsupportedFormat, match="blue"):
        deltacheck.open(root).restore(1)


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t["leaves"]["w"].update(delta=[[7, 0, 1]]),
        lambda t: t["leaves"]["w"].update(delta=[[0, 0, 99]]),
        lambda t: t["leaves"]["w"].update(delta=[]),
        lambda t: t["leaves"]["w"].update(digests=99),
        lambda t: t["leaves"]["w"].update(base="0" * 32),
        lambda t: t["leaves"]["w"].update(digest="0" * 32),
        lambda t: t.update(id="s0000000000-00000000"),
        lambda t: t["parts"][0].update(index=""),
    ],
)
def test_an_impossible_segment_table_is_refused_even_when_the_manifest_vouches_for_it(
    root: Path, edit: Any
) -> None:
    path = root / "checkpoints" / "c0000000001" / "zarr.json"
    group, manifest = body_of(path)
    table_path = root / "segments" / manifest["segments"][-1]["id"] / "zarr.json"
    table_group, table = body_of(table_path)
    edit(table)
    content = sealed(table_group)
    table_path.write_bytes(content)
    from deltacheck.store.segment import document_digest

    manifest["segments"][-1]["digest"] = document_digest(content)
    path.write_bytes(sealed(group))
    with pytest.raises(errors.DeltacheckError):
        deltacheck.open(root).restore(1)


def test_documents_survive_a_round_trip_through_plain_json(root: Path) -> None:
    manifest = deltacheck.open(root).manifest(1)
    assert documents.from_zarr_json(encode_manifest(manifest), Manifest, "here") == manifest
    path = root / "segments" / manifest.segments[0].id / "zarr.json"
    table = documents.from_zarr_json(path.read_bytes(), SegmentTable, "there")
    assert table.id == manifest.segments[0].id


def test_a_manifest_of_a_later_version_hides_only_its_own_step(root: Path) -> None:
    path = root / "checkpoints" / "c0000000001" / "zarr.json"
    group, manifest = body_of(path)
    manifest["version"] = 2
    path.write_bytes(sealed(group))
    assert deltacheck.open(root).steps() == [0]
    deltacheck.open(root).restore(0)
    for asked in (1, None):
        with pytest.raises(
            errors.UnsupportedFormat, match=r"version 2.*Steps that still restore: 0"
        ):
            deltacheck.open(root).restore(asked)
