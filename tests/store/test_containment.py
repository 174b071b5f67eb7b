"""No command and no call changes anything outside the root, wherever a link stands in it. What may
not be read is damage, and not absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Keep, KeepBest, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.branch import branch
from deltacheck.maintain.mirror import Mirror
from deltacheck.maintain.repair import repair
from deltacheck.store.roots import opening
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.store import Store

PLACES = {
    "control": "control",
    "lease": "control/zarr.json",
    "tags": "control/tags",
    "tags' lock": "control/tags/zarr.json",
    "one tag": "control/tags/best",
    "marks": "control/marks",
    "tier": "control/tier",
    "checkpoints": "checkpoints",
    "one checkpoint": "checkpoints/c0000000001",
    "segments": "segments",
    "one segment": "segments/s0000000000-*",
    "leaves": "segments/s0000000000-*/leaves",
    "unfinished": "control/marks/zarr.json.__lock",
}

COMMANDS = {
    "verify": ["verify", "ROOT", "--deep"],
    "repair": ["repair", "ROOT"],
    "repair lossy": ["repair", "ROOT", "--lossy"],
    "prune": ["prune", "ROOT", "--keep-last", "1"],
    "delete": ["prune", "ROOT", "0"],
    "gc": ["prune", "ROOT", "--grace", "0"],
    "gc compact": ["prune", "ROOT", "--compact", "--grace", "0"],
    "compact": ["prune", "ROOT", "--whole"],
    "tag": ["tag", "ROOT", "0", "first"],
    "move a tag": ["tag", "ROOT", "0", "best", "--move"],
    "tag --delete": ["tag", "ROOT", "--delete", "best"],
    "ls": ["ls", "ROOT"],
    "branch": ["branch", "ROOT", "2", "--to", "ELSEWHERE"],
}


def by_engine(root: Path) -> None:
    """Save beside every rule of retention, tag, delete and restore."""
    best = KeepBest("loss", count=1, mode="min")
    with Engine(root, keep=Keep(last=1, best=best), options=SaveOptions(grace_seconds=0)) as engine:
        _use(engine)


def _use(engine: Engine) -> None:
    engine.save(7, {"w": torch.ones(300, 300)}, metrics={"loss": 1.0}).result(240)
    for action in (
        lambda: engine.tag(7, "seven"),
        lambda: engine.untag("best"),
        lambda: engine.delete(7),
        lambda: engine.restore(),
    ):
        with contextlib.suppress(errors.DeltacheckError):
            action()


def with_memory(root: Path) -> None:
    memory = root.with_name(f"{root.name}-memory")
    with Engine(root, memory=memory) as engine:
        engine.save(7, {"w": torch.ones(300, 300)}).result(240)
        engine.persist(240)


def by_repair(root: Path) -> None:
    repair(open_root(root), lossy=True)


def by_branch(root: Path) -> None:
    branch(open_root(root), None, root.with_name(f"{root.name}-branch"))


CALLS: dict[str, Callable[[Path], None]] = {
    "Engine": by_engine,
    "memory tier": with_memory,
    "repair()": by_repair,
    "branch()": by_branch,
}


MANAGER_PLACES = {
    "store": "deltacheck",
    "mark of Orbax": "deltacheck/commit_success.txt",
    "control": "deltacheck/control",
    "lease": "deltacheck/control/zarr.json",
    "marks": "deltacheck/control/marks",
    "checkpoints": "deltacheck/checkpoints",
    "segments": "deltacheck/segments",
    "one segment": "deltacheck/segments/s0000000000-*",
    "keyframes": "deltacheck/segments/s0000000000-*/leaves",
    "one step": "1",
    "one item": "1/default",
    "one manifest": "1/default/zarr.json",
}


def by_manager(root: Path) -> None:
    """Save, restore and delete as Orbax's manager does, and save without it."""
    from orbax.checkpoint import CheckpointManagerOptions

    from deltacheck.backends import orbax as backend

    options = CheckpointManagerOptions(max_to_keep=2)
    with backend.manager(root, options, save_options=SaveOptions(grace_seconds=0)) as manager:
        # Orbax itself refuses to delete a step that is a link.
        with contextlib.suppress(errors.DeltacheckError, OSError):
            manager.save(7, args=backend.DeltaSaveArgs({"w": np.ones((300, 300))}))
            manager.wait_until_finished()
        with contextlib.suppress(errors.DeltacheckError):
            manager.restore(2, args=backend.DeltaRestoreArgs())


def by_load(root: Path) -> None:
    from deltacheck.backends import orbax as backend

    backend.load(root, 0)


