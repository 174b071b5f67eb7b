"""Plan the reads of a state's tensors for a save."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.torch.capture.batch import Placements, one_by_one, planned
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_leaves import DeviceLeaves, HeldLeaf
from deltacheck.backends.torch.capture.device_memory import DeviceMemory
from deltacheck.backends.torch.capture.guard import Guarded, unchanged_check
from deltacheck.backends.torch.capture.residents import StateResidents
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.repeated import KnownFlat
from deltacheck.codec import fingerprints
from deltacheck.codec.base import U8
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.save.job.source import LaterSources, LeafSource, Sources, content_check, itself
from deltacheck.save.job.spare_memory import while_claimed
from deltacheck.save.save_options import Settings, cache_bytes_of


class Capture:
    """Plans the reading of every leaf.

    Args:
        settings: The settings of the saves.
    """

    def __init__(self, settings: Settings) -> None:
        self._options = options = settings.options
        # An exact policy reads every leaf once, in the order of the sources. Only then can leaves
        # be copied from a device ahead of their turn.
        self._in_order = settings.policy.is_exact
        self._placements = Placements()
        # The specs of the last save, and where its leaves lie.
        self._last: tuple[object, StateResidents | None] = (None, None)
        self._device_leaves = DeviceLeaves(options.shadow, options.device_cache_bytes)

    def sources(
        self, flat: Flat, find_guarded: Callable[[], Guarded], *, may_be_later: bool = False
    ) -> Sources:
        """Return the sources of the leaves of a state.

        Leaves on an accelerator are read on its side stream.

        Args:
            flat: The state.
            find_guarded: Return the tensors that may be read after ``save`` has returned. It is
                called at most once, and not at all if everything is copied.
            may_be_later: Plan the reads behind the training loop if that is possible.

        Returns:
            The source of each leaf, by path, ascending: the order in which they must be read.
        """
        guarded = cache(find_guarded)
        if may_be_later and isinstance(flat, KnownFlat) and flat.tensors is not None:
            sources = planned(flat, flat.tensors, guarded(), self._placements, self._options)
            if sources is not None:
                return sources
        specs = flat.specs if isinstance(flat, KnownFlat) else dict(sorted(specs_of(flat).items()))
        residents = self._residents_of(flat, specs)
        on_devices = self._device_leaves.held(flat, residents, guarded)
        on_host = residents.on_host
        most_bytes = cache_bytes_of(residents.total, self._options)
        # Beside leaves on devices those of the host are copied. Otherwise the training would wait
        # for the step counter of an optimizer, which lies on the host, until all is encoded.
        is_copied = bool(residents.on_devices) and on_host.size <= most_bytes
        if is_copied:
            make_on_host = partial(
                _own_sources, specs, on_host.paths, on_host.copied_on_host(flat.arrays)
            )
        else:
            values = {path: flat.arrays[path] for path in on_host.paths}
            make_on_host = partial(itself, one_by_one(values, specs, guarded(), 0))
        make = partial(self._made, specs, on_devices.make, make_on_host, most_bytes)
        if may_be_later and on_devices.is_own and (is_copied or not on_host.paths):
            return LaterSources(specs, make, is_own=True)
        all_sources = make()
        # The checks have enqueued copies of samples, which are read on the side streams.
        self._device_leaves.begin()
        return all_sources

    def hold(self) -> None:
        """Make later work of the training wait, on the devices, until the state was read."""
        self._device_leaves.hold()

    def _residents_of(self, flat: Flat, specs: Mapping[str, LeafSpec]) -> StateResidents:
        # States of a known structure have the same specs at each save: this very mapping. Their
        # leaves have the same forms, on the same devices.
        last_specs, residents = self._last
        if residents is None or last_specs is not specs:
            residents = StateResidents.of(flat.arrays, specs)
            self._last = (specs, residents)
        return residents

    def _made(
        self,
        specs: Mapping[str, LeafSpec],
        make_on_devices: Callable[[], Mapping[str, HeldLeaf]],
        make_on_host: Callable[[], Mapping[str, LeafSource]],
        most_bytes: int,
    ) -> dict[str, LeafSource]:
        """Return the sources of all leaves, in the order of ``specs``."""
        on_devices = make_on_devices()
        staged = {
            path: (leaf.device, leaf.content)
            for path in specs
            if (leaf := on_devices.get(path)) and not self._device_leaves.has_shadows(leaf.device)
        }
        # Staging serves its leaves in one order only.
        staging = Staging(staged if self._in_order else {}, most_bytes)
        # Other places at every save, so that a write that one save misses is met by another.
        seed = secrets.randbits(62)
        sources = dict(make_on_host())
        for path, leaf in on_devices.items():
            read: Callable[[], Any]
            if path not in staged:
                read = partial(itself, leaf.content)
            elif self._in_order:
                read = partial(staging.take, path)
            else:
                read = partial(DeviceMemory(leaf.device).host, leaf.content)
            if leaf.aliases:
                alias, *more_aliases = leaf.aliases
                sources[path] = LeafSource(
                    specs[path],
                    read,
                    lazy=True,
                    recheck=unchanged_check(path, alias, more_aliases),
                    check_content=_content_check(path, alias, seed, leaf.device),
                )
            else:
                read = partial(while_claimed, leaf.claim, read)
                sources[path] = LeafSource(specs[path], read, lazy=True, is_own=True)
        return {path: sources[path] for path in specs}


def _own_sources(
    specs: Mapping[str, LeafSpec], paths: Sequence[str], copies: Callable[[], list[U8]]
) -> dict[str, LeafSource]:
    """Return the sources of leaves that were copied for this save."""
    return {
        path: LeafSource(specs[path], partial(itself, copy), lazy=True, is_own=True)
        for path, copy in zip(paths, copies(), strict=True)
    }


def _content_check(
    path: str, alias: torch.Tensor, seed: int, device: Accelerator
) -> Callable[[Any], None]:
    """Return a check that what was read of a leaf on a device is its content of now."""
    # The sample is copied in the order of the training's stream, without a wait.
    content = fingerprints.sampled(leaves.viewed(alias), seed).clone()
    return content_check(path, content, seed, partial(_on_host, device))


def _on_host(device: Accelerator, sample: Any) -> NDArray[np.uint8]:
    if isinstance(sample, np.ndarray):
        return sample
    # On the side stream, which follows both the copy of the sample and the encoding.
    with device.aside():
        host: NDArray[np.uint8] = sample.cpu().numpy()
    return host
