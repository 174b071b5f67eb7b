"""The profiler of training runs, for the states of any framework.

It imports only the framework that a state comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.leaf import instances, tree
from deltacheck.leaf.containers import Level
from deltacheck.leaf.tree import ArrayLeaf, Flat
from deltacheck.profile.measure import Samples
from deltacheck.profile.observe import Observer
from deltacheck.profile.sample import SamplePlan

# Package that defines the type of an array or container -> backend. Its ``state/sampling.py`` has
# the functions ``describe``, ``expand`` and ``take``.
_BACKENDS = {"torch": "torch", **dict.fromkeys(("jax", "jaxlib", "flax", "optax"), "orbax")}


class Adapter(Protocol):
    """The functions of a framework for its arrays and containers."""

    def describe(self, value: object) -> ArrayLeaf | None:
        """Describe an array of the framework as a leaf; return ``None`` for any other value."""

    def expand(self, value: object) -> Level | None:
        """Return one level of a container of the framework, else ``None``."""

    def take(self, arrays: Mapping[str, Any], plan: SamplePlan) -> dict[str, NDArray[np.generic]]:
        """Return the sampled elements of all arrays, on the host, in memory of their own."""
        ...


class Profiler(Observer):
    """A profiler that samples a training state at intervals.

    Call ``observe`` after every step, with the nested state that a checkpoint would hold: torch
    tensors, JAX or NumPy arrays. Between the intervals it only records loss and gradient norm. A
    sample has a few thousand elements of each class of leaves; the rest never leaves its device.
    ``profile`` returns the result, and ``docs/how-to/policies.md`` shows how to use it.

    Args:
        interval_steps: The number of steps between two samples (default: 10). The interval of the
            checkpoints is best. Larger: less overhead, but a coarser stable start; smaller: the
            opposite.
        sample: The number of blocks of 64 elements for each class of leaves, such as weights,
            masters and moments (default: 64). Larger: less noise, more to copy; smaller: the
            opposite.
        optimizer: The constants of Adam if the state does not hold them, as with optax without
            ``inject_hyperparams``. ``None`` (default): moments with unknown constants are treated
            as those of an unknown optimizer and stay exact.
        source: A name for the run, which is stored in the profile (default: empty).

    Raises:
        ValueError: If ``interval_steps`` or ``sample`` is below 1.
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
    """Flatten a state of any framework without copying its arrays."""
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


def _expand(value: object) -> Level | None:
    adapter = _adapter(package_of(value))
    if adapter is not None:
        return adapter.expand(value)
    # Of the user's own classes only the fields matter, whichever framework saves them.
    return instances.level_of(value) if instances.is_supported(type(value)) else None


def package_of(value: object) -> str:
    """Return the framework that defines the type or one of its bases; empty if there is none."""
    packages = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return next((package for package in packages if package in _BACKENDS), "")


def backend_of(state: object) -> str | None:
    """Return the backend that saves a state's arrays; ``None``: they are of no framework."""
    packages = {package_of(array) for array in flatten(state).arrays.values()}
    return next((name for package, name in _BACKENDS.items() if package in packages), None)


def _adapter(package: str) -> Adapter | None:
    if not package:
        return None
    module = import_module(f"deltacheck.backends.{_BACKENDS[package]}.state.sampling")
    return cast(Adapter, module)
