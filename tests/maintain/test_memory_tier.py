"""The memory tier: newest steps in memory, older ones on the disk, and what is left when the
process,
the machine or the disk fails.

A kill at any call of it is in ``test_crash_points.py``, a power cut at any call in
``faults/cut.py``.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deltacheck
from deltacheck import Keep, MemoryTier, Mirror, Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch import engine as torch_engine
from deltacheck.backends.torch.group.run_roots import MemoryFirst
from deltacheck.cli.app import app
from deltacheck.maintain import memory_tier, tier_bond
from deltacheck.maintain.drain import DrainState, next_due, resident
from deltacheck.maintain.tier_bond import Bond, stale
from deltacheck.maintain.transfer import transfer as transfer_step
from deltacheck.save import exits
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.root_writer import RootWriter
from deltacheck.store.manifest import Brief
from tests.faults import scenarios
from tests.support.paths import REPOSITORY
from tests.support.states import assert_same
from tests.support.waiting import WAIT_SECONDS, ShiftedClock, open_when_called, wait_until

State = dict[str, Any]


def state_at(step: int) -> State:
    """The state of a step: 360 KB, of which a little changes."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(300, 300, generator=generator)
    for number in range(1, step + 1):
        weights[(number * 7) % 200] *= 1.01
    return {"weights": weights, "bias": torch.full((9,), float(step)), "step": step}


def save(engine: Engine, *steps: int) -> None:
    for step in steps:
        engine.save(step, state_at(step)).wait(timeout=240)


def idle(engine: Engine) -> None:
    """Let the drain finish what it has to do by itself."""
    wait_until(lambda: tier_of(engine).drain.state.is_idle)


def tier_of(engine: Engine) -> memory_tier.Tier:
    """Return the tier of an engine that has one."""
    roots = engine._session.roots
    assert isinstance(roots, MemoryFirst)
    return roots._tier


def on_disk(root: Path) -> list[int]:
    return deltacheck.open(root).steps()


def all_restore(root: Path) -> None:
    opened = deltacheck.open(root)
    assert opened.verify(deep=True) == []
    for step in opened.steps():
        found = opened.restore(step)
        assert (
            scenarios.difference(
                {
                    n: v.numpy() if isinstance(v, torch.Tensor) else v
                    for n, v in state_at(step).items()
                },
                found,
            )
            is None
        )


class Places:
    """Two directories, and copies of them as a kill of the process at this moment leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk, self.memory = folder, folder / "disk", folder / "memory"

    def engine(self, **options: Any) -> Engine:
        tiers = {
            name: options.pop(name)
            for name in ("memory_bytes", "persist_every", "in_memory", "on_stale")
            if name in options
        }
        return Engine(
            self.disk,
            memory=MemoryTier(self.memory, keep=tiers.pop("in_memory", 2), **tiers),
            **{"options": SaveOptions(grace_seconds=0)} | options,
        )

    def killed(self) -> Places:
        there = Places(self.folder / f"killed-{len(os.listdir(self.folder))}")
        shutil.copytree(self.disk, there.disk)
        shutil.copytree(self.memory, there.memory)
        return there


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 32)
    print(f"seed {drawn}")
    return drawn


class Drain:
    """Holds the copying to the disk back, lets it fail, and looks at every step that it commits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.error = threading.Event(), None
        self.after: Callable[[], None] = lambda: None
        self.go.set()
        original = transfer_step

        def transfer(*arguments: Any, **how: Any) -> int:
            assert self.go.wait(240)
            if self.error is not None:
                raise self.error
            written = original(*arguments, **how)
            self.after()
            return written

        monkeypatch.setattr("deltacheck.maintain.drain.transfer", transfer)


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drain]:
    made = Drain(monkeypatch)
    yield made
    made.go.set()


# --- saving ---------------------------------------------------------------------------------------


