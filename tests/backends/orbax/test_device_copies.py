"""Saves of arrays on accelerators, which are copied there. The processor stands in for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp

from deltacheck import Policy
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager
from deltacheck.backends.orbax.capture import device_copies
from deltacheck.backends.orbax.capture.device_copies import DeviceCopies
from deltacheck.backends.orbax.state import leaves


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the memory that every device says is unused; tests change it."""
    answer: dict[str, Any] = {"bytes": 1 << 40}
    monkeypatch.setattr(leaves, "is_on_accelerators", lambda value: isinstance(value, jax.Array))
    monkeypatch.setattr(device_copies, "_unused_bytes", lambda device: answer["bytes"])
    # Arrays on accelerators have no view in host memory.
    monkeypatch.setattr(leaves, "is_viewable", lambda value: False)
    return answer


def state() -> dict[str, Any]:
    return {
        "w": jnp.arange(60_000, dtype=jnp.bfloat16).reshape(200, 300),
        "m": jnp.linspace(0, 1, 50_000),
        "step": jnp.zeros((), jnp.int32),
        "key": jax.random.key(3),
    }


def numbers(tree: Any) -> list[Any]:
    return [
        np.array(jax.random.key_data(leaf) if leaves.is_key(leaf.dtype) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("policy", [Policy.exact(), Policy.auto(derive=False)])
def test_save_returns_before_the_arrays_are_read_and_they_may_be_donated(
    tmp_path: Path, unused: dict[str, Any], slow_encoder: threading.Event, policy: Policy
) -> None:
    advance = jax.jit(
        lambda s: s | {"w": s["w"] * 2, "m": s["m"] + 1, "step": s["step"] + 1}, donate_argnums=0
    )
    slow_encoder.set()
    now, expected = state(), []
    with manager(tmp_path, policy=policy) as saver:
        for step in range(4):
            expected.append(numbers(now))
            if step:
                slow_encoder.clear()
            saver.save(step, args=DeltaSaveArgs(now))
            before, now = now, advance(now)
            assert before["w"].is_deleted()
            slow_encoder.set()
            saver.wait_until_finished()
        for step, wanted in enumerate(expected):
            found = numbers(saver.restore(step, args=DeltaRestoreArgs(now)))
            for one, other in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(one, other)


def test_all_arrays_are_copied_or_none(unused: dict[str, Any]) -> None:
    arrays = {"a": jnp.ones(256), "b": jnp.zeros(256), "c": np.ones(3)}
    copies = DeviceCopies()
    assert copies.of(arrays) == {}, "the shadows of a first save do not exist yet"
    unused["bytes"] = 2 * 2048 - 1
    assert copies.of(arrays) == {}
    unused["bytes"] = None
    assert copies.of(arrays) == {}, "a device that does not know"
    unused["bytes"] = 2 * 2048
    found = copies.of(arrays)
    assert found.keys() == {"a", "b"}
    copy = found["a"]()
    np.testing.assert_array_equal(copy, arrays["a"])
    assert copy.unsafe_buffer_pointer() != arrays["a"].unsafe_buffer_pointer()
    assert copies.of(arrays) == {}, "the first copies are still in use"
    del found, copy
    unused["bytes"] = 2048
    assert copies.of(arrays).keys() == {"a", "b"}, "the memory of the first copies is free again"


def test_memory_that_another_framework_has_taken_is_done_without(
    unused: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(values: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    copies = DeviceCopies()
    copies.of({"a": jnp.ones(8)})
    monkeypatch.setattr(leaves, "enqueued_copies", full)
    assert copies.of({"a": jnp.ones(8)}) == {}
    assert "RESOURCE_EXHAUSTED" in caplog.text


def test_copies_keep_the_sharding_of_each_array(unused: dict[str, Any]) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    arrays = {
        name: jax.device_put(jnp.arange(64.0).reshape(8, 8), jax.NamedSharding(mesh, rule))
        for name, rule in (("rows", spec("x")), ("columns", spec(None, "x")), ("all", spec()))
    }
    copies = DeviceCopies()
    copies.of(arrays)
    found = copies.of(arrays)
    for name, array in arrays.items():
        assert found[name]().sharding == array.sharding
        np.testing.assert_array_equal(found[name](), array)
    # The bytes on each device: half of two arrays, and all of the third.
    del found
    unused["bytes"] = 511
    assert copies.of(arrays) == {}
    unused["bytes"] = 512
    assert copies.of(arrays).keys() == arrays.keys()
