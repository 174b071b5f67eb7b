"""The ``diff`` command: leaves that changed between two steps, and the size of the changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from deltacheck.cli import output
from deltacheck.cli.arguments import (
    Item,
    Json,
    Leaves,
    RootTwoSteps,
    open_two_steps,
)
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.leaf.spec import LeafSpec
    from deltacheck.restore.leaf_kinds import Leaf
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.roots.root import Root

# These words are keys of the JSON document and words of the summary line.
_OUTCOMES = ("unchanged", "changed", "added", "removed", "reshaped")


@dataclass(frozen=True, slots=True)
class Side:
    """A step that is compared with another.

    ``owners`` maps each leaf path to the path of the leaf that holds its bytes. The two differ for
    tied leaves only.
    """

    root: Root
    manifest: Manifest
    owners: dict[str, str]

    @classmethod
    def of(cls, root: Root, manifest: Manifest) -> Self:
        from deltacheck.leaf import tree

        return cls(root, manifest, tree.array_paths(manifest.tree))

    @property
    def step(self) -> Row:
        return {"step": self.manifest.step, "seq": self.manifest.seq}

    def spec(self, path: str) -> LeafSpec | None:
        return self.manifest.spec(self.owners[path]) if path in self.owners else None

    def mark(self, path: str) -> object:
        """Return a value that is equal for equal bytes only, ``None`` if the manifest has none."""
        return self.manifest.mark_of(self.owners[path])

    def leaves(self, paths: list[str]) -> dict[str, Leaf]:
        from deltacheck.restore import export

        return export.resolve(self.root, self.manifest, {path: self.owners[path] for path in paths})


def diff(
    words: RootTwoSteps = None,
    leaves: Leaves = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Show the leaves that changed between two steps, and by how much."""
    before, after = (Side.of(root, manifest) for root, manifest in open_two_steps(words, item))
    # Digests decide which leaves are read at all. Equal leaves cost no byte of data.
    paths = classify(before, after, leaves or [])
    compared = measure(before, after, paths["changed"])
    # Leaves that ranks have only cut into other tiles have other digests, but no changed element.
    changed = [row for row in compared if row["changed"]]
    tables: dict[str, list[Row]] = {
        "changed": changed,
        **described(before, after, paths),
        # Patterns select leaves, so a selection leaves the Python values out.
        "scalars": [] if leaves else compare_scalars(before.manifest, after.manifest),
    }
    unchanged = len(paths["unchanged"]) + len(compared) - len(changed)
    if as_json:
        steps = {
            name: {"root": str(side.root.path), **side.step}
            for name, side in (("before", before), ("after", after))
        }
        output.print_json(
            {"root": str(before.root.path), **steps, "unchanged": unchanged, **tables}
        )
    else:
        # Two roots are named, because their steps may have the same number.
        names = [
            f"step {side.manifest.step}"
            + (f" of {side.root.path}" if before.root.path != after.root.path else "")
            for side in (before, after)
        ]
        output.print_line(f"{' -> '.join(names)}: {_summarize(unchanged, tables)}")
        _print_tables(tables)


def classify(before: Side, after: Side, patterns: list[str]) -> dict[str, list[str]]:
    """Group leaf paths by the outcome of the comparison, from the manifests alone.

    Of leaves that are tied in both steps, only the one that holds the bytes is listed.

    Raises:
        LeafNotFound: If a pattern matches no leaf of either step.
    """
    from deltacheck.errors import LeafNotFound
    from deltacheck.restore import resolve

    for pattern in patterns:
        if not any(
            resolve.matches(path, pattern) for path in before.owners.keys() | after.owners.keys()
        ):
            raise LeafNotFound(
                f"neither step {before.manifest.step} nor step {after.manifest.step} has a leaf"
                f" that matches {pattern!r}"
            )
    paths: dict[str, list[str]] = {outcome: [] for outcome in _OUTCOMES}
    # A leaf that is tied in one step only has bytes of its own in the other one, so it is listed.
    owners = {
        path for side in (before, after) for path, owner in side.owners.items() if path == owner
    }
    for path in sorted(owners):
        if not patterns or any(resolve.matches(path, pattern) for pattern in patterns):
            paths[_outcome(path, before, after)].append(path)
    return paths


def _outcome(path: str, before: Side, after: Side) -> str:
    old, new = before.spec(path), after.spec(path)
    if old is None or new is None:
        return "added" if old is None else "removed"
    # There is no difference to measure between elements of another type or number.
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return "reshaped"
    # Two missing marks say nothing: such leaves are read and compared.
    return "unchanged" if None is not before.mark(path) == after.mark(path) else "changed"


