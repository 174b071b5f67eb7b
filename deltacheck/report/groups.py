"""Many leaves as few named groups: pure functions over leaf paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TOKEN = re.compile(r"[/.]?[^/.]*")


def groups(sizes: Mapping[str, int], most: int) -> dict[str, tuple[str, ...]]:
    """Leaf paths in at most ``most`` groups: name -> paths, in natural order (``layer.2`` before
    ``layer.10``).

    ``sizes``: path -> bytes. Begins with all leaves as one group and always splits the largest ones
    by the next component of their paths; a component ends at ``/`` or ``.``. Numbers that are too
    many for a group each become runs. Where numbered entries hold leaves and nothing else, as in
    ``optimizer/state/17/exp_avg``, leaves of one name belong together before leaves of one number
    do.
    """
    if not sizes:
        return {}
    keys = _keys(list(sizes))
    total = sum(sizes.values())

    def bytes_of(siblings: Sequence[Sequence[str]]) -> int:
        return sum(sizes[path] for paths in siblings for path in paths)

    whole: list[list[str]] = []
    numbered: list[
        list[list[str]]
    ] = []  # groups that have more numbers in them than there is room for
    todo = [
        [sorted(sizes, key=natural)]
    ]  # siblings, and layers of one size, are split together or not at all
    while todo:
        most_bytes = max(map(bytes_of, todo))
        largest = [
            paths for siblings in todo if bytes_of(siblings) == most_bytes for paths in siblings
        ]
        todo = [siblings for siblings in todo if bytes_of(siblings) != most_bytes]
        pieces = [_pieces(paths, keys) for paths in largest]
        taken = len(whole) + len(numbered) + sum(map(len, todo))
        if sum(map(len, pieces)) <= most - taken:
            todo += [list(found.values()) for found in pieces if len(found) > 1]
            whole += [
                paths for paths, found in zip(largest, pieces, strict=True) if len(found) == 1
            ]
            continue
        for paths, found in zip(largest, pieces, strict=True):
            if len(found) > 1 and all(map(_is_number, found)) and 50 * bytes_of([paths]) >= total:
                numbered.append([found[token] for token in sorted(found, key=natural)])
            else:
                whole.append(paths)
    for count, pieces_of_one in enumerate(numbered):
        runs = (most - len(whole)) // (len(numbered) - count)
        each = -(-len(pieces_of_one) // runs)
        for first in range(0, len(pieces_of_one), each):
            whole.append([path for piece in pieces_of_one[first : first + each] for path in piece])
    named: dict[str, tuple[str, ...]] = {}
    for paths in sorted(whole, key=lambda paths: natural("".join(keys[paths[0]]))):
        name = _name(paths)
        while name in named:
            name += " "
        named[name] = tuple(paths)
    return named


def classes(sizes: Mapping[str, int], most: int) -> dict[str, tuple[str, ...]]:
    """Leaves that differ in numbers alone together: ``state/*/exp_avg``. Where these are more than
    ``most``, as ``groups`` has them.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(sizes, key=natural):
        name = "".join(
            token[: -len(token.lstrip("/."))] + "*" if _is_number(token) else token
            for token in _tokens(path)
        )
        found.setdefault(name, []).append(path)
    return (
        {name: tuple(paths) for name, paths in found.items()}
        if len(found) <= most
        else groups(sizes, most)
    )


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key in which numbers count as numbers."""
    return tuple(
        (0, int(t), "") if t.isdecimal() else (1, 0, t) for t in re.split(r"([0-9]+)", path) if t
    )


def _tokens(path: str) -> tuple[str, ...]:
    """Components with the separator before each: joined, they are the path."""
    return tuple(token for token in _TOKEN.findall(path) if token)


def _is_number(token: str) -> bool:
    return token.lstrip("/.").isdecimal()


def _keys(paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What paths are split by: their tokens, with the number of an entry that holds only leaves put
    last.
    """
    tokens = {path: _tokens(path) for path in paths}
    below: dict[
        tuple[str, ...], set[int]
    ] = {}  # of each node whose children are numbers: how many tokens come after them
    for of in tokens.values():
        for at, token in enumerate(of):
            below.setdefault(of[:at], set()).add(len(of) - at - 1 if _is_number(token) else -1)

    def key(of: tuple[str, ...]) -> tuple[str, ...]:
        if len(of) >= 2 and below[of[:-2]] == {1}:
            return (*of[:-2], of[-1], of[-2])
        return of

    return {path: key(of) for path, of in tokens.items()}


def _pieces(paths: Sequence[str], keys: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """The paths by the first component in which they differ."""
    pieces = {"": list(paths)}
    for at in range(max(len(keys[path]) for path in paths)):
        pieces = {}
        for path in paths:
            pieces.setdefault(keys[path][at] if at < len(keys[path]) else "", []).append(path)
        if len(pieces) > 1:
            break
    return pieces


def _name(paths: Sequence[str]) -> str:
    """What the paths have in common; runs of numbers as ``3-7``, what differs otherwise as
    ``*``.
    """
    tokens = [_tokens(path) for path in paths]
    shortest = min(map(len, tokens))
    alike = all(len(of) == shortest for of in tokens)
    name: list[str] = []
    for at in range(shortest):
        found = {of[at] for of in tokens}
        if len(found) == 1:
            name.append(found.pop())
            continue
        separator = next(iter(found))[0]
        separator = separator if separator in "/." else ""
        if all(_is_number(token) for token in found):
            numbers = sorted(int(token.lstrip("/.")) for token in found)
            run = numbers[-1] - numbers[0] == len(numbers) - 1
            name.append(f"{separator}{numbers[0]}-{numbers[-1]}" if run else f"{separator}*")
        else:
            name.append(f"{separator}*")
        if not alike:
            return "".join(name)
    return "".join(name) if alike else "".join(name) + " ..."
