"""The law of Adam on an accelerator: the files of a save from host memory, and no leaf crosses."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deltacheck
from deltacheck import Policy, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import tensor_codec
from deltacheck.backends.torch.capture.device_memory import DeviceMemory
from deltacheck.codec import adam_law, default_codec
from deltacheck.codec.base import GRADIENT_LAW
from deltacheck.codec.leaf_memory import HostMemory
from deltacheck.errors import SnapshotTorn
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafKind, LeafSpec
from deltacheck.save.job import leaf_capture
from tests.support.accelerators import Device, Emulated
from tests.support.segment_files import methods, segment_files
from tests.support.states import assert_same, kinds, random_tensor

pytest.importorskip(
    "deltacheck._native_emulated", reason="this build has no emulator (DELTACHECK_EMULATOR=ON)"
)

LAW = Policy.exact(law=True)
SHAPE = (301, 295)  # two blocks of a group, the last one with padding
LARGE = (1040, 700)  # so that the samples for the fit are few bytes beside the leaves
LARGE_BYTES = 2 * 3 * 4 * math.prod(LARGE)  # of two groups


class Training:
    """AdamW of two matrices, with bfloat16 gradients and the step counters in host memory.

    Args:
        device: The device of all other tensors.
        shape: The shape of both.
        has_masters: True: bfloat16 weights with float32 masters; false: float32 weights.
    """

    def __init__(
        self, device: Device, shape: tuple[int, int] = SHAPE, *, has_masters: bool
    ) -> None:
        self.device, self.shape, self.has_masters = device, shape, has_masters
        self.random = torch.Generator().manual_seed(0)
        self.weights = [
            torch.nn.Parameter(device.place(torch.randn(shape, generator=self.random) * 0.02))
            for _ in range(2)
        ]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3)
        self.advance(5)

    def advance(self, steps: int = 1) -> None:
        for _ in range(steps):
            for weight in self.weights:
                if weight.requires_grad:
                    gradient = torch.randn(self.shape, generator=self.random) * 1e-3
                    weight.grad = self.device.place(gradient.to(torch.bfloat16).float())
                else:
                    weight.grad = None
            self.optimizer.step()

    def moment(self, number: int, name: str) -> torch.Tensor:
        moment = self.optimizer.state[self.weights[number]][name]
        assert isinstance(moment, torch.Tensor)
        return moment

    def state(self) -> dict[str, Any]:
        """Return the state, whose large tensors are those of the training."""
        optimizer = self.optimizer.state_dict()
        weights: list[torch.Tensor] = list(self.weights)
        if self.has_masters:
            for number, master in enumerate(self.weights):
                optimizer["state"][number] = {
                    **optimizer["state"][number],
                    "master": master.detach(),
                }
            weights = [master.detach().to(torch.bfloat16) for master in self.weights]
        return {
            "model": {f"w{number}": weight for number, weight in enumerate(weights)},
            "optimizer": optimizer,
        }


@pytest.fixture
def counters_on_host(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of one number lie on the host, as the step counters of AdamW do."""
    if isinstance(device, Emulated):
        monkeypatch.setattr(tensor_codec, "accelerator_of", lambda t: device if t.dim() else None)


