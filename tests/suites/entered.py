"""Count the functions and files of ``deltacheck`` that one save, or one restore, enters.

Usage: ``python -m tests.suites.entered [save|restore] [--list]``

Without ``--list`` this prints the two numbers, with it one ``file:line: name`` per line. Every
function, method and property counts once, lambdas too, and comprehensions do not. The state is a
small model with AdamW. The save is the third one of an engine, of which every leaf has changed, and
it is waited for. The restore fills the state.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import deltacheck
from deltacheck.backends.torch import Engine

_PACKAGE = str(Path(deltacheck.__file__).parent)
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")


class Entered:
    """The functions of the package that are entered while it is active, on any thread.

    Threads that were started before are not seen, so it is made before the engine.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __enter__(self) -> Entered:
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def take(self) -> list[tuple[str, int, str]]:
        """Return file, line and name of the functions entered since the last call, ascending."""
        # The old set may still change: the threads of a save end after whoever waits for it.
        codes, self.codes = self.codes, set()
        return sorted(
            (code.co_filename.removeprefix(f"{_PACKAGE}/"), code.co_firstlineno, code.co_qualname)
            for code in list(codes)
            if code.co_filename.startswith(_PACKAGE) and code.co_name not in _COMPREHENSIONS
        )


def measure(call: str, root: Path) -> list[tuple[str, int, str]]:
    """Return the functions that a call enters.

    Args:
        call: ``"save"`` or ``"restore"``.
        root: An empty directory.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with Entered() as entered, Engine(root) as engine:
        for step in range(3):
            model(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            entered.take()
            engine.save(step, state).wait()
            places = entered.take()
        if call == "restore":
            engine.restore(into=state)
            places = entered.take()
    return places


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("call", nargs="?", choices=("save", "restore"), default="save")
    parser.add_argument("--list", action="store_true", help="print the functions")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        places = measure(options.call, Path(folder) / "root")
    if options.list:
        for file, line, name in places:
            print(f"{file}:{line}: {name}")
    else:
        files = len({file for file, _, _ in places})
        print(f"one {options.call} enters {len(places)} functions in {files} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
