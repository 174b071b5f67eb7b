"""The runs and policies that `stability` compares, with one interface to both frameworks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import deltacheck
from benchmarks import entropy
from benchmarks.workloads.recipe import Recipe
from deltacheck import Policy
from deltacheck.leaf import tree
from deltacheck.profile import AdamRule
from deltacheck.store.files.arrays import bytes_on_disk

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """A policy.

    ``policy(max_chain_depth)`` creates it, with no other limit of chains. ``forward_exact``: the
    forward pass after a restore equals the one before, bit for bit.
    """

    name: str
    policy: Callable[[int], Policy]
    lossless: bool = False
    forward_exact: bool = True


def _weights_bounded(max_chain_depth: int) -> Policy:
    """Create the policy of ``Policy.auto`` for a profile whose every leaf is stable."""
    hidden = Policy.auto(derive=False, moments="reused").hidden
    assert hidden is not None
    return Policy(
        max_chain_depth, replace(hidden, weights="bounded"), derive=True, max_restore_ratio=None
    )


EXACT = Way("exact", lambda depth: Policy.exact(depth, max_restore_ratio=None), lossless=True)
AUTO = Way("auto", lambda depth: Policy.auto(max_chain_depth=depth))  # as users have it
WAYS = (
    EXACT,
    Way(
        "m and v bounded",
        lambda depth: Policy.auto(
            derive=False, moments="bounded", max_chain_depth=depth, max_restore_ratio=None
        ),
    ),
    Way(
        "m and v reused",
        lambda depth: Policy.auto(
            derive=False, moments="reused", max_chain_depth=depth, max_restore_ratio=None
        ),
    ),
    Way("weights bounded too", _weights_bounded, forward_exact=False),
)

WEIGHTS, MASTER, FIRST, SECOND, OTHER = "bf16 weights", "fp32 master", "m", "v", "other"
CLASSES = (WEIGHTS, MASTER, FIRST, SECOND)
_MARKS = {"master": MASTER, "exp_avg": FIRST, "exp_avg_sq": SECOND, "mu": FIRST, "nu": SECOND}


def class_of(path: str) -> str:
    """Return the class of a leaf of either framework; frozen weights count as weights."""
    names = path.split("/")
    optimizer_class = next((_MARKS[name] for name in names if name in _MARKS), None)
    if optimizer_class is not None:
        return optimizer_class
    return WEIGHTS if names[0] in ("model", "base") or "params" in names[:2] else OTHER


class Run:
    """A workload of one framework, and access to its states.

    Args:
        framework: ``torch`` or ``jax``.
        recipe: Sizes and rates.
        pretrained: Start from pre-trained weights. ``False``: from new ones, for a run whose state
            is loaded before its first step.
    """

    def __init__(self, framework: str, recipe: Recipe, *, pretrained: bool = True) -> None:
        self.framework, self.recipe = framework, recipe
        self._module = importlib.import_module(f"benchmarks.workloads.{framework}_workloads")
        self.workload = self._module.Workload(
            recipe, self._module.pretrained(recipe) if pretrained else None
        )
        self.rule = AdamRule(*recipe.betas, recipe.eps)

    def train(self, steps: int) -> float:
        """Train some steps, wait for them, and return the last loss.

        JAX and CUDA return before an update is finished. Without the wait, a save would seem to
        wait for it.
        """
        loss = 0.0
        for _ in range(steps):
            loss = self.workload.train_step()
        if self.framework == "jax":
            import jax

            jax.block_until_ready(self.workload.state())
        elif self.recipe.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return loss

    def flat(self, state: State | None = None) -> tree.Flat:
        """Flatten a state, by default the live one, without copying."""
        leaves = importlib.import_module(
            f"deltacheck.backends.{_BACKENDS[self.framework]}.state.leaves"
        )
        expand = (leaves.expand,) if hasattr(leaves, "expand") else ()
        return tree.flatten(
            self.workload.state() if state is None else state, leaves.describe, *expand
        )

    def arrays(self, state: State | None = None) -> dict[str, Any]:
        """Return the arrays of the four classes by path, tied ones once, not copied."""
        return {
            path: array
            for path, array in self.flat(state).arrays.items()
            if class_of(path) != OTHER
        }

    def words(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return a copy of the live state's bits, by class and path."""
        words: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in CLASSES}
        for path, array in self.arrays().items():
            words[class_of(path)][path] = entropy.words_of(array)
        return words

    def masters(self, state: State | None = None) -> dict[str, NDArray[np.float32]]:
        """Return copies of the float32 master weights by path."""
        return {
            path: entropy.words_of(array).view(np.float32)
            for path, array in self.arrays(state).items()
            if class_of(path) == MASTER
        }

    def moments(
        self, state: State
    ) -> Iterator[tuple[str, NDArray[np.float32], NDArray[np.float32]]]:
        """Yield (path of m, m, v) of each parameter."""
        arrays = {
            path: entropy.words_of(array).view(np.float32)
            for path, array in self.arrays(state).items()
            if class_of(path) in (FIRST, SECOND)
        }
        for path, first in arrays.items():
            if class_of(path) == FIRST:
                names = [
                    {"exp_avg": "exp_avg_sq", "mu": "nu"}.get(name, name)
                    for name in path.split("/")
                ]
                yield path, first, arrays["/".join(names)]

    def logits(self) -> bytes:
        """Return the bits of the logits of the held-out rows."""
        return entropy.words_of(self.workload.logits()).tobytes()

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics that a policy needs beside the state."""
        return {"loss": loss, "learning_rate": self.recipe.rate}

    def torch_save(self, file: Path) -> int:
        """Save the whole state with `torch.save`, frozen weights included; return its bytes."""
        import torch

        from deltacheck.backends.torch.files.evaluation import peer_save

        if self.framework == "torch":
            return peer_save(self.workload.state(), file)
        tensors = {}
        for path, array in self.arrays().items():
            words = entropy.words_of(array)
            tensors[path] = torch.from_numpy(
                words.view(np.int16 if words.itemsize == 2 else np.float32)
            )
        return peer_save(tensors, file)


_BACKENDS = {"torch": "torch", "jax": "orbax"}


class Chain:
    """The checkpoints of one run under one policy, in one directory."""

    def __init__(self, framework: str, root: Path, policy: Policy) -> None:
        self.framework, self.root = framework, root.absolute()
        self.bytes: dict[int, int] = {}  # by step: bytes of all files that its save added
        self.stages: dict[int, str] = {}  # by step: stage of the policy, "" if it has none
        if framework == "torch":
            from deltacheck.backends.torch import Engine

            self._saver: Any = Engine(self.root, policy=policy)
        else:
            from deltacheck.backends.orbax import manager

            self._saver = manager(self.root, policy=policy)
        self._size = _bytes_of(self.root)

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> None:
        """Save a step, and wait for it."""
        if self.framework == "torch":
            self._saver.save(step, state, metrics=metrics).result()
        else:
            from deltacheck.backends.orbax import DeltaSaveArgs

            self._saver.save(step, args=DeltaSaveArgs(state, metrics=metrics))
            self._saver.wait_until_finished()
        size = _bytes_of(self.root)
        self.bytes[step], self._size = size - self._size, size
        self.stages[step] = getattr(deltacheck.open(self.root).manifest(step), "stage", "")

    def restore(self, step: int, like: State) -> State:
        """Return the state of a step. Call it after the run: a save would continue from there."""
        if self.framework == "torch":
            return self._saver.restore(step)  # type: ignore[no-any-return]
        from deltacheck.backends.orbax import DeltaRestoreArgs

        return self._saver.restore(step, args=DeltaRestoreArgs(like))  # type: ignore[no-any-return]

    def settled(self) -> list[int]:
        """Return the bytes of the saves in the policy's steady state.

        These are the stable saves except the first, which makes the transition. Without stages, or
        if the run never becomes stable, they are all saves except the first.
        """
        stable = [step for step, stage in self.stages.items() if stage == "stable"]
        return (
            [self.bytes[step] for step in stable[1:]] if stable else list(self.bytes.values())[1:]
        )

    def close(self) -> None:
        self._saver.close()


def _bytes_of(root: Path) -> int:
    """Return the bytes of a root, beside merges that remove files of earlier saves."""
    while root.exists():
        with contextlib.suppress(FileNotFoundError):
            return bytes_on_disk(root)
    raise FileNotFoundError(f"{root} does not exist")
