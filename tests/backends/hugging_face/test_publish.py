"""Weights of a run become versions in a folder; receivers get them bit for bit or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

import deltacheck
from deltacheck.backends.hugging_face.publish import version_series
from deltacheck.backends.torch import Engine, apply
from deltacheck.cli import main
from deltacheck.cli.output import DAMAGED, NOT_FOUND, OK, REFUSED
from deltacheck.codec import frames
from deltacheck.errors import Damaged, NotACheckpointRoot, RootBusy, StepNotFound
from tests.support.states import assert_same, random_tensor

INDEX = "model.safetensors.index.json"
CONFIG = b'{"architectures": ["Tiny"]}'


class Run:
    """A run whose weights change a little at every step: two tensors, one of them tied, one frozen.

    The types are those of NumPy, of ml_dtypes, and one without an element.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "run"
        self.to = folder / "versions"
        self.weights = {
            "layers.0.weight": random_tensor(torch.bfloat16, (40, 50), 1),
            "bias": random_tensor(torch.float32, (70,), 2),
            "frozen": random_tensor(torch.float16, (9,), 3),
            "empty": torch.zeros(0, 4),
        }
        self.weights["head.weight"] = self.weights["layers.0.weight"]
        self.saved: dict[int, dict[str, torch.Tensor]] = {}

    def save(self, *steps: int) -> None:
        with Engine(self.root) as engine:
            if self.saved:
                engine.restore()
            for step in steps:
                self.weights["layers.0.weight"].view(torch.int16)[step % 40, :7] ^= 1
                self.weights["bias"].view(torch.int32)[step % 70] ^= 1
                files = {"config.json": torch.frombuffer(bytearray(CONFIG), dtype=torch.uint8)}
                state = {"model": self.weights, "optimizer": torch.ones(5), "files": files}
                engine.save(step, state).wait()
                self.saved[step] = {n: t.clone() for n, t in self.weights.items()}

    def publisher(self, **options: Any) -> deltacheck.Publisher:
        return deltacheck.Publisher(self.root, self.to, **options)

    def publish(self, *steps: int, **options: Any) -> list[int | None]:
        """Publish each step by a publisher of its own; return the bases of the versions."""
        bases = []
        for step in steps:
            self.save(step)
            with self.publisher(**options) as publisher:
                (version,) = publisher.run(timeout=0)
            assert version.step == step
            bases.append(version.base)
        return bases

    def check(self, receiver: deltacheck.Receiver) -> None:
        assert receiver.version is not None
        expected = self.saved[receiver.version.step]
        assert receiver.tensors.keys() == expected.keys()
        for name, array in receiver.tensors.items():
            tensor = expected[name]
            assert (array.dtype.name, array.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
            assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes(), name


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("encoding", ["slime", "compact"])
def test_receivers_have_every_version_bit_for_bit(run: Run, encoding: str) -> None:
    served = {"weights": {n: torch.zeros_like(t) for n, t in run.weights.items()}}["weights"]
    served["head.weight"] = served["layers.0.weight"]
    run.save(1)
    with run.publisher(full_every=3, encoding=encoding) as publisher:
        assert publisher.poll().base is None
        follower, late = deltacheck.Receiver(run.to), deltacheck.Receiver(run.to)
        bases = []
        for step in range(2, 10):
            update = follower.poll()
            assert update is not None
            apply(update, served, check=True)
            assert_same(run.saved[update.step], served)
            run.check(follower)
            if step > 2:
                # Only what has changed: seven elements and one.
                assert update.since == step - 2
                assert update.changed_elements == 8
            if step in (3, 8):
                late.poll()
                run.check(late)
            run.save(step)
            version = publisher.poll()
            assert version is not None
            bases.append(version.base)
        assert bases == [1, 2, None, 4, 5, None, 7, 8]
        assert publisher.poll() is None
    assert follower.poll(7) is not None
    run.check(follower)
    # Two full versions are kept, and what follows them.
    assert sorted(path.name for path in run.to.glob("weight*")) == [
        f"weight_v{n:06d}" for n in range(4, 10)
    ]
    # What a full version has is a model that any reader loads.
    full = run.to / "weight_v000007"
    loaded = load_file(full / "model.safetensors")
    assert_same(run.saved[7], {name: loaded[name] for name in run.saved[7]})
    assert (full / "config.json").read_bytes() == CONFIG


@pytest.mark.parametrize(
    ("checksum", "sum_of"),
    [
        ("xxh3-128", xxhash.xxh3_128_hexdigest),
        ("adler32", lambda content: f"{zlib.adler32(content):08x}"),
    ],
)
def test_a_version_has_the_layout_of_slime(run: Run, checksum: str, sum_of: Any) -> None:
    """Decode one without our code, as the receiver of slime does."""
    run.publish(1, 2, checksum=checksum)
    folder = run.to / "weight_v000002"
    index = json.loads((folder / INDEX).read_text())
    metadata = index["metadata"]
    assert {key: metadata[key] for key in metadata.keys() - {"deltacheck"}} == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    changed = {"layers.0.weight", "bias", "head.weight"}
    assert index["weight_map"] == dict.fromkeys(changed, "model.safetensors")
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata().keys() == set(file.keys()) == changed
        for name, digest in file.metadata().items():
            frame = file.get_tensor(name)
            assert frame.dtype == np.uint8
            difference = np.frombuffer(numcodecs.zstd.decompress(frame), np.uint8)
            before, now = (run.saved[n][name].view(torch.uint8).numpy().ravel() for n in (1, 2))
            assert (before ^ difference == now).all()
            assert digest == sum_of(now.tobytes())
    full = run.to / "weight_v000001"
    metadata = json.loads((full / INDEX).read_text())["metadata"]
    assert "delta_encoding" not in metadata
    assert metadata["checksum_format"] == checksum
    with safe_open(full / "model.safetensors", "pt") as file:
        sums = {n: sum_of(t.view(torch.uint8).numpy().tobytes()) for n, t in run.saved[1].items()}
        assert file.metadata() == {"format": "pt", **sums}
    receiver = deltacheck.Receiver(run.to)
    receiver.poll()
    run.check(receiver)


def test_options_that_no_receiver_takes_are_refused(run: Run) -> None:
    run.save(1)
    with pytest.raises(ValueError, match="full_every must be from 1 to 64, not 65"):
        run.publisher(full_every=65)
    with pytest.raises(ValueError, match="checksum must be one of xxh3-128, adler32, not 'md5'"):
        run.publisher(checksum="md5")


def test_what_changes_cannot_express_is_a_full_version(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.publish(1, 2) == [None, 1]
    receiver = deltacheck.Receiver(run.to)
    receiver.poll()
    run.weights["new"] = torch.ones(3)
    assert run.publish(3) == [None]
    update = receiver.poll()
    # It cannot be told what has changed, if there are other tensors.
    assert update is not None
    assert update.since is None
    run.check(receiver)
    # A tensor that is too long for a frame, behind two that are not, in files of their own.
    run.weights["frozen"].view(torch.int16)[0] ^= 1
    with monkeypatch.context() as patched:
        patched.setattr(frames, "MAX_FRAME_BYTES", 300)
        patched.setattr(version_series, "_SHARD_BYTES", 1)
        assert run.publish(4) == [None]
    # Versions that together are longer than the last full one, in several files.
    monkeypatch.setattr(version_series, "_SHARD_BYTES", 3000)
    for step in (5, 6):
        run.weights["layers.0.weight"].copy_(random_tensor(torch.bfloat16, (40, 50), step))
        assert run.publish(step) == [step - 1]
    assert len(list((run.to / "weight_v000006").glob("*.safetensors"))) == 3
    assert run.publish(7) == [None]
    for number in (5, 6, 7):
        receiver.poll(number)
        run.check(receiver)


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_damaged_version_changes_nothing_and_a_full_one_follows(
    run: Run, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.publish(1, 2)
    receiver = deltacheck.Receiver(run.to)
    receiver.poll()
    run.publish(3, 4)
    _damage(run.to / "weight_v000003" / name)
    with pytest.raises(Damaged, match=r"weight_v000003.*--full"):
        receiver.poll()
    run.check(receiver)
    assert receiver.version.number == 2
    # What was published is read by a new publisher, and not by one that writes a full version.
    run.save(5)
    words = ["publish", str(run.root), "--to", str(run.to), "--once"]
    assert main(words) == DAMAGED
    assert "--full" in capsys.readouterr().err
    assert main([*words, "--full", "--json"]) == OK
    (version,) = json.loads(capsys.readouterr().out)["versions"]
    assert (version["number"], version["base"], version["step"]) == (5, None, 5)
    receiver.poll()
    run.check(receiver)


def test_wrong_bytes_with_the_right_file_digest_are_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that goes wrong, or a copy of another run, is found by the digests of tensors."""
    run.publish(1)
    receiver = deltacheck.Receiver(run.to)
    receiver.poll()
    receiver._tensors["bias"] = receiver._tensors["bias"]._replace(data=np.zeros(280, np.uint8))
    run.publish(2)
    with pytest.raises(Damaged, match=r"'bias' of version 2 .*has digest .*expected is"):
        receiver.poll()
    assert receiver.version.number == 1
    assert deltacheck.Receiver(run.to).poll(2) is not None


_CHILD = """
import os, signal, sys
from deltacheck import Publisher
from deltacheck.backends.hugging_face.publish import version_series
kind, root, to = sys.argv[1:]
done = getattr(version_series, kind)
def killed(*arguments):
    done(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(version_series, kind, killed)
Publisher(root, to).run(timeout=0)
"""


@pytest.mark.parametrize("moment", ["_write_file", "safetensors_header"])
def test_a_killed_publisher_leaves_whole_versions_only(run: Run, moment: str) -> None:
    """It is killed when the index is written but has no name, and before the first file."""
    run.publish(1)
    run.save(2)
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, moment, str(run.root), str(run.to)],
        capture_output=True,
        timeout=240,
    )
    assert child.returncode == -9, child.stderr
    assert [path.name for path in run.to.glob("weight*")] == ["weight_v000001"]
    receiver = deltacheck.Receiver(run.to)
    receiver.poll()
    run.check(receiver)
    assert any((run.to / ".deltacheck").glob("new-*"))
    with run.publisher() as publisher:
        assert [v.number for v in publisher.run(timeout=0)] == [2]
    assert not any((run.to / ".deltacheck").glob("new-*"))
    receiver.poll()
    run.check(receiver)


def test_what_cannot_be_published_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotACheckpointRoot):
        run.publisher()
    run.save(1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for to, cause in (
        (tmp_path / "other", "is not empty"),
        (run.root / "inside", "inside the run"),
    ):
        with pytest.raises(NotACheckpointRoot, match=cause):
            deltacheck.Publisher(run.root, to)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]
    with pytest.raises(NotACheckpointRoot, match="deltacheck publish"):
        deltacheck.Receiver(tmp_path / "other")
    with run.publisher() as publisher, pytest.raises(RootBusy, match="publishes to"):
        run.publisher()
    assert publisher is not None
    # The versions of another run.
    shutil.copytree(run.root, tmp_path / "copy")
    with pytest.raises(NotACheckpointRoot, match="has the versions of"):
        deltacheck.Publisher(tmp_path / "copy", run.to)
    # Nothing is published yet.
    receiver = deltacheck.Receiver(run.to)
    assert receiver.poll() is None
    assert receiver.tensors == {}
    with pytest.raises(StepNotFound, match="no version 1; it has none"):
        receiver.poll(1)
    words = ["publish", str(run.root), "--to", str(run.to), "--once"]
    assert main([*words, "--leaves", "nothing*"]) == NOT_FOUND
    assert main([*words, "--files", str(tmp_path / "missing")]) in (NOT_FOUND, REFUSED)
    # A step without an array, and one after it.
    with Engine(tmp_path / "plain") as engine:
        engine.save(1, {"step": 1}).wait()
        engine.save(2, {"step": 2}).wait()
    with deltacheck.Publisher(tmp_path / "plain", tmp_path / "none") as publisher:
        with pytest.raises(StepNotFound, match=r"step 2 has no array.*--leaves"):
            publisher.poll()
        assert publisher.poll() is None


def test_the_command_publishes_new_steps(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["publish", str(run.root), "--to", str(run.to), "--once"]
    run.save(1, 2)
    assert main(words) == OK
    assert capsys.readouterr().out.startswith("version 1: step 2, full (")
    assert main(words) == OK
    assert capsys.readouterr().out == f"{run.to}: nothing new to publish\n"
    run.save(3, 4, 5)
    with run.publisher() as publisher:
        assert publisher.poll().step == 3
    assert main([*words, "--newest-only", "--encoding", "compact"]) == OK
    assert capsys.readouterr().out.startswith("version 3: step 5, changes since version 2 (")
    index = json.loads((run.to / "weight_v000003" / INDEX).read_text())
    assert index["metadata"]["delta_encoding"] == "deltacheck-words"
    receiver = deltacheck.Receiver(run.to)
    receiver.poll()
    run.check(receiver)
