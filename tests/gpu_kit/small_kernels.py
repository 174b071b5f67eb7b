"""Launch kernels: `python -m tests.gpu_kit.small_kernels torch|jax|planted|large [--few]`.

compute-sanitizer runs this program on small inputs of every kind, and Nsight Compute on large ones.
Its last line counts the calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from deltacheck.codec import default_codec
from deltacheck.codec.base import GroupJob
from tests.contracts.codec import CASES, moved, same, words
from tests.gpu_kit.stand_in import accelerator
from tests.gpu_kit.steps import Context

# Of the codec's cases; all of them take minutes under a sanitizer.
EVERY = 6


def inputs(few: bool) -> Iterator[tuple[Any, Any, Any, int]]:
    """Yield (bytes, bytes before, bounds, bytes of a word): all methods, and odd lengths."""
    for word_bytes in (1, 2, 4, 8):
        for count, density in ((3001, 0.02), (20_000, 0.3), (9_999, 1.0)):
            before = words(count, word_bytes)
            after = moved(before, density, most=3)
            bounds = np.array([0, count // 3, count // 2, count], np.uint64)
            yield after.view(np.uint8), before.view(np.uint8), bounds, word_bytes
    if few:
        return
    cases = [case for case in CASES if case.base is not None and case.current.size]
    for case in cases[::EVERY]:
        yield case.current, case.base, case.bounds, case.word_bytes


def through_torch(context: Context, few: bool) -> int:
    """Encode and digest through the engine's path, and return the number of calls."""
    import torch

    from deltacheck.backends.torch.capture import self_test, windows

    calls = 1
    with accelerator(context) as device:
        # Ordered chunks, and groups with a law, too.
        assert self_test.defect(device) == ""
        for current, before, bounds, word_bytes in inputs(few):
            tensor, base = (
                torch.from_numpy(array.copy()).to(context.device) for array in (current, before)
            )
            job = GroupJob(tensor, base, bounds, word_bytes)
            [group] = windows.encode(device, [job], current.size, lambda _: None, lambda: None)
            expected, _ = default_codec().encode(current, before.copy(), bounds, word_bytes)
            assert same(group.encoded, expected)
            calls += 1
    return calls


def through_jax(context: Context, few: bool) -> int:
    """Encode through the XLA handlers, and return the number of calls."""
    import jax

    from deltacheck.backends.orbax.capture import ffi

    device = jax.devices("cpu" if context.rehearse else "gpu")[0]
    codec, calls = ffi.FfiCodec(), 0
    for current, before, bounds, word_bytes in inputs(few):
        if word_bytes == 8:  # JAX has no 8-byte words unless 64-bit types are enabled
            continue
        placed, base = (jax.device_put(array.copy(), device) for array in (current, before))
        encoded, _ = codec.encode(placed, base, bounds, word_bytes)
        expected, _ = default_codec().encode(current, before.copy(), bounds, word_bytes)
        assert same(encoded, expected)
        calls += 1
    return calls


def read_beyond(context: Context, few: bool) -> int:
    """Digest more bytes than were allocated, which memcheck must notice."""
    import torch

    from deltacheck.backends.torch.capture import windows

    with accelerator(context) as device:
        content = torch.zeros(4096, dtype=torch.uint8, device=context.device)
        table = np.zeros(1, windows.CHUNK)
        table["current"], table["words"], table["word_bytes"] = content.data_ptr(), 1 << 20, 4
        placed = torch.from_numpy(table.view(np.uint8).copy()).to(context.device)
        digests = torch.empty(16, dtype=torch.uint8, device=context.device)
        stream = torch.cuda.current_stream().cuda_stream
        device.native.digest(placed.data_ptr(), 1, digests.data_ptr(), stream)
        torch.cuda.synchronize()
    return 1


def encode_large(context: Context, few: bool) -> int:
    """Encode the two states of the goals: bfloat16 of which 2 % changed, and dense float32."""
    import torch

    from benchmarks.device import encoded_once

    size = 64 << 10 if context.rehearse else 256 << 20
    with accelerator(context) as device:
        profiled = nullcontext() if context.rehearse else torch.cuda.profiler.profile()
        with profiled:
            for name, density in (("bfloat16", 0.02), ("float32", 1.0)):
                encoded_once(device, size, context.device, name, density)
    return 2


PROGRAMS = {
    "torch": through_torch,
    "jax": through_jax,
    "planted": read_beyond,
    "large": encode_large,
}


def main() -> None:
    """Run one program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--few", action="store_true", help="leave most of the inputs out")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    context = Context(Path(), Path(), time.monotonic() + 480, options.rehearse)
    print(f"launched: {PROGRAMS[options.program](context, options.few)} calls")


if __name__ == "__main__":
    main()
