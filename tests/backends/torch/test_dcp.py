"""DCP storage in one process: names, objects, cached plans, failures. On several ranks:
``tests/ranks/test_dcp.py``.
"""

from __future__ import annotations

import datetime
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlanner

import deltacheck
from deltacheck import Keep, KeepBest, SaveOptions
from deltacheck.backends.torch import DeltaStorageReader, DeltaStorageWriter, Engine
from deltacheck.backends.torch import dcp as storage
from deltacheck.errors import LeafPruned, RootBusy, UnsupportedLeaf
from deltacheck.leaf.tree import array_paths
from deltacheck.restore import read
from tests.support.wrappers import blocks, sharded_blocks


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "root"
    yield path
    if path.exists():
        DeltaStorageWriter(path).close()


def state() -> dict[str, Any]:
    made = torch.Generator().manual_seed(2)
    return {
        "model": {
            "layers.0/w": torch.randn(300, 400, generator=made),
            "b": torch.randn(7, generator=made).bfloat16(),
        },
        "optimizer": {
            "state": {0: {"m": torch.randn(10, generator=made)}},
            "groups": [{"lr": 0.1}, torch.ones(2)],
        },
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "step": 4,
        "names": ("a", None, [1, 2]),
    }


def blank() -> dict[str, Any]:
    found = state()
    for tensor in (
        *found["model"].values(),
        found["optimizer"]["state"][0]["m"],
        found["optimizer"]["groups"][1],
        found["scalar"],
    ):
        tensor.zero_()
    found["optimizer"]["groups"][0]["lr"] = found["step"] = found["names"] = 0
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and (
        len(one) == len(other) and all(map(same, one, other))
        if isinstance(one, list)
        else bool(one == other)
    )


