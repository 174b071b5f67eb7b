"""`diff`: which leaves moved between two steps, and how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, Leaves, RootTwoSteps
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.leaf.spec import LeafSpec
    from deltacheck.restore.resolve import Leaf
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.root import Root

_FATES = ("unchanged", "changed", "added", "removed", "reshaped")


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two steps. ``owners``: leaf path -> path of the leaf that holds its bytes (itself,
    but for a tie).
    """

    manifest: Manifest
    owners: dict[str, str]

    def spec(self, path: str) -> LeafSpec | None:
        return self.manifest.spec(self.owners[path]) if path in self.owners else None

    def mark(self, path: str) -> object:
        """What only the same bytes of the leaf have; ``None`` where nothing tells that."""
        return self.manifest.mark_of(self.owners[path])

    def leaves(self, root: Root, paths: list[str]) -> dict[str, Leaf]:
        from deltacheck.restore import export

        return export.resolve(root, self.manifest, {path: self.owners[path] for path in paths})


def diff(
    words: RootTwoSteps = None, leaves: Leaves = None, item: Item = None, as_json: Json = False
) -> None:
    """Show which leaves moved between two steps, and how much."""
    from deltacheck.cli import arguments as where
    from deltacheck.leaf import tree

    root, found = where.manifests(where.parse(words, least=2, most=2), item)
    before, after = (_Side(manifest, tree.array_paths(manifest.tree)) for manifest in found)
    paths = _by_fate(before, after, leaves or [])
    compared = _drifts(root, before, after, paths["changed"])
    moved = [
        row for row in compared if row["changed"]
    ]  # not leaves that ranks have only cut otherwise
    tables: dict[str, list[Row]] = {
        "changed": moved,
        "added": [{"path": path, **_what(after.spec(path))} for path in paths["added"]],
        "removed": [{"path": path, **_what(before.spec(path))} for path in paths["removed"]],
        "reshaped": [
            {"path": path, "before": _what(before.spec(path)), "after": _what(after.spec(path))}
            for path in paths["reshaped"]
        ],
        "scalars": [] if leaves else _scalars(before.manifest, after.manifest),
    }
    unchanged = len(paths["unchanged"]) + len(compared) - len(moved)
    if as_json:
        ends = {
            name: {"step": m.step, "seq": m.seq}
            for name, m in zip(("before", "after"), found, strict=True)
        }
        output.print_json({"root": str(root.path), **ends, "unchanged": unchanged, **tables})
    else:
        output.print_line(
            f"step {before.manifest.step} -> step {after.manifest.step}:"
            f" {_summary(unchanged, tables)}"
        )
        _print_tables(tables)


def _by_fate(before: _Side, after: _Side, patterns: list[str]) -> dict[str, list[str]]:
    """Leaf paths by what became of them, told from the manifests alone; of leaves tied in both
    steps only the one that holds the bytes.
    """
    from deltacheck.errors import StepNotFound
    from deltacheck.restore import export

    for pattern in patterns:
        if not any(
            export.matches(path, pattern) for path in before.owners.keys() | after.owners.keys()
        ):
            raise StepNotFound(f"neither step has a leaf that matches {pattern!r}")
    paths: dict[str, list[str]] = {fate: [] for fate in _FATES}
    owning = {
        path for side in (before, after) for path, owner in side.owners.items() if path == owner
    }
    for path in sorted(owning):
        if not patterns or any(export.matches(path, pattern) for pattern in patterns):
            paths[_fate(path, before, after)].append(path)
    return paths


def _fate(path: str, before: _Side, after: _Side) -> str:
    old, new = before.spec(path), after.spec(path)
    if old is None or new is None:
        return "added" if old is None else "removed"
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return "reshaped"
    return "unchanged" if None is not before.mark(path) == after.mark(path) else "changed"


def _drifts(root: Root, before: _Side, after: _Side, paths: list[str]) -> list[Row]:
    from deltacheck.cli import drift

    rows: list[Row] = []
    old, new = before.leaves(root, paths), after.leaves(root, paths)
    with output.progress("comparing", sum(leaf.spec.raw_bytes for leaf in old.values())) as advance:
        for path in paths:
            found = drift.measure(old[path], new[path])
            rows.append(
                {
                    "path": path,
                    **_what(before.spec(path)),
                    **asdict(found),
                    "density": found.density,
                }
            )
            advance(old[path].spec.raw_bytes)
    return rows


def _what(spec: LeafSpec | None) -> Row:
    assert spec is not None  # the fate says that it is there
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def _scalars(before: Manifest, after: Manifest) -> list[Row]:
    """Python scalars that differ in type or value, or are in one step only. Their texts are
    compared: NaN is NaN, and -0.0 is not 0.0.
    """
    from deltacheck.leaf import tree

    old, new = (
        {path: (type(value).__name__, value) for path, value in tree.scalars(m.tree).items()}
        for m in (before, after)
    )
    rows: list[Row] = []
    for path in sorted(old.keys() | new.keys()):
        if repr(old.get(path)) != repr(new.get(path)):
            ends = (("before", old), ("after", new))
            rows.append(
                {
                    "path": path,
                    **{name: _value(*side[path]) if path in side else None for name, side in ends},
                }
            )
    return rows


def _value(kind: str, value: object) -> Row:
    return {"type": kind, "value": value}


def _summary(unchanged: int, tables: dict[str, list[Row]]) -> str:
    counts = [f"{len(tables[fate])} {fate}" for fate in _FATES[1:] if tables[fate]]
    scalars = [f"{len(tables['scalars'])} other values changed"] if tables["scalars"] else []
    return ", ".join([*counts, f"{unchanged} unchanged", *scalars])


def _print_tables(tables: dict[str, list[Row]]) -> None:
    path = Column("", "path", left=True)
    what = (Column("TYPE", "dtype", left=True), Column("SHAPE", "shape", output.shape, left=True))
    drift: tuple[Column, ...] = (
        Column("CHANGED", "changed"),
        Column("DENSITY", "density", output.share),
        Column("REL. L2", "relative_l2", output.number),
        Column("MAX |DIFF|", "max_abs", output.number),
    )
    nonfinite = (Column("NONFINITE", "nonfinite_before"), Column("-> AFTER", "nonfinite_after"))
    if any(row["nonfinite_before"] or row["nonfinite_after"] for row in tables["changed"]):
        drift += nonfinite
    ends = (Column("BEFORE", "before", _end, left=True), Column("AFTER", "after", _end, left=True))
    columns = {
        "changed": (*what, *drift),
        "added": what,
        "removed": what,
        "reshaped": ends,
        "scalars": ends,
    }
    for name, rows in tables.items():
        if rows:
            output.print_line("")
            output.print_table((path._replace(title=name.upper()), *columns[name]), rows)


def _end(end: Row) -> str:
    return output.short(end["value"]) if "value" in end else f"{end['dtype']} {end['shape']}"
