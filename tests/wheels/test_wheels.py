"""The decisions behind `make wheel` and `make wheel-test`, and what lets one wheel serve every
processor.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest

from deltacheck.cli.view.server import page_files
from tests.support.paths import REPOSITORY
from tests.wheels import smoke
from tests.wheels.build import AARCH64, Build, chosen, module_problem, size_problem, wants_cuda
from tests.wheels.check import accepts, difference


@pytest.mark.parametrize(
    ("wishes", "running", "present", "expected"),
    [
        ([], "3.11", ["3.11", "3.12", "3.13"], ["3.11", "3.12"]),
        ([], "3.13", ["3.13"], ["3.13"]),
        ([], "3.11", [], ["3.11"]),
        (["3.13"], "3.11", ["3.11", "3.12", "3.13"], ["3.13"]),
        (["3.13", "3.12", "3.11"], "3.11", ["3.11"], ["3.11", "3.12"]),
    ],
)
def test_one_wheel_of_the_stable_abi_is_built(
    wishes: list[str], running: str, present: list[str], expected: list[str]
) -> None:
    assert chosen(wishes, running, present) == expected


@pytest.mark.parametrize(("wish", "nvcc"), [("AUTO", True), ("on", True), ("auto", False)])
def test_cuda_follows_nvcc(wish: str, nvcc: bool) -> None:
    assert wants_cuda(wish, has_nvcc=nvcc) is nvcc
    assert not wants_cuda("off", has_nvcc=nvcc)


@pytest.mark.parametrize(("wish", "text"), [("ON", "no nvcc"), ("maybe", "must be ON")])
def test_a_wish_for_cuda_that_cannot_be_met_is_refused(wish: str, text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        wants_cuda(wish, has_nvcc=False)


def test_a_wheel_beyond_its_limit_is_refused_in_one_sentence() -> None:
    assert size_problem("a.whl", 15 << 20, with_cuda=False) == ""
    assert "15 MiB" in size_problem("a.whl", (15 << 20) + 1, with_cuda=False)
    assert size_problem("a.whl", 40 << 20, with_cuda=True) == ""
    assert "40 MiB" in size_problem("a.whl", (40 << 20) + 1, with_cuda=True)


@pytest.mark.parametrize(
    ("tag", "suffix"),
    [
        ("cp311-cp311-manylinux_2_34_x86_64", "cpython-311-x86_64-linux-gnu"),
        ("cp311-cp311-manylinux_2_24_aarch64", "cpython-311-aarch64-linux-gnu"),
        ("cp312-abi3-manylinux_2_24_aarch64", "abi3"),
    ],
)
def test_a_wheel_whose_module_has_the_name_of_another_machine_is_refused(
    tag: str, suffix: str
) -> None:
    wheel = f"deltacheck-0.1.0-{tag}.whl"
    assert module_problem(wheel, ["a", f"deltacheck/_native.{suffix}.so"]) == ""
    assert suffix in module_problem(wheel, ["deltacheck/_native.cpython-311-riscv64-linux-gnu.so"])


@pytest.mark.parametrize(
    ("tag", "version", "taken"),
    [
        ("cp311-cp311", "3.11", True),
        ("cp311-cp311", "3.12", False),
        ("cp312-abi3", "3.11", False),
        ("cp312-abi3", "3.12", True),
        ("cp312-abi3", "3.13", True),
    ],
)
def test_a_wheel_is_tried_under_each_python_that_takes_it(
    tag: str, version: str, taken: bool
) -> None:
    wheel = f"deltacheck-0.1.0-{tag}-manylinux_2_34_x86_64.whl"
    assert accepts(wheel, version, "x86_64") is taken
    assert not accepts(wheel, version, "aarch64")


@pytest.mark.parametrize(
    ("version", "tag"), [("3.11", "cp311-cp311"), ("3.12", "cp312-abi3"), ("3.13", "cp312-abi3")]
)
def test_a_wheel_for_another_processor_has_its_tag_compiler_and_suffix(
    version: str, tag: str, tmp_path: Path
) -> None:
    assert (Build(version).options(), Build(version).environment()) == ([], {})
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\necho "$@"\n')
    zig.chmod(0o755)
    build = Build(version, zig)
    build.write_compilers()
    assert build.options()[0] == f"wheel.tags={tag}-linux_aarch64"
    suffix = f".cpython-{version.replace('.', '')}-aarch64-linux-gnu.so"
    assert build.environment()["SETUPTOOLS_EXT_SUFFIX"] == suffix
    for name, language in (("CC", "cc"), ("CXX", "c++")):
        command = [build.environment()[name], "-c", "a b"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said == f"{language} -target {AARCH64} -c a b\n"
    assert build.settings()["DELTACHECK_CUDA"] == "OFF"


def test_two_builds_are_compared_file_by_file() -> None:
    editable = {"digests": {"torch": {"s0/index": "a", "s1/index": "b"}, "jax": {"s0": "c"}}}
    assert difference({"digests": {"jax": {"s0": "c"}}}, editable) == ""
    assert "s0 differs" in difference({"digests": {"jax": {"s0": "d"}}}, editable)
    assert "s1/index differs" in difference({"digests": {"torch": {"s0/index": "a"}}}, editable)
    assert "no file was compared" in difference({"digests": {}}, editable)


def test_the_smoke_suite_writes_the_same_files_twice_and_sees_a_changed_leaf(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        smoke.run("torch", tmp_path / name, 1)
    digests = smoke.digests(tmp_path / "a")
    assert digests == smoke.digests(tmp_path / "b")
    assert {file.partition("/")[0] for file in digests} == {"s0000000000", "s0000000001"}
    *_, (_, state) = smoke.states(1)
    smoke.compare(state, np.asarray)
    state["low"].view(np.uint8)[7, 7] ^= 1
    with pytest.raises(SystemExit, match="leaf low of step 1 differs"):
        smoke.compare(state, np.asarray)


def test_the_smoke_suite_gets_every_file_of_the_page_and_misses_one_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke.run("torch", tmp_path, 1)
    assert smoke.look(tmp_path, 1) == len(page_files())
    with pytest.raises(SystemExit, match="steps"):
        smoke.look(tmp_path, 2)
    without = (
        "import deltacheck.cli.view.server as s; every = s.page_files;"
        " s.page_files = lambda: {n: f for n, f in every().items() if n != 'draw.mjs'}"
    )
    start = "from deltacheck.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    monkeypatch.setattr(smoke, "PROGRAM", [sys.executable, "-c", f"{without}; {start}"])
    with pytest.raises(HTTPError, match="404"):
        smoke.look(tmp_path, 1)


def kernel_objects() -> list[Path]:
    """Compiled kernels of the newest build, which `make build` leaves in the build folder."""
    return sorted(REPOSITORY.glob("build/cp*/CMakeFiles/deltacheck_kKernels*.dir/**/kernels.cc.o"))


@pytest.mark.skipif(
    not kernel_objects() or shutil.which("nm") is None, reason="needs a build folder and nm"
)
def test_only_the_chosen_kernels_have_instructions_that_a_processor_may_lack() -> None:
    """A shared inline function, compiled for AVX2, could serve the whole module after linking."""
    for file in kernel_objects():
        done = subprocess.run(
            ["nm", "--defined-only", "--extern-only", "--demangle", str(file)],
            capture_output=True,
            text=True,
            check=True,
        )
        shared = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
        table = file.parts[-4].partition("_")[2].removesuffix(".dir")
        assert shared == [f"deltacheck::{table}"], file
