"""One process's part in the saves of a root that DCP coordinates: its saver, which lives across
them,
and on the coordinator plan and commit.

DCP's own collectives carry what the ranks tell one another: the coordinator's plan goes out with
DCP's plan (``Task``), what each rank has made durable comes back with its results (``Part``). Only
the coordinator learns whether a step came to exist. So each rank takes what it wrote for the base
of its next save for the time being, and drops it where the next task says that the step was not
committed.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch.distributed.checkpoint.planner import SavePlan

from deltacheck.backends.torch.capture.capture import Capture
from deltacheck.backends.torch.capture.guard import Guarded
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.codec.base import U8
from deltacheck.errors import SaveFailed
from deltacheck.leaf import sharding
from deltacheck.leaf.sharding import Before, Held, Holdings, Plan, Share
from deltacheck.leaf.structs import known
from deltacheck.leaf.tree import Flat, Node
from deltacheck.restore.chain import Chain
from deltacheck.save import exits
from deltacheck.save.joint import Report, merged
from deltacheck.save.options import SaveOptions
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.saver import Saver
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place
from deltacheck.store.lock.lease import Lease
from deltacheck.store.manifest import Manifest
from deltacheck.store.opened import Opened, open_alone
from deltacheck.store.root import Root, Store


class Task(msgspec.Struct, frozen=True):
    """What the coordinator gives a rank to do. ``seq``: of the save; ``committed``: of the newest
    step that this stream has committed, -1: none.
    """

    step: int
    seq: int
    committed: int
    share: Share


class Part(msgspec.Struct, frozen=True):
    """What a rank has done. ``sizes``: bytes of its objects (``names.OBJECT``), by leaf path, which
    nobody knew before they were written.
    """

    report: Report
    sizes: dict[str, int]


known(Task, Part)


class Restored(NamedTuple):
    """What a reader has kept of a step: where its tiles came from, and the bytes of those that were
    read whole.
    """

    manifest: Manifest
    chains: dict[str, Chain]
    stored: dict[str, U8]


class Stream:
    """Made by ``stream_of``, one a root and process. The calls of one save come one after the
    other; saves do not overlap.
    """

    def __init__(self, path: Place, options: SaveOptions) -> None:
        self.path = path
        self.options = options
        self.plans: list[weakref.ref[SavePlan]] = []  # of the newest save, on the coordinator
        self.capture = Capture(options.shadow, options.host_cache_bytes, in_order=True)
        self._writer: RootWriter | None = None
        self._saver: Saver | None = None
        self._holdings: list[Holdings] = []
        self._plan: Plan = {}
        self._shares: list[Share] = []
        self._last_seq = -1
        self._committed = -1
        self._written = (
            -1
        )  # the save that the base is of, but for one that is known to be committed or void
        self._manifest: Manifest | None = None
        self._newest: frozenset[str] = frozenset()  # segments of the step being committed

    def lead(self) -> None:
        """Take the root, where this process does not have it. Raises what opening raises
        (``RootBusy``, ...).
        """
        if self._saver is None:
            self._begin(open_alone(self.path, self.options.durability))
        elif self._opened.lease is None:
            self._opened.lease = Lease(self.path)
            self._last_seq = max(self._last_seq, self._opened.root.next_seq() - 1)

    def follow(self) -> Saver:
        """Be ready to write to a root that this process or another has taken."""
        if self._saver is None:
            self._begin(
                Opened(Store.create(self.path, durability=self.options.durability), None, 0)
            )
        assert self._saver is not None
        self._saver.check_usable()
        return self._saver

    def _begin(self, opened: Opened) -> None:
        root = Root(self.path, opened.store)
        self._writer = RootWriter(
            root, opened.lease, self.options.retention, self.options.grace_seconds
        )
        try:
            self._saver = Saver(opened.store, TorchCodec(), self.options, next_seq=opened.next_seq)
        except BaseException:
            self._writer.release()
            raise
        self._writer.protect(self._saver.protected_segments)
        self._writer.protect(lambda: self._newest)
        exits.finish_at_exit(self, str(self.path), self.options.exit_timeout_seconds)

    @property
    def _opened(self) -> RootWriter:
        assert self._writer is not None
        return self._writer

    def plan(self, step: int, held: Sequence[Mapping[str, Held]]) -> list[Task]:
        """On the coordinator: who writes what. ``held``: by rank. Raises ``RankFailed`` where they
        do not fit together.
        """
        holdings = [Holdings.of(one) for one in held]
        if holdings != self._holdings:
            restored = _restored.get(str(self.path))
            before = (
                {}
                if restored is None
                else {path: Before(cut.cuts) for path, cut in restored.manifest.tiles.items()}
            )
            before |= {path: Before(one.cuts, one.owners) for path, one in self._plan.items()}
            self._plan = sharding.plan(holdings, before)
            self._shares = sharding.shares(self._plan, len(holdings))
            self._holdings = holdings
        # Also after a save that failed before this process has written anything for it, others may
        # have.
        self._last_seq = max(self._last_seq + 1, self.follow().standing()[1])
        return [Task(step, self._last_seq, self._committed, share) for share in self._shares]

    def save(self, task: Task, flat: Flat) -> Part:
        """Write this rank's tiles, ``flat``'s leaves, and return once they are durable. Raises
        ``SaveFailed``.
        """
        saver = self.follow()
        saver.number_from(task.seq)
        if saver.standing()[1] != task.seq:
            raise SaveFailed(
                f"step {task.step} would be save {task.seq} of {self.path}, but this rank has"
                " written later ones: the plan is not of this save. Start the run again from its"
                " newest step"
            )
        if self._written not in (-1, task.committed):
            saver.forget()  # what it wrote last belongs to no step, and may be collected
        self._written, self._manifest = task.seq, None
        restored = _restored.pop(str(self.path), None)
        if restored is not None and not saver.leaves:
            own = [
                name for name in flat.leaves if name in restored.chains and name in restored.stored
            ]
            chains = {name: restored.chains[name] for name in own}
            saver.adopt(chains, {name: restored.stored[name] for name in own}, restored.manifest)
        written: list[Manifest] = []

        def durable(manifest: Manifest) -> Written:
            written.append(manifest)
            return Written(0, "")

        owned = {
            value.untyped_storage().data_ptr()
            for value in flat.arrays.values()
            if hasattr(value, "untyped_storage")
        }
        sources = self.capture.sources(
            flat, Guarded(owned)
        )  # nobody changes them before this call returns
        saver.save(task.step, flat.skeleton, sources, durable).wait("committed")
        self._manifest = manifest = written[0]
        digests = "".join(manifest.leaves[name].digest for name in _names(task.share))
        sizes = {path: leaf.shape[0] for path, leaf in flat.leaves.items() if leaf.tag is not None}
        return Part(Report(task.step, manifest.segments, digests), sizes)

    def commit(self, parts: Sequence[Part], tree: Node) -> None:
        """On the coordinator: make the step of all exist. REQUIRES: every part is durable. Raises
        ``RankFailed``, ``RootBusy``.
        """
        mine = self._manifest
        assert mine is not None
        sizes = {path: size for part in parts for path, size in part.sizes.items()}
        planned = {
            path: dataclasses.replace(one, shape=(sizes[path],)) if path in sizes else one
            for path, one in self._plan.items()
        }
        manifest = msgspec.structs.replace(
            merged(mine, planned, [part.report for part in parts]), tree=tree
        )
        self._newest = frozenset(ref.id for ref in manifest.segments)
        self._opened.commit(manifest)
        self._committed = manifest.seq

    def wait(self, timeout: float | None = None) -> None:
        """Nothing to wait for but receipts: DCP has waited for the rest."""
        if self._saver is not None:
            self._saver.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Stop, and give the root back. Raises the failure of a receipt that nobody has been told
        of.
        """
        exits.forget(self)
        if self._saver is None or not self._saver.is_ours():
            return
        try:
            self._saver.close(timeout)
            self._opened.root.store.close()
        finally:
            self._saver.when_stopped(self._opened.release)


