"""Makes the golden checkpoints of a release: `python -m tests.golden.make tests/golden/<version>`,
once, by that release's code.

Later releases read them (tests/store/test_golden.py), and encode the same states to the same
arrays. Never make them again: a folder here is what a release has written, and a reader that no
longer takes it has broken the format. The states are whole numbers and what follows from them by
operations that IEEE 754 fixes, so they are the same everywhere.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import deltacheck
from deltacheck import Keep, Policy, SaveOptions
from deltacheck.backends.numpy_leaves import describe_numpy
from deltacheck.backends.torch import Engine
from deltacheck.leaf import tree
from deltacheck.maintain.compaction import compact
from deltacheck.store import compact as compact_form
from deltacheck.store.collect import collect, delete_checkpoint
from deltacheck.store.roots.opening import open_root
from tests.support.adam_run import AdamRun
from tests.support.merging import merge_newest
from tests.support.ranked_run import RankedRun, cells, rows

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64"
    " complex128 bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz"
    " float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int2"
    " int4 uint2 uint4"
).split()


def noise(count: int, seed: int) -> NDArray[np.uint64]:
    """Numbers that look random: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    z = np.arange(count, dtype=np.uint64) + np.uint64(seed * 1_000_003)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def of_dtype(name: str, seed: int) -> NDArray[Any]:
    """Ten elements of any bits: NaN payloads, infinities, subnormals."""
    dtype = np.dtype(name) if name in np.sctypeDict else np.dtype(getattr(ml_dtypes, name))
    if name == "bool":
        return (noise(10, seed) & np.uint64(1)).astype(bool)
    if name.endswith(("int2", "int4")):
        return (
            (noise(10, seed) & np.uint64(3 if name == "uint2" else 1))
            .astype(np.uint8)
            .astype(dtype)
        )
    mask = {"float6_e2m3fn": 0x3F, "float6_e3m2fn": 0x3F, "float4_e2m1fn": 0x0F}.get(name, 0xFF)
    return (noise(20, seed).view(np.uint8)[: 10 * dtype.itemsize] & np.uint8(mask)).view(dtype)


def engine_states() -> Iterator[dict[str, Any]]:
    """Every dtype, kind of scalar and method of encoding; large, packed, empty, 0-d and tied
    leaves; leaves that come and go.
    """
    few, half, small = (
        np.zeros((320, 1024), np.float32),
        np.arange(700 * 128, dtype=np.int32).reshape(700, 128),
        np.arange(40),
    )
    weight = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    for step in range(4):
        few.reshape(-1)[noise(9, step) % np.uint64(few.size)] = np.float32(step) + np.float32(0.5)
        half[step * 50 : step * 50 + 120] += np.int32(3)
        some = np.where(
            noise(9000, step + 50) % np.uint64(4) == 0, np.uint64(step), np.uint64(0)
        ).astype(np.int16)  # a bitmap
        random = (
            (noise(6000, step) & np.uint64(0xFFFF)).astype(np.uint16)
            if step < 2
            else np.full(6000, step, np.uint16)
        )
        yield {
            "dtypes": {name: of_dtype(name, step) for name in DTYPES},
            "few": few.copy(),
            "half": half.copy(),
            "random": random,
            "some": some,
            "frozen": np.arange(100, dtype=np.float32),
            "empty": np.zeros((0, 4), np.float32),
            "0-d": np.array(step, np.int64),
            "scalar": np.float32(step),
            "tied": {"one": weight + step, "other": None},
            "numbers": [
                step,
                -1.5,
                2**100,
                True,
                None,
                "text \u00e9",
                b"bytes",
                1 + 2j,
                float("inf"),
                (),
                {},
            ],
            0: "an integer key",
            "0": "a text key",
            "a/b": small + step,
            "": np.ones(1),
            **({"late": small * 2} if step else {}),
            **({"gone": small * 3} if step < 2 else {}),
        }


def tied(state: dict[str, Any]) -> dict[str, Any]:
    state["tied"]["other"] = state["tied"]["one"]
    return state


def write_engine(root: Path) -> dict[int, Any]:
    saved = {}
    # Small leaves had no limit on what a restore decodes when this was written.
    for steps in ((0, 1), (2, 3)):  # two runs: the second goes on from what the first has left
        with Engine(root, policy=Policy.exact(max_chain_depth=3, max_restore_ratio=None)) as engine:
            if steps[0]:
                engine.restore()
            for step, state in enumerate(map(tied, engine_states())):
                if step in steps:
                    saved[step] = state
                    engine.save(step, state, metrics={"loss": 1 / (1 + step)}).wait(timeout=240)
    return saved


