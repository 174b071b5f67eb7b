"""The codec whose bases are JAX arrays: the comparison runs where the arrays are, and only what changed leaves it.

The base is donated to every call and updated in place. Nothing is registered with JAX before the first call.
"""

from __future__ import annotations

from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.base import ROW_WIDTH, STREAMS, U8, U32, U64, Encoded
from deltacheck.codec.native import NativeCodec
from deltacheck.errors import DamagedStream

_HEAD = 1 + len(STREAMS)  # rows, then the bytes of each stream
_LEAST_PAYLOAD_BYTES = 4096
# XLA may keep several in a byte, while NumPy and the format take a byte for each; and float6, which older FFI headers do not know.
_PACKED = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
_shaped: Any = jax.ShapeDtypeStruct  # JAX leaves its constructor without types


def available() -> bool:
    """Whether this build of the extension has XLA handlers."""
    return bool(_registered())


class FfiCodec:
    """Bases are single-device ``jax.Array`` of any shape and dtype, and are consumed by ``encode`` and ``decode``.

    Compiles once for each shape, dtype and number of chunks. On the CPU neither array is copied, but the output takes address space for as
    many bytes as the leaf has until the call returns. A NumPy view of a base that is still alive makes JAX copy the base instead of donating it.
    """

    name = "ffi"
    run_bytes: int | None = None  # a part of a jax.Array would be a copy

    def copy(self, current: jax.Array, out: jax.Array | None) -> jax.Array:
        """A new array that holds ``current``, in the memory of ``out``, which is consumed, where shape, dtype and device agree."""
        if out is None or out.shape != current.shape or out.dtype != current.dtype or out.sharding != current.sharding:
            return current.copy()
        copied: jax.Array = _copy_into(current, out)
        return copied

    def host(self, base: jax.Array) -> U8:
        return memory.as_bytes("base", np.asarray(base))

    def encode(
        self, current: jax.Array, base: jax.Array | None, bounds: U64, word_bytes: int
    ) -> tuple[Encoded, jax.Array | None]:
        total = _checked_device_array("current", current)
        bounds = memory.checked_bounds(bounds, total, word_bytes)
        if base is None:
            return NativeCodec().encode(np.asarray(current), None, bounds, word_bytes)[0], None
        _checked_device_array("base", base)
        if base.shape != current.shape or base.dtype != current.dtype:
            raise ValueError(f"base is {base.dtype}{base.shape}, current is {current.dtype}{current.shape}")
        if total == 0:
            return Encoded(np.empty((0, ROW_WIDTH), np.uint32), {}), base
        _require_handlers()
        base, rows, head, payload = _encode(current, base, _pairs(bounds), word_bytes)
        sizes = np.asarray(head).reshape(-1).view(np.uint64)
        return Encoded(np.asarray(rows)[: int(sizes[0])].copy(), _streams(np.asarray(payload), sizes[1:])), base

    def apply(self, encoded: Encoded, base: U8, bounds: U64, word_bytes: int) -> None:
        """In host memory, as the protocol has it; ``decode`` is the same on the device."""
        NativeCodec().apply(encoded, base, bounds, word_bytes)

    def decode(self, encoded: Encoded, base: jax.Array, bounds: U64, word_bytes: int) -> jax.Array:
        """``base`` with the chunks of ``encoded`` applied. Consumes ``base``; raises ``DamagedStream``, after which it is lost."""
        total = _checked_device_array("base", base)
        bounds = memory.checked_bounds(bounds, total, word_bytes)
        if encoded.rows.shape[0] > bounds.size - 1:
            raise DamagedStream(f"{encoded.rows.shape[0]} rows for {bounds.size - 1} chunks")
        for name in encoded.streams:
            if name not in STREAMS:
                raise DamagedStream(f"there is no stream {name!r}")
        if total == 0:
            return base
        _require_handlers()
        rows = np.zeros((bounds.size - 1, ROW_WIDTH), np.uint32)
        rows[: encoded.rows.shape[0]] = encoded.rows
        sizes = [encoded.streams[name].size if name in encoded.streams else 0 for name in STREAMS]
        head = _pairs(np.array([encoded.rows.shape[0], *sizes], np.uint64))
        # The next power of two, so that few programs are compiled.
        payload = np.zeros(max(_LEAST_PAYLOAD_BYTES, 1 << (sum(sizes) - 1).bit_length() if sum(sizes) else 0), np.uint8)
        at = 0
        for name, size in zip(STREAMS, sizes, strict=True):
            if size:
                payload[at : at + size] = encoded.streams[name]
                at += size
        try:
            decoded: jax.Array = _apply(base, rows, head, payload, _pairs(bounds), word_bytes)
            return decoded.block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of them depends on the dispatch
            _, refused, why = str(error).partition("DATA_LOSS: ")
            if not refused:
                raise
            raise DamagedStream(why) from error


class Statistics(NamedTuple):
    """One entry for each chunk, as ``deltacheck.codec.statistics`` has them: ``changed``, ``nonfinite`` uint32 ``(chunks,)``; the others float64
    ``(chunks,)`` where JAX knows 64 bits (``jax_enable_x64``), else rounded to float32, where a sum may overflow to infinity.
    """

    changed: jax.Array
    nonfinite: jax.Array
    squared_difference: jax.Array
    squared_base: jax.Array
    largest_difference: jax.Array


