"""``offload`` and ``reload``: tensors of an accelerator go to host memory and come back.

On the processor, the accelerator's tensors are those of the host, whose storages torch resizes in
the same way.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import tensor_codec
from deltacheck.leaf.spec import LeafKind
from deltacheck.save.progress import Progress
from tests.support.accelerators import Device, Emulated
from tests.support.states import kinds
from tests.support.waiting import open_when_called

pytest.importorskip(
    "deltacheck._native_emulated", reason="this build has no emulator (DELTACHECK_EMULATOR=ON)"
)


class Training:
    """A layer and its optimizer, with a view of a weight and two tensors in one storage."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(200, 200)
        for parameter in self.layer.parameters():
            parameter.data = device.place(parameter.data)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.1)
        self.row = self.layer.weight.detach()[3]
        both = device.place(torch.arange(1000.0))
        self.first, self.second = both[:400], both[400:]
        self.inputs = device.place(torch.ones(200))

    def step(self) -> None:
        self.layer(self.inputs).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.second += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.layer.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "first": self.first,
            "second": self.second,
        }

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.layer.parameters(), *moments, self.row, self.first, self.second]

    def on_device(self) -> list[torch.Tensor]:
        """Return the tensors that can go away; the step counters of AdamW lie on the host."""
        return [tensor for tensor in self.tensors() if tensor_codec.accelerator_of(tensor)]

    def content(self) -> list[torch.Tensor]:
        return [tensor.detach().cpu().clone() for tensor in self.tensors()]


def trained(device: Device, steps: int = 1) -> Training:
    training = Training(device)
    for _ in range(steps):
        training.step()
    return training


def freed(training: Training) -> list[bool]:
    return [not tensor.untyped_storage().nbytes() for tensor in training.on_device()]


def shadow(engine: Engine) -> dict[str, Any]:
    """Return the shadow of an engine, by path."""
    states = engine._saver.chains.leaves
    return {path: leaf.base for path, leaf in states.items() if leaf.base is not None}


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", ["device", "host", "mapped", "none"])
def test_training_goes_on_with_the_same_objects_and_bits(
    tmp_path: Path, device: Device, kind: str
) -> None:
    training, alone = trained(device), trained(device)
    objects = training.tensors()
    with Engine(tmp_path, options=SaveOptions(shadow=kind)) as engine:
        engine.guard(training.optimizer)
        for step in range(3):
            engine.save(step, training.state())
            engine.offload(training.state())
            assert all(freed(training))
            assert all(isinstance(base, np.ndarray) for base in shadow(engine).values())
            assert device.trimmed == step + 1
            engine.reload()
            assert equal(training.content(), alone.content())
            training.step()
            alone.step()
        assert equal(training.content(), alone.content())
        assert [id(tensor) for tensor in training.tensors()] == [id(tensor) for tensor in objects]
        assert torch.equal(training.row, training.layer.weight[3]), "a view is no view any more"
        assert (
            training.first.untyped_storage().data_ptr()
            == training.second.untyped_storage().data_ptr()
        ), "a storage was split"
        handle = engine.save(3, training.state())
        if kind != "none":
            assert kinds(handle)["second"] is LeafKind.DELTA
        for tensor, restored in zip(
            training.layer.parameters(), engine.restore(3)["model"].values(), strict=True
        ):
            assert torch.equal(tensor.detach().cpu(), restored)
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_one_copy_serves_the_state_and_its_shadow(tmp_path: Path, device: Device) -> None:
    weight = device.place(torch.arange(100_000.0))
    with Engine(tmp_path, options=SaveOptions(shadow="device")) as engine:
        engine.save(0, {"w": weight}).result(240)
        for is_changed in (False, True):
            weight += is_changed
            expected = weight.cpu().clone()
            device.copied = 0
            engine.offload({"w": weight})
            assert device.copied == weight.nbytes * (1 + is_changed)
            engine.reload()
            assert torch.equal(weight.cpu(), expected)
            engine.save(1, {"w": weight}).result(240)


def test_tensors_of_one_storage_are_copied_once(tmp_path: Path, device: Device) -> None:
    both = device.place(torch.arange(1000.0))
    with Engine(tmp_path) as engine:
        engine.offload({"first": both[:400], "rest": both[400:], "again": both.view(10, 100)})
        assert device.copied == both.nbytes
        engine.reload()
    assert torch.equal(both.cpu(), torch.arange(1000.0))