def _names(share: Share) -> list[str]:
    """What this rank's tiles are stored as, in the order of the plan."""
    return [
        name
        for path, (cuts, numbers) in share.tiles().items()
        for name in sharding.names_of(path, cuts, numbers)
    ]


_streams: dict[str, Stream] = {}  # of this process, by root
_restored: dict[str, Restored] = {}  # by root, until the next save there
_lock = threading.Lock()


def keep(path: Place, restored: Restored) -> None:
    """Let the next save of this process to a root go on from what was restored of it."""
    _restored[str(path)] = restored


def stream_of(path: Place, options: SaveOptions) -> Stream:
    """The stream of a root. Raises ``ValueError`` where this process writes to it with other
    options.
    """
    with _lock:
        stream = _streams.setdefault(str(path), Stream(path, options))
    if stream.options != options:
        differ = [
            f.name
            for f in dataclasses.fields(SaveOptions)
            if getattr(options, f.name) != getattr(stream.options, f.name)
        ]
        raise ValueError(
            f"{path} is already written with another {differ[0]}; writers of one root share their"
            " options. Close the first one before"
        )
    return stream


def release(path: Place) -> None:
    """Close the stream of a root, if there is one, and keep nothing of what was restored."""
    with _lock:
        stream = _streams.pop(str(path), None)
        _restored.pop(str(path), None)
    if stream is not None:
        stream.close()
