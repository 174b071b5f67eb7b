"""A document that names too much is refused before memory, disk or time is spent on it."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Limits, errors
from deltacheck.backends import isolated
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.leaf import limits
from deltacheck.store.files import storage
from deltacheck.store.files.object_path import ObjectPath
from tests.restore.test_bad_input import claim, manifest_path
from tests.restore.test_bad_input import saved as saved
from tests.support import forge

MOST_BYTES = 512 << 20

# Every call that reads a root with its outcome, and the memory that all have taken.
READER = """
import contextlib, io, json, resource, sys
import deltacheck
from deltacheck import errors
from deltacheck.cli import main
from deltacheck.store.roots.opening import open_root
honest, *roots = sys.argv[1:]
deltacheck.open(honest).restore()  # what is imported and allocated once
with contextlib.redirect_stdout(io.StringIO()):
    main(["verify", honest, "--deep"])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before, told = peak(), []
def command(*words):
    text = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(text):
        code = main([*words])
    return f"exit {code} {text.getvalue()}"
calls = {
    "open": lambda: deltacheck.open(root),
    "restore": lambda: deltacheck.open(root).restore(1),
    "verify": lambda: command("verify", root),
    "verify deep": lambda: command("verify", root, "--deep"),
    "export": lambda: command("export", root, "1", "--out", root + ".npz"),
    "diff": lambda: command("diff", root, "0", "1"),
    "follow": lambda: deltacheck.follow(root).poll(),
}
for root in roots:
    for name, call in calls.items():
        try:
            outcome = call()
            outcome = outcome if isinstance(outcome, str) else "done"
        except errors.DeltacheckError as error:
            outcome = f"{type(error).__name__} {error}"
        told.append([root, name, outcome])
