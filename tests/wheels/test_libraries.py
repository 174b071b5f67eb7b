"""The sources of libzstd and c-blosc are fetched once, and completely or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY

SCRIPT = REPOSITORY / "xla_ffi/libraries.py"


def fetch(folder: Path) -> subprocess.CompletedProcess[str]:
    """Fetch without a package index."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_that_holds_the_sources_asks_no_package_index(tmp_path: Path) -> None:
    shutil.copy(SCRIPT.with_name("library-sources.txt"), tmp_path)
    done = fetch(tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_without_a_package_index_nothing_is_left(tmp_path: Path) -> None:
    done = fetch(tmp_path / "libraries")
    assert done.returncode != 0
    assert "No matching distribution" in done.stderr
    assert list(tmp_path.iterdir()) == []
