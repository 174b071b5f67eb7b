"""Handlers of signals meet no lock of ours, and waits that must not end go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from deltacheck.errors import SaveFailed
from deltacheck.store.lock.interrupts import (
    Condition,
    Flag,
    Lock,
    Turn,
    join,
    postponed,
    shielded,
    when_free,
)
from tests.support.waiting import wait_until

Install = Callable[[Callable[[], object]], None]


@pytest.fixture
def handler() -> Iterator[Install]:
    """Return a function that installs a handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)

    def install(action: Callable[[], object]) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            action()

        signal.signal(signal.SIGUSR1, handle)

    yield install
    signal.signal(signal.SIGUSR1, before)


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("make", [Lock, postponed])
def test_a_handler_runs_at_the_end_of_the_block(make: Any, handler: Install) -> None:
    events: list[str] = []
    handler(lambda: events.append("handled"))
    installed = signal.getsignal(signal.SIGUSR1)
    with make(), make():
        send()
        when_free(lambda: events.append("action"))
        events.append("block")
    assert events == ["block", "handled", "action"]
    assert signal.getsignal(signal.SIGUSR1) is installed


def test_ctrl_c_ends_a_block_but_not_the_hold_of_a_lock() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        events: list[str] = []
        with pytest.raises(KeyboardInterrupt), postponed():  # noqa: PT012
            with Lock():
                os.kill(os.getpid(), signal.SIGINT)
                events.append("locked")
            events.append("block")
        assert events == ["locked"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_error_of_a_handler_leaves_no_other_signal_behind(handler: Install) -> None:
    events: list[str] = []

    def fail() -> None:
        raise RuntimeError("worker is killed")

    handler(fail)
    before = signal.signal(signal.SIGUSR2, lambda *_: events.append("second"))
    try:
        with pytest.raises(RuntimeError, match="worker is killed"), postponed():  # noqa: PT012
            send()
            os.kill(os.getpid(), signal.SIGUSR2)
        assert events == ["second"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_error_of_a_handler_does_not_end_a_shielded_wait(handler: Install) -> None:
    def fail() -> None:
        raise RuntimeError("worker is killed")

    handler(fail)
    end = Flag()

    def interrupt() -> None:
        send()
        end.set()

    thread = threading.Thread(target=interrupt)
    with shielded() as errors:
        thread.start()
        assert end.wait(240)
    thread.join()
    assert [str(error) for error in errors] == ["worker is killed"]


def test_a_handler_may_wait_for_what_it_has_interrupted_the_wait_for(handler: Install) -> None:
    end, states = Condition(), ["begun"]
    waits: list[bool] = []

    def advance() -> None:
        states.append("ended")
        end.notify()

    def handle() -> None:
        # Only now, so that the outer wait is interrupted in any case.
        threading.Thread(target=advance).start()
        waits.append(end.wait_until(lambda: "ended" in states, 60))

    handler(handle)

    def interrupted() -> bool:
        if not waits and "sent" not in states:
            states.append("sent")
            send()
        return "ended" in states

    assert end.wait_until(interrupted, 60)
    assert waits == [True]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork")  # JAX says so, where another test has imported it
def test_a_forked_child_has_no_lock_of_its_parent(handler: Install) -> None:
    events: list[str] = []
    handler(lambda: events.append("handled"))
    with Lock(), postponed():
        child = os.fork()
        if not child:
            send()
            os._exit(len(events))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_wait_goes_on_if_its_notification_is_lost() -> None:
    change, states = Condition(), ["begun"]
    patience = iter([False, False])

    def condition() -> bool:
        # True at the third look, with nobody to notify.
        if next(patience, True):
            states.append("ended")
        return "ended" in states

    assert change.wait_until(condition)
    assert states == ["begun", "ended"]


def test_an_interrupted_wait_for_a_thread_leaves_it_running(handler: Install) -> None:
    def interrupt() -> None:
        raise InterruptedError

    def calls() -> set[str]:
        frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        return names

    handler(interrupt)
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    sender = threading.Thread(target=lambda: wait_until(lambda: "join" in calls()) and send())
    sender.start()
    with pytest.raises(InterruptedError):
        join(thread)
    assert thread.is_alive()
    assert not join(thread, 0)
    release.set()
    assert join(thread)
    sender.join()


def test_a_turn_is_of_one_thread_and_refuses_the_handler_that_interrupts_it(
    handler: Install,
) -> None:
    turn, is_taken, may_end = Turn(), Flag(), Flag()
    order: list[str] = []

    def other() -> None:
        with turn.of("restore"):
            is_taken.set()
            may_end.wait(240)
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    assert is_taken.wait(240)
    handler(may_end.set)
    send()  # handled while this thread waits, or before
    with turn.of("save", postpones=True):
        order.append("this")
    thread.join()
    assert order == ["other", "this"]
    with (
        turn.of("restore"),
        pytest.raises(SaveFailed, match="cannot save, because it has interrupted the call"),
        turn.of("save"),
    ):
        raise AssertionError