print(json.dumps([told, peak() - before]))
"""


def many_leaves(count: int, elements: int) -> Callable[[dict[str, Any]], None]:
    """Leaves that are equal to one that no file holds."""

    def edit(manifest: dict[str, Any]) -> None:
        owner = {"dtype": "float32", "shape": [elements]}
        names = [f"z{number}" for number in range(count)]
        manifest["leaves"]["z"] = owner | {"chunk": [1 << 18], "digest": "0" * 32}
        manifest["derived"] = {name: owner | {"how": "same", "of": "z"} for name in names}
        manifest["tree"]["k"] += [[name, {"t": "array"}] for name in ("z", *names)]
        manifest["must_understand"] = ["derived"]

    return edit


def tiles_by_rule(count: int) -> Callable[[dict[str, Any]], None]:
    """A leaf of many tiles, all of one lane, in some 10 kB."""

    def edit(manifest: dict[str, Any]) -> None:
        refs, paths = manifest["segments"], list(manifest["leaves"])
        tile_leaf = {"dtype": "float32", "cuts": 0, "lanes": 0}
        manifest |= {
            "must_understand": ["tiles"],
            "segments": [],
            "leaves": {},
            "lanes": [list(range(len(refs)))],
            "lane_digests": ["0" * 32],
            "stage_reason": "x" * (10_000 - len(json.dumps(manifest))),
            "compact": {
                "seqs": [int(ref["id"][1:11]) for ref in refs],
                "nonces": "".join(ref["id"][-8:] for ref in refs),
                "digests": "".join(ref["digest"] for ref in refs),
                "stored_bytes": [ref["stored_bytes"] for ref in refs],
                "axes": [{"size": count * 4, "step": 4}],
                "cuts": [[0]],
                "places": [[[0, 0, count]]],
                "leaves": dict.fromkeys(paths, tile_leaf),
            },
        }

    return edit


def many_rows(root: Path) -> None:
    def edit(table: dict[str, Any]) -> None:
        table["digests"] = "A" * (1 << 20)

    for number in range(2):
        forge.forge_table(manifest_path(root), number, edit)


FORGERIES: dict[str, Callable[[Path], object]] = {
    "2^40 elements": lambda root: claim(root, [2**30, 2**10], [2**8, 2**10]),
    "2^40 chunks": lambda root: claim(root, [2**40, 1], [1, 1]),
    "2^28 chunks of a byte": lambda root: claim(root, [2**22, 8], [1, 1]),
    "6 GiB without a file": lambda root: forge.forge_manifest(
        manifest_path(root), many_leaves(1, 6 << 28)
    ),
    "many leaves": lambda root: forge.forge_manifest(
        manifest_path(root), many_leaves(100, 1 << 24)
    ),
    "2^40 digests": many_rows,
    "160,000 tiles": lambda root: forge.forge_manifest(manifest_path(root), tiles_by_rule(40_000)),
    "2^40 tiles": lambda root: forge.forge_manifest(manifest_path(root), tiles_by_rule(1 << 40)),
}


def test_forged_documents_are_answered_soon_and_in_little_memory(
    saved: Path, tmp_path: Path
) -> None:
    for name, forge_root in FORGERIES.items():
        shutil.copytree(saved, tmp_path / name)
        forge_root(tmp_path / name)
    roots = [str(tmp_path / name) for name in FORGERIES]
    done = subprocess.run(
        [sys.executable, "-c", READER, str(saved), *roots],
        capture_output=True,
        text=True,
        timeout=500,  # what goes through 2^40 of anything ends here
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers, taken_bytes = json.loads(done.stdout)
    assert taken_bytes < MOST_BYTES, (taken_bytes, answers)
    for root, call, outcome in answers:
        if call == "restore":
            assert outcome.split()[0] in ("BudgetExceeded", "ChainBroken", "Damaged"), (
                root,
                outcome,
            )
        if call == "export":
            assert outcome.startswith(("exit 4", "exit 5")), (root, outcome)
    assert not list(tmp_path.glob("*.npz*"))


def test_what_compresses_best_stays_far_below_the_default(tmp_path: Path) -> None:
    """Zeros are the content of which files hold least, and are never refused."""
    state = {"x": torch.zeros(68 << 20)}
    with Engine(tmp_path) as engine:
        report = engine.save(0, state).result()
    assert report is not None
    assert report.raw_bytes * 8 < report.stored_bytes * limits._BYTES_PER_FILE_BYTE
    opened = deltacheck.open(tmp_path)
    assert opened.restore()["x"].nbytes == report.raw_bytes
    assert opened.verify(deep=True) == []


def in_store(root: Path) -> ObjectPath:
    """Copy a root to an object store in memory."""
    place = storage.of(f"memory://limits/{secrets.token_hex(8)}")
    assert isinstance(place, ObjectPath)
    for file in root.rglob("*"):
        if file.is_file():
            (place / str(file.relative_to(root))).write_bytes(file.read_bytes())
    return place


@pytest.mark.parametrize("forgery", ["6 GiB without a file", "many leaves"])
def test_an_object_store_has_the_default_of_its_objects(
    saved: Path, tmp_path: Path, forgery: str
) -> None:
    shutil.copytree(saved, tmp_path / "root")
    FORGERIES[forgery](tmp_path / "root")
    with pytest.raises(errors.BudgetExceeded, match="the default for files of this size"):
        deltacheck.open(in_store(tmp_path / "root")).restore(1)


def test_few_objects_prove_that_a_step_of_an_object_store_is_real(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, read = in_store(saved), []
    monkeypatch.setattr(limits, "_SMALL_BYTES", 0)
    monkeypatch.setattr(limits, "_SMALL_TABLES_BYTES", 0)
    original = ObjectPath.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(
            ObjectPath,
            "read_bytes",
            lambda path, *expected: read.append(path) or original(path, *expected),
        )
        restored = deltacheck.open(place).restore(1)
    assert np.array_equal(restored["w"], deltacheck.open(saved).restore(1)["w"])
    proofs = [path for path in read if path.name.startswith("c.")]
    assert 1 <= len(proofs) <= 8
    assert deltacheck.open(place).verify(deep=True) == []


# --- limits of the caller -------------------------------------------------------------------------


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    weights = torch.arange(100_000.0)
    with Engine(tmp_path / "honest") as engine:
        for step in range(2):
            engine.save(step, {"x": weights + step}).wait()
    return tmp_path / "honest"


CALLS: dict[str, Callable[[deltacheck.Checkpoints], object]] = {
    "restore": lambda opened: opened.restore(),
    "verify": lambda opened: opened.verify(deep=True),
    "follow": lambda opened: deltacheck.follow(str(opened.path), limits=opened._limits).poll(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("limit", [Limits(max_bytes=399_999), Limits(max_seconds=0)], ids=str)
def test_each_call_keeps_the_limits_that_the_root_was_opened_with(
    honest: Path, call: str, limit: Limits
) -> None:
    with pytest.raises(errors.BudgetExceeded, match=r"max_bytes|max_seconds"):
        CALLS[call](deltacheck.open(honest, limits=limit))
    enough = Limits(max_bytes=10_000_000, max_chunks=100, max_seconds=100)
    CALLS[call](deltacheck.open(honest, limits=enough))


def test_chunks_are_limited_where_only_tables_are_read(honest: Path) -> None:
    opened = deltacheck.open(honest, limits=Limits(max_chunks=0))
    for call in (opened.verify, opened.restore):
        with pytest.raises(errors.BudgetExceeded, match="max_chunks=0"):
            call()


@pytest.mark.parametrize(
    "words",
    [["verify", "--deep"], ["export", "1", "--out", "{out}.npz"]],
    ids=lambda words: words[0],
)
def test_commands_that_decode_whole_steps_take_a_limit(
    honest: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [word.format(out=tmp_path / "out") for word in words]
    command.insert(1, str(honest))
    assert main([*command, "--max-bytes", "399999"]) == 5
    assert "more than 399999" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    # The limits end with the command.
    assert limits.current() == Limits()
    assert main([*command, "--max-bytes", "10000000"]) == 0


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chunks must be at least 0"):
        Limits(max_chunks=-1)


# --- files of other programs ----------------------------------------------------------------------


def stride_zero(path: Path) -> None:
    torch.save({"x": torch.zeros(1).expand(3 << 30)}, path)


def shared_lists(path: Path) -> None:
    nested: list[Any] = [0]
    for _ in range(60):
        nested = [nested, nested]
    torch.save(nested, path)


@pytest.mark.parametrize("forge_file", [stride_zero, shared_lists])
def test_a_torch_file_that_grows_is_refused_by_a_process_of_its_own(
    tmp_path: Path,
    forge_file: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolated, "_BASE_CPU_SECONDS", 1.0)
    good, bad = tmp_path / "good-1.pt", tmp_path / "bad-2.pt"
    torch.save({"x": torch.arange(9)}, good)
    forge_file(bad)
    assert bad.stat().st_size < 10_000
    assert main(["import", str(tmp_path / "root"), str(good), str(bad)]) == 5
    printed = capsys.readouterr().err
    assert "bad-2.pt" in printed
    assert "--max-bytes" in printed
    opened = deltacheck.open(tmp_path / "root")
    assert opened.steps() == [1]
    assert np.array_equal(opened.restore()["x"], np.arange(9))
    Engine(tmp_path / "root").close()  # the child has given the root back


def forged_orbax(folder: Path) -> None:
    """A step of plain Orbax whose array metadata claims 2^40 elements in chunks of 2^38."""
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "3" / "default", args=ocp.args.PyTreeSave({"x": np.arange(9)}))
    (metadata,) = folder.rglob(".zarray")
    document = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(document | {"shape": [1 << 40], "chunks": [1 << 38]}))


def test_an_orbax_folder_with_forged_metadata_is_refused_by_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged_orbax(tmp_path / "plain")
    assert main(["import", str(tmp_path / "root"), str(tmp_path / "plain")]) in (4, 5)
    printed = capsys.readouterr().err
    assert str(tmp_path / "plain") in printed
    # Nothing was written that a reader takes for a root.
    with pytest.raises(errors.NotACheckpointRoot):
        deltacheck.open(tmp_path / "root")


def test_the_end_of_the_reading_process_is_an_error_that_names_the_file() -> None:
    for status, kind, words in (
        (-signal.SIGABRT, errors.Damaged, "SIGABRT"),
        (-signal.SIGXCPU, errors.BudgetExceeded, "processor time"),
        (3, errors.Damaged, "status 3"),
    ):
        error = isolated._died("a.pt", status)
        assert type(error) is kind
        assert "a.pt" in str(error)
        assert words in str(error)
