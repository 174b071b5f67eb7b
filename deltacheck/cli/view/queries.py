"""The documents that the page of ``view`` shows. All are read through the verifying reader."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deltacheck.cli import arguments
from deltacheck.cli.check import verified_document
from deltacheck.cli.inspection import compare, inspect
from deltacheck.cli.inspection.compare import Side
from deltacheck.cli.output import Row

if TYPE_CHECKING:
    from deltacheck.leaf.spec import LeafSpec
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.roots.root import Root

# Values of one answer. Larger: fewer requests for a large slice, but a table that no one reads.
MOST_VALUES = 4096
# Memory for the chunks that a slice touches. Larger: wider slices of large leaves.
_MOST_BYTES = 1 << 30
# Digits of an index within a slice; more than any axis needs.
_MOST_DIGITS = 18

Query = Callable[[Mapping[str, str]], Row]


class BadQuery(ValueError):
    """A request whose parameters are wrong."""


class Queries:
    """The queries on one root.

    Args:
        path: The root: a directory or an address of an object store.
        item: The item of a ``CheckpointManager``'s steps.

    Attributes:
        names: The name of each query, with the parameters that it takes.
    """

    def __init__(self, path: str, item: str | None = None) -> None:
        from deltacheck.store.roots.opening import open_root

        self._root: Root = open_root(path, item)
        # A root caches what it has read and is not made for several threads. A check of all bytes
        # takes long and must not stop the page, so it has a root and a lock of its own.
        self._lock, self._check_lock = threading.Lock(), threading.Lock()
        self._queries: dict[str, tuple[Query, tuple[str, ...]]] = {
            "steps": (self._steps, ()),
            "log": (self._log, ()),
            "show": (self._show, ("step",)),
            "values": (self._values, ("step", "leaf", "box")),
            "diff": (self._diff, ("before", "after")),
            "change": (self._change, ("before", "after", "leaf")),
            "verify": (self._verify, ("step", "deep")),
        }
        self.names = {name: takes for name, (_, takes) in self._queries.items()}

    @property
    def path(self) -> str:
        """Return the root, as messages name it."""
        return str(self._root.path)

    def answer(self, name: str, parameters: Mapping[str, str]) -> Row:
        """Return the document of a query.

        Args:
            name: One of ``names``.
            parameters: Exactly the parameters that it takes.

        Raises:
            BadQuery: If a parameter is missing, unknown or malformed.
            DeltacheckError: If the root cannot answer, for example because of damage.
        """
        query, takes = self._queries[name]
        if set(parameters) != set(takes):
            raise BadQuery(f"{name} takes the parameters {', '.join(takes) or '(none)'}")
        with self._check_lock if name == "verify" else self._lock:
            return query(parameters)

    def _steps(self, parameters: Mapping[str, str]) -> Row:
        rows, problems = inspect.listed_steps(self._root)
        return {"root": self.path, "steps": rows, "problems": problems}

    def _log(self, parameters: Mapping[str, str]) -> Row:
        rows, problems = inspect.logged_steps(self._root)
        return {"root": self.path, "steps": rows, "problems": problems}

    def _show(self, parameters: Mapping[str, str]) -> Row:
        document = inspect.step_document(self._root, self._manifest(parameters["step"]))
        groups: list[Row] = []
        for row, members in inspect.grouped(document["leaves"]):
            groups.append(row | {"members": [leaf["path"] for leaf in members]})
        scalars = [_with_text(row) for row in document["scalars"]]
        return document | {"groups": groups, "scalars": scalars}

    def _values(self, parameters: Mapping[str, str]) -> Row:
        from deltacheck.reader import Checkpoints
        from deltacheck.restore.content import bounded_slices

        step, path = _step_of(parameters["step"]), parameters["leaf"]
        manifest = self._root.manifest(step)
        spec = self._spec(Side.of(self._root, manifest), path)
        try:
            box = bounded_slices(path, spec.shape, parse_box(parameters["box"]))
        except ValueError as error:
            raise BadQuery(str(error)) from None
        shape = [part.stop - part.start for part in box]
        if math.prod(shape) > MOST_VALUES:
            raise BadQuery(
                f"the slice {parameters['box'] or ':'} of leaf {path!r} has {math.prod(shape)}"
                f" values, more than {MOST_VALUES}; name a smaller one"
            )
        reader = Checkpoints(self._root)
        values = reader.restore(step, slices={path: box}, max_bytes=_MOST_BYTES)[path]
        return {
            "step": manifest.step,
            "seq": manifest.seq,
            "path": path,
            "dtype": spec.dtype,
            "leaf_shape": list(spec.shape),
            "box": [[part.start, part.stop] for part in box],
            "shape": shape,
            # Text of the shortest number that is the same value, as NumPy prints it. JSON numbers
            # would lose NaN, large integers and the type.
            "values": [str(value) for value in values.ravel()],
        }

    def _diff(self, parameters: Mapping[str, str]) -> Row:
        before, after = self._sides(parameters)
        paths = compare.classify(before, after, [])
        return {
            "root": self.path,
            "before": before.step,
            "after": after.step,
            "unchanged": len(paths["unchanged"]),
            # Their digests differ. ``change`` reads the content.
            "changed": compare.rows_of(paths["changed"], after),
            **compare.described(before, after, paths),
            "scalars": [
                row | {name: row[name] and _with_text(row[name]) for name in ("before", "after")}
                for row in compare.compare_scalars(before.manifest, after.manifest)
            ],
        }

    def _change(self, parameters: Mapping[str, str]) -> Row:
        from deltacheck.maintain import drift
        from deltacheck.report.change_map import change_map

        before, after = self._sides(parameters)
        path = parameters["leaf"]
        old, new = (compare.describe(self._spec(side, path)) for side in (before, after))
        if old != new:
            raise BadQuery(f"leaf {path!r} is {old} before and {new} after; nothing to compare")
        with compare.naming(before, after):
            leaf_before, leaf_after = (side.leaves([path])[path] for side in (before, after))
            result = drift.measure(leaf_before, leaf_after)
            picture = change_map(
                leaf_after.spec.shape, drift.changed_elements(leaf_before, leaf_after)
            )
        return {"path": path, **new, **asdict(result), "density": result.density} | {
            "map": asdict(picture)
        }

    def _verify(self, parameters: Mapping[str, str]) -> Row:
        from deltacheck.maintain import verify

        if parameters["deep"] not in ("0", "1"):
            raise BadQuery("deep is 0 or 1")
        deep = parameters["deep"] == "1"
        # Empty: all steps.
        step = _step_of(parameters["step"]) if parameters["step"] else None
        root = self._root.afresh()
        if parameters["step"] and step is None:
            step = root.manifest(None).step
        return verified_document(root, verify.check(root, step, deep=deep), deep)

    def _manifest(self, word: str) -> Manifest:
        return self._root.manifest(_step_of(word))

    def _sides(self, parameters: Mapping[str, str]) -> tuple[Side, Side]:
        before, after = (
            Side.of(self._root, self._manifest(parameters[name])) for name in ("before", "after")
        )
        return before, after

    @staticmethod
    def _spec(side: Side, path: str) -> LeafSpec:
        from deltacheck.restore.resolve import no_leaf

        spec = side.spec(path)
        if spec is None:
            raise no_leaf(side.manifest.step, path, side.owners)
        return spec


def _with_text(row: Any) -> Row:
    """Add the text of a Python value. The page's numbers would round large integers."""
    return {**row, "text": repr(row["value"])}


def _step_of(word: str) -> int | str | None:
    if not arguments.is_step(word):
        raise BadQuery("a step is a number, 'latest' or @TAG")
    return arguments.parse_step(word)


def parse_box(text: str) -> list[slice | int]:
    """Return the slices of a text such as ``0:8, 3, :``, one for each axis; empty: none.

    Raises:
        BadQuery: If it is not of this form.
    """

    def number(word: str) -> int:
        digits = word.removeprefix("-")
        # ``isdecimal`` alone would accept digits of other scripts.
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
            raise BadQuery(f"a slice is like 0:8, 3, : and not {text!r}")
        return int(word)

    box: list[slice | int] = []
    for part in text.split(",") if text.strip() else []:
        first, colon, stop = part.strip().partition(":")
        if not colon:
            box.append(number(first))
            continue
        edges = (word.strip() for word in (first, stop))
        box.append(slice(*(number(word) if word else None for word in edges)))
    return box