MANAGER_CALLS: dict[str, Callable[[Path], None]] = {
    "manager": by_manager,
    "load": by_load,
    "repair()": by_repair,
    "branch()": by_branch,
}


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of Orbax's ``CheckpointManager``, with garbage."""
    from deltacheck.backends import orbax as backend

    root = tmp_path_factory.mktemp("managed") / "root"
    weights = np.ones((300, 300), np.float32)
    with backend.manager(root) as manager:
        for step in range(3):
            manager.save(step, args=backend.DeltaSaveArgs({"w": weights + step, "b": weights[0]}))
        manager.wait_until_finished()
    segments = root / "deltacheck" / "segments"
    shutil.copytree(next(segments.glob("s0000000002-*")), segments / "s0000000001-00000000")
    marks = root / "deltacheck" / "control" / "marks"
    marks.mkdir()
    (marks / "zarr.json").write_bytes(
        b'{"zarr_format":3,"node_type":"group","attributes":{"deltacheck":{}}}'
    )
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with everything that a root can have."""
    root = tmp_path_factory.mktemp("made") / "root"
    weights = torch.randn(300, 300)
    memory = root.with_name("memory")
    with Engine(root, memory=memory) as engine:
        for step in range(3):
            weights[step] += 1
            engine.save(step, {"w": weights, "b": torch.ones(5)}).result(240)
        engine.persist(240)
        engine.tag(1, "best")
    (root / "control" / "marks").mkdir()
    (root / "control" / "marks" / "zarr.json").write_bytes(
        b'{"zarr_format":3,"node_type":"group","attributes":{"deltacheck":{}}}'
    )
    # Garbage that each collection would remove.
    shutil.copytree(
        next((root / "segments").glob("s0000000002-*")), root / "segments" / "s0000000001-00000000"
    )
    (root / "checkpoints" / "c0000000009").mkdir()
    return root


def linked(made: Path, tmp_path: Path, place: str) -> tuple[Path, Path]:
    """Copy the root, move one place of it (a pattern) out, and put a link there."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(made, root)
    outside.mkdir()
    path = next(iter(root.glob(place)), root / place)
    victim = outside / path.name
    if path.exists():
        shutil.move(path, victim)
    else:
        victim.write_bytes(b"precious")
    (outside / "checkpoint").mkdir()
    path.symlink_to(victim)
    return root, outside


