"""The paths and addresses that every entrance accepts as a root, and those that it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import deltacheck
from deltacheck.backends.orbax import DeltaSaveArgs, manager
from deltacheck.backends.torch import Engine, load, save
from deltacheck.backends.torch.dcp import DeltaStorageReader, DeltaStorageWriter
from deltacheck.backends.torch.files.dropin import release
from deltacheck.cli import main
from deltacheck.errors import Damaged, NotACheckpointRoot
from deltacheck.maintain.memory_tier import MemoryTier
from deltacheck.store.files import storage
from deltacheck.store.roots.opening import refuse_file

# DCP says with every call that it is used without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_WEIGHTS = {"w": torch.arange(300.0)}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a directory two levels below ``tmp_path``, which is also the home directory."""
    directory = tmp_path / "scripts" / "deep"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    return directory


def _engine(root: str) -> None:
    with Engine(root) as engine:
        engine.save(1, _WEIGHTS).wait()
        engine.save(2, {"w": _WEIGHTS["w"] + 1}).wait()
        assert torch.equal(engine.restore(1)["w"], _WEIGHTS["w"])
    opened = deltacheck.open(root)
    assert opened.steps() == [1, 2]
    assert opened.verify(deep=True) == []


def _memory(root: str) -> None:
    with Engine(f"{root}-disk", memory=MemoryTier(root)) as engine:
        engine.save(1, _WEIGHTS).wait()
    assert deltacheck.open(root).steps() == [1]


def _engine_with_memory(root: str) -> None:
    Engine("disk", memory=MemoryTier(root))


def _file(root: str) -> None:
    save(_WEIGHTS, f"{root}/m_1.pt")
    release(f"{root}/m_1.pt")
    save(_WEIGHTS, f"{root}/m_2.pt")
    release()
    assert torch.equal(load(f"{root}/m_2.pt")["w"], _WEIGHTS["w"])


def _dcp(root: str) -> None:
    dcp.save(_WEIGHTS, storage_writer=DeltaStorageWriter(root), checkpoint_id="1", no_dist=True)
    target = {"w": torch.zeros(300)}
    dcp.load(target, storage_reader=DeltaStorageReader(root), checkpoint_id="1", no_dist=True)
    assert torch.equal(target["w"], _WEIGHTS["w"])


def _manager(root: str) -> None:
    import numpy as np

    with manager(root) as checkpoints:
        checkpoints.save(0, args=DeltaSaveArgs({"x": np.ones(3)}))
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [0]
    assert deltacheck.open(root).verify(deep=True) == []


def _branch(root: str) -> None:
    with Engine("origin") as engine:
        engine.save(1, _WEIGHTS).wait()
    deltacheck.open("origin").branch(1, root)
    assert deltacheck.open(root).steps() == [1]


def _cli(root: str) -> None:
    with Engine(root) as engine:
        engine.save(1, _WEIGHTS).wait()
    for words in (["ls"], ["verify", "--deep"], ["prune", "--whole"]):
        assert main([words[0], root, *words[1:]]) == 0
    for kind in ("safetensors", "orbax"):
        assert (
            main(["export", root, "1", "--to", kind, "--out", f"../{Path(root).name}.{kind}"]) == 0
        )


@pytest.mark.parametrize(
    "use", [_engine, _memory, _file, _dcp, _manager, _branch, _cli], ids=lambda use: use.__name__
)
def test_a_path_with_parent_directories_is_a_root(use: Callable[[str], None], start: Path) -> None:
    use("../run")
    assert (start.parent / "run").is_dir() or (start.parent / "run-disk").is_dir()
    use(f"/{start}/./sub/../second-run")
    assert {entry.name for entry in start.iterdir()} <= {
        "origin", "second-run", "second-run-disk", "sub"
    }  # fmt: skip


@pytest.mark.parametrize("use", [_engine, _memory, _file, _dcp, _manager], ids=lambda u: u.__name__)
def test_a_tilde_is_the_home_directory(use: Callable[[str], None], start: Path) -> None:
    use("~/run")
    assert (start.parents[1] / "run").is_dir()
    assert list(start.iterdir()) == []


def test_a_parent_directory_is_that_of_the_target_of_a_link(start: Path) -> None:
    (start.parent / "other" / "target").mkdir(parents=True)
    (start / "link").symlink_to(start.parent / "other" / "target")
    _engine("link/../run")
    assert (start.parent / "other" / "run").is_dir()


_LOST = (
    "s3:/bucket/run",
    "hdfs:/name/x",
    "file:/tmp/x",
    os.path.normpath("gs://bucket"),
    os.path.abspath("s3://bucket/run"),
    Path("s3://bucket"),
)


