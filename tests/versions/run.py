"""Run the core suites with other versions: `python -m tests.versions.run [FOLDER]`.

``environments.toml`` lists the environments. Each is made once in the folder, with a wheel that is
built once for each Python; Python sources are copied from the checkout before every run. The tests
run from a copy as well, because ``deltacheck`` of the checkout has no native module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu_kit.build import (
    REPOSITORY,
    build_wheel,
    find_python,
    pip_of,
)
from tests.wheels.build import STABLE
from tests.wheels.check import accepts

TABLE = Path(__file__).with_name("environments.toml")
# What the suites need beside the package and the extras of their environment.
TOOLS = (
    "flask",
    "flask-cors",
    "hypothesis",
    "matplotlib",
    "moto[s3]",
    "obstore",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "safetensors",
    "zarr",
)
# What tests import or read
COPIED = ("benchmarks", "docs", "examples", "tests", "pyproject.toml")
NATIVE = ("CMakeLists.txt", "pyproject.toml", "build-constraints.txt")
# For `.ci/run`: a quarter of the codec matrix, as in `make test`.
THINNED = ("-m", "not experiments and not matrix")
SHOWN = ("numpy", "tensorstore", "jax", "orbax-checkpoint", "torch")
VERSIONS = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {{"python": platform.python_version()}}
for name in {SHOWN!r}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A row of the table: a Python, the versions in it, and the tests that run there.

    ``extras`` are those of pyproject.toml. ``pins`` override constraints.txt; ``ci`` is true if
    `.ci/run` takes this environment.
    """

    name: str
    python: str
    extras: tuple[str, ...]
    suites: tuple[str, ...]
    pins: Mapping[str, str]
    ci: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The versions that one environment had, and its tests by outcome."""

    environment: str
    versions: Mapping[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""  # the reason if no test ran
    is_here: bool = True  # the Python of the environment


def main() -> int:
    """Run all chosen environments, print a table, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=REPOSITORY / "build/versions")
    parser.add_argument("--environments", default="", help="names (default: all)")
    parser.add_argument("--pythons", default="", help="of these versions only")
    parser.add_argument("--ci", action="store_true", help="those of `.ci/run` only")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels to test as they are")
    parser.add_argument("--pytest", default="", help="further options of pytest, in one text")
    options = parser.parse_args()
    suites, environments = read_table(TABLE.read_text())
    wanted = choose(
        environments, options.environments.split(), options.pythons.split(), ci=options.ci
    )
    folder = options.folder.resolve()
    source = copy_tests(folder)
    results = []
    for environment in wanted:
        print(f"=== {environment.name}: Python {environment.python}", flush=True)
        files = [file for suite in environment.suites for file in suites[suite]]
        result = run(environment, files, folder, source, options)
        results.append(result)
        print(f"=== {environment.name}: {outcome(result)}", flush=True)
    report = [asdict(result) for result in results]
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(results))
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(not all(succeeded(result) for result in results))


def read_table(text: str) -> tuple[dict[str, list[str]], list[Environment]]:
    """Return the test files of each suite, and all environments in order."""
    document = tomllib.loads(text)
    rows = [
        Environment(
            **row | {"extras": tuple(row["extras"]), "suites": tuple(row["suites"])},
        )
        for row in document["environments"]
    ]
    return document["suites"], rows


def choose(
    environments: Sequence[Environment], names: list[str], pythons: list[str], *, ci: bool
) -> list[Environment]:
    """Return the environments of these names, Pythons and, with ``ci``, of `.ci/run`.

    Raises:
        SystemExit: A name is unknown, or no environment is left.
    """
    known = [environment.name for environment in environments]
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"there is no environment {unknown[0]}; the table has {', '.join(known)}")
    wanted = [
        environment
        for environment in environments
        if (not names or environment.name in names)
        and (not pythons or environment.python in pythons)
        and (not ci or environment.ci)
    ]
    return wanted or sys.exit("no environment of the table has all that was asked for")


# --- an environment -------------------------------------------------------------------------------


def run(
    environment: Environment,
    files: list[str],
    folder: Path,
    source: Path,
    options: argparse.Namespace,
) -> Result:
    """Make an environment and run test files in it."""
    try:
        interpreter = find_python(environment.python)
    except SystemExit as missing:
        return Result(environment.name, problem=str(missing), is_here=False)
    start = time.monotonic()
    home = folder / environment.name
    pip = pip_of(interpreter, home)
    given: Path | None = options.wheels
    try:
        if given is None:
            wheel = own_wheel(pip, environment.python, folder / "wheels")
        else:
            wheel = given_wheel(given, environment.python)
        install(environment, pip, wheel, home)
    except subprocess.CalledProcessError as error:
        return Result(environment.name, problem=f"not installed: status {error.returncode}")
    if given is None:
        copy_package(home)
    python = str(home / "bin/python")
    done = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True)
    versions = json.loads(done.stdout)
    print(f"installed in {time.monotonic() - start:.0f} s: {shown(versions)}", flush=True)
    arguments = [*files, *(THINNED if options.ci else ()), *shlex.split(options.pytest)]
    return run_tests(environment, versions, arguments, home, source)


