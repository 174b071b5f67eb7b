"""Iterate over training data with a position that a checkpoint keeps, also within an epoch.

The order of an epoch depends on a seed and the number of the epoch only. So the position consists
of three numbers, and a process that starts anew finds the same samples behind it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from deltacheck.errors import TreeMismatch
from deltacheck.leaf.external_errors import typed


@typed
class ResumableLoader:
    """A loader of training data with a position, for ``Engine.save``.

    Each iteration is one epoch. After ``load_state_dict``, the first one continues behind the last
    batch that was given out before the save. A batch counts as used as soon as the loop has it, so
    save at the end of the loop's body. The prefetched batches of worker processes do not count.

    While the loader works, Python's, NumPy's and torch's global generators on the CPU have states
    that depend on seed, epoch and batch. Afterwards they have those of before. So the training
    draws the same numbers with and without a resume. No other thread may draw from them meanwhile.

    Args:
        loader: A ``DataLoader``, a loader that Accelerate has prepared, or another object that
            begins an epoch at each ``iter``. ``set_epoch`` is called on it, its samplers and its
            dataset if they have one.
        seed: The seed of the order and of random augmentation. Another one gives another order.
        replay: ``False``: a resume skips the used indices of a ``DataLoader`` without loading their
            samples. Random augmentation in worker processes then continues with other numbers.
            ``True``: the used batches are loaded again and dropped, which takes as long as before,
            and all random numbers are the same. Needed for a sampler of yours that draws from a
            global generator while it runs. Other loaders are always replayed.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int = 0, replay: bool = False) -> None:
        self.loader = loader
        self.epoch = 0
        self._seed = seed
        self._replay = replay
        self._used = 0  # batches of the epoch that were given out
        # The position was loaded, and no iteration has begun there yet.
        self._is_loaded = False
        # The same for all epochs, because it keeps persistent workers.
        self._source, self._indices = _with_indices(loader)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or those that are left of it after ``load_state_dict``."""
        # The loop has left its last epoch with ``break``.
        if self._used and not self._is_loaded:
            self.epoch, self._used = self.epoch + 1, 0
        self._is_loaded = False
        epoch = self.epoch
        for part in _parts(self.loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        batches, skipped = self._begun(epoch, self._used)
        for _ in range(skipped, self._used):
            self._next(batches, epoch, skipped)
            skipped += 1
        while True:
            try:
                batch = self._next(batches, epoch, self._used)
            except StopIteration:
                break
            # Before the loop gets it, so that a save in the loop counts it.
            self._used += 1
            yield batch
        self.epoch, self._used = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position as a part of a state.

        Returns:
            Seed, epoch, the number of used batches, and the lengths of loader and dataset (-1 if
            they have none).
        """
        return {"seed": self._seed, "epoch": self.epoch, "batch": self._used, **self._lengths()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position. The next iteration begins there.

        Args:
            state_dict: What ``state_dict`` returned before the save.

        Raises:
            TreeMismatch: The seed differs, or within an epoch the number of batches or samples: the
                position would be at other samples.
        """
        saved = {key: int(value) for key, value in state_dict.items()}
        own = {"seed": self._seed, **self._lengths()}
        # Between epochs, another number of batches or ranks may follow.
        keys = ("seed", *self._lengths()) if saved["batch"] else ("seed",)
        for key in keys:
            if saved[key] != own[key]:
                raise TreeMismatch(
                    f"the saved position is batch {saved['batch']} of epoch {saved['epoch']} with"
                    f" {key} {saved[key]}, this loader has {key} {own[key]}: these are other"
                    " samples. Resume with the same seed, dataset, batch size and number of ranks,"
                    " or from a step at the end of an epoch"
                )
        self.epoch, self._used = saved["epoch"], saved["batch"]
        if self._used and self._used == saved["batches"]:
            self.epoch, self._used = self.epoch + 1, 0
        self._is_loaded = True

    def _lengths(self) -> dict[str, int]:
        return {
            "batches": _length(self.loader),
            "samples": _length(getattr(self.loader, "dataset", None)),
        }

    def _begun(self, epoch: int, used: int) -> tuple[Iterator[Any], int]:
        """Return an iterator of an epoch, and the number of batches that it has skipped."""
        skipped = 0 if self._replay or self._indices is None else used
        if self._indices is not None:
            self._indices.skip = skipped
        with self._generators(epoch, -1):
            return iter(self._source), skipped

    def _next(self, batches: Iterator[Any], epoch: int, number: int) -> Any:
        with self._generators(epoch, number):
            return next(batches)

    @contextlib.contextmanager
    def _generators(self, epoch: int, number: int) -> Iterator[None]:
        """Seed the generators for a batch. -1: the beginning of the epoch."""
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seeds = np.random.SeedSequence((self._seed, epoch, number + 1)).generate_state(3)
        random.seed(int(seeds[0]))
        np.random.seed(int(seeds[1]))
        # Not ``torch.manual_seed``, which seeds the generators of devices, too.
        torch.default_generator.manual_seed(int(seeds[2]))
        if number < 0:
            # They continue by themselves, so that a sampler may draw while it runs.
            for part in _parts(self.loader):
                if isinstance(getattr(part, "generator", None), torch.Generator):
                    part.generator.manual_seed(int(seeds[2]))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


class _Indices:
    """The indices of a sampler behind some of an epoch. ``skip``: their number."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self._sampler)
        for _ in range(self.skip):
            next(indices, None)
        # At once, because samplers draw the order of an epoch with its first index.
        first = list(itertools.islice(indices, 1))
        return itertools.chain(first, indices)


def _with_indices(loader: Iterable[Any]) -> tuple[Iterable[Any], _Indices | None]:
    """Return a loader whose indices can be skipped, and these; ``None`` if it has none."""
    # A loader of Accelerate has the class of a DataLoader, but not its attributes.
    attributes = getattr(loader, "__dict__", {})
    if not isinstance(loader, DataLoader) or "batch_sampler" not in attributes:
        return loader, None
    if isinstance(loader.dataset, IterableDataset):
        return loader, None
    own = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    indices = _Indices(attributes[name])
    # A DataLoader refuses an assignment to these after its construction.
    vars(own)[name] = indices
    return own, indices


def _parts(loader: object) -> list[Any]:
    """Return a loader, its samplers and its dataset."""
    parts: list[Any] = []
    remaining = [loader]
    while remaining:
        part = remaining.pop()
        if part is not None and not any(part is other for other in parts):
            parts.append(part)
            # Samplers of Accelerate and others wrap samplers.
            names = ("dataset", "batch_sampler", "sampler")
            remaining += [getattr(part, name, None) for name in names]
    return parts


def _length(sized: object) -> int:
    # An IterableDataset or a loader of one may have none.
    try:
        return len(sized)  # type: ignore[arg-type]
    except TypeError:
        return -1
