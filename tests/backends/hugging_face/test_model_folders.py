"""Folders of models become steps, and steps become folders that readers of safetensors load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltacheck.backends.hugging_face import base_root, model_export
from deltacheck.backends.torch import Engine, load
from deltacheck.backends.torch.files import torch_import
from deltacheck.cli import main
from deltacheck.cli.output import DAMAGED, MISUSE, OK, REFUSED
from deltacheck.errors import Damaged, UnsupportedLeaf
from tests.support.states import assert_same, random_tensor

pytestmark = pytest.mark.usefixtures("forked_imports")

CONFIG = b'{"architectures": ["Tiny"]}'
INDEX = "model.safetensors.index.json"


def weights(step: int) -> dict[str, torch.Tensor]:
    return {
        f"layers.{n}.weight": random_tensor(torch.bfloat16, (40, 5), n + step) for n in range(3)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two shards of 800 and 400 bytes, with what a trainer keeps beside it."""
    path = tmp_path / "checkpoint-7"
    path.mkdir()
    tensors, weight_map = weights(7), {}
    for number, names in enumerate((("0", "1"), ("2",)), 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        part = {f"layers.{n}.weight": tensors[f"layers.{n}.weight"] for n in names}
        save_file(part, path / shard)
        weight_map |= dict.fromkeys(part, shard)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_bytes(CONFIG)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", ".hidden"):
        (path / name).write_text("not of the model")
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = main([str(word) for word in words] + ["--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out or captured.err.splitlines()[-1])


def test_a_folder_becomes_a_step_and_a_folder_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A model that was downloaded is a folder of links to the blobs of its repository.
    repository = tmp_path / "models--a--b"
    links, blobs = repository / "snapshots" / "checkpoint-9", repository / "blobs"
    links.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.glob("*.*")):
        shutil.copy(file, blobs / str(number))
        (links / file.name).symlink_to(f"../../blobs/{number}")
    code, about = run(capsys, "import", tmp_path / "root", folder, links)
    assert code == OK
    assert [row["step"] for row in about["steps"]] == [7, 9]
    assert_same(weights(7), load(tmp_path / "root", 9)["model"])
    state = load(tmp_path / "root", 7)
    assert_same(weights(7), state["model"])
    names = ["additional_chat_templates/tool.jinja", "config.json"]
    assert sorted(state["files"]) == names
    code, about = run(
        capsys, "export", tmp_path / "root", 7, "--to", "hf", "--out", tmp_path / "out"
    )
    assert (code, about["shards"], about["copied"]) == (OK, ["model.safetensors"], names)
    assert_same(weights(7), load_file(tmp_path / "out" / "model.safetensors"))
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG
    assert (tmp_path / "out" / names[0]).read_text() == "{{ x }}"


def test_shards_hold_whole_tensors_up_to_their_size(
    tmp_path: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    state = {"model": weights(1) | {"wide": torch.arange(500)}, "optimizer": torch.ones(3)}
    with Engine(root) as engine:
        engine.save(1, state).wait()
    (folder / "config.json").write_bytes(CONFIG + b" ")
    monkeypatch.setattr(model_export, "SHARD_BYTES", 800)
    options = ("--files", folder, "--out", out)
    code, about = run(capsys, "export", root, "--to", "hf", *options)
    assert code == OK
    assert about["file_bytes"] == sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 3 * 400 + 4000
    merged: dict[str, torch.Tensor] = {}
    sizes = []
    for shard in about["shards"]:
        part = load_file(out / shard)
        assert {index["weight_map"][name] for name in part} == {shard}
        sizes.append(sum(tensor.nbytes for tensor in part.values()))
        merged |= part
    assert sizes == [800, 400, 4000]  # a tensor is never cut
    assert_same(state["model"], merged)
    assert (out / "config.json").read_bytes() == CONFIG + b" "
    # Nothing is replaced, and nothing is left of an export that fails.
    assert run(capsys, "export", root, "--to", "hf", *options)[0] == REFUSED
    assert run(capsys, "export", root, "--to", "npz", "--files", folder)[0] == MISUSE
    next((root / "segments").glob("*/packed/uint16/c.0")).write_bytes(b"damaged")
    assert run(capsys, "export", root, "--to", "hf", "--out", tmp_path / "no")[0] == DAMAGED
    assert {path.name for path in tmp_path.iterdir()} == {"root", "out", folder.name}


def test_a_folder_without_a_configuration_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"layer.weight": torch.ones(2)}).wait()
    assert main(["export", str(tmp_path / "root"), "--to", "hf", "--out", str(tmp_path / "o")]) == 0
    assert "has no config.json" in capsys.readouterr().err
    assert load_file(tmp_path / "o" / "model.safetensors").keys() == {"layer.weight"}


ADAPTER = {
    "m.q.lora_A.default.weight": "m.q.lora_A.weight",
    "m.q.lora_magnitude_vector.default.weight": "m.q.lora_magnitude_vector",
    "m.e.lora_embedding_A.default": "m.e.lora_embedding_A",
    "m.head.modules_to_save.default.weight": "m.head.weight",
    "m.default.q.base_layer.bias": "m.default.q.base_layer.bias",
}


def save_adapter(root: Path, config: bytes, names: Iterable[str]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}
    files = {"adapter_config.json": config, "ref/adapter_config.json": config}
    content = {name: np.frombuffer(text, np.uint8) for name, text in files.items()}
    with Engine(root) as engine:
        engine.save(1, {"model": tensors, "files": content}).wait()
    return tensors


def test_an_adapter_gets_the_files_and_names_of_peft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    names = [*ADAPTER, "m.q.lora_A.ref.weight"]
    tensors = save_adapter(root, b'{"peft_type": "LORA"}', names)
    monkeypatch.setattr(model_export, "SHARD_BYTES", 1)
    assert main(["export", str(root), "--to", "hf", "--out", str(out)]) == OK
    assert not capsys.readouterr().err
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*")) == [
        f"{folder}adapter_{name}"
        for folder in ("", "ref/")
        for name in ("config.json", "model.safetensors")
    ]
    expected = {new: tensors[old] for old, new in sorted(ADAPTER.items(), key=lambda pair: pair[1])}
    assert_same(expected, load_file(out / "adapter_model.safetensors"))
    ref = load_file(out / "ref" / "adapter_model.safetensors")
    assert_same({"m.q.lora_A.weight": tensors["m.q.lora_A.ref.weight"]}, ref)


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (b'{"peft_type": "P_TUNING"}', ["p.default.x"], "type 'P_TUNING', and --to hf writes IA3"),
        (b"[]", ["q.lora_A.default.weight"], "does not say which kind of adapter"),
        (b'{"peft_type": "LORA"}', ["q.w.default", "q.default.w"], "would both be called 'q.w'"),
    ],
)
def test_an_adapter_that_peft_would_not_read_is_refused(
    config: bytes,
    names: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_adapter(tmp_path / "root", config, names)
    code, about = run(capsys, "export", tmp_path / "root", "--to", "hf", "--out", tmp_path / "out")
    assert code == REFUSED, about
    assert message in str(about)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not (find_spec("peft") and find_spec("transformers")), reason="needs PEFT")
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "loha", "lokr", "oft"])
def test_peft_loads_an_exported_adapter(kind: str, tmp_path: Path) -> None:
    import peft

    # Here alone, because it imports all of Trainer.
    from deltacheck.backends.torch.trainer.training_state import model_state

    kinds = {
        "lora": partial(peft.LoraConfig, modules_to_save=["2"], init_lora_weights=False),
        "dora": partial(peft.LoraConfig, use_dora=True, init_lora_weights=False),
        "ia3": partial(peft.IA3Config, feedforward_modules=[], init_ia3_weights=False),
        "loha": partial(peft.LoHaConfig, init_weights=False),
        "lokr": partial(peft.LoKrConfig, init_weights=False),
        "oft": partial(peft.OFTConfig, r=0, oft_block_size=4, init_weights=False),
    }

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    model: Any = peft.get_peft_model(base(), kinds[kind](target_modules=["0"]))
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            torch.nn.init.constant_(parameter, number / 64)
    model.save_pretrained(tmp_path / "own")
    config = (tmp_path / "own" / "adapter_config.json").read_bytes()
    state = {
        "model": model_state(model),
        "files": {"adapter_config.json": np.frombuffer(config, np.uint8)},
    }
    with Engine(tmp_path / "root") as engine:
        engine.save(1, state).wait()
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "root"), "--to", "hf", "--out", str(out)]) == OK
    name = "adapter_model.safetensors"
    assert_same(load_file(tmp_path / "own" / name), load_file(out / name))
    loaded = peft.PeftModel.from_pretrained(base(), out)
    probe = torch.ones(1, 8)
    assert torch.equal(loaded(probe), model(probe))


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        ("remove", FileNotFoundError, "lacks 'model-00002-of-00002.safetensors', 1 of the 2 shar"),
        ("cut", Damaged, "model-00002-of-00002.safetensors cannot be read"),
        ("swap", Damaged, "lacks 'layers.2.weight'"),
        ("surplus", Damaged, "has 'layers.9.weight' in addition"),
        ("escape", Damaged, "names '../x.safetensors', which is no file of its folder"),
        ("text", Damaged, "is no index of shards"),
        ("large", UnsupportedLeaf, "vocab.json has 67,108,865 bytes"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    spoil: str, kind: type[Exception], message: str, folder: Path
) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    if spoil == "remove":
        shard.unlink()
    elif spoil == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif spoil == "swap":
        shutil.copy(folder / "model-00001-of-00002.safetensors", shard)
    elif spoil == "surplus":
        save_file(load_file(shard) | {"layers.9.weight": torch.ones(2)}, shard)
    elif spoil == "escape":
        (folder / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}')
    elif spoil == "text":
        (folder / INDEX).write_text('{"weight_map": {"a": 1}}')
    else:
        with (folder / "vocab.json").open("wb") as file:
            file.truncate((64 << 20) + 1)
    with pytest.raises(kind, match=re.escape(message)):
        torch_import.read(folder)


