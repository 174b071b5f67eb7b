"""Bad input and failures of the environment are refused or survived, with helpful messages."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.save.handle import progress_of
from deltacheck.store.files import arrays
from deltacheck.store.files.local_storage import LocalStorage
from tests.support.states import assert_same, nudge, training_state


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (object(), "leaf 'a/0' is of type builtins.object"),
        (torch.empty(3, device="meta"), "leaf 'a/0': a meta or fake tensor has no content"),
        (torch.eye(3).to_sparse(), "leaf 'a/0': a tensor of layout torch.sparse_coo"),
        ({1.5: 1}, "a key of type float"),
    ],
)
def test_a_leaf_that_cannot_be_kept_is_refused_at_the_call(
    tmp_path: Path, leaf: object, message: str
) -> None:
    with Engine(tmp_path) as engine:
        with pytest.raises(errors.UnsupportedLeaf, match=message):
            engine.save(0, {"a": [leaf]})
        engine.save(1, {"a": [torch.zeros(1)]})
    assert deltacheck.open(tmp_path).steps() == [1]


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_step_that_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    with Engine(tmp_path) as engine, pytest.raises(ValueError, match="step must be an integer"):
        engine.save(step, {})


@pytest.mark.parametrize(
    "options",
    [
        {"capture": "lazy"},
        {"on_busy": "drop"},
        {"max_pending": 0},
        {"host_cache_bytes": 0},
        {"durability": "disk"},
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SaveOptions(**options)


@pytest.mark.parametrize("name", ["policy", "keep", "options"])
def test_an_argument_of_another_class_is_refused_and_leaves_the_root_free(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a "):
        Engine(tmp_path, **{name: {"last": 3}})
    Engine(tmp_path).close()


def test_a_missing_step_is_named_together_with_those_that_exist(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        with pytest.raises(errors.StepNotFound, match="no step at all"):
            engine.restore()
        engine.save(10, {"x": torch.zeros(1)})
        engine.wait()
        with pytest.raises(errors.StepNotFound, match=r"has no step 5\. Steps that it has: 10"):
            engine.restore(5)
        with pytest.raises(errors.LeafNotFound, match="no leaf 'y'; near it: 'x'"):
            deltacheck.open(tmp_path).restore(leaves=["y"])


def test_a_directory_of_something_else_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(errors.NotACheckpointRoot, match="not empty and not a deltacheck root"):
        Engine(tmp_path)
    with pytest.raises(errors.NotACheckpointRoot, match="not a deltacheck root"):
        deltacheck.open(tmp_path)
    with pytest.raises(errors.NotACheckpointRoot, match="does not exist"):
        deltacheck.open(tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("must_understand", ["holograms"])])
def test_a_root_of_another_format_version_is_refused_with_the_way_out(
    tmp_path: Path, key: str, value: object
) -> None:
    Engine(tmp_path).close()
    about = json.loads((tmp_path / "zarr.json").read_text())
    about["attributes"]["deltacheck"][key] = value
    (tmp_path / "zarr.json").write_text(json.dumps(about))
    for attempt in (Engine, deltacheck.open):
        with pytest.raises(errors.UnsupportedFormat, match="Install"):
            attempt(tmp_path)


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        blocker = tmp_path / "file"
        blocker.write_text(
            "a file where the root's parent should be"
        )  # root may write anywhere, but not below a file
        with pytest.raises(errors.NotACheckpointRoot, match="is a file"):
            Engine(blocker / "root")
        return
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        Engine(tmp_path / "root")


def test_a_second_writer_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        with pytest.raises(
            errors.RootBusy, match=r"by this process: it was opened at .*test_refusals\.py"
        ):
            Engine(tmp_path)
        code = (
            "import sys; from pathlib import Path; from deltacheck import errors\n"
            "from deltacheck.store.files.storage import take_lease\n"
            "try: take_lease(Path(sys.argv[1]))\n"
            "except errors.RootBusy as error: print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        assert f"process {os.getpid()} on " in done.stdout
        engine.save(0, {"x": torch.zeros(1)}).wait()
    Engine(tmp_path).close()


FORKED = """
import os, sys
from deltacheck import errors
from deltacheck.backends.torch import Engine

