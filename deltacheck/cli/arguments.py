"""Arguments and options that several commands share, and the rule that tells steps from roots.

A word that is a number, ``latest`` or ``@TAG`` names a step. Any other word is the root.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from deltacheck.store.layout import LATEST

if TYPE_CHECKING:
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.roots.root import Root

TAG = "@"  # part of the command line's interface, see docs/reference/cli.md
# Numbers of up to 18 digits fit a signed integer of 64 bits. A longer run of digits is the name of
# a root.
_STEP = re.compile(r"[0-9]{1,18}")

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON: results on stdout, errors on stderr.")
]
Run: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A root, a folder of torch.save files, or the folder of an Orbax CheckpointManager.",
    ),
]
Item: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--item",
        metavar="NAME",
        help="The item of a CheckpointManager's steps, if they have several.",
    ),
]
Leaves: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--leaves",
        metavar="PATTERN",
        help=(
            "Only these leaves: a path, a subtree or a pattern (* also matches /). May be repeated."
        ),
    ),
]
Strip: TypeAlias = Annotated[
    str,
    typer.Option("--strip", metavar="PREFIX", help="Remove PREFIX from names that begin with it."),
]


def _limit(context: typer.Context, value: int | None) -> int | None:
    """Apply the limit to the whole command: the options are parsed before it runs."""
    if value is not None:
        from deltacheck.leaf import limits

        context.with_resource(limits.applied(limits.Limits(max_bytes=value)))
    return value


MaxBytes: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        min=0,
        metavar="N",
        callback=_limit,
        help=(
            "Refuse to read or write more decoded bytes than this. Default: 256 MiB, or 16,384"
            " times what the files of the steps hold; no genuine root reaches it."
        ),
    ),
]

_ROOT_HELP = (
    "The root: a directory (default: the current one), s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or"
    " az://CONTAINER/PREFIX."
)
_STEP_HELP = "A step is a number, 'latest' or @TAG; anything else is the root."
# The root and the steps are one variadic argument, because Click cannot tell an optional first
# argument from the second one. ``parse`` sorts the words by their form instead.
RootOnly: TypeAlias = Annotated[list[str] | None, typer.Argument(metavar="[ROOT]", help=_ROOT_HELP)]
RootStep: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ROOT] STEP", help=f"{_ROOT_HELP} {_STEP_HELP}")
]
RootNewestStep: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ROOT] [STEP]", help=f"{_ROOT_HELP} {_STEP_HELP} Without a step: the newest."
    ),
]
RootMaybeStep: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ROOT] [STEP]", help=f"{_ROOT_HELP} {_STEP_HELP} Without a step: all steps."
    ),
]
RootTwoSteps: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ROOT] STEP [ROOT] STEP",
        help=f"{_ROOT_HELP} {_STEP_HELP} With two roots, each stands before its step.",
    ),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """A root and some of its steps.

    Attributes:
        root: Path or URL of the root.
        steps: A number is a training step, a text a tag, and ``None`` the newest step.
    """

    root: str
    steps: tuple[int | str | None, ...]


def parse(words: list[str] | None, *, min_steps: int = 0, max_steps: int = 0) -> Selection:
    """Split words into at most one root and some steps.

    Args:
        words: The words of the command line, in any order.
        min_steps: Smallest allowed number of steps.
        max_steps: Largest allowed number of steps.

    Returns:
        The root (default: the current directory) and the steps in the order given.

    Raises:
        typer.BadParameter: If there are two roots, or too few or too many steps.
    """
    words = words or []
    # The form of a word decides, and never the file system: a directory that somebody creates must
    # not change the meaning of a command.
    steps = list(filter(is_step, words))
    roots = [word for word in words if word not in steps]
    # One of them may be a mistyped step, so the message repeats the forms of a step.
    if len(roots) > 1:
        raise typer.BadParameter(
            f"{roots[0]!r} and {roots[1]!r} cannot both be the root; a step is a number, {LATEST!r}"
            " or @TAG"
        )
    if not min_steps <= len(steps) <= max_steps:
        expected = {
            (0, 0): "no step",
            (0, 1): "at most one step",
            (1, 1): "one step",
            (2, 2): "two steps",
        }[min_steps, max_steps]
        # A root whose name is a number was probably meant, so the message shows how to write it.
        remedy = (
            f". Write a root that is called {steps[0]} as ./{steps[0]}"
            if len(steps) > max_steps
            else ""
        )
        raise typer.BadParameter(f"this command takes {expected}, not {len(steps)}{remedy}")
    root = roots[0] if roots else "."
    checked_root(root)
    return Selection(root, tuple(map(parse_step, steps)))


def checked_root(root: str | None) -> str | None:
    """Return a root as it was given; a callback of options.

    The address is checked before any command runs: an unknown scheme is wrong usage, and not a root
    that does not exist.

    Raises:
        typer.BadParameter: It cannot be the path or the address of a root.
    """
    from deltacheck.store.files import storage

    with as_misuse():
        storage.of("." if root is None else root)
    return root


def is_step(word: str) -> bool:
    """Return whether a word names a step."""
    return word == LATEST or word.startswith(TAG) or _STEP.fullmatch(word) is not None


def parse_step(word: str) -> int | str | None:
    """Return a word that names a step as a number, a tag, or ``None`` for the newest step."""
    # ``None`` is the newest step everywhere below the command line.
    if word == LATEST:
        return None
    return word.removeprefix(TAG) if word.startswith(TAG) else int(word)


@contextmanager
def as_misuse() -> Iterator[None]:
    """Report a ``ValueError`` as wrong usage.

    Refusals of deltacheck are subclasses with exit codes of their own, and stay what they are.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise typer.BadParameter(str(error)) from error