def test_a_forged_name_of_a_file_does_not_leave_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("../evil.json", f"{tmp_path}/evil.json")
    with Engine(tmp_path / "root") as engine:
        for step, name in enumerate(names):
            files = {name: np.zeros(3, np.uint8)}
            engine.save(step, {"model": {"w": torch.ones(2)}, "files": files}).wait()
    for step, status in enumerate((OK, DAMAGED)):  # the first is left out, as a hidden file is
        out = tmp_path / f"out-{step}"
        assert run(capsys, "export", tmp_path / "root", step, "--to", "hf", "--out", out)[0] == (
            status
        )
    assert {path.name for path in tmp_path.iterdir()} == {"root", "out-0"}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x/y": 1.0, "x": {"y": 2.0}}, "leaves 'x%2Fy' and 'x/y' would both be called 'x/y'"),
        ({"model": {"1": 1.0, 1: 2.0}}, "would both be called '1'"),
        ({"model": {"%31": 1.0, "": 2.0, "%": 3.0}}, ""),
        ({"w": 1.0, "files": {"a/b": 1.0, "a": {"b": 2.0}}}, "would both be called 'a/b'"),
        ({"w": 1.0, "files": {"a\0b": 1.0}}, "no file system can hold"),
        ({"w": 1.0, "files": {"a": 1.0, "a/b": 2.0}}, "no file system can hold"),
        ({"w": 1.0, "files": {"a" * 256: 1.0}}, "no file system can hold"),
        ({"w": 1.0, "files": {"": 1.0}}, "no file system can hold"),
        ({"w": 1.0, "files": {"a//b": 1.0}}, "no file system can hold"),
    ],
)
@pytest.mark.parametrize("command", ["export", "publish"])
def test_no_name_stands_for_two_values_and_every_file_can_be_made(
    command: str,
    state: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, _as_tensors(state)).wait()
    words = (
        ("export", tmp_path / "root", "--to", "hf", "--out", tmp_path / "out")
        if command == "export"
        else ("publish", tmp_path / "root", "--to", tmp_path / "out", "--once")
    )
    code, about = run(capsys, *words)
    if said:
        assert code == REFUSED
        assert said in about["error"]["message"]
        assert not list(tmp_path.glob("out/**/*.safetensors"))
    else:
        (file,) = tmp_path.glob("out/**/*.safetensors")
        found = {name: tensor.item() for name, tensor in load_file(file).items()}
        assert found == {"%31": 1.0, "": 2.0, "%": 3.0}


