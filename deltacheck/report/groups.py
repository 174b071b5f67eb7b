"""Group leaf paths under few names. The functions are pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TOKEN = re.compile(r"[/.]?[^/.]*")


def groups(sizes: Mapping[str, int], most: int) -> dict[str, tuple[str, ...]]:
    """Group leaf paths.

    The algorithm begins with one group of all leaves. It repeatedly splits the largest groups by
    the next component of their paths; a component ends at ``/`` or ``.``. Numbers that are too many
    for a group each become runs. If numbered entries hold only leaves, as in
    ``optimizer/state/17/exp_avg``, leaves are grouped by their name before their number.

    Args:
        sizes: Leaf path -> bytes.
        most: Largest number of groups. Larger: finer groups.

    Returns:
        Name -> paths, in natural order (``layer.2`` before ``layer.10``).
    """
    if not sizes:
        return {}
    keys = _keys(list(sizes))
    total = sum(sizes.values())

    def bytes_of(siblings: Sequence[Sequence[str]]) -> int:
        return sum(sizes[path] for paths in siblings for path in paths)

    finished: list[list[str]] = []
    # Groups with more numbers than free groups.
    numbered: list[list[list[str]]] = []
    # Siblings, and layers of one size, are split together or not at all.
    todo = [[sorted(sizes, key=natural)]]
    while todo:
        most_bytes = max(map(bytes_of, todo))
        largest = [
            paths for siblings in todo if bytes_of(siblings) == most_bytes for paths in siblings
        ]
        todo = [siblings for siblings in todo if bytes_of(siblings) != most_bytes]
        pieces = [_pieces(paths, keys) for paths in largest]
        group_count = len(finished) + len(numbered) + sum(map(len, todo))
        # If a split would exceed the limit, these groups are final. Smaller ones may still fit.
        if sum(map(len, pieces)) <= most - group_count:
            todo += [list(parts.values()) for parts in pieces if len(parts) > 1]
            finished += [
                paths for paths, parts in zip(largest, pieces, strict=True) if len(parts) == 1
            ]
            continue
        for paths, parts in zip(largest, pieces, strict=True):
            # Runs are only worth their rows for groups of at least a fiftieth of all bytes.
            if len(parts) > 1 and all(map(_is_number, parts)) and 50 * bytes_of([paths]) >= total:
                numbered.append([parts[token] for token in sorted(parts, key=natural)])
            else:
                finished.append(paths)
    for count, pieces_of_one in enumerate(numbered):
        runs = (most - len(finished)) // (len(numbered) - count)
        finished += _joined(pieces_of_one, runs)
    return _by_name(sorted(finished, key=lambda paths: natural("".join(keys[paths[0]]))))


def _by_name(finished: list[list[str]]) -> dict[str, tuple[str, ...]]:
    """Return groups by the common name of their paths."""
    result: dict[str, tuple[str, ...]] = {}
    for paths in finished:
        name = _name(paths)
        # Spaces make the key unique and are not seen on the page.
        while name in result:
            name += " "
        result[name] = tuple(paths)
    return result


def _joined(pieces: list[list[str]], runs: int) -> list[list[str]]:
    """Join pieces to at most a number of runs of neighbours."""
    length = -(-len(pieces) // runs)
    return [
        [path for piece in pieces[first : first + length] for path in piece]
        for first in range(0, len(pieces), length)
    ]


def classes(sizes: Mapping[str, int], most: int) -> dict[str, tuple[str, ...]]:
    """Group leaves whose paths differ in numbers only: ``state/*/exp_avg``.

    If there are more than ``most`` of these classes, ``groups`` is used instead.
    """
    members: dict[str, list[str]] = {}
    for path in sorted(sizes, key=natural):
        name = "".join(
            token[: -len(token.lstrip("/."))] + "*" if _is_number(token) else token
            for token in _tokens(path)
        )
        members.setdefault(name, []).append(path)
    return (
        {name: tuple(paths) for name, paths in members.items()}
        if len(members) <= most
        else groups(sizes, most)
    )


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares numbers by value."""
    return tuple(
        (0, int(t), "") if t.isdecimal() else (1, 0, t) for t in re.split(r"([0-9]+)", path) if t
    )


def _tokens(path: str) -> tuple[str, ...]:
    """Split a path into components, each with its separator in front."""
    return tuple(token for token in _TOKEN.findall(path) if token)


def _is_number(token: str) -> bool:
    return token.lstrip("/.").isdecimal()


def _keys(paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the tokens that paths are split by.

    The number of an entry that holds only leaves is moved to the end.
    """
    tokens = {path: _tokens(path) for path in paths}
    # Node -> number of tokens after each child that is a number; -1 for other children.
    depths: dict[tuple[str, ...], set[int]] = {}
    for path_tokens in tokens.values():
        for position, token in enumerate(path_tokens):
            depth = len(path_tokens) - position - 1 if _is_number(token) else -1
            depths.setdefault(path_tokens[:position], set()).add(depth)

    def key(path_tokens: tuple[str, ...]) -> tuple[str, ...]:
        if len(path_tokens) >= 2 and depths[path_tokens[:-2]] == {1}:
            return (*path_tokens[:-2], path_tokens[-1], path_tokens[-2])
        return path_tokens

    return {path: key(path_tokens) for path, path_tokens in tokens.items()}


def _pieces(paths: Sequence[str], keys: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Group paths by the first component in which they differ."""
    pieces = {"": list(paths)}
    for position in range(max(len(keys[path]) for path in paths)):
        pieces = {}
        for path in paths:
            token = keys[path][position] if position < len(keys[path]) else ""
            pieces.setdefault(token, []).append(path)
        if len(pieces) > 1:
            break
    return pieces


def _name(paths: Sequence[str]) -> str:
    """Return the common name of paths: runs of numbers as ``3-7``, other differences as ``*``."""
    tokens = [_tokens(path) for path in paths]
    shortest = min(map(len, tokens))
    same_length = all(len(path_tokens) == shortest for path_tokens in tokens)
    name: list[str] = []
    for position in range(shortest):
        variants = {path_tokens[position] for path_tokens in tokens}
        if len(variants) == 1:
            name.append(variants.pop())
            continue
        separator = next(iter(variants))[0]
        separator = separator if separator in "/." else ""
        if all(_is_number(token) for token in variants):
            numbers = sorted(int(token.lstrip("/.")) for token in variants)
            run = numbers[-1] - numbers[0] == len(numbers) - 1
            name.append(f"{separator}{numbers[0]}-{numbers[-1]}" if run else f"{separator}*")
        else:
            name.append(f"{separator}*")
        if not same_length:
            return "".join(name)
    return "".join(name) if same_length else "".join(name) + " ..."
