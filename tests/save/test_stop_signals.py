"""Signals of schedulers are remembered until a step has ended, and then end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from deltacheck import StopSignals
from tests.support.paths import REPOSITORY


def test_the_first_signal_is_remembered_and_the_earlier_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with StopSignals() as signals:
        assert signals.number == 0
        signals.end()  # nothing has come
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert signals.number == signal.SIGUSR1
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_another_handler_that_was_installed_since_stays() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals(signal.SIGUSR1)

    def own(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGUSR1, own)
    signals.remove()
    assert signal.getsignal(signal.SIGUSR1) is own
    signal.signal(signal.SIGUSR1, before)


def test_a_thread_cannot_take_signals() -> None:
    errors: list[Exception] = []

    def take() -> None:
        try:
            StopSignals()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert len(errors) == 1


PROGRAM = """
import os, signal, sys
from deltacheck import StopSignals
{before}
signals = StopSignals()
{during}
os.kill(os.getpid(), signal.SIGUSR1)
assert signals.number == signal.SIGUSR1
signals.end()
"""
# A child that was forked, as by a loader, is ended by SIGTERM only.
FORK = """
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 2 * signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("before", "during", "status"),
    [
        ("", "", -signal.SIGUSR1),
        ("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))", "", 3),
        ("signal.signal(signal.SIGUSR1, lambda *_: None)", "", 128 + signal.SIGUSR1),
        ("", FORK, signal.SIGTERM),
    ],
)
def test_the_process_ends_as_without_it(before: str, during: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, during=during)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        timeout=240,
        check=False,
    )
    assert done.returncode == status