def _as_tensors(state: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: _as_tensors(value) if isinstance(value, dict) else torch.tensor(value)
        for key, value in state.items()
    }


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "additional_chat_templates/x.jinja", "model-00001-of-00002", INDEX]
)
@pytest.mark.parametrize("in_cache", [False, True])
def test_a_link_out_of_the_folder_is_not_followed(
    name: str,
    in_cache: bool,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if in_cache:
        (tmp_path / "snapshots").mkdir()
        folder = folder.rename(tmp_path / "snapshots" / folder.name)
    file = next(folder.glob(f"{name}*"), folder / name)
    secret = tmp_path / "other" / file.name
    secret.parent.mkdir()
    if file.exists():
        file.rename(secret)
    else:
        secret.write_text("a secret of the machine")
    file.symlink_to(secret)
    code, about = run(capsys, "import", tmp_path / "root", folder)
    assert code == DAMAGED
    assert f"is a link to {secret}" in about["error"]["message"]
    if "model" not in name:
        with Engine(tmp_path / "run") as engine:
            engine.save(1, weights(1)).wait()
        words = ("export", tmp_path / "run", "--to", "hf", "--files", folder, "--out")
        assert run(capsys, *words, tmp_path / "out")[0] == DAMAGED
        assert not (tmp_path / "out").exists()


def test_a_link_within_the_folder_is_followed(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("config.json")
    assert bytes(torch_import.read(folder)["files"]["tokenizer.json"]) == CONFIG


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_weights_of_a_base_are_compared_with_their_header_before_they_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "base-1"
    folder.mkdir()
    if name.endswith(".bin"):
        (folder / name).touch()
    else:
        save_file(weights(1), folder / name)
    with (folder / name).open("r+b") as file:
        file.truncate(40 << 30)

    class Digest:
        def __init__(self, content: bytes = b"") -> None:
            pass

        def update(self, content: bytes) -> None:
            raise AssertionError("the content is read")

    monkeypatch.setattr(base_root.xxhash, "xxh3_128", Digest)
    with pytest.raises(Damaged, match=name.replace(".", "[.]")):
        base_root.base_root(folder, tmp_path)
