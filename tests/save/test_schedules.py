"""Seeded schedules: threads and processes that save, delete, collect and read are held up at random
where they touch the disk or each other.

Yield points: creation and replacement of documents, removal of files, hand-overs between the
saver's threads, pins, reads of tables. The quick size runs with the others; ``make model-test``
runs more (DELTACHECK_SCHEDULES). DELTACHECK_SCHEDULE_SEED replays a failure's seed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Keep, Policy, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.restore import read
from deltacheck.save import pipeline
from deltacheck.store import collect
from deltacheck.store.files import arrays, local_storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.lock import holding, pins
from deltacheck.store.roots import root
from tests.support.memory import memory_folder

SCHEDULES = int(os.environ.get("DELTACHECK_SCHEDULES", "6"))
SAVES = 6


@contextlib.contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Each thread that comes to a yield point goes on at once, lets others run, or sleeps up to 3
    ms, seldom 30, as its own seeded stream says.
    """
    streams: dict[int, random.Random] = {}
    number = itertools.count()

    def turn() -> None:
        chance = streams.setdefault(threading.get_ident(), random.Random(f"{seed} {next(number)}"))
        choice = chance.random()
        if choice < 0.3:
            time.sleep(0)
        elif choice < 0.5:
            time.sleep(chance.random() * 0.003)
        elif choice < 0.52:
            time.sleep(0.03)

    class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: Any, *more: Any, **options: Any) -> None:
            turn()
            super().put(item, *more, **options)

        def get(self, *more: Any, **options: Any) -> Any:
            item = super().get(*more, **options)
            turn()
            return item

    def held_up(do: Any) -> Any:
        def call(*words: Any, **options: Any) -> Any:
            turn()
            result = do(*words, **options)
            turn()
            return result

        return call

    def slow_reader(do: Any) -> Any:
        def call(*words: Any) -> Any:
            if threading.current_thread().name == "reader":
                time.sleep(
                    0.08 if next(number) % 3 == 0 else 0
                )  # as long as it takes to delete and collect what it reads
            return do(*words)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.queue, "SimpleQueue", Queue)  # type: ignore[attr-defined]
        for module, name in (
            (arrays, "create_file"),
            (arrays, "replace_file"),
            (arrays, "write_document"),
            (arrays, "read_file"),
            (Durability, "sync_tree"),
            (pins, "unlink_unless_pinned"),
            (collect, "delete_checkpoint"),
            (shutil, "rmtree"),
            (root.documents, "read_manifest"),
            (local_storage, "Pin"),
            (read, "Deltas"),
        ):
            patch.setattr(module, name, held_up(getattr(module, name)))
        patch.setattr(read, "_start_keyframes", slow_reader(read._start_keyframes))
        # A second engine of a process begins with a collection, which takes longer than a save and
        # holds all threads.
        patch.setattr(holding, "gc", SimpleNamespace(collect=lambda: 0))
        yield


def run_once(path: Path, seed: int) -> dict[str, int]:
    """One writer with retention and compaction, one reader, one that collects and one that tags
    beside it: what they met.
    """
    chance = random.Random(seed)
    met = {"read": 0, "gone": 0, "refused": 0}
    problems: list[BaseException] = []
    over = threading.Event()
    engine = Engine(
        path,
        policy=Policy.exact(max_chain_depth=chance.choice([0, 0, 1, 4, 4, 50])),
        keep=Keep(last=chance.choice([1, 2])),
        options=SaveOptions(
            grace_seconds=chance.choice([0.0, 0.0, 0.01]), max_pending=chance.choice([1, 2])
        ),
    )

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                while not over.is_set():
                    work()
            except BaseException as error:  # noqa: BLE001 - told below
                problems.append(error)

        thread = threading.Thread(target=run, name=work.__name__)
        thread.start()
        return thread

    def reader() -> None:
        try:
            found = deltacheck.open(path).restore()
        except errors.StepNotFound:
            met["gone"] += 1  # none yet, or deleted while it was being opened
            time.sleep(0.001)
            return
        met["read"] += 1
        assert len({float(found["n"]), *np.unique(found["a"]), *np.unique(found["b"])}) == 1, (
            "a mixture"
        )

    def second() -> None:
        try:
            Engine(path).close()
        except errors.RootBusy:
            met["refused"] += 1
        else:
            raise AssertionError("two writers")
        time.sleep(0.002)

    def tag() -> None:
        with contextlib.suppress(errors.StepNotFound):
            engine.tag(None, "now", move=True)
            value = deltacheck.open(path).restore("now")
            assert len({float(value["n"]), *np.unique(value["a"])}) == 1, "a mixture"
        time.sleep(0.002)

    threads = [guarded(work) for work in (reader, second, tag)]
    try:
        state = {"a": torch.zeros(200), "b": torch.zeros(9), "n": 0.0}
        for step in range(SAVES):
            engine.before_update()
            for value in (state["a"], state["b"]):
                value.fill_(step)  # type: ignore[union-attr]
            state["n"] = float(step)
            engine.save(step, state)
        engine.wait(240)
    finally:
        over.set()
        for thread in threads:
            thread.join(240)
        engine.close(30)
    for problem in problems:
        raise problem
    assert deltacheck.open(path).verify(deep=True) == []
    return met


@pytest.mark.timeout(7200)
def test_under_no_schedule_does_a_reader_see_a_mixture_or_lose_what_it_reads() -> None:
    first = int(
        os.environ.get("DELTACHECK_SCHEDULE_SEED") or random.SystemRandom().randrange(1 << 32)
    )
    total = {"read": 0, "gone": 0, "refused": 0}
    for number in range(SCHEDULES):
        folder = Path(tempfile.mkdtemp(dir=memory_folder()))
        try:
            with schedule(first + number):
                for name, count in run_once(folder / "run", first + number).items():
                    total[name] += count
        except BaseException:
            print(
                f"DELTACHECK_SCHEDULE_SEED={first + number} DELTACHECK_SCHEDULES=1 replays the"
                " choices"
            )
            raise
        finally:
            shutil.rmtree(folder)
    print(f"{SCHEDULES} schedules from seed {first}: {total}")
    assert min(total["read"], total["refused"]) > 0
