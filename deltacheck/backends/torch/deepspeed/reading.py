"""Read branches of one step's tree, and parts of its leaves that are stored flat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.deepspeed import zero
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import TreeMismatch
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Node
from deltacheck.restore.resolve import require_leaves
from deltacheck.restore.values import Request, StepReader, leaf_of_box


class CheckpointReading:
    """One ``load_checkpoint``: all its files are read from one step.

    ``files`` has what was loaded so far, by path. ``reader`` is ``None`` before the first file was
    opened; it has what a save that continues from the step needs.
    """

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.reader: StepReader | None = None

    def open(self, path: Path) -> StepReader:
        """Return the reader of the step that a file points to.

        Raises:
            TreeMismatch: The file points to another save than the files before it.
        """
        root, manifest = pointer.opened(path)
        if self.reader is None:
            self.reader = StepReader(root, manifest)
        opened = self.reader
        # A crash while pointers were written may leave files of two saves under one tag.
        if (root.path, manifest.seq) != (opened.root.path, opened.manifest.seq):
            raise TreeMismatch(
                f"{path} points to another save (seq {manifest.seq}) than the file before it (seq"
                f" {opened.manifest.seq}); a save was not finished, or files of two were mixed."
                " Load another tag"
            )
        return opened

    @property
    def _opened(self) -> StepReader:
        assert self.reader is not None  # every file is opened before it is read
        return self.reader

    def keep(self, elements: Mapping[str, range], keeps_rest: bool) -> None:
        """Drop the stored bytes that another rank will continue from.

        Args:
            elements: The elements of this rank, for each leaf that is cut.
            keeps_rest: Keep the leaves that are not in ``elements``.
        """
        reader = self._opened

        def is_own(name: str) -> bool:
            leaf = tiles.leaf_of(name)
            return tiles.origin(name)[0] in elements[leaf] if leaf in elements else keeps_rest

        # They take as much memory as the state, and only their rank will use them as bases.
        reader.stored = {name: data for name, data in reader.stored.items() if is_own(name)}

    def names(self, keys: Iterable[str]) -> list[str]:
        """Return the names below some keys of the step's tree."""
        skeleton = self._opened.manifest.tree
        return [name for key in keys for name in keys_of(child(skeleton, key))]

    def dtype(self, prefix: str) -> torch.dtype:
        """Return the dtype of the leaves below a path, which all have the same."""
        specs = self._opened.manifest.specs
        name = next(spec.dtype for path, spec in specs.items() if path.startswith(prefix))
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def tree(
        self, branches: Mapping[str, Any], move: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """Read some branches of the step's tree.

        Args:
            branches: The keys to read, nested; ``None`` stands for all below a key.
            move: Puts each tensor on the device that it is loaded to.
        """
        reader = self._opened
        require_leaves(reader.root, reader.manifest, branches)
        part = tree.pruned(reader.manifest.tree, _like(branches))
        loaded = reader.whole(sorted(set(tree.array_paths(part).values())))
        return leaves.tree_of(part, loaded, move, stored=reader.stored)

    def put(self, parts: Iterable[tuple[str, torch.Tensor, zero.PartitionRun]]) -> None:
        """Read parts of leaves into flat tensors.

        Args:
            parts: For each part the path of its leaf, the flat tensor, and the part's position in
                both.
        """
        reader = self._opened
        specs, step = reader.manifest.specs, reader.manifest.step
        # A rank may have no element of a parameter, and then needs no chunk of it.
        places = {path: (flat, part) for path, flat, part in parts if part.size}
        requests: dict[str, Request] = {}
        for path, (_, part) in places.items():
            stop = part.begin + part.size
            if path in specs and stop > specs[path].shape[0]:
                raise TreeMismatch(
                    f"leaf {path!r} has {specs[path].shape[0]} elements in step {step}, more in"
                    " this engine"
                )
            requests[path] = Request(path, (slice(part.begin, stop),))

        def place(path: str, spec: LeafSpec, box: NDArray[Any]) -> None:
            flat, part = places[path]
            flat.narrow(0, part.at, part.size).copy_(leaves.tensor_of(leaf_of_box(spec, box)))

        reader.boxes(requests, place)


def _like(branches: Mapping[str, Any]) -> Node:
    """Return a skeleton with these keys, by which another one can be pruned."""
    return {
        "t": "dict",
        "k": [
            [key, {"t": "none"} if inner is None else _like(inner)]
            for key, inner in branches.items()
        ],
    }


def child(node: Node, key: str) -> Node:
    """Return the child of a skeleton's dict under a key."""
    return dict(_pairs(node))[key]


def keys_of(node: Node) -> list[str]:
    """Return the keys of a skeleton's dict, and none for any other node."""
    return [key for key, _ in _pairs(node)]


def _pairs(node: Node) -> list[tuple[str, Node]]:
    return cast("list[tuple[str, Node]]", node["k"]) if node["t"] in ("dict", "odict") else []
