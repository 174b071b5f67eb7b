"""Scenarios that run while faults happen, and checks whether a promise was broken.

A ``Scenario`` is data: ``prepare(root)`` makes the root as it is before the fault, ``act(root,
acknowledge)`` is what is killed, or whose calls fail. It calls ``acknowledge(step)`` as soon as the
library has said that the step is durable. The state of every step is ``state_at(step)``, whatever
the scenario, so that any harness can check any root:

    scenario = SCENARIOS["delta"]
    scenario.prepare(root)
    scenario.act(root, acknowledge)                   # killed, or traced and replayed to any point
    problems = violations(scenario, root, acknowledged)   # what the crash itself has broken
    problems += recovery_violations(scenario, root)   # by the next writer and a collection:

``root`` need not exist before ``prepare``. The frameworks are imported by ``import_frameworks`` and
by nothing else at module level, and nothing here touches TensorStore or a JAX backend before one of
these functions is called: a zygote may import this file, then fork.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deltacheck import Keep, SaveOptions

Acknowledge = Callable[[int], None]
Tree = dict[str, Any]

ELEMENTS = 66_000  # of the large leaf: 264 KB, enough for an array of its own


# --- the states -----------------------------------------------------------------------------------


@functools.cache
def state_at(step: int) -> Tree:
    """The state of a step, as NumPy arrays, not to be written to: a large leaf that changes a
    little
    with each step, one that never does, small ones.
    """
    weights = np.random.default_rng(7).standard_normal(ELEMENTS).astype(np.float32)
    for number in range(1, step + 1):
        weights[(number * 977 + np.arange(300) * 211) % ELEMENTS] *= np.float32(1.01)
    return {
        "weights": weights.reshape(220, 300),
        "frozen": np.arange(700, dtype=np.int32),
        "bias": np.full(33, step, np.float32),
        "seldom": np.full(5, step // 3, np.int64),
        "step": step,
    }


def difference(expected: Tree, found: Any) -> str | None:
    """The first leaf in which a restored state is not the expected one, in a bit, a shape or a
    type.
    """
    if not isinstance(found, dict) or sorted(found) != sorted(expected):
        return (
            f"keys {list(found) if isinstance(found, dict) else type(found)} instead of"
            f" {list(expected)}"
        )
    for name, value in expected.items():
        other = found[name]
        if isinstance(value, np.ndarray):
            other = np.asarray(other)
            if (value.dtype, value.shape) != (
                other.dtype,
                other.shape,
            ) or value.tobytes() != other.tobytes():
                return f"leaf {name} differs"
        elif value != other:
            return f"{name} is {other!r} instead of {value!r}"
    return None


# --- what a scenario is about: a way to keep checkpoints ------------------------------------------


class Subject(Protocol):
    """A library, or a control, that keeps checkpoints in a directory."""

    def steps(self, root: Path) -> list[int]:
        """The steps that a reader is told of."""
        ...

    def restore(self, root: Path, step: int) -> Any:
        """The state of a step, as NumPy arrays."""
        ...

    def go_on(self, root: Path) -> int:
        """As a new process would: restore the newest step, if there is one, and save the next;
        returns it, acknowledged.
        """
        ...

    def leftovers(self, root: Path) -> list[str]:
        """Collect garbage as thoroughly as possible, then name what is there without need, and what
        is needed but is not.
        """
        ...


@dataclass(frozen=True)
class Scenario:
    """See the module. ``prepared``: the steps that ``prepare`` leaves, all acknowledged. ``keep``:
    how
    many of the newest steps must be there, ``None`` for all; older ones may be deleted at any time.
    """

    name: str
    subject: Subject
    prepare: Callable[[Path], None]
    act: Callable[[Path, Acknowledge], None]
    prepared: tuple[int, ...] = ()
    keep: int | None = None

    @staticmethod
    def states(step: int) -> Tree:
        """The tree that a step must restore to."""
        return state_at(step)

    def required(self, acknowledged: set[int], listed: set[int]) -> set[int]:
        """The steps that must be listed."""
        if self.keep is None:
            return acknowledged | set(self.prepared)
        return set(sorted(acknowledged | set(self.prepared) | listed)[-self.keep :])


def violations(scenario: Scenario, root: Path, acknowledged: set[int]) -> list[str]:
    """Return the promises that a fault broke, and change nothing.

    These are acknowledged steps that are missing, and listed steps that do not restore to their
    state.
    """
    try:
        listed = scenario.subject.steps(root)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        if not acknowledged and not scenario.prepared:
            return []  # not even the root need be there
        return [f"the steps cannot be listed: {type(error).__name__}: {error}"]
    lost = scenario.required(acknowledged, set(listed)) - set(listed)
    problems = [
        f"step {step} was acknowledged, but only {listed} are there" for step in sorted(lost)
    ]
    for step in listed:
        try:
            found = difference(state_at(step), scenario.subject.restore(root, step))
        except Exception as error:  # noqa: BLE001 - as above
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            problems.append(f"step {step} is listed, but does not restore: {found}")
    return problems


def recovery_violations(scenario: Scenario, root: Path) -> list[str]:
    """Return the obstacles of the next writer, and the damage that it or a collection caused.

    This changes the root.
    """
    before: set[int] = set()
    with contextlib.suppress(Exception):
        before = set(scenario.subject.steps(root))
    try:
        step = scenario.subject.go_on(root)
    except Exception as error:  # noqa: BLE001 - as above
        return [f"the next writer cannot save: {type(error).__name__}: {error}"]
    try:
        problems = scenario.subject.leftovers(root)
    except Exception as error:  # noqa: BLE001 - as above
        problems = [f"collection failed: {type(error).__name__}: {error}"]
    return problems + violations(scenario, root, {*before, step})


# --- deltacheck: what both backends share ---------------------------------------------------------


class _Deltacheck:
    """Read with the reader that needs no framework."""

    def steps(self, root: Path) -> list[int]:
        import deltacheck

        return deltacheck.open(root).steps()

    def restore(self, root: Path, step: int) -> Any:
        import deltacheck

        return deltacheck.open(root).restore(step)

    def leftovers(self, root: Path) -> list[str]:
        import deltacheck
        from deltacheck.store import collect
        from deltacheck.store.files.storage import take_lease
        from deltacheck.store.roots.opening import open_root

        # Readers of this process pin what they have open until they go, and some are in cycles
        gc.collect()
        opened = open_root(root)
        lease = take_lease(opened.store.path)
        try:
            collect.collect(opened, grace_seconds=0, writer_is_dead=True)
        finally:
            lease.release()
        needed = {
            ref.id
            for checkpoint in opened.checkpoints()
            for ref in opened.read(checkpoint.manifest_path).segments
        }
        there = {
            entry.name for entry in (opened.store.path / "segments").iterdir() if entry.is_dir()
        }
        problems = [f"segment {name} is left over" for name in sorted(there - needed)]
        problems += [f"segment {name} is missing" for name in sorted(needed - there)]
        manifests = {p.parent for p in opened.manifest_paths()}
        folders = [
            entry
            for entry in (opened.store.path / "checkpoints").iterdir()
            if entry.is_dir() and entry not in manifests
        ]
        problems += [f"{entry} has no manifest" for entry in folders]
        problems += [f"{path} is left over" for path in root.rglob("*.__lock")]
        problems += [f"{path} is left over" for path in root.glob("*.orbax-checkpoint-tmp*")]
        findings = deltacheck.open(root).verify()
        return problems + [finding.problem for finding in findings]


# --- the torch Engine -----------------------------------------------------------------------------


class TorchEngine(_Deltacheck):
    """``deltacheck.backends.torch.Engine``."""

    def go_on(self, root: Path) -> int:
        with engine(root) as opened:
            return _go_on(opened)


def _go_on(opened: Any) -> int:
    step = 0
    if opened.steps():
        restored = opened.restore()
        step = restored["step"] + 1
        found = difference(state_at(step - 1), restored)
        assert found is None, found
    opened.save(step, torch_state(step)).wait(timeout=240)
    return step


def engine(root: Path, **options: Any) -> Any:
    """An engine whose chains have at most four deltas. Nothing is merged unless a scenario is about
    that: the thread would change files at any time.
    """
    import torch

    from deltacheck import Policy
    from deltacheck.backends.torch import Engine

    torch.set_num_threads(1)
    return Engine(
        root,
        **{
            "policy": Policy.exact(max_chain_depth=4, merge_deltas=False),
            "options": SaveOptions(grace_seconds=0),
        }
        | options,
    )


def torch_state(step: int) -> Tree:
    """``state_at(step)`` with tensors."""
    import torch

    return {
        name: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v
        for name, v in state_at(step).items()
    }


def _torch(
    name: str,
    prepared: int,
    saves: int,
    keep: int | None = None,
    restore: int | None = None,
    **options: Any,
) -> Scenario:
    """``prepared`` saves before the fault, ``saves`` more under it; ``restore``: the step that the
    second process goes on from.
    """

    def prepare(root: Path) -> None:
        if prepared:
            with engine(root, **options) as opened:
                for step in range(prepared):
                    opened.save(step, torch_state(step)).wait(timeout=240)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with engine(root, keep=Keep(last=keep), **options) as opened:
            if prepared:
                opened.restore(restore)
            for step in range(prepared, prepared + saves):
                opened.save(step, torch_state(step)).wait(timeout=240)
                acknowledge(step)

    return Scenario(name, TorchEngine(), prepare, act, tuple(range(prepared)), keep)


def _exact(limit: int) -> Any:
    from deltacheck import Policy

    return Policy.exact(max_chain_depth=limit)


def _staggered() -> Scenario:
    """Some leaves reach the limit of their chains and are written whole while others still get
    deltas.
    """

    def prepare(root: Path) -> None:
        with engine(root, policy=_exact(2)) as opened:
            for step in range(2):
                opened.save(step, torch_state(step)).wait(timeout=240)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with engine(root, policy=_exact(2)) as opened:
            opened.restore()
            for step in (2, 3):
                opened.save(step, torch_state(step)).wait(timeout=240)
                acknowledge(step)

    return Scenario("staggered-keyframe", TorchEngine(), prepare, act, (0, 1))


def _compaction() -> Scenario:
    def act(root: Path, acknowledge: Acknowledge) -> None:
        from deltacheck.maintain.compaction import compact
        from deltacheck.store.files.storage import take_lease
        from deltacheck.store.roots.opening import open_root

        lease = take_lease(root)
        try:
            assert compact(open_root(root)) is not None
        finally:
            lease.release()

    made = _torch("compaction", prepared=4, saves=0)
    return Scenario(made.name, made.subject, made.prepare, act, made.prepared)


def _merge() -> Scenario:
    """Deltas are merged behind the saves. Each merge ends before the next save, which uses it."""
    from deltacheck import Policy

    policy = Policy.exact(max_chain_depth=4)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with engine(root, policy=policy) as opened:
            opened.restore()
            for step in (3, 4, 5):
                opened.save(step, torch_state(step)).wait(timeout=240)
                acknowledge(step)
                opened._saver.chains.compactor.wait(240)

    made = _torch("merge", prepared=3, saves=0)
    return Scenario(made.name, made.subject, made.prepare, act, made.prepared)


class RepairedEngine(TorchEngine):
    """A repair that was killed is run again, and leaves nothing of the first."""

    def leftovers(self, root: Path) -> list[str]:
        _repair_root(root)
        return super().leftovers(root)


def _repair_root(root: Path) -> Any:
    from deltacheck.maintain.repair import repair
    from deltacheck.store.files.storage import take_lease
    from deltacheck.store.roots.opening import open_root

    lease = take_lease(root)
    try:
        return repair(open_root(root))
    finally:
        lease.release()


def _repair() -> Scenario:
    """Metadata is lost and damaged, and written again."""

    def prepare(root: Path) -> None:
        with engine(root, policy=_exact(3)) as opened:
            for step in range(4):
                opened.save(step, torch_state(step)).wait(timeout=240)
        (segment,) = (root / "segments").glob("s0000000001-*")
        next(segment.glob("*/**/zarr.json")).unlink()
        (root / "segments" / "zarr.json").write_bytes(b"{")

    def act(root: Path, acknowledge: Acknowledge) -> None:
        repaired = _repair_root(root)
        assert len(repaired.documents) == 2
        assert not repaired.lost

    return Scenario("repair", RepairedEngine(), prepare, act, (0, 1, 2, 3))


class Ranks(TorchEngine):
    """Two ranks that are threads of the process that dies; what comes after them is one process."""

    @staticmethod
    def run(root: Path) -> Any:
        from deltacheck.store.files.durability import Durability
        from tests.support.ranked_run import RankedRun

        return RankedRun(root, 2, depth=4, durability=Durability.POWER)


def _ranks() -> Scenario:
    """Ranks write their tiles at the same time; the first of them commits when both have said that
    theirs are durable.
    """

    def prepare(root: Path) -> None:
        with Ranks.run(root) as run:
            for step in range(2):
                _saved(run.save(step, state_at(step)))

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with Ranks.run(root) as run:
            run.resume(state_at(1))
            for step in (2, 3):
                _saved(run.save(step, state_at(step)))
                acknowledge(step)

    return Scenario("ranks", Ranks(), prepare, act, (0, 1))


def _saved(reports: list[Any]) -> None:
    """Raise what a rank has raised."""
    for report in reports:
        if isinstance(report, BaseException):
            raise report


def _collection() -> Scenario:
    """Explicit deletion of old steps and collection, as ``deltacheck prune`` does it."""

    def act(root: Path, acknowledge: Acknowledge) -> None:
        from deltacheck.store import collect
        from deltacheck.store.files.storage import take_lease
        from deltacheck.store.roots.opening import open_root

        lease = take_lease(root)
        try:
            opened = open_root(root)
            for checkpoint in opened.checkpoints()[:-2]:
                collect.delete_checkpoint(opened, checkpoint.seq)
            collect.collect(opened, grace_seconds=0, writer_is_dead=True)
        finally:
            lease.release()

    def prepare(root: Path) -> None:
        with engine(root, policy=_exact(1)) as opened:  # short chains: there is something to remove
            for step in range(5):
                opened.save(step, torch_state(step)).wait(timeout=240)

    return Scenario("collection", TorchEngine(), prepare, act, (0, 1, 2, 3, 4), keep=2)


def _keep_last() -> Scenario:
    """Retention by the engine itself, beside its saves."""

    def prepare(root: Path) -> None:
        with engine(root, policy=_exact(1), keep=Keep(last=2)) as opened:
            for step in range(3):
                opened.save(step, torch_state(step)).wait(timeout=240)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with engine(root, policy=_exact(1), keep=Keep(last=2)) as opened:
            opened.restore()
            for step in (3, 4):
                opened.save(step, torch_state(step)).wait(timeout=240)
                acknowledge(step)

    return Scenario("keep-last", TorchEngine(), prepare, act, (1, 2), keep=2)


def _lives() -> Scenario:
    """A training that goes on from the newest step, if there is one, and saves until somebody ends
    it.
    """

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with engine(root, keep=Keep(last=3)) as opened:
            first = opened.restore()["step"] + 1 if opened.steps() else 0
            for step in range(first, first + 1000):
                opened.save(step, torch_state(step)).wait(timeout=240)
                acknowledge(step)

    return Scenario("lives", TorchEngine(), lambda root: None, act, keep=3)


# --- the memory tier ------------------------------------------------------------------------------

DISK, MEMORY = "disk", "memory"  # the two roots, below the scenario's own


def tiered(root: Path, **options: Any) -> Any:
    """An engine with a memory tier that copies every second step to the disk."""
    from deltacheck import MemoryTier

    root.mkdir(parents=True, exist_ok=True)
    return engine(root / DISK, memory=MemoryTier(root / MEMORY, persist_every=2), **options)


class MemoryEngine(TorchEngine):
    """An engine with a memory tier whose process dies: what either root lists must restore from
    that root.
    """

    def steps(self, root: Path) -> list[int]:
        return sorted(
            {
                step
                for place in self._places(root)
                for step in super(MemoryEngine, self).steps(place)
            }
        )

    def restore(self, root: Path, step: int) -> Any:
        there = [
            place for place in self._places(root) if step in super(MemoryEngine, self).steps(place)
        ]
        restored = [super(MemoryEngine, self).restore(place, step) for place in there]
        different = difference(restored[0], restored[-1])
        assert different is None, f"memory and disk differ: {different}"
        return restored[0]

    def go_on(self, root: Path) -> int:
        with tiered(root) as opened:
            step = _go_on(opened)
        assert super().steps(root / DISK)[-1] == step, (
            "close() has not copied the newest step to the disk"
        )
        return step

    def leftovers(self, root: Path) -> list[str]:
        return [
            problem
            for place in self._places(root)
            for problem in super(MemoryEngine, self).leftovers(place)
        ]

    @staticmethod
    def _places(root: Path) -> list[Path]:
        return [place for place in (root / DISK, root / MEMORY) if (place / "zarr.json").exists()]


class RebootedEngine(MemoryEngine):
    """The same, where the machine goes with the process: what the disk lists must restore."""

    def go_on(self, root: Path) -> int:
        shutil.rmtree(root / MEMORY, ignore_errors=True)
        return super().go_on(root)

    @staticmethod
    def _places(root: Path) -> list[Path]:
        return [root / DISK] if (root / DISK).exists() else []


def _tier() -> dict[str, Scenario]:
    """Saves that are acknowledged in memory, and saves that are acknowledged once they are on the
    disk.
    """

    def prepare(root: Path) -> None:
        with tiered(root) as opened:
            for step in range(2):
                opened.save(step, torch_state(step)).wait(timeout=240)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with tiered(root) as opened:
            opened.restore()
            for step in (2, 3, 4):
                opened.save(step, torch_state(step)).wait(timeout=240)
                acknowledge(step)

    def act_persisting(root: Path, acknowledge: Acknowledge) -> None:
        with tiered(root) as opened:
            opened.restore()
            for step in (2, 3):
                opened.save(step, torch_state(step))
                opened.persist(timeout=240)
                acknowledge(step)

    return {
        "memory-killed": Scenario("memory-killed", MemoryEngine(), prepare, act, (0, 1), keep=2),
        "memory-rebooted": Scenario(
            "memory-rebooted", RebootedEngine(), prepare, act_persisting, (0, 1)
        ),
    }


# --- Orbax ----------------------------------------------------------------------------------------


class OrbaxManager(_Deltacheck):
    """``deltacheck.backends.orbax.manager()``, an Orbax ``CheckpointManager``."""

    def go_on(self, root: Path) -> int:
        # Without this option Orbax leaves what a killed save has begun, and our store the segments
        # that it may need.
        with orbax_manager(root, cleanup_tmp_directories=True) as opened:
            newest = opened.latest_step()
            step = 0
            if newest is not None:
                found = difference(state_at(newest), opened.restore(newest))
                assert found is None, found
                step = newest + 1
            orbax_save(opened, step)
        return step


@contextlib.contextmanager
def orbax_manager(
    root: Path, save_options: SaveOptions | None = None, **options: Any
) -> Iterator[Any]:
    """A manager of our handler with limits that suit a test; ``options``: of
    ``CheckpointManagerOptions``.
    """
    from orbax import checkpoint as ocp

    from deltacheck.backends.orbax import manager

    root.mkdir(parents=True, exist_ok=True)
    made = manager(
        root,
        ocp.CheckpointManagerOptions(**options),
        policy=_exact(1),
        save_options=save_options or SaveOptions(grace_seconds=0),
    )
    with made:
        yield made


def orbax_save(opened: Any, step: int) -> None:
    """Save ``state_at(step)`` and wait until it is durable."""
    import jax.numpy as jnp

    from deltacheck.backends.orbax import DeltaSaveArgs

    # 64-bit leaves stay NumPy: JAX would round them.
    state = {
        name: jnp.asarray(v) if isinstance(v, np.ndarray) and v.itemsize < 8 else v
        for name, v in state_at(step).items()
    }
    assert opened.save(step, args=DeltaSaveArgs(state)), f"Orbax has skipped step {step}"
    opened.wait_until_finished()


def _orbax(name: str, prepared: int, saves: int, keep: int | None = None) -> Scenario:
    def prepare(root: Path) -> None:
        if prepared:
            with orbax_manager(root) as opened:
                for step in range(prepared):
                    orbax_save(opened, step)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with orbax_manager(root, max_to_keep=keep) as opened:
            if prepared:
                opened.restore(prepared - 1)
            for step in range(prepared, prepared + saves):
                orbax_save(opened, step)
                acknowledge(step)

    return Scenario(name, OrbaxManager(), prepare, act, tuple(range(prepared)), keep)


# --- controls: one that must fail, one that must pass ---------------------------------------------


class OverwritingTorchSave:
    """A common practice: ``torch.save`` over the only file.

    A kill loses its steps, so the harness must report it.
    """

    def steps(self, root: Path) -> list[int]:
        return [self._load(root)["step"]] if (root / "checkpoint.pt").exists() else []

    def restore(self, root: Path, step: int) -> Any:
        return self._load(root)

    def go_on(self, root: Path) -> int:
        step = max(self.steps(root), default=-1) + 1
        self.save(root, step)
        return step

    def leftovers(self, root: Path) -> list[str]:
        return []

    @staticmethod
    def _load(root: Path) -> Any:
        import torch

        return torch.load(root / "checkpoint.pt", weights_only=True)

    @staticmethod
    def save(root: Path, step: int) -> None:
        import torch

        root.mkdir(parents=True, exist_ok=True)
        torch.save(torch_state(step), root / "checkpoint.pt")


class ReferenceProtocol:
    """The smallest protocol that keeps both promises: a file of its own, fsync, rename, fsync of
    the directory. It must pass.
    """

    def steps(self, root: Path) -> list[int]:
        return sorted(int(path.stem) for path in root.glob("*.npz"))

    def restore(self, root: Path, step: int) -> Any:
        with np.load(root / f"{step}.npz") as file:
            return {name: value if value.ndim else int(value) for name, value in file.items()}

    def go_on(self, root: Path) -> int:
        step = max(self.steps(root), default=-1) + 1
        self.save(root, step)
        return step

    def leftovers(self, root: Path) -> list[str]:
        for path in root.glob("*.tmp"):
            path.unlink()
        return []

    @staticmethod
    def save(root: Path, step: int) -> None:
        if not root.exists():
            root.mkdir()
            sync(root.parent)
        temporary = root / f"{secrets.token_hex(8)}.tmp"
        with temporary.open("xb") as file:
            np.savez(file, **state_at(step))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(root / f"{step}.npz")
        sync(root)


def sync(directory: Path) -> None:
    """fsync a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def _control(
    name: str, subject: OverwritingTorchSave | ReferenceProtocol, keep: int | None
) -> Scenario:
    def prepare(root: Path) -> None:
        for step in range(2):
            subject.save(root, step)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        for step in (2, 3):
            subject.save(root, step)
            acknowledge(step)

    return Scenario(name, subject, prepare, act, (0, 1), keep)


