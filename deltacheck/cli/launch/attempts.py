"""Run a command with the signals of this process, again if it fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from deltacheck.backends.launched.launch_options import STOP_SIGNALS, say

# Signals for which the command decides what happens.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# A terminal sends these to the command, too.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# After these, the command is not started again.
_ENDING = (signal.SIGTERM, signal.SIGHUP, *_FROM_TERMINAL)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl
_SI_KERNEL = 0x80  # si_code of a signal that no process has sent, but a terminal
# What Python ignores, and a program that it starts must not.
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)

_Mask = set[int]


@contextlib.contextmanager
def signals_held() -> Iterator[_Mask]:
    """Hold signals back for the command, from before the first thread of this process.

    Yields:
        The signals that were held back before.
    """
    # Without it, the kernel would forget how the command has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Those that were ignored (nohup) are ignored by the command, too.
    signals = {n for n in (*_FORWARDED, *_FROM_TERMINAL) if signal.getsignal(n) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*signals, signal.SIGCHLD})
    try:
        yield set(map(int, before))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def go_on_in_a_child() -> int | None:
    """Fork, before the first thread, into a child that gets SIGTERM once this process is gone.

    So a SIGKILL of the process that its caller knows ends the command like a SIGTERM.

    Returns:
        ``None`` in the child; in this process the exit status of the child, which has ended.
    """
    parent = os.getpid()
    with signals_held():
        if child := os.fork():
            return _await(child, tuple)[0]
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have gone before.
    return None if os.getppid() == parent else 128 + signal.SIGTERM


def run_attempts(
    command: Sequence[str],
    environment: Mapping[str, str],
    restarts: int,
    *,
    mask: _Mask,
    trainings: Callable[[], Collection[int]],
    quiet_stdout: bool,
) -> tuple[int, int]:
    """Run a command until it succeeds, a signal has asked for its end, or no restart is left.

    Args:
        command: The program and its arguments.
        environment: The environment of the command.
        restarts: The most attempts after the first.
        mask: The signals that the command does not get, from ``signals_held``.
        trainings: Returns the processes that save on ``STOP_SIGNALS``, which go to them directly:
            starters between them and the command may not pass them on. They are waited for.
        quiet_stdout: Lead the command's stdout to stderr.

    Returns:
        The exit status of the last attempt as a shell shows it, and the number of attempts. If a
        training was asked to save and end, a failure shows that signal, whatever starters made of
        it.
    """
    # To become the parent of processes whose own has ended, and to wait for them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in range(1, restarts + 2):
        process = os.posix_spawnp(
            command[0],
            list(command),
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)] if quiet_stdout else [],
            setsigmask=mask,
            setsigdef=_RESTORED,
        )
        status, is_ended = _await(process, trainings)
        if status == 0 or is_ended or number > restarts:
            break
        say(f"{_describe(status)}; restart {number} of {restarts}")
    return status, number


def _prctl(option: int, value: int) -> None:
    # Where this fails, trainings behind a starter that ends at once are not waited for, and
    # SIGKILL leaves the command running.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _await(process: int, trainings: Callable[[], Collection[int]]) -> tuple[int, bool]:
    """Pass signals on until a process has ended. They must be held.

    Returns:
        Its status, and whether a signal has asked for the end.
    """
    status, is_ended, stopped_by = None, False, 0
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    while status is None or (is_ended and any(map(_is_running, trainings()))):
        received = signal.sigwaitinfo(blocked)
        number = received.si_signo
        if number == signal.SIGCHLD:
            statuses = dict(_ended_children())
            status = _shell_status(statuses[process]) if process in statuses else status
            continue
        savers = set(filter(_is_running, trainings())) if number in STOP_SIGNALS else set()
        stopped_by = stopped_by or (number if savers else 0)
        is_ended = is_ended or bool(savers) or number in _ENDING
        # Most starters die of SIGUSR1, and leave the ranks without their store.
        command_itself = set() if status is not None else {process}
        targets = savers if savers and number == signal.SIGUSR1 else command_itself | savers
        # A second SIGINT would end the command at once.
        if number in _FROM_TERMINAL and received.si_code == _SI_KERNEL:
            continue
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)
    return 128 + stopped_by if status and stopped_by else status, is_ended


def _ended_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            yield status


def _is_running(process: int) -> bool:
    """Return whether a process runs and descends from this one: numbers are used again."""
    launcher, is_first = os.getpid(), True
    while process > 1 and process != launcher:
        try:
            # The name before it may have any character.
            state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            return False
        if is_first and state in "ZX":
            return False
        process, is_first = int(parent), False
    return process == launcher


def _shell_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _describe(status: int) -> str:
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"the command was ended by {signal.Signals(status - 128).name}"
    return f"the command has ended with status {status}"
