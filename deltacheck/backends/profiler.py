"""The profiler: it looks at the states of any framework, and imports none that the states do not
come from.
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

# Package that an array's or a container's type comes from -> the module with ``describe``,
# ``expand`` and ``take`` for it.
_ADAPTERS = {
    "torch": "deltacheck.backends.torch.state.sampling",
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax"), "deltacheck.backends.orbax.state.sampling"),
}


class Adapter(Protocol):
    """What a framework's arrays need. ``take`` gives the sampled elements of all of them, on the
    host, in memory of their own.
    """

    def describe(self, value: object) -> ArrayLeaf | None: ...

    def expand(self, value: object) -> list[tuple[object, object]] | None: ...

    def take(
        self, arrays: Mapping[str, Any], plan: SamplePlan
    ) -> dict[str, NDArray[np.generic]]: ...


class Profiler(Observer):
    """Looks at a training state every ``interval_steps`` steps, at a few thousand elements of each
    class; the rest never leaves its device.

    Call ``observe`` after every step, with the nested state that a checkpoint would hold: torch
    tensors, JAX or NumPy arrays. Between the intervals it only takes note of loss and gradient
    norm. ``profile`` says in the end what was stable, from which step.

    ``interval_steps``: between two looks; best the interval of the checkpoints. Larger: cheaper, a
    coarser stable start. ``sample``: blocks of 64 elements for each class of leaves (weights,
    masters, moments). Larger: less noise, more to copy. ``optimizer``: the constants of Adam where
    the state does not hold them (optax without ``inject_hyperparams``). ``source``: a name for the
    run, kept in the profile.
    """

    def _flatten(self, state: object) -> Flat:
        return flatten(state)

    def _take(self, arrays: Mapping[str, object], plan: SamplePlan) -> Samples:
        groups: dict[str, dict[str, object]] = {}
        for path in plan.starts:
            groups.setdefault(package_of(arrays[path]), {})[path] = arrays[path]
        found: dict[str, NDArray[np.generic]] = {}
        for package, some in groups.items():
            adapter = _adapter(package)
            found |= (
                {p: take_numpy(a, plan.elements(p)) for p, a in some.items()}
                if adapter is None
                else adapter.take(some, plan)
            )
        return found


def flatten(state: object) -> Flat:
    """A state of any framework taken apart, nothing copied."""
    return tree.flatten(state, _describe, _expand)


def take_numpy(array: object, elements: NDArray[np.int64]) -> NDArray[np.generic]:
    """Elements of a host array by their offsets in C order."""
    host = np.asarray(array)
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
    """The framework that the type, or one that it derives from, comes from; empty for none."""
    packages = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return next((package for package in packages if package in _ADAPTERS), "")


def _adapter(package: str) -> Adapter | None:
    return cast(Adapter, import_module(_ADAPTERS[package])) if package else None
