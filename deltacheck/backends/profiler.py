"""Observe training states of any framework for a profile.

Only the frameworks that the states come from are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.leaf import tree
from deltacheck.leaf.tree import ArrayLeaf, Flat
from deltacheck.profile.measure import Samples
from deltacheck.profile.observe import Observer
from deltacheck.profile.sample import SamplePlan

# Package that defines the type of an array or container -> module with its functions ``describe``,
# ``expand`` and ``take``.
_ADAPTERS = {
    "torch": "deltacheck.backends.torch.state.sampling",
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax"), "deltacheck.backends.orbax.state.sampling"),
}


class Adapter(Protocol):
    """Functions for the arrays of one framework."""

    def describe(self, value: object) -> ArrayLeaf | None:
        """Describe an array; return ``None`` for anything else."""

    def expand(self, value: object) -> list[tuple[object, object]] | None:
        """Return the children of a container of the framework; ``None`` for anything else."""

    def take(self, arrays: Mapping[str, Any], plan: SamplePlan) -> dict[str, NDArray[np.generic]]:
        """Return sampled elements of arrays, on the host, in memory of their own."""
        ...


class Profiler(Observer):
    """Observes a training state at intervals, from a few thousand elements of each class of leaves.

    All other elements stay on their devices. Call ``observe`` after every step with the nested
    state that a checkpoint would hold: torch tensors, JAX or NumPy arrays. Between the intervals it
    only records loss and gradient norm. ``profile`` returns the result: the properties that were
    stable, and from which step on.

    Args:
        interval_steps: Steps between two observations, best the interval of the checkpoints.
            Larger: cheaper, but the start of stability is coarser; smaller: finer, but more copies.
        sample: Blocks of 64 elements for each class of leaves (weights, masters, moments). Larger:
            less noise; smaller: less to copy.
        optimizer: The constants of Adam, if the state does not hold them (optax without
            ``inject_hyperparams``).
        source: A name for the run, stored in the profile.
    """

    def _flatten(self, state: object) -> Flat:
        return flatten(state)

    def _take(self, arrays: Mapping[str, object], plan: SamplePlan) -> Samples:
        groups: dict[str, dict[str, object]] = {}
        for path in plan.starts:
            groups.setdefault(package_of(arrays[path]), {})[path] = arrays[path]
        samples: dict[str, NDArray[np.generic]] = {}
        # One call for each framework, which gathers all samples of a device before it copies them.
        for package, members in groups.items():
            adapter = _adapter(package)
            samples |= (
                {p: take_numpy(a, plan.elements(p)) for p, a in members.items()}
                if adapter is None
                else adapter.take(members, plan)
            )
        return samples


def flatten(state: object) -> Flat:
    """Flatten a state of any framework, without a copy."""
    return tree.flatten(state, _describe, _expand)


def take_numpy(array: object, elements: NDArray[np.int64]) -> NDArray[np.generic]:
    """Return elements of a host array by their offsets in C order."""
    host = np.asarray(array)
    # reshape would copy an array that is not contiguous.
    return (
        host.reshape(-1)[elements]
        if host.flags.c_contiguous
        else host[np.unravel_index(elements, host.shape)]
    )


def _describe(value: object) -> ArrayLeaf | None:
    adapter = _adapter(package_of(value))
    return describe_numpy(value) if adapter is None else adapter.describe(value)


def _expand(value: object) -> list[tuple[object, object]] | None:
    adapter = _adapter(package_of(value))
    return None if adapter is None else adapter.expand(value)


def package_of(value: object) -> str:
    """Return the framework that the type, or one of its bases, comes from; empty for none."""
    packages = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return next((package for package in packages if package in _ADAPTERS), "")


def _adapter(package: str) -> Adapter | None:
    return cast(Adapter, import_module(_ADAPTERS[package])) if package else None