@contextmanager
def needing(package: str, purpose: str) -> Iterator[None]:
    """Name the packages to install if an import fails.

    Args:
        package: The arguments of ``pip install``.
        purpose: What needs them.
    """
    try:
        yield
    except ImportError as error:
        message = f"{purpose} needs packages that cannot be imported ({error}): pip install"
        raise type(error)(f"{message} {package}") from error


def require_new(out: Path) -> None:
    """Raise ``FileExistsError`` if the file of ``--out`` exists."""
    if out.exists():
        raise FileExistsError(
            errno.EEXIST, "the file exists; remove it, or name another with --out", str(out)
        )


@contextmanager
def working_folder(keep: Path | None, prefix: str) -> Iterator[Path]:
    """Yield the folder that ``--keep`` names, or a temporary one, which is removed at the end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=prefix) as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    # Files of an earlier call would mix with those of this one.
    if any(keep.iterdir()):
        raise typer.BadParameter(f"{keep} is not empty; --keep takes a new or empty folder")
    yield keep.resolve()


def open_root(words: list[str] | None, item: str | None = None) -> Root:
    """Open the root that the words of a command without steps name."""
    from deltacheck.store.roots import opening

    return opening.open_root(parse(words).root, item)


def open_step(words: list[str] | None, item: str | None = None) -> tuple[Root, Manifest]:
    """Open the root that words name, and read the manifest of a step of it, or of the newest."""
    from deltacheck.store.roots import opening

    selection = parse(words, max_steps=1)
    opened_root = opening.open_root(selection.root, item)
    return opened_root, opened_root.manifest(*selection.steps)


def open_two_steps(words: list[str] | None, item: str | None = None) -> list[tuple[Root, Manifest]]:
    """Open the one or two roots that words name, and read the manifests of two steps of them."""
    from deltacheck.store.roots import opening

    words = words or []
    pairs = [words[:2], words[2:]]
    if len(words) == 4 and not any(is_step(pair[0]) for pair in pairs):
        return [open_step(pair, item) for pair in pairs]
    selection = parse(words, min_steps=2, max_steps=2)
    # Both steps are read through one ``Root``, which keeps the manifests that it has read.
    opened_root = opening.open_root(selection.root, item)
    return [(opened_root, opened_root.manifest(step)) for step in selection.steps]