def statistics(current: jax.Array, base: jax.Array, bounds: U64 | None = None) -> Statistics:
    """What changed from ``base`` to ``current``, in one pass over both, where they lie. May be traced: under ``jax.jit``, and on sharded
    arrays under ``jax.shard_map(..., check_vma=False)``, where each device gives the rows of its own part, and nothing is gathered.

    ``current``, ``base``: the same shape and dtype, of whole bytes; neither is changed. ``bounds``: uint64 ``(chunks + 1,)``, offsets in
    words (elements of up to 8 bytes; complex128 has two) of the array that the call sees, ascending from 0; by default one chunk. Raises
    ``ValueError`` where arguments do not fit, ``RuntimeError`` where this build has no XLA handlers.
    """
    item = _checked_element("current", current)
    if base.shape != current.shape or base.dtype != current.dtype:
        raise ValueError(f"base is {base.dtype}{base.shape}, current is {current.dtype}{current.shape}")
    word_bytes, total = min(item, 8), prod(current.shape) * item
    if bounds is None:
        bounds = np.array([0, total // word_bytes], np.uint64)
    bounds = memory.checked_bounds(bounds, total, word_bytes)
    _require_handlers()
    chunks = bounds.size - 1
    values = jax.dtypes.canonicalize_dtype(np.float64)
    call: Any = jax.ffi.ffi_call("deltacheck_statistics", (_shaped((chunks, 2), np.uint32), _shaped((chunks, 3), values)))
    counts, numbers = call(current, base, _pairs(bounds))
    return Statistics(*counts.T, *numbers.T)


# --- the programs ------------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="word_bytes", donate_argnames="base")
def _encode(current: jax.Array, base: jax.Array, bounds: jax.Array, word_bytes: int) -> Any:
    results = (
        _shaped(base.shape, base.dtype),
        _shaped((bounds.shape[0] - 1, ROW_WIDTH), np.uint32),
        _shaped((_HEAD, 2), np.uint32),
        _shaped((prod(base.shape) * base.dtype.itemsize,), np.uint8),
    )
    call: Any = jax.ffi.ffi_call("deltacheck_encode", results, input_output_aliases={1: 0})
    return call(current, base, bounds, word_bytes=np.int64(word_bytes))


@partial(jax.jit, static_argnames="word_bytes", donate_argnames="base")
def _apply(base: jax.Array, rows: jax.Array, head: jax.Array, payload: jax.Array, bounds: jax.Array, word_bytes: int) -> Any:
    result = _shaped(base.shape, base.dtype)
    call: Any = jax.ffi.ffi_call("deltacheck_apply", result, input_output_aliases={0: 0})
    return call(base, rows, head, payload, bounds, word_bytes=np.int64(word_bytes))


@partial(jax.jit, donate_argnames="out")
def _copy_into(current: jax.Array, out: jax.Array) -> jax.Array:
    # An update of all of `out`. Returning `current` would copy nothing and leave `out` unused.
    return jax.lax.dynamic_update_slice(out, current, (0,) * current.ndim)


@cache
def _registered() -> tuple[str, ...]:
    from deltacheck import _native

    targets = _native.registrations()
    for name, capsule, platform in targets:
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return tuple(name for name, _, _ in targets)


def _require_handlers() -> None:
    if not _registered():
        raise RuntimeError(
            "deltacheck was built without XLA handlers. Build it where jaxlib can be imported, or set DELTACHECK_FFI_INCLUDE_DIR."
        )


# --- arguments and results -----------------------------------------------------------------------------------------------


def _checked_device_array(name: str, array: jax.Array) -> int:
    """Its bytes; ``ValueError`` where it is not one array on one device."""
    item = _checked_element(name, array)
    if len(array.sharding.device_set) != 1:
        raise ValueError(f"{name} lies on {len(array.sharding.device_set)} devices: encode its shards one by one")
    return array.size * item


def _checked_element(name: str, array: jax.Array) -> int:
    """The bytes of an element; ``ValueError`` where the extension cannot take it."""
    if not isinstance(array, jax.Array) or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(f"{name} must be a jax.Array of plain numbers, not {getattr(array, 'dtype', type(array).__name__)}")
    if array.dtype.name in _PACKED:
        raise ValueError(
            f"{name} is {array.dtype.name}, which XLA packs into parts of bytes: use a host codec, or .astype(int8)"
        )
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(f"{name} is {array.dtype}, which JAX would cut to 32 bits: set jax_enable_x64, or use a host codec")
    return int(array.dtype.itemsize)


def _pairs(numbers: U64) -> U32:
    """64-bit numbers for a JAX that may know 32 bits only: ``(n, 2)``, low half first."""
    return numbers.astype("<u8").view(np.uint32).reshape(-1, 2)


def _streams(payload: NDArray[np.uint8], sizes: U64) -> dict[str, U8]:
    """Copies, so that the payload, as large as the leaf, can go."""
    ends = np.cumsum(sizes).tolist()
    return {
        name: payload[end - size : end].copy() for name, end, size in zip(STREAMS, ends, sizes.tolist(), strict=True) if size
    }
