"""Run Python programs in processes that are forked from one that has imported the frameworks.

A new interpreter takes seconds of processor time to import them. The server has one thread and no
started backend: neither TensorStore nor a JAX backend survives a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

_IMPORTED = ("torch", "deltacheck.backends.torch", "deltacheck.backends.orbax", "deltacheck.cli")


def run_program(
    program: str, folder: Path, environment: Mapping[str, str], limit_seconds: float
) -> CompletedProcess[str]:
    """Run a program as ``python -c`` does, and return its exit status and all that it prints.

    Args:
        program: The source.
        folder: Its working directory.
        environment: All environment variables.
        limit_seconds: Ends a hang.

    Raises:
        TimeoutError: The program has not ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    output = folder.with_name(f"{folder.name}.output")
    process = context.Process(
        target=_run, args=(program, str(folder), dict(environment), str(output))
    )
    process.start()
    process.join(limit_seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(output.read_text(errors="replace")[-3000:])
    return CompletedProcess(program, process.exitcode, output.read_text(errors="replace"))


def _run(program: str, folder: str, environment: Mapping[str, str], output: str) -> None:
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
        status = 1
    # The end of an interpreter, which a forked process would pass over.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
