"""The files and chunks of segments, for comparisons of saves."""

from __future__ import annotations

import re
from pathlib import Path

from deltacheck.store.roots.opening import open_root
from deltacheck.store.segment import METHOD


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


def methods(root: Path, step: int) -> set[int]:
    """Return the methods of the chunks that a save has written."""
    opened = open_root(root)
    segment = opened.store.segment(opened.manifest(step).segments[-1])
    return {
        int(method)
        for number in range(len(segment.table.parts))
        for method in segment.part(number).index[:, METHOD]
    }
