"""A process that has imported everything, runs under the shim, and forks a child for each trial:
about
10 ms instead of seconds.

    with Zygote("torch") as zygote:
        fault = Fault(Mode.KILL, at=17)
        arguments = ("delta", str(root), str(acknowledgements))
        outcome = zygote.run("tests.faults.trials:act", *arguments, area=area, fault=fault)

A task is ``"module:function"``; its arguments and what it returns are JSON. The child is the only
process that touches TensorStore or a JAX backend, since neither survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.faults import shim
from tests.faults.shim import Fault
from tests.support.paths import REPOSITORY


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a child process.

    ``killed``: by the fault, or after ``kill_after``. ``hung``: it was ended at its deadline.

    ``value``: what the task returned. ``error``: the traceback of what it raised instead, or how
    else it died; empty where neither. ``count``, ``hits``: the shim's, where the child lived to
    tell. ``output``: the end of what it printed.
    """

    killed: bool
    hung: bool
    value: Any
    error: str
    count: int
    hits: int
    seconds: float
    output: str


class Zygote:
    """A zygote of its own process. ``backend``: ``"torch"`` or ``"orbax"``, whose frameworks it
    imports.
    """

    def __init__(self, backend: str) -> None:
        paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.zygote", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=shim.environment(PYTHONPATH=paths),
        )
        assert self._reply() == "ready", "the zygote did not start"

    def run(
        self,
        task: str,
        *arguments: object,
        area: str | os.PathLike[str] = "",
        fault: Fault | None = None,
        trace: str | os.PathLike[str] | None = None,
        kill_after: float | None = None,
        deadline: float = 60.0,
    ) -> Outcome:
        """Run a task in a child of its own. ``area``: the directory that the shim watches, where
        there
        is a ``fault``.

        ``trace``: where calls are recorded, from the start where there is a ``fault``, else once
        the task arms the shim itself. ``kill_after``: seconds until it is killed; ``deadline``:
        until it counts as hung.
        """
        armed = None if fault is None and trace is None else (fault or Fault()).as_json()
        job = {
            "task": task,
            "arguments": arguments,
            "area": os.fspath(area),
            "fault": armed,
            "trace": None if trace is None else os.fspath(trace),
            "kill_after": kill_after,
            "deadline": deadline,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Outcome(**self._reply())

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the zygote has died with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the zygote. More than once does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(240)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# --- the zygote's side ----------------------------------------------------------------------------


def main(backend: str) -> None:
    from tests.faults import scenarios

    # What children print goes elsewhere: the pipe is for replies alone.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    scenarios.import_frameworks(backend)
    importlib.import_module("tests.faults.trials")
    gc.collect()
    gc.freeze()
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=replies, flush=True)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    result, give = os.pipe()
    printed = os.memfd_create("printed")
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(result)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        _child(job, give)
    os.close(give)
    waiting = os.pidfd_open(child)
    wanted_kill = job["kill_after"]
    limit = job["deadline"] if wanted_kill is None else wanted_kill
    ended = _wait(waiting, limit)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _wait(waiting, 60)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seconds = time.perf_counter() - begin
    os.close(waiting)
    with os.fdopen(result, "rb") as file:
        told = file.read()
    output = os.pread(printed, 8000, max(0, os.fstat(printed).st_size - 8000)).decode(
        errors="replace"
    )
    os.close(printed)
    killed = status == -signal.SIGKILL
    found = {"value": None, "error": "", "count": -1, "hits": -1}
    if told:
        found = json.loads(told)
    elif not killed:
        found["error"] = f"the child died with status {status}"
    hung = not ended and wanted_kill is None
    return {
        "killed": killed and not hung,
        "hung": hung,
        "seconds": seconds,
        "output": output,
        **found,
    }


def _wait(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0, seconds) * 1000))


def _child(job: dict[str, Any], give: int) -> None:
    """Carry out a job and end, without the interpreter's own clean-up."""
    value, error = None, ""
    try:
        if job["trace"] is not None:
            shim.trace(job["trace"])
        if job["fault"] is not None:
            shim.arm(job["area"], Fault.of_json(job["fault"]))
        module, _, function = job["task"].partition(":")
        value = getattr(importlib.import_module(module), function)(*job["arguments"])
    except BaseException:  # noqa: BLE001 - told to the parent
        error = traceback.format_exc()
    told = {"value": value, "error": error, "count": shim.count(), "hits": shim.hits()}
    shim.disarm()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(give, json.dumps(told).encode()[:60_000])
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
