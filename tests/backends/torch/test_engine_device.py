"""Tensors on an accelerator: the engine's device path, run on the processor by the emulator of the
CUDA encoder.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import device_leaves, self_test
from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture import windows as group
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.codec import default_codec
from deltacheck.codec.base import ORDERED, GroupJob
from deltacheck.leaf.digest import chunk_digests
from deltacheck.leaf.spec import LeafKind
from deltacheck.policy import Policy
from tests.contracts.codec import CASES, Case, moved, same, words
from tests.support.accelerators import Device, Emulated, Real
from tests.support.segment_files import methods, segment_files
from tests.support.states import assert_same, kinds

emulated = pytest.importorskip(
    "deltacheck._native_emulated", reason="this build has no emulator (DELTACHECK_EMULATOR=ON)"
)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the copies that saves make on the device."""
    sizes: list[int] = []
    copied = device_leaves.copied_in_order

    def counted(device: Device, sources: Any, layout: Any) -> Any:
        sizes.extend(layout.sizes.tolist())
        return copied(device, sources, layout)

    monkeypatch.setattr(device_leaves, "copied_in_order", counted)
    return sizes


def bfloat16(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def state(device: Device, seed: int = 0) -> dict[str, torch.Tensor]:
    tensors = {
        "w": bfloat16(300_000, seed),
        "m": torch.randn(700, 300, generator=torch.Generator().manual_seed(seed)),
        "step": torch.tensor(float(seed)),
        "empty": torch.zeros(0),
        "complex": torch.complex(torch.ones(10), torch.zeros(10)),
        "strided": torch.arange(1000).reshape(10, 100).t(),
        "bool": torch.zeros(33, dtype=torch.bool),
    }
    return {name: device.place(tensor) for name, tensor in tensors.items()}


def placed_layer(device: Device) -> torch.nn.Linear:
    layer = torch.nn.Linear(300, 300)
    layer.weight.data, layer.bias.data = (
        device.place(layer.weight.data),
        device.place(layer.bias.data),
    )
    return layer


def trained(device: Device) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    """Return a layer and its optimizer, between a backward pass and a step."""
    layer = placed_layer(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(device.place(torch.ones(300))).sum().backward()
    return layer, optimizer


def host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def changed(before: dict[str, torch.Tensor], share: float = 0.02) -> dict[str, torch.Tensor]:
    after = {name: tensor.clone() for name, tensor in before.items()}
    random = torch.Generator().manual_seed(99)
    for name in {"w", "m"} & after.keys():
        flat = after[name].reshape(-1)
        flat[(torch.rand(flat.numel(), generator=random) < share).to(flat.device)] *= 1.01
    return after


def run(jobs: list[GroupJob], device: Device, window_bytes: int = 1 << 20) -> list[Any]:
    return list(group.encode(device, jobs, window_bytes, lambda size: None, lambda: None))


# --- the codec ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.base is not None and case.current.size], ids=str
)
def test_the_device_gives_the_bytes_of_the_host(case: Case, ordered: bool, device: Device) -> None:
    if ordered and case.word_bytes != 2:
        pytest.skip("only words of 2 bytes are ordered")
    assert case.base is not None
    base = device.place(torch.from_numpy(case.base.copy()))
    [made] = run(
        [
            GroupJob(
                device.place(torch.from_numpy(case.current.copy())),
                base,
                case.bounds,
                case.word_bytes,
                ordered,
            )
        ],
        device,
    )
    expected, updated = default_codec().encode(
        case.current, case.base.copy(), case.bounds, case.word_bytes, ordered=ordered
    )
    assert same(made.encoded, expected)
    assert np.array_equal(base.cpu().numpy(), updated)
    assert np.array_equal(
        made.digests,
        chunk_digests(case.current, case.bounds, case.word_bytes, expected.rows[:, 0].tolist()),
    )


@pytest.mark.parametrize("window_bytes", [1, 20_000, 50_000, 1 << 30])
def test_windows_hold_every_chunk_once_and_no_more_bytes_than_they_may(
    window_bytes: int, device: Device
) -> None:
    jobs, arrays = [], []
    for seed, (count, width) in enumerate([(10_000, 2), (7, 4), (30_000, 4), (0, 4), (5000, 8)]):
        before = words(count, width, seed)
        after = moved(before, 0.05, 3, seed)
        bounds = np.unique(np.array([0, count // 3, count // 2, count], np.uint64))
        now, base = (
            device.place(torch.from_numpy(content.copy().view(np.uint8)))
            for content in (after, before)
        )
        jobs.append(GroupJob(now, base, bounds, width, ordered=width == 2))
        arrays.append(after)
    seen: list[tuple[int, int]] = []
    for made in run(jobs, device, window_bytes):
        chunks = [
            (span.job, span.first_chunk + i) for span in made.spans for i in range(span.chunks)
        ]
        # Ordered chunks need three times their bytes.
        sizes = [
            int(np.diff(jobs[job].bounds)[chunk])
            * jobs[job].word_bytes
            * (3 if jobs[job].ordered else 1)
            for job, chunk in chunks
        ]
        assert sum(sizes) <= window_bytes or len(chunks) == 1
        stored = [chunks[row] for row in made.encoded.rows[:, 0].tolist()]
        expected = [
            chunk_digests(
                arrays[job].view(np.uint8), jobs[job].bounds, jobs[job].word_bytes, [chunk]
            )[0]
            for job, chunk in stored
        ]
        assert np.array_equal(made.digests, np.array(expected, np.uint64).reshape(-1, 2))
        seen += chunks
    assert seen == [
        (number, chunk) for number, job in enumerate(jobs) for chunk in range(job.bounds.size - 1)
    ]
    for job, after in zip(jobs, arrays, strict=True):
        assert np.array_equal(job.base.cpu().numpy(), after.view(np.uint8))


@pytest.mark.parametrize("what", ["rows", "streams", "digests", "base", "whole"])
def test_a_device_that_computes_wrongly_is_found_before_it_is_used(what: str) -> None:
    class Wrong:
        """Flips one bit of what the encoder gives."""

        def __getattr__(self, name: str) -> Any:
            return getattr(emulated, name)

        def encode(self, **arguments: Any) -> None:
            emulated.encode(**arguments)
            table = np.ctypeslib.as_array(_bytes_at(arguments["table"]), (24,)).view(np.uint64)
            at = {
                "rows": arguments["rows"] + 8,
                "streams": arguments["payload"],
                "digests": arguments["digests"],
                "base": int(table[1]),
            }
            if what in at:
                _bytes_at(at[what])[0] ^= 1

        def digest(self, **arguments: Any) -> None:
            emulated.digest(**arguments)
            if what == "whole":
                _bytes_at(arguments["digests"])[0] ^= 1

    assert self_test.defect(Emulated()) == ""
    assert "other bytes than the host" in self_test.defect(Emulated(Wrong()))


def test_every_device_that_torch_sees_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Emulated):
        name = "second"

    monkeypatch.setattr(deltacheck, "_native_cuda", emulated, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = {0: Emulated, 1: Second}
    monkeypatch.setattr(codec, "Accelerator", lambda device, native: devices[device.index](native))
    assert codec.self_tests() == {"emulated": "", "second": ""}


def _bytes_at(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))


def test_a_device_that_fails_or_is_of_another_version_is_not_used() -> None:
    class Failing:
        INTERFACE, CHUNK_BYTES, HEAD_ENTRIES = (
            emulated.INTERFACE,
            emulated.CHUNK_BYTES,
            emulated.HEAD_ENTRIES,
        )

        def problem(self) -> str | None:
            return None

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("CUDA: an illegal instruction was encountered")

    assert "an illegal instruction" in self_test.defect(Emulated(Failing()))
    older = type("Older", (Failing,), {"INTERFACE": emulated.INTERFACE - 1})
    assert "another version" in self_test.defect(Emulated(older()))
    none = type("None", (Failing,), {"problem": lambda self: "there is no CUDA device"})
    assert self_test.defect(Emulated(none())) == "there is no CUDA device"


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shadow", ["auto", "device", "host", "none"])
@pytest.mark.parametrize("unreserved", [0, 1 << 40])
def test_every_save_comes_back_bit_for_bit(
    tmp_path: Path, device: Device, shadow: str, unreserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "WINDOW_BYTES", 200_000)
    device.unreserved = unreserved
    states = [state(device)]
    for _ in range(3):
        states.append(changed(states[-1]))
    with Engine(tmp_path, options=SaveOptions(shadow=shadow)) as engine:
        for step, content in enumerate(states):
            engine.save(step, content).result(240)
        for step, content in enumerate(states):
            assert_same(host(content), engine.restore(step))
    assert deltacheck.open(tmp_path).verify(deep=True) == []
    assert device.begun >= len(states)


def test_changed_weights_are_in_the_order_of_their_classes_as_on_the_host(
    tmp_path: Path, device: Device
) -> None:
    states = [{"w": device.place(bfloat16(300_000))}]
    for _ in range(2):
        states.append(changed(states[-1]))
    for shadow in ("device", "host"):
        root, options = tmp_path / shadow, SaveOptions(shadow=shadow)
        with Engine(root, policy=Policy.auto(), options=options) as engine:
            for step, content in enumerate(states):
                engine.save(step, content).result(240)
        assert methods(root, 2) <= set(ORDERED.values())
    assert segment_files(tmp_path / "device") == segment_files(tmp_path / "host")


@pytest.mark.parametrize("verify", ["none", "commit"])
def test_only_changes_cross_to_the_host(tmp_path: Path, device: Device, verify: str) -> None:
    first = {"w": device.place(bfloat16(2_000_000))}
    raw = first["w"].numel() * 2
    with Engine(tmp_path, options=SaveOptions(verify=verify)) as engine:
        engine.save(0, first).result(240)
        assert device.copied >= raw
        device.copied = 0
        handle = engine.save(1, changed(first))
        assert kinds(handle)["w"] is LeafKind.DELTA
        assert 0 < device.copied < 0.1 * raw


def test_what_nobody_guards_is_saved_as_it_was_when_save_was_called(
    tmp_path: Path, device: Device, slow_encoder: threading.Event
) -> None:
    content = state(device)
    wanted = {name: tensor.cpu().clone() for name, tensor in content.items()}
    with Engine(tmp_path) as engine:
        handle = engine.save(0, content)
        content["w"].zero_()
        slow_encoder.set()
        handle.result(240)
        assert_same(wanted, engine.restore(0))


def kept_open(engine: Engine) -> threading.Event:
    """Return an event without which no save of the engine ends.

    A save that has ended holds nothing back, however early the next optimizer step comes.
    """
    go = threading.Event()
    engine.on_commit(lambda report: go.wait(240))
    return go


def test_an_optimizer_step_is_held_back_on_the_device_until_the_state_is_read(
    tmp_path: Path, device: Device
) -> None:
    device.unreserved = 0
    layer, optimizer = trained(device)
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        go = kept_open(engine)
        for step in range(3):
            wanted = host(copy.deepcopy(layer.state_dict()))
            go.clear()
            engine.save(step, {"model": layer.state_dict(), "optimizer": optimizer.state_dict()})
            held = device.held
            optimizer.step()
            assert device.held == held + 1
            go.set()
            engine.wait()
            assert_same(wanted, engine.restore(step)["model"])


@pytest.mark.parametrize("policy", [Policy.exact(), Policy.auto(derive=False)])
@pytest.mark.parametrize("shadow", ["device", "host"])
def test_training_does_not_wait_for_a_state_that_was_copied_on_the_device(
    tmp_path: Path,
    device: Device,
    slow_encoder: threading.Event,
    shadow: str,
    policy: Policy,
) -> None:
    layer, optimizer = trained(device)
    optimizer.step()
    slow_encoder.set()
    with Engine(tmp_path, policy=policy, options=SaveOptions(shadow=shadow)) as engine:
        engine.guard(optimizer)
        go = kept_open(engine)
        for step in range(3):
            state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()["state"]}
            wanted = copy.deepcopy(state)
            go.clear()
            if step:
                slow_encoder.clear()
            handle = engine.save(step, state)
            held = device.held
            optimizer.step()
            with torch.no_grad():
                layer.weight.zero_()
            # The device waited for the copy within ``save``, and need not for the transfers.
            assert device.held == (held if step else held + 1)
            assert handle.state == "started" or step == 0
            go.set()
            slow_encoder.set()
            handle.result(240)
            restored = engine.restore(step)
            for part in ("model", 0, 1):
                found, expected = (
                    tree["model"] if part == "model" else tree["optimizer"][part]
                    for tree in (restored, wanted)
                )
                assert_same(host(expected), found)


def test_leaves_of_the_host_are_saved_beside_a_device_as_they_were_when_save_was_called(
    tmp_path: Path, device: Device, slow_encoder: threading.Event
) -> None:
    weight = torch.nn.Parameter(device.place(torch.ones(300, 300)))
    optimizer = torch.optim.SGD([weight])
    rows = np.arange(24).reshape(4, 6)
    on_host: dict[str, Any] = {
        # Tensors without a dimension lie on the host.
        "counts": [torch.tensor(float(number)) for number in range(3)],
        "conjugate": torch.tensor(1 + 2j).conj(),
        "rows": rows[:, ::2],
        "empty": np.zeros(0),
        "large": np.zeros(2 << 20, np.uint8),
        "scalar": np.float64(3),
    }
    changing = [*on_host["counts"], rows, on_host["large"]]
    slow_encoder.set()
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        for step in range(4):
            wanted = copy.deepcopy(on_host)
            if step:
                slow_encoder.clear()
            handle = engine.save(step, {"w": weight, **on_host})
            if step:
                engine.before_update()
                assert handle.state == "started"
            for value in changing:
                value += 1
            slow_encoder.set()
            handle.result(240)
            restored = engine.restore(step)
            assert_same(restored.pop("w"), torch.ones(300, 300))
            assert_same(restored, wanted)


def test_copies_are_made_between_the_work_of_the_training_before_and_after_them(
    tmp_path: Path, device: Device, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*rest: Any, **named: Any) -> Any:
            calls.append(name)
            return original(*rest, **named)

        monkeypatch.setattr(owner, name, call)

    weight = torch.nn.Parameter(device.place(torch.ones(300, 300)))
    optimizer = torch.optim.SGD([weight])
    state = {"w": weight, "buffer": device.place(torch.ones(300))}
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        engine.save(0, state).result(240)
        copies.clear()
        monkeypatch.setattr(device, "native", SimpleNamespace(**vars(device.native)))
        for owner, name in ((device, "begin"), (device.native, "copy"), (device, "join")):
            recorded(owner, name)
        # All leaves; then without memory, the one that nothing guards.
        for step, (unreserved, sizes) in enumerate([(1 << 40, [1200, 360_000]), (0, [1200])], 1):
            device.unreserved = unreserved
            calls.clear()
            engine.save(step, state).result(240)
            # The encoder makes more calls later.
            assert calls[:3] == ["begin", "copy", "join"]
            assert copies == sizes
            copies.clear()


def test_guarded_tensors_are_looked_for_once_in_a_save_that_reads_some_of_them_later(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, optimizer = trained(device)
    optimizer.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        guarded, calls = engine._guard.guarded, []
        monkeypatch.setattr(
            engine._guard, "guarded", lambda leaves: (calls.append(1), guarded(leaves))[1]
        )
        # The shadows have no memory at the first save, and there is none for copies at the last.
        for step, (unreserved, expected) in enumerate([(1 << 40, 1), (1 << 40, 0), (0, 1)]):
            device.unreserved = unreserved
            engine.save(step, state).result(240)
            assert len(calls) == expected, step
            calls.clear()


def test_a_large_leaf_of_the_host_delays_no_training_and_a_read_in_save_is_still_followed(
    tmp_path: Path, device: Device, slow_encoder: threading.Event
) -> None:
    weight = torch.nn.Parameter(device.place(torch.ones(300, 300)))
    optimizer = torch.optim.SGD([weight])
    state = {"w": weight, "rows": np.zeros(5 << 20, np.uint8)}
    slow_encoder.set()
    with Engine(tmp_path, options=SaveOptions(host_cache_bytes=4 << 20)) as engine:
        engine.guard(optimizer)
        engine.save(0, state).result(240)
        slow_encoder.clear()
        handle = engine.save(1, state)
        held = device.held
        engine.before_update()
        assert handle.state == "started"
        assert device.held == held + 1
        slow_encoder.set()
        handle.result(240)


def test_a_state_is_copied_only_while_half_of_the_free_memory_holds_it(
    tmp_path: Path, device: Device, copies: list[int]
) -> None:
    weight = torch.nn.Parameter(device.place(torch.ones(256, 1024)))
    size = weight.nbytes
    optimizer = torch.optim.SGD([weight])
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        # The shadow is made at the first save. The memory of a copy is free for the next one.
        for step, (unreserved, is_copied) in enumerate(
            [(4 * size, False), (2 * size - 1, False), (2 * size, True), (size, True)]
        ):
            device.unreserved = unreserved
            engine.save(step, {"w": weight}).result(240)
            assert copies == [size] * is_copied, step
            copies.clear()


@pytest.mark.parametrize("most", [0, 1 << 20, (1 << 20) - 1])
def test_the_memory_of_the_copies_can_be_limited(
    tmp_path: Path, device: Device, copies: list[int], most: int
) -> None:
    weight = torch.nn.Parameter(device.place(torch.ones(256, 1024)))
    optimizer = torch.optim.SGD([weight])
    # A limit also permits more than the half of what is free.
    device.unreserved = weight.nbytes
    with Engine(tmp_path, options=SaveOptions(device_cache_bytes=most)) as engine:
        engine.guard(optimizer)
        for step in range(2):
            engine.save(step, {"w": weight}).result(240)
    assert copies == [weight.nbytes] * (most >= weight.nbytes)


def test_memory_that_was_free_and_is_not_any_more_is_done_without(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    weight = torch.nn.Parameter(device.place(torch.ones(256, 1024)))
    copied = device_leaves.copied_in_order

    def full(*rest: Any) -> Any:
        monkeypatch.setattr(device_leaves, "copied_in_order", copied)
        raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer = torch.optim.SGD([weight])
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        engine.save(0, {"w": weight}).result(240)
        monkeypatch.setattr(device_leaves, "copied_in_order", full)
        engine.save(1, {"w": weight}).result(240)
        assert_same({"w": weight.detach().cpu()}, engine.restore(1))
    assert "out of memory" in caplog.text


def test_training_goes_on_before_what_changed_has_come_to_the_host(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.unreserved = 0
    weight = torch.nn.Parameter(device.place(torch.randn(300, 300)))
    optimizer = torch.optim.SGD([weight])
    go = threading.Event()
    fetch = group._fetch

    def slow(*rest: Any) -> Any:
        assert go.wait(240)
        return fetch(*rest)

    # A device that is full gets no shadow, and the leaf would be copied to the host at once.
    with Engine(tmp_path, options=SaveOptions(shadow="device")) as engine:
        engine.guard(optimizer)
        engine.save(0, {"w": weight}).result(240)
        monkeypatch.setattr(group, "_fetch", slow)
        with torch.no_grad():
            weight *= 1.01
        wanted = weight.detach().clone()
        handle = engine.save(1, {"w": weight})
        held = device.held
        engine.before_update()
        assert device.held == held + 1
        assert handle.state == "started", (
            "the memory may be written to behind the device's reads, not at once"
        )
        go.set()
        handle.result(240)
        assert_same(host({"w": wanted}), engine.restore(1))


@pytest.mark.gpu
def test_the_training_waits_for_the_reads_of_its_tensors_and_for_nothing_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Real()
    device.unreserved = 0  # so that the save reads the tensors in their place
    monkeypatch.setattr(codec, "accelerator_of", lambda t: device if t.is_cuda else None)
    weight = torch.nn.Parameter(device.place(torch.randn(300, 300)))
    optimizer = torch.optim.SGD([weight])
    go = threading.Event()
    # Work on the stream of the saves that does not end before the event is set.
    hold_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go.wait(240))
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        engine.save(0, {"w": weight}).result(240)
        handle = engine.save(1, {"w": weight})
        engine.before_update()
        try:
            with device.aside() as stream:
                driver = ctypes.CDLL("libcuda.so.1")
                assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), hold_back, None) == 0
                behind = device.mark()
            engine.before_update()
            training = torch.cuda.Event()
            training.record()
            waiting = threading.Thread(target=training.synchronize)
            waiting.start()
            waiting.join(240)
            assert not waiting.is_alive(), "the training waits for work behind the reads"
            assert not behind.query()
        finally:
            go.set()
        handle.result(240)


def test_a_write_that_nothing_held_back_is_told(
    tmp_path: Path, device: Device, slow_encoder: threading.Event
) -> None:
    layer = placed_layer(device)
    with Engine(tmp_path) as engine:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        engine.guard(optimizer)
        handle = engine.save(0, layer.state_dict())
        with torch.no_grad():
            layer.weight.zero_()
        slow_encoder.set()
        assert "weight" in str(handle.exception(240))
    assert deltacheck.open(tmp_path).steps() == []


@pytest.mark.parametrize("shadow", ["device", "host"])
def test_frozen_weights_of_a_guarded_module_are_not_copied_on_a_full_device(
    tmp_path: Path,
    device: Device,
    shadow: str,
    copies: list[int],
) -> None:
    device.unreserved = 0
    layer = torch.nn.Linear(300, 300, bias=False).requires_grad_(False)
    layer.weight.data = device.place(layer.weight.data)
    with Engine(tmp_path, options=SaveOptions(shadow=shadow)) as engine:
        engine.guard(layer)
        engine.save(0, layer.state_dict()).result(240)
        assert copies == [300 * 300 * 4]
        engine.save(1, layer.state_dict()).result(240)
        assert copies == [300 * 300 * 4]
        assert_same(host(layer.state_dict()), engine.restore(1))


def test_a_write_to_a_frozen_weight_that_nothing_held_back_is_told(
    tmp_path: Path, device: Device, slow_encoder: threading.Event
) -> None:
    device.unreserved = 0
    layer = torch.nn.Linear(300, 300, bias=False).requires_grad_(False)
    layer.weight.data = device.place(layer.weight.data)
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        slow_encoder.set()
        engine.save(0, layer.state_dict()).result(240)
        slow_encoder.clear()
        handle = engine.save(1, layer.state_dict())
        layer.weight.zero_()
        slow_encoder.set()
        assert "weight" in str(handle.exception(240))
    assert deltacheck.open(tmp_path).steps() == [0]


def test_without_a_shadow_what_changed_is_written_whole_and_the_rest_not_at_all(
    tmp_path: Path, device: Device
) -> None:
    first = state(device)
    second = first | {"w": changed(first)["w"]}
    with Engine(tmp_path, options=SaveOptions(shadow="none")) as engine:
        engine.save(0, first).result(240)
        handle = engine.save(1, second)
        found = kinds(handle)
        assert found["w"] is LeafKind.KEYFRAME
        assert {kind for name, kind in found.items() if name != "w"} == {LeafKind.UNCHANGED}
        assert_same(host(second), engine.restore(1))
        assert_same(host(first), engine.restore(0))


def test_without_enough_device_memory_shadows_lie_on_the_host_and_the_log_says_so(
    tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.free = 1 << 20
    first = state(device)
    states = [first, changed(first)]
    with caplog.at_level(logging.WARNING), Engine(tmp_path) as engine:
        for step, content in enumerate(states):
            handle = engine.save(step, content)
            handle.result(240)
        assert kinds(handle)["w"] is LeafKind.DELTA
        assert_same(host(states[1]), engine.restore(1))
    assert "shadows go to host memory" in caplog.text


def test_a_restored_step_goes_on_as_deltas_with_its_base_on_the_device(
    tmp_path: Path, device: Device
) -> None:
    first = state(device)
    second = changed(first)
    with Engine(tmp_path) as engine:
        engine.save(0, first).result(240)
    with Engine(tmp_path) as engine:
        engine.restore(0)
        handle = engine.save(1, second)
        assert kinds(handle)["w"] is LeafKind.DELTA
        engine.save(2, first).result(240)
        for step, content in enumerate([first, second, first]):
            assert_same(host(content), engine.restore(step))


def test_a_device_that_fails_fails_the_save_and_the_next_writes_whole_leaves(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = state(device)
    second = changed(first)
    with Engine(tmp_path) as engine:
        engine.save(0, first).result(240)
        with monkeypatch.context() as patch:
            patch.setattr(group, "_fetch", lambda *rest: 1 / 0)
            assert "ZeroDivisionError" in str(engine.save(1, second).exception(240))
        handle = engine.save(2, second)
        assert kinds(handle)["w"] is LeafKind.KEYFRAME
        assert engine.steps() == [0, 2]
        assert_same(host(second), engine.restore(2))


def test_a_shadow_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shadow must be"):
        Engine(tmp_path, options=SaveOptions(shadow="gpu"))


# --- staging --------------------------------------------------------------------------------------


def test_staging_copies_ahead_within_its_budget_and_in_order() -> None:
    device = Emulated()
    tensors = {str(i): (device, torch.full((100,), i, dtype=torch.uint8)) for i in range(5)}
    staging = Staging(tensors, budget=250)
    for i in range(5):
        assert staging.take(str(i)).tolist() == [i] * 100
        assert device.copied <= 100 * i + 250
    with pytest.raises(RuntimeError, match="turn of '0'"):
        Staging(tensors, budget=1).take("1")
