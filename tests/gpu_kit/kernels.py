"""Part 8: the kernels against the host's encoder, and their speed."""

from __future__ import annotations

import numpy as np

from benchmarks.record import Cell, Result, Settings, Table
from deltacheck.codec import default_codec
from deltacheck.codec.base import GroupJob
from deltacheck.leaf.digest import chunk_digests
from tests.contracts.codec import moved, same, words
from tests.gpu_kit.stand_in import accelerator
from tests.gpu_kit.steps import Context, Step

DENSITIES = (0.0, 0.001, 0.02, 0.3, 1.0)
CHUNK_BYTES = 1 << 20


def compare_kernels(context: Context) -> Result:
    """Encode random states on the device and on the host, and compare every bit."""
    import torch

    from deltacheck.backends.torch.capture import windows

    size = 64 << 10 if context.rehearse else 64 << 20
    chunk = size // 3 if context.rehearse else CHUNK_BYTES
    rows: list[list[Cell]] = []
    with accelerator(context) as device:
        for word_bytes, ordered in ((1, False), (2, False), (2, True), (4, False), (8, False)):
            count = size // word_bytes
            bounds = np.append(np.arange(0, count, chunk // word_bytes), count).astype(np.uint64)
            before = words(count, word_bytes, seed=word_bytes)
            for density in DENSITIES:
                after = moved(before, density, most=3)
                current, base = (
                    torch.from_numpy(array.view(np.uint8).copy()).to(context.device)
                    for array in (after, before)
                )
                job = GroupJob(current, base, bounds, word_bytes, ordered)
                # A window has room for all of it, of which ordered chunks take three times theirs.
                groups = list(windows.encode(device, [job], 3 * size, lambda _: None, lambda: None))
                expected, updated = default_codec().encode(
                    after.view(np.uint8),
                    before.view(np.uint8).copy(),
                    bounds,
                    word_bytes,
                    ordered=ordered,
                )
                [group] = groups
                changed = expected.rows[:, 0].tolist()
                digests = chunk_digests(after.view(np.uint8), bounds, word_bytes, changed)
                problems = [
                    name
                    for name, holds in (
                        ("rows or streams", same(group.encoded, expected)),
                        ("shadow", np.array_equal(base.cpu().numpy(), updated)),
                        ("digests", np.array_equal(group.digests, digests)),
                    )
                    if not holds
                ]
                if problems:
                    where = f"{word_bytes}-byte words, {density:.1%} changed, ordered: {ordered}"
                    raise AssertionError(f"{where}: {', '.join(problems)} differ from the host's")
                order = "by class" if ordered else ""
                rows.append([word_bytes, order, density, len(changed), "equal"])
    return Result(
        "kernels against the host",
        f"rows, streams, digests and shadow of {size >> 10} KiB, compared bit for bit",
        [
            Table(
                "states",
                {
                    "word bytes": "count",
                    "order": "text",
                    "changed": "ratio",
                    "chunks written": "count",
                    "bits": "text",
                },
                rows,
            )
        ],
    )


def encode(context: Context) -> Result:
    """Measure the encoder against the device's own copy."""
    from benchmarks import device as encoder

    with accelerator(context) as device:
        if device.native is None:
            raise RuntimeError("the device fails its test, so there is nothing to measure")
        settings = Settings(context.rehearse, context.folder)
        return encoder.encoding(settings, device, context.device)


STEPS = (
    Step("kernels against the host", compare_kernels, needs=("torch",), seconds=20),
    Step("encoder against the device's copy", encode, needs=("torch",), seconds=20),
)
