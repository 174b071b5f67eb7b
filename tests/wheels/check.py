"""Try wheels in bare environments: `python -m tests.wheels.check FOLDER`.

Each wheel is installed into a new virtual environment of every Python here that accepts it. There,
PATH has no compiler, and ``smoke.py`` runs. Its checkpoints must have the bytes that the running
Python, with the editable build, writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tests.gpu_kit.build import REPOSITORY, find_python, pip_of
from tests.wheels.build import RUNNING, available

SMOKE = Path(__file__).with_name("smoke.py")


def main() -> None:
    """Check every wheel of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pythons", default="", help="versions (default: all that are here)")
    options = parser.parse_args()
    wheels = sorted(options.folder.resolve().glob("deltacheck-*.whl"))
    if not wheels:
        sys.exit(f"{options.folder} has no wheel: run `make wheel`")
    versions = options.pythons.split() or available()
    with tempfile.TemporaryDirectory(prefix="deltacheck-wheels-") as name:
        work = Path(name)
        editable = smoke(sys.executable, work, os.environ, [])
        for wheel in wheels:
            accepting = [version for version in versions if accepts(wheel.name, version)]
            print(f"{wheel.name}: for Python {' and '.join(accepting) or '(none is here)'}")
            for version in accepting:
                report = try_wheel(wheel, version, work)
                if problem := difference(report, editable):
                    sys.exit(f"{wheel.name} under Python {version}: {problem}")
                count = sum(len(digests) for digests in report["digests"].values())
                print(f"Python {report['python']}: {count} files as the editable build writes them")


def accepts(wheel: str, version: str, machine: str = platform.machine()) -> bool:
    """Return whether a Python on a machine with such processors takes a wheel of this name."""
    tag, abi, system = wheel.removesuffix(".whl").split("-")[2:5]
    if not system.endswith(machine):
        return False
    oldest = (int(tag[2]), int(tag[3:]))
    python = tuple(map(int, version.split(".")))
    return python >= oldest if abi == "abi3" else python == oldest


def difference(report: Mapping[str, Any], editable: Mapping[str, Any]) -> str:
    """Return one sentence on the first file that two builds write differently; empty: none."""
    shared = report["digests"].keys() & editable["digests"].keys()
    if not shared:
        return "no framework is installed in both environments, so no file was compared"
    for name in sorted(shared):
        digests, expected = report["digests"][name], editable["digests"][name]
        for file in sorted(digests.keys() | expected.keys()):
            if digests.get(file) != expected.get(file):
                return f"{name}: {file} differs from the editable build's"
    return ""


def try_wheel(wheel: Path, version: str, work: Path) -> dict[str, Any]:
    """Install a wheel into a new environment and return the report of its smoke suite.

    For the Python that runs this program, torch and JAX are those of its own environment. For
    others, JAX is installed; torch is left out, because its build for Linux brings CUDA.
    """
    folder = work / f"venv-{version}"
    pip = pip_of(find_python(version), folder)
    has_frameworks = version == RUNNING
    command = [*pip, "install", "--quiet", "--constraint", str(REPOSITORY / "constraints.txt")]
    subprocess.run([*command, str(wheel) if has_frameworks else f"{wheel}[jax]"], check=True)
    python = str(folder / "bin/python")
    if has_frameworks:
        [site] = folder.glob("lib/python*/site-packages")
        (site / "frameworks.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {"PATH": str(folder / "bin"), "HOME": str(work), "LANG": "C.UTF-8"}
    report = smoke(python, work, environment, ["torch", "jax"] if has_frameworks else ["jax"])
    if not Path(report["package"]).is_relative_to(folder):
        sys.exit(f"the smoke suite has imported {report['package']}, not the wheel")
    shutil.rmtree(folder)
    return report


def smoke(
    python: str, work: Path, environment: Mapping[str, str], required: Collection[str]
) -> dict[str, Any]:
    """Run the smoke suite under a Python and return its report."""
    out = work / "report.json"
    command = [python, str(SMOKE), "--out", str(out), "--require", *required]
    done = subprocess.run(
        command, cwd=work, env=dict(environment), capture_output=True, text=True, check=False
    )
    print(re.sub("^", "  ", done.stdout.strip(), flags=re.MULTILINE), flush=True)
    if done.returncode:
        sys.exit(f"{python}: {done.stderr.strip()}")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


if __name__ == "__main__":
    main()
