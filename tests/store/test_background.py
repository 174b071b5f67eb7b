"""The worker threads."""

from __future__ import annotations

import gc
import weakref

import pytest

from deltacheck.errors import Damaged
from deltacheck.store.files.background import Background
from tests.support.waiting import wait_until


def test_an_idle_thread_does_not_keep_the_error_of_its_last_task() -> None:
    def fail() -> None:
        raise Damaged("a chunk")

    threads = Background(1, "deltacheck-test")
    task = threads.start(fail)
    with pytest.raises(Damaged):
        task.result()
    kept = weakref.ref(task)
    del task

    def is_gone() -> bool:
        gc.collect()
        return kept() is None

    wait_until(is_gone)
    threads.close()
