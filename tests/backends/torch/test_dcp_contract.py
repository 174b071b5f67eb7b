"""The same sequences of calls on DCP's file storage and on ours. On several ranks:
``tests/ranks/test_dcp.py``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    staging,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from deltacheck.backends.torch import DeltaStorageReader, DeltaStorageWriter
from deltacheck.backends.torch.dcp.turns import Turns
from deltacheck.errors import SaveFailed
from tests.support.states import bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    # The file storage of PyTorch 2.6 itself uses it.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclasses.dataclass
class Storage:
    """A storage under test: ``folder/step-3`` is step 3 of either."""

    folder: Path
    writer: Callable[..., Any]
    reader: Callable[..., Any]

    def id(self, step: int) -> str:
        return str(self.folder / f"step-{step}")

    def save(self, state: Any, step: int, planner: Any = None, **options: Any) -> None:
        writer = self.writer(**options)
        dcp.save(state, checkpoint_id=self.id(step), storage_writer=writer, planner=planner)

    def load(self, blank: Any, step: int, planner: Any = None) -> Any:
        dcp.load(blank, checkpoint_id=self.id(step), storage_reader=self.reader(), planner=planner)
        return blank


@pytest.fixture(params=["files", "deltas"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "files":
        yield Storage(
            tmp_path,
            lambda **options: FileSystemWriter(tmp_path, **options),
            lambda **options: FileSystemReader(tmp_path, **options),
        )
        return
    root = tmp_path / "root"
    yield Storage(
        tmp_path,
        lambda **options: DeltaStorageWriter(root, **options),
        lambda **options: DeltaStorageReader(root, **options),
    )
    DeltaStorageWriter(root).close()


def state(seed: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((4, 3), float(seed)), "b": torch.arange(3) + seed},
        "list": [torch.tensor(float(seed)), {"x": seed}],
        "step": seed,
        "name": f"run {seed}",
        "none": None,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_one_writer_and_one_reader_serve_many_steps(storage: Storage) -> None:
    writer = storage.writer()
    for step in (1, 2, 3):
        dcp.save(state(step), checkpoint_id=storage.id(step), storage_writer=writer)
    reader = storage.reader()
    for step in (3, 1, 2):
        blank = state(0)
        dcp.load(blank, checkpoint_id=storage.id(step), storage_reader=reader)
        assert same(blank, state(step))


def test_a_step_is_saved_again_unless_overwrite_is_false(storage: Storage) -> None:
    storage.save(state(1), 1)
    storage.save(state(2), 1)
    assert same(storage.load(state(0), 1), state(2))
    with pytest.raises(CheckpointException, match="exists"):
        storage.save(state(3), 1, overwrite=False)
    assert same(storage.load(state(0), 1), state(2))
    storage.save(state(4), 4, overwrite=False)
    assert same(storage.load(state(0), 4), state(4))


STAGERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "asynchronous": lambda: staging.DefaultStager(
        staging.StagingOptions(False, False, True, False)
    ),
    "blocking": staging.BlockingAsyncStager,
}


@pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters,
    reason="async_save of this PyTorch has no stagers and copies no tensor of the processor (2.6)",
)
@pytest.mark.parametrize("stager", STAGERS)
def test_an_asynchronous_save_has_the_values_of_its_call(storage: Storage, stager: str) -> None:
    chosen = STAGERS[stager]()
    for step in (1, 2):
        live = state(step)
        answer = dcp.async_save(
            live,
            checkpoint_id=storage.id(step),
            storage_writer=storage.writer(),
            async_stager=chosen,
        )
        if hasattr(answer, "staging_completion"):
            answer.staging_completion.result()
            answer = answer.upload_completion
        live["model"]["w"].zero_()
        assert answer.result().state_dict_metadata
    if hasattr(chosen, "close"):
        chosen.close()
    for step in (1, 2):
        assert same(storage.load(state(0), step), state(step))


@pytest.mark.parametrize("options", [{"flatten_state_dict": False}, {}])
def test_default_planners_with_their_options(storage: Storage, options: dict[str, bool]) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True, **options)
    # Without flattening, DCP puts loaded objects into a copy of the target.
    saved = {"w": torch.ones(3)} if options else state(1)
    blank = {"w": torch.zeros(3)} if options else state(0)
    storage.save(saved, 1, planner)
    assert same(storage.load(blank, 1, DefaultLoadPlanner(**options)), saved)


class Renamed(DefaultSavePlanner):
    """Saves under other names, and leaves some values out."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        kept = {f"new_{key}": value for key, value in state_dict.items() if key != "none"}
        super().set_up_planner(kept, storage_meta, is_coordinator)


