"""Files of other formats become steps and come out again, bit for bit; no code of theirs is run."""

from __future__ import annotations

import json
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import deltacheck
from deltacheck.backends.torch import Engine, load
from deltacheck.backends.torch.files import torch_import
from deltacheck.cli import main
from deltacheck.cli.output import DAMAGED, MISUSE, OK, REFUSED
from deltacheck.errors import Damaged
from tests.support.states import assert_same, random_tensor

pytestmark = pytest.mark.usefixtures("forked_imports")


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def tensors(step: int) -> dict[str, torch.Tensor]:
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    )
    found = {
        f"model.{kind}".replace("torch.", ""): random_tensor(kind, (6, 5), step) for kind in kinds
    }
    return found | {
        "frozen": random_tensor(torch.float32, (300, 40), 0),
        "scalar": random_tensor(torch.float32, (), step),
    }


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = main([str(word) for word in words] + ["--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out or captured.err)


def test_a_series_of_safetensors_becomes_steps_and_comes_out_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (20, 3, 100):
        save_file(tensors(step), tmp_path / f"model-{step}.safetensors")
    code, about = told(capsys, "import", tmp_path / "root", *sorted(tmp_path.glob("*.safetensors")))
    assert code == OK
    assert [row["step"] for row in about["steps"]] == [3, 20, 100]
    assert (
        about["steps"][2]["stored_bytes"] < 48_000 < about["steps"][0]["stored_bytes"]
    )  # frozen is written once
    for step in (3, 20, 100):
        assert_same(dict(sorted(tensors(step).items())), load(tmp_path / "root", step))
        out = tmp_path / f"out-{step}.safetensors"
        assert main(["export", str(tmp_path / "root"), str(step), "--out", str(out)]) == OK
        assert_same(load(tmp_path / "root", step), dict(sorted(load_file(out).items())))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_becomes_a_step_and_comes_out_the_same(tmp_path: Path, zipped: bool) -> None:
    weight = torch.randn(8, 3)
    # The format before torch 1.6 has no types that came later.
    model = {name: value for name, value in tensors(1).items() if zipped or "float8" not in name}
    state = {
        "model": model,
        "tied": [weight, weight],
        "step": 7,
        "lr": 0.1,
        "name": None,
        "betas": (0.9, 0.999),
    }
    (tmp_path / "checkpoint-7").mkdir()
    file = tmp_path / "checkpoint-7" / "state.pt"
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    assert main(["import", str(tmp_path / "root"), str(file)]) == OK
    found = load(tmp_path / "root", 7)
    assert_same(state, found)
    assert found["tied"][0] is found["tied"][1]
    assert main(["export", str(tmp_path / "root"), "7", "--out", str(tmp_path / "out.pt")]) == OK
    assert_same(state, torch.load(tmp_path / "out.pt", weights_only=True))


def test_a_file_that_needs_code_is_refused_and_none_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a_1.pt")
    torch.save({"w": torch.ones(2), "evil": Touch(tmp_path / "ran")}, tmp_path / "a_2.pt")
    (tmp_path / "a_3.pt").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    for name in ("a_2.pt", "a_3.pt"):
        code, about = told(
            capsys,
            "import",
            tmp_path / name.partition(".")[0],
            tmp_path / "a_1.pt",
            tmp_path / name,
        )
        assert code == DAMAGED
        assert f"{name} cannot be read without running code from it" in about["error"]["message"]
        assert "weights_only" not in about["error"]["message"]
        assert deltacheck.open(tmp_path / name.partition(".")[0]).steps() == [1]
    assert not (tmp_path / "ran").exists()


class Crafted:
    """Pickled as an array of NumPy whose type and state are those given."""

    def __init__(self, kind: str, state: tuple[object, ...]) -> None:
        self.kind, self.state = kind, state

    def __reduce__(self) -> Any:
        reconstruct, arguments, _ = np.zeros(1).__reduce__()
        return reconstruct, arguments, (1, (2,), np.dtype(self.kind), *self.state)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02cposix\nsystem\n.",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x01a\x93.",
        b"\x80\x02}(X\x01\x00\x00\x00a\x8c\x01bu.",
        b"\x80\x02\x93.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x02P0\n.",
        b"PK\x03\x04",
        b"",
    ],
)
def test_no_refusal_of_a_file_advises_to_run_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a_1.pt").write_bytes(content)
    with pytest.raises(Damaged) as refused:
        torch_import.read(tmp_path / "a_1.pt")
    # With the errors that a traceback shows beside it.
    text = "".join(traceback.format_exception(refused.value))
    assert "`weights_only`" not in text
    assert "likely succeed" not in text
    assert re.search(r"Error: *[.]? *(If|$)", str(refused.value)) is None, "the reason is missing"


