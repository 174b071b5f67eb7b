"""Encode JAX arrays on their devices with XLA custom calls.

The comparison runs on the device of the array, and only changes leave it. The base is donated to
every call and updated in place. Nothing is registered with JAX before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import memory
from deltacheck.codec.base import (
    HEAD_ENTRIES,
    MORE_PIECES,
    ROW_WIDTH,
    STREAMS,
    U8,
    U64,
    Encoded,
    EncodedGroup,
    GroupJob,
    GroupSpan,
)
from deltacheck.codec.native import NativeCodec

# The smallest size of a payload. Larger ones are powers of two, because XLA compiles a program for
# each size.
_LEAST_PAYLOAD_BYTES = 4096
# XLA may store several of these in a byte, while NumPy and the format use a byte for each. float6
# is unknown to older FFI headers.
_PACKED = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
_shaped: Any = jax.ShapeDtypeStruct  # its constructor has no types


def available() -> bool:
    """Return ``True`` if this build of the extension has XLA handlers."""
    return "cpu" in _registered()


class FfiCodec:
    """A codec whose bases are single-device arrays of any shape and dtype.

    ``encode`` and ``encode_group`` consume their bases. A program is compiled once for
    each list of shapes, dtypes and bounds in a group. On the CPU neither array is copied, but until
    the call returns the output takes address space for as many bytes as the group has. On a GPU it
    takes twice that in device memory, and four times that of ordered leaves. A NumPy view of a base
    that still exists makes JAX copy the base instead of donating it.

    Args:
        window_bytes: The most bytes of a group, unless one leaf is larger. Larger: fewer calls;
            smaller: less memory.
    """

    run_bytes: int | None = None  # a slice of a jax.Array is a copy

    def __init__(self, window_bytes: int = 256 << 20) -> None:
        self.window_bytes = window_bytes

    def copy(self, current: jax.Array, out: jax.Array | None) -> jax.Array:
        """Return a new array that holds ``current``.

        It uses the memory of ``out``, which is consumed, if shape, dtype and device are equal.
        """
        if (
            out is None
            or out.shape != current.shape
            or out.dtype != current.dtype
            or out.sharding != current.sharding
        ):
            return current.copy()
        copied: jax.Array = _copy_into(current, out)
        return copied

    def host(self, base: jax.Array) -> U8:
        """Return the base's bytes in host memory."""
        return memory.as_bytes("base", np.asarray(base))

    def encode(
        self,
        current: jax.Array,
        base: jax.Array | None,
        bounds: U64,
        word_bytes: int,
        *,
        ordered: bool = False,
    ) -> tuple[Encoded, jax.Array | None]:
        """Encode an array, as the protocol defines it."""
        if base is None:
            bounds = memory.checked_bounds(
                bounds, _checked_device_array("current", current), word_bytes
            )
            # Without a base there is nothing to compare, and all bytes go to the host in any case.
            return NativeCodec().encode(np.asarray(current), None, bounds, word_bytes)[0], None
        [group] = self.encode_group(
            [GroupJob(current, base, bounds, word_bytes, ordered)], lambda size: None, lambda: None
        )
        return group.encoded, group.bases[0]

    def takes(self, device: jax.Device) -> bool:
        """Return ``True`` if arrays on this device can be encoded there."""
        return _platform(device) in _registered()

    def grouped(self, current: Any, base: Any) -> bool:
        """Return ``True`` if the leaf has a base that ``encode_group`` can update."""
        return isinstance(base, jax.Array)

    def encode_group(
        self,
        jobs: Sequence[GroupJob],
        make_room: Callable[[int], None],
        all_read: Callable[[], None],
    ) -> Iterator[EncodedGroup]:
        """Encode jobs, as ``GroupCodec`` defines it; leaves of one device share a call."""
        first = 0
        while first < len(jobs):
            total = _checked_job(jobs[first])
            stop = first + 1
            while (
                stop < len(jobs)
                and jobs[stop].current.sharding.device_set
                == jobs[first].current.sharding.device_set
            ):
                job_bytes = _checked_job(jobs[stop])
                # An empty leaf is never passed to XLA: it has a call of its own, which does
                # nothing.
                if total == 0 or job_bytes == 0 or total + job_bytes > self.window_bytes:
                    break
                total, stop = total + job_bytes, stop + 1
            make_room(total)
            group = _encoded(first, jobs[first:stop], total)
            first = stop
            # Before the last result is handed out: the caller may let the training go on while it
            # stores that.
            if first == len(jobs):
                all_read()
            yield group