class RenamedBack(DefaultLoadPlanner):
    """Loads from these names, and adds one to each tensor."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(
            {f"new_{key}": value for key, value in state_dict.items()}, *args, **kwargs
        )

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.target = super().resolve_tensor(read_item)
        return torch.empty_like(self.target)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.target.copy_(tensor + 1)


def test_a_planner_of_ones_own_renames_values_and_changes_what_it_loads(storage: Storage) -> None:
    storage.save(state(1), 1, Renamed())
    blank = {"model": {"w": torch.zeros(4, 3)}}
    storage.load(blank, 1, RenamedBack())
    assert torch.equal(blank["model"]["w"], torch.full((4, 3), 2.0))
    saved = {"new_model", "new_list", "new_step", "new_name"}
    # Without names, PyTorch 2.6 loads nothing.
    loaded = _load_state_dict_from_keys(
        {*saved, "new_none"}, checkpoint_id=storage.id(1), storage_reader=storage.reader()
    )
    assert loaded.keys() == saved


def test_a_partial_load_keeps_what_the_step_does_not_have(storage: Storage) -> None:
    storage.save({"model": {"w": torch.ones(3)}, "step": 3}, 1)

    def target() -> dict[str, Any]:
        return {"model": {"w": torch.zeros(3), "new": torch.full((2,), 7.0)}, "more": 5}

    with pytest.raises(CheckpointException, match="Missing key"):
        storage.load(target(), 1)
    blank = storage.load(target(), 1, DefaultLoadPlanner(allow_partial_load=True))
    assert same(blank, target() | {"model": {"w": torch.ones(3), "new": torch.full((2,), 7.0)}})
    assert same(storage.load({"step": 0}, 1), {"step": 3})


def test_a_target_of_another_shape_is_refused(storage: Storage) -> None:
    storage.save({"w": torch.ones(3)}, 1)
    with pytest.raises(CheckpointException, match="w"):
        storage.load({"w": torch.zeros(4)}, 1)


def test_what_is_described_is_the_same(storage: Storage) -> None:
    storage.save(state(1), 1)
    reader = storage.reader()
    reader.reset(storage.id(1))
    metadata = reader.read_metadata()
    tensors = {
        name: (tuple(entry.size), entry.properties.dtype, len(entry.chunks))
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    assert tensors == {
        "model.w": ((4, 3), torch.float32, 1),
        "model.b": ((3,), torch.int64, 1),
        "list.0": ((), torch.float32, 1),
    }
    assert metadata.state_dict_metadata.keys() - tensors.keys() == {
        "list.1.x",
        "step",
        "name",
        "none",
    }
    assert metadata.planner_data["model.w"] == ("model", "w")
    assert metadata.planner_data["list.0"] == ("list", 0)


class Counter:
    """A value with ``state_dict``."""

    def __init__(self, count: int) -> None:
        self.count = torch.tensor(count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"].clone()


def test_a_stateful_value_is_saved_and_loaded_by_its_methods(storage: Storage) -> None:
    storage.save({"counter": Counter(5)}, 1)
    blank = {"counter": Counter(0)}
    storage.load(blank, 1)
    assert blank["counter"].count == 5


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.ones(4, 6, dtype=torch.bfloat16).t(),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(5, dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_a_tensor_of_each_kind_comes_back(storage: Storage, value: torch.Tensor) -> None:
    storage.save({"value": value}, 1)
    blank = {"value": torch.zeros_like(value)}
    storage.load(blank, 1)
    assert bits(blank["value"]) == bits(value)


def test_a_save_that_fails_leaves_the_earlier_step(storage: Storage) -> None:
    class Full(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise OSError(28, "No space left on device")

    storage.save(state(1), 1)
    with pytest.raises(CheckpointException, match="No space left"):
        storage.save(state(2), 2, Full())
    with pytest.raises(CheckpointException):
        storage.load(state(0), 2)
    assert same(storage.load(state(0), 1), state(1))
    storage.save(state(3), 3)
    assert same(storage.load(state(0), 3), state(3))


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.save).parameters,
    reason="this PyTorch has no argument no_dist (2.6)",
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_process_without_a_group_saves_and_loads(storage: Storage) -> None:
    dcp.save(state(1), checkpoint_id=storage.id(1), storage_writer=storage.writer(), no_dist=True)
    blank = state(0)
    dcp.load(blank, checkpoint_id=storage.id(1), storage_reader=storage.reader(), no_dist=True)
    assert same(blank, state(1))


@pytest.mark.parametrize("storage", ["deltas"], indirect=True)
@pytest.mark.parametrize("writers", [1, 6])
def test_asynchronous_saves_that_overlap_follow_each_other(storage: Storage, writers: int) -> None:
    # DCP's writer keeps the folder of the save under way, so one of them cannot serve two.
    shared = [storage.writer() for _ in range(writers)]
    futures = [
        dcp.async_save(
            state(step), checkpoint_id=storage.id(step), storage_writer=shared[step % writers]
        )
        for step in range(1, 7)
    ]
    for future in futures:
        future.result()
    for step in range(1, 7):
        assert same(storage.load(state(0), step), state(step))


def test_a_save_that_another_one_has_replaced_is_refused() -> None:
    turns = Turns()
    turns.begin("one")
    with turns.call("one"):
        pass
    turns.begin("two")  # of the same thread, so the first one was given up
    with pytest.raises(SaveFailed, match="wait for the result of async_save"), turns.call("one"):
        pass
    with turns.call("two", is_last=True):
        pass
    turns.begin("three")


OPTIONS = {
    "single_file_per_rank": "number of files",
    "sync_files": "durability='process'",
    "thread_count": "as many threads as help",
    "per_thread_copy_ahead": "host_cache_bytes",
    "cache_staged_state_dict": "async_stager=BlockingAsyncStager",
    "serialization_format": "deltacheck export",
    "_extensions": "verification",
}


def test_each_option_of_the_file_storage_applies_or_is_refused_by_name(tmp_path: Path) -> None:
    ours = {"path", "overwrite"}
    # PyTorch 2.6 has neither extensions nor formats.
    is_old = importlib.util.find_spec("torch.distributed.checkpoint._extension") is None
    missing = {"serialization_format", "_extensions"} if is_old else set()
    expected = (OPTIONS.keys() | ours) - missing
    assert inspect.signature(FileSystemWriter).parameters.keys() == expected
    for name, remedy in OPTIONS.items():
        with pytest.raises(TypeError, match=f"no option {name}: .*{remedy}"):
            DeltaStorageWriter(tmp_path, **{name: 1})
    expected = {"path"} if is_old else {"path", "_extension_registry"}
    assert inspect.signature(FileSystemReader).parameters.keys() == expected
    with pytest.raises(TypeError, match=r"no option _extension_registry: .*verification"):
        DeltaStorageReader(tmp_path, _extension_registry=1)
    with pytest.raises(TypeError, match="no option thread_counts"):
        DeltaStorageWriter(tmp_path, thread_counts=1)
