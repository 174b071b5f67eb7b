"""Test the loops of frameworks that write to weights between ``save`` and the next optimizer step.

Moving averages are swapped in, adapters are merged. The save holds the weights as they were.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture import data_property
from deltacheck.save.progress import Progress
from tests.suites.torn import WRITERS, Outcome, engine_run, lightning_run
from tests.support.waiting import open_when_called


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


def trained(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def no_open_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the engines that other tests of this process have left open."""
    monkeypatch.setattr(data_property, "_watchers", ())
    for kind in data_property._covered:
        monkeypatch.delattr(kind, "data")
    monkeypatch.setattr(data_property, "_covered", set())


@pytest.mark.usefixtures("no_open_engine")
def test_data_of_a_parameter_is_as_torch_made_it_without_an_engine(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert "data" not in vars(torch.nn.Parameter)
    with Engine(tmp_path / "a"), Engine(tmp_path / "b"):
        assert "data" in vars(torch.nn.Parameter)
        parameter.data = torch.ones(3)
        assert parameter.data.tolist() == [1, 1, 1]
        assert type(parameter.data) is torch.Tensor
        assert not parameter.data.requires_grad
    assert "data" not in vars(torch.nn.Parameter)
    assert parameter.data.tolist() == [1, 1, 1]


def test_only_parameters_that_a_save_may_still_read_wait(tmp_path: Path) -> None:
    waits = []
    guarded, free = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    with Engine(tmp_path) as engine:
        optimizer = torch.optim.SGD([guarded])  # the engine does not keep it alive
        engine.guard(optimizer)
        wait = engine._guard._before_step
        engine._guard._before_step = lambda: (waits.append(1), wait())[1]
        _ = guarded.data
        assert waits == []
        engine.save(0, {"p": guarded})
        _ = free.data
        assert waits == []
        _ = guarded.data
        assert waits == [1]
        _ = guarded.data  # everything was read by then
        assert waits == [1]


def test_compiled_code_has_no_graph_break_while_a_save_reads_its_weights(tmp_path: Path) -> None:
    module = model()
    optimizer = trained(module)

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        weights = sum(parameter.data.square().sum() for parameter in module.parameters())
        return module(inputs).sum() + weights

    inputs = torch.randn(4, 64)
    expected = loss(inputs)
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        engine.save(0, module.state_dict())
        assert torch._dynamo.explain(loss)(inputs).graph_break_count == 0
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(inputs), expected)
        for name, value in module.state_dict().items():
            assert torch.equal(engine.restore(0)[name], value)


def test_an_average_of_swa_utils_is_saved_as_it_was(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    """``AveragedModel`` belongs to no optimizer, so it is read before ``save`` returns."""
    module = model()
    optimizer = trained(module)
    average = torch.optim.swa_utils.AveragedModel(module)
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        wanted = copy.deepcopy(average.state_dict())
        engine.save(0, {"average": average.state_dict(), "model": module.state_dict()})
        with torch.no_grad():
            average.update_parameters(model().requires_grad_(False))
        slow_encoder.set()
        restored = engine.restore(0)["average"]
        assert all(torch.equal(restored[name], value) for name, value in wanted.items())


def sharded_layer() -> torch.nn.Linear:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = torch.nn.Linear(64, 64)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return layer


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.to_local().fill_(0),
        lambda weight: weight.to_local().numpy().fill(0),
        lambda weight: weight.mul_(0),
    ],
    ids=["local", "numpy", "torch"],
)
def test_a_write_to_a_weight_of_fsdp_tears_the_save(
    tmp_path: Path, slow_encoder: threading.Event, one_rank: Any, write: Any
) -> None:
    """These writes are not announced. The version or the content shows them."""
    layer = sharded_layer()
    optimizer = trained(layer)
    with Engine(tmp_path, process_group=one_rank) as engine:
        engine.guard(optimizer)
        handle = engine.save(0, layer.state_dict())
        assert handle.state == "started"
        with torch.no_grad():
            write(layer.weight)
        slow_encoder.set()
        with pytest.raises(deltacheck.errors.SnapshotTorn, match="leaf 'weight'"):
            handle.result(30)
        assert engine.steps() == []


@pytest.mark.usefixtures("no_open_engine")
def test_data_of_a_weight_of_fsdp_waits_for_the_capture(
    tmp_path: Path,
    slow_encoder: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    one_rank: Any,
) -> None:
    """A DTensor is no instance of the class whose ``data`` is a property from the start."""
    from torch.distributed.tensor import DTensor

    layer = sharded_layer()
    optimizer = trained(layer)
    squares = torch.compile(
        lambda: layer.weight.data.square().sum(), backend="eager", fullgraph=True
    )
    with Engine(tmp_path, process_group=one_rank) as engine:
        engine.guard(optimizer)
        wanted = layer.weight.to_local().detach().clone()
        handle = engine.save(0, layer.state_dict())
        assert handle.state == "started"
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        layer.weight.data.mul_(0)
        assert slow_encoder.is_set()
        handle.result(240)
        stored = engine.restore(0)["weight"]
        assert torch.equal(torch.as_tensor(stored), wanted)
        assert squares().full_tensor().item() == 0
        assert "data" in vars(DTensor)
    assert "data" not in vars(DTensor)


def test_a_merged_adapter_of_peft_waits_for_the_capture(
    tmp_path: Path, slow_encoder: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model(), peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    )
    with Engine(tmp_path) as engine:
        engine.guard(adapted)
        slow_encoder.set()
        engine.save(0, adapted.state_dict()).wait(timeout=240)
        slow_encoder.clear()
        wanted = copy.deepcopy(adapted.state_dict())
        handle = engine.save(1, adapted.state_dict())
        assert handle.state == "started"
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        adapted.merge_adapter()
        assert slow_encoder.is_set()
        restored = engine.restore(1)
        assert all(torch.equal(restored[name], value) for name, value in wanted.items())
        merged = adapted.state_dict()
        assert not all(torch.equal(merged[name], value) for name, value in wanted.items())


@pytest.mark.usefixtures("no_open_engine")
def test_a_watcher_is_removed_with_the_last_engine_that_failed_to_save(tmp_path: Path) -> None:
    def watcher(parameter: Any) -> None:
        raise AssertionError("no access after its removal")

    data_property.add(watcher)
    data_property.remove(watcher)
    data_property.remove(watcher)
    assert torch.nn.Parameter(torch.zeros(1)).data.item() == 0
    with pytest.raises(deltacheck.errors.DeltacheckError), Engine(tmp_path) as engine:
        engine.restore(7)
    assert "data" not in vars(torch.nn.Parameter)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about torch
def test_lightning_saves_while_weights_and_averages_are_swapped(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    for kind in ("EMAWeightAveraging", "WeightAveraging"):
        outcome = lightning_run(tmp_path / kind, 4, lightning, kind)
        assert outcome == Outcome(steps=4)


@pytest.mark.parametrize("kind", ["by_data", "by_foreach", "by_numpy", "by_compiled_code"])
def test_what_swaps_weights_mixes_no_step(tmp_path: Path, kind: str) -> None:
    outcome = engine_run(tmp_path, 4, WRITERS[kind], {})
    assert (outcome.mixed, outcome.broken) == (0, 0)
    assert outcome.steps + outcome.torn == 4
