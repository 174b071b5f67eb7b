"""The documents tell the truth: every Python block runs, every `deltacheck` command works, every
link leads somewhere.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[2]
PAGES = sorted([HERE / "README.md", *(HERE / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BESIDE = {
    "docs/how-to/trl.md": ("trl", "datasets", "peft")
}  # packages that .venv need not have; `make trl-test` runs the page
NOT_RUN = (
    "make ",
    "pip install ",
    "torchrun ",
)  # building an environment is what the Makefile's own run shows


def blocks(page: Path) -> list[tuple[str, str]]:
    return [
        (language, code)
        for language, code in BLOCK.findall(page.read_text())
        if language in ("python", "sh")
    ]


def named(page: Path) -> str:
    return str(page.relative_to(HERE))


def script(page: Path) -> str:
    """The page's blocks as one program: Python as it stands, commands through the shell's own
    words.
    """
    lines = ["import subprocess, sys, warnings; warnings.simplefilter('error')"]
    if named(page) in BESIDE:
        lines.append(
            "warnings.simplefilter('ignore', FutureWarning)"
        )  # these packages call what others of them are to remove
    for language, code in blocks(page):
        if language == "python":
            lines.append(code)
            continue
        for command in code.splitlines():
            command = command.split("    #")[0].strip()
            if command and not command.startswith(NOT_RUN):
                program, *arguments = shlex.split(command)
                assert program == "deltacheck", (
                    f"{named(page)} shows a command that no test can run: {command}"
                )
                lines.append(
                    f"subprocess.run([sys.executable, '-m', 'deltacheck.cli', *{arguments!r}],"
                    " check=True)"
                )
    return "\n".join(lines)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=named)
@pytest.mark.timeout(240)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if missing := [
        package
        for package in BESIDE.get(named(page), ())
        if importlib.util.find_spec(package) is None
    ]:
        pytest.skip(f"{missing[0]} is not installed")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    if "s3://my-bucket/" in script(page):
        server = request.getfixturevalue("s3_server")
        server.make_bucket("my-bucket")
        environment |= server.environment()
    done = subprocess.run(
        [sys.executable, "-c", script(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{named(page)} links to {target}"


def test_every_target_that_the_readme_names_is_in_the_makefile() -> None:
    named = re.findall(r"^make ((?:[a-z-]+ ?)+)", (HERE / "README.md").read_text(), re.MULTILINE)
    targets = [target for names in named for target in names.split()]
    assert targets
    makefile = (HERE / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^(?:[a-z-]+ )*{target}(?: [a-z-]+)*:", makefile, re.MULTILINE), target


def reference() -> ModuleType:
    """The script that writes the Python reference."""
    spec = importlib.util.spec_from_file_location(
        "reference", HERE / "docs" / "reference" / "generate.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["reference"] = importlib.util.module_from_spec(
        spec
    )  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_python_reference_is_what_the_docstrings_say() -> None:
    written = (HERE / "docs" / "reference" / "python.md").read_text()
    assert written == reference().page(), "run `make docs` and commit the page"


def test_every_how_to_of_the_reference_belongs_to_a_name_in_it() -> None:
    script = reference()
    sources = script.Sources(HERE)
    names = {
        f"{module}.{name}" for module in script.MODULES for name in sources.public(module)
    } | set(script.MODULES)
    assert not script.HOW_TO.keys() - names


PLANTED = {
    "__init__.py": (
        '''
        """A package."""

        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from planted.inner import Bare, Record, Tool, bare, made

        __all__ = ["Bare", "Record", "Tool", "bare", "gone", "made"]
        '''
    ),
    "inner.py": (
        '''
        class Base:
            """Holds docstrings for those who override."""

            def inherited(self): """Told by the base."""
            def unsaid(self): ...


        class Tool(Base):
            """Does it."""

            def __init__(self, a: int, *, b: str = "x"): ...
            def inherited(self): ...
            def silent(self): ...
            def told(self): """Said."""
            def _private(self): ...

            @property
            def size(self): ...


        class Bare: ...


        class Record:
            """One of them."""

            count: int
            name: str = "none"


        def bare(): ...


        ONE = 1


        def made(a, /, b=ONE, *rest, c, **more) -> int:
            """Make | it. And more."""
        '''
    ),
}


def test_a_public_name_without_a_docstring_is_named(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    for name, text in PLANTED.items():
        (tmp_path / "planted" / name).write_text(textwrap.dedent(text))
    script = reference()
    with pytest.raises(script.Undocumented) as raised:
        script.page(tmp_path, ("planted",))
    named = {line.split()[0] for line in str(raised.value).splitlines()}
    assert named == {
        "planted." + name
        for name in ("Bare", "Tool.silent", "Tool.size", "Tool.unsaid", "bare", "gone")
    }


def test_the_reference_shows_signatures_as_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        textwrap.dedent(PLANTED["inner.py"])
        .replace(": ...", ': """Said."""')
        .replace("class Bare:", "class Bare(Exception):")
    )
    (tmp_path / "planted.py").write_text(
        '"""A module."""\n' + (tmp_path / "planted.py").read_text()
    )
    page = reference().page(tmp_path, ("planted",))
    for shown in (
        "Tool(a: int, *, b: str = 'x')",
        "Tool.told()",
        "Tool.size\n",
        "Record(count: int, name: str = 'none')",
        "made(a, /, b=1, *rest, c, **more) -> int",
        "| [`made`](#made) | Make \\| it. |",
    ):
        assert shown in page
    assert "_private" not in page