def state_of(folder: Path) -> dict[str, Any]:
    """Return the names, kinds, contents and times of everything in a directory."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


# Orbax's manager is slow. The others of its places are looked at by `make test-tools`.
QUICK = ("store", "mark of Orbax", "segments", "one step", "one item")
TABLE = [
    *(pytest.param("made", place, CALLS, id=name) for name, place in PLACES.items()),
    *(
        pytest.param(
            "managed",
            place,
            MANAGER_CALLS,
            id=f"manager, {name}",
            marks=[] if name in QUICK else pytest.mark.matrix,
        )
        for name, place in MANAGER_PLACES.items()
    ),
]


@pytest.mark.parametrize(("kind", "place", "calls"), TABLE)
def test_nothing_outside_the_root_changes(
    kind: str,
    place: str,
    calls: dict[str, Callable[[Path], None]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole_root = request.getfixturevalue(kind)
    for number, (name, action) in enumerate([*COMMANDS.items(), *calls.items()]):
        folder = tmp_path / str(number)
        folder.mkdir()
        root, outside = linked(whole_root, folder, place)
        before = state_of(outside)
        if callable(action):
            with contextlib.suppress(errors.DeltacheckError):  # and no other error
                action(root)
        else:
            words = {"ROOT": str(root), "ELSEWHERE": str(folder / "elsewhere")}
            code = main([words.get(word, word) for word in action])
            assert code in (0, 1, 3, 4), (place, name, code, capsys.readouterr().err)
        assert state_of(outside) == before, name
        shutil.rmtree(folder)


def test_no_lock_is_taken_outside_the_root(made: Path, tmp_path: Path) -> None:
    """A reader locks the tables that it reads, which would stop the collection of another root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(made, root)
    opened = open_root(root)
    ref = opened.manifest(0).segments[0]
    outside.mkdir()
    shutil.move(root / "segments", outside / "segments")
    (root / "segments").symlink_to(outside / "segments")
    with pytest.raises(errors.Damaged) as raised:  # a traceback keeps what its frames refer to
        opened.store.segment(ref)
    with (outside / "segments" / ref.id / "zarr.json").open() as table:
        fcntl.flock(table, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "segments" in str(raised.value)


def test_a_branch_lies_outside_its_root_and_follows_no_link(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside, target = tmp_path / "root", tmp_path / "outside", tmp_path / "target"
    shutil.copytree(made, root)
    (tmp_path / "link").symlink_to(root)
    for place in (root / "new", root / "control" / "tags" / "new", tmp_path / "link" / "new"):
        with pytest.raises(errors.NotACheckpointRoot, match="outside the root"):
            branch(open_root(root), None, place)
        assert not place.exists()
    outside.mkdir()
    create = opening.create_store

    def replaced(path: Path) -> Store:
        store = create(path)
        shutil.rmtree(path / "segments")
        (path / "segments").symlink_to(outside)
        return store

    monkeypatch.setattr("deltacheck.maintain.branch.create_store", replaced)
    with pytest.raises(errors.Damaged, match="segments"):
        branch(open_root(root), None, target)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("place", ["control", "tags", "checkpoints", "segments"])
def test_a_collection_refuses_and_names_the_link(
    made: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = linked(made, tmp_path, PLACES[place])
    assert main(["prune", str(root), "--grace", "0"]) != 0
    message = " ".join(capsys.readouterr().err.split())
    assert str(root / PLACES[place]).replace(" ", "") in message.replace(" ", "")


@pytest.mark.parametrize("place", PLACES)
def test_a_live_engine_writes_nothing_through_a_link(
    made: Path, tmp_path: Path, place: str
) -> None:
    """The link comes while the engine is open."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(made, root)
    outside.mkdir()
    engine = Engine(root, keep=Keep(last=1), options=SaveOptions(grace_seconds=0))
    path = next(iter(root.glob(PLACES[place])), root / PLACES[place])
    victim = outside / path.name
    shutil.move(path, victim) if path.exists() else victim.write_bytes(b"precious")
    path.symlink_to(victim)
    before = state_of(outside)
    with contextlib.suppress(errors.DeltacheckError):
        _use(engine)
    with contextlib.suppress(errors.DeltacheckError):
        engine.close()
    assert state_of(outside) == before


def test_a_root_that_the_user_reaches_through_a_link_is_used(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for command in COMMANDS.values():
        words = {"ROOT": str(tmp_path / "link"), "ELSEWHERE": str(tmp_path / "elsewhere")}
        assert main([words.get(word, word) for word in command]) in (0, 3), command
    by_engine(tmp_path / "link")
    assert deltacheck.open(tmp_path / "link").verify(deep=True) == []


def test_the_directory_beside_a_root_is_no_link_either(made: Path, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(made, root)
    outside.mkdir()
    (tmp_path / "root.damaged").symlink_to(outside)
    (root / "checkpoints" / "zarr.json").write_bytes(b"{")
    with pytest.raises(errors.Damaged, match=r"root\.damaged"):
        repair(open_root(root))
    assert not list(outside.iterdir())


def test_a_mirror_writes_nothing_through_a_link(made: Path, tmp_path: Path) -> None:
    for place in ("segments", "checkpoints", "control"):
        folder = tmp_path / place
        source, target, outside = folder / "memory", folder / "mirror", folder / "outside"
        shutil.copytree(made.with_name("memory"), source)
        with Mirror(source, target) as mirror:
            mirror.poll()
        shutil.rmtree(next((target / "checkpoints").glob("c*")))
        outside.mkdir()
        shutil.move(target / place, outside / place)
        (target / place).symlink_to(outside / place)
        before = state_of(outside)
        with pytest.raises(errors.Damaged, match=place), Mirror(source, target) as mirror:
            mirror.poll()
        assert state_of(outside) == before


# --- directories that may not be read -------------------------------------------------------------


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Give up the rights of root, for which the modes of files mean nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def private(made: Path) -> Iterator[Path]:
    """A copy of the root in a place that other users can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    shutil.copytree(made, folder / "root")
    yield folder / "root"
    for path in (folder / "root").rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "place", ["checkpoints/c0000000002", "checkpoints", "segments", "segments/s0000000002-*"]
)
def test_a_directory_that_may_not_be_read_is_damage(private: Path, place: str) -> None:
    (path,) = private.glob(place)
    path.chmod(0)
    with another_user():
        for _ in range(2):  # the second time with what the first has cached
            with pytest.raises(errors.Damaged, match=r"[Pp]ermission"):
                deltacheck.open(private).restore()
        found: object = None
        with contextlib.suppress(errors.Damaged):
            found = deltacheck.open(private).verify()
        assert found != []
    path.chmod(0o755)
    deltacheck.open(private).restore()


def test_repair_does_not_set_aside_a_step_that_another_user_may_read(private: Path) -> None:
    path = private / "checkpoints" / "c0000000001"
    for folder in (private, *private.rglob("*")):
        folder.chmod(0o777)
    path.chmod(0)
    with another_user():
        done = repair(open_root(private), lossy=True)
    assert done.lost
    assert not done.removed
    path.chmod(0o755)
    deltacheck.open(private).restore(1)


def test_a_tag_that_may_not_be_read_keeps_every_step(private: Path) -> None:
    for folder in (private, *private.rglob("*")):
        folder.chmod(0o777)
    (private / "control" / "tags" / "best").chmod(0)
    with another_user():
        assert main(["prune", str(private), "--keep-last", "1"]) != 0
        assert main(["prune", str(private), "--grace", "0"]) != 0
    (private / "control" / "tags" / "best").chmod(0o755)
    assert deltacheck.open(private).steps() == [0, 1, 2]
    deltacheck.open(private).restore("best")
