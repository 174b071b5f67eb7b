"""A model of the whole: random saves, kills, deletions, collections, compactions and damage against
a
plain dict of what was saved.

The quick size runs with the others; ``make model-test`` runs more (DELTACHECK_MODEL_RUNS,
DELTACHECK_MODEL_STEPS). A failure prints the seed (DELTACHECK_MODEL_SEED replays it) and the
sequence that led to it; it is not made shorter, since what threads do differs from run to run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import deltacheck
from deltacheck import Keep, KeepBest, Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.maintain import compaction
from deltacheck.maintain.compaction import compact
from deltacheck.save import root_writer
from deltacheck.store import collect
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from deltacheck.store.roots import tagging
from deltacheck.store.roots.opening import open_root
from tests.support.memory import memory_folder
from tests.support.states import assert_same
from tests.support.waiting import wait_until

RUNS = int(os.environ.get("DELTACHECK_MODEL_RUNS", "6"))
STEPS = int(os.environ.get("DELTACHECK_MODEL_STEPS", "25"))


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Save:
    """A checkpoint in the model. ``key``: equal for all forms of one save; ``course``: the key of
    the save that began its course, 0 for the first course.
    """

    key: int
    step: int
    state: dict[str, Any]
    loss: float
    course: int = 0


def where_saved(do: Callable[..., None]) -> Callable[..., None]:
    """Do nothing where there is no step, or a save is under way. No precondition: what a kill
    leaves
    depends on threads, and hypothesis wants the choices of a run to depend on nothing but its
    earlier ones.
    """

    @functools.wraps(do)
    def call(self: Model, **chosen: Any) -> None:
        if self.saved and not self.pending:
            do(self, **chosen)

    return call


class Disk:
    """The store's ways to change the disk; after ``left`` more of them the process is dead, and
    nothing changes any more.
    """

    def __init__(self) -> None:
        self.left: int | None = None
        self.fails = False
        self._own = (
            arrays.create_file,
            arrays.replace_file,
            arrays.write_document,
            Path.unlink,
            shutil.rmtree,
            Durability.sync_tree,
        )
        create, replace, write, unlink, rmtree, sync_tree = self._own

        def checked(change: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._count()
                return change(*args, **kwargs)

            return call

        arrays.create_file, arrays.replace_file = checked(create), checked(replace)
        arrays.write_document = checked(write)
        Durability.sync_tree = checked(sync_tree)  # type: ignore[method-assign]
        Path.unlink = checked(unlink)  # type: ignore[method-assign]

        def remove(path: Any, ignore_errors: bool = False) -> None:
            if ignore_errors and (self.fails or self.left == 0):
                return
            self._count()
            rmtree(path, ignore_errors=ignore_errors)

        shutil.rmtree = remove  # type: ignore[assignment]

    def _count(self) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        if self.left is not None:
            if self.left <= 0:
                raise Killed
            self.left -= 1

    def revive(self) -> None:
        self.left, self.fails = None, False

    def restore(self) -> None:
        (
            arrays.create_file,
            arrays.replace_file,
            arrays.write_document,
            Path.unlink,
            shutil.rmtree,
            Durability.sync_tree,
        ) = self._own  # type: ignore[method-assign, assignment]


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.root = Path(tempfile.mkdtemp(dir=memory_folder()))
        self.path = self.root / "run"
        self.engine: Engine | None = None
        self.saved: dict[int, Save] = {}  # by sequence number
        self.tags: dict[str, int] = {}  # name -> key
        self.pending: list[tuple[Any, Save]] = []
        self.live = {
            "a": torch.zeros(300),
            "b": torch.arange(5),
            "c": torch.ones(10, dtype=torch.bfloat16),
            "still": torch.ones(64),
            "n": 0,
        }
        self.keys = 0
        self.course: int | None = None  # of this engine's saves; ``None``: its first one decides
        self.time, self.jump = time.time, 0.0
        time.time = lambda: self.time() + self.jump

    # --- the model --------------------------------------------------------------------------------

    def newest(self, step: int) -> Save:
        return self.saved[max(seq for seq, save in self.saved.items() if save.step == step)]

    def expected_after(self, saved: dict[int, Save], keep: Keep) -> dict[int, Save]:
        """Return the steps that a retention keeps, computed as plainly as possible."""
        if keep.all_steps:
            return dict(saved)
        course = saved[max(saved)].course if saved else 0
        of_step = {s.step: seq for seq, s in sorted(saved.items()) if s.course == course}
        asked = sorted(of_step.values())
        stay = set(asked[-(keep.last or 1) :])
        stay |= {seq for seq, s in saved.items() if s.course != course}
        stay |= {seq for seq in asked if keep.every and saved[seq].step % keep.every == 0}
        for best in keep.best_rules:
            finite = [seq for seq in asked if saved[seq].loss == saved[seq].loss]
            stay |= set(sorted(finite, key=lambda seq: (saved[seq].loss, seq))[: best.count])
        stay |= {
            max(seq for seq, save in saved.items() if save.key == key) for key in self.tagged(saved)
        }
        return {seq: save for seq, save in saved.items() if seq in stay}

    def tagged(self, saved: dict[int, Save]) -> set[int]:
        return set(self.tags.values()) & {save.key for save in saved.values()}

    def committed(self, seq: int, save: Save) -> None:
        assert self.engine is not None
        saved = self.saved | {seq: self.in_its_course(save, self.saved)}
        self.saved = self.expected_after(saved, self.engine._writer.keep)

    def in_its_course(self, save: Save, saved: dict[int, Save]) -> Save:
        """Return a save that comes after others with its course."""
        if self.course is None:
            newest = saved[max(saved)] if saved else None
            if newest is None or save.step > newest.step:
                self.course = newest.course if newest else 0
            else:
                self.course = save.key
        return replace(save, course=self.course)

    def settle(self) -> None:
        for handle, save in self.pending:
            self.committed(handle.result(240).seq, save)
        self.pending = []

    def snapshot(self, step: int, loss: float) -> Save:
        self.keys += 1
        copy = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.live.items()
        }
        return Save(self.keys, step, copy, loss)

    # --- saving -----------------------------------------------------------------------------------

    @precondition(lambda self: self.engine is None)
    @rule(
        # From 4 on, deltas are merged behind the saves.
        depth=st.sampled_from([0, 1, 2, 3, 4, 4, 5]),
        keep=st.sampled_from(
            [
                {},
                Keep(),
                Keep(),
                Keep(last=1),
                Keep(last=3),
                Keep(every=4),
                Keep(last=2, best=KeepBest("loss", 2)),
            ]
        ),
        go_on=st.booleans(),
    )
    def open(self, depth: int, keep: Keep, go_on: bool) -> None:
        policy = Policy.exact(max_chain_depth=depth)
        self.course = None
        self.engine = Engine(
            self.path,
            policy=policy,
            options=SaveOptions(grace_seconds=0, max_pending=2, capture="eager"),
            keep=keep,
        )
        if go_on and self.saved:
            self.restore(which=0, from_engine=True)

    @rule(where=st.integers(0, 299), count=st.integers(0, 40), value=st.floats(width=32))
    def mutate(self, where: int, count: int, value: float) -> None:
        self.live["a"][where : where + count] = value
        self.live["b"][where % 5] += count
        self.live["c"][where % 10] = value
        self.live["n"] += 1

    @precondition(lambda self: self.engine is not None)
    @rule(
        step=st.integers(0, 12),
        loss=st.sampled_from([0.5, 1.0, 1.0, 2.0, float("nan")]),
        wait=st.booleans(),
    )
    def save(self, step: int, loss: float, wait: bool) -> None:
        assert self.engine is not None
        save = self.snapshot(step, loss)
        self.pending.append((self.engine.save(step, self.live, metrics={"loss": loss}), save))
        if wait:
            self.wait()

    @precondition(lambda self: self.pending)
    @rule()
    def wait(self) -> None:
        assert self.engine is not None
        self.engine.wait(240)
        self.settle()

    @precondition(lambda self: self.engine is not None)
    @rule()
    def close(self) -> None:
        assert self.engine is not None
        self.engine.close(60)
        self.settle()
        self.engine = None

    @precondition(lambda self: self.engine is not None)
    @rule(step=st.integers(0, 12))
    def a_save_that_fails(self, step: int) -> None:
        assert self.engine is not None
        self.wait() if self.pending else None
        self.disk.fails = True
        self.live["a"][:] += 1
        error = self.engine.save(step, self.live).exception(240)
        self.disk.fails = False
        assert isinstance(error, errors.SaveFailed)

    @precondition(lambda self: self.engine is not None)
    @rule(step=st.integers(0, 12), after=st.integers(0, 12))
    def kill(self, step: int, after: int) -> None:
        """The process ends after some more changes to the disk, with saves under way."""
        assert self.engine is not None
        save = self.snapshot(step, 1.0)
        self.disk.left = after
        with contextlib.suppress(errors.SaveFailed):
            self.pending.append((self.engine.save(step, self.live, metrics={"loss": 1.0}), save))
        keep, self.engine, engine = self.engine._writer.keep, None, self.engine
        with contextlib.suppress(errors.SaveFailed, Killed):
            engine.close(60)
        self.disk.revive()
        self.recover([save for _, save in self.pending], keep)
        self.pending = []

    def recover(self, in_flight: list[Save], keep: Keep) -> None:
        """Learn from the disk what was committed: only what was in flight may have come, only what
        a retention lets go may have gone.
        """
        found, before = {}, self.saved
        # A save is committed after all before it, so these decide about its course.
        earlier = dict(before)
        for save in in_flight:
            earlier[max(earlier, default=-1) + 1] = self.in_its_course(save, earlier)
        in_flight = list(earlier.values())[len(before) :]
        opened = open_root(self.path) if self.path.joinpath("zarr.json").exists() else None
        for ref in opened.checkpoints() if opened is not None else ():
            if ref.seq not in before:
                assert opened is not None
                state = self.read(opened, ref)
                save = next(s for s in in_flight if s.step == ref.step and same(s.state, state))
                in_flight.remove(save)
                found[ref.seq] = save
            else:
                found[ref.seq] = before[ref.seq]
        new = {seq: save for seq, save in found.items() if seq not in before}
        must: dict[int, Save] = before
        for seq, save in sorted(new.items()):
            must = self.expected_after(must | {seq: save}, keep)
        assert must.keys() <= found.keys() <= before.keys() | new.keys()
        self.saved = found

    # --- looking ----------------------------------------------------------------------------------

    def read(self, root: Any, ref: Any) -> dict[str, Any]:
        from deltacheck.backends.torch.state import leaves
        from deltacheck.leaf import tree
        from deltacheck.restore.resolve import resolve_leaves
        from deltacheck.restore.values import load_leaves

        manifest = root.read(ref.manifest_path)
        loaded = load_leaves(resolve_leaves(root, manifest))
        assert tree.array_paths(manifest.tree)
        state: dict[str, Any] = leaves.tree_of(manifest.tree, loaded)
        return state

    @rule(which=st.integers(0, 20), from_engine=st.booleans())
    @where_saved
    def restore(self, which: int, from_engine: bool) -> None:
        steps = sorted({save.step for save in self.saved.values()})
        step = steps[which % len(steps)]
        if from_engine and self.engine is not None:
            self.live = self.engine.restore(step)
            assert_same(self.newest(step).state, self.live)
            self.course = self.newest(step).course
        else:
            found = deltacheck.open(self.path).restore(step)
            assert_same(
                {k: v for k, v in self.newest(step).state.items() if k in "ab"},
                {k: torch.as_tensor(found[k]) for k in "ab"},
            )

    @invariant()
    def the_steps_are_those_of_the_model(self) -> None:
        if self.path.joinpath("zarr.json").exists() and not self.pending:
            assert [ref.seq for ref in open_root(self.path).checkpoints()] == sorted(self.saved)

    @rule(chance=st.integers(0, 1 << 30))
    @where_saved
    def damage_is_an_error_or_does_not_matter(self, chance: int) -> None:
        random_ = random.Random(chance)
        files = sorted(
            p
            for p in self.path.rglob("*")
            if p.is_file() and not {"marks", "control"} & {p.parent.name, p.name}
        )
        victim = random_.choice(files)
        content = victim.read_bytes()
        if not content:
            return
        wrong = bytearray(content)
        wrong[random_.randrange(len(wrong))] ^= 1 << random_.randrange(8)
        victim.write_bytes(wrong)
        try:
            opened = open_root(self.path)
            for ref in opened.checkpoints():
                with contextlib.suppress(errors.Damaged, errors.UnsupportedFormat):
                    assert_same(self.saved[ref.seq].state, self.read(opened, ref))
            with contextlib.suppress(errors.Damaged, errors.UnsupportedFormat):
                deltacheck.open(self.path).tags()
        except (errors.NotACheckpointRoot, errors.UnsupportedFormat, errors.Damaged):
            assert victim == self.path / "zarr.json"
        finally:
            victim.write_bytes(content)

    @rule(seconds=st.sampled_from([-1e6, -1.0, 0.0, 1e6]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.jump = seconds

    @precondition(lambda self: self.engine is not None)
    @rule()
    def a_second_writer_is_refused(self) -> None:
        with pytest.raises(
            errors.RootBusy, match=r"by this process: it was opened at .*test_model\.py"
        ):
            Engine(self.path)

    # --- tags, deletion, collection, compaction ---------------------------------------------------

    @rule(which=st.integers(0, 20), name=st.sampled_from(["x", "y"]), move=st.booleans())
    @where_saved
    def tag(self, which: int, name: str, move: bool) -> None:
        steps = sorted({save.step for save in self.saved.values()})
        save = self.newest(steps[which % len(steps)])
        root = open_root(self.path)
        if name in self.tags and self.tags[name] != save.key and not move:
            with pytest.raises(errors.RootBusy, match="already"):
                tagging.put(root, save.step, name)
        else:
            assert tagging.put(root, save.step, name, move=move).step == save.step
            self.tags[name] = save.key

    @rule(which=st.integers(0, 1))
    def untag(self, which: int) -> None:
        if not self.tags:
            return
        name = sorted(self.tags)[which % len(self.tags)]
        tagging.remove(open_root(self.path), name)
        del self.tags[name]

    @rule()
    @where_saved
    def restore_by_tag(self) -> None:
        there = {save.key: save for save in self.saved.values()}
        for name, key in self.tags.items():
            if key in there:
                found = deltacheck.open(self.path).restore(name)
                assert_same(there[key].state["a"], torch.as_tensor(found["a"]))

    @rule(
        last=st.integers(1, 3),
        every=st.sampled_from([None, 3]),
        killed=st.sampled_from([None, None, 0, 1, 2, 3, 5]),
    )
    @where_saved
    def prune(self, last: int, every: int | None, killed: int | None) -> None:
        keep = Keep(last=last, every=every)
        after = self.expected_after(self.saved, keep)
        self.disk.left = killed
        try:
            done = root_writer.prune(open_root(self.path), keep)
        except Killed:
            self.disk.revive()
            left = {ref.seq for ref in open_root(self.path).checkpoints()}
            assert after.keys() <= left <= self.saved.keys()
            self.saved = {seq: save for seq, save in self.saved.items() if seq in left}
            return
        self.disk.revive()
        assert {one.seq for one in done.deleted} == self.saved.keys() - after.keys()
        self.saved = after

    @rule(which=st.integers(0, 20))
    @where_saved
    def delete(self, which: int) -> None:
        steps = sorted({save.step for save in self.saved.values()})
        step = steps[which % len(steps)]
        if any(
            save.step == step and save.key in self.tags.values() for save in self.saved.values()
        ):
            with pytest.raises(errors.StepTagged):
                root_writer.delete(open_root(self.path), step)
        else:
            root_writer.delete(open_root(self.path), step)
            self.saved = {seq: save for seq, save in self.saved.items() if save.step != step}

    @precondition(lambda self: self.engine is not None)
    @rule(which=st.integers(0, 20), step=st.integers(0, 12))
    @where_saved
    def go_on_from_a_step_that_is_deleted_then(self, which: int, step: int) -> None:
        self.restore(which=which, from_engine=True)
        self.delete(which=which)
        self.collect(killed=None)
        self.save(step=step, loss=1.0, wait=True)
        self.restore(
            which=sorted({save.step for save in self.saved.values()}).index(step), from_engine=False
        )

    @precondition(lambda self: not self.pending)
    @rule(killed=st.sampled_from([None, None, 0, 1, 2, 4, 8]))
    def collect(self, killed: int | None) -> None:
        if not self.path.joinpath("zarr.json").exists():
            return
        self.disk.left = killed
        with contextlib.suppress(Killed):
            if self.engine is None:
                collect.collect(open_root(self.path), grace_seconds=0, writer_is_dead=True)
            else:
                protected = self.engine._saver.chains.protected_segments()
                collect.collect(open_root(self.path), grace_seconds=0, protected=protected)
        self.disk.revive()
        if self.engine is None:  # it removes forms that compaction has replaced
            left = {ref.seq for ref in open_root(self.path).checkpoints()}
            newest = {save.key: seq for seq, save in sorted(self.saved.items())}
            assert set(newest.values()) <= left
            self.saved = {seq: save for seq, save in self.saved.items() if seq in left}

    @precondition(lambda self: self.engine is None)
    @rule(killed=st.sampled_from([None, None, 1, 4, 8, 10, 12]))
    @where_saved
    def compact(self, killed: int | None) -> None:
        newest = max(self.saved)
        self.disk.left = killed
        done = None
        with contextlib.suppress(Killed):
            done = compact(open_root(self.path))
        self.disk.revive()
        left = {ref.seq for ref in open_root(self.path).checkpoints()}
        new = left - self.saved.keys()
        assert len(new) <= 1
        for seq in new:
            self.saved[seq] = self.saved[newest]
        assert self.saved.keys() - left <= ({newest} if new else set())
        self.saved = {seq: save for seq, save in self.saved.items() if seq in left}
        assert done is None or max(self.saved) == done.seq

    @precondition(lambda self: self.engine is None)
    @rule(below=st.sampled_from([0.3, 1.0]), killed=st.sampled_from([None, None, 0, 3, 6, 9]))
    @where_saved
    def reclaim(self, below: float, killed: int | None) -> None:
        self.disk.left = killed
        with contextlib.suppress(Killed):
            compaction.reclaim(open_root(self.path), below=below)
        self.disk.revive()

    def teardown(self) -> None:
        try:
            self.disk.revive()
            if self.engine is not None:
                self.close()
            if self.path.joinpath("zarr.json").exists():
                self.check_everything()
        finally:
            self.disk.restore()
            time.time = self.time
            shutil.rmtree(self.root)

    def collect_garbage(self) -> None:
        # Errors that were met hold the frames that read, and so what these have pinned
        gc.collect()
        for _ in range(2):
            collect.collect(open_root(self.path), grace_seconds=0, writer_is_dead=True)

    def check_everything(self) -> None:
        self.collect_garbage()
        newest = {save.key: seq for seq, save in sorted(self.saved.items())}
        opened = open_root(self.path)
        checkpoints = opened.checkpoints()
        assert [ref.seq for ref in checkpoints] == sorted(newest.values())
        for ref in checkpoints:
            assert_same(self.saved[ref.seq].state, self.read(opened, ref))
        needed = {
            segment.id for ref in checkpoints for segment in opened.read(ref.manifest_path).segments
        }

        def only_needed() -> bool:
            self.collect_garbage()
            return set(opened.store.segment_ids()) == needed

        # Threads that are about to end hold what they have read.
        wait_until(only_needed)
        assert deltacheck.open(self.path).verify(deep=True) == []
        assert deltacheck.open(self.path).tags().keys() == self.tags.keys()


def same(a: Any, b: Any) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


@pytest.mark.timeout(7200)
def test_whatever_happens_every_step_that_is_there_is_the_one_that_was_saved() -> None:
    seed = int(os.environ.get("DELTACHECK_MODEL_SEED") or random.SystemRandom().randrange(1 << 32))
    print(
        f"seed {seed}, {RUNS} runs of {STEPS} steps. Replay: DELTACHECK_MODEL_SEED={seed} "
        f"DELTACHECK_MODEL_RUNS={RUNS} DELTACHECK_MODEL_STEPS={STEPS} pytest"
        " tests/faults/test_model.py"
    )
    settings = hypothesis.settings(
        max_examples=RUNS,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(hypothesis.seed(seed)(Model), settings=settings)