@pytest.fixture
def crossed(device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the bytes that have come to the host since its last call."""
    sizes: list[int] = []
    pinned, cpu = device.pinned, torch.Tensor.cpu

    def counted_memory(size: int) -> torch.Tensor:
        sizes.append(size)
        return pinned(size)

    def counted_copy(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return cpu(tensor)

    monkeypatch.setattr(device, "pinned", counted_memory)
    monkeypatch.setattr(torch.Tensor, "cpu", counted_copy)

    def count() -> int:
        total = sum(sizes)
        sizes.clear()
        return total

    return count


def copied(state: Any) -> Any:
    """Return a copy of a state in host memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return state


def assert_same_roots(root: Path, host_root: Path, states: list[Any]) -> None:
    """Check files, promises and restored states of two roots."""
    assert segment_files(root) == segment_files(host_root)
    opened, host = deltacheck.open(root), deltacheck.open(host_root)
    assert opened.verify(deep=True) == []
    with Engine(root) as engine:
        for step, state in enumerate(states):
            assert opened.manifest(step).derived == host.manifest(step).derived
            assert_same(state, engine.restore(step))


def both(
    tmp_path: Path, training: Training, events: Iterator[Any], **options: Any
) -> tuple[Path, Path, list[Any]]:
    """Save to a root with a shadow on the device, and to one with a shadow in host memory.

    The state is saved after each of the events.
    """
    roots, states = (tmp_path / "device", tmp_path / "host"), []
    engines = [
        Engine(root, policy=LAW, options=SaveOptions(shadow=shadow, **options))
        for root, shadow in zip(roots, ("device", "host"), strict=True)
    ]
    with engines[0], engines[1]:
        for engine in engines:
            engine.guard(training.optimizer)
        for step, _ in enumerate(events):
            states.append(copied(training.state()))
            for engine in engines:
                engine.save(step, training.state()).result(240)
    return *roots, states


# --- saves ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("counters_on_host")
@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("unreserved", [0, 1 << 40])
def test_saves_have_the_files_of_the_host(
    tmp_path: Path, device: Device, has_masters: bool, unreserved: int
) -> None:
    device.unreserved = unreserved
    training = Training(device, has_masters=has_masters)

    def events() -> Iterator[None]:
        for _ in range(5):
            yield
            training.advance()

    root, host_root, states = both(tmp_path, training, events())
    assert GRADIENT_LAW in methods(root, 4)
    assert_same_roots(root, host_root, states)


@pytest.mark.usefixtures("counters_on_host")
@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("unreserved", [0, 1 << 40])
def test_no_leaf_crosses_to_the_host(
    tmp_path: Path,
    device: Device,
    crossed: Callable[[], int],
    has_masters: bool,
    unreserved: int,
) -> None:
    device.unreserved = unreserved
    training, counts = Training(device, LARGE, has_masters=has_masters), []
    with Engine(tmp_path, policy=LAW, options=SaveOptions(shadow="device")) as engine:
        engine.guard(training.optimizer)
        for step in range(5):
            engine.save(step, training.state()).result(240)
            counts.append(crossed())
            training.advance()
    # The second save shows which weight the state of an optimizer without masters moves.
    whole_saves = 1 if has_masters else 2
    assert min(counts[:whole_saves]) >= LARGE_BYTES
    # Two of twelve bytes are stored. One leaf more would be another sixth.
    assert max(counts[whole_saves:]) < 0.3 * LARGE_BYTES


@pytest.mark.usefixtures("counters_on_host")
@pytest.mark.parametrize("has_masters", [True, False])
def test_a_resumed_run_goes_on_on_the_device(
    tmp_path: Path, device: Device, crossed: Callable[[], int], has_masters: bool
) -> None:
    training, counts, states = Training(device, LARGE, has_masters=has_masters), [], []
    for step in range(4):
        with Engine(tmp_path, policy=LAW, options=SaveOptions(shadow="device")) as engine:
            if step:
                assert_same(states[-1], engine.restore())
            engine.guard(training.optimizer)
            states.append(copied(training.state()))
            crossed()
            engine.save(step, training.state()).result(240)
            counts.append(crossed())
            training.advance()
    assert GRADIENT_LAW in methods(tmp_path, 3)
    assert max(counts[1 if has_masters else 2 :]) < 0.3 * LARGE_BYTES
    with Engine(tmp_path) as engine:
        for step, state in enumerate(states):
            assert_same(state, engine.restore(step))


@pytest.mark.usefixtures("counters_on_host")
@pytest.mark.parametrize("has_masters", [True, False])
def test_states_that_break_the_law_have_the_files_of_the_host(
    tmp_path: Path, device: Device, has_masters: bool
) -> None:
    training = Training(device, has_masters=has_masters)
    first, second = training.weights

    def events() -> Iterator[None]:
        yield
        training.advance()
        yield
        second.requires_grad_(False)
        training.advance()
        yield
        second.requires_grad_(True)
        training.advance(3)  # several steps between two saves
        yield
        with torch.no_grad():  # as after an optimizer that is none of Adam's
            training.moment(0, "exp_avg").normal_()
        yield
        with torch.no_grad():
            training.moment(1, "exp_avg_sq")[3, 5] = math.nan
            first[0, 0] = -math.inf
            if not has_masters:  # the cast of a NaN is not that of a restore
                first[0, 1] = math.nan
        yield
        training.advance()
        yield

    root, host_root, states = both(tmp_path, training, events())
    assert_same_roots(root, host_root, states)


@pytest.mark.usefixtures("counters_on_host")
@pytest.mark.parametrize("value", [math.nan, 2.0])
def test_a_weight_that_is_no_cast_is_stored_as_it_is(
    tmp_path: Path, device: Device, value: float
) -> None:
    training, states = Training(device, has_masters=True), []
    with Engine(tmp_path, policy=LAW, options=SaveOptions(shadow="device")) as engine:
        for step in range(3):
            state = training.state()
            if step == 1:
                # A NaN, too, of other bits than a restore rounds one to.
                state["model"]["w0"].view(torch.int16)[0, 0] = 0x7FFF
                with torch.no_grad():
                    training.weights[0][0, 0] = value
            states.append(copied(state))
            found = kinds(engine.save(step, state))
            assert (found["model/w0"] is LeafKind.DERIVED) == (step != 1), step
            assert found["model/w1"] is LeafKind.DERIVED
            with torch.no_grad():
                training.weights[0][0, 0] = 0.5
        for step, state in enumerate(states):
            assert_same(state, engine.restore(step))


@pytest.mark.usefixtures("counters_on_host")
def test_groups_are_encoded_in_several_calls_if_they_take_much_memory(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, calls = Training(device, has_masters=True), []
    encode_group = tensor_codec.TorchCodec.encode_group

    def counted(codec: Any, jobs: Any, make_room: Any, all_read: Any) -> Any:
        calls.append(len(jobs))
        return encode_group(codec, jobs, make_room, all_read)

    monkeypatch.setattr(tensor_codec.TorchCodec, "encode_group", counted)
    monkeypatch.setattr(leaf_capture, "_MOST_CODED_BYTES", 1)

    def events() -> Iterator[None]:
        for _ in range(3):
            yield
            training.advance()

    root, host_root, states = both(tmp_path, training, events())
    assert calls == [1, 1] * 2
    assert_same_roots(root, host_root, states)


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("leaf", ["master", "exp_avg"])
def test_a_write_before_the_capture_is_told(
    tmp_path: Path, device: Device, slow_encoder: threading.Event, is_seen: bool, leaf: str
) -> None:
    device.unreserved = 0  # so that the save reads the tensors in their place
    training = Training(device, has_masters=True)
    with Engine(tmp_path, policy=LAW, options=SaveOptions(shadow="device")) as engine:
        engine.guard(training.optimizer)
        for step in range(2):
            slow_encoder.set()
            engine.save(step, training.state()).result(240)
            training.advance()
        slow_encoder.clear()
        handle = engine.save(2, training.state())
        written = training.weights[0] if leaf == "master" else training.moment(0, leaf)
        if not is_seen:
            # An alias with a version counter of its own.
            written = torch.from_dlpack(torch.utils.dlpack.to_dlpack(written.detach()))
        with torch.no_grad():
            written.zero_()
        slow_encoder.set()
        error = handle.exception(240)
        assert isinstance(error, SnapshotTorn)
        assert f"optimizer/state/0/{leaf}" in str(error)
    assert deltacheck.open(tmp_path).steps() == [0, 1]


def test_parts_in_several_memories_are_grouped_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Emulated()
    training = Training(device, has_masters=False)
    on_device = {weight.untyped_storage().data_ptr() for weight in training.weights}
    empty = device.empty

    def noted(size: int) -> torch.Tensor:
        memory = empty(size)
        kept.append(memory)
        on_device.add(memory.untyped_storage().data_ptr())
        return memory

    kept: list[torch.Tensor] = []  # so that no address is used again
    monkeypatch.setattr(device, "empty", noted)
    monkeypatch.setattr(
        tensor_codec,
        "accelerator_of",
        lambda t: device if t.untyped_storage().data_ptr() in on_device else None,
    )

    def events() -> Iterator[None]:
        for _ in range(4):
            yield
            training.advance()

    root, host_root, states = both(tmp_path, training, events())
    assert GRADIENT_LAW in methods(root, 3)
    assert_same_roots(root, host_root, states)


# --- operations -----------------------------------------------------------------------------------

HOST = HostMemory(default_codec().host)


def placed(device: Device, values: np.ndarray[Any, Any]) -> torch.Tensor:
    return device.place(torch.from_numpy(values.copy()).view(torch.uint8).reshape(-1))


def words(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Return float32 of random bits: NaN payloads, infinities and subnormals included."""
    return random_tensor(torch.float32, (count,), seed).numpy()


@pytest.mark.parametrize("count", [1024, 87_381, 87_382, 300_001])
def test_a_device_groups_and_picks_as_the_host_does(device: Device, count: int) -> None:
    parts = [words(count, seed) for seed in range(3)]
    memory = DeviceMemory(device)
    expected = HOST.grouped([part.view(np.uint8) for part in parts])
    group = memory.grouped([placed(device, part) for part in parts])
    assert np.array_equal(memory.host(group), expected)
    places = adam_law.sample_places(count)
    element = np.dtype(np.float32)
    picked = memory.picked(group, element, places)
    assert picked.shape == places.shape
    assert picked.tobytes() == HOST.picked(expected, element, places).tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (520, 700)), ("bfloat16", (3000, 700)), ("float32", (1, 1)), ("float32", (0, 4))],
)
def test_a_device_hashes_as_the_host_does(
    device: Device, dtype: str, shape: tuple[int, ...]
) -> None:
    spec = LeafSpec.of("w", shape, dtype)
    content = random_tensor(torch.uint8, (spec.raw_bytes,), 0).numpy()
    digests = DeviceMemory(device).digests(placed(device, content), spec)
    assert digests.shape == (spec.chunk_count, 2)
    assert np.array_equal(digests, HOST.digests(content, spec))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_device_rounds_as_the_host_does(
    device: Device, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr("deltacheck.backends.torch.capture.device_memory._COMPARED", 10_000)
    # All upper halves of a word, with the lower halves at which rounding changes.
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    wide = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1)
    element, memory = dtype_named(dtype).numpy, DeviceMemory(device)
    with np.errstate(all="ignore"):
        narrow = wide.view(np.float32).astype(element).view(np.uint16)
    assert memory.is_cast(placed(device, narrow), placed(device, wide), element)
    for place in range(0, wide.size, 4999):
        wrong = narrow.copy()
        wrong[place] ^= 1
        assert not memory.is_cast(placed(device, wrong), placed(device, wide), element)
        assert not HOST.is_cast(wrong.view(np.uint8), wide.view(np.uint8), element)
