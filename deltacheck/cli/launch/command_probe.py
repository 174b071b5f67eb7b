"""Find out, before a command is started, whether its Python can be reached."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PACKAGES = ("transformers", "lightning", "pytorch_lightning", "accelerate")
# Where a training is seen. Other trainers are seen only if they call one of these.
CALLS = "transformers.Trainer.train, Lightning's Trainer.fit, Accelerator.save_state"

# Only for as long as an interpreter takes to start on a slow network file system.
_SECONDS = 120
_PYTHON = re.compile(r"python[0-9.]*t?\Z")
_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}  # options of Python with a value of their own
_PROGRAM = f"""
import importlib.util, json, sys
def has(name):
    try: return importlib.util.find_spec(name) is not None
    except Exception: return False
flags = [o for o, f in (("-I", sys.flags.isolated), ("-E", sys.flags.ignore_environment),
    ("-S", sys.flags.no_site)) if f]
hooked = any(type(f).__name__ == "_Watch" for f in sys.meta_path)
names = [n for n in {PACKAGES!r} if has(n)]
print(json.dumps([sys.executable, hooked, flags, has("deltacheck"), names]))
"""


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """Facts about the Python of a command.

    Attributes:
        executable: Its path.
        is_hooked: It loads the hook.
        flags: The options by which it ignores the environment.
        has_deltacheck: It can import deltacheck.
        packages: Those of ``PACKAGES`` that it has.
    """

    executable: str
    is_hooked: bool
    flags: tuple[str, ...]
    has_deltacheck: bool
    packages: tuple[str, ...]


def probe(command: Sequence[str], environment: Mapping[str, str]) -> PythonFacts | None:
    """Return the facts of the Python that a command starts; ``None``: it is no Python or unknown.

    Args:
        command: The program and its arguments.
        environment: The environment of the command.
    """
    path = shutil.which(command[0], path=environment.get("PATH"))
    interpreter = None if path is None else _interpreter(path, command[1:])
    if interpreter is None:
        return None
    try:
        process = subprocess.run(
            [*interpreter, "-c", _PROGRAM],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        executable, is_hooked, flags, has_deltacheck, packages = json.loads(
            process.stdout.splitlines()[-1]
        )
    # Whatever is wrong with it, the command itself shows it.
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    return PythonFacts(executable, is_hooked, tuple(flags), has_deltacheck, tuple(packages))


def _interpreter(path: str, arguments: Sequence[str]) -> list[str] | None:
    """Return the interpreter of a program with its options, if it is Python."""
    if _PYTHON.match(os.path.basename(path)):
        return [path, *_options(arguments)]
    with open(path, "rb") as file:
        first, second = file.readline(1024), file.readline(1024)
    if not first.startswith(b"#!"):
        return None
    words = shlex.split(first[2:].decode(errors="replace"))
    # Installers write this in the place of a path that is too long or has spaces.
    if words and os.path.basename(words[0]) == "sh" and second.startswith(b"'''exec' "):
        words = shlex.split(second.decode(errors="replace").removeprefix("'''exec' "))[:1]
    if words and os.path.basename(words[0]) == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    if not words or not _PYTHON.match(os.path.basename(words[0])):
        return None
    return [words[0], *_options(words[1:])]


def _options(arguments: Sequence[str]) -> list[str]:
    """Return the options of Python itself, before the program."""
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word in ("-", "--") or word[:2] in ("-c", "-m"):
            break
        options.append(word)
        if word in _WITH_VALUE:
            options += [next(words, "")]
    return options
