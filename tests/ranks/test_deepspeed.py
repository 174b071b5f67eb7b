"""DeepSpeed through deltacheck, on 2 gloo processes and on 1: resumes, any number of ranks, export,
failures. With the real package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import deltacheck
from deltacheck import Keep, KeepBest, SaveOptions
from deltacheck.backends.torch.files import pointer
from deltacheck.cli import main
from tests.ranks.launch import launch
from tests.ranks.policy_zero import start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

# ``sub_group_size`` below gives ZeRO 3 another number of flat groups on one rank than on two. ZeRO
# stage and whether the model computes in bfloat16: 0 keeps all on one rank, 1 flattens, with
# bfloat16 in another class than 2.
CASES = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
FLAT = [case for case in CASES if case[0]]
LAST = 6

Parameters = dict[str, dict[str, np.ndarray]]  # by key (master, exp_avg, exp_avg_sq) and name, flat


class Saved(NamedTuple):
    stored_bytes: int
    deltas: int
    leaves: int
    raw_bytes: int


def name(case: tuple[int, bool]) -> str:
    return f"zero{case[0]}{'-bf16' if case[1] else ''}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """Return the results of two ranks: rank -> name -> result."""
    return launch(on_two, 2, folder, seconds=600)


@pytest.fixture(scope="module")
def one(folder: Path, two: object) -> dict[str, Any]:
    """Return the results of one rank that loaded the saves of two, and saved them again."""
    return launch(on_one, 1, folder, seconds=600)[0]


@pytest.fixture(scope="module")
def again(folder: Path, one: object) -> list[dict[str, Any]]:
    """Return the results of two ranks that loaded the saves of one."""
    return launch(on_two_again, 2, folder, seconds=600)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_resumed_run_goes_on_bit_for_bit(
    two: list[dict[str, Any]], case: tuple[int, bool]
) -> None:
    for rank in two:
        found = rank[name(case)]
        assert found["resumed losses"] == found["losses"][3:]
        assert found["client state"] == {"seen": 3}
        same(found["resumed parameters"], found["parameters"])
        if (
            case[0] == 3 or rank is two[0]
        ):  # below ZeRO 3 DeepSpeed saves the buffers of rank 0 alone
            assert found["resumed buffer"] == found["buffer"]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_second_save_is_a_delta_also_after_a_resume(
    two: list[dict[str, Any]], case: tuple[int, bool]
) -> None:
    for rank in two:
        first, second, resumed = (
            rank[name(case)][key] for key in ("first save", "second save", "save after the resume")
        )
        assert first.deltas == 0
        if case[0]:  # else rank 1 has nothing
            assert second.deltas > 0
            assert resumed.deltas > 0
    if not case[0]:
        assert two[0][name(case)]["save after the resume"].deltas > 0


@pytest.mark.parametrize("case", CASES, ids=name)
def test_saving_the_same_tag_again_writes_next_to_nothing(
    two: list[dict[str, Any]], case: tuple[int, bool]
) -> None:
    sizes = [
        sum(rank[name(case)][key].stored_bytes for rank in two)
        for key in ("first save", "same save again")
    ]
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize("case", FLAT, ids=name)
def test_what_is_flat_in_deepspeed_is_stored_once_by_parameter(
    folder: Path, two: object, case: tuple[int, bool]
) -> None:
    tree = deltacheck.open(folder / name(case) / "deltacheck").restore(4)
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    kept = [leaf for key in ("exp_avg", "exp_avg_sq") for leaf in tree["optimizer"][key].values()]
    assert sum(leaf.size for leaf in kept) == 2 * elements
    assert {name: leaf.shape for name, leaf in tree["master"].items()} == SHAPES
    large = [leaf.size for file in tree["files"].values() for leaf in arrays(file)]
    assert max(large) <= 7  # buffers and counters of the ranks
    assert tree["module"]["fixed.weight"].shape == (33, 61)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", FLAT, ids=name)
def test_one_rank_restores_what_two_have_saved(
    two: list[dict[str, Any]], one: dict[str, Any], case: tuple[int, bool]
) -> None:
    same(one[name(case)], joined([rank[name(case)]["parts"] for rank in two]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", FLAT, ids=name)
def test_two_ranks_restore_what_one_has_saved(
    one: dict[str, Any], again: list[dict[str, Any]], case: tuple[int, bool]
) -> None:
    same(joined([rank[name(case)] for rank in again]), one[name(case)])


@pytest.mark.parametrize("case", FLAT, ids=name)
def test_export_gives_the_weights_by_name_and_shape(
    folder: Path,
    two: list[dict[str, Any]],
    case: tuple[int, bool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = folder / f"{name(case)}.safetensors"
    root = folder / name(case) / "deltacheck"
    assert (
        main(
            [
                "export",
                f"{root}",
                "4",
                "--leaves",
                "master/*",
                "--strip",
                "master/",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    weights = load_file(out)
    assert {key: array.shape for key, array in weights.items()} == SHAPES
    expected = joined([rank[name(case)]["parts"] for rank in two])["master"]
    for key, array in weights.items():
        np.testing.assert_array_equal(
            array.reshape(-1).view(np.uint32), expected[key].view(np.uint32)
        )


@pytest.mark.parametrize("case", FLAT, ids=name)
def test_weights_are_loaded_without_the_optimizer(
    one: dict[str, Any], case: tuple[int, bool]
) -> None:
    weights = one[f"{name(case)} weights"]
    expected = one[name(case)]["master"]
    for key, values in weights.items():
        wanted = torch.from_numpy(expected[key])
        np.testing.assert_array_equal(
            values, (wanted.bfloat16().float() if case[1] else wanted).numpy()
        )


def test_nothing_of_a_save_is_found_before_it_is_committed(two: list[dict[str, Any]]) -> None:
    assert two[0]["latest before the commit"] is None
    assert two[0]["pointers before the commit"] == []
    assert two[0]["latest after the commit"] == "slow"


def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_published(
    two: list[dict[str, Any]],
) -> None:
    assert "rank 1: SaveFailed" in two[0]["failed save"]
    for rank in two:
        assert "OSError: [Errno 28] the disk of rank 1 is full" in rank["failed save"]
        assert rank["latest after the failure"] == "slow"
        assert rank["pointers after the failure"] == []
    assert all(rank["save after the failure"] == "good" for rank in two)


def test_what_cannot_be_kept_is_refused_on_all_ranks_with_its_path(
    two: list[dict[str, Any]],
) -> None:
    assert (
        "rank 1: UnsupportedLeaf: leaf 'files/zero_pp_rank_1_mp_rank_00_model_states.pt/what'"
        in two[0]["refused save"]
    )
    assert "torch.serialization.add_safe_globals([Unknown])" in two[1]["refused save"]
    assert two[0]["latest after the refusal"] == "good"


def test_a_step_that_deepspeed_cannot_find_is_told_to_all_ranks(two: list[dict[str, Any]]) -> None:
    assert two[0]["unpublished"] == "[Errno 28] no room for pointers"
    assert "rank 0: OSError: [Errno 28] no room for pointers" in two[1]["unpublished"]
    assert all(rank["latest of the unpublished"] == "good" for rank in two)
    assert all(rank["published again"] == "unfound" for rank in two)


@pytest.mark.parametrize("case", FLAT, ids=name)
def test_a_load_keeps_only_what_its_own_rank_goes_on_from(
    two: list[dict[str, Any]], case: tuple[int, bool]
) -> None:
    raw = sum(rank[name(case)]["first save"].raw_bytes for rank in two)
    assert raw / 2 < sum(rank[name(case)]["kept bytes"] for rank in two) <= raw


@pytest.mark.timeout(600)
def test_the_example_goes_on_on_another_number_of_ranks(folder: Path) -> None:
    example = folder / "example"
    first = launch(on_example, 2, example, ["--stage", "3", "--steps", "4"], seconds=300)
    second = launch(on_example, 1, example, ["--stage", "3", "--steps", "6"], seconds=300)
    assert first[0].startswith("2 ranks, steps 1 to 4")
    assert second[0].startswith("1 ranks, steps 5 to 6")
    assert deltacheck.open(example / "deltacheck").steps() == [2, 4, 6]


def test_a_load_reads_no_pickle(two: list[dict[str, Any]]) -> None:
    assert all(rank["pickles read"] == 0 for rank in two)


def test_files_of_two_saves_are_not_mixed(two: list[dict[str, Any]]) -> None:
    assert "points to another save" in two[0]["mixed files"]


def test_options_come_from_either_section_of_the_configuration(two: list[dict[str, Any]]) -> None:
    assert two[0]["options"] == {
        "keep": Keep(last=7),
        "options": SaveOptions(host_cache_bytes=3 << 30, on_busy="skip"),
    }
    assert "'keep_lots', which is not one of" in two[0]["wrong option"]
    assert "deltacheck.options has the option 'on_bsy', which" in two[0]["wrong field"]
    assert two[0]["best"] == Keep(best=KeepBest("loss", 2))
    assert "lossy', which is not one of auto, derive" in two[0]["wrong policy"]


def test_another_stage_is_refused_with_the_way_out(two: list[dict[str, Any]]) -> None:
    assert (
        "was saved under ZeRO 2, this engine has ZeRO 3; load it under ZeRO 2"
        in two[0]["another stage"]
    )


def test_other_files_of_weights_are_written_as_before(
    two: list[dict[str, Any]], folder: Path
) -> None:
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert weights["first.weight"].shape == (61, 17)


# What runs in the processes.

# Of what is trained; ``again.weight`` is ``hidden.weight``, and ``fixed`` is frozen.
SHAPES = {
    "first.weight": (61, 17),
    "first.bias": (61,),
    "hidden.weight": (61, 61),
    "hidden.bias": (61,),
    "again.bias": (61,),
}
SHAPES |= {"last.weight": (1, 33), "last.bias": (1,)}


class Mean(torch.nn.Module):
    """Has a buffer of its own on each rank, which follows what passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += x.detach().mean()
        return x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean = torch.nn.Linear(17, 61), Mean()
        self.hidden, self.again = torch.nn.Linear(61, 61), torch.nn.Linear(61, 61)
        self.again.weight = self.hidden.weight
        self.fixed, self.last = (
            torch.nn.Linear(61, 33).requires_grad_(False),
            torch.nn.Linear(33, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mean(torch.tanh(self.first(x)))
        x = torch.tanh(self.again(torch.tanh(self.hidden(x))))
        return self.last(torch.tanh(self.fixed(x)))


def made(case: tuple[int, bool], fixed: float | None = None, **more: Any) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    if fixed is not None:
        model.fixed.weight.data.fill_(fixed)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": case[0],
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 1000,
        },
        "bf16": {"enabled": case[1]},
        **more,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def train(engine: Any, bf16: bool, until: int) -> list[str]:
    losses = []
    while engine.global_steps < until:
        random = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
        given = torch.randn(4, 17, generator=random)
        wanted = given.sum(1, keepdim=True)
        loss = ((engine(given.bfloat16() if bf16 else given).float() - wanted) ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def parts(engine: Any) -> list[tuple[str, str, int, int, np.ndarray]]:
    """Return this rank's parts: key, name, first element, number of elements, values."""
    from deltacheck.backends.torch.deepspeed import zero

    found = []
    for partition in zero.partitions(engine):
        for key, flat in {"master": partition.master, **partition.states}.items():
            for part in partition.parts:
                piece = part.of(flat)
                values = piece.data.clone().float().numpy()
                found.append(
                    (key, part.name, piece.global_offset[0], piece.global_shape[0], values)
                )
    if not found:
        state = (
            engine.optimizer.state_dict()["state"]
            if hasattr(engine.optimizer, "state_dict")
            else {}
        )
        found = [
            (key, str(number), 0, value.numel(), value.clone().float().reshape(-1).numpy())
            for number, of in state.items()
            for key, value in of.items()
        ]
    return found


def joined(ranks: list[Any]) -> Parameters:
    found: Parameters = {}
    for rank in ranks:
        for key, name, first, elements, values in rank:
            whole = found.setdefault(key, {}).setdefault(
                name, np.full(elements, np.nan, np.float32)
            )
            whole[first : first + values.size] = values
    assert not any(np.isnan(array).any() for of in found.values() for array in of.values())
    return found


def same(one: Any, other: Any) -> None:
    if isinstance(one, list):
        one, other = (
            {(key, name): values for key, name, _, _, values in of} for of in (one, other)
        )
    assert one.keys() == other.keys()
    for key in one:
        if isinstance(one[key], dict):
            same(one[key], other[key])
        else:
            np.testing.assert_array_equal(
                one[key].view(np.uint32), other[key].view(np.uint32), err_msg=str(key)
            )


def arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in arrays(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in arrays(item)]
    return [value] if isinstance(value, np.ndarray) else []


def save(engine: Any, folder: Path, tag: str | None = None, **client: Any) -> Saved:
    """Save, wait, and say what this rank has written."""
    handles: list[Any] = []
    checkpoints = engine.checkpoint_engine
    real = checkpoints._opened

    def opened(root: Path) -> Any:
        found = real(root)
        if "save" not in vars(found):
            keep = found.save
            found.save = lambda *args, **kwargs: (
                handles.append(keep(*args, **kwargs)) or handles[-1]
            )
        return found

    checkpoints._opened = opened
    try:
        assert engine.save_checkpoint(str(folder), tag, client_state=client)
        checkpoints.wait()
    finally:
        del checkpoints._opened
        if checkpoints._engine is not None:
            vars(checkpoints._engine).pop("save", None)
    report = handles[0].report
    deltas = sum(leaf.kind == "delta" for leaf in report.leaves)
    return Saved(report.stored_bytes, deltas, len(report.leaves), report.raw_bytes)


def text_of(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def message_of(action: Any) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return str(error)
    return ""


def on_two(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    start(rank, size)
    pickles = count_pickles()
    found: dict[str, Any] = {name(case): resume(case, folder / name(case)) for case in CASES}
    found["pickles read"] = len(pickles)
    found |= troubles(rank, folder)
    return found


def resume(case: tuple[int, bool], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = made(case)
    losses = train(engine, case[1], 3)
    found["first save"] = save(engine, folder, seen=3)
    losses += train(engine, case[1], 4)
    found["second save"] = save(engine, folder, seen=4)
    found["same save again"] = save(engine, folder, seen=4)
    found["parts"] = parts(engine)
    found["losses"] = losses + train(engine, case[1], LAST)
    found["parameters"] = parts(engine)
    found["buffer"] = engine.module.mean.mean.tolist()
    engine.destroy()
    engine = made(case, fixed=0.0)  # what is not trained comes from the checkpoint, too
    path, client = engine.load_checkpoint(str(folder), "global_step3")
    assert path is not None
    found["kept bytes"] = sum(
        data.nbytes for data in engine.checkpoint_engine._read.stored.values()
    )
    found["client state"] = {key: value for key, value in client.items() if key == "seen"}
    resumed = train(engine, case[1], 4)
    found["save after the resume"] = save(engine, folder, seen=4)
    found["resumed losses"] = resumed + train(engine, case[1], LAST)
    found["resumed parameters"] = parts(engine)
    found["resumed buffer"] = engine.module.mean.mean.tolist()
    engine.destroy()
    return found


def count_pickles() -> list[object]:
    """Count the reads of ``torch.load`` and ``pickle`` from now on."""
    seen: list[object] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        raise AssertionError("a pickle was read")

    torch.load = load
    pickle.load = load
    return seen


class Unknown:
    pass


def troubles(rank: int, folder: Path) -> dict[str, Any]:
    from deltacheck.backends.torch.deepspeed import publishing
    from deltacheck.backends.torch.deepspeed.configuration import engine_options
    from deltacheck.backends.torch.deepspeed.reading import CheckpointReading
    from deltacheck.save.job import save_job
    from deltacheck.save.root_writer import RootWriter

    found: dict[str, Any] = {}
    engine = made(
        (3, False),
        datastates_ckpt={"host_cache_size": 3},
        deltacheck={"keep": {"last": 7}, "options": {"on_busy": "skip"}},
    )
    found["options"] = dict(engine.checkpoint_engine._options)
    found["wrong option"] = message_of(lambda: engine_options({"deltacheck": {"keep_lots": 1}}, {}))
    wrong_fields = {"deltacheck": {"options": {"on_bsy": "skip"}}}
    found["wrong field"] = message_of(lambda: engine_options(wrong_fields, {}))
    best = {"deltacheck": {"keep": {"best": {"metric": "loss", "count": 2}}}}
    found["best"] = engine_options(best, {})["keep"]
    section = {"deltacheck": {"policy": "lossy"}}
    found["wrong policy"] = message_of(lambda: engine_options(section, {}))
    train(engine, False, 1)
    run = folder / "troubles"
    gate, real = threading.Event(), RootWriter.commit
    RootWriter.commit = lambda self, manifest: (gate.wait(240), real(self, manifest))[1]
    engine.save_checkpoint(str(run), "slow")
    found["latest before the commit"] = text_of(run / "latest")
    found["pointers before the commit"] = [path.name for path in (run / "slow").iterdir()]
    gate.set()
    engine.checkpoint_engine.wait()
    RootWriter.commit = real
    torch.distributed.barrier()
    found["latest after the commit"] = text_of(run / "latest")

    train(engine, False, 2)
    finish = save_job.SaveJob.finish_segment
    if rank == 1:
        save_job.SaveJob.finish_segment = failing
    engine.save_checkpoint(str(run), "bad")
    found["failed save"] = message_of(engine.checkpoint_engine.wait)
    save_job.SaveJob.finish_segment = finish
    found["latest after the failure"] = text_of(run / "latest")
    found["pointers after the failure"] = [path.name for path in (run / "bad").iterdir()]
    train(engine, False, 3)
    engine.save_checkpoint(str(run), "good")
    engine.checkpoint_engine.wait()
    torch.distributed.barrier()
    found["save after the failure"] = text_of(run / "latest")

    client = {"what": Unknown()} if rank == 1 else {}
    found["refused save"] = message_of(
        lambda: engine.save_checkpoint(str(run), "odd", client_state=client)
    )
    found["latest after the refusal"] = text_of(run / "latest")

    train(engine, False, 4)
    publish = publishing.publish
    publishing.publish = no_room
    engine.save_checkpoint(str(run), "unfound")
    engine.checkpoint_engine._engine.wait()
    torch.distributed.barrier()
    publishing.publish = publish
    found["unpublished"] = message_of(lambda: engine.save_checkpoint(str(run), "unfound"))
    found["latest of the unpublished"] = text_of(run / "latest")
    torch.distributed.barrier()
    engine.save_checkpoint(str(run), "unfound")
    engine.checkpoint_engine.wait()
    torch.distributed.barrier()
    found["published again"] = text_of(run / "latest")

    if rank == 0:
        path = run / "good" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        target = pointer.read(run / "slow" / path.name)
        pointer.write(path, target)
        checkpoints = engine.checkpoint_engine
        checkpoints._reading = CheckpointReading()
        checkpoints.load(str(run / "good" / "zero_pp_rank_0_mp_rank_00_model_states.pt"))
        found["mixed files"] = message_of(lambda: checkpoints.load(str(path)))
        checkpoints._reading = None
        two = folder / "zero2" / "global_step4" / "mp_rank_00_model_states.pt"
        found["another stage"] = message_of(lambda: checkpoints.load(str(two)))
    engine.destroy()
    engine = made((1, False))
    engine.save_16bit_model(str(folder), "pytorch_model.bin")
    torch.distributed.barrier()
    engine.destroy()
    return found


def failing(self: object) -> None:
    raise OSError(28, "the disk of rank 1 is full")


def no_room(*_: object) -> None:
    raise OSError(28, "no room for pointers")


def on_example(rank: int, size: int, port: int, folder: Path, arguments: list[str]) -> str:
    start(rank, size)
    import runpy
    import sys

    sys.argv = ["deepspeed_zero.py", str(folder), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(
            str(Path(__file__).parents[2] / "examples" / "deepspeed_zero.py"), run_name="__main__"
        )
    return told.getvalue()[-200:]


def on_one(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    start(rank, size)
    found = {}
    for case in FLAT:
        engine = made(case, fixed=0.0)
        path, _ = engine.load_checkpoint(str(folder / name(case)), "global_step4")
        assert path is not None
        found[name(case)] = joined([parts(engine)])
        save(engine, folder / name(case), "by one")
        engine.destroy()
        engine = made(case)
        engine.load_checkpoint(
            str(folder / name(case)), "global_step4", load_optimizer_states=False
        )
        assert engine.checkpoint_engine._read is None
        found[f"{name(case)} weights"] = joined([parts(engine)])["master"]
        engine.destroy()
    return found


def on_two_again(rank: int, size: int, port: int, folder: Path) -> dict[str, Any]:
    start(rank, size)
    found = {}
    for case in FLAT:
        engine = made(case)
        path, _ = engine.load_checkpoint(str(folder / name(case)))
        assert path is not None
        assert json.loads(Path(path if os.path.isfile(path) else path[0]).read_text())["step"] == 4
        found[name(case)] = parts(engine)
        engine.destroy()
    return found
