"""Encode JAX trees: large arrays by XLA on their devices, all others in host memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np

from deltacheck.backends.orbax.capture.shard_chunks import chunks_of_shards
from deltacheck.backends.orbax.state import leaves
from deltacheck.codec import default_codec
from deltacheck.codec.base import U8, U64, Codec, Encoded, EncodedGroup, GroupJob, GroupSpan
from deltacheck.leaf import grid

if TYPE_CHECKING:
    from deltacheck.backends.orbax.capture.ffi import FfiCodec

log = logging.getLogger("deltacheck")

Base: TypeAlias = "jax.Array | U8"

# Arrays of this size and more are encoded by XLA. Each shape is compiled once, which costs more
# than it saves for small leaves.
_XLA_FROM_BYTES = grid.PACK_BELOW_BYTES
# XLA packs several elements of these types into a byte, while the format uses a byte for each. JAX
# cuts the types of the second list to 32 bits unless ``jax_enable_x64`` is set.
_SUB_BYTE = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
_NEED_X64 = ("int64", "uint64", "float64", "complex128")


class _Part(NamedTuple):
    """The chunks of a leaf that one device encodes, from ``first_chunk`` on."""

    leaf: int
    first_chunk: int
    job: GroupJob


class LeafCodec:
    """Encodes leaves as they are in the tree: JAX arrays, typed keys, NumPy arrays.

    A base has the same kind as its leaf.
    """

    run_bytes: int | None = None  # a slice of a jax.Array is a copy

    def __init__(self, xla: FfiCodec | None) -> None:
        self._xla = xla
        self._host: Codec[Any] = default_codec()

    def copy(self, current: Any, out: Base | None) -> Base:
        """Return a base that holds ``current``, in the memory of ``out`` if that fits."""
        if self._xla is None or not self._for_xla(current):
            base: U8 = self._host.copy(
                leaves.bytes_of(current), out if isinstance(out, np.ndarray) else None
            )
            return base
        # The base of a grouped leaf keeps its sharding, so that each device compares its own
        # shards. Otherwise one device encodes the leaf, and holds the base.
        source = (
            current
            if self.grouped(current, out) and not current.is_fully_replicated
            else _gathered(current)
        )
        return self._xla.copy(source, out if isinstance(out, jax.Array) else None)

    def host(self, base: Base) -> U8:
        """Return the base's bytes, without a copy on the processor."""
        return leaves.bytes_of(base)

    def encode(
        self,
        current: Any,
        base: Base | None,
        bounds: U64,
        word_bytes: int,
        *,
        ordered: bool = False,
    ) -> tuple[Encoded, Base | None]:
        """Encode a leaf of the tree, as the protocol defines it."""
        if self._xla is None or not self._for_xla(current):
            if isinstance(base, jax.Array):
                # The leaf was on XLA at the last save and is not now. The host codec writes to its
                # base, and the memory of a JAX array must not be written to.
                base = leaves.bytes_of(base).copy()
            return self._host.encode(
                leaves.bytes_of(current), base, bounds, word_bytes, ordered=ordered
            )
        gathered = _gathered(current)
        return self._xla.encode(
            gathered,
            None if base is None else _beside(gathered, base),
            bounds,
            word_bytes,
            ordered=ordered,
        )

    def grouped(self, current: Any, base: Base | None) -> bool:
        """Return ``True`` if the leaf lies on an accelerator.

        On the processor, calls are so cheap that a group would only cost memory.
        """
        return (
            self._xla is not None and isinstance(current, jax.Array) and not _on_processor(current)
        )

    def encode_group(
        self,
        jobs: Sequence[GroupJob],
        make_room: Callable[[int], None],
        all_read: Callable[[], None],
    ) -> Iterator[EncodedGroup]:
        """Encode leaves, as the protocol defines it.

        Devices encode the shards that they hold. A leaf whose shards are not whole chunks is
        gathered. A leaf that XLA does not support is encoded in host memory.
        """
        parts: list[_Part] = []
        host_jobs: list[int] = []
        for number, job in enumerate(jobs):
            leaf_parts = self._parts(number, job)
            parts += leaf_parts
            if not leaf_parts:
                host_jobs.append(number)
        # A stable sort: the devices one after the other, each with its leaves in order.
        parts.sort(key=lambda part: part.job.current.device.id)
        yield from self._by_xla(jobs, parts, make_room)
        for number in host_jobs:
            current, base, bounds, word_bytes, ordered, _ = jobs[number]
            # At most the whole leaf: no chunk is stored in more than its own bytes.
            make_room(bounds[-1].item() * word_bytes)
            encoded, base = self.encode(current, base, bounds, word_bytes, ordered=ordered)
            yield EncodedGroup(
                [GroupSpan(number, 0, bounds.size - 1)], encoded, {number: base}, None
            )
        all_read()

    def _parts(self, number: int, job: GroupJob) -> list[_Part]:
        """Return a leaf as arrays on single devices, each of whole chunks.

        The result is empty if that needs a copy.
        """
        leaf = job.current
        if not self._for_xla(leaf):
            return []
        if leaf.is_fully_replicated:
            # All devices hold the same content, so one of them is enough.
            replica = leaf.addressable_shards[0].data
            return [
                _Part(number, 0, job._replace(current=replica, base=_beside(replica, job.base)))
            ]
        cut = chunks_of_shards(leaf, job.bounds, job.word_bytes)
        if cut is None:
            return []
        base = _beside(leaf, job.base)
        parts = []
        for shard, first, chunks in cut:
            # Bounds of a job begin at 0. ``first_chunk`` of the part leads back to the leaf.
            bounds = job.bounds[first : first + chunks + 1] - job.bounds[first]
            current, base_shard = (
                leaf.addressable_shards[shard].data,
                base.addressable_shards[shard].data,
            )
            parts.append(
                _Part(number, first, job._replace(current=current, base=base_shard, bounds=bounds))
            )
        return parts

    def _by_xla(
        self, jobs: Sequence[GroupJob], parts: Sequence[_Part], make_room: Callable[[int], None]
    ) -> Iterator[EncodedGroup]:
        if self._xla is None or not parts:
            return
        missing = Counter(part.leaf for part in parts)
        bases: dict[int, list[jax.Array]] = {}
        for group in self._xla.encode_group([part.job for part in parts], make_room, lambda: None):
            spans, new_bases = [], {}
            for span in group.spans:
                part = parts[span.job]
                spans.append(GroupSpan(part.leaf, part.first_chunk + span.first_chunk, span.chunks))
                bases.setdefault(part.leaf, []).append(group.bases[span.job])
                missing[part.leaf] -= 1
                # The base of a leaf is complete with its last shard, which another call may have
                # encoded.
                if missing[part.leaf] == 0:
                    new_bases[part.leaf] = _assembled(jobs[part.leaf].current, bases.pop(part.leaf))
            yield EncodedGroup(spans, group.encoded, new_bases, group.digests)

    def _for_xla(self, leaf: Any) -> bool:
        """Return ``True`` if the handlers support this leaf on its devices."""
        if (
            self._xla is None
            or not isinstance(leaf, jax.Array)
            or leaves.is_key(leaf.dtype)
            or leaf.nbytes < _XLA_FROM_BYTES
        ):
            return False
        name = leaf.dtype.name
        if name in _SUB_BYTE or (name in _NEED_X64 and not leaves.jax_has(name)):
            return False
        return all(self._xla.takes(device) for device in leaf.devices())


