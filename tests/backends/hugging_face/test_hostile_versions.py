"""Folders of versions that somebody has forged: each is refused, soon and in little memory."""

from __future__ import annotations

import json
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Limits
from deltacheck.backends.hugging_face.publish import version_folder
from deltacheck.backends.hugging_face.publish.version_folder import INDEX, PRIVATE
from deltacheck.backends.torch import Engine
from deltacheck.errors import BudgetExceeded, Damaged, DeltacheckError

SHARD = "model.safetensors"
MOST_BYTES = 512 << 20
Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, of which the second has the changes of one tensor."""
    folder = tmp_path_factory.mktemp("honest")
    weights = {"a": torch.zeros(64, 64), "b": torch.ones(8, 8)}
    with (
        Engine(folder / "run") as engine,
        deltacheck.Publisher(folder / "run", folder / "to", encoding="compact") as publisher,
    ):
        for step in (1, 2):
            weights["a"][0, 0] = step
            engine.save(step, {"model": weights}).wait()
            publisher.poll()
    return folder / "to"


def index_path(folder: Path, number: int = 2) -> Path:
    return version_folder.version_path(folder, number) / INDEX


def sealed(folder: Path, edit: Callable[[Any], Any], number: int = 2) -> None:
    """Change an index, and give it the digest of its new content."""
    path = index_path(folder, number)
    document = json.loads(path.read_bytes())
    document = edit(document) or document
    extension = document["metadata"]["deltacheck"]
    extension.pop("digest", None)
    extension["digest"] = version_folder.digest(json.dumps(document, sort_keys=True).encode())
    path.write_text(json.dumps(document))


def field(*keys: str, value: Any, number: int = 2) -> Spoil:
    def edit(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return lambda folder: sealed(folder, edit, number)


def ours(key: str, value: Any, number: int = 2) -> Spoil:
    return field("metadata", "deltacheck", key, value=value, number=number)


def shard(content: bytes) -> Spoil:
    """Replace the weights of the full version, with the right digest of the file."""

    def spoil(folder: Path) -> None:
        path = version_folder.version_path(folder, 1) / SHARD
        path.write_bytes(content)
        digest = version_folder.digest(content)
        sealed(folder, lambda d: d["metadata"]["deltacheck"]["files"].update({SHARD: digest}), 1)

    return spoil


def header(text: bytes, data: bytes = bytes(8)) -> Spoil:
    return shard(len(text).to_bytes(8, "little") + text + data)


def entries(*tensors: dict[str, Any], data: bytes = bytes(8)) -> Spoil:
    return header(json.dumps({f"t{n}": t for n, t in enumerate(tensors)}).encode(), data)


def entry(
    dtype: Any = "F32", shape: Any = (2,), data_offsets: Any = (0, 8), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets, **more}


def text(content: bytes) -> Spoil:
    return lambda folder: void(index_path(folder).write_bytes(content))


def identity(content: bytes) -> Spoil:
    return lambda folder: void((folder / PRIVATE / "publish.json").write_bytes(content))


def void(_: object) -> None:
    pass


def replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    """Put something else in the place of a file or a folder."""

    def spoil(folder: Path) -> None:
        path = folder / name
        path.rename(folder.parent / "kept")
        make(path)

    return spoil


def long_file(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


FILES = {
    "identity": f"{PRIVATE}/publish.json",
    "index": f"weight_v000002/{INDEX}",
    "weights": f"weight_v000001/{SHARD}",
    "changes": f"weight_v000002/{SHARD}",
}
MAKERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to the file": lambda path: path.symlink_to(path.parents[2] / "kept"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "directory": Path.mkdir,
    "sparse file of 64 GiB": lambda path: long_file(path, 64 << 30),
}
ZEROS = "0" * 32
BRACKETS = b"[" * 1_000_000

CASES: dict[str, Spoil] = {
    **{
        f"{what} for the {name}": replaced(file, make)
        for name, file in FILES.items()
        for what, make in MAKERS.items()
    },
    "link for the private folder": replaced(PRIVATE, lambda p: p.symlink_to(p.parents[1] / "kept")),
    "identity nested": identity(BRACKETS),
    "identity list": identity(b"[]"),
    "identity of numbers": identity(b'{"format": 1, "run": 5}'),
    "identity of text format": identity(b'{"format": "1", "run": "x"}'),
    "identity no utf-8": identity(b"\xff"),
    "index nested": text(BRACKETS),
    "index nested in a known place": text(b'{"metadata": ' + BRACKETS),
    "index empty": text(b""),
    "index null": text(b"null"),
    "index no utf-8": text(b'{"metadata": "\xff"}'),
    "index of many lists": text(
        b'{"metadata": {"deltacheck": {"format": 1}}, "x": [' + b"[]," * (20 << 20) + b"[]]}"
    ),
    "index with a long number": text(b'{"metadata": {"deltacheck": {"format": ' + b"1" * 9999),
    "extension a list": field("metadata", "version", value=[]),
    "weight_map a list": field("weight_map", value=[]),
    "weight_map of numbers": field("weight_map", value={"a": 1}),
    "weight_map to an unknown file": field("weight_map", "a", value="x.safetensors"),
    "step a text": ours("step", "1"),
    "step a list": ours("step", [1]),
    "step a float": ours("step", 1.5),
    "step null": ours("step", None),
    "step below zero": ours("step", -1),
    "step of 100 digits": ours("step", 10**100),
    "step true": ours("step", True),
    "seq an object": ours("seq", {}),
    "file_bytes a text": ours("file_bytes", "many"),
    "ties a number": ours("ties", 5, 1),
    "ties of lists": ours("ties", {"a": ["b"]}, 1),
    "ties to nothing": ours("ties", {"a": "z"}, 1),
    "ties of nothing": ours("ties", {"z": "a"}, 1),
    "ties to itself": ours("ties", {"a": "a"}, 1),
    "ties of unequal tensors": ours("ties", {"a": "b"}, 1),
    "checksums a text": ours("checksums", "x"),
    "checksums of numbers": ours("checksums", {"a": 1}),
    "files a list": ours("files", [SHARD]),
    "files with NUL": ours("files", {"a\0b": ZEROS, SHARD: ZEROS}),
    "files that leave the folder": ours("files", {"../x": ZEROS, SHARD: ZEROS}),
    "files absolute": ours("files", {"/etc/passwd": ZEROS, SHARD: ZEROS}),
    "unknown field": ours("more", BRACKETS.decode()[:100]),
    "version of another": field("metadata", "version", value="000007"),
    "version in other digits": field("metadata", "version", value="٠٠٠٠٠٢"),
    "base of another": field("metadata", "base_version", value="000009"),
    "base of itself": field("metadata", "base_version", value="000002"),
    "shard empty": shard(b""),
    "shard of 3 bytes": shard(b"abc"),
    "header longer than the file": shard(b"\xff" * 8 + b"{}"),
    "header nested": header(BRACKETS),
    "header nested in a tensor": header(b'{"t": {"shape": ' + BRACKETS),
    "header a list": header(b"[]"),
    "header no utf-8": header(b'{"\xff": 1}'),
    "tensor a number": header(b'{"t": 1}'),
    "tensor of 70 axes": entries(entry(shape=[1] * 69 + [2])),
    "tensor of overflowing axes": entries(entry(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0])),
    "tensor of huge axes": entries(entry(shape=[10**30])),
    "tensor of axes below zero": entries(entry(shape=[-1, -2])),
    "tensor of float axes": entries(entry(shape=[2.0])),
    "tensor of text axes": entries(entry(shape="22")),
    "tensor of an unknown type": entries(entry(dtype="F5")),
    "tensor whose type is a list": entries(entry(dtype=["F32"])),
    "tensor beyond the end": entries(entry(shape=[200], data_offsets=[0, 800])),
    "tensor that ends before it begins": entries(entry(data_offsets=[8, 0])),
    "tensor of three offsets": entries(entry(data_offsets=[0, 4, 8])),
    "tensor of text offsets": entries(entry(data_offsets=["0", "8"])),
    "tensors that overlap": entries(
        *[entry(shape=[1 << 17], data_offsets=[0, 1 << 19])] * 8000, data=bytes(1 << 19)
    ),
    "tensors with a gap": entries(entry(shape=[1], data_offsets=[4, 8])),
    "data behind the tensors": entries(entry(shape=[1], data_offsets=[0, 4])),
}


def polled(folder: Path, **options: Any) -> tuple[BaseException | None, int]:
    """Return the error of a receiver, and the most memory that it had."""
    errors: list[BaseException | None] = []

    def poll() -> None:
        try:
            deltacheck.Receiver(folder, **options).poll()
            errors.append(None)
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            errors.append(error)

    tracemalloc.start()
    try:
        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        thread.join(240)
        assert errors, "the receiver hangs"
        return errors[0], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", CASES)
def test_a_forged_folder_is_refused_by_a_typed_error(
    name: str, honest: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "to"
    shutil.copytree(honest, folder)
    CASES[name](folder)
    error, peak = polled(folder)
    assert isinstance(error, DeltacheckError), error
    assert "defect" not in str(error)
    assert peak < MOST_BYTES


def test_an_honest_folder_is_read(honest: Path) -> None:
    receiver = deltacheck.Receiver(honest, limits=Limits(max_bytes=1 << 16))
    assert receiver.poll() is not None
    assert receiver.tensors["a"][0, 0] == 2
    # A link to the folder itself is the choice of the user.
    assert np.array_equal(receiver.tensors["b"], np.ones((8, 8)))


def test_limits_hold_for_the_weights_of_all_versions_that_are_read(honest: Path) -> None:
    error, _ = polled(honest, limits=Limits(max_bytes=1 << 10))
    assert isinstance(error, BudgetExceeded)
    assert "more than 1024, max_bytes" in str(error)
    error, _ = polled(honest, limits=Limits(max_seconds=0))
    assert isinstance(error, BudgetExceeded)


def test_a_link_in_the_place_of_a_version_is_no_version(honest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "to"
    shutil.copytree(honest, folder)
    (folder / "weight_v000003").symlink_to(folder / "weight_v000002")
    assert version_folder.numbers(folder) == [1, 2]
    with pytest.raises(Damaged):
        version_folder.read_index(folder, 3)
