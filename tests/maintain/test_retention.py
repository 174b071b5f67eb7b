"""Tests of retention: rules, tags, deletion by hand, and what a reader holds open."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, KeepBest, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.compaction import compact
from deltacheck.policy.retention import Saved, partial_checkpoints, retained
from deltacheck.save import root_writer
from deltacheck.store import collect
from deltacheck.store.files import local_storage
from deltacheck.store.roots import tagging, tags
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import open_segments
from tests.support.waiting import wait_until


def saved(*steps: int, **metrics: dict[int, float | str]) -> list[Saved]:
    return [
        Saved(seq, step, f"n{seq}", {name: of[seq] for name, of in metrics.items() if seq in of})
        for seq, step in enumerate(steps)
    ]


def test_what_is_kept_is_the_union_of_the_rules_and_the_tags() -> None:
    loss = dict(enumerate([5.0, 1.0, 3.0, 9.0, 8.0, 7.0]))
    every = saved(0, 1, 2, 3, 4, 5, loss=loss)
    assert retained(every, Keep()) == {0, 1, 2, 3, 4, 5}
    assert retained(every, Keep(last=2)) == {4, 5}
    assert retained(every, Keep(every=3)) == {0, 3, 5}
    assert retained(every, Keep(best=(KeepBest("loss", 2),))) == {1, 2, 5}
    assert retained(every, Keep(best=(KeepBest("loss", 1, "max"),))) == {3, 5}
    assert retained(
        every, Keep(last=2, every=3, best=KeepBest("loss")), tagged=["n2", "of a step that is gone"]
    ) == {0, 1, 2, 3, 4, 5}


def test_newest_and_tagged_steps_keep_every_leaf() -> None:
    # A resumed run has saved step 1 again; nobody resumes from its first save.
    every = saved(0, 1, 2, 1, 3)
    assert partial_checkpoints(every, Keep(full_last=2)) == {0, 1, 2}
    assert partial_checkpoints(every, Keep(full_last=3), tagged=["n1"]) == {0}
    assert partial_checkpoints(every, Keep(full_last=9)) == {1}
    for wrong in ({"full_last": 0}, {"full_last": 1, "leaves": ()}):
        with pytest.raises(ValueError, match=r"must be at least 1|give both"):
            Keep(**wrong)


def test_a_value_that_is_not_finite_or_missing_is_never_among_the_best() -> None:
    values: dict[int, float | str] = {
        0: 4.0,
        1: "nan",
        2: "-inf",
        3: float("nan"),
        4: float("-inf"),
    }
    assert retained(saved(0, 1, 2, 3, 4, 5, 6, loss=values), Keep(best=(KeepBest("loss", 3),))) == {
        0,
        6,
    }


def test_of_equal_values_the_older_step_stays() -> None:
    assert retained(
        saved(0, 1, 2, 3, accuracy=dict.fromkeys(range(4), 1.0)),
        Keep(best=(KeepBest("accuracy", 1, "max"),)),
    ) == {0, 3}


def test_a_step_that_a_resumed_run_has_saved_again_does_not_count() -> None:
    every = saved(1, 2, 3, 2, 3)
    assert retained(every, Keep(last=3)) == {0, 3, 4}
    assert retained(every, Keep(last=1), tagged=["n1"]) == {1, 4}


def test_the_newest_step_is_the_last_one_saved_not_the_one_with_the_highest_number() -> None:
    assert retained(saved(7, 8, 9, 2), Keep(last=1)) == {3}


def test_the_rules_apply_to_the_course_of_the_newest_step() -> None:
    every = [replace(old, course="") for old in saved(97, 98, 99)]
    every += [
        Saved(seq, step, f"n{seq}", course="n3") for seq, step in enumerate((0, 99, 100), start=3)
    ]
    assert retained(every, Keep(last=1)) == {0, 1, 2, 5}
    assert retained(every, Keep(every=50)) == {0, 1, 2, 3, 5}
    assert partial_checkpoints(every, Keep(full_last=1)) == {3, 4}
    # A run that has restored a step of the first course.
    every.append(Saved(6, 100, "n6", course=""))
    assert retained(every, Keep(last=2)) == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}])
def test_rules_that_keep_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Keep(**wrong)
    for arguments in (("",), ("loss", 0), ("loss", 1, "least")):
        with pytest.raises(ValueError, match="KeepBest needs"):
            KeepBest(*arguments)


def test_the_engine_keeps_by_all_rules_and_every_kept_step_restores(tmp_path: Path) -> None:
    state, states = {"w": torch.zeros(400)}, {}
    best = [KeepBest("loss", 2), KeepBest("accuracy", 1, "max")]
    with Engine(
        tmp_path, keep=Keep(last=2, every=5, best=best), options=SaveOptions(grace_seconds=0)
    ) as engine:
        for step in range(1, 13):
            state["w"][step] = step
            states[step] = state["w"].clone()
            engine.save(
                step, state, metrics={"loss": abs(step - 6.4), "accuracy": float(step == 3)}
            ).wait(timeout=240)
        assert engine.steps() == [3, 5, 6, 7, 10, 11, 12]
        for step in engine.steps():
            assert torch.equal(engine.restore(step)["w"], states[step])
    assert deltacheck.open(tmp_path).verify(deep=True) == []


# --- tags -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 4, and step 3 again by a resumed run: ``w`` holds the sequence number."""
    root = tmp_path_factory.mktemp("retention") / "run"
    with Engine(root) as engine:
        for seq, step in enumerate((0, 1, 2, 3, 4, 3)):
            engine.save(
                step, {"w": torch.full((50,), float(seq))}, metrics={"loss": 9.0 - seq}
            ).wait(timeout=240)
    return root


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def value(root: Path, step: int | str | None) -> float:
    return float(deltacheck.open(root).restore(step)["w"][0])


