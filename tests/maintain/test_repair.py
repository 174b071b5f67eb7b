"""Repair writes again what follows from the rest, names what is lost, and takes nothing away
unless that is asked for.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.repair import repair
from deltacheck.store import collect, layout
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.object_path import ObjectPath
from deltacheck.store.files.storage import take_lease
from deltacheck.store.lock.object_lease import ObjectLease
from deltacheck.store.roots.opening import open_root
from tests.support.s3_server import FOREVER, S3, Fault
from tests.support.states import assert_same

Run = tuple[Path, dict[int, Any]]


def states(count: int = 6) -> list[dict[str, Any]]:
    """A master, its working copy, a replica of that which is not tied, and a leaf whose few changes
    leave most chunks as they were.
    """
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(600, 300, generator=generator)
    wide = torch.randn(1200, 1000, generator=generator)
    found = []
    for step in range(count):
        weight = master.bfloat16()
        found.append(
            {
                "master": master.clone(),
                "weight": weight,
                "twin": weight.clone(),
                "wide": wide.clone(),
                "step": step,
            }
        )
        master[step] += 0.1
        wide[step * 200] += 1.0  # another chunk each time
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Keyframes at steps 0 and 3, deltas in between."""
    saved = states()
    with Engine(tmp_path / "run", policy=Policy.exact(max_chain_depth=2)) as engine:
        for step, state in enumerate(saved):
            engine.save(step, state).result(240)
    return tmp_path / "run", dict(enumerate(saved))