def test_a_step_is_in_memory_when_its_save_returns_and_says_that_this_is_what_it_survives(
    places: Places, drain: Drain
) -> None:
    drain.go.clear()
    with places.engine() as engine:
        report = engine.save(0, state_at(0)).result(240)
        assert report is not None
        assert report.durability == "process"
        assert on_disk(places.disk) == []
        assert engine.steps() == [0]
        listed = CliRunner().invoke(app, ["ls", str(places.memory)]).stdout
        assert "end of process" in listed
        drain.go.set()
        engine.persist(240)
        assert on_disk(places.disk) == [0]
    assert deltacheck.open(places.disk).manifest(0).durability == "power"
    assert "SURVIVES" not in CliRunner().invoke(app, ["ls", str(places.disk)]).stdout


def test_only_the_steps_that_are_asked_for_go_to_the_disk_and_the_newest_at_the_end(
    places: Places,
) -> None:
    with places.engine(persist_every=3) as engine:
        save(engine, *range(6))
        idle(engine)
        assert on_disk(places.disk) == [0, 3]
        assert on_disk(places.memory) == [4, 5]
        assert engine.steps() == [0, 3, 4, 5]
        save(engine, 7)
        for saves, _, _ in exits._saves_of_process():  # what a signal does
            saves.wait(240)
        assert on_disk(places.disk) == [0, 3, 7]
        save(engine, 8)
    assert on_disk(places.disk) == [0, 3, 7, 8]
    all_restore(places.disk)
    all_restore(places.memory)


def test_every_step_that_the_disk_lists_restores_at_every_moment(
    places: Places, drain: Drain, seed: int
) -> None:
    rng, looked = random.Random(seed), []

    def look() -> None:
        all_restore(places.disk)
        looked.append(on_disk(places.disk)[-1])

    drain.after = look
    every, step = rng.choice([1, 2]), 0
    for _ in range(2):
        with places.engine(
            persist_every=every, policy=Policy.exact(max_chain_depth=2), keep=Keep(last=2)
        ) as engine:
            step = engine.restore()["step"] + 1 if engine.steps() else 0
            for _ in range(4):
                engine.save(step, state_at(step))
                step += 1
                if rng.random() < 0.3 and (
                    there := engine.steps()
                ):  # the first save may still be under way
                    chosen = rng.choice(there)
                    try:
                        engine.restore(chosen)
                    except errors.StepNotFound:  # retention has taken it since it was listed
                        assert chosen not in engine.steps()
                    step = max(engine.steps()) + 1
    look()
    assert looked == sorted(looked)
    assert len(looked) >= 4
    assert len(on_disk(places.disk)) == 2  # retention is that of the disk


def test_the_drain_copies_what_a_kill_has_left_half_copied(places: Places) -> None:
    with places.engine() as engine:
        save(engine, 0, 1)
    shutil.rmtree(places.disk / "checkpoints" / "c0000000001")
    (segment,) = (places.disk / "segments").glob("s0000000001-*")
    (segment / "zarr.json").unlink()
    bond = tier_bond.read_bond(places.memory)
    assert bond is not None
    tier_bond.write_bond(
        places.memory, bond._replace(seq=0, nonce=deltacheck.open(places.disk).manifest(0).nonce)
    )
    with places.engine() as engine:
        engine.persist(240)
    assert on_disk(places.disk) == [0, 1]
    all_restore(places.disk)


def test_a_failed_drain_changes_nothing_is_told_by_the_next_call_and_made_up_for(
    places: Places, drain: Drain
) -> None:
    with places.engine() as engine:
        save(engine, 0)
        engine.persist(240)
        before = sorted(path.relative_to(places.disk) for path in places.disk.rglob("*"))
        drain.error = OSError(errno.ENOSPC, "no space left")
        save(engine, 1)
        idle(engine)
        assert sorted(path.relative_to(places.disk) for path in places.disk.rglob("*")) == before
        with pytest.raises(
            errors.SaveFailed,
            match=r"step 1 is in .*memory.* could not be copied to .*disk.*no space left",
        ):
            engine.save(2, state_at(2))
        with pytest.raises(errors.SaveFailed, match="could not be copied"):
            engine.persist(240)
        assert engine.steps() == [0, 1]
        assert_same(engine.restore(), state_at(1))
        drain.error = None
        save(engine, 2)
    assert on_disk(places.disk) == [0, 1, 2]
    all_restore(places.disk)