def write_manager(root: Path) -> dict[int, Any]:
    import jax
    import jax.numpy as jnp

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    saved = {}
    with manager(root) as opened:
        for step in range(3):
            values = (np.arange(300 * 64, dtype=np.int32).reshape(300, 64) % (7 + step)).astype(
                np.float32
            )
            state = {
                "params": {
                    "w": jnp.asarray(values),
                    "b": jnp.asarray(values[0].astype(ml_dtypes.bfloat16)),
                },
                "key": jax.random.wrap_key_data(jnp.array([1, step], jnp.uint32)),
                "count": step,
            }
            opened.save(step, args=DeltaSaveArgs(state))
            saved[step] = {
                "params": state["params"],
                "key": jax.random.key_data(state["key"]),
                "count": step,
            }
        opened.wait_until_finished()
    return saved


def write_policy(root: Path) -> None:
    write_inexact(root, AdamRun((64, 96), parameters=1), Policy.auto(derive=False), "reused")


def write_drawn(root: Path) -> None:
    run = AdamRun((64, 96), parameters=2, rate=1e-6)
    # No weight of the second one is coarser than half the lattice, so its masters are drawn.
    run.masters[1] = np.linspace(-9e-4, 9e-4, 64 * 96, dtype=np.float32).reshape(64, 96)
    write_inexact(root, run, Policy.auto(derive=False, moments="bounded"), "bounded")


def write_halved(root: Path) -> None:
    """Write a step after the rate has fallen: codes of one and of two bytes, drawn masters."""
    run = AdamRun((64, 96), parameters=3, rate=1e-6)
    run.masters[0] /= np.float32(8)  # codes of one byte
    run.masters[1][:, 0] = 1.5  # codes of two bytes
    run.masters[2] = np.linspace(-9e-4, 9e-4, 64 * 96, dtype=np.float32).reshape(64, 96)
    write_until_halved(
        root, run, Policy.auto(derive=False, moments="bounded", max_restore_ratio=None)
    )


def write_halved_int32(root: Path) -> None:
    """Write a step after the rate has fallen: masters whose weights are cast from them."""
    hidden = Policy.auto(derive=False, moments="bounded").hidden
    assert hidden is not None
    policy = Policy(32, replace(hidden, weights="bounded"), derive=True, max_restore_ratio=None)
    write_until_halved(root, AdamRun((64, 96), parameters=1, rate=1e-6), policy)


def write_until_halved(root: Path, run: AdamRun, policy: Policy) -> None:
    """Write steps until the first lattice was halved twice, and keep the last step.

    Without a limit on what a restore decodes: it was another one for small leaves at the time.
    """
    path = "optimizer/state/0/master"
    halvings: list[int] = []
    run.advance(100)
    with Engine(
        root, policy=policy, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)
    ) as engine:
        while halvings[-1:] != [2]:
            run.advance(10)
            if halvings:
                run.rate *= 0.8
            engine.save(run.step, run.state(), metrics={"learning_rate": run.rate}).wait(
                timeout=240
            )
            manifest = deltacheck.open(root).manifest()
            if path in manifest.derived:
                halvings.append(manifest.derived[path].halvings)
    opened = open_root(root)
    compact(opened)  # as ``write_inexact``
    collect(opened, grace_seconds=0, writer_is_dead=True)


def write_inexact(root: Path, run: AdamRun, policy: Policy, contract: str) -> None:
    """Write steps until two of them have a contract, and keep the last one."""
    run.advance(100)
    inexact: set[int] = set()
    with Engine(
        root, policy=policy, keep=Keep(last=1), options=SaveOptions(grace_seconds=0)
    ) as engine:
        for _ in range(30):
            if len(inexact) == 2:
                break
            run.advance(10)
            engine.save(run.step, run.state(), metrics={"learning_rate": run.rate}).wait(
                timeout=240
            )
            manifest = deltacheck.open(root).manifest()
            inexact |= {manifest.step} if manifest.contract == contract else set()

    opened = open_root(root)
    compact(opened)  # the codes as keyframes: the chain before them is not what this root is for
    collect(opened, grace_seconds=0, writer_is_dead=True)


