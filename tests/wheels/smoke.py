"""Smoke suite of an installed deltacheck: `python smoke.py [--require torch] [--out REPORT.json]`.

It needs the installed package alone, and imports nothing of the checkout. torch and JAX are tried
where they are installed. The report has the digests of checkpoints that every build must write
alike.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin
from urllib.request import urlopen

import ml_dtypes
import numpy as np

FRAMEWORKS = ("torch", "jax")
STEPS, KILLED_IN, LAST = 4, 4, 6
PROGRAM = [sys.executable, "-m", "deltacheck"]
TYPES = {"css": "text/css", "mjs": "text/javascript", "svg": "image/svg+xml"}
Arrays = dict[str, Any]


def main() -> None:
    """Run all checks; exit with status 1 and one sentence at the first that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--require", nargs="*", default=[], choices=FRAMEWORKS)
    parser.add_argument("--out", type=Path, help="JSON: versions, checks and digests")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, root, last = options.child
        run(name, Path(root), int(last))
        return
    present = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    if missing := sorted(set(options.require) - set(present)):
        sys.exit(f"{missing[0]} is not installed, so its part cannot run")
    with tempfile.TemporaryDirectory(prefix="deltacheck-smoke-") as folder:
        report: dict[str, Any] = describe(Path(folder))
        for name in present:
            kill_and_resume(name, Path(folder, f"{name}-killed"))
            print(f"{name}: killed, restored bit for bit, resumed, verified", flush=True)
            print(f"view: {look(Path(folder, f'{name}-killed'), LAST)} files", flush=True)
            report["digests"][name] = whole_run(name, Path(folder, f"{name}-whole"))
    report["skipped"] = sorted(set(FRAMEWORKS) - set(present))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"passed; not installed: {', '.join(report['skipped']) or 'nothing'}")


# --- what is installed ----------------------------------------------------------------------------


def describe(folder: Path) -> dict[str, Any]:
    """Import the package and let ``doctor`` describe it."""
    import deltacheck

    document = json.loads(command("doctor", str(folder / "none"), "--json", expected=(0, 1)))
    lines = {line["name"]: line for line in document["checks"]}
    print(f"deltacheck {deltacheck.__version__}: the native module is loaded", flush=True)
    return {
        "package": str(Path(deltacheck.__file__).parent),
        "version": deltacheck.__version__,
        "python": sys.version.split()[0],
        "checks": {name: line["status"] for name, line in lines.items()},
        "digests": {},
    }


# --- runs -----------------------------------------------------------------------------------------


def states(last: int) -> Iterator[tuple[int, Arrays]]:
    """Yield every step of a training in NumPy, whose bits no framework and processor changes."""
    random = np.random.default_rng(23)
    weights = random.standard_normal((300, 400)).astype(np.float32)
    moment = np.zeros_like(weights)
    for step in range(last + 1):
        gradient = random.standard_normal(weights.shape).astype(np.float32)
        moment = np.float32(0.5) * moment + gradient
        weights = weights - np.float32(1e-4) * moment
        low = weights.astype(ml_dtypes.bfloat16)
        yield step, {"low": low, "master": weights, "moment": moment, "step": step}


def run(name: str, root: Path, last: int) -> None:
    """Save the training from its newest step on; with ``last`` beyond LAST, die within a save."""
    saver = _torch if name == "torch" else _jax
    saver(root, last)


def _torch(root: Path, last: int) -> None:
    import torch

    from deltacheck.backends.torch import Engine

    def tensor(leaf: Any) -> torch.Tensor:
        if leaf.dtype == np.float32:
            return torch.from_numpy(leaf.copy())
        return torch.from_numpy(leaf.view(np.int16).copy()).view(torch.bfloat16)

    with Engine(root) as engine:
        first = 0
        if engine.steps():
            restored = engine.restore()
            first = restored["step"] + 1
            compare(restored, lambda leaf: leaf.view(torch.uint8).numpy())
        for step, arrays in states(last):
            if step >= first:
                state = with_arrays(arrays, tensor)
                handle = engine.save(step, state)
                if killed(step, first, last):
                    os.kill(os.getpid(), signal.SIGKILL)
                handle.wait()


def _jax(root: Path, last: int) -> None:
    import jax.numpy as jnp

    from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager

    with manager(root) as steps:
        first = 0
        if steps.latest_step() is not None:
            restored = steps.restore(steps.latest_step(), args=DeltaRestoreArgs())
            first = restored["step"] + 1
            compare(restored, np.asarray)
        for step, arrays in states(last):
            if step >= first:
                steps.save(step, args=DeltaSaveArgs(with_arrays(arrays, jnp.asarray)))
                if killed(step, first, last):
                    os.kill(os.getpid(), signal.SIGKILL)
                steps.wait_until_finished()


