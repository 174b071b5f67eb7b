"""Compare the second reader with the Python reader, and flip bits under it: `make reader-test`.

The second reader, in `reader/`, was written from the format page alone, in JavaScript. Without
Node 20, the check is skipped with one line.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import deltacheck
from deltacheck.cli import main as main_command

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "0.1.0"
# Every bit of the first root is flipped; of the others, this number of bits of documents and of
# chunks.
WHOLE_FLIPS, SAMPLED_FLIPS = "manager", 250


def main() -> int:
    """Run all checks.

    Returns:
        The exit status: 0 if all checks pass or Node is missing, else 1.
    """
    node = shutil.which("node")
    if node is None or _major(node) < 20:
        print("reader-test skipped: it needs Node 20 or newer")
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        roots = {path.name.split(".")[0]: path for path in sorted(GOLDEN.glob("*.tar.xz"))}
        for name, path in roots.items():
            with tarfile.open(path) as archive:
                archive.extractall(Path(folder) / name, filter="data")
        made = Path(folder) / "made"
        _make(made)
        failures = list(_golden(node, Path(folder), list(roots)))
        failures += _live(node, made, "made")
        failures += _refusals(node, Path(folder) / "merged")
        failures += _flips(node, Path(folder), list(roots))
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{time.monotonic() - begin:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


def _major(node: str) -> int:
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.lstrip("v").split(".")[0])


def _read(node: str, root: Path, *step: str) -> tuple[int, dict[str, Any]]:
    command = [node, str(HERE / "read.mjs"), str(root), *step]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, json.loads(run.stdout)


def _golden(node: str, folder: Path, names: list[str]) -> Iterator[str]:
    """Compare every golden root with the committed values and with the Python reader."""
    expected = json.loads((GOLDEN / "expected.json").read_text())
    if sorted(expected) != sorted(names):
        yield f"roots {sorted(names)}, expected values of {sorted(expected)}"
    leaves = 0
    for name in names:
        _, result = _read(node, folder / name)
        steps = {str(step["step"]): step for step in result["steps"]}
        if set(steps) != set(expected[name]):
            yield f"{name}: steps {sorted(steps)}"
        for number, values in expected[name].items():
            read = steps[number]["leaves"]
            if set(read) != set(values["arrays"]):
                yield f"{name} step {number}: other leaves"
            for path, value in values["arrays"].items():
                leaf = read[path]
                leaves += 1
                got = [leaf.get("dtype"), leaf.get("shape"), leaf.get("sha256", "")[:32]]
                if got != value:
                    yield f"{name} step {number} leaf {path}: {leaf}, expected {value}"
            scalars = {
                inner: repr(value)
                for path, node in steps[number]["scalars"].items()
                for inner, value in _values(path, node)
            }
            if scalars != values["scalars"]:
                yield f"{name} step {number}: scalars {scalars}, expected {values['scalars']}"
        yield from _compare(result, folder / name, name)
    print(f"golden roots: {len(names)}, leaves equal to the expected values: {leaves}")


def _values(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the Python values of a node by path: several of a long list."""
    if node["t"] != "json":
        yield path, _scalar(node)
        return
    values = [(path, json.loads(node["v"]))]
    while values:
        at, value = values.pop()
        if isinstance(value, (list, dict)):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            values += [(f"{at}/{key}", item) for key, item in pairs]
        else:
            yield at, value


def _scalar(node: dict[str, Any]) -> Any:
    value = node.get("v")
    decode: dict[str, Callable[[], Any]] = {
        "int": lambda: int(value),
        "float": lambda: float.fromhex(value),
        "complex": lambda: complex(*map(float.fromhex, value)),
        "bytes": lambda: base64.b64decode(value),
    }
    return decode.get(node["t"], lambda: value)()


def _live(node: str, root: Path, name: str) -> Iterator[str]:
    status, result = _read(node, root)
    if status != 0:
        yield f"{name}: exit status {status}"
    yield from _compare(result, root, name)


