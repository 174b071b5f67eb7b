"""Begin a run from a model on disk: its first save is stored as changes to that model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deltacheck.backends.hugging_face.base_root import base_root
from deltacheck.backends.matching import text_of
from deltacheck.errors import Damaged
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf
from deltacheck.maintain.branch import link_segments
from deltacheck.restore import damage
from deltacheck.restore.values import StepReader
from deltacheck.save.saver import Saver
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")


class BaseModel(NamedTuple):
    """The model that the first save of a run is compared with.

    Attributes:
        path: Its root.
        specs: Its leaves by path.
    """

    path: Place
    specs: Mapping[str, LeafSpec]

    def remark(self, leaves: Mapping[str, ArrayLeaf]) -> str:
        """Return a remark for the report of the first save, and log it.

        It counts the leaves in common, and names the first leaf of the state that is in the same
        subtree as a leaf of the base and cannot be compared with it.

        Args:
            leaves: The leaves of the state by path.
        """
        common = {path for path, leaf in leaves.items() if _fits(self.specs.get(path), leaf)}
        # Files beside the weights, such as a configuration, are no part of the model.
        subtrees = {path.partition("/")[0] for path in self.specs} - {"files"}
        differing = [
            path
            for path in sorted(leaves)
            if path not in common and path.partition("/")[0] in subtrees
        ]
        remark = f"{len(common)} leaves begin from the base {self.path}"
        if differing:
            spec = self.specs.get(differing[0])
            remark += (
                f"; {len(differing)} are written whole, the first {differing[0]!r}:"
                f" {text_of(leaves[differing[0]])}, in the base"
                f" {'it does not exist' if spec is None else text_of(spec)}"
            )
        log.log(logging.WARNING if differing or not common else logging.INFO, "%s", remark)
        return remark


def begin_from(base: str, root: Root, saver: Saver) -> BaseModel | None:
    """Let the first save of a root continue the chains of a model on disk.

    The root gets links to the segments of the base, so that it needs nothing of the base's own
    folder any more. Until the first save commits, no step names them.

    Args:
        base: A model folder of Hugging Face, or a root, whose newest step is the base.
        root: The root of the run. This process holds its lease.
        saver: The saver of the root. It has saved nothing yet.

    Returns:
        The base; ``None`` if the root has steps, so that the run has begun.

    Raises:
        ValueError: The root is in an object store.
        FileNotFoundError, NotACheckpointRoot, RootBusy: As ``base_root`` raises them.
        StepNotFound: The root of the base has no step.
        Damaged: The base is damaged. The message names leaf, file and step.
    """
    if root.checkpoints():
        log.info("%s has steps, so the base %s is not read", root.path, base)
        return None
    if not isinstance(root.path, Path):
        raise ValueError(
            f"base cannot be given for {root.path}: a root in an object store cannot share files."
            " Save without it; the first save writes whole leaves"
        )
    path = storage.local(base, "a base").absolute()
    origin = base_root(path, root.path.parent)
    manifest = origin.manifest()
    # Read from the base itself, so that errors name its files.
    reader = StepReader(origin, manifest)
    try:
        with damage.named(origin, manifest):
            # Before anything is linked, so that a damaged base leaves nothing in the root.
            reader.whole()
            linked, copied = link_segments(origin, manifest, root)
    except Damaged as error:
        remedy = "" if origin.path == path else f". Remove {origin.path} to import {path} again"
        raise type(error)(f"{error}{remedy}", file=error.file, leaf=error.leaf) from error
    if copied:
        log.warning(
            "%s is in another file system than %s: %d of %d bytes are copied, not shared",
            origin.path,
            root.path,
            copied,
            copied + linked,
        )
    saver.adopt(reader.chains, reader.stored, manifest)
    return BaseModel(origin.path, {path: chain.spec for path, chain in reader.chains.items()})


def _fits(spec: LeafSpec | None, leaf: ArrayLeaf) -> bool:
    return spec is not None and (spec.dtype, spec.shape) == (leaf.dtype, leaf.shape)
