"""Checkpoints that releases have written, kept as they are: every later release reads them bit for
bit, and encodes as they did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck import errors
from deltacheck.store.roots.opening import open_root
from tests.golden import make
from tests.support import forge

RELEASES = sorted(
    path
    for path in (Path(__file__).parents[1] / "golden").iterdir()
    if path.is_dir() and path.name[0].isdigit()
)
ROOTS = [(release, name) for release in RELEASES for name in make.WRITERS]


def expected(release: Path, name: str) -> dict[int, Any]:
    return {
        int(step): found
        for step, found in json.loads((release / "expected.json").read_text())[name].items()
    }


@pytest.mark.parametrize(
    ("release", "name"), ROOTS, ids=lambda value: getattr(value, "name", value)
)
def test_every_step_of_every_release_is_read_bit_for_bit(
    release: Path, name: str, tmp_path: Path
) -> None:
    root = forge.unpack(name, tmp_path)
    opened = deltacheck.open(root)
    assert opened.steps() == sorted(expected(release, name))
    assert opened.verify(deep=True) == []
    for step, saved in expected(release, name).items():
        assert make.described(opened.restore(step)) == saved


@pytest.mark.parametrize(
    ("release", "name"),
    ROOTS,
    ids=lambda value: getattr(value, "name", value),
)
def test_the_same_states_are_encoded_to_the_same_arrays(
    release: Path, name: str, tmp_path: Path
) -> None:
    """Compare all that the format fixes: tables, rows, streams and digests.

    The packing by blosc and zstd, names, times and nonces may differ.
    """
    if name.endswith("manager"):
        pytest.importorskip("orbax.checkpoint")
    before = forge.unpack(name, tmp_path / "golden")
    make.WRITERS[name](tmp_path / "now")
    old, new = deltacheck.open(before), deltacheck.open(tmp_path / "now")
    assert old.steps() == new.steps()
    for step in old.steps():
        assert content_of(open_root(before), old.manifest(step)) == content_of(
            open_root(tmp_path / "now"), new.manifest(step)
        )


def content_of(root: Any, manifest: Any) -> Any:
    """A step with everything in it that depends on the state alone."""
    told = forge.body_of({"attributes": deltacheck.store.documents.to_attributes(manifest)})
    for key in ("nonce", "time", "writer", "segments", "checksum"):
        del told[key]
    for key in ("nonces", "digests", "stored_bytes"):  # of segments, which are compared below
        told.get("compact", {}).pop(key, None)
    for key in ("stage_reason", "rates"):  # for people and later saves, and of later versions only
        told.pop(key, None)
    told.pop(
        "lanes", None
    )  # numbers of segments, whose order within a save follows from their names
    segments = []
    for ref in manifest.segments:
        segment = root.store.segment(ref)
        table = forge.body_of(
            {"attributes": deltacheck.store.documents.to_attributes(segment.table)}
        )
        del table["id"], table["checksum"]
        parts = [segment.part(number) for number in range(len(segment.table.parts))]
        streams = [
            {n: s.tobytes() for n, s in part.streams(0, len(part.index)).items()} for part in parts
        ]
        segments.append(
            (table, segment.digests.tolist(), [part.index.tolist() for part in parts], streams)
        )
    return told, sorted(segments, key=lambda one: sorted(one[0]["leaves"]))


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["manifest", "table", "root"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda body: body.update(version=2),
            "format version 2; this deltacheck reads version 1. Install the deltacheck",
        ),
        (
            lambda body: body.update(
                must_understand=[*body.get("must_understand", []), "holograms"]
            ),
            "holograms.*Install a newer one",
        ),
    ],
    ids=["newer", "unknown"],
)
def test_what_a_later_release_writes_is_refused_with_the_way_out(
    release: Path, kind: str, edit: forge.Edit, message: str, tmp_path: Path
) -> None:
    root = forge.unpack("engine", tmp_path)
    manifest = root / "checkpoints" / "c0000000003" / "zarr.json"
    if kind == "root":
        group = json.loads((root / "zarr.json").read_bytes())
        edit(forge.body_of(group))
        (root / "zarr.json").write_text(json.dumps(group))
    elif kind == "table":
        forge.forge_table(manifest, -1, edit)
    else:
        forge.forge_manifest(manifest, edit)
    with pytest.raises(errors.UnsupportedFormat, match=message):
        deltacheck.open(root).restore(3)
    if kind != "root":
        deltacheck.open(root).restore(2)


def test_the_golden_states_have_every_dtype_method_and_way_to_derive() -> None:
    from deltacheck.leaf import dtypes

    assert set(make.DTYPES) == {*dtypes._NATIVE, *dtypes._EXTENDED}
    assert all(np.asarray(make.of_dtype(name, 0)).size == 10 for name in make.DTYPES)
