"""The documents tell the truth: every Python block runs, every `deltacheck` command works, every
link leads somewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.programs import Programs
from tests.support.xla import UNOPTIMIZED

HERE = Path(__file__).resolve().parents[2]
WRITTEN_BY_MAKE = HERE / "docs" / "reference" / "python.md"  # `make docs`; not committed
PAGES = sorted({HERE / "README.md", *(HERE / "docs").rglob("*.md")} - {WRITTEN_BY_MAKE})
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BESIDE = {
    "docs/how-to/trainer.md": ("trl", "datasets", "peft"),
    "docs/how-to/frameworks.md": ("ray",),
}  # packages that .venv need not have; `make trl-test` runs the first page
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {UNOPTIMIZED}",
}
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


# Commands that follow each other run in one process: most of their time is its start.
RUN_COMMANDS = """
import json, sys
from deltacheck.cli import main
for words in json.loads(sys.argv[1]):
    if main(words):
        sys.exit(f"{words} has failed")
"""


def run_all(commands: list[list[str]]) -> str:
    """Return the statement of a program that runs commands."""
    arguments = f"[sys.executable, '-c', {RUN_COMMANDS!r}, {json.dumps(commands)!r}]"
    return f"subprocess.run({arguments}, check=True)"


def script(page: Path) -> str:
    """The page's blocks as one program: Python as it stands, commands through the shell's own
    words.
    """
    commands: list[list[str]] = []
    lines = ["import subprocess, sys, warnings; warnings.simplefilter('error')"]
    if named(page) in BESIDE:
        lines.append(
            "warnings.simplefilter('ignore', FutureWarning)"
        )  # these packages call what others of them are to remove
    if "ray" in BESIDE.get(named(page), ()):
        # Ray sets its own deprecated options.
        lines.append("warnings.simplefilter('ignore', DeprecationWarning)")
    for language, code in blocks(page):
        if language == "python":
            if commands:
                lines.append(run_all(commands))
                commands = []
            lines.append(code)
            continue
        for command in code.splitlines():
            command = command.split("    #")[0].strip()
            if command and not command.startswith(NOT_RUN):
                program, *arguments = shlex.split(command)
                assert program == "deltacheck", (
                    f"{named(page)} shows a command that no test can run: {command}"
                )
                commands.append(arguments)
    if commands:
        lines.append(run_all(commands))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def programs() -> Iterator[Callable[[str], Programs]]:
    """Return what runs programs with a framework, whose import takes longer than most of them."""
    servers: dict[str, Programs] = {}

    def server(framework: str) -> Programs:
        if framework not in servers or servers[framework].has_ended:
            servers[framework] = Programs(framework, os.environ | ENVIRONMENT)
        return servers[framework]

    yield server
    for made in servers.values():
        made.close()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=named)
@pytest.mark.timeout(600)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path,
    tmp_path: Path,
    programs: Callable[[str], Programs],
    request: pytest.FixtureRequest,
) -> None:
    if missing := [
        package
        for package in BESIDE.get(named(page), ())
        if importlib.util.find_spec(package) is None
    ]:
        pytest.skip(f"{missing[0]} is not installed")
    program, environment = script(page), os.environ | ENVIRONMENT
    if "s3://my-bucket/" in program:
        server = request.getfixturevalue("s3_server")
        server.make_bucket("my-bucket")
        environment |= server.environment()
    imported = re.search(r"^(?:import|from) (torch|jax)\b", program, re.MULTILINE)
    done = programs(imported[1] if imported else "sys").run(program, tmp_path, environment, 500)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        file = (page.parent / target).resolve()
        assert file.exists() or file == WRITTEN_BY_MAKE, f"{named(page)} links to {target}"


def test_every_target_that_the_readme_names_is_in_the_makefile() -> None:
    named = re.findall(r"^make ((?:[a-z-]+ ?)+)", (HERE / "README.md").read_text(), re.MULTILINE)
    targets = [target for names in named for target in names.split()]
    assert targets
    makefile = (HERE / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^(?:[a-z-]+ )*{target}(?: [a-z-]+)*:", makefile, re.MULTILINE), target


def test_the_site_has_every_page_once() -> None:
    navigation = (HERE / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"- (?:[^:\n]+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = {path.relative_to(HERE / "docs").as_posix() for path in (HERE / "docs").rglob("*.md")}
    measurements = {page for page in pages if page.startswith("lab/")}
    assert sorted(listed) == sorted(pages - measurements | {"reference/python.md"})
    assert len(listed) <= 30, "merge pages: nobody finds a task among more"


def test_the_search_leaves_out_the_measurements() -> None:
    for page in (HERE / "docs" / "lab").glob("*.md"):
        assert page.read_text().startswith("---\nsearch:\n  exclude: true\n---\n"), page


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.lower()) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_anchor_exists(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        if file.suffix == ".md" and file != WRITTEN_BY_MAKE:
            assert anchor in anchors_of(file), f"{named(page)} links to {target}#{anchor}"
