"""Versions in a bucket: each appears whole with its index, and a fresh machine applies them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck.backends.hugging_face.publish import version_folder, version_series
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.weight_transfer import PublishedWeights
from deltacheck.cli import main
from deltacheck.cli.output import OK
from deltacheck.errors import (
    BudgetExceeded,
    Damaged,
    NotACheckpointRoot,
    RootBusy,
    StepNotFound,
    StorageFailed,
)
from deltacheck.store.files import storage
from deltacheck.store.files.object_path import ObjectPath
from tests.backends.hugging_face.test_publish import CONFIG, INDEX, Run
from tests.support.s3_server import FOREVER, S3, Fault


class BucketRun(Run):
    """A run whose versions go to a prefix of a bucket."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"s3://bucket/{secrets.token_hex(4)}/versions"
        place = storage.of(self.address)
        assert isinstance(place, ObjectPath)
        self.bucket = place

    def publisher(self, **options: Any) -> deltacheck.Publisher:
        return deltacheck.Publisher(self.root, self.address, **options)

    def receiver(self, **options: Any) -> deltacheck.Receiver:
        return deltacheck.Receiver(self.address, **options)

    def versions(self) -> list[int]:
        return version_folder.numbers(self.bucket)

    def objects(self) -> list[str]:
        """Return the keys of versions."""
        keys = self.bucket.keys()
        names = [key.removeprefix(f"{self.bucket.key}/") for key in keys]
        return [name for name in names if not name.startswith(".deltacheck/")]


@pytest.fixture
def run(tmp_path: Path, s3: S3) -> BucketRun:
    return BucketRun(tmp_path)


@pytest.mark.parametrize("encoding", ["slime", "compact"])
def test_receivers_have_every_version_bit_for_bit(run: BucketRun, encoding: str) -> None:
    run.save(1)
    with run.publisher(full_every=3, encoding=encoding) as publisher:
        assert publisher.poll().base is None
        follower, late = run.receiver(), run.receiver()
        bases = []
        for step in range(2, 10):
            update = follower.poll()
            run.check(follower)
            if step > 2:
                assert update is not None
                assert (update.since, update.changed_elements) == (step - 2, 8)
            if step in (3, 8):
                late.poll()
                run.check(late)
            run.save(step)
            bases.append(publisher.poll().base)
        assert bases == [1, 2, None, 4, 5, None, 7, 8]
    # Two full versions are kept, and what follows them; of the others, nothing is left.
    files = {"model.safetensors", INDEX}
    assert run.objects() == sorted(
        f"weight_v{number:06d}/{file}"
        for number in range(4, 10)
        for file in (files | {"config.json"} if number in (4, 7) else files)
    )
    assert (run.bucket / "weight_v000007" / "config.json").read_bytes() == CONFIG


def test_a_copy_of_the_bucket_is_a_folder_of_versions(run: BucketRun, tmp_path: Path) -> None:
    """The files are those of a directory."""
    run.publish(1, 2, checksum="adler32")
    with deltacheck.Publisher(run.root, run.to, checksum="adler32") as publisher:
        publisher.poll(full=True)
    for name in run.objects():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((run.bucket / name).read_bytes())
    identity = ".deltacheck/publish.json"
    (tmp_path / "copy" / ".deltacheck").mkdir()
    (tmp_path / "copy" / identity).write_bytes((run.bucket / identity).read_bytes())
    receiver = deltacheck.Receiver(tmp_path / "copy")
    receiver.poll()
    run.check(receiver)
    index = json.loads((tmp_path / "copy" / "weight_v000002" / INDEX).read_text())
    assert index["metadata"]["checksum_format"] == "adler32"
    assert sorted(p.name for p in (run.to / "weight_v000001").iterdir()) == sorted(
        p.name for p in (tmp_path / "copy" / "weight_v000001").iterdir()
    )


def test_a_chain_has_at_most_64_versions(run: BucketRun) -> None:
    """A receiver that comes last reads the full version and 63 of changes."""
    bases = []
    run.weights["large"] = torch.zeros(100_000)  # so that the changes are shorter
    run.save(1)
    with run.publisher(full_every=64) as publisher:
        for step in range(1, 66):
            if step > 1:
                run.save(step)
            bases.append(publisher.poll().base)
            if step == 64:
                receiver = run.receiver()
                receiver.poll()
                run.check(receiver)
                assert receiver.version.number == 64
    assert bases == [None, *range(1, 64), None]


_FRESH_MACHINE = """
import hashlib, sys
import deltacheck
receiver = deltacheck.Receiver(sys.argv[1])
receiver.poll()
digest = hashlib.sha256()
for name, array in sorted(receiver.tensors.items()):
    digest.update(name.encode() + array.tobytes())
print(receiver.version.number, digest.hexdigest())
"""


