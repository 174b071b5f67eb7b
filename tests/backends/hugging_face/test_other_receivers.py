"""The receivers of ModelExpress and cwtrain apply what is published with ``checksum="adler32"``.
`make receivers-test` runs it, with both packages beside .venv.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from deltacheck.backends.hugging_face.publish.version_folder import Version, version_path
from tests.backends.hugging_face.test_publish import INDEX, Run, run

__all__ = ["run"]  # a fixture

VERSIONS = 20
FULL_EVERY = 8  # two chains end within the versions


def skipped_without(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def published(run: Run) -> Iterator[Version]:
    """Publish a version for each of 20 steps, whose number is that of its step."""
    run.save(1)
    with run.publisher(full_every=FULL_EVERY, checksum="adler32") as publisher:
        for number in range(1, VERSIONS + 1):
            if number > 1:
                run.save(number)
            version = publisher.poll()
            assert (version.number, version.step) == (number, number)
            yield version


def check(run: Run, step: int, folder: Path) -> None:
    """Compare the tensors of a folder with the weights of a step, bit for bit."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 - it is no dict
                names.add(name)
                actual, expected = content.get_tensor(name), run.saved[step][name]
                assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
                assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), name
    assert names == run.saved[step].keys()


def change_sum(file: Path) -> None:
    """Change a digit of a tensor's sum in the header of a file."""
    content = bytearray(file.read_bytes())
    position = content.index(b'"bias":"') + len(b'"bias":"')
    content[position] = ord("1") if content[position] == ord("0") else ord("0")
    file.write_bytes(content)


class Folder:
    """The calls of ModelExpress's S3 client, on the folder of versions."""

    def get(self, uri: str) -> bytes:
        return Path(uri.removeprefix("s3://bucket")).read_bytes()

    def size(self, uri: str) -> int:
        return len(self.get(uri))


@skipped_without("modelexpress_rl")
def test_modelexpress_applies_every_version(run: Run, tmp_path: Path) -> None:
    from modelexpress_rl.inference.receiver import (
        ObjectStorageGeneratorConfig,
        _LocalCheckpoint,
        _S3Version,
    )
    from modelexpress_rl.object_storage import ObjectStorageType
    from modelexpress_rl.train import WeightPayloadFormat

    receiver: Any = None
    fulls = 0
    for version in published(run):
        folder, base = version_path(run.to, version.number), version.base
        name = f"{version.number:06d}"
        fulls += base is None
        if receiver is None:
            config = ObjectStorageGeneratorConfig(
                next(iter(ObjectStorageType)), name, folder, tmp_path / "cache"
            )
            client: Any = Folder()
            receiver = _LocalCheckpoint(model_name="model", config=config, s3=client)
            receiver.initialize()
            continue
        kinds = WeightPayloadFormat
        target = _S3Version(
            name,
            None if base is None else f"{base:06d}",
            kinds.FULL_HF_CHECKPOINT if base is None else kinds.XOR_DELTA,
            f"s3://bucket{folder}/{INDEX}",
        )
        if version.number == VERSIONS:
            # It compares: with another sum it refuses.
            change_sum(folder / "model.safetensors")
            with pytest.raises(RuntimeError, match="checksum differs for 'bias'"):
                receiver.prepare(target)
            break
        prepared = receiver.prepare(target)
        receiver.activate(prepared)
        check(run, version.number, prepared.path)
    assert fulls == 3


@skipped_without("cwtrain")
def test_cwtrain_applies_every_version(run: Run, tmp_path: Path) -> None:
    from cwtrain.hotload.mirror import MirrorError, WeightMirror

    mirror: Any = None
    for version in published(run):
        folder = version_path(run.to, version.number)
        if version.number == VERSIONS:
            change_sum(folder / "model.safetensors")
            with pytest.raises(MirrorError, match="bias"):
                mirror.apply_delta(folder)
            break
        if version.base is None:
            name = f"{version.number:06d}"
            mirror = WeightMirror.create(folder, tmp_path / "mirror", version=name)
        else:
            assert mirror.apply_delta(folder).tensors_changed == 3
        check(run, version.number, mirror.root)