def test_a_host_shadow_is_the_copy_of_an_equal_leaf(tmp_path: Path, device: Device) -> None:
    weight = device.place(torch.arange(100_000.0))
    expected = weight.cpu().clone()
    with Engine(tmp_path, options=SaveOptions(shadow="host")) as engine:
        engine.save(0, {"w": weight}).result(240)
        engine.offload({"w": weight})
        [away] = engine._offload._away
        assert np.shares_memory(away.content.numpy(), shadow(engine)["w"])
        engine.reload()
        assert torch.equal(weight.cpu(), expected)


def test_a_save_of_what_is_away_is_refused_with_the_remedy(tmp_path: Path, device: Device) -> None:
    weight = device.place(torch.ones(5000))
    with Engine(tmp_path) as engine:
        engine.save(0, {"w": weight}).result(240)
        engine.offload({"w": weight})
        # A copy, too: the save would update the shadow, which may be the content of `weight`.
        for state in ({"w": weight}, {"w": device.place(torch.zeros(5000))}):
            with pytest.raises(errors.UnsupportedLeaf, match=r"leaf 'w'.*reload\(\)"):
                engine.save(1, state)
        with pytest.raises(errors.UnsupportedLeaf, match=r"leaf 'w'.*has 0 bytes.*reload"):
            engine.restore(0, into={"w": weight})
        with pytest.raises(errors.UnsupportedLeaf, match=r"leaf 'w'.*has 0 bytes.*reload"):
            engine.offload({"w": weight})
        engine.reload()
        engine.save(1, {"w": weight}).result(240)
        assert engine.steps() == [0, 1]
    assert torch.equal(weight.cpu(), torch.ones(5000))


def test_a_storage_that_got_memory_is_named_and_nothing_is_changed(
    tmp_path: Path, device: Device
) -> None:
    tensors = {name: device.place(torch.full((300,), 1.0 + i)) for i, name in enumerate("abc")}
    with Engine(tmp_path) as engine:
        engine.offload(tensors)
        tensors["b"].untyped_storage().resize_(1200)
        with pytest.raises(errors.TreeMismatch, match=r"leaf 'b' has 1200 bytes.*resize_\(0\)"):
            engine.reload()
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors.values()]
        assert sizes == [0, 1200, 0]
        tensors["b"].untyped_storage().resize_(0)
        engine.reload()
    assert [tensor[299].item() for tensor in tensors.values()] == [1, 2, 3]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_device_without_memory_can_be_asked_again(
    tmp_path: Path, device: Device, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: device.place(torch.full((300,), 1.0 + i)) for i, name in enumerate("abc")}
    with Engine(tmp_path) as engine:
        engine.offload(tensors)
        resize, calls = torch.UntypedStorage.resize_, []

        def full(storage: Any, size: int) -> Any:
            calls.append(size)
            if sum(map(bool, calls)) == failing and size:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return resize(storage, size)

        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", full)
            with pytest.raises(errors.BudgetExceeded, match=r"leaf '.' needs 1200 bytes.*reload"):
                engine.reload()
        assert sum(not t.untyped_storage().nbytes() for t in tensors.values()) == 4 - failing
        engine.reload()
        engine.reload()  # nothing is left to do
    assert [tensor[299].item() for tensor in tensors.values()] == [1, 2, 3]


