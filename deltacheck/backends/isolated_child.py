"""The process that imports files for ``isolated.ingest``.

It gets a request on its standard input and reports each step on its standard output.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltacheck import errors
from deltacheck.backends.isolated import BUILTIN


def _main() -> None:
    # Libraries may print; only our own messages go to the parent.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    try:
        for path, step in _import(request):
            print(json.dumps({"path": str(path), "step": step}), file=out)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        print(json.dumps(_report(error, request)), file=out)
    out.flush()
    # Not by the interpreter's own way: a library that is short of memory may fail or hang there.
    os._exit(0)


def _import(request: dict[str, Any]) -> Iterator[tuple[Path, int]]:
    sources = [(step, Path(path)) for step, path in request["sources"]]
    if request["kind"] in ("torch", "base"):
        from deltacheck.backends.torch.files import torch_import

        _limit(request["memory_bytes"], request["cpu_seconds"])
        return torch_import.ingest(request["root"], sources, tie=request["kind"] == "base")
    from deltacheck.backends.orbax.files import orbax_import

    _limit(request["memory_bytes"], request["cpu_seconds"])
    return orbax_import.ingest(request["root"], sources, request["item"])


def _limit(memory_bytes: int, cpu_seconds: float) -> None:
    """Limit what this process takes from now on; the libraries are loaded."""
    present = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData:")
    )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for kind, value in (
        (resource.RLIMIT_DATA, present + memory_bytes),
        (resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + cpu_seconds) + 1),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard < 0 else min(value, hard), hard))


def _report(error: BaseException, request: dict[str, Any]) -> dict[str, str]:
    """Return the error as the parent raises it."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, MemoryError) or "allocate memory" in text or "bad_alloc" in text:
            paths = ", ".join(path for _, path in request["sources"])
            return {
                "error": "BudgetExceeded",
                "message": (
                    f"{paths}: the import takes more memory than the size of the files explains"
                    f" ({text.partition(chr(10))[0]}); raise max_bytes (--max-bytes) if you trust"
                    " them"
                ),
            }
        cause = cause.__cause__ or cause.__context__
    name = next(
        kind.__name__
        for kind in type(error).__mro__
        if kind.__module__ == errors.__name__ or kind.__name__ in BUILTIN or kind is Exception
    )
    return {"error": name, "message": str(error)}


if __name__ == "__main__":
    _main()