def data_of(root: Path, seq: int, inside: str) -> list[Path]:
    (segment,) = (root / "segments").glob(f"s{seq:010d}-*")
    return sorted(p for p in segment.glob(f"{inside}*/**/c*") if p.is_file())


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), max(1, len(content) // 64)):
        content[at] ^= 0xFF
    path.write_bytes(content)


def whole(run: Run, steps: set[int] | None = None) -> None:
    """Every step (or some) restores as it was saved, and verify finds nothing wrong with them."""
    root, saved = run
    broken = {finding.step for finding in deltacheck.open(root).verify(deep=True)}
    assert broken == set(saved) - (set(saved) if steps is None else steps)
    for step in saved if steps is None else steps:
        with Engine(root) as engine:
            assert_same(engine.restore(step), saved[step])


def test_damage_to_content_is_named_and_changes_nothing(run: Run) -> None:
    root, _ = run
    spoil(data_of(root, 0, "leaves/weight")[0])
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    done = repair(open_root(root))
    assert {(lost.step, lost.leaf) for lost in done.lost} == {(n, "weight") for n in range(3)}
    assert (done.documents, done.removed, done.backup) == ([], [], None)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    whole(run, {3, 4, 5})


@pytest.mark.parametrize(
    "vanish",
    [lambda p: shutil.rmtree(p), lambda p: spoil(p / "zarr.json")],
    ids=["gone", "table"],
)
def test_a_lost_segment_costs_only_the_steps_that_need_it(
    run: Run, vanish: Callable[[Path], None]
) -> None:
    root, _ = run
    (segment,) = (root / "segments").glob("s0000000001-*")
    vanish(segment)
    done = repair(open_root(root))
    assert {loss.step for loss in done.lost} == {1, 2}
    assert all(loss.leaf is None and segment.name in loss.problem for loss in done.lost)
    whole(run, {0, 3, 4, 5})


def test_what_is_lost_stays_until_a_lossy_repair_sets_it_aside(run: Run) -> None:
    root, saved = run
    manifest = root / "checkpoints" / "c0000000004" / "zarr.json"
    manifest.write_bytes(manifest.read_bytes()[:-100])
    for file in data_of(root, 1, "delta"):
        spoil(file)
    done = repair(open_root(root))
    assert {loss.step for loss in done.lost} == {None, 1, 2}
    assert not done.removed
    assert manifest.exists()
    with pytest.raises(errors.Damaged, match="nothing is collected"):
        collect.collect(open_root(root), grace_seconds=0)
    done = repair(open_root(root), lossy=True)
    assert len(done.removed) == 3
    assert deltacheck.open(root).steps() == [0, 3, 5]
    assert (Path(done.backup or "") / "checkpoints" / "c0000000004" / "zarr.json").exists()
    whole((root, {step: saved[step] for step in (0, 3, 5)}))
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    whole((root, {step: saved[step] for step in (0, 3, 5)}))


def test_documents_that_only_plain_zarr_reads_are_written_again(run: Run) -> None:
    import zarr

    root, _ = run
    victims = [
        p
        for p in root.rglob("zarr.json")
        if b'"checksum"' not in p.read_bytes() and "control" not in p.parts and p.parent != root
    ]
    for number, victim in enumerate(victims):
        victim.write_bytes(
            b"{" if number % 2 else victim.read_bytes().replace(b"zarr_format", b"zarr_farmat")
        )
    done = repair(open_root(root))
    assert sorted(done.documents) == sorted(map(str, victims))
    whole(run)
    array = min(p.parent for p in victims if p.parent.name == "master")  # of the first step
    np.testing.assert_array_equal(
        zarr.open_array(array, mode="r")[...], run[1][0]["master"].numpy()
    )


def test_the_command_writes_a_lost_root_document_again(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    assert main(["repair", str(root)]) == 0
    assert "no damage found" in capsys.readouterr().out
    (root / "zarr.json").write_bytes(b"\0" * 100)
    assert main(["ls", str(root)]) == 4
    assert "deltacheck repair" in capsys.readouterr().err
    with (
        Engine(root.with_name("elsewhere")),
        pytest.raises(errors.Damaged, match="steps that restore then: 0, 1, 2, 3, 4, 5"),
    ):
        Engine(root)
    assert main(["repair", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"] == [str(root / "zarr.json")]
    assert told["lost"] == []
    whole(run)


def test_the_command_says_what_is_lost_and_is_refused_beside_a_training(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = run
    spoil(data_of(root, 1, "delta")[0])
    assert main(["repair", str(root)]) == 1
    assert "step 1, leaf" in capsys.readouterr().out
    with Engine(root):
        assert main(["repair", str(root)]) == 5
        assert main(["repair", str(root), "--dry-run"]) == 1
    assert main(["repair", str(root), "--lossy"]) == 0
    assert "its step set aside" in capsys.readouterr().out
    assert main(["verify", str(root), "--deep"]) == 0


def test_a_root_that_is_the_present_directory_has_its_backup_beside_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = run
    manifest = Path("checkpoints", "c0000000004", "zarr.json")
    (root / manifest).write_bytes(b"{")
    monkeypatch.chdir(root)
    assert main(["repair", "--lossy"]) == 0
    assert deltacheck.open(root).steps() == [0, 1, 2, 3, 5]
    assert (root.with_name("run.damaged") / manifest).read_bytes() == b"{"


# --- in an object store ---------------------------------------------------------------------------


def copied(run: Run, scheme: str = "s3") -> ObjectPath:
    """Copy a run to a bucket."""
    address = f"{scheme}://bucket/{secrets.token_hex(4)}/run"
    with deltacheck.Mirror(run[0], address) as mirror:
        mirror.poll()
    path = storage.of(address)
    assert isinstance(path, ObjectPath)
    return path


def objects(path: ObjectPath) -> dict[str, bytes]:
    """Return the content of all objects below a path, but for the lease."""
    names = [key.removeprefix(f"{path.key}/") for key in path.keys()]  # noqa: SIM118 - a path
    return {name: (path / name).read_bytes() for name in names if not name.startswith("control")}


def backup_of(path: ObjectPath) -> ObjectPath:
    return path.parent / f"{path.name}.damaged"


def manifest_of(path: ObjectPath, seq: int) -> ObjectPath:
    return path / "checkpoints" / f"c{seq:010d}" / "zarr.json"


def spoil_object(path: ObjectPath, pattern: str) -> str:
    """Change the first object whose name matches; return its name."""
    name, content = next(item for item in objects(path).items() if re.search(pattern, item[0]))
    (path / name).write_bytes(bytes(byte ^ 0xFF for byte in content))
    return name


@pytest.mark.usefixtures("azure_in_memory")
@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_lost_steps_of_an_object_store_are_set_aside(
    run: Run, s3: S3, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, saved = copied(run, scheme), run[1]
    manifest_of(path, 4).write_bytes(b"{")
    data = spoil_object(path, r"segments/s0000000001.*/delta.*/c\.")
    before = objects(path)
    assert main(["verify", str(path)]) == 1
    assert f"next: deltacheck repair {path} --lossy" in capsys.readouterr().out
    for options, code in (([], 1), (["--dry-run", "--lossy"], 0)):
        assert main(["repair", str(path), *options]) == code
        assert objects(path) == before
    capsys.readouterr()
    assert main(["repair", str(path), "--lossy", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {loss["step"] for loss in told["lost"]} == {None, 1, 2}
    assert told["removed"] == [str(manifest_of(path, seq)) for seq in (4, 1, 2)]
    assert told["backup"] == str(backup_of(path))
    # What was set aside is in the backup as it was, and nothing else has changed.
    backup = objects(backup_of(path))
    assert backup.keys() == {f"checkpoints/c{seq:010d}/zarr.json" for seq in (1, 2, 4)}
    assert objects(path) | backup == before
    assert data in objects(path)
    assert deltacheck.open(str(path)).steps() == [0, 3, 5]
    for step in (0, 3, 5):
        with Engine(str(path)) as engine:
            assert_same(engine.restore(step), saved[step])
    with Engine(str(path)) as engine:
        engine.restore()
        engine.save(6, saved[4]).result(240)
    for _ in range(2):
        collect.collect(open_root(str(path)), grace_seconds=0)
    assert deltacheck.open(str(path)).verify(deep=True) == []


def test_documents_of_an_object_store_are_written_again(
    run: Run, s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(run)
    before = objects(path)
    damaged = [spoil_object(path, pattern) for pattern in (r"leaves/wide/zarr", r"^segments/zarr")]
    replaced = {name: (path / name).read_bytes() for name in damaged}
    (path / "zarr.json").unlink()
    assert main(["ls", str(path)]) == 4
    assert f"deltacheck repair {path}" in capsys.readouterr().err
    assert main(["repair", str(path)]) == 0
    assert objects(path) == before
    assert objects(backup_of(path)) == replaced


@pytest.mark.parametrize(
    "fault",
    [Fault("501", r"\.damaged/", "PUT", times=FOREVER), Fault("501", "/", "DELETE", times=FOREVER)],
    ids=["copy", "deletion"],
)
def test_a_repair_that_fails_in_an_object_store_changes_nothing_and_can_be_repeated(
    run: Run, s3: S3, fault: Fault
) -> None:
    path = copied(run)
    manifest_of(path, 4).write_bytes(b"{")
    before = objects(path)
    with s3.failing(fault), pytest.raises(errors.StorageFailed):
        repair(open_root(str(path)), lossy=True)
    assert objects(path) == before
    repair(open_root(str(path)), lossy=True)
    assert deltacheck.open(str(path)).steps() == [0, 1, 2, 3, 5]
    assert b"{" in objects(backup_of(path)).values()


def test_a_store_that_fails_has_lost_no_step(run: Run, s3: S3) -> None:
    path = copied(run)
    before = objects(path)
    for where in (r"/c\.[.0-9]*$", r"/segments/s\d+-\w+/zarr\.json$", "/checkpoints/c.*json$"):
        fault = Fault("501", where, "GET", times=FOREVER)
        with s3.failing(fault), pytest.raises(errors.StorageFailed):
            repair(open_root(str(path)), lossy=True)
    assert objects(path) == before
    assert not backup_of(path).exists()


def test_a_repair_that_has_lost_its_lease_sets_nothing_aside(run: Run, s3: S3) -> None:
    path = copied(run)
    manifest_of(path, 4).write_bytes(b"{")
    before = objects(path)
    lease = take_lease(path)
    assert isinstance(lease, ObjectLease)
    claim = {"holder": "process 7 on elsewhere", "nonce": "x", "epoch": 9, "seconds": 60}
    arrays.replace_file(
        path / layout.CONTROL, "zarr.json", layout.group_json({layout.ATTRIBUTE: claim})
    )
    lease.renew()
    with pytest.raises(errors.RootBusy, match="process 7 on elsewhere"):
        repair(open_root(str(path)), lossy=True)
    lease.release()
    assert objects(path) == before


def test_a_repair_is_refused_beside_a_training_in_an_object_store(run: Run, s3: S3) -> None:
    path = copied(run)
    with Engine(str(path)):
        assert main(["repair", str(path)]) == 5
        assert main(["repair", str(path), "--dry-run"]) == 0


def test_a_step_of_a_manager_is_set_aside_with_its_folder(tmp_path: Path) -> None:
    from deltacheck.backends import orbax as backend

    saved = {}
    policy = Policy.exact(max_chain_depth=0)
    with backend.manager(tmp_path / "run", policy=policy) as manager:
        for step in range(3):
            saved[step] = {"a": np.arange(200_000, dtype=np.float32) + step}
            manager.save(step, args=backend.DeltaSaveArgs(saved[step]))
        manager.wait_until_finished()
    (segment,) = (tmp_path / "run" / "deltacheck" / "segments").glob("s0000000001-*")
    spoil(next(p for p in (segment / "leaves" / "a").iterdir() if p.name.startswith("c")))
    assert main(["repair", str(tmp_path / "run")]) == 1
    assert main(["repair", str(tmp_path / "run"), "--lossy"]) == 0
    assert deltacheck.open(tmp_path / "run").verify(deep=True) == []
    with backend.manager(tmp_path / "run", policy=policy) as manager:
        assert manager.all_steps() == [0, 2]
        for step in (0, 2):
            restored = manager.restore(step, args=backend.DeltaRestoreArgs())
            np.testing.assert_equal(restored, saved[step])
        manager.save(3, args=backend.DeltaSaveArgs(saved[1]))
        manager.wait_until_finished()
    np.testing.assert_equal(deltacheck.open(tmp_path / "run").restore(), saved[1])
