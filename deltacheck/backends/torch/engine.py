"""The PyTorch engine: save and restore any nested state, asynchronously and bit for bit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck import restore, tree
from deltacheck.backends.base import match_targets
from deltacheck.backends.torch import leaves, replica
from deltacheck.backends.torch.capture import Capture
from deltacheck.backends.torch.codec import TorchCodec
from deltacheck.backends.torch.guard import Guard
from deltacheck.errors import DeltacheckError
from deltacheck.handle import SaveHandle
from deltacheck.policy import Policy
from deltacheck.save import LeafSource, Saver
from deltacheck.store import collect
from deltacheck.store.lease import Lease
from deltacheck.store.root import Root, Store, commit
from deltacheck.store.schema import Manifest, Replay

log = logging.getLogger("deltacheck")


class Engine:
    """Checkpoints of one training process in one directory.

    ``policy``: what is promised and how long chains grow (default ``Policy.exact()``). ``host_cache_bytes``: most encoded bytes
    between the training loop and the disk; larger: a slow disk blocks training later, smaller: less memory. Beside it the
    engine holds one *shadow*, a copy of the state, to compare with. ``max_pending``: saves under way at most; larger: more
    overlap with a slow disk, more work lost where one fails. ``on_busy``: when that many are under way, ``"wait"`` for one or
    ``"skip"`` this save. ``capture``: ``"auto"`` reads what known optimizers own behind the training loop and copies the rest
    at once; ``"eager"`` copies everything at once: safe whatever the code does between saves, blocks longer (host tensors) or
    takes as much device memory as the state until it is captured (CUDA tensors). ``shadow``: where the copies to compare with lie.
    ``"device"``: beside the tensors; only changes cross to the host, and capture runs at the speed of device memory, but it takes
    as much of that as the state, and 1 GiB while a save is captured. ``"host"``: takes no device memory, but the whole state
    crosses at each save, and the next optimizer step waits until all but ``host_cache_bytes`` of it is encoded. ``"none"``: no
    copies, least memory; what changed is written whole, largest files. ``"auto"``: ``"device"`` for CUDA tensors where enough
    memory is free at the first save, else ``"host"``; shadows of host tensors are always on the host. ``effort``: of
    the entropy stage, ``"low"``, ``"normal"``, ``"high"`` or ``"auto"``. Higher: smaller files, more processor time beside training;
    ``"auto"`` goes by whether saves wait for the storage or for the processor. ``keep_last``:
    delete older checkpoints (default: keep all). ``grace_seconds``: how long unneeded segments stay for readers that began
    before. ``io_timeout_seconds``: longest wait for the storage before a save is given up. ``exit_timeout_seconds``: longest
    wait for pending saves at interpreter exit.

    Raises ``RootBusy`` (naming the holder) where another process writes to ``root``, ``NotACheckpointRoot``,
    ``UnsupportedFormat``, ``OSError`` where it cannot be written.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        policy: Policy | None = None,
        host_cache_bytes: int = 256 << 20,
        max_pending: int = 1,
        on_busy: str = "wait",
        capture: str = "auto",
        shadow: str = "auto",
        effort: str = "normal",
        keep_last: int | None = None,
        grace_seconds: float = 60.0,
        io_timeout_seconds: float = 600.0,
        exit_timeout_seconds: float = 120.0,
    ) -> None:
        if capture not in ("auto", "eager"):
            raise ValueError(f"capture must be 'auto' or 'eager', not {capture!r}")
        if shadow not in ("auto", "device", "host", "none"):
            raise ValueError(f"shadow must be 'auto', 'device', 'host' or 'none', not {shadow!r}")
        if on_busy not in ("wait", "skip"):
            raise ValueError(f"on_busy must be 'wait' or 'skip', not {on_busy!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        path = Path(root).absolute()
        store = Store.create(path)
        self._lease = Lease(path)
        self._root = Root(path, store)
        self._on_busy = on_busy
        policy = policy or Policy.exact()
        self._capture = Capture(shadow, host_cache_bytes, in_order=policy.is_exact)
        self._eager = capture == "eager"
        self._keep_last = keep_last
        self._grace_seconds = grace_seconds
        try:
            self._saver = Saver(
                store,
                TorchCodec(),
                policy,
                next_seq=self._root.next_seq(),
                host_cache_bytes=host_cache_bytes,
                max_pending=max_pending,
                io_timeout_seconds=io_timeout_seconds,
                keep_shadow=shadow != "none",
                effort=effort,
            )
        except BaseException:
            self._lease.release()
            raise
        self._guard = Guard(self.before_update)
        self._at_exit = _close_at_exit(self, exit_timeout_seconds)

    @property
    def root(self) -> Path:
        return self._root.path

    def save(self, step: int, state: object, *, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step``, and return while it is written.

        ``state``: nested dicts, lists, tuples and deques of tensors, NumPy arrays, numbers, text, bytes and ``None``; state
        dicts of modules, optimizers and schedulers are such. Tied tensors are stored once and tied again on restore.
        ``metrics``: numbers kept with the step.

        Raises ``UnsupportedLeaf`` or ``DuplicatePath`` for what cannot be kept exactly, ``SaveFailed`` for an earlier save's
        failure that nobody has seen yet (this step is then not saved). A failure of this save is on the handle, in the log, and
        raised by the next call.
        """
        begin = time.perf_counter()
        flat = tree.flatten(state, leaves.describe)
        flattened = time.perf_counter() - begin
        handle = self._save(step, flat, metrics)
        handle._add_blocking(flattened)
        return handle

    def _save(
        self,
        step: int,
        flat: tree.Flat,
        metrics: Mapping[str, float] | None,
        *,
        more: Mapping[str, LeafSource] | None = None,
        replay: Replay | None = None,
        note: str = "",
    ) -> SaveHandle:
        """Save a flattened state. ``more``: leaves beside those of ``flat``; ``replay``: how the tree's leaves come from all these."""
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step must be an integer of at least 0, not {step!r}")
        begin = time.perf_counter()
        sources = self._capture.sources(flat, set() if self._eager else self._guard.owned()) | dict(more or {})
        planned = time.perf_counter() - begin
        handle = self._saver.save(
            step,
            flat.skeleton,
            {path: sources[path] for path in sorted(sources)},
            self._commit,
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            on_busy=self._on_busy,
            replay=replay,
            note=note,
        )
        handle._add_blocking(planned)
        return handle

    def before_update(self) -> None:
        """Wait until the saves under way have read the state. Called before every torch optimizer step; call it yourself before any other write."""
        self._saver.settle_reads()
        self._capture.hold()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Update the state inside ``with engine.lock():`` and no save under way sees it."""
        self.before_update()
        yield

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the engine of an optimizer before its first step, so that already the first save reads its tensors behind the training loop."""
        self._guard.add(optimizer)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save under way is committed. Raises the first failure nobody has seen yet; ``TimeoutError`` after ``timeout`` seconds."""
        self._saver.wait(timeout)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self._root.steps()

    def restore(
        self,
        step: int | None = None,
        into: object = None,
        *,
        contract: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_bytes: int | None = None,
        expected_digest: str | None = None,
    ) -> Any:
        """Restore a committed step (by default the newest), every byte verified; the next save continues its chain.

        Without ``into``: the nested state as it was saved, tensors on the host. With ``into``, a state of the same structure:
        its tensors are filled in place, wherever they live, and the state is returned with them and the restored numbers.
        ``contract``: refuse a step with a leaf that was saved under a weaker one than ``"exact"`` or ``"bounded"``; by default each
        comes as it was saved. ``optimizer``: what a step that a ``GradientLog`` stored is replayed with; made as at the save, its
        own tensors are neither read nor changed. ``max_bytes``: refuse before allocating more than this (a replay takes twice the
        state beside it).
        ``expected_digest``: refuse a step whose manifest has another digest than this, which the save's report and ``deltacheck show`` give.

        Raises ``StepNotFound``, ``ContractNotMet`` (naming the leaves), ``ReplayNeeded`` for such a step without an optimizer,
        ``ReplayDiffers`` (naming leaf, both digests and way out) where the replay does not give what was saved, ``TreeMismatch``
        (naming leaf and both values), ``Damaged`` or ``ChainBroken`` (naming leaf, segment and way out).
        """
        self._saver.check_usable()
        self._saver.wait()
        manifest = self._root.manifest(step)
        self._root.require_digest(manifest, expected_digest)
        restore.require(manifest, contract)
        target = None if into is None else tree.flatten(into, leaves.describe)
        chosen = None if target is None else match_targets(manifest, target)
        found = restore.resolve(self._root, manifest, stored=optimizer is not None, max_bytes=max_bytes)
        stored: dict[str, NDArray[np.uint8]] = {}
        loaded = restore.load(found, max_bytes=max_bytes, codec=self._saver.codec, stored=stored)
        inputs: set[str] = set()
        if manifest.replay is not None and optimizer is not None:
            loaded |= replica.replayed(self._root, manifest, manifest.replay, loaded, optimizer)
            inputs = manifest.replay.inputs
        if target is None or chosen is None:
            state = leaves.tree_of(manifest.tree, loaded)
        else:
            self.before_update()
            filled = {path: _fill(value, loaded[chosen[path]]) for path, value in target.arrays.items()}
            owners = tree.array_paths(target.skeleton)
            state = tree.unflatten(manifest.tree, lambda path, owner, tag: filled[owners[path]])
        chains = restore.stored_chains(leaf for path, leaf in found.items() if path not in inputs)
        self._saver.adopt(chains, stored, manifest)
        return state

    def close(self, timeout: float | None = None) -> None:
        """Finish the saves under way and give the root back. Raises what ``wait`` raises. More than once does nothing."""
        self._guard.close()
        atexit.unregister(self._at_exit)
        try:
            self._saver.close(timeout)
            self._root.store.close()
        finally:
            self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except DeltacheckError:
            if error is None:
                raise
            log.exception("a save failed while another error ended the training")

    def _commit(self, manifest: Manifest) -> int:
        written = commit(self._root.path, manifest)
        if self._keep_last is not None:
            try:
                self._retain(self._keep_last)
            except Exception:
                log.warning("step %d is committed, but older ones could not be deleted", manifest.step, exc_info=True)
        return written

    def _retain(self, keep_last: int) -> None:
        checkpoints = self._root.checkpoints()
        for old in checkpoints[: max(0, len(checkpoints) - keep_last)]:
            collect.delete_checkpoint(self._root, old.seq)
        if len(checkpoints) > keep_last:
            collect.collect(self._root, grace_seconds=self._grace_seconds, protected=self._saver.protected_segments())


def _fill(value: object, item: restore.Loaded) -> object:
    """A leaf of a restore target with the restored content: filled in place, but for NumPy scalars, which cannot be."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(leaves.tensor_of(item))
        return value
    if isinstance(value, np.ndarray):
        np.copyto(value, restore.as_array(item))
        return value
    return restore.as_array(item)[()]


def _close_at_exit(engine: Engine, timeout: float) -> Any:
    """Finish pending saves when the interpreter ends, without keeping the engine alive."""
    reference = weakref.ref(engine)

    def close() -> None:
        living = reference()
        if living is not None:
            try:
                living.close(timeout)
            except (DeltacheckError, TimeoutError) as error:
                log.error("at exit: %s", error)

    atexit.register(close)
    return close