engine = Engine(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        engine.save(0, {"x": 1})
    except errors.SaveFailed as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
engine.close()
Engine(sys.argv[1]).close()
print("free again")
"""


def test_a_forked_child_cannot_save_and_does_not_hold_the_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "a forked child must open its own root" in done.stdout
    assert "free again" in done.stdout


# --- faults of the storage ------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the n-th next write fail as TensorStore fails on a full disk.

    With an empty list no write fails.
    """
    countdown: list[int] = []

    def failing(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if countdown:
                countdown[0] -= 1
                if countdown[0] < 0:
                    raise ValueError("RESOURCE_EXHAUSTED: No space left on device")
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(arrays, "write", failing(arrays.write))
    monkeypatch.setattr(LocalStorage, "start_array_file", failing(LocalStorage.start_array_file))
    monkeypatch.setattr(arrays, "create_file", failing(arrays.create_file))
    return countdown


def test_a_full_disk_fails_that_save_alone_whichever_write_it_hits(
    tmp_path: Path, full_disk: list[int]
) -> None:
    """Training continues, older steps are intact, and the next save succeeds."""
    for at in range(100):
        if not _survives_a_full_disk(tmp_path / str(at), full_disk, at):
            break
    assert at >= 4, "the save must write something for the fault to hit"


def _survives_a_full_disk(root: Path, full_disk: list[int], at: int) -> bool:
    """Let write number ``at`` of a delta save fail; return False if the save has fewer writes."""
    state = training_state()
    with Engine(root) as engine:
        engine.save(0, state).wait()
        first = engine.restore(0)
        nudge(state)
        full_disk.append(at)
        error = engine.save(1, state).exception(240)
        full_disk.clear()
        if error is None:
            return False
        assert isinstance(error, errors.SaveFailed)
        assert "No space left" in str(error)
        assert engine.steps() == [0]
        assert_same(first, engine.restore(0))
        nudge(state)
        engine.save(2, state).wait(timeout=240)
        assert_same(state, engine.restore(2))
    assert deltacheck.open(root).verify(deep=True) == []
    return True


def test_a_failure_that_nobody_looked_at_is_raised_by_the_next_call_and_only_once(
    tmp_path: Path, full_disk: list[int]
) -> None:
    with Engine(tmp_path) as engine:
        full_disk.append(0)
        progress_of(engine.save(0, {"x": torch.zeros(1)})).block_until("committed")
        full_disk.clear()
        with pytest.raises(errors.SaveFailed, match="step 0"):
            engine.save(1, {"x": torch.zeros(1)})
        engine.save(2, {"x": torch.zeros(1)}).wait()
        assert engine.steps() == [2]


def test_a_save_that_stands_on_a_failed_one_fails_too(
    tmp_path: Path, full_disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = training_state()
    with Engine(tmp_path, options=SaveOptions(max_pending=3)) as engine:
        engine.save(0, state).wait()
        nudge(state)
        full_disk.append(4)
        handles = [engine.save(1, state)]
        nudge(state)
        with contextlib.suppress(errors.SaveFailed):  # the failure may be known already
            handles.append(engine.save(2, state))
        for handle in handles:
            handle.exception(240)
        full_disk.clear()
        engine.save(3, state).wait()
        assert_same(state, engine.restore(3))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_failure_at_the_end_of_the_with_block_is_raised_there(
    tmp_path: Path, full_disk: list[int]
) -> None:
    engine = Engine(tmp_path)
    full_disk.append(0)
    engine.save(0, {"x": torch.zeros(1)})
    with pytest.raises(errors.SaveFailed, match="No space left"):
        engine.__exit__(None, None, None)
    full_disk.clear()


def test_a_hanging_disk_fails_the_save_when_the_deadline_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        def result(self, timeout: float | None = None) -> None:
            assert timeout is not None
            raise TimeoutError  # as if it had passed

        def done(self) -> bool:
            return False

    with Engine(tmp_path) as engine:
        monkeypatch.setattr(arrays, "write", lambda *_: Hanging())
        error = engine.save(0, {"x": torch.zeros(1)}).exception(240)
        assert "may hang" in str(error)
        monkeypatch.undo()
        engine.save(1, {"x": torch.zeros(1)}).wait(timeout=240)


def test_a_really_full_file_system_is_survived(tmp_path: Path) -> None:
    """Repeat the test on a small tmpfs, if this machine allows to mount one."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        state = training_state()
        with Engine(tmp_path / "root") as engine:
            engine.save(0, state).wait(timeout=240)
            before = engine.restore(0)
            state["more"] = torch.randn(3_000_000)
            assert "RESOURCE_EXHAUSTED" in str(engine.save(1, state).exception(240))
            assert_same(before, engine.restore(0))
            del state["more"]
            state["step"] = 2
            engine.save(2, state).wait(timeout=240)
            assert_same(state, engine.restore(2))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_failure_after_the_commit_never_takes_the_segment_of_a_step_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last fsync fails, and so does taking the manifest back. It exists, so its segments must
    remain.
    """
    from deltacheck.store.files import durability

    state = training_state()
    with Engine(tmp_path) as engine:
        original = durability.sync_directory

        def failing(path: Path) -> None:
            original(path)
            if path.name == "checkpoints":
                raise OSError(5, "Input/output error")

        remove = Path.unlink

        def stays(path: Path, missing_ok: bool = False) -> None:
            if path.parent.parent.name == "checkpoints":
                raise OSError(5, "Input/output error")
            remove(path, missing_ok)

        monkeypatch.setattr(durability, "sync_directory", failing)
        monkeypatch.setattr(Path, "unlink", stays)
        assert "Input/output error" in str(engine.save(0, state).exception(240))
        monkeypatch.undo()
        assert_same(state, engine.restore(0))


def test_a_save_holds_none_of_the_callers_tensors_once_it_has_captured_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import threading
    import weakref

    from deltacheck.save.job import save_job

    go = threading.Event()
    original = save_job.SaveJob.finish_segment

    def finish(self: Any) -> Any:
        assert go.wait(240)
        return original(self)

    monkeypatch.setattr(save_job.SaveJob, "finish_segment", finish)
    with Engine(tmp_path) as engine:
        tensor = torch.randn(300, 300)
        alive = weakref.ref(tensor)
        handle = engine.save(0, {"x": tensor})
        handle.wait("encoded", timeout=240)
        del tensor
        gc.collect()
        assert alive() is None
        go.set()


def test_a_run_that_has_diverged_can_still_be_saved(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.save(
            0,
            {"x": torch.tensor(float("nan"))},
            metrics={"loss": float("nan"), "norm": float("inf"), "lr": 0.5},
        ).wait()
    assert dict(deltacheck.open(tmp_path).manifest(0).metrics) == {
        "loss": "nan",
        "norm": "inf",
        "lr": 0.5,
    }