def test_a_tag_means_the_save_and_not_the_number(run: Path) -> None:
    with Engine(run) as engine:
        engine.tag(3, "second")
        engine.save(3, {"w": torch.full((50,), 99.0)}).wait(timeout=240)
        assert engine.tags() == {"second": 3}
        assert float(engine.restore("second")["w"][0]) == 5
        engine.tag("second", "alias")
        engine.tag(None, "newest")
    assert (value(run, 3), value(run, "second"), value(run, "alias"), value(run, "newest")) == (
        99,
        5,
        5,
        99,
    )
    assert deltacheck.open(run).tags() == {"alias": 3, "newest": 3, "second": 3}


def test_a_tagged_step_stays_whatever_is_pruned_and_delete_names_the_tag(run: Path) -> None:
    with Engine(run, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)) as engine:
        engine.tag(1, "baseline")
        engine.save(9, {"w": torch.full((50,), 9.0)}).wait(timeout=240)
        assert engine.steps() == [1, 9]
        with pytest.raises(errors.StepTagged, match=r"step 1 .* tagged 'baseline'.*untag"):
            engine.delete(1)
        assert value(run, "baseline") == 1
        engine.untag("baseline")
        engine.delete(1)
        assert engine.steps() == [9]


def test_a_tag_is_created_once_and_moved_only_when_asked(run: Path) -> None:
    root = open_root(run)
    assert tagging.put(root, 1, "best") == tagging.put(root, 1, "best")
    with pytest.raises(errors.RootBusy, match=r"'best' is step 1 \(seq 1\) already.*2"):
        tagging.put(root, 2, "best")
    assert tagging.put(root, 2, "best", move=True).step == 2
    assert value(run, "best") == 2
    tagging.remove(root, "best")
    with pytest.raises(errors.StepNotFound, match=r"has no tag 'best'. It has no tag"):
        tagging.remove(root, "best")


def test_a_name_that_could_be_a_step_or_a_path_is_refused(run: Path) -> None:
    for name in ("", "7", "latest", ".", "..", "a/b", "-x", "_x", "a b", "ä", "x" * 101, "x\n"):
        with pytest.raises(ValueError, match="cannot be a tag"):
            tagging.put(open_root(run), 1, name)


