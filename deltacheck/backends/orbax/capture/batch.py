"""Plan the reads of the arrays of a process that saves alone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import numpy_bytes, specs_of
from deltacheck.backends.orbax.capture.device_copies import DeviceCopies
from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.repeated import KnownArrays
from deltacheck.codec import host_memory
from deltacheck.codec.fingerprints import fingerprints
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.save.job.source import (
    LaterSources,
    LeafSource,
    Sources,
    itself,
    require_fingerprint,
)
from deltacheck.save.save_options import SaveOptions, cache_bytes_of


def planned(flat: Flat, options: SaveOptions, copies: DeviceCopies) -> Sources:
    """Plan the reads of a state.

    Arrays that lie whole in host memory are read behind the training. JAX neither changes nor frees
    an array while it is viewed. But the program may write to the memory of an array that was made
    from a NumPy array without a copy, which its fingerprint shows. A view waits until the array is
    computed. So an array whose computation still runs is copied: the copy is enqueued behind the
    computation, and no donation or deletion of the array affects it. Arrays on accelerators are
    copied there in the same way, if their memory permits.

    Args:
        flat: The state.
        options: Tell whether every leaf is read before ``save`` returns, and how much may be
            copied.
        copies: Makes the copies on accelerators.

    Returns:
        The sources of all leaves by path, ascending. They are made behind the training loop unless
        something must be read before.
    """
    is_eager = options.is_eager
    # By path, as in the torch backend: equal states then give equal segments in both.
    if isinstance(flat, KnownArrays):
        specs: Mapping[str, LeafSpec] = flat.specs
        viewable: Sequence[str] = flat.viewable
    else:
        specs = dict(sorted(specs_of(flat).items()))
        viewable = [path for path in specs if leaves.is_viewable(flat.arrays[path])]
    views: dict[str, NDArray[Any]] = {}
    unviewed: dict[str, LeafSource] = {}
    for path in () if is_eager else viewable:
        array = cast("jax.Array", flat.arrays[path])
        # JAX 0.10.2 crashes if a deleted array is asked for its readiness; a view of it raises.
        if not (array.is_deleted() or array.is_ready()):  # type: ignore[attr-defined] # untyped
            unviewed[path] = LeafSource(specs[path], _Copy(array).take, True)
        elif (view := leaves.whole_view(array)) is not None:
            views[path] = view
    if not is_eager:
        unviewed |= {
            path: LeafSource(specs[path], current, lazy=True, is_own=True)
            for path, current in copies.of(flat.arrays, specs).items()
        }
    rest = [path for path in specs if path not in views and path not in unviewed]
    most_bytes = cache_bytes_of(sum(spec.raw_bytes for spec in specs.values()), options)
    is_later = not is_eager and sum(specs[path].raw_bytes for path in rest) <= most_bytes
    unviewed |= {path: _other(specs[path], flat.arrays[path], is_later) for path in rest}
    seed = secrets.randbits(62)
    contents = fingerprints(
        np.array([view.__array_interface__["data"][0] for view in views.values()], np.uint64),
        np.array([view.nbytes for view in views.values()], np.uint64),
        seed,
    )

    def make() -> Mapping[str, LeafSource]:
        sources = unviewed | {
            path: LeafSource(
                specs[path],
                partial(numpy_bytes, view),
                True,
                check_content=partial(require_fingerprint, path, content, seed),
            )
            for (path, view), content in zip(views.items(), contents.tolist(), strict=True)
        }
        return {path: sources[path] for path in specs}

    return LaterSources(specs, make) if is_later else make()


class _Copy:
    """A copy of an array that XLA makes when the array is computed.

    Args:
        array: The array. It may be donated or deleted afterwards.
    """

    def __init__(self, array: jax.Array) -> None:
        [self._copy] = leaves.enqueued_copies([array])

    def take(self) -> NDArray[np.uint8]:
        """Return the bytes of the array, uint8, 1-D. Waits for the computation."""
        return leaves.bytes_of(self._copy)


def _other(spec: LeafSpec, value: object, is_later: bool) -> LeafSource:
    """Return the source of a leaf that cannot be viewed; ``is_later``: of a copy of it."""
    if is_later:
        return LeafSource(spec, partial(itself, host_memory.copied(leaves.bytes_of(value))), True)
    return LeafSource(spec, partial(itself, value))
