"""Runs whose first save is stored as changes to a model on disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.hugging_face import base_root as base_roots
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.output import OK
from deltacheck.leaf.contracts import Bounded
from deltacheck.maintain import branch as branches
from deltacheck.store.roots.opening import open_root
from tests.support.states import assert_same, random_tensor

pytestmark = pytest.mark.usefixtures("forked_imports")

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights() -> dict[str, torch.Tensor]:
    """A model of 1.6 MB, with leaves above and below the size that gets an array of its own."""
    shapes = {EMBEDDINGS: (600, 512), "layers.0.weight": (300, 512), "layers.1.weight": (30, 512)}
    return {
        name: random_tensor(torch.bfloat16, shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def write_folder(path: Path) -> Path:
    """Write a model folder of two shards. The output embeddings are tied, so no file has them."""
    path.mkdir()
    tensors, weight_map = weights(), {}
    for number, names in enumerate(([EMBEDDINGS], ["layers.0.weight", "layers.1.weight"]), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, path / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index)
    (path / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    return path


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its imported root, which takes seconds to make."""
    place = tmp_path_factory.mktemp("runs")
    base_roots.base_root(write_folder(place / "tiny"), place)
    return place


@pytest.fixture
def place(imported: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(imported, tmp_path / "runs"))


def state(change: int = 0) -> dict[str, Any]:
    """A state of the model with tied output embeddings; ``change``: the number of words changed."""
    model = weights()
    model[HEAD] = model[EMBEDDINGS]
    for tensor in model.values():
        tensor.view(torch.int16).flatten()[:change] += 1
    return {"model": model, "optimizer": {"exp_avg": torch.ones(100)}, "step": change}


def root_of(place: Path) -> Path:
    (root,) = place.glob("base-*")
    return root


def used_bytes(*roots: Path) -> int:
    """Return the bytes of the files of roots; a file of several links counts once."""
    files = {
        (info.st_dev, info.st_ino): info.st_size
        for root in roots
        for file in root.rglob("*")
        if not file.is_dir()
        for info in (file.stat(),)
    }
    return sum(files.values())


def test_eight_runs_of_a_base_take_at_most_half_more_than_one(place: Path) -> None:
    runs = [place / f"run-{number}" for number in range(8)]
    for number, run in enumerate(runs):
        with Engine(run, base=place / "tiny") as engine:
            assert engine.steps() == []  # a resume finds no step without an optimizer
            report = engine.save(10, state(number + 1)).result(240)
            assert report is not None
            assert report.stored_bytes < 0.05 * report.raw_bytes
            assert report.note == f"3 leaves begin from the base {root_of(place)}"
    assert used_bytes(root_of(place), *runs) <= 1.5 * used_bytes(root_of(place), runs[0])
    # The name of the base root has the digest of the folder, which is imported once.
    assert len(open_root(root_of(place)).store.segment_ids()) == 1
    shutil.rmtree(root_of(place))
    shutil.rmtree(place / "tiny")
    for number, run in enumerate(runs):
        with Engine(run, base=place / "tiny") as engine:  # as a script that is started again
            assert_same(engine.restore(), state(number + 1))
            assert engine.save(11, state(number + 2)).result(240).stored_bytes < 40_000
    assert deltacheck.open(runs[0]).verify(deep=True) == []