def test_without_host_memory_everything_stays_as_it_was(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(device)
    expected = training.content()
    with Engine(tmp_path, options=SaveOptions(shadow="device")) as engine:
        engine.save(0, training.state()).result(240)
        pinned, sizes = device.pinned, []

        def full(size: int) -> Any:
            sizes.append(size)
            if len(sizes) == 4:
                raise RuntimeError("cannot allocate memory")
            return pinned(size)

        with monkeypatch.context() as patch:
            patch.setattr(device, "pinned", full)
            with pytest.raises(errors.BudgetExceeded, match=r"Engine\.offload"):
                engine.offload(training.state())
        assert not any(freed(training))
        assert equal(training.content(), expected)
        engine.save(1, training.state()).result(240)


def test_a_failed_copy_leaves_the_storage_free_for_the_next_call(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = device.place(torch.ones(300))
    with Engine(tmp_path) as engine:
        engine.offload({"w": weight})
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", lambda *rest: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.reload()
        assert not weight.untyped_storage().nbytes()
        engine.reload()
    assert torch.equal(weight.cpu(), torch.ones(300))


def test_host_tensors_stay_and_so_does_what_another_library_owns(
    tmp_path: Path, device: Device
) -> None:
    training = trained(device)
    with Engine(tmp_path) as engine:
        engine.offload(training.state())
        steps = [state["step"] for state in training.optimizer.state.values()]
        assert all(step.untyped_storage().nbytes() for step in steps)
        engine.reload()
        # torch does not resize what it does not own.
        foreign = torch.from_dlpack(device.place(torch.ones(300)))
        with pytest.raises(errors.UnsupportedLeaf, match="leaf 'x' lies in memory of another"):
            engine.offload({**training.state(), "x": foreign})
        assert not any(freed(training))


def test_a_save_under_way_has_read_the_state_before_it_goes(
    tmp_path: Path, device: Device, slow_encoder: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.unreserved = 0  # so that the save reads the tensors in their place
    training = trained(device)
    expected = copy.deepcopy(training.layer.state_dict())
    with Engine(tmp_path) as engine:
        engine.guard(training.optimizer)
        handle = engine.save(0, training.state())
        assert handle.state == "started"
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        engine.offload(training.state())
        assert slow_encoder.is_set(), "the state went before it was read"
        handle.result(240)
        engine.reload()
        restored = engine.restore(0)["model"]
        assert all(torch.equal(expected[name].cpu(), restored[name]) for name in expected)


@pytest.mark.parametrize("kind", ["device", "host", "none"])
@pytest.mark.parametrize("unreserved", [0, 1 << 40])
def test_storages_can_be_resized_after_a_save(
    tmp_path: Path, device: Device, kind: str, unreserved: int
) -> None:
    device.unreserved = unreserved
    training = trained(device)
    with Engine(tmp_path, options=SaveOptions(shadow=kind)) as engine:
        engine.guard(training.optimizer)
        for step in range(3):
            engine.save(step, training.state()).result(240)
            training.step()
        assert all(tensor.untyped_storage().resizable() for tensor in training.on_device())


def test_without_a_state_only_the_memory_of_the_engine_goes(tmp_path: Path, device: Device) -> None:
    training = trained(device)
    with Engine(tmp_path, options=SaveOptions(shadow="device")) as engine:
        engine.save(0, training.state()).result(240)
        assert any(isinstance(base, torch.Tensor) for base in shadow(engine).values())
        engine.offload()
        assert all(isinstance(base, np.ndarray) for base in shadow(engine).values())
        assert device.trimmed == 1
        assert not any(freed(training))
        training.step()
        handle = engine.save(1, training.state())
        assert kinds(handle)["model/weight"] is LeafKind.DELTA
        assert torch.equal(engine.restore(1)["second"], training.second.cpu())


def test_what_is_away_comes_back_after_close(tmp_path: Path, device: Device) -> None:
    weight = device.place(torch.arange(300.0))
    with Engine(tmp_path) as engine:
        engine.save(0, {"w": weight})
        engine.offload({"w": weight})
    with pytest.raises(errors.SaveFailed, match="closed"):
        engine.offload({})
    engine.reload()
    assert torch.equal(weight.cpu(), torch.arange(300.0))


def test_a_save_in_which_the_storage_hangs_keeps_the_state(tmp_path: Path, device: Device) -> None:
    weight = device.place(torch.ones(300))
    with Engine(tmp_path) as engine:
        stuck = Progress(0)
        engine._saver.pipeline.stuck.add(stuck)
        with pytest.raises(errors.SaveFailed, match="may still read the state"):
            engine.offload({"w": weight})
        assert weight.untyped_storage().nbytes()
        engine._saver.pipeline.stuck.remove(stuck)


def test_the_shards_of_a_module_of_fsdp2_go_and_come_back(
    tmp_path: Path, device: Device, one_rank: Any
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not isinstance(device, Emulated):
        pytest.skip("the process group is of the host")
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    for layer in (*module, module):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = torch.ones(2, 30)
    module(inputs).sum().backward()
    optimizer.step()
    before = module(inputs).detach().clone()
    with Engine(tmp_path, process_group=one_rank) as engine:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        engine.save(0, state).result(240)
        engine.offload(state)
        locals_ = [parameter.to_local() for parameter in module.parameters()]
        assert not any(local.untyped_storage().nbytes() for local in locals_)
        engine.reload()
        assert torch.equal(module(inputs), before)
        module(inputs).sum().backward()
        optimizer.step()
        engine.save(1, state).result(240)