def measure(before: Side, after: Side, paths: list[str]) -> list[Row]:
    """Read leaves of both steps and measure their drift."""
    from deltacheck.maintain import drift

    rows: list[Row] = []
    with naming(before, after):
        old, new = before.leaves(paths), after.leaves(paths)
    # The bar counts the earlier step only, as both sides have the same sizes.
    with output.progress("comparing", sum(leaf.spec.raw_bytes for leaf in old.values())) as advance:
        for path in paths:
            with naming(before, after):
                result = drift.measure(old[path], new[path])
            rows.append(
                {
                    "path": path,
                    **describe(before.spec(path)),
                    **asdict(result),
                    "density": result.density,
                }
            )
            advance(old[path].spec.raw_bytes)
    return rows


@contextmanager
def naming(before: Side, after: Side) -> Iterator[None]:
    """Return a context in which an error of damage names the step that has it."""
    from deltacheck.errors import Damaged
    from deltacheck.restore import damage

    try:
        yield
    except Damaged as error:
        # Copies of a root have segments of the same names.
        is_before = error.file.startswith(str(before.root.store.path)) and damage.harmed_leaves(
            before.root, before.manifest, error.file
        )
        side = before if is_before else after
        with damage.named(side.root, side.manifest):
            raise


def describe(spec: LeafSpec | None) -> Row:
    assert spec is not None  # _classify listed the path under a step that has it
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def rows_of(paths: list[str], side: Side) -> list[Row]:
    """Return leaves of a step with their types and shapes."""
    return [{"path": path, **describe(side.spec(path))} for path in paths]


def described(before: Side, after: Side, paths: dict[str, list[str]]) -> dict[str, list[Row]]:
    """Return the leaves that ``classify`` finds in one step only, or in two forms."""
    return {
        "added": rows_of(paths["added"], after),
        "removed": rows_of(paths["removed"], before),
        "reshaped": [
            {
                "path": path,
                "before": describe(before.spec(path)),
                "after": describe(after.spec(path)),
            }
            for path in paths["reshaped"]
        ],
    }


def compare_scalars(before: Manifest, after: Manifest) -> list[Row]:
    """Return the Python scalars that differ in type or value, or are in one step only.

    Their texts are compared: NaN equals NaN, and -0.0 differs from 0.0.
    """
    from deltacheck.leaf import tree

    old, new = (
        {path: (type(value).__name__, value) for path, value in tree.scalars(manifest.tree).items()}
        for manifest in (before, after)
    )
    rows: list[Row] = []
    for path in sorted(old.keys() | new.keys()):
        if repr(old.get(path)) != repr(new.get(path)):
            row: Row = {"path": path}
            for name, scalars in (("before", old), ("after", new)):
                kind, value = scalars.get(path, (None, None))
                row[name] = None if kind is None else {"type": kind, "value": value}
            rows.append(row)
    return rows


def _summarize(unchanged: int, tables: dict[str, list[Row]]) -> str:
    counts = [f"{len(tables[outcome])} {outcome}" for outcome in _OUTCOMES[1:] if tables[outcome]]
    scalars = [f"{len(tables['scalars'])} other values changed"] if tables["scalars"] else []
    return ", ".join([*counts, f"{unchanged} unchanged", *scalars])


def _print_tables(tables: dict[str, list[Row]]) -> None:
    path = Column("", "path", left=True)
    array = (
        Column("TYPE", "dtype", left=True, rank=1),
        Column("SHAPE", "shape", output.shape, left=True, rank=3),
    )
    drift: tuple[Column, ...] = (
        Column("CHANGED", "changed", rank=2),
        Column("DENSITY", "density", output.share),
        Column("REL. L2", "relative_l2", output.number),
        Column("MAX |DIFF|", "max_abs", output.number),
    )
    # Healthy runs have neither NaN nor infinities, and the table is wide without these columns.
    if any(row["nonfinite_before"] or row["nonfinite_after"] for row in tables["changed"]):
        drift += (Column("NONFINITE", "nonfinite_before"), Column("-> AFTER", "nonfinite_after"))
    values = (
        Column("BEFORE", "before", _format_value, left=True),
        Column("AFTER", "after", _format_value, left=True),
    )
    columns = {
        "changed": (*array, *drift),
        "added": array,
        "removed": array,
        "reshaped": values,
        "scalars": values,
    }
    for name, rows in tables.items():
        if rows:
            output.print_line("")
            output.print_table((path._replace(title=name.upper()), *columns[name]), rows)


def _format_value(value: Row) -> str:
    """Format a scalar, or the type and shape of an array."""
    if "value" in value:
        return output.short(value["value"])
    return f"{value['dtype']} {value['shape']}"