def test_arrays_of_numpy_in_torch_files_are_read_without_its_unpickling(tmp_path: Path) -> None:
    state = {
        "random": np.random.default_rng(3).bit_generator.state | {"old": np.random.get_state()},
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "items": [np.float32(0.1), (np.arange(3, dtype=np.complex64), np.bool_(True))],
        "empty": np.zeros((0, 2), np.int16),
    }
    torch.save(state, tmp_path / "a_1.pt")
    assert_same(state, torch_import.read(tmp_path / "a_1.pt"))
    swapped = np.arange(3, dtype=np.int32)
    torch.save({"x": swapped.astype(swapped.dtype.newbyteorder(">"))}, tmp_path / "a_2.pt")
    assert_same({"x": swapped}, torch_import.read(tmp_path / "a_2.pt"))
    for crafted in (
        np.array([Touch(tmp_path / "ran")], object),
        np.zeros(2, [("a", "i4")]),
        Crafted("i4", (False, b"1234")),
        Crafted("M8[s]", (False, b"0" * 16)),
    ):
        torch.save({"w": torch.ones(2), "x": crafted}, tmp_path / "a_3.pt")
        with pytest.raises(Damaged):
            torch_import.read(tmp_path / "a_3.pt")
    assert main(["import", str(tmp_path / "root"), str(tmp_path / "a_3.pt")]) == DAMAGED
    assert not (tmp_path / "root").exists()  # a refusal leaves no empty root
    assert not (tmp_path / "ran").exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a_1.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(deltacheck.errors.Damaged, match=r"a_1\.safetensors"):
        torch_import.read(tmp_path / "a_1.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        torch_import.read(tmp_path / "b_1.pt")


def test_which_step_a_file_becomes_is_said_or_asked(tmp_path: Path) -> None:
    assert torch_import.steps_of(
        ["run2/ckpt-30.pt", "v1/epoch=2-step=9.ckpt", "checkpoint-500/model.safetensors"]
    ) == [
        (9, Path("v1/epoch=2-step=9.ckpt")),
        (30, Path("run2/ckpt-30.pt")),
        (500, Path("checkpoint-500/model.safetensors")),
    ]
    assert torch_import.steps_of(["/model.pt"], step=4) == [(4, Path("/model.pt"))]
    for files, message in (
        (["/model.pt"], "say the step"),
        (["a/x_1.pt", "b/y_1.pt"], "are both step 1"),
        (["c-1/model-00001-of-00002.safetensors"], "a part of a model"),
        (["x_1.npz"], "which say the format"),
    ):
        with pytest.raises(ValueError, match=message):
            torch_import.steps_of(files)


def test_misuse_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a_1.pt")
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"w": torch.ones(2)})
        code, about = told(capsys, "import", tmp_path / "root", tmp_path / "a_1.pt")
        assert (code, about["error"]["kind"]) == (REFUSED, "RootBusy")
    code, about = told(capsys, "import", tmp_path / "root", tmp_path / "a_1.pt")
    assert code == MISUSE
    assert "has step 1 already" in about["error"]["message"]
    assert told(capsys, "import", tmp_path / "root", "a_1.pt", "a_2.pt", "--step", 4)[0] == MISUSE
