"""The codec of JAX arrays on an accelerator: its path to the CUDA handlers, run on the processor by
the emulator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltacheck.codec import NativeCodec
from deltacheck.codec.base import GroupJob
from deltacheck.leaf.digest import chunk_digests
from tests.codec.test_codec_contract import VectorContract
from tests.contracts.codec import CodecContract, moved, same, words

jax = pytest.importorskip("jax")
ffi = pytest.importorskip("deltacheck.backends.orbax.capture.ffi")
emulated = pytest.importorskip(
    "deltacheck._native_emulated", reason="this build has no emulator (DELTACHECK_EMULATOR=ON)"
)
if not emulated.registrations():
    pytest.skip("this build has no XLA handlers", allow_module_level=True)


@pytest.fixture(
    scope="module", autouse=True, params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> Any:
    """Return the device of the arrays. Under the emulator the processor stands in for a GPU."""
    if request.param == "cuda":
        yield jax.devices("gpu")[0]
        return
    for name, capsule, platform in emulated.registrations():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "_platform", lambda device: "CUDA")
        patch.setattr(ffi, "_device", lambda: emulated)
        patch.setattr(ffi, "_registered", lambda: frozenset({"CUDA"}))
        yield jax.devices("cpu")[0]


def placed(data: Any, device: Any) -> Any:
    return jax.device_put(jax.numpy.array(data, copy=True), device)


class TestDevice(CodecContract, VectorContract):
    @pytest.fixture
    def codec(self, device: Any) -> Any:
        self.device = device
        return ffi.FfiCodec()

    def held(self, data: Any) -> Any:
        return placed(data, self.device)


def test_digests_come_with_the_rows(device: Any) -> None:
    before = words(50_000, 4)
    after = moved(before, 0.02, 3)
    after[20_000:30_000] = before[20_000:30_000]
    bounds = np.array([0, 10_000, 20_000, 30_000, 50_000], np.uint64)
    job = GroupJob(placed(after, device), placed(before, device), bounds, 4)
    [made] = ffi.FfiCodec().encode_group([job], lambda size: None, lambda: None)
    assert made.encoded.rows[:, 0].tolist() == [0, 1, 3]
    assert np.array_equal(made.digests, chunk_digests(after.view(np.uint8), bounds, 4, [0, 1, 3]))


def test_only_what_is_in_use_of_the_payload_is_fetched(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = words(200_000, 2)
    after = moved(before, 0.02, 3)
    fetched = []
    front = ffi._front
    monkeypatch.setattr(
        ffi, "_front", lambda payload, size: fetched.append(size) or front(payload, size)
    )
    job = GroupJob(
        placed(after, device), placed(before, device), np.array([0, 200_000], np.uint64), 2
    )
    [made] = ffi.FfiCodec().encode_group([job], lambda size: None, lambda: None)
    used = sum(stream.size for stream in made.encoded.streams.values())
    assert len(fetched) == 1
    assert used <= fetched[0] < 2 * used
    expected, _ = NativeCodec().encode(after, before.copy(), job.bounds, 2)
    assert same(made.encoded, expected)