def test_the_command_publishes_to_a_bucket_and_a_fresh_machine_applies(
    run: BucketRun, tmp_path: Path, s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["publish", str(run.root), "--to", run.address, "--once"]
    run.save(1)
    assert main(words) == OK
    run.save(2, 3)
    assert main([*words, "--json"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("version 1: step 1, full (")
    report = json.loads("\n".join(lines[1:]))
    assert report["to"] == run.address
    assert [(v["number"], v["base"], v["step"]) for v in report["versions"]] == [
        (2, 1, 2),
        (3, 2, 3),
    ]
    digest = hashlib.sha256()
    for name, tensor in sorted(run.saved[3].items()):
        digest.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    # It has nothing but the address, in an empty directory.
    (tmp_path / "empty").mkdir()
    child = subprocess.run(
        [sys.executable, "-c", _FRESH_MACHINE, run.address],
        cwd=tmp_path / "empty",
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.stdout.split() == ["3", digest.hexdigest()], child.stderr


INDEX_FAILS = Fault("501", r"weight_v000002/.*index\.json$", times=FOREVER)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", INDEX])
def test_an_interrupted_upload_is_no_version(
    run: BucketRun, s3: S3, tmp_path: Path, file: str
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_text("{}")
    run.publish(1)
    receiver = run.receiver()
    receiver.poll()
    with run.publisher(files=tmp_path / "files") as publisher:
        run.save(2)
        refused = Fault("501", f"/{file}$", times=FOREVER)
        with s3.failing(refused), pytest.raises(StorageFailed):
            publisher.poll(full=True)
        assert run.versions() == [1]
        assert receiver.poll() is None
        with pytest.raises(StepNotFound, match="no version 2"):
            receiver.poll(2)
        # The same publisher goes on; nothing of the failed upload is left.
        run.save(3)
        assert publisher.poll().number == 2
    assert receiver.poll() is not None
    run.check(receiver)
    assert run.versions() == [1, 2]


def test_what_a_killed_publisher_has_left_is_removed(
    run: BucketRun, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(1)
    run.save(2)
    with s3.failing(INDEX_FAILS), run.publisher() as publisher, pytest.raises(StorageFailed):
        publisher.poll()
    assert run.objects()[-1] == "weight_v000002/model.safetensors"
    # The next version has several files, and loaders would take the one that is left for all.
    monkeypatch.setattr(version_series, "_SHARD_BYTES", 1)
    run.save(3)
    with run.publisher() as publisher:
        publisher.poll(full=True)
    left = [name for name in run.objects() if name.startswith("weight_v000002/")]
    assert "weight_v000002/model.safetensors" not in left
    assert len(left) > 3
    receiver = run.receiver()
    receiver.poll()
    run.check(receiver)


def test_a_lost_reply_makes_no_second_version(run: BucketRun, s3: S3) -> None:
    run.publish(1)
    run.save(2)
    index = r"weight_v000002/.*index\.json$"
    with run.publisher() as publisher:
        # The index is stored, and nobody answers any more.
        unanswered = [Fault("after 500", index), Fault("501", index, times=FOREVER)]
        # One look whether it is there comes before.
        faults = [*unanswered, Fault("501", index, "GET", times=FOREVER, skip=1)]
        with s3.failing(*faults), pytest.raises(StorageFailed):
            publisher.poll()
        run.save(3)
        assert publisher.poll().number == 3
    receiver = run.receiver()
    for number in (2, 3):
        receiver.poll(number)
        run.check(receiver)


def test_a_listing_that_lags_hides_no_version(run: BucketRun, s3: S3) -> None:
    run.publish(1, 2)
    stale = Fault("stale", method="LIST", times=FOREVER, hidden="weight_v000002")
    run.save(3)
    with s3.failing(stale):
        receiver = run.receiver()
        receiver.poll()
        assert receiver.version.number == 2
        with run.publisher() as publisher:
            assert publisher.poll().number == 3
    receiver.poll()
    run.check(receiver)


def test_damage_in_a_bucket_changes_nothing_and_a_full_version_follows(run: BucketRun) -> None:
    run.publish(1, 2)
    receiver = run.receiver()
    receiver.poll()
    run.publish(3, 4)
    file = run.bucket / "weight_v000003" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match=r"weight_v000003.* has digest .*--full"):
        receiver.poll()
    file.unlink()
    with pytest.raises(Damaged, match=r"lacks a file of a version.*--full"):
        receiver.poll()
    run.check(receiver)
    with run.publisher() as publisher:
        assert publisher.poll(full=True).number == 5
    receiver.poll()
    run.check(receiver)
    with pytest.raises(BudgetExceeded, match="more than 100, max_bytes"):
        run.receiver(limits=deltacheck.Limits(max_bytes=100)).poll()


def test_what_cannot_be_published_to_is_refused(run: BucketRun, s3: S3) -> None:
    run.save(1)
    (run.bucket.parent / "other" / "file").write_bytes(b"x")
    with pytest.raises(NotACheckpointRoot, match="is not empty"):
        deltacheck.Publisher(run.root, str(run.bucket.parent / "other"))
    with pytest.raises(NotACheckpointRoot, match="deltacheck publish"):
        deltacheck.Receiver(str(run.bucket.parent / "other"))
    root = str(run.bucket.parent / "run")
    with Engine(root) as engine:
        engine.save(1, {"model": run.weights}).wait()
    with pytest.raises(NotACheckpointRoot, match="inside the run"):
        deltacheck.Publisher(root, f"{root}/versions")
    with run.publisher(), pytest.raises(RootBusy, match="publishes to"):
        run.publisher()
    unconditional = Fault("unconditional", times=FOREVER)
    with s3.failing(unconditional), pytest.raises(StorageFailed, match="conditional writes"):
        deltacheck.Publisher(run.root, str(run.bucket.parent / "elsewhere"))
    assert not (run.bucket.parent / "elsewhere").keys()
    assert run.objects() == []


def test_a_trainer_without_a_run_publishes_to_a_bucket(run: BucketRun) -> None:
    transfer = PublishedWeights(run.address)
    for value in (1.0, 2.0):
        weights = {"weight": torch.full((4, 4), value, dtype=torch.bfloat16)}
        transfer.send_weights(iter(weights.items()))
    transfer.destroy()
    receiver = run.receiver()
    receiver.poll()
    assert (receiver.tensors["weight"].astype("float32") == 2).all()