def test_a_transfer_that_fails_half_way_leaves_no_segment(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.maintain import transfer

    with places.engine(persist_every=100) as engine:
        save(engine, 0, 1, 2)
        idle(engine)
        before = sorted((places.disk / "segments").iterdir())
        original, calls = transfer.copy_file, []

        def copy_file(*arguments: Any) -> int:
            calls.append(arguments)
            if len(calls) == 4:
                raise OSError(errno.EIO, "input/output error")
            return original(*arguments)

        monkeypatch.setattr(transfer, "copy_file", copy_file)
        with pytest.raises(errors.SaveFailed, match="input/output error"):
            engine.persist(240)
        assert sorted((places.disk / "segments").iterdir()) == before
    assert on_disk(places.disk) == [0, 2]


def test_a_file_that_is_not_all_there_is_not_copied_as_a_step(places: Places) -> None:
    with places.engine(persist_every=100) as engine:
        save(engine, 0, 1)
        idle(engine)
        victim = next((places.memory / "segments").glob("s0000000001-*/delta.0.stream/c*"))
        victim.unlink()
        with pytest.raises(errors.SaveFailed, match=r"bytes, .* were committed"):
            engine.persist(240)
        assert on_disk(places.disk) == [0]
        with pytest.raises(errors.SaveFailed):
            engine.close()


# --- memory ---------------------------------------------------------------------------------------


def test_the_files_in_memory_never_take_more_than_the_budget(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, whole, taken = 3_400_000, 0, [0]
    finish_segment, commit = SaveJob.finish_segment, RootWriter.commit

    def look() -> None:
        taken.append(
            sum(memory_tier._bytes_of(places.memory / name) for name in ("segments", "checkpoints"))
        )

    # A save adds to memory until its segment is whole, and its documents with its commit.
    def finish_and_look(job: SaveJob) -> Any:
        finished = finish_segment(job)
        look()
        return finished

    def commit_and_look(writer: RootWriter, *arguments: Any) -> Any:
        committed = commit(writer, *arguments)
        look()
        return committed

    monkeypatch.setattr(SaveJob, "finish_segment", finish_and_look)
    monkeypatch.setattr(RootWriter, "commit", commit_and_look)
    # A save may take 1.4 MB, of which 1 MiB is the allowance for documents: few deltas fit beside
    # it.
    with places.engine(
        memory_bytes=budget, persist_every=4, in_memory=3, policy=Policy.exact(max_chain_depth=1000)
    ) as engine:
        for step in range(12):
            state = state_at(step)
            state["weights"] += torch.randn(300, 300) * (step + 1)  # nothing stays as it was
            report = engine.save(step, state).result(240)
            assert report is not None
            whole += report.leaves[-1].kind == "keyframe"
            newest = state
    assert 1_000_000 < max(taken) <= budget
    assert 2 <= whole < 12  # memory was emptied, and not at each save
    assert_same(dict(places.engine().restore()), newest)


def set_on_busy(engine: Engine, action: str) -> None:
    """Change the option of an open engine."""
    engine._saver.options = replace(engine._saver.options, on_busy=action)


def test_a_save_waits_for_the_drain_where_memory_is_used_up_or_is_skipped(
    places: Places, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ShiftedClock()
    monkeypatch.setattr(torch_engine, "time", clock)
    with places.engine() as engine:
        save(engine, 0)
        engine.persist(240)
        tier_of(engine).memory_bytes = tier_of(engine).used_bytes() + 1000
        drain.go.clear()
        set_on_busy(engine, "skip")
        assert engine.save(1, state_at(1)).state == "skipped"
        set_on_busy(engine, "wait")
        tier_of(engine).memory_bytes = tier_of(engine).used_bytes() + 1_500_000
        save(engine, 2)
        tier_of(engine).memory_bytes = tier_of(engine).used_bytes() + 1_300_000
        open_when_called(monkeypatch, DrainState, "await_change", drain.go, clock)
        handle = engine.save(3, state_at(3))
        assert drain.go.is_set()
        assert handle.blocking_seconds // WAIT_SECONDS == 1
        assert {leaf.kind for leaf in handle.result(240).leaves} == {"keyframe"}
    assert on_disk(places.disk) == [0, 2, 3]


def test_a_budget_that_no_save_fits_in_is_an_error_that_says_so(places: Places) -> None:
    with (
        places.engine(memory_bytes=100_000) as engine,
        pytest.raises(errors.SaveFailed, match=r"memory_bytes of .* is 100,000"),
    ):
        engine.save(0, state_at(0))


def test_a_disk_that_hangs_stops_neither_saves_nor_the_end_for_ever(
    places: Places, drain: Drain
) -> None:
    engine = places.engine()
    drain.go.clear()
    save(engine, 0, 1)
    tier_of(engine).drain.state.pulse.patience_seconds = 0.1
    with pytest.raises(TimeoutError, match="in memory, but not yet all in"):
        engine.persist(0.05)
    with pytest.raises(errors.StorageTimeout, match="may hang"):
        engine.persist()
    tier_of(engine).memory_bytes = 1
    with pytest.raises(errors.StorageTimeout, match="a save waits for memory"):
        engine.save(2, state_at(2))
    with pytest.raises(errors.StorageTimeout):
        engine.close()
    with pytest.raises(errors.RootBusy):  # it may still write
        places.engine()
    drain.go.set()
    wait_until(lambda: tier_of(engine).drain.state.has_ended)
    with places.engine() as again:
        assert again.steps() == [0, 1]
    assert on_disk(places.disk) == [0, 1]


# --- going on -------------------------------------------------------------------------------------

CHILD = """
import sys, torch
from deltacheck import MemoryTier
from deltacheck.backends.torch import Engine
from tests.maintain.test_memory_tier import state_at
engine = Engine(sys.argv[1], memory=MemoryTier(sys.argv[2], persist_every=100))
for step in range(1000):
    engine.save(step, state_at(step)).wait()
    print(step, flush=True)
"""


def test_a_training_that_was_killed_goes_on_from_memory_bit_for_bit(
    places: Places,
) -> None:
    command = [sys.executable, "-c", CHILD, str(places.disk), str(places.memory)]
    child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while int(child.stdout.readline()) < 6:
        pass
    child.send_signal(signal.SIGKILL)
    last = max(map(int, child.stdout.read().split()), default=6)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert on_disk(places.disk) in ([], [0])
    with places.engine(persist_every=100) as engine:
        state = engine.restore()
        assert engine.restored_step is not None
        assert engine.restored_step >= last
        assert_same(state, state_at(engine.restored_step))
        step = engine.restored_step + 1
        report = engine.save(step, state_at(step)).result(240)
        assert report is not None
        assert report.stored_bytes < report.raw_bytes / 2  # the chain goes on
    assert on_disk(places.disk) == [0, step]


def test_after_a_reboot_a_run_goes_on_from_the_newest_step_on_the_disk(places: Places) -> None:
    with places.engine(persist_every=3) as engine:
        save(engine, *range(6))
        idle(engine)
        there = places.killed()
    shutil.rmtree(there.memory)
    with there.engine(persist_every=3) as engine:
        assert_same(engine.restore(), state_at(3))
        assert engine.restored_step == 3
        save(engine, 4, 5, 6, 7)
        assert_same(engine.restore(), state_at(7))
    assert on_disk(there.disk) == [0, 3, 6, 7]
    all_restore(there.disk)
    all_restore(there.memory)


def test_what_a_killed_process_has_not_drained_is_drained_by_the_next_one(
    places: Places, drain: Drain
) -> None:
    drain.go.clear()
    with places.engine() as engine:
        save(engine, 0, 1, 2)
        there = places.killed()
        drain.go.set()
    assert on_disk(there.disk) == []
    with there.engine() as engine:
        idle(engine)
        assert on_disk(there.disk) == [0, 1, 2]
        assert_same(engine.restore(1), state_at(1))
    all_restore(there.disk)


def test_a_run_that_was_set_back_goes_on_from_there_in_both_roots(places: Places) -> None:
    with places.engine(persist_every=2, in_memory=2) as engine:
        save(engine, *range(5))
        idle(engine)
        assert_same(engine.restore(2), state_at(2))  # from the disk
        save(engine, 3)
        assert_same(engine.restore(3), state_at(3))  # from memory
        save(engine, 4, 5)
        engine.restore(4)
        save(engine, 5, 6)
        assert_same(engine.restore(), state_at(6))
    all_restore(places.disk)
    all_restore(places.memory)


def test_a_step_that_is_damaged_in_memory_is_read_from_the_disk(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    with places.engine(policy=Policy.exact(max_chain_depth=0)) as engine:
        save(engine, 0, 1, 2)
        engine.persist(240)
        (victim,) = (places.memory / "segments").glob("s0000000002-*/leaves/weights/c.0.0")
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 0xFF
        victim.write_bytes(content)
        assert_same(engine.restore(), state_at(2))
        assert "instead" in caplog.text
        assert_same(engine.restore(fallback=True), state_at(2))
        assert engine.restored_step == 2
    shutil.rmtree(next((places.disk / "segments").glob("s0000000002-*/leaves/weights")))
    with places.engine() as engine:
        with pytest.raises(errors.Damaged, match="step 2"):
            engine.restore()
        assert_same(engine.restore(fallback=True), state_at(1))


def test_the_digest_of_a_report_is_that_of_the_step_on_the_disk_and_asks_for_it_in_memory_too(
    places: Places,
) -> None:
    with places.engine(persist_every=100) as engine:
        report = engine.save(1, state_at(1)).result(240)
        assert report is not None
        assert_same(engine.restore(expected_digest=report.digest), state_at(1))
        with pytest.raises(errors.Damaged, match="not the one that is expected"):
            engine.restore(expected_digest="sha256:0")
        engine.persist(240)
        assert deltacheck.open(places.disk).digest(1) == report.digest
        assert_same(engine.restore(expected_digest=report.digest), state_at(1))


def test_tags_and_deletions_are_of_both_roots(places: Places) -> None:
    with places.engine(persist_every=100, in_memory=3, keep=Keep(last=1)) as engine:
        save(engine, 1, 2, 3)
        idle(engine)
        assert on_disk(places.disk) == []
        engine.tag(2, "good")
        assert on_disk(places.disk) == [2]
        assert_same(engine.restore("good"), state_at(2))
        engine.tag(1, "older")  # also after a later one
        assert on_disk(places.disk) == [1, 2]
        with pytest.raises(errors.StepTagged):
            engine.delete(2)
        engine.delete(3)
        assert engine.steps() == [1, 2]
        with pytest.raises(errors.StepNotFound, match="neither"):
            engine.restore(3)
        assert_same(engine.restore(), state_at(2))
        save(engine, 3)
    assert on_disk(places.disk) == [1, 2, 3]
    with places.engine() as engine:
        assert engine.steps() == [1, 2, 3]
    all_restore(places.disk)


def test_an_object_store_gets_the_steps_that_memory_holds(s3: object, tmp_path: Path) -> None:
    address = "s3://bucket/memory-tier/run"
    with Engine(address, memory=MemoryTier(tmp_path / "memory", persist_every=2, keep=1)) as engine:
        save(engine, 0, 1, 2, 3)
        idle(engine)
        assert deltacheck.open(address).steps() == [0, 2]
        assert_same(engine.restore(0), state_at(0))
        assert_same(engine.restore(), state_at(3))
    shutil.rmtree(tmp_path / "memory")
    with Engine(address, memory=tmp_path / "memory") as engine:
        assert_same(engine.restore(), state_at(3))
    assert deltacheck.open(address).verify(deep=True) == []


# --- whose memory it is ---------------------------------------------------------------------------


def test_the_memory_of_another_run_is_refused_naming_both_and_left_as_it_is(
    places: Places, tmp_path: Path
) -> None:
    with places.engine() as engine:
        save(engine, 0, 1)
    other = Places(tmp_path / "other")
    other.memory = places.memory
    with pytest.raises(
        errors.ForeignMemory,
        match=rf"{places.memory} cannot be the memory of {other.disk}.*another run, {places.disk}",
    ):
        other.engine()
    assert on_disk(places.memory) == [0, 1]
    with other.engine(on_stale="discard") as engine:
        assert engine.steps() == []
        save(engine, 7)
    with pytest.raises(errors.ForeignMemory, match=f"another run, {other.disk}"):
        places.engine()


def test_a_run_that_was_begun_anew_does_not_go_on_from_the_memory_of_the_old_one(
    places: Places,
) -> None:
    with places.engine(persist_every=100) as engine:
        save(engine, 1, 2)  # nothing of it is on the disk yet
        there = places.killed()
    shutil.rmtree(there.disk)
    with pytest.raises(errors.ForeignMemory):
        there.engine()


def test_an_ordinary_root_is_never_taken_for_memory_nor_discarded(places: Places) -> None:
    with Engine(places.memory) as engine:
        save(engine, 0)
    for how in ("refuse", "discard"):
        with pytest.raises(errors.ForeignMemory, match="no record of the run"):
            places.engine(on_stale=how)
    assert on_disk(places.memory) == [0]
    with pytest.raises(ValueError, match="two directories"):
        Engine(places.memory, memory=places.memory / "inner")


def test_memory_that_is_behind_the_disk_is_discarded_with_a_warning(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    with places.engine(persist_every=2) as engine:
        save(engine, 0, 1, 2, 3)
        idle(engine)
        there = places.killed()
    first = there.memory
    there.memory = there.folder / "second"  # the run goes on elsewhere
    with there.engine() as engine:
        assert_same(engine.restore(), state_at(2))
        save(engine, 3)
    there.memory = first  # step 3 there is not the one on the disk
    with there.engine() as engine:
        assert f"{first}, steps [2, 3], is discarded" in caplog.text
        assert str(there.disk) in caplog.text
        assert_same(engine.restore(), state_at(3))
        save(engine, 4)
    all_restore(there.disk)


def test_memory_that_is_ahead_of_another_history_of_the_run_is_refused(places: Places) -> None:
    with places.engine(persist_every=4) as engine:
        save(engine, *range(8))
        idle(engine)
        there = places.killed()
    with (
        Engine(there.disk) as engine
    ):  # without any memory: the disk has another step 5 now, memory 6 and 7 after the first
        engine.restore()
        save(engine, 5)
    with pytest.raises(
        errors.ForeignMemory, match=r"went on without it: .* checkpoint 5.* steps are \[6, 7\]"
    ):
        there.engine()
    with there.engine(on_stale="discard") as engine:
        assert engine.steps() == [0, 4, 5]


def test_memory_that_outlived_its_machine_or_is_damaged_is_refused(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    with places.engine() as engine:
        save(engine, 0, 1)
    with monkeypatch.context() as other:
        other.setattr(tier_bond.collect, "boot", lambda: "another start")
        with pytest.raises(errors.ForeignMemory, match="started anew"):
            places.engine()
    (places.memory / "checkpoints" / "c0000000001" / "zarr.json").write_bytes(b"{}")
    with pytest.raises(errors.ForeignMemory, match="damaged"):
        places.engine()
    with places.engine(on_stale="discard") as engine:
        assert_same(engine.restore(), state_at(1))  # from the disk
        assert on_disk(places.memory) == []


def test_what_makes_memory_stale() -> None:
    bond, held = Bond("run", "/disk", 4, "d"), {(5, "e"), (6, "f")}
    assert stale(bond, held, "run", (4, "d")) is None  # what it knows of the disk
    assert (
        stale(bond, held, "run", (5, "e")) is None
    )  # a kill came between the copy and the note of it
    assert stale(bond, held, "run", (5, "")) is None  # damaged on the disk
    assert stale(bond, set(), "other", (9, "x")) is None  # nothing is there to be stale
    assert stale(Bond("run", "/disk", -1, ""), held, "run", None) is None
    assert stale(bond._replace(boot="now"), held, "run", (4, "d"), "now") is None
    assert stale(bond._replace(boot="before"), held, "run", (4, "d"), "") is None  # cannot be told
    for found, is_behind in (
        (stale(None, held, "run", (4, "d")), False),
        (stale(bond, held, "other", (4, "d")), False),
        (stale(bond._replace(boot="before"), held, "run", (4, "d"), "now"), False),
        (stale(bond, held, "run", None), False),
        (stale(bond, held, "run", (5, "x")), False),
        (stale(bond, held, "run", (6, "x")), True),
        (stale(bond, held, "run", (9, "x")), True),
    ):
        assert found is not None
        assert found.is_behind is is_behind


def test_what_is_due_and_what_stays() -> None:
    briefs = [
        Brief(seq, step, f"n{seq}", {}, frozenset()) for seq, step in enumerate([0, 1, 2, 3, 4, 5])
    ]
    assert next_due(briefs, -1, 2, ()) == briefs[0]
    assert next_due(briefs, 0, 2, ()) == briefs[2]
    assert next_due(briefs, 4, 2, ()) is None
    assert next_due(briefs, 4, 2, {3, 5}) == briefs[3]
    assert resident(briefs, 5, 1, (), 2) == {4, 5}
    assert resident(briefs, 1, 2, (), 1) == {2, 4, 5}
    assert resident(briefs, 4, 2, {1}, 0) == {1}


@pytest.mark.parametrize(
    "wrong", [{"keep": 0}, {"persist_every": 0}, {"memory_bytes": 0}, {"on_stale": "ask"}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any], places: Places) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MemoryTier(places.memory, **wrong)


# --- mirrors --------------------------------------------------------------------------------------


def test_a_run_goes_on_from_a_mirror_of_its_memory_where_that_is_lost(
    places: Places, tmp_path: Path
) -> None:
    peer = tmp_path / "peer"
    with places.engine(persist_every=3) as engine:
        save(engine, 0, 1)
        with Mirror(places.memory, peer) as copy:
            assert copy.poll() == [0, 1]
            save(engine, 2, 3, 4)
            idle(engine)
            assert copy.run(timeout=0) == 2
            assert on_disk(peer) == on_disk(places.memory) == [3, 4]
            assert copy.poll() == []
            with pytest.raises(errors.RootBusy):
                Mirror(places.memory, peer)
            there = places.killed()
            shutil.rmtree(there.memory)
            copy._source = deltacheck.store.roots.root.Root(
                there.memory, deltacheck.store.roots.root.Store(there.memory)
            )
            assert copy.poll() == []  # gone: nothing is deleted
        assert on_disk(peer) == [3, 4]
    there.memory = peer
    with there.engine(persist_every=3) as engine:
        assert_same(engine.restore(), state_at(4))
        save(engine, 5)
    all_restore(there.disk)
    result = CliRunner().invoke(app, ["mirror", str(peer), str(tmp_path / "again"), "--once"])
    assert result.exit_code == 0, result.stdout
    assert on_disk(tmp_path / "again") == on_disk(peer)


def test_a_mirror_keeps_the_save_that_replaces_another_of_the_same_number(
    places: Places, tmp_path: Path
) -> None:
    peer = tmp_path / "peer"
    with places.engine(persist_every=100) as engine:
        save(engine, 0)
        idle(engine)
        restarted = places.killed()
        save(engine, 1)
        with Mirror(places.memory, peer) as copy:
            assert copy.poll() == [0, 1]
            with restarted.engine(persist_every=100) as resumed:
                resumed.restore(0)
                save(resumed, 1)  # the sequence number of the lost save, with another nonce
                copy._source = deltacheck.store.roots.root.Root(
                    restarted.memory, deltacheck.store.roots.root.Store(restarted.memory)
                )
                assert copy.poll() == [1]
                assert on_disk(peer) == on_disk(restarted.memory)
                assert copy.poll() == []


def test_a_mirror_of_a_memory_takes_no_ordinary_root(places: Places) -> None:
    with places.engine() as engine:
        save(engine, 0)
    with pytest.raises(errors.ForeignMemory, match="another run"):
        Mirror(places.memory, places.disk)
    with pytest.raises(errors.StorageFailed, match="needs a local directory"):
        Mirror(places.memory, "s3://bucket/memory")