def adam_state(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state of AdamW with a master for each weight, after ten steps."""
    random = torch.Generator().manual_seed(1)
    entries = {}
    for name, weight in model.items():
        gradients = torch.randn(10, *weight.shape, generator=random) * 1e-3
        first, second = torch.zeros(weight.shape), torch.zeros(weight.shape)
        for gradient in gradients:
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        entries[name] = {
            "step": torch.tensor(10.0),
            "exp_avg": first,
            "exp_avg_sq": second,
            "master": weight.float(),
        }
    group = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "params": list(entries)}
    return {"state": entries, "param_groups": [group]}


def test_a_first_save_under_auto_is_changes_to_the_base_and_a_bounded_optimizer(
    tmp_path: Path,
) -> None:
    random = torch.Generator().manual_seed(0)
    model = {
        f"{n}.weight": (torch.randn(300, 500, generator=random) / 50).bfloat16() for n in range(3)
    }
    (tmp_path / "normal").mkdir()
    save_file(model, tmp_path / "normal" / "model.safetensors")
    (tmp_path / "normal" / "config.json").write_text("{}")
    for tensor in model.values():
        tensor.view(torch.int16).flatten()[:100] += 1
    saved = {"model": model, "optimizer": adam_state(model)}
    with Engine(tmp_path / "run", policy=Policy.auto(), base=tmp_path / "normal") as engine:
        report = engine.save(10, saved).result(240)
        assert report is not None
        # Codes of 8 bits for each moment at most, and some of the masters.
        assert report.stored_bytes < 0.1 * report.raw_bytes
        assert_same(engine.restore()["model"], model)
    promises = deltacheck.open(tmp_path / "run").manifest().contracts
    assert len(promises) == 9
    assert all(isinstance(promise.terms, Bounded) for promise in promises.values())


def test_the_tools_work_on_a_run_with_a_base(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "run"
    with Engine(run, base=place / "tiny") as engine:
        engine.save(1, state(1))
        engine.save(2, state(2))
    follower = deltacheck.follow(run)
    assert follower.poll().step == 2
    for words in (
        ("verify", run, "--deep"),
        ("branch", run, 1, "--to", tmp_path / "branch", "--copy"),
        ("export", run, 2, "--to", "hf", "--out", tmp_path / "folder"),
        ("repair", run),
        ("prune", run, "--whole"),
        ("prune", run, "--keep-last", 1),
        ("prune", run, "--compact", "--grace", 0),
        ("verify", run, "--deep"),
        # Files that the runs share stay in the root of the base.
        ("verify", root_of(place), "--deep"),
        ("verify", tmp_path / "branch", "--deep"),
    ):
        assert main([str(word) for word in words]) == OK, capsys.readouterr()
    capsys.readouterr()
    with Engine(tmp_path / "next", base=tmp_path / "branch") as engine:
        # The newest step of another run is a base, too.
        assert "4 leaves begin" in engine.save(3, state(3)).result(240).note
    for root, step, change in ((run, 2, 2), (tmp_path / "branch", 1, 1), (tmp_path / "next", 3, 3)):
        with Engine(root) as engine:
            assert_same(engine.restore(step), state(change))
    opened = deltacheck.open(run)
    assert opened.restore()["model"][HEAD].shape == (600, 512)


def test_leaves_that_differ_from_the_base_are_written_whole_and_named(place: Path) -> None:
    values = state()
    values["model"]["layers.0.weight"] = values["model"]["layers.0.weight"].float()
    values["model"]["new.weight"] = torch.ones(70_000)
    with Engine(place / "run", base=place / "tiny") as engine:
        report = engine.save(0, values).result(240)
        assert_same(engine.restore(), values)
    assert report.note == (
        f"2 leaves begin from the base {root_of(place)}; 2 are written whole, the first"
        " 'model/layers.0.weight': float32[300, 512], in the base bfloat16[300, 512]"
    )
    assert report.stored_bytes < 0.95 * (300 * 512 * 4 + 70_000 * 4) + 30_000


@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_run_that_is_killed_before_its_first_step_begins_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    link, calls = branches._link, []

    def killed(source: Path, target: Path) -> bool:
        calls.append(source)
        if len(calls) > after:
            raise KeyboardInterrupt
        return link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(branches, "_link", killed)
        # With 20 links, the engine is made and closed without a save.
        if after == 20:
            with Engine(place / "run", base=place / "tiny"):
                pass
        else:
            with pytest.raises(KeyboardInterrupt):
                Engine(place / "run", base=place / "tiny")
    assert 0 < len(calls) <= 20
    with Engine(place / "run", base=place / "tiny") as engine:
        assert engine.steps() == []
        assert engine.save(1, state(1)).result(240).stored_bytes < 40_000
        assert_same(engine.restore(), state(1))
    assert deltacheck.open(place / "run").verify(deep=True) == []


def test_a_damaged_base_is_named_and_begins_no_run(place: Path) -> None:
    files = root_of(place).rglob("leaves/model.layers.0.weight/c.*")
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    # The error names step, leaf, file or digests, and the remedy.
    message = r"step 0 of .*base-.*'model/layers.0.weight'.*Remove .*base-.* to import .*tiny again"
    with pytest.raises(errors.Damaged, match=message):
        Engine(place / "run", base=place / "tiny")
    with Engine(place / "run") as engine:  # the root is free, and nothing of it is damaged
        engine.save(0, state()).wait()
        assert_same(engine.restore(), state())
    file.unlink()
    shutil.rmtree(next(root_of(place).glob("segments/s*")))
    with pytest.raises(errors.ChainBroken, match=root_of(place).name):
        Engine(place / "other", base=place / "tiny")


def test_a_folder_that_was_changed_is_another_base(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = place / "tiny" / "model-00002-of-00002.safetensors"
    tensors = {name: tensor + 1 for name, tensor in weights().items() if "layers" in name}
    save_file(tensors, shard)
    made = []

    def ingest(kind: str, root: Path, sources: list[tuple[int, Path]]) -> Any:
        made.append(root)
        # Another process has the lease of the import, and ends it.
        if len(made) == 1:
            raise errors.RootBusy("process 1 writes")
        shutil.copytree(root_of(place), root)
        yield sources[0][1], 0

    monkeypatch.setattr(base_roots.isolated, "ingest", ingest)
    monkeypatch.setattr(base_roots, "_POLL_SECONDS", 0.0)
    old = root_of(place)
    Engine(place / "run", base=place / "tiny").close()
    assert len(made) == 2
    assert made[0] == made[1] != old


def test_bases_that_cannot_be_shared_are_refused(place: Path) -> None:
    tiny = place / "tiny"
    with pytest.raises(ValueError, match="base cannot be given with memory"):
        Engine(place / "run", base=tiny, memory=place / "memory")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Engine(place / "run", base=place / "none")
    (place / "empty").mkdir()
    with pytest.raises(errors.NotACheckpointRoot, match="no base of a run"):
        Engine(place / "run", base=place / "empty")
    os.remove(tiny / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match="lacks 'model-00001-of-00002"):
        Engine(place / "run", base=tiny)
    with Engine(place / "run") as engine:  # none of them has kept the lease
        assert engine.steps() == []


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", (10**12).to_bytes(8, "little")),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}"),
        ("pytorch_model.bin", b""),
        ("pytorch_model.bin", b"PK\x03\x04"),
    ],
)
def test_a_base_whose_header_does_not_fit_is_refused_before_it_is_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, begin: bytes
) -> None:
    class Unread:
        def __init__(self, *_: object) -> None: ...

        def update(self, content: bytes) -> None:
            raise AssertionError("the content was read")

    monkeypatch.setattr(base_roots.xxhash, "xxh3_128", Unread)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(begin)
    os.truncate(folder / name, 40 << 30)  # sparse: it takes no space
    with pytest.raises(errors.Damaged, match=name):
        Engine(tmp_path / "run", base=folder)
    assert not (tmp_path / "run" / "checkpoints" / "c0000000000").exists()
    assert [entry.name for entry in tmp_path.glob("base-*")] == []
