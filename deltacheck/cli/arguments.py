"""Which root and which steps a command line means: a number, ``latest`` or ``@TAG`` is a step,
anything else is the root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import typer

from deltacheck.errors import DeltacheckError
from deltacheck.store.documents import read_manifest
from deltacheck.store.files import storage as place
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root

LATEST = "latest"
TAG = "@"
_STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Where:
    """A root and steps in it; ``None`` is the newest step, a text the tag of one."""

    root: str
    steps: tuple[int | str | None, ...]


def parse(words: list[str] | None, *, least: int = 0, most: int = 0) -> Where:
    """Split words into at most one root and ``least`` to ``most`` steps; ``typer.BadParameter``
    where they are not that.
    """
    words = words or []
    steps = [
        word for word in words if word == LATEST or word.startswith(TAG) or _STEP.fullmatch(word)
    ]
    roots = [word for word in words if word not in steps]
    if len(roots) > 1:
        raise typer.BadParameter(
            f"{roots[0]!r} and {roots[1]!r} cannot both be the root; a step is a number, {LATEST!r}"
            " or @TAG"
        )
    if not least <= len(steps) <= most:
        wanted = {
            (0, 0): "no step",
            (0, 1): "at most one step",
            (1, 1): "one step",
            (2, 2): "two steps",
        }[least, most]
        way_out = (
            f". A root that is called {steps[0]} is written ./{steps[0]}"
            if len(steps) > most
            else ""
        )
        raise typer.BadParameter(f"this command takes {wanted}, not {len(steps)}{way_out}")
    root = roots[0] if roots else "."
    try:
        place.of(root)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return Where(root, tuple(map(_step, steps)))


def _step(word: str) -> int | str | None:
    if word == LATEST:
        return None
    return word.removeprefix(TAG) if word.startswith(TAG) else int(word)


def manifests(where: Where, item: str | None = None) -> tuple[Root, list[Manifest]]:
    """The root and the manifest of each named step. Raises what ``open_root`` and ``Root.manifest``
    raise.
    """
    root = open_root(where.root, item)
    return root, [root.manifest(step) for step in where.steps]


def unreadable(root: Root) -> list[str]:
    """What is wrong with each manifest that cannot be read."""
    paths = root.manifest_paths()
    if len(paths) == len(root.checkpoints()):
        return []
    problems = []
    for path in paths:
        try:
            read_manifest(path)
        except FileNotFoundError:
            continue  # deleted by a running training since it was listed
        except DeltacheckError as error:
            problems.append(str(error))
    return problems
