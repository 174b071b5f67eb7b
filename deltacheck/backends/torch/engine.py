"""The PyTorch engine: save and restore any nested state, asynchronously and bit for bit."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.matching import match_targets
from deltacheck.backends.torch.capture.capture import Capture
from deltacheck.backends.torch.capture.guard import Guard, Guarded
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.backends.torch.state import leaves, replica
from deltacheck.errors import Damaged, DeltacheckError, StepNotFound
from deltacheck.leaf import tree
from deltacheck.maintain.memory_tier import MemoryTier, Tier, durable_digest, most_bytes
from deltacheck.policy import KeepBest, Policy
from deltacheck.restore import damage
from deltacheck.restore.resolve import require_contract, resolve_leaves, stored_chains
from deltacheck.restore.values import Loaded, as_array, load_leaves
from deltacheck.save import exits
from deltacheck.save.handle import SaveHandle, progress_of, skipped
from deltacheck.save.options import SaveOptions, retention_of
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.saver import LeafSource, Saver
from deltacheck.store import layout, tags
from deltacheck.store.deadline import Deadline
from deltacheck.store.documents import Written
from deltacheck.store.files import storage as place
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import ObjectPath, ObjectStore
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.opened import open_alone
from deltacheck.store.root import Root

if TYPE_CHECKING:
    from deltacheck.backends.torch.group.collective import Together

log = logging.getLogger("deltacheck")


class Engine:
    """Checkpoints of one training process in one directory, or under one prefix of an object store
    (``s3://``, ``gs://``).

    ``policy``: what is promised and how long chains grow (default ``Policy.exact()``).
    ``host_cache_bytes``: most encoded bytes between the training loop and the disk; larger: a slow
    disk blocks training later, smaller: less memory. Beside it the engine holds one *shadow*, a
    copy of the state, to compare with. ``max_pending``: saves under way at most; larger: more
    overlap with a slow disk, more work lost where one fails. ``on_busy``: when that many are under
    way, ``"wait"`` for one or ``"skip"`` this save. ``capture``: ``"auto"`` reads what known
    optimizers own, and frozen weights of known modules (``guard``), behind the training loop and
    copies the rest at once; ``"eager"`` copies everything at once: safe whatever the code does
    between saves, blocks longer (host tensors) or takes as much device memory as the state until it
    is captured (CUDA tensors). ``shadow``: where the copies to compare with lie. ``"device"``:
    beside the tensors; only changes cross to the host, and capture runs at the speed of device
    memory, but it takes as much of that as the state, and 1 GiB while a save is captured.
    ``"host"``: takes no device memory, but the whole state crosses at each save, and the next
    optimizer step waits until all but ``host_cache_bytes`` of it is encoded. ``"none"``: no copies,
    least memory; what changed is written whole, largest files. ``"auto"``: ``"device"`` for CUDA
    tensors where enough memory is free at the first save, else ``"host"``; shadows of host tensors
    are always on the host. ``effort``: of the entropy stage, ``"low"``, ``"normal"``, ``"high"`` or
    ``"auto"``. Higher: smaller files, more processor time beside training; ``"auto"`` goes by
    whether saves wait for the storage or for the processor. ``durability``: what an acknowledged
    save survives. ``"power"``: a power cut; every file and directory entry is synced first, which
    costs a flush of the disk's cache for each. ``"process"``: only the end of this process, however
    it comes; nothing is synced and saves end sooner, but a power cut or a crash of the operating
    system may take the last saves, or leave steps that are listed and raise ``Damaged``.
    ``verify``: whether each save is read back from disk and compared with the state as it was
    captured. ``"none"``: no; a restore checks what was written. ``"commit"``: what the save wrote,
    before its step exists, so that a fault on the way to the disk is a failed save; it commits
    later by the time that reading takes. ``"receipt"``: the whole step, after the commit and behind
    everything else: ``handle.receipt``, a failure is logged and raised by the next call. Both read
    about as much as a restore at each save, and hash the whole state at the capture. ``keep_last``,
    ``keep_every``, ``keep_best``: after each save, delete the checkpoints that none of them keeps
    (default: keep all): so many of the newest, steps that a number divides, those with the best
    metrics (a ``deltacheck.KeepBest``, or several). The newest step and tagged ones stay in any
    case. Larger: more to go back to, more disk space. ``compact_after``: once a leaf's chain has
    this many deltas, write it whole from what is on the disk, behind the training; later saves go
    on from there. Smaller than half of the policy's ``max_chain_depth``, it spares saves their
    keyframes. Smaller: faster restores, more reading and writing beside training (default: saves
    write keyframes themselves). ``grace_seconds``: how long unneeded segments stay for readers that
    are about to open them; what a reader has open stays as long as it reads.
    ``io_timeout_seconds``: longest wait for the storage before a save is given up.
    ``exit_timeout_seconds``: longest wait for pending saves at interpreter exit; where one fails
    then, or takes longer, that is said on stderr, and the exit status is 120. Longer: a slow
    storage gets the last save through; shorter: a dead one lets the process end.
    ``engine.restored_step``: the training step that the last ``restore`` gave. ``storage``: how an
    object store is reached (default: by the environment alone). ``memory``: a directory in memory,
    or a ``deltacheck.MemoryTier``: each step is committed there first, and copied to ``root``
    behind the training. Saves end sooner, also at every step, and a process that died goes on from
    the newest; a power cut takes the steps that are not copied yet (``persist`` waits until they
    are), and memory is used beside the shadow. ``durability`` and ``keep_*`` then speak of
    ``root``. ``process_group``: the ranks that save together (``torch.distributed.group.WORLD``);
    every one of them opens the root and makes the same calls. A state may then hold DTensors
    (FSDP2, tensor parallel) and ``Shard``; each rank writes its own parts, what several ranks have
    alike is written once, and rank 0 commits one step for all once every part is durable. A failure
    of one rank is raised on all. The keys of the state's dicts may differ between ranks; a leaf or
    a number of the same path must not. Needs an exact policy and ``max_pending=1``; a save begins
    with an exchange of a few bytes between the ranks.

    Raises ``RootBusy`` (naming the holder) where another process writes to ``root``,
    ``ForeignMemory`` where ``memory`` holds what is not this run's newest, ``NotACheckpointRoot``,
    ``UnsupportedFormat``, ``OSError`` where it cannot be written, ``StorageFailed`` where an object
    store does not answer or honours no conditional writes.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | ObjectPath,
        *,
        policy: Policy | None = None,
        host_cache_bytes: int = 1 << 30,
        max_pending: int = 1,
        on_busy: str = "wait",
        capture: str = "auto",
        shadow: str = "auto",
        effort: str = "normal",
        durability: str = "power",
        verify: str = "none",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: KeepBest | Iterable[KeepBest] = (),
        compact_after: int | None = None,
        grace_seconds: float = 60.0,
        io_timeout_seconds: float = 600.0,
        exit_timeout_seconds: float = 120.0,
        storage: ObjectStore | None = None,
        memory: MemoryTier | str | os.PathLike[str] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if capture not in ("auto", "eager"):
            raise ValueError(f"capture must be 'auto' or 'eager', not {capture!r}")
        options = SaveOptions(
            policy=policy or Policy.exact(),
            host_cache_bytes=host_cache_bytes,
            max_pending=max_pending,
            on_busy=on_busy,
            shadow=shadow,
            effort=effort,
            durability=Durability.of(durability),
            verify=verify,
            retention=retention_of(keep_last, keep_every, keep_best),
            compact_after=compact_after,
            grace_seconds=grace_seconds,
            io_timeout_seconds=io_timeout_seconds,
            exit_timeout_seconds=exit_timeout_seconds,
        )
        path = place.of(root, storage).absolute()
        self._together: Together | None = None
        if process_group is not None:
            if memory is not None:
                raise ValueError(
                    "a memory tier is of one process: process_group and memory cannot be given"
                    " together yet"
                )
            if not options.policy.is_exact or max_pending != 1 or compact_after is not None:
                raise ValueError(
                    "ranks that save together need an exact policy, max_pending=1 and no"
                    " compact_after"
                )
            from deltacheck.backends.torch.group.collective import Together

            self._together = Together(process_group, io_timeout_seconds)
        opener = open_alone if self._together is None else self._together.open
        store, lease, next_seq = opener(path, options.durability)
        self._root = Root(path, store)
        self._writer = RootWriter(self._root, lease, options.retention, grace_seconds)
        self._capture = Capture(shadow, host_cache_bytes, in_order=options.policy.is_exact)
        self._eager = capture == "eager"
        self._tier: Tier | None = None
        try:
            if memory is not None:
                self._tier = Tier(MemoryTier.of(memory), self._writer, options)
            # Where saves are written, and the next one's chains hang from.
            self._live = self._root if self._tier is None else self._tier.root
            self._saver = Saver(
                self._live.store,
                TorchCodec(),
                options,
                next_seq=max(next_seq, self._live.next_seq()),
            )
        except BaseException:
            self._release()
            raise
        self._writer.protect(self._saver.protected_segments)
        if self._together is not None:
            self._writer.protect(self._together.protected_segments)
        if self._tier is not None:
            self._tier.start(self._saver.protected_segments)
        self.restored_step: int | None = None
        self._guard = Guard(self.before_update)
        self._ending = _Ending(self)
        exits.finish_at_exit(self._ending, str(path), exit_timeout_seconds)

    @property
    def root(self) -> Path | ObjectPath:
        """Where the checkpoints are: a directory, or a prefix of an object store."""
        return self._root.path

    def save(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step``, and return while it is written.

        ``state``: nested dicts, lists, tuples and deques of tensors, NumPy arrays, numbers, text,
        bytes and ``None``; state dicts of modules, optimizers and schedulers are such. Tied tensors
        are stored once and tied again on restore. ``metrics``: numbers kept with the step.

        Raises ``UnsupportedLeaf`` or ``DuplicatePath`` for what cannot be kept exactly,
        ``SaveFailed`` for an earlier save's failure that nobody has seen yet (this step is then not
        saved). A failure of this save is on the handle, in the log, and raised by the next call.
        """
        begin = time.perf_counter()
        flat = (
            tree.flatten(state, leaves.describe)
            if self._together is None
            else self._together.flatten(state)
        )
        flattened = time.perf_counter() - begin
        handle = self._save(step, flat, metrics)
        progress_of(handle).add_blocking(flattened)
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
        """Save a flattened state. ``more``: leaves beside those of ``flat``; ``replay``: how the
        tree's leaves come from all these.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step must be an integer of at least 0, not {step!r}")
        begin = time.perf_counter()
        commit: Callable[[Manifest], Written] = self._commit
        abandon: Callable[[BaseException], None] | None = None
        if self._together is not None:
            if more or replay is not None:
                raise ValueError(
                    "a gradient log is of one process; it cannot be kept by a process group"
                )
            mine = self._together.begin(self._saver, step, flat)
            if mine is None:
                return skipped(step)
            flat = mine
            commit, abandon = self._together.attempt(self._commit)
        try:
            sources = self._capture.sources(
                flat, Guarded() if self._eager else self._guard.guarded()
            ) | dict(more or {})
            if not self._has_room(step, sources.values()):
                return skipped(step)
            planned = time.perf_counter() - begin
            handle = self._saver.save(
                step,
                flat.skeleton,
                {path: sources[path] for path in sorted(sources)},
                commit,
                metrics={name: float(value) for name, value in (metrics or {}).items()},
                replay=replay,
                note=note,
                abandon=abandon,
            )
        except BaseException as error:
            if abandon is not None:
                abandon(error)
            raise
        progress_of(handle).add_blocking(planned)
        return handle

    def _has_room(self, step: int, sources: Iterable[LeafSource]) -> bool:
        """Wait until the memory tier, where there is one, has room for one more save; ``False``
        where it is to be skipped instead.
        """
        if self._tier is None:
            return True
        self._saver.check_usable()
        self._tier.raise_unseen()
        sizes = [source.spec.raw_bytes for source in sources]
        most = most_bytes(sum(sizes), len(sizes))
        under_way = lambda: len(self._saver.pending())  # noqa: E731 - shorter than a def
        return self._tier.make_room(
            step,
            most,
            under_way,
            self._saver.start_over,
            wait=self._saver.options.on_busy == "wait",
        )

    def before_update(self) -> None:
        """Wait until the saves under way have read the state. Called before every torch optimizer
        step; call it yourself before any other write.
        """
        self._saver.settle_reads()
        self._capture.hold()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Update the state inside ``with engine.lock():`` and no save under way sees it."""
        self.before_update()
        yield

    def guard(self, owner: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Tell the engine of an optimizer before its first step, so that already the first save
        reads
        its tensors behind the training loop; or of a module, so that its frozen parameters are read
        there too: at each save those that need no gradient and that no torch operation has written
        to since the save before. Its buffers, and what is written between saves, as moving averages
        are, are still read at once.

        Saves of frozen weights then return sooner, and do not copy them on a GPU. In return, what
        writes to them must wait for the capture: ``before_update()`` first. A torch operation that
        does not wait fails the save with ``SnapshotTorn`` (on a GPU one that comes before the reads
        are enqueued). A write through ``.data``, NumPy or DLPack, as adapters are merged, leaves no
        trace: between ``save`` and the end of the capture it may reach the checkpoint. After that,
        the next save stores it: every byte is compared.

        The engine keeps neither optimizers nor modules alive.
        """
        self._guard.add(owner)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save under way is committed (with ``memory``: there; see ``persist``).
        Raises the first failure nobody has seen yet; ``TimeoutError`` after ``timeout`` seconds;
        without one, ``StorageTimeout`` where nothing at all has happened for twice
        ``io_timeout_seconds``.
        """
        self._saver.wait(timeout)
        if self._tier is not None:
            self._tier.raise_unseen()

    def persist(self, timeout: float | None = None) -> None:
        """Wait until the newest step is in ``root``, as durable as ``durability`` says, also where
        ``memory`` holds it so far. Raises what ``wait`` raises, and ``SaveFailed`` where it cannot
        be copied there.
        """
        deadline = Deadline.after(timeout)
        self._saver.wait(timeout)
        if self._tier is not None:
            self._tier.persist(None, deadline.left)

    def steps(self) -> list[int]:
        """The committed steps, ascending; with ``memory``, those in memory and those in ``root``
        (``deltacheck.open(root).steps()``).
        """
        return (
            self._root.steps()
            if self._tier is None
            else sorted({*self._root.steps(), *self._live.steps()})
        )

    def tag(self, step: int | str | None, name: str, *, move: bool = False) -> None:
        """Call a committed step (by number, by another tag; ``None``: the newest) ``name``: it
        stays
        until the tag is taken away.

        The tag means this save, also where a resumed run saves the step's number again. ``move``:
        also where the name has another step. A step that is only in memory is copied to ``root``
        first. Raises ``ValueError`` for a name that cannot be one, ``StepNotFound``, ``RootBusy``
        where the name is taken.
        """
        if self._tier is None:
            self._once(lambda: tags.put(self._root, step, name, move=move))
            return
        with self._tier.retention:  # between the copy and the tag
            root, manifest = self._find(step)
            if root is self._live and self._twin(manifest) is None:
                self._tier.persist(manifest, None)
            tags.put(self._root, step, name, move=move)

    def untag(self, name: str) -> None:
        """Take a tag away. Raises ``StepNotFound`` where there is none."""
        self._once(lambda: tags.remove(self._root, name))

    def tags(self) -> dict[str, int]:
        """The tags and their training steps."""
        return {name: tag.step for name, tag in tags.read_all(self._root.store.path)[0].items()}

    def delete(self, step: int) -> None:
        """Delete a committed step; other steps stay whole, whatever they share with it.

        Raises ``StepNotFound``, ``StepTagged`` where it has a tag.
        """
        if self._tier is None:
            self._once(lambda: self._writer.delete(step))
        else:
            self._tier.delete(step)

    def restore(
        self,
        step: int | str | None = None,
        into: object = None,
        *,
        contract: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_bytes: int | None = None,
        fallback: bool = False,
        expected_digest: str | None = None,
    ) -> Any:
        """Restore a committed step (a number, or a tag; by default the newest), every byte
        verified;
        the next save continues its chain.

        Without ``into``: the nested state as it was saved, tensors on the host. With ``into``, a
        state of the same structure: its tensors are filled in place, wherever they live, and the
        state is returned with them and the restored numbers; nothing of it changes before
        everything that the step has a digest of was verified. ``contract``: refuse a step with a
        leaf that was saved under a weaker one than ``"exact"`` or ``"bounded"``; by default each
        comes as it was saved. ``optimizer``: what a step that a ``GradientLog`` stored is replayed
        with; made as at the save, its own tensors are neither read nor changed. ``max_bytes``:
        refuse before allocating more than this (a replay takes twice the state beside it).
        ``fallback``: where the step is damaged, take the newest before it that is whole: training
        goes on, with older values, and saves those steps again; ``engine.restored_step`` and a
        warning in the log say which. ``expected_digest``: refuse a step whose manifest has another
        digest than this, which the save's report and ``deltacheck show`` give.

        Raises ``StepNotFound``, ``ContractNotMet`` (naming the leaves), ``ReplayNeeded`` for such a
        step without an optimizer, ``ReplayDiffers`` (naming leaf, both digests and way out) where
        the replay does not give what was saved, ``TreeMismatch`` (naming leaf and both values),
        ``Damaged`` or ``ChainBroken`` (naming step, leaf, file and the steps that still restore).
        """
        with contextlib.nullcontext() if self._together is None else self._together.telling():
            self._saver.check_usable()
            self._saver.wait()

        if self._together is not None:
            if fallback or optimizer is not None:
                raise ValueError("a process group restores without fallback= and optimizer=")
            if into is not None:
                self.before_update()
            target = None if into is None else self._together.flatten(into, target=True)
            manifest, state = self._together.restore(
                self._root, self._saver, step, target, contract, max_bytes, expected_digest
            )
            self.restored_step = manifest.step
            return state if into is None else self._together.given(into, state)

        def give(root: Root, manifest: Manifest) -> Any:
            own = (
                None
                if root is self._root or expected_digest is None
                else durable_digest(self._root, manifest)
            )
            root.require_digest(manifest, expected_digest, own)
            with damage.named(root, manifest):
                return self._give(root, manifest, into, contract, optimizer, max_bytes)

        with (
            contextlib.nullcontext() if self._tier is None else self._tier.lock
        ):  # what is read, the next save stands on
            if fallback:
                roots = (
                    [self._root]
                    if isinstance(step, str) or self._tier is None
                    else [self._live, self._root]
                )
                manifest, state = damage.newest_whole_of(roots, step, give)
            else:
                root, manifest = self._find(step)
                state = self._give_or_twin(root, manifest, give)
        self.restored_step = manifest.step
        return state

    def _find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """The step that is meant, and where: the newest save of it; in memory where it is in both.
        Tags are those of the durable root.
        """
        if self._tier is None or isinstance(step, str):
            return self._root, self._root.manifest(step)
        found: list[tuple[Root, Manifest]] = []
        for root in (self._live, self._root):
            with contextlib.suppress(StepNotFound):
                found.append((root, root.manifest(step)))
        if not found:
            there = ", ".join(map(str, self.steps())) or "none"
            raise StepNotFound(
                f"neither {self._live.path} nor {self._root.path} has"
                f" {'any step' if step is None else f'step {step}'}; steps: {there}"
            )
        return max(found, key=lambda one: one[1].seq)

    def _twin(self, manifest: Manifest) -> Manifest | None:
        """The durable form of a step that is in memory; ``None`` where there is none that can be
        read.
        """
        path = (
            self._root.path / layout.CHECKPOINTS / layout.checkpoint_id(manifest.seq) / "zarr.json"
        )
        try:
            twin = self._root.read(path)
        except (FileNotFoundError, Damaged):
            return None
        return twin if twin.nonce == manifest.nonce else None

    def _give_or_twin(
        self, root: Root, manifest: Manifest, give: Callable[[Root, Manifest], Any]
    ) -> Any:
        """A step from where it was found; where that is memory, and damaged, from the disk."""
        try:
            return give(root, manifest)
        except Damaged as error:
            twin = None if root is self._root else self._twin(manifest)
            if twin is None:
                raise
            log.warning("%s. It is read from %s instead", error, self._root.path)
            return give(self._root, twin)

    def _give(
        self,
        root: Root,
        manifest: Manifest,
        into: object,
        contract: str | None,
        optimizer: torch.optim.Optimizer | None,
        max_bytes: int | None,
    ) -> Any:
        require_contract(manifest, contract)
        target = None if into is None else tree.flatten(into, leaves.describe)
        chosen = None if target is None else match_targets(manifest, target)
        found = resolve_leaves(root, manifest, stored=optimizer is not None, max_bytes=max_bytes)
        stored: dict[str, NDArray[np.uint8]] = {}
        into_memory: dict[str, NDArray[np.uint8]] = {}
        if target is not None and chosen is not None:
            self.before_update()
            if manifest.replay is None:  # which has an order of its own
                memory = {
                    chosen[path]: leaves.memory_of(value) for path, value in target.arrays.items()
                }
                into_memory = {path: of for path, of in memory.items() if of is not None}
        loaded = load_leaves(
            found, max_bytes=max_bytes, codec=self._saver.codec, stored=stored, into=into_memory
        )
        inputs: set[str] = set()
        if manifest.replay is not None and optimizer is not None:
            loaded |= replica.replayed(root, manifest, manifest.replay, loaded, optimizer)
            inputs = manifest.replay.inputs
        if target is None or chosen is None:
            state = leaves.tree_of(manifest.tree, loaded, stored=stored)
        else:
            filled = {
                path: _fill(value, loaded[chosen[path]]) for path, value in target.arrays.items()
            }
            owners = tree.array_paths(target.skeleton)
            state = tree.unflatten(manifest.tree, lambda path, owner, tag: filled[owners[path]])
        chains = stored_chains(leaf for path, leaf in found.items() if path not in inputs)
        if (
            root is not self._live
        ):  # what is only on the disk is no base for what is written to memory, where chains begin anew
            chains, stored = {}, {}
        self._saver.adopt(chains, stored, manifest)
        return state

    def close(self, timeout: float | None = None) -> None:
        """Finish the saves under way and give the root back. Raises what ``wait`` raises. More than
        once does nothing.

        Where time ran out, the saves go on as long as the process lives, and the root is given back
        after them. In a forked child: does nothing to its parent's saves.
        """
        self._guard.close()
        exits.forget(self._ending)
        if not self._saver.is_ours():
            return
        deadline = Deadline.after(timeout)
        try:
            self._saver.close(timeout)
            self._live.store.close()
        finally:
            self._saver.when_stopped(
                self._release if self._tier is None else partial(self._tier.stop, self._release)
            )
            if self._tier is not None and not self._saver.pending():
                self._tier.await_end(deadline.left)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an Engine cannot be pickled or copied: it holds its root. Save in the process that"
            " opened it, or open another root there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except DeltacheckError:
            if error is None:
                raise
            log.exception("a save failed while another error ended the training")

    def _commit(self, manifest: Manifest) -> Written:
        if self._tier is not None:
            return self._tier.commit(manifest)
        return self._writer.commit(manifest)

    def _once(self, action: Callable[[], object]) -> None:
        """Do what is done once, however many ranks there are."""
        if self._together is None:
            action()
        else:
            self._together.first(action)

    def _release(self) -> None:
        """Give the root back; both, where there are two."""
        if self._together is not None:
            self._together.close()
        if self._tier is not None:
            self._tier.release()
        self._writer.release()


class _Ending:
    """An engine as what finishes at the end of the process: in memory is not enough then."""

    def __init__(self, engine: Engine) -> None:
        self.wait, self.close = engine.persist, engine.close


def _fill(value: object, item: Loaded) -> object:
    """A leaf of a restore target with the restored content: filled in place, but for NumPy scalars,
    which cannot be.
    """
    if isinstance(value, torch.Tensor):
        given = leaves.tensor_of(item)
        if given.data_ptr() != value.data_ptr():  # else it was computed there
            with torch.no_grad():
                value.copy_(given)
        return value
    if isinstance(value, np.ndarray):
        np.copyto(value, as_array(item))
        return value
    return as_array(item)[()]
