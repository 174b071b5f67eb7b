"""The table of environments, and what `make versions` makes of it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.paths import REPOSITORY
from tests.versions import run
from tests.versions.run import Environment, Result, choose, constraints, markdown, normalized

SUITES, ENVIRONMENTS = run.read_table(run.TABLE.read_text())
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
OLDEST = [row for row in ENVIRONMENTS if row.name.startswith("oldest")]


def lower_bounds(extras: tuple[str, ...]) -> dict[str, Version]:
    """Return the lower bounds that pyproject.toml states for the package with extras."""
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    bounds = {}
    for requirement in map(Requirement, texts):
        [bound] = [part.version for part in requirement.specifier if part.operator == ">="]
        bounds[normalized(requirement.name)] = Version(bound)
    return bounds


@pytest.mark.parametrize("environment", OLDEST, ids=lambda row: row.name)
def test_the_oldest_environments_have_the_lower_bounds_of_the_project(
    environment: Environment,
) -> None:
    pins = {normalized(name): Version(pin) for name, pin in environment.pins.items()}
    for name, bound in lower_bounds(environment.extras).items():
        # The first release that a bound admits may have another number: 3.4 is met by 3.4.1.
        assert pins[name] >= bound, name
        assert pins[name].release[: len(bound.release)] == bound.release, name


def test_each_framework_is_tried_at_both_ends() -> None:
    assert {extra for row in OLDEST for extra in row.extras} == {"jax", "torch"}
    newest = [row for row in ENVIRONMENTS if row.name.startswith("newest")]
    assert {extra for row in newest for extra in row.extras} == {"jax", "torch"}
    bounds = lower_bounds(("jax", "torch"))
    for row in newest:
        for name in {"jax", "torch", "numpy"} & row.pins.keys():
            assert Version(row.pins[name]) > bounds[name]


def test_the_oldest_python_is_that_of_the_project() -> None:
    assert PROJECT["requires-python"] == f">={min(row.python for row in ENVIRONMENTS)}"
    classified = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "3." in text}
    assert classified <= {row.python for row in ENVIRONMENTS}


def test_ci_takes_another_python_and_no_torch() -> None:
    taken = choose(ENVIRONMENTS, [], [], ci=True)
    assert taken
    assert all(row.python != "3.11" and "torch" not in row.extras for row in taken)


def test_all_suites_exist_and_each_has_the_frameworks_that_it_needs() -> None:
    for name, files in SUITES.items():
        for file in files:
            assert (REPOSITORY / file).exists(), f"{name}: {file}"
    for row in ENVIRONMENTS:
        assert {"jax", "torch"} & set(row.suites) == set(row.extras)


@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_no_suite_imports_a_framework_that_its_environment_lacks(missing: str) -> None:
    suites = {suite for row in ENVIRONMENTS if missing not in row.extras for suite in row.suites}
    files = [file for suite in sorted(suites) for file in SUITES[suite]]
    code = f"""
import sys
import pytest

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)

sys.meta_path.insert(0, Missing)
sys.exit(pytest.main(["--collect-only", "-qq", "-n", "0", *{files!r}]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_pins_replace_those_of_the_constraints() -> None:
    pinned = "# comment\npip==26.3\nml_dtypes==0.6.0\njax==0.10.2\n"
    text = constraints({"ml-dtypes": "0.5.0", "jax": "0.8.0"}, pinned)
    assert text.splitlines() == ["pip==26.3", "ml-dtypes==0.5.0", "jax==0.8.0"]


def test_environments_are_chosen_by_name_python_and_ci() -> None:
    rows = [
        Environment("a", "3.11", (), (), {}),
        Environment("b", "3.12", (), (), {}, ci=True),
        Environment("c", "3.13", (), (), {}),
    ]
    assert [row.name for row in choose(rows, [], [], ci=False)] == ["a", "b", "c"]
    assert [row.name for row in choose(rows, ["c", "b"], [], ci=False)] == ["b", "c"]
    assert [row.name for row in choose(rows, [], ["3.11"], ci=False)] == ["a"]
    assert [row.name for row in choose(rows, [], [], ci=True)] == ["b"]
    with pytest.raises(SystemExit, match=r"no environment x; the table has a, b, c"):
        choose(rows, ["x"], [], ci=False)
    with pytest.raises(SystemExit, match="has all that was asked for"):
        choose(rows, ["a"], ["3.12"], ci=False)


def test_a_failed_test_and_a_failed_installation_fail_the_run_and_a_missing_python_does_not() -> (
    None
):
    passed = Result("a", {"python": "3.12.1", "numpy": "2.5.5"}, passed=3, seconds=2.0)
    missing = Result("b", problem="there is no python3.14", is_here=False)
    broken = Result("c", problem="not installed: status 1")
    failed = Result("d", passed=3, failed=1)
    states = [run.succeeded(result) for result in (passed, missing, broken, failed)]
    assert states == [True, True, False, False]
    table = markdown([passed, missing])
    assert "| a | 3.12.1 | 2.5.5 |  |  |  |  | 3 | 0 | 0 | 2 |" in table
    assert "there is no python3.14" in table


def test_a_changed_native_source_asks_for_a_new_wheel(tmp_path: Path) -> None:
    names = {path.name for path in run.native_sources()}
    assert {"CMakeLists.txt", "pyproject.toml", "kernels.cc"} <= names
    file = tmp_path / "a.cc"
    file.write_text("1")
    before = run.digest([file])
    file.write_text("2")
    assert run.digest([file]) != before
