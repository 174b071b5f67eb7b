"""Publish weights that a program holds in memory, without a run on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from deltacheck.backends.hugging_face import model_export
from deltacheck.backends.hugging_face.publish.version_folder import Tensor, Version
from deltacheck.backends.hugging_face.publish.version_series import VersionContent, VersionSeries
from deltacheck.codec.base import U8
from deltacheck.errors import DuplicatePath
from deltacheck.store.files.storage import Place


class TensorPublisher:
    """A writer of versions of tensors in memory. It holds a copy of the last ones.

    The first version of each publisher is full, and so is that after a failure.

    Args:
        folder: The folder: new, empty, or with versions of the same owner. A directory, or a prefix
            of an object store.
        owner: The program whose weights the versions have.
        files: A folder with configuration and tokenizer for full versions.
        full_every: The most versions from one full version to the next.
        encoding: ``"slime"`` or ``"compact"``, as in ``Publisher``.

    Raises:
        NotACheckpointRoot, RootBusy, UnsupportedFormat, StorageFailed: As in ``Publisher``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        owner: str,
        files: str | os.PathLike[str] | None = None,
        full_every: int = 20,
        encoding: str = "slime",
    ) -> None:
        self._copies = {} if files is None else model_export.files_of(Path(files))
        self._series = VersionSeries(folder, owner, full_every, encoding)
        self._copy: dict[str, Tensor] = {}

    @property
    def folder(self) -> Place:
        """The folder of the versions."""
        return self._series.folder

    @property
    def newest(self) -> int:
        """The number of the newest version; 0: there is none."""
        return self._series.newest

    def close(self) -> None:
        """Give the folder back; more than once does nothing."""
        self._series.close()
        self._copy = {}

    def publish(self, step: int, tensors: Iterable[tuple[str, Tensor]]) -> Version:
        """Write tensors as the next version.

        Args:
            step: The training step.
            tensors: Names and tensors, whose bytes nobody changes any more. All tensors of the
                model; those of other names or shapes than the last time make a full version.

        Returns:
            The version. After an exception no version was written.

        Raises:
            DuplicatePath: Two tensors have the same name.
            UnsupportedLeaf: safetensors lacks an element type.
            RootBusy: The lock on the folder was lost.
        """
        self._series.check()
        # After a failure nothing is held, so that the next version is full.
        before, self._copy = self._copy, {}
        now: dict[str, Tensor] = {}
        is_full = not before or self._series.is_full_due

        def changes() -> Iterator[tuple[str, U8 | None, Tensor]]:
            for name, tensor in tensors:
                if name in now:
                    raise DuplicatePath(f"two tensors have the name {name!r}; send each once")
                now[name] = tensor
                # Released here, so that the weights are not held twice.
                old = before.pop(name, None)
                fits = old is not None and old[:2] == tensor[:2]
                yield name, old.data if old is not None and fits else None, tensor
            # Receivers would keep a tensor that is gone.
            for name, tensor in before.items():
                yield name, None, tensor

        version = self._series.write(
            VersionContent(
                step,
                self._series.newest + 1,
                changes(),
                lambda: now,
                {},
                lambda path: model_export.copy_files(path, self._copies),
            ),
            full=is_full,
        )
        self._copy = now
        return version