# --- the programs ---------------------------------------------------------------------------------


def _encoded(first: int, jobs: Sequence[GroupJob], total: int) -> EncodedGroup:
    """Encode ``jobs``, which have ``total`` bytes on one device, in one call."""
    bounds = tuple(job.bounds.tobytes() for job in jobs)
    word_bytes = tuple(job.word_bytes for job in jobs)
    spans = [GroupSpan(first + number, 0, job.bounds.size - 1) for number, job in enumerate(jobs)]
    if total == 0:
        empty = Encoded(np.empty((0, ROW_WIDTH), np.uint32), {})
        return EncodedGroup(
            spans,
            empty,
            {span.job: job.base for span, job in zip(spans, jobs, strict=True)},
            None,
        )
    platform = _platform_of(jobs[0].current)
    _require_handlers(platform)
    currents, bases = tuple(job.current for job in jobs), tuple(job.base for job in jobs)
    ordered = tuple(job.ordered for job in jobs)
    new_bases, (rows, head, payload, *digest_words) = _encode(
        currents, bases, bounds, word_bytes, ordered, platform
    )
    # The head is small and comes first. It says how much of the payload is used.
    entries = np.asarray(head).reshape(-1).view(np.uint64)
    count, overflow, sizes = int(entries[0]), bool(entries[1]), entries[2:]
    # The payload has room for every chunk as it is, so this cannot occur by any input.
    if overflow:
        raise RuntimeError(
            f"a payload of {payload.size} bytes did not hold {int(sizes.sum())}; this is a defect,"
            " please report it"
        )
    streams = _streams(_fetched(payload, int(sizes.sum())), sizes)
    # The device writes (high, low) pairs of 64 bits; JAX may be limited to 32 bits.
    digests = np.asarray(digest_words[0])[:count].copy().view(np.uint64) if digest_words else None
    bases_by_job = {span.job: base for span, base in zip(spans, new_bases, strict=True)}
    return EncodedGroup(
        spans,
        # A copy, so that the table of all chunks can be freed.
        Encoded(np.asarray(rows)[:count].copy(), streams),
        bases_by_job,
        digests,
    )


# The bounds are static and therefore bytes: JAX compares and hashes static arguments.
@partial(
    jax.jit,
    static_argnames=("bounds", "word_bytes", "ordered", "platform"),
    donate_argnames="bases",
)
def _encode(
    currents: tuple[jax.Array, ...],
    bases: tuple[jax.Array, ...],
    bounds: tuple[bytes, ...],
    word_bytes: tuple[int, ...],
    ordered: tuple[bool, ...],
    platform: str,
) -> Any:
    edges = [np.frombuffer(encoded, np.uint64) for encoded in bounds]
    chunks = sum(leaf_edges.size - 1 for leaf_edges in edges)
    sizes = [prod(base.shape) * base.dtype.itemsize for base in bases]
    total = sum(sizes)
    results = [
        *(_shaped(base.shape, base.dtype) for base in bases),
        _shaped((chunks, ROW_WIDTH), np.uint32),
        _shaped((HEAD_ENTRIES, 2), np.uint32),
        # Always large enough, because no chunk is stored in more than its own bytes.
        _shaped((total,), np.uint8),
    ]
    if platform == "CUDA":
        scratch_bytes = sum(
            size * (MORE_PIECES if is_ordered else 1)
            for size, is_ordered in zip(sizes, ordered, strict=True)
        )
        results += [
            _shaped((chunks, 4), np.uint32),
            _shaped((_device().workspace_bytes(chunks, scratch_bytes),), np.uint8),
        ]
    call: Any = jax.ffi.ffi_call(
        f"deltacheck_encode_{platform.lower()}",
        results,
        # The new bases take the memory of the old ones, which the donation allows.
        input_output_aliases={len(currents) + i: i for i in range(len(bases))},
    )
    outputs = call(
        *currents,
        *bases,
        word_bytes=np.array(word_bytes, np.int64),
        chunks=np.array([leaf_edges.size - 1 for leaf_edges in edges], np.int64),
        bounds=np.concatenate(edges).astype(np.int64),
        ordered=np.array(ordered, np.int64),
    )
    if platform == "CUDA":
        outputs = outputs[:-1]  # the workspace
    return tuple(outputs[: len(bases)]), tuple(outputs[len(bases) :])