def _gathered(leaf: jax.Array) -> jax.Array:
    """Return a leaf as one array on one device."""
    first = leaf.addressable_shards[0]
    array: jax.Array = (
        first.data if leaf.is_fully_replicated else jax.device_put(leaf, first.device)
    )
    return array


def _assembled(like: jax.Array, shards: list[jax.Array]) -> jax.Array:
    """Return the base of a leaf from the bases of its shards. ``like`` is the leaf."""
    if len(shards) == 1:
        return shards[0]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _on_processor(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _beside(current: jax.Array, base: Base) -> jax.Array:
    """Return a base with the shape, dtype and devices of the current array."""
    if isinstance(base, jax.Array):
        return base if base.sharding == current.sharding else jax.device_put(base, current.sharding)
    # After a restore, a base is bytes in host memory. It moves to the devices at the first save. An
    # uncommitted leaf gets an uncommitted base, which JAX may combine with arrays anywhere.
    values = base.view(current.dtype).reshape(current.shape)
    return leaves.on_devices({"": values}, {"": current.sharding if current.committed else None})[
        ""
    ]


@cache
def leaf_codec() -> LeafCodec:
    """Return the codec of this installation.

    Without XLA handlers every leaf is encoded in host memory, and the log says so.
    """
    try:
        from deltacheck.backends.orbax.capture.ffi import FfiCodec, available
    # The host codec gives the same bytes, but every array must come to the host as a whole.
    except ImportError as error:
        log.warning("JAX arrays are encoded in host memory: %s", str(error))
        return LeafCodec(None)
    if not available():
        log.warning(
            "JAX arrays are encoded in host memory: deltacheck was built without XLA handlers"
        )
        return LeafCodec(None)
    return LeafCodec(FfiCodec())