def save(what: Any, step: int, root: Path, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.save(
        what,
        checkpoint_id=step,
        storage_writer=DeltaStorageWriter(root, **options),
        planner=planner,
    )


def load(root: Path, into: Any = None, step: int | str | None = None, **options: Any) -> Any:
    into = blank() if into is None else into
    dcp.load(into, storage_reader=DeltaStorageReader(root, step, **options))
    return into


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_state_comes_back_bit_for_bit_and_a_second_save_is_its_changes(root: Path) -> None:
    one = state()
    save(one, 1, root)
    first = stored_bytes(root)
    expected = state()
    one["model"]["layers.0/w"][3, 5] += 1
    one["step"] = 5
    save(one, 2, root)
    assert stored_bytes(root) - first < first / 20
    assert same(load(root), one)
    assert same(load(root, step=1), expected)
    opened = deltacheck.open(root)
    assert opened.verify(deep=True) == []
    assert np.array_equal(
        opened.restore()["model"]["layers.0/w"], one["model"]["layers.0/w"].numpy()
    )
    assert list(array_paths(opened.manifest().tree))[:3] == [
        "model/layers.0%2Fw",
        "model/b",
        "optimizer/state/%30/m",
    ]


def test_a_state_can_be_loaded_without_knowing_what_is_in_it(root: Path) -> None:
    save(state(), 1, root)
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    found = _load_state_dict_from_keys("optimizer", storage_reader=DeltaStorageReader(root))
    assert torch.equal(found["optimizer"]["state"]["0"]["m"], state()["optimizer"]["state"][0]["m"])
    assert found["optimizer"]["groups"][0] == {"lr": 0.1}


def test_nothing_of_a_root_is_a_pickle_but_the_objects_that_were_given(root: Path) -> None:
    save({"w": torch.ones(3)}, 1, root)
    for path in root.rglob("*"):
        if path.is_file():
            assert path.name != ".metadata"
            assert pickle.dumps(0)[:2] != path.read_bytes()[:2]


class Evil:
    """Runs code when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return _run, ()


def _run() -> str:
    Evil.ran = True
    return "it ran"


@pytest.mark.parametrize("value", [Evil(), datetime.date(2026, 1, 1), np.array([None])])
def test_an_object_that_a_load_would_refuse_is_refused_at_the_save(root: Path, value: Any) -> None:
    save({"w": torch.ones(3)}, 1, root)
    with pytest.raises(
        CheckpointException, match=r"'x' is an object that a load would refuse(.|\n)*add_safe_gl"
    ) as caught:
        save({"w": torch.ones(3), "x": value}, 2, root)
    assert isinstance(caught.value.failures[0][0], UnsupportedLeaf)
    assert not Evil.ran
    assert deltacheck.open(root).steps() == [1]


def test_objects_without_code_come_back(root: Path) -> None:
    state = {"path": Path("a/b"), "pure": PureWindowsPath("c:/d"), "array": np.arange(3.0)}
    state |= {"number": np.float32(1.5), "draws": np.random.RandomState(0).get_state()}
    stream = io.BytesIO(b"abcd")
    stream.seek(2)
    save({"w": torch.ones(3), "stream": stream, **state}, 1, root)
    loaded = load(root, {"w": torch.zeros(3), "stream": 0, **dict.fromkeys(state, 0)})
    assert (loaded["stream"].getvalue(), loaded["stream"].tell()) == (b"abcd", 2)
    assert {name: type(loaded[name]) for name in state} == {n: type(v) for n, v in state.items()}
    np.testing.assert_equal({name: loaded[name] for name in state}, state)


def test_an_object_that_would_run_code_is_refused_by_name_unless_pickle_is_allowed(
    root: Path,
) -> None:
    with torch.serialization.safe_globals([_run]):
        save({"w": torch.ones(3), "evil": Evil()}, 7, root)
    Evil.ran = False
    with pytest.raises(
        CheckpointException, match=r"'evil' of step 7 is an object(.|\n)*allow_pickle=True"
    ) as caught:
        load(root, {"w": torch.zeros(3), "evil": 0})
    assert isinstance(caught.value.failures[0][0], UnsupportedLeaf)
    assert not Evil.ran
    assert torch.equal(load(root, {"w": torch.zeros(3)})["w"], torch.ones(3))
    assert load(root, {"w": torch.zeros(3), "evil": 0}, allow_pickle=True)["evil"] == "it ran"


def test_what_the_planner_unpickles_was_pickled_in_this_process(root: Path) -> None:
    class Old(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            content = io.BytesIO()
            torch.save(object, content, _use_new_zipfile_serialization=False)
            return content

    class Seen(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            given.append(value.getvalue())
            super().load_bytes(read_item, value)

    given: list[bytes] = []
    save({"x": {1, 2}}, 1, root, planner=Old())
    target = {"x": 0}
    dcp.load(target, storage_reader=DeltaStorageReader(root), planner=Seen())
    assert target["x"] == {1, 2}
    assert given[0] != deltacheck.open(root).restore()["x"].tobytes()


@pytest.mark.skipif(
    "enable_plan_caching" not in inspect.signature(DefaultSavePlanner).parameters,
    reason="this PyTorch caches no plans (2.6)",
)
def test_cached_plans_are_used_for_the_saves_that_they_are_for(root: Path, tmp_path: Path) -> None:
    caches = [
        getattr(SavePlanner, name) for name in vars(SavePlanner) if name.startswith("_cached_")
    ]
    try:
        one = state()
        for step in (1, 2, 3):
            one["model"]["layers.0/w"][step] += 1
            one["optimizer"]["groups"][0]["lr"] = step / 8
            save(one, step, root, planner=DefaultSavePlanner(enable_plan_caching=True))
            assert same(load(root), one)
        other = tmp_path / "other"
        with pytest.raises(
            CheckpointException, match=r"not of this root(.|\n)*enable_plan_caching"
        ):
            save(one, 1, other, planner=DefaultSavePlanner(enable_plan_caching=True))
        # The root is made only after the plans were compared.
        assert not other.exists()
    finally:
        for cache in caches:
            cache.clear()


class Unfinished(DeltaStorageWriter):
    """Fails when all ranks' parts are durable."""

    def finish(self, metadata: Any, results: Any) -> None:
        raise OSError("no commit")


def test_a_save_that_was_not_committed_is_no_base_of_the_next(root: Path) -> None:
    one = state()
    save(one, 1, root)
    one["model"]["layers.0/w"][0] += 1
    with pytest.raises(CheckpointException, match="no commit"):
        dcp.save(one, checkpoint_id=2, storage_writer=Unfinished(root))
    assert deltacheck.open(root).steps() == [1]
    assert same(load(root), state())
    one["model"]["layers.0/w"][1] += 1
    save(one, 3, root)
    assert same(load(root), one)
    opened = deltacheck.open(root)
    assert not {ref.id for ref in opened.manifest(3).segments} & {
        ref.id for ref in opened.manifest(1).segments
    }
    assert (
        len({path.name for path in (root / "segments").iterdir() if path.is_dir()}) == 3
    )  # the one of step 2 is nobody's
    assert len(opened.manifest(3).segments) == 1


def test_a_step_that_is_not_what_dcp_means_is_not_committed(root: Path) -> None:
    class Other(DeltaStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            metadata.state_dict_metadata["more"] = metadata.state_dict_metadata["scalar"]
            super().finish(metadata, results)

    with pytest.raises(CheckpointException, match="step 1 was planned without 'more'"):
        dcp.save(state(), checkpoint_id=1, storage_writer=Other(root))
    assert deltacheck.open(root).steps() == []


def test_a_rank_that_fails_while_it_writes_leaves_the_newest_step(root: Path) -> None:
    class Stubborn(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "scalar":
                raise RuntimeError("out of memory")
            return super().resolve_data(write_item)

    save(state(), 1, root)
    with pytest.raises(CheckpointException, match="out of memory"):
        save(blank(), 2, root, planner=Stubborn())
    assert same(load(root), state())
    save(blank(), 3, root)
    assert same(load(root), blank())


def test_a_process_that_resumes_goes_on_with_deltas_where_it_says_so(root: Path) -> None:
    one = state()
    save(one, 1, root)
    sizes = {}
    for step, resume in ((2, False), (3, True)):
        DeltaStorageWriter(root).close()
        before = stored_bytes(root)
        held = load(root, resume=resume)
        held["model"]["layers.0/w"][step, step] += 1
        save(held, step, root)
        sizes[resume] = stored_bytes(root) - before
        assert same(load(root), held)
    assert sizes[True] < sizes[False] / 20
    assert deltacheck.open(root).verify(deep=True) == []


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (0, 0),
        (12, 12),
        ("step-1200", 1200),
        ("run/iter_0000070/", 70),
        (Path("a") / "checkpoint_3", 3),
    ],
)
def test_a_checkpoint_id_names_a_step_by_its_number(name: Any, step: int) -> None:
    assert storage.names.step_of(name) == step
    assert DeltaStorageWriter.validate_checkpoint_id(name)


@pytest.mark.parametrize("name", [-1, True, 1.0, "last", "step-3.pt", "9" * 19 + "x", None])
def test_a_checkpoint_id_without_a_number_at_its_end_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="names no step"):
        storage.names.step_of(name)
    assert not DeltaStorageReader.validate_checkpoint_id(name)


