"""The session of an engine whose process group saves together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.collective import OneRoot, RankGroup, StepPlaces
from deltacheck.backends.torch.group.single_process import (
    Attempt,
    RestoreRequest,
    SingleProcessSession,
)
from deltacheck.leaf.tree import Flat
from deltacheck.save.save_options import SaveOptions, Settings
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opened import Opened


class ProcessGroupSession(SingleProcessSession):
    """The session of one rank. Every rank makes the same calls in the same order.

    Args:
        path: The root, which rank 0 opens for all.
        settings: The settings of all saves, the same on every rank.
        settle_reads: Waits until no save under way reads the state any more.
        process_group: The ranks.

    Raises:
        ValueError: The options cannot be combined with a process group.
        RankFailed: The ranks differ in an option or in the folder, or one of them failed.
    """

    is_of_ranks = True

    def __init__(
        self,
        path: Place,
        settings: Settings,
        settle_reads: Callable[[], None],
        process_group: dist.ProcessGroup,
    ) -> None:
        # Before the base class is initialised, which calls ``_open``.
        self.group = RankGroup(process_group, settings.options.io_timeout_seconds)
        try:
            # Shared, because the other ranks wait for this one already.
            with self.group.sharing_failure():
                _require_supported(settings.options)
            super().__init__(path, settings, settle_reads)
        except BaseException:
            self.group.close()
            raise
        self.group.joint.groups = self.saver.groups
        self.group.joint.compactions = self.saver.compactions
        # The saver of rank 0 does not know the segments of other ranks, which a collection must
        # spare.
        self.writer.protect(lambda: self.group.protected(self.root.store))

    def _open(self, path: Place, settings: Settings) -> Opened:
        return self.group.open(path, settings, **self._own_options())

    def _own_options(self) -> dict[str, object]:
        """Return further options that all ranks must have in common."""
        # An engine with another session refuses this one, instead of waiting for it.
        return {"memory": None}

    def flatten(self, state: object) -> Flat:
        """Return the leaves and the skeleton of a state with sharded leaves."""
        return self.group.flatten(state)

    def begin(
        self, step: int, flat: Flat, metrics: Mapping[str, float], *, is_whole: bool
    ) -> Attempt | None:
        """Agree with the other ranks on a save, or return ``None`` if one of them is busy."""
        assert is_whole, "a gradient log refuses ranks"
        begin_result = self.group.begin(self.saver, step, flat, metrics, self._make_room)
        if begin_result is None:
            return None
        tiles, attempt, agreed = begin_result
        make = self.group.maker(self._commit, self.live.store.path)
        return Attempt(tiles, partial(attempt.commit, make), agreed)

    # ``None``: a save needs no agreement on space.
    _make_room: Callable[[int, Flat], bool] | None = None

    def _commit(self, manifest: Manifest) -> Written:
        """Make the step of all ranks exist. Called on rank 0 only."""
        return self.writer.commit(manifest)

    def _places(self) -> StepPlaces:
        """Return the roots that may hold a step."""
        return OneRoot(self.root)

    def run_once(self, action: Callable[[], object]) -> None:
        """Run an action on rank 0; every rank waits for it and raises its failure."""
        self.group.call_on_first(action)

    def restore(self, request: RestoreRequest) -> tuple[Manifest, Any]:
        """Restore a step on every rank: each reads what its target holds of it."""
        # A failed save of one rank is raised on all ranks, before they begin to restore.
        with self.group.sharing_failure():
            self.saver.check_usable()
            self.saver.wait()
            if request.fallback or (request.optimizer, request.leaves) != (None, None):
                raise ValueError(
                    "a process group restores without fallback=, optimizer= and leaves=; for some"
                    " leaves use deltacheck.open(root).restore(leaves=...)"
                )
        target = None
        if request.target is not None:
            # Saves under way may still read the tensors that are about to be filled.
            self._settle_reads()
            target = self.group.flatten(request.target, target=True)
        manifest, state = self.group.restore(
            self._places(),
            self.saver,
            request.step,
            target,
            request.contract,
            request.max_bytes,
            request.expected_digest,
        )
        return manifest, state if target is None else self.group.filled(request.target, state)

    def restore_overlapped(self, request: RestoreRequest) -> tuple[Manifest, Any, Arrival]:
        """Refuse: ranks agree on the result of a restore, which they would not know yet."""
        raise ValueError(
            "process_group and overlap=True cannot be given together yet; restore without it"
        )

    def release(self) -> None:
        """Give the groups back, and on rank 0 the root."""
        self.group.close()
        super().release()


def _require_supported(options: SaveOptions) -> None:
    # The ranks agree on one save at a time.
    if options.max_pending != 1:
        raise ValueError("ranks that save together need max_pending=1")
