"""The codec that a save of JAX trees goes through: large arrays by XLA where they are, the rest in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from deltacheck import grid
from deltacheck.backends.orbax import leaves
from deltacheck.codec import default_codec
from deltacheck.codec.base import U8, U64, Codec, Encoded, EncodedGroup, GroupJob, GroupSpan

if TYPE_CHECKING:
    from deltacheck.backends.orbax.ffi import FfiCodec

log = logging.getLogger("deltacheck")

Base: TypeAlias = "jax.Array | U8"

# From here on an array goes through XLA. Each shape is compiled once, which for small leaves costs more than reading them.
_XLA_FROM_BYTES = grid.PACK_BELOW_BYTES
_SUB_BYTE = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
_NEED_X64 = ("int64", "uint64", "float64", "complex128")


class LeafCodec:
    """Takes leaves as they lie in the tree: JAX arrays, typed keys, NumPy arrays. A base is of the same kind as its leaf."""

    name = "jax"
    run_bytes: int | None = None  # a part of a jax.Array would be a copy

    def __init__(self, xla: FfiCodec | None) -> None:
        self._xla = xla
        self._host: Codec[Any] = default_codec()

    def copy(self, current: Any, out: Base | None) -> Base:
        """A base that holds ``current``; written into ``out`` where that fits."""
        one = self._for_xla(current)
        if one is None or self._xla is None:
            base: U8 = self._host.copy(leaves.bytes_of(current), out if isinstance(out, np.ndarray) else None)
            return base
        return self._xla.copy(one, out if isinstance(out, jax.Array) else None)

    def host(self, base: Base) -> U8:
        """The base's bytes, without a copy on the processor."""
        return leaves.bytes_of(base)

    def encode(self, current: Any, base: Base | None, bounds: U64, word_bytes: int) -> tuple[Encoded, Base | None]:
        """As the protocol has it; ``current``: a leaf of the tree."""
        one = self._for_xla(current)
        if one is None or self._xla is None:
            if isinstance(base, jax.Array):
                base = leaves.bytes_of(base).copy()
            return self._host.encode(leaves.bytes_of(current), base, bounds, word_bytes)
        return self._xla.encode(one, None if base is None else _beside(one, base), bounds, word_bytes)

    def grouped(self, current: Any, base: Base) -> bool:
        """Whether the leaf lies on an accelerator. On the processor a call costs nothing worth sharing, and a group costs memory."""
        return self._xla is not None and isinstance(current, jax.Array) and not _on_processor(current)

    def encode_group(
        self, jobs: Sequence[GroupJob], make_room: Callable[[int], None], all_read: Callable[[], None]
    ) -> Iterator[EncodedGroup]:
        """As the protocol has it. Leaves that go through XLA share calls; the others are encoded one by one in host memory."""
        on_host: list[int] = []
        window: list[int] = []
        ready: list[GroupJob] = []  # of the window: their arrays on one device
        for number, job in enumerate(jobs):
            one = self._for_xla(job.current)
            if one is None or self._xla is None:
                on_host.append(number)
                continue
            if ready and sum(other.current.nbytes for other in ready) + one.nbytes > self._xla.window_bytes:
                yield from self._by_xla(window, ready, make_room)
                window, ready = [], []
            window.append(number)
            ready.append(job._replace(current=one, base=_beside(one, job.base)))
        if ready:
            yield from self._by_xla(window, ready, make_room)
        for number in on_host:
            current, base, bounds, word_bytes = jobs[number]
            make_room(leaves.bytes_of(current).nbytes)
            encoded, base = self.encode(current, base, bounds, word_bytes)
            yield EncodedGroup([GroupSpan(number, 0, bounds.size - 1)], encoded, {number: base}, None)
        all_read()

    def _by_xla(
        self, numbers: Sequence[int], jobs: Sequence[GroupJob], make_room: Callable[[int], None]
    ) -> Iterator[EncodedGroup]:
        assert self._xla is not None
        for made in self._xla.encode_group(jobs, make_room, lambda: None):
            yield made._replace(
                spans=[span._replace(job=numbers[span.job]) for span in made.spans],
                bases={numbers[job]: base for job, base in made.bases.items()},
            )

    def apply(self, encoded: Encoded, base: U8, bounds: U64, word_bytes: int) -> None:
        """In host memory, as the protocol has it."""
        self._host.apply(encoded, base, bounds, word_bytes)

    def _for_xla(self, leaf: Any) -> jax.Array | None:
        """The leaf as one array on one device, where the handlers take it; else ``None``."""
        if self._xla is None or not isinstance(leaf, jax.Array) or leaves.is_key(leaf.dtype) or leaf.nbytes < _XLA_FROM_BYTES:
            return None
        name = leaf.dtype.name
        if name in _SUB_BYTE or (name in _NEED_X64 and not leaves.jax_has(name)):
            return None
        if not all(self._xla.takes(device) for device in leaf.devices()):
            return None
        if leaf.is_fully_replicated:
            whole: jax.Array = leaf.addressable_shards[0].data
            return whole
        # Chunks are cut from the leaf and not from its shards, so that a chain goes on over a change of sharding.
        gathered: jax.Array = jax.device_put(leaf, leaf.addressable_shards[0].device)
        return gathered


def _on_processor(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


def _beside(current: jax.Array, base: Base) -> jax.Array:
    """A base as an array of the current one's shape and dtype, where that lies."""
    if isinstance(base, jax.Array):
        return base if base.sharding == current.sharding else jax.device_put(base, current.sharding)
    values = base.view(current.dtype).reshape(current.shape)
    return leaves.on_devices({"": values}, {"": current.sharding if current.committed else None})[""]


@cache
def leaf_codec() -> LeafCodec:
    """The codec of this installation; without XLA handlers, which is logged, every leaf is encoded in host memory."""
    try:
        from deltacheck.backends.orbax.ffi import FfiCodec, available
    except ImportError as error:
        log.warning("JAX arrays are encoded in host memory: %s", error)
        return LeafCodec(None)
    if not available():
        log.warning("JAX arrays are encoded in host memory: deltacheck was built without XLA handlers")
        return LeafCodec(None)
    return LeafCodec(FfiCodec())
