"""Frozen weights of a guarded module: read behind the training loop from the second save on, unless
something has written to them.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import deltacheck
from deltacheck import Policy, SaveHandle, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.capture.guard import Guard
from deltacheck.save.job.source import LaterSources
from deltacheck.save.progress import Progress
from tests.support.waiting import open_when_called


def frozen_layer() -> torch.nn.Linear:
    return torch.nn.Linear(60, 60, bias=False).requires_grad_(False)


def begun(engine: Engine, step: int, state: object) -> tuple[SaveHandle, set[str]]:
    """Save, and tell which leaves are left to be read after ``save`` has returned."""
    behind: set[str] = set()
    saver = engine._saver
    save = saver.save

    def told(number: int, tree: Any, sources: Any, *rest: Any, **more: Any) -> Any:
        made = sources.make() if isinstance(sources, LaterSources) else sources
        # A copy, which has nothing to check, was made within ``save``.
        behind.update(path for path, source in made.items() if source.lazy and source.recheck)
        return save(number, tree, sources, *rest, **more)

    saver.save = told  # type: ignore[method-assign]
    try:
        return engine.save(step, state), behind
    finally:
        saver.save = save  # type: ignore[method-assign]


def read_behind(engine: Engine, step: int, state: object) -> set[str]:
    """The leaves that a save which is then waited for has read after ``save`` had returned."""
    handle, behind = begun(engine, step, state)
    handle.result(240)
    return behind


def test_the_second_save_of_a_guarded_frozen_weight_returns_before_it_is_read(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer = frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        first = engine.save(0, layer.state_dict())
        first.wait(
            timeout=240
        )  # read before save returned: the encoder, which is held back, has nothing to read
        second, behind = begun(engine, 1, layer.state_dict())
        assert (second.state, behind) == ("started", {"weight"})
        slow_encoder.set()
        second.wait(timeout=240)
        assert torch.equal(engine.restore(1)["weight"], layer.weight)


def test_of_a_module_only_what_needs_no_gradient_and_is_no_buffer_is_read_behind_the_loop(
    tmp_path: Path,
) -> None:
    model = torch.nn.Sequential(
        frozen_layer(), torch.nn.Linear(60, 8), torch.nn.BatchNorm1d(8, affine=False)
    )
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with Engine(tmp_path) as engine:
        engine.guard(model)
        assert read_behind(engine, 0, model.state_dict()) == set()
        assert read_behind(engine, 1, model.state_dict()) == {"0.weight"}
        engine.guard(optimizer)
        assert read_behind(engine, 2, model.state_dict()) == {"0.weight", "1.weight", "1.bias"}


def test_frozen_weights_of_a_module_that_nobody_guards_are_read_at_once(tmp_path: Path) -> None:
    layer, other = frozen_layer(), frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(other)
        for step in range(3):
            assert read_behind(engine, step, layer.state_dict()) == set()


def test_an_eager_capture_reads_frozen_weights_at_once(tmp_path: Path) -> None:
    layer = frozen_layer()
    with Engine(tmp_path, options=SaveOptions(capture="eager")) as engine:
        engine.guard(layer)
        for step in range(3):
            assert read_behind(engine, step, layer.state_dict()) == set()


def test_a_torch_write_to_a_frozen_weight_before_its_capture_fails_the_save_and_the_next_is_right(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer = frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        engine.save(0, layer.state_dict()).wait(timeout=240)
        handle = engine.save(1, layer.state_dict())
        layer.weight.add_(1)
        slow_encoder.set()
        with pytest.raises(errors.SnapshotTorn, match=r"'weight'.*before_update\(\)"):
            handle.wait(timeout=30)
        assert read_behind(engine, 2, layer.state_dict()) == set()
        assert torch.equal(engine.restore(2)["weight"], layer.weight)
        assert engine.steps() == [0, 2]


def test_a_write_by_way_of_the_parameter_is_seen_where_the_state_has_an_alias_that_counts_apart(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer = frozen_layer()
    layer.weight = torch.nn.Parameter(torch.ones(60, 60), requires_grad=False)
    assert layer.weight._version == layer.weight.data._version == 0
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        engine.save(0, {"w": layer.weight.data}).wait(timeout=240)
        handle, behind = begun(engine, 1, {"w": layer.weight.data})
        assert behind == {"w"}
        layer.weight.add_(1)
        slow_encoder.set()
        assert isinstance(handle.exception(240), errors.SnapshotTorn)


@pytest.mark.parametrize("announce", [True, False])
def test_before_update_waits_until_frozen_weights_are_read(
    tmp_path: Path, slow_encoder: threading.Event, monkeypatch: pytest.MonkeyPatch, announce: bool
) -> None:
    """A merge through ``.data`` right after the save, which waits even if it is not announced."""
    layer = frozen_layer()
    wanted = copy.deepcopy(layer.state_dict())
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        engine.save(0, layer.state_dict()).wait(timeout=240)
        handle = engine.save(1, layer.state_dict())
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        if announce:
            engine.before_update()
            # By then the encoder, or this thread itself, has read them.
            assert handle.state != "started"
        layer.weight.data.add_(1)
        assert slow_encoder.is_set()
        assert torch.equal(engine.restore(1)["weight"], wanted["weight"])


def by_torch(weight: torch.nn.Parameter) -> None:
    weight.mul_(2)


def by_data(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(2)


def by_numpy(weight: torch.nn.Parameter) -> None:
    weight.numpy()[0, :] = 7


def to_other_memory(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data + 1


def swapped(weight: torch.nn.Parameter) -> None:
    torch.utils.swap_tensors(
        weight, torch.nn.Parameter(torch.ones_like(weight), requires_grad=False)
    )


@pytest.mark.parametrize(
    ("write", "behind"),
    [
        (by_torch, False),
        (by_data, True),
        (by_numpy, True),
        (to_other_memory, False),
        (swapped, False),
    ],
)
def test_what_is_written_to_a_frozen_weight_between_two_saves_is_stored(
    tmp_path: Path, write: Callable[[Any], None], behind: bool
) -> None:
    """``behind``: the write leaves no trace, and so the weight is read behind the loop, every byte
    of it all the same.
    """
    layer = frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        for step in range(2):
            read_behind(engine, step, layer.state_dict())
        before = layer.weight.detach().clone()
        write(layer.weight)
        assert not torch.equal(before, layer.weight)
        assert (read_behind(engine, 2, layer.state_dict()) == {"weight"}) is behind
        assert torch.equal(engine.restore(2)["weight"], layer.weight)
        assert torch.equal(engine.restore(1)["weight"], before)
        assert read_behind(engine, 3, layer.state_dict()) == {"weight"}


def test_a_frozen_weight_that_is_written_to_at_every_step_is_always_read_at_once(
    tmp_path: Path,
) -> None:
    target = frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(target)
        for step in range(4):
            target.weight.lerp_(torch.ones_like(target.weight), 0.1)
            assert read_behind(engine, step, target.state_dict()) == set()


def test_an_alias_that_is_written_to_at_every_step_is_always_read_at_once(tmp_path: Path) -> None:
    layer = frozen_layer()
    alias = layer.weight.data  # counts apart
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        for step in range(4):
            alias.add_(1)
            assert read_behind(engine, step, {"w": alias}) == set()


def test_another_parameter_in_the_place_of_a_frozen_one_is_read_at_once(tmp_path: Path) -> None:
    layer = frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        for step in range(3):
            layer.weight = torch.nn.Parameter(
                layer.weight.detach(), requires_grad=False
            )  # the same memory and version
            assert read_behind(engine, step, layer.state_dict()) == set()


def test_a_weight_is_read_behind_the_loop_while_it_is_frozen(tmp_path: Path) -> None:
    layer = frozen_layer()
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        told = []
        for step, needed in enumerate([False, False, True, False, False]):
            layer.requires_grad_(needed)
            told.append(read_behind(engine, step, layer.state_dict()) == {"weight"})
        assert told == [False, True, False, False, True]


def test_a_module_that_is_gone_is_forgotten_and_a_save_under_way_is_as_it_was(
    tmp_path: Path, slow_encoder: threading.Event
) -> None:
    layer = frozen_layer()
    wanted, gone = layer.weight.detach().clone(), weakref.ref(layer)
    with Engine(tmp_path) as engine:
        engine.guard(layer)
        engine.save(0, layer.state_dict()).wait(timeout=240)
        handle, behind = begun(engine, 1, layer.state_dict())
        assert behind == {"weight"}
        del layer
        gc.collect()
        assert gone() is None
        slow_encoder.set()
        handle.wait(timeout=240)
        assert torch.equal(engine.restore(1)["weight"], wanted)
        assert engine._guard.guarded().frozen == {}


def test_tied_frozen_weights_and_parts_of_one_are_read_behind_the_loop(tmp_path: Path) -> None:
    layer, tied = frozen_layer(), frozen_layer()
    tied.weight = layer.weight
    model = torch.nn.ModuleList([layer, tied])
    with Engine(tmp_path) as engine:
        engine.guard(model)
        engine.guard(layer)
        state = model.state_dict() | {"rows": layer.weight[:7]}
        read_behind(engine, 0, state)
        assert read_behind(engine, 1, state) == {"0.weight", "rows"}  # a tied leaf is saved once
        restored = engine.restore(1)
        assert restored["0.weight"] is restored["1.weight"]
        assert torch.equal(restored["rows"], layer.weight[:7])


def test_a_frozen_parameter_in_the_memory_of_a_trained_one_is_read_at_once(tmp_path: Path) -> None:
    flat = torch.zeros(100)
    model = torch.nn.ParameterDict({"trained": flat[:50]})
    model["frozen"] = torch.nn.Parameter(flat[50:], requires_grad=False)
    model["alone"] = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    assert model["trained"].requires_grad
    with Engine(tmp_path) as engine:
        engine.guard(model)
        read_behind(engine, 0, model.state_dict())
        assert read_behind(engine, 1, model.state_dict()) == {"alone"}


def test_a_frozen_parameter_that_an_optimizer_owns_is_guarded_by_its_steps(tmp_path: Path) -> None:
    model = torch.nn.Sequential(frozen_layer(), torch.nn.Linear(60, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        engine.guard(model)
        for step in range(3):
            assert read_behind(engine, step, model.state_dict()) == {
                "0.weight",
                "1.weight",
                "1.bias",
            }
            model[0].weight.add_(1)


def test_parameters_that_have_no_bytes_of_their_own_do_not_disturb_the_guard() -> None:
    model = torch.nn.Module()
    values = {
        "plain": torch.ones(3),
        "sparse": torch.eye(3).to_sparse(),
        "nowhere": torch.empty(3, device="meta"),
        "empty": torch.empty(0),
        "wrapped": TwoTensor(torch.ones(3), torch.ones(3)),
        "turned": torch.ones(3, 4).T,
    }
    for name, value in values.items():
        model.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    model.register_parameter("later", torch.nn.UninitializedParameter(requires_grad=False))
    with torch.inference_mode():
        model.register_parameter("inferred", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    assert model.inferred.is_inference()
    guard = Guard(lambda: None)
    try:
        guard.add(model)
        guard.guarded()
        assert list(guard.guarded().frozen) == [model.plain.untyped_storage().data_ptr()]
    finally:
        guard.close()


@pytest.fixture
def ranks() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_frozen_dtensor_is_read_behind_the_loop_and_writes_to_it_are_seen(
    tmp_path: Path, ranks: Any, slow_encoder: threading.Event
) -> None:
    """Torch counts writes to a DTensor and to its part of this rank apart."""
    layer = frozen_layer()
    layer.weight = torch.nn.Parameter(
        distribute_tensor(torch.ones(60, 60), ranks, [Shard(0)]), requires_grad=False
    )
    slow_encoder.set()
    with Engine(tmp_path, process_group=dist.group.WORLD) as engine:
        engine.guard(layer)
        assert read_behind(engine, 0, layer.state_dict()) == set()
        assert read_behind(engine, 1, layer.state_dict()) == {"weight"}
        layer.weight.add_(1)
        assert read_behind(engine, 2, layer.state_dict()) == set()
        for step, write in enumerate([layer.weight.add_, layer.weight.to_local().add_], start=3):
            slow_encoder.clear()
            handle, behind = begun(engine, step, layer.state_dict())
            assert behind == {"weight"}
            write(1)
            slow_encoder.set()
            assert isinstance(handle.exception(240), errors.SnapshotTorn)
            assert read_behind(engine, 10 * step, layer.state_dict()) == set()
            assert torch.equal(engine.restore(10 * step)["weight"], layer.weight.full_tensor())


def test_frozen_weights_under_a_policy_that_derives_leaves_come_back_bit_for_bit(
    tmp_path: Path,
) -> None:
    model = torch.nn.Sequential(frozen_layer(), torch.nn.Linear(60, 4)).to(torch.bfloat16)
    masters = {name: value.float() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([masters[name] for name in ("1.weight", "1.bias")], lr=0.1)
    with Engine(tmp_path, policy=Policy.exact(derive=True)) as engine:
        engine.guard(optimizer)
        engine.guard(model)
        for step in range(3):
            state = {"model": model.state_dict(), "master": masters}
            engine.save(step, state).result(240)
            found = engine.restore(step)
            for kind, leaves in state.items():
                for name, value in leaves.items():
                    assert torch.equal(found[kind][name], value), (kind, name)
    assert deltacheck.open(tmp_path).verify(deep=True) == []