def _compare(result: dict[str, Any], root: Path, name: str) -> Iterator[str]:
    """Compare what the second reader has printed with what the Python reader returns."""
    reader = deltacheck.open(root)
    count = 0
    for step in result["steps"]:
        read = {path: leaf for path, leaf in step.get("leaves", {}).items() if "sha256" in leaf}
        if not read:
            continue
        for path, array in reader.restore(step["step"], leaves=list(read)).items():
            values = np.asarray(array)
            digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
            got = [read[path][key] for key in ("dtype", "shape", "sha256")]
            count += 1
            if got != [str(values.dtype), list(values.shape), digest]:
                yield f"{name} step {step['step']} leaf {path}: other bytes than the Python reader"
    if count == 0:
        yield f"{name}: nothing to compare"
    if {tag: to["step"] for tag, to in result["tags"].items()} != reader.tags():
        yield f"{name}: tags {result['tags']}"
    print(f"{name}: {count} leaves equal to the Python reader, {len(result['steps'])} steps")


def _make(root: Path) -> None:
    """Save steps with what the golden roots lack.

    These are sharded arrays, streams that are only stored, wide words, chunks of one leaf that
    change alone, keys that need escapes, and Python types.
    """
    from collections import Counter

    from deltacheck.backends.torch import Engine

    random = np.random.default_rng(23)
    keys = ["-5", "+5", "007", "٣", "a\x7f", "b\x85", "c\u2028", "%", "-", "", "é", "\U0001f600"]
    state: dict[Any, Any] = {
        "keys": {key: np.arange(3.0) for key in keys},
        "packed": {str(i): random.integers(0, 255, 200_000, dtype=np.uint8) for i in range(7)},
        "complex": random.standard_normal(9000) * (1 + 1j),
        "chunks": random.standard_normal((3, 300, 1000)).astype(np.float32),
        "wide": random.integers(0, 2**62, 40_000),
        "bytes": random.integers(0, 255, 300_000, dtype=np.uint8),
        "types": [Counter(a=2), bytearray(b"abc"), float("nan"), -0.0, 2**70, 1e-300],
        -3: np.arange(2),
    }
    with Engine(root) as engine:
        for step in range(3):
            engine.save(step, state)
            state["packed"]["3"] = state["packed"]["3"] ^ np.uint8(1)
            state["complex"] = state["complex"] * (1 + 1e-9)
            state["chunks"] = state["chunks"].copy()
            state["chunks"][1] *= np.float32(1.001)
            state["wide"] = state["wide"].copy()
            state["wide"][::7] += 1000 * (step + 1)
            state["bytes"] = random.integers(0, 255, 300_000, dtype=np.uint8)
    main_command(["tag", str(root), "1", "middle"])


def _refusals(node: str, root: Path) -> Iterator[str]:
    """Check that an unknown feature is refused by its name, wherever it stands."""
    manifest = max(root.glob("checkpoints/c*")) / "zarr.json"
    for path in (manifest, root / "zarr.json"):
        before = path.read_text()
        group = json.loads(before)
        document = group["attributes"]["deltacheck"]
        document["must_understand"] = [*document.get("must_understand", []), "unheard-of"]
        if document.pop("checksum", None):
            text = json.dumps(document, sort_keys=True, separators=(",", ":"))
            document["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
        path.write_text(json.dumps(group))
        status, result = _read(node, root)
        path.write_text(before)
        if status != 1 or 'unknown feature \\"unheard-of\\"' not in json.dumps(result):
            yield f"{path.relative_to(root)}: an unknown feature gives {status}"
    if _read(node, root)[0] != 0:
        yield "merged: not whole after the refusals"


def _flips(node: str, folder: Path, names: list[str]) -> Iterator[str]:
    """Flip single bits, and expect that each is reported or changes nothing that is read."""
    total = {"tried": 0, "reported": 0, "unchanged": 0, "silent": 0}
    for name in names:
        sample = [] if name == WHOLE_FLIPS else [str(SAMPLED_FLIPS)]
        command = [node, str(HERE / "flips.mjs"), str(folder / name), *sample]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        counts = json.loads(run.stdout) if run.stdout else {}
        print(f"{name}: bits flipped { ({key: counts.get(key) for key in total}) }")
        for line in run.stderr.splitlines():
            print(f"  {line}")
        for key in total:
            total[key] += counts.get(key, 0)
        if run.returncode != 0 or not counts.get("reported"):
            yield f"{name}: silent bit flips, exit status {run.returncode}"
    print(f"all roots: bits flipped {total}")


if __name__ == "__main__":
    sys.exit(main())