# --- all of them ----------------------------------------------------------------------------------

TORCH = {
    scenario.name: scenario
    for scenario in (
        _torch("first-keyframe", prepared=0, saves=1),
        _torch("delta", prepared=2, saves=2),
        _staggered(),
        _compaction(),
        _merge(),
        _keep_last(),
        _collection(),
        # Goes on from a step that is not the newest: the run was set back.
        _torch("restore-then-save", prepared=3, saves=2, restore=1),
        _repair(),
        _ranks(),
    )
}
ORBAX = {
    scenario.name: scenario
    for scenario in (
        _orbax("orbax-first", prepared=0, saves=1),
        _orbax("orbax-keep", prepared=3, saves=2, keep=2),
    )
}
CONTROLS = {
    scenario.name: scenario
    for scenario in (
        _control("torch.save-overwriting", OverwritingTorchSave(), keep=1),
        _control("reference-protocol", ReferenceProtocol(), keep=None),
    )
}
# They call what public calls and commands call, which then report the error.
COMMANDS = frozenset({"compaction", "collection", "repair", "ranks"})
TIER = _tier()
SCENARIOS = {**TORCH, **TIER, **ORBAX, **CONTROLS, "lives": _lives()}


def import_frameworks(backend: str) -> None:
    """Import what the scenarios of a backend (``"torch"`` or ``"orbax"``) need, so that a process
    forked from this one need not.
    """
    shared = [
        "deltacheck.maintain.compaction",
        "deltacheck.maintain.repair",
        "deltacheck.reader",
        "deltacheck.maintain.verify",
        "deltacheck.store.collect",
    ]
    own = {
        "torch": ["deltacheck.backends.torch"],
        "orbax": ["jax.numpy", "orbax.checkpoint", "deltacheck.backends.orbax"],
    }
    for module in (*shared, *own[backend]):
        importlib.import_module(module)
    for step in range(8):
        state_at(step)


def acknowledge_to(path: Path) -> Acknowledge:
    """Acknowledgements that outlive a kill: a line each in a file, and a mark in the trace."""
    from tests.faults import shim

    def acknowledge(step: int) -> None:
        with path.open("a") as file:
            file.write(json.dumps(step) + "\n")
        shim.mark(f"ack {step}")

    return acknowledge


def acknowledged_in(path: Path) -> set[int]:
    """Return the steps that a file acknowledges; none if there is no file."""
    return {int(line) for line in path.read_text().split()} if path.exists() else set()