def write_derived(root: Path) -> dict[int, Any]:
    run, saved = AdamRun((64, 96), parameters=1), {}
    run.masters = [
        np.arange(master.size, dtype=np.float32).reshape(master.shape) / 512
        for master in run.masters
    ]
    with Engine(root, policy=Policy.exact(derive=True)) as engine:
        for step in (1, 2):
            run.masters[0][step] += np.float32(0.5)
            saved[step] = run.state()
            engine.save(step, saved[step]).wait(timeout=240)
    return saved


def described(state: Any) -> dict[str, Any]:
    """Return the content of a state.

    This is the dtype, shape and SHA-256 of every array, and the rest as a skeleton.
    """
    flat = tree.flatten(as_numpy(state), describe_numpy)
    arrays = {
        path: [
            leaf.dtype,
            list(leaf.shape),
            hashlib.sha256(np.ascontiguousarray(flat.arrays[path]).tobytes()).hexdigest()[:32],
        ]
        for path, leaf in flat.leaves.items()
    }
    return {
        "arrays": arrays,
        "scalars": {path: repr(value) for path, value in tree.scalars(flat.skeleton).items()},
    }


def as_numpy(value: Any) -> Any:
    """The same containers with every array as NumPy, ties no longer told."""
    if isinstance(value, Mapping):
        return {key: as_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_numpy(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    return np.array(value) if hasattr(value, "shape") else value


def write_tiled(root: Path) -> dict[int, Any]:
    """Four ranks, leaves cut along two axes; then three, cut along the first, which keep the tiles
    that fit.
    """
    saved: dict[int, Any] = {}
    state: dict[str, Any] = {
        "model": {
            "w": (noise(96 * 40, 1) % np.uint64(1000)).astype(np.float32).reshape(96, 40),
            "bits": noise(24 * 6, 2).astype(np.uint16).view(ml_dtypes.bfloat16).reshape(24, 6),
            "many": (np.arange(600 * 500, dtype=np.int32) // np.int32(500)).reshape(600, 500),
        },
        "small": np.arange(10),
        "0-d": np.array(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "lr": 0.5,
    }
    for size, layout, steps in ((4, cells, (0, 1)), (3, rows, (2, 3))):
        with RankedRun(root, size, layout) as run:
            if steps[0]:
                run.resume(state)
            for step in steps:
                state["model"]["w"][step :: 5 + step] += 1
                state["model"]["many"].reshape(-1)[step::1000] += np.int32(step + 1)
                saved[step] = copy.deepcopy(state)
                for report in run.save(step, state, {"loss": 1 / (1 + step)}):
                    assert not isinstance(report, BaseException), report
    return saved


def write_tiled_policy(root: Path) -> None:
    """Two ranks, each with a part of every matrix: a lattice, reused moments, and an exact part."""
    run = AdamRun((64, 96), parameters=1)
    run.advance(100)
    inexact: list[int] = []
    with RankedRun(root, 2, policy=Policy.auto(derive=False)) as ranks:
        while len(inexact) < 2:
            run.advance(10)
            state = run.state()
            if inexact:  # an infinity has no code
                state["optimizer"]["state"][0]["master"][40, 7] = np.inf
            for report in ranks.save(run.step, state):
                assert not isinstance(report, BaseException), report
            manifest = deltacheck.open(root).manifest()
            inexact += [manifest.step] if manifest.contract == "reused" else []
    opened = open_root(root)
    for ref in opened.checkpoints():
        if opened.read(ref.manifest_path).step != inexact[-1]:
            delete_checkpoint(opened, ref.seq)
    compact(opened)  # as ``write_policy``
    collect(opened, grace_seconds=0, writer_is_dead=True)


def write_compact_tiled(root: Path) -> dict[int, Any]:
    """The same in the form that steps with many tiles have."""
    fewest, compact_form.COMPACT_TILES = compact_form.COMPACT_TILES, 1
    try:
        return write_tiled(root)
    finally:
        compact_form.COMPACT_TILES = fewest


def write_merged(root: Path) -> dict[int, Any]:
    """Deltas of several methods that are merged, and a leaf whose deltas stay as they are."""
    saved: dict[int, Any] = {}
    state = {
        "few": noise(3000, 5).astype(np.uint32),
        "half": (noise(4096, 6) % np.uint64(200)).astype(np.uint16),
        "returns": np.zeros(100, np.float32),
    }
    with Engine(root, policy=Policy.exact(max_restore_ratio=None)) as engine:
        for step in range(4):
            state["few"][step :: 151 + step] += np.uint32(3)
            state["half"][step % 2 :: 2] += np.uint16(step)
            state["returns"][0] = step % 3
            saved[step] = copy.deepcopy(state)
            engine.save(step, saved[step]).wait(timeout=240)
    merge_newest(open_root(root))
    return saved


def write_ordered(root: Path) -> dict[int, Any]:
    """Deltas of weights whose words are stored in the order of their exponents, and others."""
    saved: dict[int, Any] = {}
    # Any weights below 2 in magnitude.
    bits = (noise(12_000, 7) & np.uint64(0xBFFF)).astype(np.uint16)
    state = {
        "few": bits.view(ml_dtypes.bfloat16),
        "half": bits[::-1].copy().view(ml_dtypes.bfloat16),
        "integers": bits.copy(),
    }
    with Engine(root, policy=Policy.auto(derive=False)) as engine:
        for step in range(3):
            saved[step] = copy.deepcopy(state)
            engine.save(step, saved[step]).wait(timeout=240)
            state["few"].view(np.uint16)[step :: 301 + step] += np.uint16(3)
            state["half"].view(np.uint16)[step::2] += np.uint16(2 + 300 * (step == 1))
            state["integers"][step::7] += np.uint16(1)
    return saved


class LawRun(AdamRun):
    """A run whose first matrix has bfloat16 gradients, as the law stores them."""

    def gradient(self, number: int, size: float) -> NDArray[Any]:
        gradient: NDArray[np.float32] = super().gradient(number, size)
        return gradient if number else gradient.astype(ml_dtypes.bfloat16).astype(np.float32)


def write_law(root: Path) -> dict[int, Any]:
    """Groups with chunks by each law, after one step and after several."""
    run, saved = LawRun((64, 96), parameters=2, rate=1e-4), {}
    run.advance(100)
    with Engine(root, policy=Policy.exact(law=True, max_restore_ratio=None)) as engine:
        for step, updates in enumerate((0, 1, 1, 6)):
            run.advance(updates)
            saved[step] = run.state()
            engine.save(step, saved[step]).wait(timeout=240)
    return saved


def write_long_list(root: Path) -> dict[int, Any]:
    """A log of plain values, which is one text, and a list that is too short for that."""
    saved: dict[int, Any] = {}
    log: list[Any] = [
        {"loss": -0.0 if step == 3 else 0.1 * step, "step": step, "note": None, "é": '\u2028\0"/'}
        for step in range(300)
    ]
    with Engine(root) as engine:
        for step in range(2):
            log.append({"values": [True, 2**53 - 1, [1e300, 5e-324, 1.0]], "step": 300 + step})
            state = {"w": np.arange(4), "log": log, "short": log[:200]}
            saved[step] = copy.deepcopy(state)
            engine.save(step, saved[step]).wait(timeout=240)
    return saved


def write_planes(root: Path) -> dict[int, Any]:
    """Keyframes with a Huffman code for each byte plane, and such that are too small for it."""
    counts = np.arange(2**17 + 253, dtype=np.uint32) % 253
    state = {
        "two_blocks": counts.astype(np.float32),
        "one_block": counts[: 2**17].astype(ml_dtypes.bfloat16).reshape(256, 512),
        "bytes": counts.astype(np.uint8),
        "wide": counts.astype(np.complex64),
        "small": counts[: 2**17 - 1].astype(np.float32),
    }
    with Engine(root) as engine:
        engine.save(0, state).wait(timeout=240)
    return {0: state}


WRITERS: Mapping[str, Callable[[Path], Any]] = {
    "engine": write_engine,
    "manager": write_manager,
    "policy": write_policy,
    "drawn": write_drawn,
    "halved": write_halved,
    "halved_int32": write_halved_int32,
    "derived": write_derived,
    "tiled": write_tiled,
    "tiled_policy": write_tiled_policy,
    "compact_tiled": write_compact_tiled,
    "merged": write_merged,
    "ordered": write_ordered,
    "long_list": write_long_list,
    "law": write_law,
    "planes": write_planes,
}


def main(folder: Path) -> None:
    socket.gethostname = lambda: "golden"
    if folder.exists():
        raise SystemExit(
            f"{folder} is there already: what a release has written is never made again"
        )
    folder.mkdir()
    expected = {}
    for name, write in WRITERS.items():
        saved = write(folder / name)
        if saved is None:  # inexact: what its own release gives is what every later one gives
            opened = deltacheck.open(folder / name)
            saved = {step: opened.restore(step) for step in opened.steps()}
        expected[name] = {str(step): described(state) for step, state in saved.items()}
        shutil.make_archive(str(folder / name), "xztar", folder / name)
        shutil.rmtree(folder / name)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
