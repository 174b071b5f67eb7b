"""Run the process of ``isolated.ingest`` without its imports, which take two seconds each time.

It is forked from a server that has imported the libraries, and has one thread and no started
backend. Its own code runs as it is, with its limits. The real process is tested in
``tests/restore/test_limits.py`` and ``tests/cli/test_cli.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

_IMPORTED = (
    "deltacheck.backends.isolated_child",
    "deltacheck.backends.torch.files.torch_import",
    "deltacheck.backends.orbax.files.orbax_import",
)


class ForkedChild:
    """The part of ``subprocess.Popen`` that ``isolated.ingest`` uses."""

    def __init__(self, command: list[str], **_: object) -> None:
        assert command[1:] == ["-m", "deltacheck.backends.isolated_child"]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_IMPORTED))
        request, stdin = context.Pipe(duplex=False)
        stdout, replies = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(request, replies, dict(os.environ)))
        self._process.start()
        self.stdin = os.fdopen(os.dup(stdin.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(stdout.fileno()), "rb")
        for connection in (request, stdin, stdout, replies):
            connection.close()

    def kill(self) -> None:
        """Kill the process. Nothing happens if it has ended."""
        self._process.kill()

    def wait(self) -> int | None:
        """Wait for the end, and return the exit status, negative for a signal."""
        self._process.join()
        return self._process.exitcode


def _run(request: Any, replies: Any, variables: dict[str, str]) -> None:
    # Those of the test, not those that the server was started with.
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(request.fileno(), 0)
    os.dup2(replies.fileno(), 1)
    request.close()
    replies.close()
    sys.stdin = open(0)  # noqa: SIM115 - as long as the process
    from deltacheck.backends.isolated_child import _main

    _main()
