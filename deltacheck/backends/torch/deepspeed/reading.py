"""Read what is wanted of one step: branches of its tree, and runs of leaves that are stored flat;
what was read can be gone on from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.deepspeed import zero
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import TreeMismatch
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.sharding import whole
from deltacheck.leaf.tiles import Box
from deltacheck.leaf.tree import Node
from deltacheck.restore.resolve import Leaf, resolve_leaves
from deltacheck.restore.values import Loaded, load_boxes
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root


@dataclass(slots=True)
class Reading:
    """One ``load_checkpoint``. ``files``: what was loaded, by path; ``leaves``, ``stored``: where
    it
    came from, and the bytes of chains that were read whole: what a save that goes on from here
    compares with.
    """

    files: dict[str, Any] = field(default_factory=dict)
    root: Root | None = None
    manifest: Manifest | None = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    stored: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def opened(self, path: Path) -> tuple[Root, Manifest]:
        root, manifest = pointer.opened(path)
        if self.manifest is not None and (root.path, manifest.seq) != (
            self._step[0].path,
            self._step[1].seq,
        ):
            raise TreeMismatch(
                f"{path} stands for another save (seq {manifest.seq}) than the file before it (seq"
                f" {self.manifest.seq}); a save was not finished, or files of two were mixed. Load"
                " another tag"
            )
        if self.manifest is None:
            self.root, self.manifest = root, manifest
        return self._step

    @property
    def _step(self) -> tuple[Root, Manifest]:
        assert self.root is not None
        assert self.manifest is not None
        return self.root, self.manifest

    @property
    def digest(self) -> str:
        root, manifest = self._step
        return root.digest_of(manifest)

    def keep(self, own: Mapping[str, range], others: bool) -> None:
        """Forget the bytes that another rank goes on from. ``own``: elements of leaves that are
        cut;
        ``others``: whether leaves beside them are this rank's.
        """
        self.stored = {
            name: data
            for name, data in self.stored.items()
            if (
                tiles.origin(name)[0] in own[leaf]
                if (leaf := tiles.leaf_of(name)) in own
                else others
            )
        }

    def dtype(self, prefix: str) -> torch.dtype:
        """Of the leaves below a path, which all have the same."""
        _, manifest = self._step
        name = next(spec.dtype for path, spec in manifest.specs.items() if path.startswith(prefix))
        found = getattr(torch, name)
        assert isinstance(found, torch.dtype)
        return found

    def tree(self, wanted: Mapping[str, Any], move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Some branches of the step's tree."""
        root, manifest = self._step
        part = tree.pruned(manifest.tree, _like(wanted))
        owners = sorted(set(tree.array_paths(part).values()))
        found = resolve_leaves(root, manifest, owners)
        self.leaves |= found
        boxes = {path: whole(leaf.spec.shape) for path, leaf in found.items()}
        arrays = load_boxes(found, boxes, stored=self.stored)
        loaded = {
            path: Loaded(found[path].spec, list(range(found[path].spec.chunk_count)), _bytes(array))
            for path, array in arrays.items()
        }
        return leaves.tree_of(part, loaded, move, stored=self.stored)

    def put(self, wanted: Iterable[tuple[str, torch.Tensor, zero.Part]]) -> None:
        """Read what parts say of leaves (by path) to where they say of flat tensors."""
        places = {path: (flat, part) for path, flat, part in wanted if part.size}
        boxes = {
            path: (slice(part.begin, part.begin + part.size),) for path, (_, part) in places.items()
        }
        for path, values in self._boxes(boxes).items():
            flat, part = places[path]
            flat.narrow(0, part.at, part.size).copy_(values)

    def _boxes(self, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
        root, manifest = self._step
        specs = manifest.specs
        for path, box in boxes.items():
            if path in specs and box[0].stop > specs[path].shape[0]:
                raise TreeMismatch(
                    f"leaf {path!r} has {specs[path].shape[0]} elements in step {manifest.step},"
                    " more in this engine"
                )
        found = resolve_leaves(root, manifest, list(boxes), boxes=boxes)
        self.leaves |= found
        arrays = load_boxes(found, boxes, stored=self.stored)
        return {
            path: leaves.tensor_of(
                Loaded(dataclasses.replace(found[path].spec, shape=array.shape), [], _bytes(array))
            )
            for path, array in arrays.items()
        }


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _like(wanted: Mapping[str, Any]) -> Node:
    """A skeleton with these keys, to prune another by."""
    return {
        "t": "dict",
        "k": [
            [key, {"t": "none"} if below is None else _like(below)] for key, below in wanted.items()
        ],
    }


def child(node: Node, key: str) -> Node:
    """What a dict of a skeleton has under a key."""
    return dict(_pairs(node))[key]


def keys_of(node: Node) -> list[str]:
    """The keys of a dict of a skeleton; none of anything else."""
    return [key for key, _ in _pairs(node)]


def _pairs(node: Node) -> list[tuple[str, Node]]:
    return cast("list[tuple[str, Node]]", node["k"]) if node["t"] in ("dict", "odict") else []
