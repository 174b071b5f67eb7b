"""Read steps, and agree on them, in a training of one process or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.trainer.checkpoint_files import Files
from deltacheck.leaf import tree
from deltacheck.restore import damage
from deltacheck.restore.resolve import require_leaves
from deltacheck.restore.values import StepReader
from deltacheck.store.manifest import Manifest


class TrainerRanks:
    """The processes of a training, which make the same calls.

    Args:
        engine: The engine of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group = engine._session.group
        # What the saver continues from; ``None`` once it does, or if nothing was restored.
        self._reader: StepReader | None = None

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Return a plain decision of rank 0 on every rank."""
        if self._group is None:
            return decision()
        return self._group.joint.agree(None, lambda _: decision(), "resumes a training")

    def steps(self) -> list[int]:
        """Wait for the saves under way, and return the committed steps."""
        self._engine.wait()
        steps: list[int] = self.decide(self._engine.steps)
        return steps

    def gather(self, names: list[str], take: Callable[[Iterable[str]], Files]) -> Files:
        """Take files on rank 0, after every rank has written its own.

        Args:
            names: The files that this rank sees.
            take: Called on rank 0 with the files that any rank sees.

        Returns:
            What ``take`` returned; nothing on other ranks.
        """
        if self._group is None:
            return take(names)
        files: Files = {}

        def decide(of_ranks: list[list[str]]) -> None:
            files.update(take({name for of_rank in of_ranks for name in of_rank}))

        self._group.joint.agree(names, decide, "takes the files of a checkpoint")
        return files

    def restore(self, step: int) -> Any:
        """Return a whole step on every rank. ``continue_chains`` makes it the base of saves."""
        if self._group is None:
            return self._engine.restore(step)
        self._reader, state = self._read(step, None, keep=True)
        return state

    def fill(self, step: int, shards: Any) -> Any:
        """Fill this rank's shards from a step, which becomes the base of saves."""
        return self._engine.restore(step, into=shards)

    def read(self, step: int, keys: Iterable[str]) -> Any:
        """Return some entries of a step, which no save continues from."""
        return self._read(step, keys, keep=False)[1]

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a step, the same on every rank."""
        root, manifest = self._engine._session.roots.find(step)
        return manifest if self._group is None else self._group.manifest(root, step)

    def continue_chains(self, state: Callable[[], Any]) -> None:
        """Let the next save store changes to the restored step.

        Args:
            state: Returns the state of this rank as the next save will have it.
        """
        reader, self._reader = self._reader, None
        if self._group is not None and reader is not None:
            with self._group.sharing_failure():
                flat = self._group.flatten(state())
            self._group.resume(self._engine._saver, reader, flat)

    def _read(self, step: int, keys: Iterable[str] | None, *, keep: bool) -> tuple[StepReader, Any]:
        root, manifest = self._engine._session.roots.find(step)
        if self._group is None:
            return _read_whole(StepReader(root, manifest, keep=keep), keys)
        manifest = self._group.manifest(root, step)
        with self._group.sharing_failure():
            result = _read_whole(StepReader(root, manifest, keep=keep), keys)
        # No rank may train on from a step that another rank could not read.
        self._group.joint.agree(None, lambda _: None, "restores")
        return result


def _read_whole(reader: StepReader, keys: Iterable[str] | None) -> tuple[StepReader, Any]:
    manifest = reader.manifest
    require_leaves(reader.root, manifest, keys)
    part = manifest.tree
    if keys is not None:
        part = tree.pruned(part, {"t": "dict", "k": [[key, {"t": "none"}] for key in keys]})
    with damage.named(reader.root, manifest):
        loaded = reader.whole(sorted(set(tree.array_paths(part).values())))
    return reader, leaves.tree_of(part, loaded, stored=reader.stored)