def test_a_save_without_a_step_says_how_to_name_one(root: Path) -> None:
    with pytest.raises(CheckpointException, match=r"checkpoint_id(.|\n)*step="):
        dcp.save({"w": torch.ones(2)}, storage_writer=DeltaStorageWriter(root))
    dcp.save({"w": torch.ones(2)}, storage_writer=DeltaStorageWriter(root, step=6))
    assert deltacheck.open(root).steps() == [6]


def test_a_tensor_of_another_type_is_refused_and_not_rounded(root: Path) -> None:
    save({"w": torch.ones(3)}, 2, root)
    with pytest.raises(
        CheckpointException,
        match=r"leaf 'w' is torch.float32\[3\] in step 2, torch.float16\[3\] in the target",
    ):
        load(root, {"w": torch.zeros(3, dtype=torch.float16)})


@pytest.mark.parametrize("made", [blocks, sharded_blocks])
def test_a_wrapper_is_refused_by_path_and_class_and_the_remedy_keeps_it(
    root: Path, made: Callable[[int], Any]
) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"m": {"v": made(1)}}, 0, root)
    error, _ = caught.value.failures[0]
    assert isinstance(error, UnsupportedLeaf)
    for part in ("leaf 'm.v'", "wrappers.Blocks", "__tensor_flatten__"):
        assert part in str(error)

    def parts(seed: int) -> dict[str, torch.Tensor]:
        value: Any = blocks(seed)
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}

    save({"m": {"rank0": parts(1)}}, 1, root)
    into = load(root, {"m": {"rank0": parts(2)}})
    assert all(torch.equal(into["m"]["rank0"][name], part) for name, part in parts(1).items())


