"""Forged documents: changed at will, with valid checksums and digests.

Tests use them to reach the checks behind the checksums.
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
    """Unpack a golden root of this release into ``folder``."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def body_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return our document in the ``zarr.json`` of a group."""
    body: dict[str, Any] = group["attributes"]["deltacheck"]
    return body


def sealed(group: dict[str, Any]) -> bytes:
    """Return a document with a valid checksum."""
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
    """Change the table of a segment, and write its new digest into the manifest.

    Args:
        store: The store of the segments.
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