@pytest.mark.parametrize("address", _LOST, ids=str)
@pytest.mark.parametrize(
    "use", [Engine, deltacheck.open, manager, DeltaStorageWriter, DeltaStorageReader, load]
)
def test_an_address_that_has_lost_a_slash_is_refused(
    use: Callable[[object], object], address: object, start: Path
) -> None:
    with pytest.raises(ValueError, match="has lost a slash"):
        use(address)
    assert list(start.iterdir()) == []


@pytest.mark.parametrize("name", ["run:5", "lr=1e-5,x:y", "a:b/c", "trail. "])
def test_a_colon_may_stand_in_a_name(name: str, start: Path) -> None:
    _engine(name)


@pytest.mark.parametrize("use", [Engine, manager, DeltaStorageWriter, deltacheck.open])
def test_a_path_with_a_backslash_is_refused(
    use: Callable[[str], object], start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="backslash"):
        use("a\\b")
    assert list(start.iterdir()) == []
    # A relative root is below the working directory.
    (start / "c\\d").mkdir()
    monkeypatch.chdir(start / "c\\d")
    with pytest.raises(ValueError, match="backslash"):
        use("run")


def test_a_file_is_refused_as_a_root_at_once(start: Path) -> None:
    (start / "file").write_text("x")
    (start / "link").symlink_to("nowhere")
    for use in (Engine, manager, _engine_with_memory):
        for name, fault in (("file", "a file"), ("file/run", "a file"), ("link", "a link to a")):
            with pytest.raises(NotACheckpointRoot, match=f"{fault}.*give an empty or new"):
                use(name)
    assert (start / "file").read_text() == "x"


def test_a_normal_path_stays_as_it_is() -> None:
    for name in ("run", "/a/b", "a/b:c", "..x/y..", "~user/x"):
        assert storage.of(name) == Path(name)


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "s3:/bucket/x"],
        ["branch", "origin", "1", "--to", "s3:/bucket/x"],
        ["import", "s3:/bucket/x", "model.safetensors"],
        ["mirror", "origin", "s3:/bucket/x", "--once"],
        ["publish", "origin", "--to", "s3:/bucket/x", "--once"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_with_an_address_that_has_lost_a_slash_is_wrong_usage(
    words: list[str], start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "lost a slash" in capsys.readouterr().err
    assert list(start.iterdir()) == []


# --- the output folder of a trainer ---------------------------------------------------------------


def test_the_output_folder_of_a_trainer_means_the_root_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, root = tmp_path / "output", tmp_path / "output" / "deltacheck"
    (output / "checkpoint-2").mkdir(parents=True)
    (output / "last.ckpt").write_text("a pointer")
    Engine(root).close()
    # A script that checks nothing must not go on as if a run were whole.
    for words in (["verify", str(output)], ["verify", str(root), "--deep", "--json"]):
        assert main(words) == 3
        assert "nothing was checked" in capsys.readouterr().err
    _engine(str(root))
    for words in (["ls"], ["verify", "--deep"], ["show"], ["log"], ["prune"]):
        answers = []
        for folder in (output, root):
            assert main([words[0], str(folder), *words[1:], "--json"]) == 0
            answers.append(json.loads(capsys.readouterr().out))
        assert answers[0] == answers[1]
    assert main(["verify", str(output)]) == 0
    assert "2 steps checked" in capsys.readouterr().out
    opened = deltacheck.open(output)
    assert (opened.path, opened.steps()) == (root, [1, 2])
    assert main(["repair", str(output), "--dry-run"]) == 0
    assert main(["prune", str(output), "--keep-last", "1"]) == 0
    assert deltacheck.open(root).steps() == [2]
    # The damage to the root's own document is found and mended below the folder, too.
    (root / "zarr.json").unlink()
    with pytest.raises(Damaged, match="steps that restore then: 2"):
        deltacheck.open(output)
    assert main(["repair", str(output)]) == 0
    assert deltacheck.open(output).steps() == [2]


def test_the_folder_of_a_manager_stays_a_manager_root(tmp_path: Path) -> None:
    _manager(str(tmp_path / "run"))
    assert deltacheck.open(tmp_path / "run").path == tmp_path / "run"
    with manager(tmp_path / "new"):
        pass
    assert deltacheck.open(tmp_path / "run").steps() == [0]


def test_a_directory_that_another_process_makes_meanwhile_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "root"

    def made_before(look: Callable[[Path], bool]) -> Callable[[Path], bool]:
        def call(part: Path) -> bool:
            path.mkdir(exist_ok=True)
            return look(part)

        return call

    for name in ("islink", "lexists"):
        monkeypatch.setattr(os.path, name, made_before(getattr(os.path, name)))
    refuse_file(path)
