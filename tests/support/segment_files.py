"""The files of segments, for comparisons of saves."""

from __future__ import annotations

import re
from pathlib import Path


def segment_files(root: Path) -> dict[str, bytes]:
    """Return the files of all segments of a root, without what is random in them."""
    files = {}
    for file in sorted((root / "segments").rglob("*.*")):
        if file.is_file():
            content = file.read_bytes()
            if file.name == "zarr.json":
                content = re.sub(rb'-[0-9a-f]{8}"|"checksum":"[0-9a-f]+"', b"", content)
            files[re.sub(r"-[0-9a-f]{8}/", "/", str(file.relative_to(root)))] = content
    assert any("/delta." in name for name in files), "no save has stored a difference"
    return files
