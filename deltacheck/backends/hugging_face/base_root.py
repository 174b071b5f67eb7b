"""The root of a base model: a model folder that is imported once for all runs that begin from it.

Runs beside each other share the root. Its name has the digest of the weights, so that a folder that
was changed is another base.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import xxhash

from deltacheck.backends import isolated
from deltacheck.backends.hugging_face.model_folder import (
    is_model_folder,
    model_folder,
    require_whole,
)
from deltacheck.errors import NotACheckpointRoot, RootBusy
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")

# Permanent: in every name. Another number if an import makes other leaves of the same folder.
_FORM = b"deltacheck base 1"
_BLOCK_BYTES = 8 << 20
# The longest wait for another process that imports the same folder.
_WAIT_SECONDS = 60.0
_BYTES_PER_SECOND = 8 << 20  # far slower than any import
_POLL_SECONDS = 0.2


def base_root(base: Path, folder: Path) -> Root:
    """Return the root of a base model; import it first if no run has done so.

    Args:
        base: A model folder of Hugging Face, or a root, which is returned as it is.
        folder: The place of the imported root, ``base-DIGEST``.

    Raises:
        FileNotFoundError: ``base`` does not exist, or lacks a shard.
        NotACheckpointRoot: ``base`` is neither a root nor a model folder.
        Damaged: A file of weights cannot be read, or does not fit the index.
        RootBusy: Another process has not finished its import in time.
    """
    if not base.is_dir():
        raise FileNotFoundError(
            f"there is no folder {base} to begin a run from: name a model folder of Hugging Face,"
            " or a root"
        )
    if not is_model_folder(base):
        try:
            return open_root(base)
        except NotACheckpointRoot as error:
            raise NotACheckpointRoot(
                f"{base} is no base of a run: it is neither a model folder of Hugging Face nor a"
                " root of deltacheck"
            ) from error
    digest, size = _digest(base)
    path = folder / f"base-{digest}"
    deadline = Deadline.after(_WAIT_SECONDS + size / _BYTES_PER_SECOND)
    while not _has_step(path):
        log.info("importing %s into %s", base, path)
        try:
            for _ in isolated.ingest("base", path, [(0, base)]):
                pass
        except (RootBusy, ValueError) as error:
            # Another run that begins from the folder imports it now, or has just done so.
            if _has_step(path):
                break
            if not isinstance(error, RootBusy) or deadline.left == 0:
                raise
            time.sleep(_POLL_SECONDS)
    return open_root(path)


def _digest(folder: Path) -> tuple[str, int]:
    """Return the xxh3_128 of the weights of a folder, and their bytes."""
    total = xxhash.xxh3_128(_FORM)
    size = 0
    shards = sorted(model_folder(folder).shards)
    for shard in shards:
        require_whole(shard)
    for shard in shards:
        content = xxhash.xxh3_128()
        with shard.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                content.update(block)
                size += len(block)
        total.update(f"{shard.name}\0{content.hexdigest()}\n".encode())
    return total.hexdigest(), size


def _has_step(path: Path) -> bool:
    try:
        return bool(open_root(path).steps())
    except NotACheckpointRoot:
        return False
