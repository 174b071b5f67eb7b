"""The copy of the weights that a publisher compares each step with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deltacheck.backends.hugging_face.publish.version_folder import Tensor
from deltacheck.codec.base import U8
from deltacheck.leaf.spec import batches
from deltacheck.restore.chain import KnownContent, known_content
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root, open_segments
from deltacheck.store.segment import Segment

# Leaves that are read together. Larger: fewer calls, but more memory beside the copy.
_BATCH_BYTES = 256 << 20


class HeldWeights:
    """Weights in host memory, brought from step to step by reading only what is new.

    Args:
        root: The root of the run.

    Attributes:
        tensors: The weights by name; empty: none are held.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.forget()

    def forget(self) -> None:
        """Discard the copy."""
        self.tensors: dict[str, Tensor] = {}
        self._marks: dict[str, object] = {}
        self._chains: dict[str, KnownContent] = {}
        self._segments: list[Segment] = []

    def read(
        self,
        manifest: Manifest,
        weights: Mapping[str, str],
        types: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> Iterator[tuple[str, U8 | None]]:
        """Read the leaves of a step that may have changed into the copy.

        Args:
            manifest: The step.
            weights: Name of a tensor -> leaf path.
            types: Element type and shape of each tensor.

        Yields:
            Name, and bytes before; ``None`` without any.

        Raises:
            Damaged: The step is damaged. ``ChainBroken`` is one kind of it.
        """
        names: dict[str, list[str]] = {}
        for name, owner in weights.items():
            names.setdefault(owner, []).append(name)
        stale = [
            owner
            for owner, tied in names.items()
            # A leaf without a mark is compared at every step.
            if self._marks.get(owner) is None
            or self._marks[owner] != manifest.mark_of(owner)
            or not all(name in self.tensors for name in tied)
        ]
        segments = open_segments(self._root, manifest)
        for owners in batches(stale, lambda owner: manifest.spec(owner).raw_bytes, _BATCH_BYTES):
            leaves = resolve_leaves(self._root, manifest, owners, held=self._chains)
            chains: dict[str, U8] = {}
            loaded = load_leaves(leaves, stored=chains)
            self._chains |= known_content(manifest, chains)
            for owner in owners:
                data = loaded[owner].data
                data.flags.writeable = False
                self._marks[owner] = manifest.mark_of(owner)
                for name in names[owner]:
                    before = self.tensors.get(name)
                    self.tensors[name] = Tensor(*types[name], data)
                    yield name, None if before is None else before.data
        # Held, so that those that the next step shares are not opened again.
        self._segments = segments
