"""Worker processes that may be killed: starting them, and reading the events that they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeAlias

Event: TypeAlias = dict[str, Any]
LOG = "log.txt"


class WorkerPool:
    """Processes of one module, each for one task.

    The next process is started when a task is given to the one before, so that its imports take no
    time of a task. A worker imports what it needs and then waits for its task, one line on its
    standard input. It works in the current folder; its stderr is appended to ``log.txt``.

    Args:
        module: The module that ``python -m`` runs.
        arguments: Its command-line arguments.
        folder: The folder of the log.
        environment: Variables beside those of this process.
        tasks: The number of expected tasks. Later ones wait for the start of their process.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        tasks: int,
    ) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._folder, self._environment = folder, environment
        # Without this number, a last process would be started and import a framework for nothing.
        self._tasks_left = tasks
        self._waiting: subprocess.Popen[str] | None = None

    @contextmanager
    def worker(self, task: str) -> Iterator[subprocess.Popen[str]]:
        """Give a task to a fresh process, which never outlives the block."""
        process, self._waiting = self._waiting or self._start(), None
        self._tasks_left -= 1
        with process:  # waits for it at the end
            try:
                if self._tasks_left > 0:
                    self._waiting = self._start()
                assert process.stdin is not None
                # A process that died of its imports has closed the pipe; its exit code says so.
                with suppress(BrokenPipeError):
                    process.stdin.write(task + "\n")
                    process.stdin.close()
                yield process
            except BaseException:
                process.kill()
                raise

    def close(self) -> None:
        """End the process that waits for a task."""
        if self._waiting is not None:
            with self._waiting as process:
                # It has only imported modules, so there is nothing to finish.
                process.kill()

    def _start(self) -> subprocess.Popen[str]:
        package_parent = str(Path(__file__).parents[2])
        environment = {
            # Threads that wait by spinning take the cores from each other on a busy machine.
            "OMP_WAIT_POLICY": "passive",
            **os.environ,
            **self._environment,
            # So that the worker imports the same deltacheck as this process.
            "PYTHONPATH": os.pathsep.join(
                filter(None, [package_parent, os.environ.get("PYTHONPATH")])
            ),
        }
        with (self._folder / LOG).open("a") as log:
            return subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


def events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """Yield the events that a worker reports, one JSON object per line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # the last line of a killed process may be incomplete
            yield json.loads(line)


def end_of_log(folder: Path) -> str:
    """Return the last lines that the workers of a folder have left on stderr."""
    return "\n".join((folder / LOG).read_text().splitlines()[-12:])


_event_stream: TextIO | None = None


def reserve_stdout() -> None:
    """Reserve standard output for ``report``; everything else that is printed goes to stderr.

    A worker calls this before it runs a user's code.
    """
    global _event_stream
    sys.stdout.flush()
    # The descriptors are exchanged and not only ``sys.stdout``, because native libraries print too.
    _event_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def report(event: str, **fields: Any) -> None:
    """Report an event from a worker to its parent."""
    print(json.dumps({"event": event, **fields}), flush=True, file=_event_stream or sys.stdout)
