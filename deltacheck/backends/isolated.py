"""Import files of other programs in a process of its own, which has limits and may die.

The readers of these formats are not ours. A file of a kilobyte can make them allocate gigabytes,
run for hours or abort the process. So they run in a child process (``isolated_child.py``) with
limits of memory and processor time. The child commits each step as the import in one process would;
an import that fails leaves the steps before it and nothing else.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltacheck import errors
from deltacheck.leaf import limits

# Beside the memory that the libraries take when they are loaded: threads, caches and a small file.
_BASE_BYTES = 448 << 20
# A file is held about four times: read, decoded, as the shadow and encoded.
_COPIES = 4
# The default for decoded bytes. Files of tensors are hardly compressed, and folders of Orbax less
# than this unless they hold little but zeros.
_DECODED_PER_FILE_BYTE = 8
_BASE_CPU_SECONDS = 5.0
_BYTES_PER_CPU_SECOND = 4 << 20  # far slower than any import
# The built-in errors that an import raises on purpose.
BUILTIN = ("FileNotFoundError", "ModuleNotFoundError", "OSError", "ValueError")


def ingest(
    kind: str,
    root: str | os.PathLike[str],
    sources: Sequence[tuple[int, Path]],
    item: str | None = None,
) -> Iterator[tuple[Path, int]]:
    """Save each source as its step, in order, and yield it when it is committed.

    Args:
        kind: ``"torch"``: files of safetensors or ``torch.save``, or model folders of Hugging
            Face; ``"base"``: such a folder, with the tied names of its model; ``"orbax"``:
            folders of checkpoints of plain Orbax, or of safetensors.
        root: The root to import into.
        sources: Steps and paths.
        item: The item of a folder's steps.

    Yields:
        The path and the step.

    Raises:
        BudgetExceeded: A source takes more memory or time than its size explains, or than the
            limits of the present call (``Limits``) allow.
        Damaged: A source cannot be read, or ended the process that read it.
        DeltacheckError, FileNotFoundError, ValueError: As the import itself raises them.
    """
    decoded_bytes = _decoded_bytes([path for _, path in sources])
    request = {
        "kind": kind,
        "root": os.fspath(root),
        "sources": [(step, os.fspath(path)) for step, path in sources],
        "item": item,
        "memory_bytes": _BASE_BYTES + _COPIES * decoded_bytes,
        "cpu_seconds": _BASE_CPU_SECONDS + decoded_bytes / _BYTES_PER_CPU_SECOND,
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "deltacheck.backends.isolated_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
        imported: list[str] = []
        for line in child.stdout:
            message = json.loads(line)
            if "error" in message:
                raise _error_of(message)
            imported.append(message["path"])
            yield Path(message["path"]), message["step"]
        status = child.wait()
        if status:
            path = next((str(p) for _, p in sources if str(p) not in imported), str(root))
            raise _died(path, status)
    finally:
        # Also if the caller ends the iteration: nobody waits for the rest.
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _decoded_bytes(paths: Sequence[Path]) -> int:
    """Return the decoded bytes that the sources may have."""
    allowed = limits.current().max_bytes
    if allowed is not None:
        return allowed
    return _DECODED_PER_FILE_BYTE * sum(map(bytes_of, paths))


def bytes_of(path: Path) -> int:
    """Return the bytes of a source: of a file, or of all files of a folder."""
    if path.is_dir():
        files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        size = sum(file.lstat().st_size for file in files)
        # Models that were downloaded are links to a cache.
        links = [entry for entry in path.iterdir() if entry.is_symlink()]
        return size + sum(link.stat().st_size for link in links if link.is_file())
    return path.stat().st_size if path.exists() else 0


def _error_of(message: dict[str, str]) -> Exception:
    """Return the error that the child has reported."""
    kind = getattr(errors, message["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.DeltacheckError)):
        kind = (
            getattr(builtins, message["error"]) if message["error"] in BUILTIN else errors.Damaged
        )
    return kind(message["message"])


def _died(path: str, status: int) -> errors.DeltacheckError:
    remedy = "raise max_bytes (--max-bytes) if you trust the file"
    if status == -signal.SIGXCPU:
        return errors.BudgetExceeded(
            f"{path} takes more processor time than its size explains; {remedy}"
        )
    name = signal.Signals(-status).name if status < 0 else f"status {status}"
    return errors.Damaged(f"{path} ended the process that read it ({name})", file=path)
