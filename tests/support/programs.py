"""Run Python programs as ``python -W error -c`` does, but with one import of a framework for all.

A server imports the framework's own package and nothing else, and forks for each program. So a
program that forgets an import fails as it does in a new interpreter. The server has one thread.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess


class Programs:
    """A server of programs that import the same framework."""

    def __init__(self, framework: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, framework],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        """Return whether the server was ended, with a program that hung."""
        return self._process.poll() is not None

    def run(
        self, program: str, folder: Path, environment: Mapping[str, str], limit_seconds: float
    ) -> CompletedProcess[str]:
        """Run a program, and return its exit status and all that it prints.

        Args:
            program: The source.
            folder: Its working directory.
            environment: All environment variables.
            limit_seconds: Ends a hang.
        """
        output = folder.with_name(f"{folder.name}.output")
        output.touch()
        job = {
            "program": program,
            "folder": str(folder),
            "environment": dict(environment),
            "output": str(output),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ended, _, _ = select.select([self._process.stdout], [], [], limit_seconds)
        if not ended:  # the server, the program and all that it has started
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.stdout.readline()
        text = output.read_text(errors="replace")
        assert status, f"the server has ended, or no end within {limit_seconds} s: {text[-3000:]}"
        return CompletedProcess(program, json.loads(status), text)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(240)
        self._process.stdout.close()


def _serve(framework: str) -> None:
    # The folder of this file, which a program must not import from.
    sys.path[0] = ""
    importlib.import_module(framework)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            job = json.loads(line)
            descriptor = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.clear()
            os.environ.update(job["environment"])
            os.chdir(job["folder"])
            sys.argv = ["-c"]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            # Returns to the interpreter, so that the process ends as that of a program.
            exec(compile(job["program"], "<program>", "exec"), main.__dict__)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