def test_damage_names_step_and_leaf(root: Path) -> None:
    save({"w": torch.randn(5000)}, 1, root)
    data = max(
        (path for path in (root / "segments").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(CheckpointException, match=r"Damaged: step 1 of .*'w'"):
        load(root, {"w": torch.zeros(5000)})


def test_a_root_of_an_engine_is_read_by_dcp_and_one_of_dcp_by_an_engine(
    root: Path, tmp_path: Path
) -> None:
    held = {
        "model": {"0.weight": torch.randn(4, 3)},
        "step": 3,
        "betas": [0.9, 0.99],
        "rng": np.arange(4),
        "state": [torch.ones(2), 7],
    }
    with Engine(tmp_path / "engine") as engine:
        engine.save(3, held).result()
    target = {
        "model": {"0.weight": torch.zeros(4, 3)},
        "step": 0,
        "betas": [],
        "rng": 0,
        "state": [torch.zeros(2), 0],
    }
    load(tmp_path / "engine", target)
    assert torch.equal(target["model"]["0.weight"], held["model"]["0.weight"])
    assert (target["step"], target["betas"], target["state"][1]) == (3, [0.9, 0.99], 7)
    assert np.array_equal(target["rng"], held["rng"])
    assert torch.equal(target["state"][0], torch.ones(2))
    save({"model": held["model"]}, 1, root)
    DeltaStorageWriter(root).close()
    with Engine(root) as engine:
        assert torch.equal(engine.restore()["model"]["0.weight"], held["model"]["0.weight"])


def test_only_the_chunks_that_an_item_needs_are_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.randn(2000, 512)}, 1, root)
    reader = DeltaStorageReader(root)
    metadata = reader.read_metadata()
    chunks_read: dict[str, list[int]] = {}
    before = read.read_chunks

    def spied(chains: Any, chunks: Any, *rest: Any) -> Any:
        chunks_read.update(chunks)
        return before(chains, chunks, *rest)

    monkeypatch.setattr(read, "read_chunks", spied)
    target = torch.zeros(2, 512)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": target}, metadata)
    item = ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex("w", (0, 0)),
        torch.Size((0, 0)),
        MetadataIndex("w", (0, 0)),
        torch.Size((700, 0)),
        torch.Size((2, 512)),
    )
    reader.read_data(LoadPlan([item]), planner)
    assert [len(numbers) for numbers in chunks_read.values()] == [1]
    assert deltacheck.open(root).manifest().leaves["w"].spec("w").chunk_count > 3
    assert torch.equal(target, torch.from_numpy(deltacheck.open(root).restore()["w"][700:702]))


def test_every_rule_of_keep_holds(root: Path) -> None:
    keep = Keep(last=1, best=KeepBest("loss"), full_last=1, leaves="w")
    options = SaveOptions(grace_seconds=0)
    for step, loss in enumerate((3.0, 1.0, 2.0)):
        state = {"w": torch.full((3,), float(step)), "momentum": torch.full((3,), -float(step))}
        save(state, step, root, keep=keep, options=options, metrics={"loss": loss})
    opened = deltacheck.open(root)
    assert opened.steps() == [1, 2]
    assert opened.restore(1, leaves=["w"])["w"].tolist() == [1.0] * 3
    with pytest.raises(LeafPruned, match="momentum"):
        opened.restore(1)
    assert opened.restore(2)["momentum"].tolist() == [-2.0] * 3


@pytest.mark.parametrize("options", [{"max_pending": 2}, {"on_error": "log"}, {"capture": "eager"}])
def test_options_that_dcp_leaves_no_choice_for_are_refused(
    root: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"DeltaStorageWriter has no {next(iter(options))}"):
        DeltaStorageWriter(root, options=SaveOptions(**options))


def test_a_root_has_one_writer_with_one_set_of_options_until_it_is_closed(root: Path) -> None:
    for step in (1, 2, 3):
        save(
            {"w": torch.full((3,), float(step))},
            step,
            root,
            keep=Keep(last=2),
            options=SaveOptions(grace_seconds=0.0),
        )
    assert deltacheck.open(root).steps() == [2, 3]
    with pytest.raises(CheckpointException, match=r"already written with another keep\.last"):
        save({"w": torch.ones(3)}, 4, root)
    with pytest.raises(RootBusy):
        Engine(root)
    DeltaStorageWriter(root).close()
    DeltaStorageWriter(root).close()
    with Engine(root):
        pass
    save({"w": torch.ones(3)}, 4, root)
    assert deltacheck.open(root).steps() == [2, 3, 4]