@partial(jax.jit, static_argnames="size")
def _front(payload: jax.Array, size: int) -> jax.Array:
    return payload[:size]


def _fetched(payload: jax.Array, used: int) -> U8:
    """Return the used part of a payload in host memory.

    On the CPU it is a view. From other devices at most twice the used bytes are copied.
    """
    if _platform_of(payload) != "cpu" and used <= payload.size // 2:
        # Powers of two, so that few programs are compiled.
        payload = _front(payload, max(_LEAST_PAYLOAD_BYTES, 1 << (used - 1).bit_length()))
    return np.asarray(payload)


@partial(jax.jit, donate_argnames="out")
def _copy_into(current: jax.Array, out: jax.Array) -> jax.Array:
    # Update all of `out`. Returning `current` would copy nothing and leave `out` unused.
    return jax.lax.dynamic_update_slice(out, current, (0,) * current.ndim)


@cache
def _device() -> Any:
    """Return the extension's CUDA module; ``None`` if this build has none for this JAX."""
    try:
        from deltacheck import _native_cuda
    # A CPU build. Arrays on a GPU are then encoded in host memory.
    except ImportError:
        return None
    return _native_cuda


@cache
def _registered() -> frozenset[str]:
    """Return the platforms that have handlers. The first call registers them with JAX."""
    from deltacheck import _native

    targets = [
        *_native.registrations(),
        *(_device().registrations() if _device() is not None else ()),
    ]
    for name, capsule, platform in targets:
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return frozenset(platform for _, _, platform in targets)


def _require_handlers(platform: str) -> None:
    if platform not in _registered():
        raise RuntimeError(
            f"deltacheck was built without XLA handlers for {platform}. Build it where jaxlib can"
            " be imported, or set DELTACHECK_FFI_INCLUDE_DIR; those for CUDA need nvcc, too."
        )


def _platform_of(array: jax.Array) -> str:
    """Return the platform of a single-device array."""
    [device] = array.devices()
    return _platform(device)


def _platform(device: jax.Device) -> str:
    """Return the platform name under which handlers are registered for a device."""
    return "CUDA" if device.platform in ("gpu", "cuda") else str(device.platform)


# --- arguments and results ------------------------------------------------------------------------


def _checked_job(job: GroupJob) -> int:
    """Return the bytes of a job's leaf, after checking that it can be encoded.

    Raises:
        ValueError: It cannot.
    """
    total = _checked_device_array("current", job.current)
    memory.checked_bounds(job.bounds, total, job.word_bytes)
    _checked_device_array("base", job.base)
    if job.base.shape != job.current.shape or job.base.dtype != job.current.dtype:
        raise ValueError(
            f"base is {job.base.dtype}{job.base.shape}, current is"
            f" {job.current.dtype}{job.current.shape}"
        )
    return total


def _checked_device_array(name: str, array: jax.Array) -> int:
    """Return the bytes of an array, after checking that it lies on one device.

    Raises:
        ValueError: It does not.
    """
    item = _checked_element(name, array)
    if len(array.sharding.device_set) != 1:
        raise ValueError(
            f"{name} lies on {len(array.sharding.device_set)} devices: encode its shards one by one"
        )
    return array.size * item


def _checked_element(name: str, array: jax.Array) -> int:
    """Return the bytes of an element, after checking that the extension supports it.

    Raises:
        ValueError: It does not.
    """
    if not isinstance(array, jax.Array) or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(
            f"{name} must be a jax.Array of plain numbers, not"
            f" {getattr(array, 'dtype', type(array).__name__)}"
        )
    if array.dtype.name in _PACKED:
        raise ValueError(
            f"{name} is {array.dtype.name}, which XLA packs into parts of bytes: use a host codec,"
            " or .astype(int8)"
        )
    # The array was made while 64 bits were on. A program compiled now would cut it.
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(
            f"{name} is {array.dtype}, which JAX would cut to 32 bits: set jax_enable_x64, or use a"
            " host codec"
        )
    return int(array.dtype.itemsize)


def _streams(payload: NDArray[np.uint8], sizes: U64) -> dict[str, U8]:
    """Return copies of the streams, so that the payload, as large as the leaf, can be freed."""
    ends = np.cumsum(sizes).tolist()
    return {
        name: payload[end - size : end].copy()
        for name, end, size in zip(STREAMS, ends, sizes.tolist(), strict=True)
        if size
    }
