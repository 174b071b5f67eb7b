"""The models of the commit protocol keep up with the code, and hold.

``make model-check`` explores them at all sizes.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.suites import model_check, planted

FILES = sorted(model_check.MODELS.glob("*.pml"))
needs_spin = pytest.mark.skipif(bool(model_check.missing_tools()), reason="needs spin and gcc")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_function_that_a_transition_follows_exists(file: Path) -> None:
    names = re.findall(r"code: (deltacheck\.[\w.]+)", file.read_text())
    assert len(names) >= 10
    for name in names:
        assert resolve(name) is not None, f"{file.name} names {name}, which is not there any more"


def resolve(name: str) -> object:
    """Return the module, class or function of a dotted name; ``None`` if there is none."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            value: object = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            value = getattr(value, word, None)
        return value
    return None


def test_a_name_that_is_not_in_the_code_is_noticed() -> None:
    assert resolve("deltacheck.store.commit.commit") is not None
    assert resolve("deltacheck.store.commit.committed") is None


def test_every_planted_bug_is_in_a_model_or_left_out_for_a_reason() -> None:
    bugs = {bug.name for bug in planted.BUGS}
    assert model_check.PLANTED.keys() | model_check.OUTSIDE.keys() == bugs
    assert not model_check.PLANTED.keys() & model_check.OUTSIDE.keys()


@pytest.mark.parametrize("name", [*model_check.PLANTED, *model_check.OWN])
def test_every_bug_of_a_model_is_planted_there(name: str) -> None:
    model = (model_check.PLANTED | model_check.OWN)[name].model
    define = name.upper().replace("-", "_")
    assert re.search(rf"\b{define}\b", (model_check.MODELS / f"{model}.pml").read_text())


@needs_spin
def test_a_model_holds_and_one_with_a_bug_does_not() -> None:
    configuration = model_check.Configuration(
        "small", "commit", ("LOCKS", "WRITERS=2", "SAVES=2", "CRASHES=1")
    )
    sound = model_check.search(configuration)
    assert not sound.error
    assert sound.states > 1000
    broken = model_check.search(configuration, "directories-not-synced", shortest=True)
    assert "assertion violated" in broken.error
    assert broken.trail
