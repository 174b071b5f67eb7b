"""The leaves of a parameter in this process: whole, or the tiles that this rank writes.

A tile is treated like a leaf. All rules work element by element, so a promise that holds for each
tile holds for the leaf. Tiles of different leaves belong together if the leaves are cut alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from deltacheck.leaf import tiles
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Cuts
from deltacheck.policy.decide import Decision
from deltacheck.policy.parameters import Parameter

# The place of a tile: the cuts of its leaf, and its name without the leaf; empty for a whole leaf.
Place: TypeAlias = tuple[Cuts | None, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """The leaves, or the tiles at one place, of one parameter.

    Args:
        suffix: The end of the names of its tiles; empty for whole leaves.
        names: Leaf path -> stored path, of those that this process writes.
    """

    suffix: str
    names: Mapping[str, str]

    def parameter(self, parameter: Parameter) -> Parameter:
        """Return the parameter with the stored paths of this cell in place of leaf paths."""
        return replace(
            parameter,
            name=parameter.name + self.suffix,
            weight=self._name(parameter.weight),
            master=self._name(parameter.master),
            first=self._name(parameter.first),
            second=self._name(parameter.second),
        )

    def decisions(
        self, parameter: Parameter, decisions: Mapping[str, Decision]
    ) -> dict[str, Decision]:
        """Return the decisions that can be carried out here, by stored path.

        A weight and its master are treated together or not at all, and so are the two moments.

        Args:
            parameter: The parameter, with leaf paths.
            decisions: The decisions for its leaves, by leaf path.
        """
        pairs = ((parameter.weight, parameter.master), (parameter.first, parameter.second))
        complete = {
            path
            for pair in pairs
            if all(member is None or member in self.names for member in pair)
            for path in pair
        }
        return {
            self.names[path]: replace(decision, of=self.names.get(decision.of, decision.of))
            for path, decision in decisions.items()
            if path in complete
        }

    def _name(self, path: str | None) -> str | None:
        return None if path is None else self.names.get(path)


class Layout:
    """The places of the leaves and tiles that this process writes.

    Args:
        specs: Their specs, by stored path.
        cuts: The cuts of each leaf in tiles.
    """

    def __init__(self, specs: Mapping[str, LeafSpec], cuts: Mapping[str, Cuts | None]) -> None:
        self._places: dict[str, dict[Place, str]] = {}
        for name in specs:
            path = tiles.leaf_of(name)
            place = (cuts.get(path), name[len(path) :])
            self._places.setdefault(path, {})[place] = name

    def cells(self, paths: Iterable[str]) -> Iterator[Cell]:
        """Yield the cells of some leaves of one parameter, in the order of their first leaf."""
        members = [path for path in paths if path in self._places]
        places = dict.fromkeys(place for path in members for place in self._places[path])
        for place in places:
            yield Cell(
                place[1],
                {
                    path: self._places[path][place]
                    for path in members
                    if place in self._places[path]
                },
            )