def constraints(pins: Mapping[str, str], pinned: str) -> str:
    """Return constraints.txt with the pins of an environment in place of its own."""
    names = {normalized(name) for name in pins}
    lines = [
        line
        for line in pinned.splitlines()
        if line and not line.startswith("#") and normalized(line.partition("==")[0]) not in names
    ]
    return "\n".join([*lines, *(f"{name}=={version}" for name, version in pins.items())]) + "\n"


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def install(environment: Environment, pip: list[str], wheel: Path, home: Path) -> None:
    """Install a wheel with its extras and the tools of the suites, unless nothing has changed.

    Raises:
        subprocess.CalledProcessError: pip finds no versions that fit together.
    """
    pins = constraints(environment.pins, (REPOSITORY / "constraints.txt").read_text())
    package = f"{wheel}[{','.join(environment.extras)}]" if environment.extras else str(wheel)
    stamp, state = home / ".installed", f"{package} {digest([wheel])}\n{' '.join(TOOLS)}\n{pins}"
    if stamp.exists() and stamp.read_text() == state:
        return
    stamp.unlink(missing_ok=True)
    file = home / "constraints.txt"
    file.write_text(pins)
    command = [*pip, "install", "--quiet", "--constraint", str(file)]
    # An older torch of another build may be on pip's own list of places, hence the exact pin.
    exact = [f"{name}=={version}" for name, version in environment.pins.items()]
    tools = (*TOOLS, "optax") if "jax" in environment.extras else TOOLS  # optax brings JAX
    subprocess.run([*command, *exact, package, *tools], check=True)
    # The version of a wheel does not tell its content.
    subprocess.run(
        [*command, "--force-reinstall", "--no-deps", str(wheel)], check=True, stdout=sys.stderr
    )
    stamp.write_text(state)


def copy_package(home: Path) -> None:
    """Replace the Python sources of an installed package by those of the checkout."""
    [package] = home.glob("lib/python*/site-packages/deltacheck")
    for file in package.rglob("*.py"):
        file.unlink()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(REPOSITORY / "deltacheck", package, dirs_exist_ok=True, ignore=ignored)


def copy_tests(folder: Path) -> Path:
    """Return a copy of the tests without the package."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
        else:
            shutil.copy(REPOSITORY / name, source)
    return source


# --- wheels ---------------------------------------------------------------------------------------


def given_wheel(folder: Path, version: str) -> Path:
    """Return the wheel of a folder that a Python takes.

    Raises:
        SystemExit: There is none.
    """
    for wheel in sorted(folder.resolve().glob("deltacheck-*.whl")):
        if accepts(wheel.name, version):
            return wheel
    sys.exit(f"{folder} has no wheel for Python {version}")


def own_wheel(pip: list[str], version: str, folder: Path) -> Path:
    """Return the wheel of the checkout for a Python, built if its native sources have changed."""
    python = tuple(map(int, version.split(".")))
    home = folder / ("abi3" if python >= STABLE else version)
    stamp, state = home / ".built", digest(native_sources())
    if not (stamp.exists() and stamp.read_text() == state):
        shutil.rmtree(home, ignore_errors=True)
        start = time.monotonic()
        build_wheel(pip, REPOSITORY, home, {"DELTACHECK_CUDA": "OFF"})
        print(f"built for Python {version} in {time.monotonic() - start:.0f} s", flush=True)
        stamp.write_text(state)
    return given_wheel(home, version)


def native_sources() -> list[Path]:
    """Return all files that decide the native module and the metadata of a wheel."""
    encoder = sorted(path for path in (REPOSITORY / "xla_ffi").rglob("*") if path.is_file())
    return [*(REPOSITORY / name for name in NATIVE), *encoder]


def digest(files: Sequence[Path]) -> str:
    """Return one digest of the names and contents of files."""
    hasher = hashlib.sha256()
    for file in files:
        hasher.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return hasher.hexdigest()


# --- tests ----------------------------------------------------------------------------------------


def run_tests(
    environment: Environment,
    versions: Mapping[str, str],
    arguments: list[str],
    home: Path,
    source: Path,
) -> Result:
    """Run pytest in an environment, as `make test` does, and count."""
    report = home / "tests.xml"
    report.unlink(missing_ok=True)
    command = [str(home / "bin/pytest"), "-q", "-n", "2", "--dist", "loadfile"]
    command += ["-m", "not experiments and not tools and not matrix", f"--junitxml={report}"]
    start = time.monotonic()
    status = subprocess.run(
        [*command, *arguments], cwd=source, env=dict(variables(home)), check=False
    ).returncode
    seconds = time.monotonic() - start
    if not report.exists():
        return Result(
            environment.name, versions, seconds=seconds, problem=f"pytest ended with {status}"
        )
    total = ElementTree.parse(report).getroot().find("testsuite")
    assert total is not None, report
    count = {name: int(total.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    problem = "" if bool(status) == bool(failed) else f"pytest ended with {status}"
    return Result(
        environment.name, versions, passed, failed, count["skipped"], seconds, problem=problem
    )


def variables(home: Path) -> Iterator[tuple[str, str]]:
    """Yield this process's variables, with the environment's programs first on PATH."""
    for name, value in os.environ.items():
        if name not in ("PYTHONPATH", "PATH", "VIRTUAL_ENV"):
            yield name, value
    yield "PATH", f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"


# --- the table of results -------------------------------------------------------------------------


def succeeded(result: Result) -> bool:
    """Return whether all tests passed, or the Python is not on this machine."""
    return not result.is_here or (not result.failed and not result.problem)


def outcome(result: Result) -> str:
    """Return one line on a result."""
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
    return result.problem or f"{counts} in {result.seconds:.0f} s"


def shown(versions: Mapping[str, str]) -> str:
    """Return versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def markdown(results: Sequence[Result]) -> str:
    """Return all results as a table, as in docs/lab/benchmarks.md."""
    columns = ("environment", "python", *SHOWN, "passed", "failed", "skipped", "seconds")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for result in results:
        versions = [result.versions.get(name, "") for name in ("python", *SHOWN)]
        counts = [str(count) for count in (result.passed, result.failed, result.skipped)]
        row = [result.environment, *versions, *counts, f"{result.seconds:.0f}"]
        if result.problem:
            row[-1] = result.problem
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
