"""The structure and the language of the package stay within their limits.

``python -m tests.suites.figures`` prints all figures, and ``--list NAME`` the places behind one.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

import pytest

from deltacheck.backends.torch import Engine
from deltacheck.cli.app import root_command
from deltacheck.codec.derivation import RULES
from deltacheck.store.manifest import FEATURES
from tests.suites.figures import Figure, measure
from tests.support.paths import REPOSITORY

# Classes beyond 300 lines or 15 attributes, each with its reason.
LONG_CLASSES = {
    "Checkpoints",  # most of it documents the arguments of public methods
    "DeltaCheckpointHandler",  # the same: half of it documents arguments and errors
    "DeltaStorageWriter",  # the same: an argument per option, and the calls that DCP prescribes
    "Engine",  # the same: its own code is about 100 lines
    "Item",  # one item of a manager root: saves, restores and their commit, with their reasons
    "Pipeline",  # the loops of a saver's threads, and every way in which a save can fail in them
    "Saver",  # the calls of the training thread, each with the invariants that it keeps
    "Treatment",  # the treatment of one save, and the documentation of its arguments
}
WIDE_CLASSES = {
    "Manifest",  # the document on disk: one attribute per key
    "Recipe",  # the hyperparameters of a run, written as one JSON object
    "RunState",  # all that a policy remembers between saves, each with its meaning
    "SaveOptions",  # one attribute per option of the public constructors
    "_TrainCall",  # one call of a trainer: what its hooks share
    "StepRecord",  # a row of the report: one attribute per column
}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    """All figures of this checkout, by name."""
    return {figure.name: figure for figure in measure(REPOSITORY)}


@pytest.mark.parametrize(
    "name",
    [
        "same-file-names",
        "upward-imports",
        "outside-contract",
        "cycles",
        "parameters-internal",
        "long-lines-python",
        "long-lines-cpp",
        "relative-clauses",
        "undocumented-raises",
    ],
)
def test_no_place_breaks_a_rule(name: str, figures: dict[str, Figure]) -> None:
    figure = figures[name]
    assert not figure.places, f"{figure.title}: " + "\n".join(map(str, figure.places))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("top-entries", 18),
        ("largest-folder", 16),
        ("import-layers", 12),
        ("long-functions", 21),
        ("complex-functions", 12),
        # The goal is 40,000. Lower it with each twin that goes; a new way replaces the old one.
        # `deltacheck run` took 1,000: those whom it serves have no code to put a callback into.
        # Azure took 240 (TensorStore has no driver for it), branches in buckets 50, and reports,
        # repairs and imports there few. Orders and laws on a device took 320: without them each
        # save by the law brings all of a state from its GPU to the host.
        ("code-lines", 46_107),
    ],
)
def test_a_count_stays_within_its_limit(name: str, most: int, figures: dict[str, Figure]) -> None:
    assert number(figures[name]) <= most, figures[name]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("comments-python", 4.0, 100), ("comments-cpp", 10.0, 100), ("function-words", 0, 1.0)],
)
def test_a_share_stays_within_its_limit(
    name: str, least: float, most: float, figures: dict[str, Figure]
) -> None:
    match = re.search(r"([\d.]+) %", figures[name].value)
    assert match is not None
    assert least <= float(match[1]) <= most, figures[name].value


@pytest.mark.parametrize(
    ("name", "reasoned"), [("class-lines", LONG_CLASSES), ("class-attributes", WIDE_CLASSES)]
)
def test_large_classes_have_a_reason(
    name: str, reasoned: set[str], figures: dict[str, Figure]
) -> None:
    assert {place.text.split(":")[0] for place in figures[name].places} <= reasoned


def test_concepts_stay_within_their_limits() -> None:
    """Each is one more thing to learn, and permanent once it is released."""
    assert len(FEATURES) <= 7, FEATURES
    assert len(RULES) <= 7, RULES
    assert len(inspect.signature(Engine).parameters) <= 8
    commands = cast("dict[str, Any]", cast("Any", root_command).commands)
    assert len(commands) <= 20, list(commands)
    options = [
        parameter
        for command in commands.values()
        for parameter in command.params
        if parameter.param_type_name == "option"
    ]
    assert len(options) <= 110, len(options)


def number(figure: Figure) -> int:
    """Return the leading number of a figure's value."""
    match = re.match(r"\d+", figure.value)
    assert match is not None
    return int(match[0])
