"""Parts that are played in processes of their own, which may be killed: starting them, hearing what
they tell, killing them.
"""

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


@contextmanager
def child(
    module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``python -m module words`` in ``folder``, its stderr appended to ``log.txt`` there; it never
    outlives the block.
    """
    process = started(module, words, folder, environment)
    with process:  # waits for it at the end
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def started(
    module: str,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    at: Path | None = None,
) -> subprocess.Popen[str]:
    """The same, but that the caller must see to its end. It can be written to. ``at``: where it
    works, by default in ``folder``.
    """
    found_at = str(
        Path(__file__).parents[2]
    )  # so that the child imports the deltacheck that runs here
    surroundings = {
        # Threads that wait spinning take the cores from each other when the machine is busy
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [found_at, os.environ.get("PYTHONPATH")])),
    }
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=at or folder,
            env=surroundings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


class Cast:
    """Children of one module, each for one part. The next one is started when one gets its part, so
    that its imports take no time of the story.

    A child waits for its part as one line on its standard input, and must have imported by then
    what it needs. It works where we do. ``parts``: how many will be played; more can be.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        parts: int,
    ) -> None:
        self._about = (module, words, folder, environment, Path.cwd())
        self._left = parts
        self._next: subprocess.Popen[str] | None = None

    @contextmanager
    def play(self, part: str) -> Iterator[subprocess.Popen[str]]:
        """Give a part to a fresh process; it never outlives the block."""
        process, self._next = self._next or started(*self._about), None
        self._left -= 1
        with process:
            try:
                if self._left > 0:
                    self._next = started(*self._about)
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has died of its imports; its exit code says so
                    process.stdin.write(part + "\n")
                    process.stdin.close()
                yield process
            except BaseException:
                process.kill()
                raise

    def close(self) -> None:
        """End the one that waits."""
        if self._next is not None:
            with self._next as process:
                process.kill()


def events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """What it tells, one JSON object a line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # the last line of a killed process may be cut
            yield json.loads(line)


def end_of_log(folder: Path) -> str:
    """The last lines that the children of a folder have left on stderr."""
    return "\n".join((folder / "log.txt").read_text().splitlines()[-12:])


_parent: TextIO | None = None


def speak_alone() -> None:
    """In a child, before it runs foreign code: from here on only ``tell`` reaches the parent, and
    what others print goes to stderr.
    """
    global _parent
    sys.stdout.flush()
    _parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def tell(event: str, **facts: Any) -> None:
    """In a child: say something to the parent."""
    print(json.dumps({"event": event, **facts}), flush=True, file=_parent or sys.stdout)