def test_a_tag_follows_its_step_through_compaction_also_when_that_is_killed_half_way(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(run) as engine:
        for seq in (6, 7):
            state = engine.restore()
            state["w"][:3] = seq
            engine.save(seq, state).wait(timeout=240)
        engine.tag(7, "final")
        expected = engine.restore("final")["w"]
    monkeypatch.setattr(
        collect, "delete_checkpoint", lambda root, seq: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        compact(open_root(run))
    monkeypatch.undo()
    both = [ref.seq for ref in open_root(run).checkpoints() if ref.step == 7]
    assert len(both) == 2
    assert torch.equal(torch.from_numpy(deltacheck.open(run).restore("final")["w"]), expected)
    collect.collect(open_root(run), grace_seconds=0, writer_is_dead=True)
    assert [ref.seq for ref in open_root(run).checkpoints() if ref.step == 7] == both[1:]
    assert torch.equal(torch.from_numpy(deltacheck.open(run).restore("final")["w"]), expected)
    with pytest.raises(errors.StepTagged):
        root_writer.delete(open_root(run), 7)


def test_a_kill_between_a_tags_directory_and_its_document_leaves_no_tag(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.store.files import arrays

    create = arrays.create_file

    def killed(directory: Path, name: str, content: bytes) -> bool:
        if directory.name == "mine":
            raise KeyboardInterrupt
        return create(directory, name, content)

    monkeypatch.setattr(arrays, "create_file", killed)
    with pytest.raises(KeyboardInterrupt):
        tagging.put(open_root(run), 1, "mine")
    monkeypatch.undo()
    assert (run / "control" / "tags" / "mine").is_dir()
    assert deltacheck.open(run).tags() == {}
    collect.collect(open_root(run), grace_seconds=0, writer_is_dead=True)
    assert not (run / "control" / "tags" / "mine").exists()
    assert tagging.put(open_root(run), 1, "mine").step == 1


def test_nothing_is_deleted_while_a_tag_cannot_be_read(run: Path) -> None:
    tagging.put(open_root(run), 1, "good")
    document = run / "control" / "tags" / "good" / "zarr.json"
    document.write_bytes(document.read_bytes().replace(b'"step":1', b'"step":2'))
    for attempt in (
        lambda: root_writer.prune(open_root(run), Keep(last=1)),
        lambda: root_writer.delete(open_root(run), 4),
    ):
        with pytest.raises(errors.Damaged, match="'good' cannot be read, so nothing is deleted"):
            attempt()
    with pytest.raises(errors.Damaged):
        value(run, "good")
    assert deltacheck.open(run).steps() == [0, 1, 2, 3, 4]
    tagging.remove(open_root(run), "good")
    assert root_writer.delete(open_root(run), 4).deleted == (root_writer.Checkpoint(4, 4),)


def test_a_tag_whose_step_is_gone_says_so(run: Path) -> None:
    tagging.put(open_root(run), 4, "gone")
    collect.delete_checkpoint(open_root(run), 4)
    with pytest.raises(
        errors.StepNotFound, match=r"'gone' is step 4 \(seq 4\), which is not there any more"
    ):
        value(run, "gone")


def test_a_step_is_never_deleted_between_the_look_at_its_tags_and_its_deletion(
    run: Path, monkeypatch: pytest.MonkeyPatch, locked_out: threading.Event
) -> None:
    """A tag that is put while another prunes is either seen, or refused because the step is
    gone.
    """
    began, outcome = threading.Event(), []
    delete = collect.delete_checkpoint

    def slowly(root: Any, seq: int) -> None:
        began.set()
        # It would be done by then, were it not for the lock.
        wait_until(lambda: locked_out.is_set() or not thread.is_alive())
        delete(root, seq)

    def put() -> None:
        began.wait()
        try:
            outcome.append(tagging.put(open_root(run), 1, "late"))
        except errors.StepNotFound as error:
            outcome.append(error)

    monkeypatch.setattr(collect, "delete_checkpoint", slowly)
    thread = threading.Thread(target=put)
    thread.start()
    root_writer.prune(open_root(run), Keep(last=1))
    thread.join()
    (found,) = outcome
    assert isinstance(found, errors.StepNotFound)
    assert deltacheck.open(run).tags() == {}


def test_a_lock_that_is_never_given_back_is_an_error_and_not_a_hang(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_storage, "_LOCK_SECONDS", 0.05)
    with (
        tags.lock(run),
        pytest.raises(errors.RootBusy, match=r"changing the tags or deleting steps"),
    ):
        tagging.put(open_root(run), 1, "x")


def test_plain_zarr_opens_a_root_with_tags(run: Path) -> None:
    import zarr

    tagging.put(open_root(run), 1, "best")
    tagging.put(open_root(run), 2, "gone")
    tagging.remove(open_root(run), "gone")
    group = zarr.open_group(run, mode="r")
    assert dict(group["control/tags/best"].attrs)["deltacheck"]["step"] == 1
    assert list(group["control/tags"].group_keys()) == ["best"]


# --- readers --------------------------------------------------------------------------------------


def test_what_a_reader_has_open_stays_until_it_has_read(run: Path) -> None:
    root = open_root(run)
    manifest = root.manifest(4)
    opened = [root.store.segment(ref) for ref in manifest.segments]
    for step in (0, 1, 2, 3, 4):
        root_writer.delete(open_root(run), step)
    held = {segment.id for segment in opened}
    done = collect.collect(open_root(run), grace_seconds=0, writer_is_dead=True)
    assert set(done.in_use) == held
    assert not held & set(done.removed)
    assert all(segment.digests.size for segment in opened)
    del opened, root
    assert (
        set(collect.collect(open_root(run), grace_seconds=0, writer_is_dead=True).removed) == held
    )


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX says so, where another test has imported it
def test_a_forked_child_does_not_go_on_holding_what_its_parent_read(run: Path) -> None:
    root = open_root(run)
    opened = [root.store.segment(ref) for ref in root.manifest().segments]
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        del opened, root
        for step in (0, 1, 2, 3, 4):
            root_writer.delete(open_root(run), step)
        assert collect.collect(open_root(run), grace_seconds=0, writer_is_dead=True).in_use == ()
    finally:
        os.write(end[1], b"x")
        os.waitpid(child, 0)


def test_a_step_that_is_deleted_while_it_is_being_opened_is_named_so(run: Path) -> None:
    root = open_root(run)
    manifest = root.manifest(4)
    for step in (3, 4):
        root_writer.delete(open_root(run), step)
    collect.collect(open_root(run), grace_seconds=0, writer_is_dead=True)
    with pytest.raises(
        errors.StepNotFound, match=r"step 4 .* was deleted while it was being opened.*grace"
    ):
        open_segments(root, manifest)


# --- the commands ---------------------------------------------------------------------------------


def test_the_commands_prune_and_tag(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: object) -> Any:
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert call("tag", run, 1, "old")["seq"] == 1
    assert call("tag", run, "@old", "older")["seq"] == 1
    assert call("tag", run, "--delete", "@older")["removed"] == "older"
    assert [row["tags"] for row in call("ls", run)["steps"]] == [[], ["old"], [], [], [], []]
    assert call("show", run, "@old")["seq"] == 1
    dry = call("prune", run, "--keep-last", 1, "--keep-best", "loss:max:1", "--dry-run")
    assert [one["step"] for one in dry["deleted"]] == [2, 3, 4]
    assert (
        call("prune", run, "--keep-last", 1, "--keep-best", "loss:max:1")["deleted"]
        == dry["deleted"]
    )
    assert [one["seq"] for one in call("ls", run)["steps"]] == [0, 1, 5]
    for words in (["--dry-run"], []):  # nothing is deleted the first time
        assert call("prune", run, 0, *words)["deleted"] == [{"step": 0, "seq": 0}]
    assert main(["ls", str(run)]) == 0
    assert "old" in capsys.readouterr().out
    left = call("prune", run)  # without a rule no step is deleted
    assert ([row["step"] for row in left["kept"]], left["deleted"]) == ([1, 3], [])
    assert main(["prune", str(run), "1"]) == 5
    assert (
        main(["prune", str(run), "--keep-best", "loss:least"]),
        main(["tag", str(run), "1", "7"]),
    ) == (2, 2)
    assert (main(["prune", str(run), "latest"]), main(["show", str(run), "@none"])) == (2, 3)
    with Engine(run):
        assert main(["prune", str(run), "--keep-last", "1"]) == 5
        assert main(["tag", str(run), "1", "beside"]) == 0
