"""Take the files that a trainer keeps in ``checkpoint-N``, and put them back for a resume."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.tree import escape_key
from deltacheck.restore.export import require_file_names
from deltacheck.save.ranks.folder_probe import awaited

STATE_FILE = "trainer_state.json"  # Trainer reads it only from a file, and writes it last

# Weights, which a step has as leaves. Trainer and its subclasses write them with the other files.
_WEIGHTS = re.compile(
    r"(pytorch_model|model|adapter_model)(-\d+-of-\d+)?\.(bin|safetensors)(\.index\.json)?\Z"
)
# A marker of Trainer's own for a save under way. It removes the file after the save.
_MARKERS = {"checkpoint-is-incomplete.txt"}

Files = dict[str, NDArray[np.uint8]]


class CheckpointFiles:
    """The files of the folders ``checkpoint-N`` that are written during one training.

    Folders that exist before the training are those of ``Trainer`` itself, or remains of a killed
    process. Their files are neither taken nor removed, unless the training writes them again.

    Args:
        output_dir: The trainer's folder.
        limit: The most bytes of one file.
    """

    def __init__(self, output_dir: Path, limit: int) -> None:
        self._output_dir = output_dir
        self._limit = limit
        self._before = {
            path: _stamp(path)
            for folder in output_dir.glob("checkpoint-*")
            for path in _files_below(folder)
        }

    def folder(self, step: int) -> Path:
        """Return the folder of a step, which exists afterwards."""
        folder = self.path(step)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def path(self, step: int) -> Path:
        """Return the folder of a step, which need not exist."""
        return self._output_dir / f"checkpoint-{step}"

    def names(self, step: int) -> list[str]:
        """Return the files of a step that were written during this training."""
        folder = self.path(step)
        return sorted(
            path.relative_to(folder).as_posix()
            for path in _files_below(folder)
            if path.name not in _MARKERS and self._before.get(path) != _stamp(path)
        )

    def remove_weights(self, step: int) -> None:
        """Remove files of weights, which are leaves of the step."""
        folder = self.path(step)
        for name in self.names(step):
            if _WEIGHTS.match(name):
                (folder / name).unlink()

    def take(self, step: int, names: Iterable[str]) -> Files:
        """Return the content of files of a step, and remove them.

        Args:
            step: The step.
            names: The files that any rank sees in the folder.

        Raises:
            UnsupportedLeaf: A file has more bytes than the limit, or only another rank sees it.
        """
        contents = self.read(step, {*names, *self.names(step)})
        self.remove(step)
        return contents

    def read(self, step: int, names: Iterable[str]) -> Files:
        """Return the content of files of a step.

        Raises:
            UnsupportedLeaf: As ``take`` raises it.
        """
        contents: Files = {}
        for name in sorted(names):
            path = self.path(step) / name
            if not awaited(path):
                raise UnsupportedLeaf(
                    f"file {name!r} of checkpoint-{step} is seen by another rank and not by rank 0;"
                    " all ranks must have the same output_dir, in a folder that they share"
                )
            size = path.stat().st_size
            if size > self._limit:
                raise UnsupportedLeaf(
                    f"file {name!r} of checkpoint-{step} has {size:,} bytes, more than"
                    f" {self._limit:,}, and the step would be written with it at every save; write"
                    " it to another folder, or raise DeltaCheckCallback(file_limit_bytes=...)"
                )
            contents[name] = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        return contents

    def remove(self, step: int) -> None:
        """Remove the files of a step that were written since ``train`` began, and empty folders."""
        folder = self.path(step)
        # A checkpoint of Trainer keeps the files that it had.
        is_foreign = folder / STATE_FILE in self._before
        for name in self.names(step):
            if not (is_foreign and folder / name in self._before):
                (folder / name).unlink()
        for parent, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(parent)


def write_files(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write the files of a step to a folder.

    Raises:
        Damaged: A name leaves the folder. The names come from the checkpoint.
        UnsupportedLeaf: A name cannot be that of a file.
    """
    require_file_names((name, f"files/{escape_key(name)}") for name in contents)
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.asarray(content).tobytes())


def is_trainers_own(folder: Path) -> bool:
    """Return ``True`` if ``Trainer`` itself has written a checkpoint to a folder."""
    return (folder / STATE_FILE).exists()


def _files_below(folder: Path) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
