"""Run a command with the signals of this process, again if it fails."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence

from deltacheck.backends.launched.launch_options import say

# Signals for which the command decides what happens.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# A terminal sends these to the command, too.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# After these, the command is not started again.
_ENDING = (signal.SIGTERM, signal.SIGHUP, *_FROM_TERMINAL)
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
    taken = {n for n in (*_FORWARDED, *_FROM_TERMINAL) if signal.getsignal(n) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*taken, signal.SIGCHLD})
    try:
        yield set(map(int, before))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_attempts(
    command: Sequence[str],
    environment: Mapping[str, str],
    restarts: int,
    *,
    mask: _Mask,
    quiet_stdout: bool,
) -> tuple[int, int]:
    """Run a command until it succeeds, a signal has asked for its end, or no restart is left.

    Args:
        command: The program and its arguments.
        environment: The environment of the command.
        restarts: The most attempts after the first.
        mask: The signals that the command does not get, from ``signals_held``.
        quiet_stdout: Lead the command's stdout to stderr.

    Returns:
        The exit status of the last attempt as a shell shows it, and the number of attempts.
    """
    for number in range(1, restarts + 1):
        status, is_ended = _attempt(command, environment, mask, quiet_stdout)
        if status == 0 or is_ended:
            return status, number
        say(f"{_describe(status)}; restart {number} of {restarts}")
    return _attempt(command, environment, mask, quiet_stdout)[0], restarts + 1


def _attempt(
    command: Sequence[str], environment: Mapping[str, str], mask: _Mask, quiet_stdout: bool
) -> tuple[int, bool]:
    """Run the command once. Return its status, and whether a signal has asked for its end."""
    process = os.posix_spawnp(
        command[0],
        list(command),
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)] if quiet_stdout else [],
        setsigmask=mask,
        setsigdef=_RESTORED,
    )
    is_ended = False
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    while True:
        received = signal.sigwaitinfo(held)
        number = received.si_signo
        if number == signal.SIGCHLD:
            child, status = os.waitpid(process, os.WNOHANG)
            # It may also have stopped, or another child has ended.
            if child == process:
                return _shell_status(status), is_ended
            continue
        is_ended = is_ended or number in _ENDING
        # A second SIGINT would end the command at once.
        if number not in _FROM_TERMINAL or received.si_code != _SI_KERNEL:
            os.kill(process, number)


def _shell_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _describe(status: int) -> str:
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"the command was ended by {signal.Signals(status - 128).name}"
    return f"the command has ended with status {status}"