def with_arrays(arrays: Arrays, made: Callable[[Any], Any]) -> Arrays:
    """Return the state with the arrays of a framework."""
    return {
        key: made(leaf) if isinstance(leaf, np.ndarray) else leaf for key, leaf in arrays.items()
    }


def killed(step: int, first: int, last: int) -> bool:
    """Return whether the process dies within this save: in the first part of a killed run."""
    return step == last == KILLED_IN and first == 0


def compare(restored: Any, array_of: Callable[[Any], Any]) -> None:
    """Fail unless a restored state has the bits of its step."""
    *_, (_, expected) = states(restored["step"])
    require(sorted(restored) == sorted(expected), f"leaves {sorted(restored)}")
    for key, leaf in expected.items():
        if isinstance(leaf, np.ndarray):
            array = array_of(restored[key])
            same = array.nbytes == leaf.nbytes and array.tobytes() == leaf.tobytes()
            require(same, f"leaf {key} of step {restored['step']} differs from what was saved")


def kill_and_resume(name: str, root: Path) -> None:
    """Kill a training within a save, resume it, and read and verify every step."""
    import deltacheck

    status = child(name, root, KILLED_IN)
    require(status == -signal.SIGKILL, f"{name}: the first run ended with status {status}")
    require(child(name, root, LAST) == 0, f"{name}: the resumed run failed")
    checkpoints = deltacheck.open(root)
    require(checkpoints.steps()[-1] == LAST, f"{name}: steps {checkpoints.steps()}")
    for step in checkpoints.steps():
        compare(checkpoints.restore(step), np.asarray)
    command("verify", str(root), "--deep")


def look(root: Path, newest: int) -> int:
    """Serve a root with ``view``, as a browser sees it, and return the number of the page's files.

    The files are those that the page, its scripts and their imports name.
    """
    server = subprocess.Popen([*PROGRAM, "view", str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address_line = server.stdout.readline()
        require("http://" in address_line, "deltacheck view gave no address")
        page = address_line.split()[-1]
        found, waiting = set(), [page]
        while waiting:
            found.add(address := waiting.pop())
            # A file that is missing answers 404, which raises.
            with urlopen(address, timeout=240) as answer:
                type, text = answer.headers.get_content_type(), answer.read().decode()
            expected = TYPES.get(address.rpartition(".")[2], "text/html")
            require(type == expected, f"deltacheck view: {address} is of type {type}")
            names = re.findall(r'(?:\bfrom |\bimport[ (]|\bsrc=|\bhref=)"([^"]+)"', text)
            waiting += {urljoin(address, name) for name in names}.difference(found, waiting)
        with urlopen(f"{page}api/steps", timeout=240) as answer:
            steps = [row["step"] for row in json.load(answer)["steps"]]
        require(newest in steps, f"deltacheck view: steps {steps}")
    finally:
        server.kill()
        server.communicate()
    scripts = {"app.mjs", "source.mjs", "draw.mjs", "text.mjs"}
    missing = {page + name for name in scripts} - found
    require(not missing, f"deltacheck view: no script imports {sorted(missing)}")
    return len(found)


def whole_run(name: str, root: Path) -> dict[str, str]:
    """Return the digests of the files of a training that nothing interrupts."""
    require(child(name, root, STEPS - 1) == 0, f"{name}: the run failed")
    return digests(root)


def digests(root: Path) -> dict[str, str]:
    """Return the SHA-256 of every data file of a root, by a path without its nonce.

    The documents of segments and steps are left out: they have times and nonces.
    """
    sums = {}
    for segment in sorted(root.glob("**/segments/s*")):
        for file in sorted(segment.rglob("*")):
            if file.is_file() and file != segment / "zarr.json":
                name = f"{segment.name.partition('-')[0]}/{file.relative_to(segment)}"
                sums[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    require(len(sums) > 0, f"{root} has no data")
    return sums


# --- processes ------------------------------------------------------------------------------------


def child(name: str, root: Path, last: int) -> int:
    """Run a part of a training in a process of its own and return its status."""
    arguments = [sys.executable, __file__, "--child", name, str(root), str(last)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(arguments, env=environment, timeout=600, check=False).returncode


def command(*arguments: str, expected: tuple[int, ...] = (0,)) -> str:
    """Run the command ``deltacheck`` and return its output."""
    program = [*PROGRAM, *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    text = f"deltacheck {' '.join(arguments)} ended with status {done.returncode}: {done.stderr}"
    require(done.returncode in expected and done.stdout != "", text)
    return done.stdout


def require(condition: bool, sentence: str) -> None:
    """Exit with a sentence unless a condition holds."""
    if not condition:
        sys.exit(f"FAILED: {sentence}")


if __name__ == "__main__":
    main()
