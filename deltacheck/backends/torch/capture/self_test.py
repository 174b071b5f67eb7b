"""Test the CUDA encoder on a device before its first use.

A driver, compiler or processor that computes wrong bits would otherwise be noticed only at a
restore.
"""

from __future__ import annotations

import numpy as np
import torch

from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_memory import DeviceMemory
from deltacheck.backends.torch.capture.windows import CHUNK, INTERFACE, encode
from deltacheck.codec.adam_law import Law
from deltacheck.codec.base import (
    GRADIENT_LAW,
    HEAD_ENTRIES,
    LAWS,
    ROW_CHUNK,
    STEPS_LAW,
    U8,
    Encoded,
    EncodedGroup,
    GroupJob,
)
from deltacheck.codec.native import NativeCodec
from deltacheck.leaf.digest import all_chunk_digests, chunk_digests
from deltacheck.leaf.spec import LeafSpec

_FORMS = 5  # of a law


def defect(device: Accelerator) -> str:
    """Return the reason why the device encoder cannot be used; empty if it passes its test.

    It is run once for each device in a process.
    """
    native = device.native
    # A library of another build would read the table with another layout.
    if (INTERFACE, CHUNK.itemsize, HEAD_ENTRIES) != (
        native.INTERFACE,
        native.CHUNK_BYTES,
        native.HEAD_ENTRIES,
    ):
        return "the CUDA encoder is of another version than this package: build it again"
    problem: str | None = native.problem()
    if problem is not None:
        return problem
    try:
        return _wrong_on(device)
    # Errors of CUDA arrive as ``RuntimeError``. Saves then go on with the host encoder.
    except RuntimeError as error:
        return f"the CUDA encoder failed: {error}"


def _wrong_on(device: Accelerator) -> str:
    """Encode a small state, and return the first difference from the host encoder."""
    # A fixed seed, so that a failure can be repeated.
    random = np.random.default_rng(0)
    trials = [
        *(_words(random, word_bytes) for word_bytes in (1, 2, 4, 8)),
        _words(random, 2)._replace(ordered=True),
        *(_group(random, method, form) for method in LAWS for form in range(_FORMS)),
    ]
    jobs = []
    for trial in trials:
        with device.aside():
            current, base = (
                device.empty(content.size).copy_(torch.from_numpy(content.copy()))
                for content in (trial.current, trial.base)
            )
        jobs.append(trial._replace(current=current, base=base))
    for trial, job in zip(trials, jobs, strict=True):
        [group] = encode(device, [job], 1 << 20, lambda size: None, lambda: None)
        with device.aside():
            base = job.base.cpu().numpy()
        spec = LeafSpec.of("", trial.current.shape, "uint8")
        digests = DeviceMemory(device).digests(job.current, spec)
        has_digests = np.array_equal(digests, all_chunk_digests(spec, trial.current))
        if not has_digests or not _is_right(trial, group, base):
            work = "digests of whole leaves" if not has_digests else _name_of(trial)
            return (
                f"the CUDA encoder gave other bytes than the host's for {work}; please report this"
            )
    return ""


def _name_of(trial: GroupJob) -> str:
    if trial.law is not None:
        return f"the law of Adam (method {trial.law[0]})"
    order = " in the order of their classes" if trial.ordered else ""
    return f"words of {trial.word_bytes} bytes{order}"


def _is_right(trial: GroupJob, group: EncodedGroup, base: U8) -> bool:
    """Return true if the device gave what the host gives.

    Args:
        trial: The job, in host memory.
        group: The result of the device.
        base: The new base on the device.
    """
    current, before, bounds, word_bytes, ordered, law = trial
    expected, updated = NativeCodec().encode(
        current, before.copy(), bounds, word_bytes, ordered=ordered, law=law
    )
    digests = chunk_digests(current, bounds, word_bytes, expected.rows[:, ROW_CHUNK].tolist())
    return (
        _are_equal(group.encoded, expected)
        and updated is not None
        and np.array_equal(base, updated)
        and group.digests is not None
        and np.array_equal(group.digests, digests)
    )


def _are_equal(encoded: Encoded, expected: Encoded) -> bool:
    return (
        encoded.streams.keys() == expected.streams.keys()
        and np.array_equal(encoded.rows, expected.rows)
        and all(np.array_equal(encoded.streams[n], expected.streams[n]) for n in expected.streams)
    )


def _words(random: np.random.Generator, word_bytes: int) -> GroupJob:
    """Return three chunks in host memory of which few, some and most words change."""
    words = 40_000 // word_bytes
    bounds = np.array([0, words // 9, words // 3, words], np.uint64)
    before = random.integers(0, 1 << 20, words).astype(f"<u{word_bytes}")
    after = before.copy()
    for first, stop, share in zip(
        bounds[:-1].tolist(), bounds[1:].tolist(), (0.01, 0.3, 0.9), strict=True
    ):
        is_changed = random.random(stop - first) < share
        after[first:stop][is_changed] += random.integers(1, 1000, int(is_changed.sum())).astype(
            after.dtype
        )
    return GroupJob(after.view(np.uint8), before.view(np.uint8), bounds, word_bytes)


def _group(random: np.random.Generator, method: int, form: int) -> GroupJob:
    """Return a group in host memory, one step after its base, or some steps."""
    law = Law(method, form, form, form % 2, eps=1e-8, rate=-1e-3, earlier=5e-4, pull=-1e-4)
    count, unit, small = 3000, np.float32(1), np.float32(1e-3)
    normal = random.standard_normal((4, count), np.float32)
    w, m, v, g = normal[0], small * normal[1], small * small * normal[2] ** 2, small * normal[3]
    if method == GRADIENT_LAW:  # a bfloat16
        g = (g.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    beta1, beta2 = np.float32(law.beta1), np.float32(law.beta2)
    before = np.stack((w, m, v))
    # About as the law says, so that few words differ from the prediction of any form.
    m = m + (unit - beta1) * (g - m)
    v = beta2 * v + ((unit - beta2) * g) * g if method != STEPS_LAW else v
    update = np.float32(law.rate) * (m / (np.sqrt(v) + np.float32(law.eps)))
    after = np.stack((w + update + np.float32(law.pull) * w, m, v))
    bounds = np.array([0, before.size], np.uint64)
    now, base = (content.reshape(-1).view(np.uint8) for content in (after, before))
    return GroupJob(now, base, bounds, 4, law=(method, law.content()))
