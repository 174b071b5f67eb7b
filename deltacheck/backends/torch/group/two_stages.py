"""A restore in two stages: what the forward pass needs, then the state of the optimizers.

Each stage reads and verifies its leaves completely before it fills a tensor. Leaves that the first
stage is computed from, such as masters that give the weights, belong to it.

It stays beside the restore in one call because the forward pass can begin long before that has
ended: after a third of its processor time at 46 MB, exact, and sooner with larger states
(docs/lab/benchmarks.md). A restore in one call takes less processor time in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.classes import build
from deltacheck.backends.torch.state.optimizers import (
    OptimizerPlace,
    expanded,
    late_paths,
    with_value,
)
from deltacheck.leaf import tree
from deltacheck.restore.content import check_budget
from deltacheck.restore.resolve import needed_by
from deltacheck.restore.values import StepReader
from deltacheck.store.manifest import Manifest


class TwoStages:
    """The restore of one step into a target with optimizers.

    Args:
        reader: Reads the step. After both stages it has all chains.
        manifest: The step.
        target: The target.
        places: Its optimizers.
        max_bytes: As in ``Engine.restore``.
        settle_reads: Called before the first tensor is written to.

    Raises:
        TreeMismatch: The target differs from the step. Nothing was read or changed.
        BudgetExceeded: Both stages together are larger than ``max_bytes``.
    """

    def __init__(
        self,
        reader: StepReader,
        manifest: Manifest,
        target: object,
        places: Iterable[OptimizerPlace],
        max_bytes: int | None,
        settle_reads: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._manifest = manifest
        self._places = list(places)
        self._settle_reads = settle_reads
        self._target = leaves.flatten(expanded(target, self._places, manifest))
        leaves.require_writable(self._target.arrays)
        self._arrays = tree.array_nodes(self._target.skeleton)
        saved_paths = match_targets(manifest, self._target, self._arrays)
        check_budget(max_bytes, sum(spec.raw_bytes for spec in manifest.specs.values()))
        late_targets = late_paths(self._target, self._places, self._arrays)
        early = [path for path in saved_paths if path not in late_targets]
        required = set(needed_by(manifest, (saved_paths[path] for path in early)))
        self._late = {
            path: saved_paths[path] for path in late_targets if saved_paths[path] not in required
        }
        self._early = {
            path: stored for path, stored in saved_paths.items() if path not in self._late
        }

    def first(self) -> Any:
        """Restore all but the late leaves, and let the optimizers use their new state.

        Returns:
            The state. At the places of optimizers it has the optimizers.
        """
        values = dict(self._target.arrays) | self._filled(self._early, self._settle_reads)
        state: Any = tree.unflatten(
            self._manifest.tree, lambda path, owner, tag: values[self._arrays[path].owner], build
        )
        for place in self._places:
            saved = state
            for key in place.keys:
                saved = saved[key]
            place.load(saved)
            state = with_value(state, place.keys, place.optimizer)
        return state

    def second(self) -> None:
        """Restore the late leaves. Nothing is changed if this fails before all are verified."""
        # No save has begun since the first stage.
        self._filled(self._late, lambda: None)

    def _filled(
        self, saved_paths: Mapping[str, str], settle_reads: Callable[[], None]
    ) -> dict[str, object]:
        """Read leaves, fill their targets and return them, by path of the target."""
        values = {path: self._target.arrays[path] for path in saved_paths}
        paths = list(dict.fromkeys(saved_paths.values()))
        return leaves.read_into(values, self._reader, saved_paths, settle_reads, paths)
