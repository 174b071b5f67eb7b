"""The API reference: complete, true to the sources, and with every name that a release had."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import REPOSITORY

pytest.importorskip("griffe")

# One public name with its parameters per line, as in release 0.1. Lines may be added. A line that
# changes or disappears breaks programs of users.
RELEASED = Path(__file__).with_name("public_names.txt")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that writes the page."""
    file = REPOSITORY / "docs" / "reference" / "generate.py"
    spec = importlib.util.spec_from_file_location("reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["reference"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # its dataclasses look their module up in sys.modules
    return module


def test_every_released_name_is_there_with_its_parameters(reference: ModuleType) -> None:
    current = set(reference.signatures(reference.Api()).values())
    changed = [line for line in RELEASED.read_text().splitlines() if line not in current]
    assert not changed


def test_every_public_name_documents_its_parameters_and_its_result(reference: ModuleType) -> None:
    assert reference.problems(reference.Api()) == []


def test_every_how_to_belongs_to_a_public_name(reference: ModuleType) -> None:
    api = reference.Api()
    names = {f"{module}.{name}" for module in api.modules for name in api.names(module)}
    assert not reference.HOW_TO.keys() - names - set(api.modules)


PACKAGE = {
    "__init__.py": (
        '''
        """A package."""

        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from planted.inner import Bare, Record, Tool, bare, build

        __all__ = ["Bare", "Record", "Tool", "bare", "build"]
        '''
    ),
    "inner.py": (
        '''
        from dataclasses import dataclass


        class Base:
            """Holds docstrings for those who override."""

            def inherited(self):
                """Do what the base does."""
            def silent_too(self): ...


        class Tool(Base):
            """Work.

            Args:
                a: A number.
            """

            def __init__(self, a: int, *, b: str = "x"): ...
            def inherited(self): ...
            def silent(self): ...
            def _private(self): ...

            @property
            def size(self): ...


        class Bare: ...


        @dataclass
        class Record:
            """A record.

            Attributes:
                count: How many.
                name: Which.
            """

            count: int
            name: str = "none"


        def bare(): ...


        def build(a, /, b=1, *rest, c, **more) -> int:
            """Build | it. And more.

            Args:
                a: First.
                d: Not there.
            """
        '''
    ),
}


@pytest.fixture
def planted(reference: ModuleType, tmp_path: Path) -> object:
    """The names of a small package with mistakes."""
    (tmp_path / "planted").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "planted" / name).write_text(textwrap.dedent(text))
    return reference.Api(tmp_path, ("planted",))


def test_what_a_docstring_lacks_is_named(reference: ModuleType, planted: object) -> None:
    assert set(reference.problems(planted)) == {
        "planted.Bare has no docstring",
        "planted.Tool does not document b",
        "planted.Tool.silent has no docstring",
        "planted.Tool.silent_too has no docstring",
        "planted.Tool.size has no docstring",
        "planted.bare has no docstring",
        "planted.build does not document b, rest, c, more",
        "planted.build documents d, which it does not take",
        "planted.build does not say what it returns",
    }


def test_a_name_that_is_exported_but_not_defined_is_an_error(
    reference: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "planted.py").write_text('"""A module."""\n__all__ = ["gone"]\n')
    with pytest.raises(LookupError, match=r"planted\.gone is exported, but not defined"):
        reference.problems(reference.Api(tmp_path, ("planted",)))


def test_the_page_shows_signatures_as_they_are_called(
    reference: ModuleType, planted: object
) -> None:
    page = reference.page(planted)
    for shown in (
        "Tool(a: int, *, b: str = 'x')",
        "Tool.inherited()",
        "Tool.size\n",
        "Record(count: int, name: str = 'none')",
        "build(a, /, b=1, *rest, c, **more) -> int",
        "| [`build`](#build) | Build \\| it. |",
        "**Args**\n\n- `a`: First.",
        "- `name`: Which.",
    ):
        assert shown in page
    assert "_private" not in page
