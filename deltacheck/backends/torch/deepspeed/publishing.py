"""Let DeepSpeed find a committed step: a pointer for each file of its tag, and ``latest``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deltacheck.backends.torch.deepspeed.reading import child, keys_of
from deltacheck.backends.torch.deepspeed.saved_state import ABOUT, FILES
from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.group.collective import RankGroup
from deltacheck.backends.torch.state.shards import Shard
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.restore.export import new_file
from deltacheck.store.manifest import Manifest

log = logging.getLogger("deltacheck")


class PublishingEngine(Engine):
    """An engine whose rank 0 publishes each committed step: the pointers first, then ``latest``.

    If DeepSpeed were to find a pointer before the commit, a crash in between would leave it with a
    step that does not exist.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(root, **options)
        self._unpublished: Exception | None = None
        # Called on the committer thread, and only on rank 0, which commits.
        self._writer.after_commit = self._publish

    def _publish(self, manifest: Manifest) -> None:
        try:
            publish(self.folder, manifest)
        except Exception as error:  # the step exists, and later steps may depend on it
            log.exception("step %d is committed, but DeepSpeed cannot find it", manifest.step)
            self._unpublished = error

    @property
    def group(self) -> RankGroup:
        """The ranks that save together."""
        group = self._session.group
        assert group is not None
        return group

    @property
    def folder(self) -> Path:
        """The root as a local path."""
        assert isinstance(self.root, Path)  # the configuration accepts local folders only
        return self.root

    def guard_weights(self, weights: Iterable[object]) -> None:
        """Let saves read these weights behind the training loop, like the optimizer's tensors.

        Nothing may write to them before the optimizer's next step begins. If they were copied at
        once, all that belongs to them would have to be read at once too.

        Args:
            weights: Fragments, or values of another kind, which are passed over.
        """
        self._guard.own(w.data for w in weights if isinstance(w, Shard))

    def raise_unpublished(self) -> None:
        """Raise the error that kept an earlier step from being published, once."""
        error, self._unpublished = self._unpublished, None
        if error is not None:
            raise error


@typed
def publish(root: Path, manifest: Manifest) -> None:
    """Write the pointers of a step that a DeepSpeed engine has saved.

    ``latest`` is written too if the save asked for it. Call this if the pointers were lost; it
    replaces those that exist.

    Args:
        root: The root that holds the step.
        manifest: The step's manifest, ``deltacheck.open(root).manifest(step)``.

    Raises:
        StorageFailed: A file cannot be written.
    """
    header = _header(manifest)
    # Relative to the root, so that both can be moved together.
    folder = Path(os.path.normpath(root / header["folder"]))
    write_pointers(root, manifest, folder, latest=header["latest"])


def write_pointers(root: Path, manifest: Manifest, folder: Path, *, latest: bool) -> None:
    """Write the pointers of a step to any folder.

    Args:
        root: The root that holds the step.
        manifest: The step's manifest.
        folder: The folder, from which DeepSpeed can load afterwards.
        latest: Write ``latest``, too.

    Raises:
        StorageFailed: A file cannot be written.
    """
    tag = _header(manifest)["tag"]
    for name in keys_of(child(manifest.tree, FILES)):
        path = folder / tag / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pointer.write(path, pointer.Pointer(root, manifest.step, manifest.seq))
    # Last, so that ``latest`` never names a tag without its pointers.
    if latest:
        with new_file(folder / "latest", overwrite=True) as file:
            file.write(tag.encode())


def _header(manifest: Manifest) -> dict[str, Any]:
    return {**tree.scalars(child(manifest.tree, ABOUT))}
