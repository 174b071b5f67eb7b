"""Documents that a forger, or a bug, would write: changed at will, with every checksum and digest
on
the way to them right again.

So what is tested with them is what stands behind the checksums.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltacheck.store import documents
from deltacheck.store.segment import document_digest

GOLDEN = Path(__file__).parents[1] / "golden" / "0.1.0"

Edit = Callable[[dict[str, Any]], object]


def unpack(name: str, folder: Path) -> Path:
    """A golden root of this release, in ``folder``."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def body_of(group: dict[str, Any]) -> dict[str, Any]:
    """Our document in a group's ``zarr.json``."""
    body: dict[str, Any] = group["attributes"]["deltacheck"]
    return body


def sealed(group: dict[str, Any]) -> bytes:
    """The document with a checksum that is right again."""
    body = body_of(group)
    body.pop("checksum", None)
    body["checksum"] = documents._checksum(body)
    return json.dumps(group, separators=(",", ":")).encode()


def forge_manifest(path: Path, edit: Edit) -> None:
    """Change a manifest."""
    group = json.loads(path.read_bytes())
    edit(body_of(group))
    path.write_bytes(sealed(group))


def forge_table(manifest: Path, number: int, edit: Edit, store: Path | None = None) -> None:
    """Change the table of a manifest's segment, and let the manifest vouch for it. ``store``: where
    the segments lie.
    """
    group = json.loads(manifest.read_bytes())
    ref = body_of(group)["segments"][number]
    path = (store or manifest.parents[2]) / "segments" / ref["id"] / "zarr.json"
    table = json.loads(path.read_bytes())
    edit(body_of(table))
    content = sealed(table)
    path.write_bytes(content)
    ref["digest"] = document_digest(content)
    manifest.write_bytes(sealed(group))
