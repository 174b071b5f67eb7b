"""The saves of one process to a root that DCP coordinates.

A stream holds the process's saver across saves, and on the coordinator the plan and the commit.
DCP's own collectives carry the messages: DCP's plan carries the coordinator's plan to each rank
(``TileTask``), and DCP's results carry back what each rank has made durable (``DurablePart``).
Only the coordinator learns whether the step was committed. So each rank provisionally takes its
last save as the base of the next one, and drops it if the next task says that the step was not
committed.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from deltacheck.backends.torch.capture.capture import Capture
from deltacheck.backends.torch.capture.guard import Guarded
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.backends.torch.dcp.decisions import agreement, shared_signals
from deltacheck.backends.torch.dcp.turns import Turns
from deltacheck.codec.base import U8
from deltacheck.errors import DeltacheckError, SaveFailed
from deltacheck.leaf import sharding
from deltacheck.leaf.sharding import Before, Copies, HeldShards, Holdings, Plan, Share
from deltacheck.leaf.structs import inspect_types
from deltacheck.leaf.tree import Flat, Node
from deltacheck.maintain import compaction
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save import exits
from deltacheck.save.chains.chain_state import Numbers
from deltacheck.save.ranks.folder_probe import Probe
from deltacheck.save.ranks.joint import Merges, Report, merged
from deltacheck.save.ranks.rank_setup import RankSetup, require_visible
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.save_options import Settings
from deltacheck.save.saver import Saver
from deltacheck.save.treatment.signals import Agreed, HeldState, Signals
from deltacheck.save.treatment.treatment import leaf_groups
from deltacheck.store import collect
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place, full_name, take_lease
from deltacheck.store.lock.interrupts import Lock
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opened import Opened, open_alone, remove_unused
from deltacheck.store.roots.opening import create_store, is_root_or_fresh
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")


class TileTask(msgspec.Struct, frozen=True):
    """The coordinator's message to a rank: the tiles that it writes.

    ``seq``: the sequence number of the save. ``committed``: that of the newest step that this
    stream has committed; -1 if there is none. ``probe``: the file that the rank must see in its
    root, empty after the first step. ``root``: the address of the root on the coordinator.
    ``signals``: what all ranks have measured at the save before.
    """

    step: int
    seq: int
    committed: int
    share: Share
    probe: str = ""
    root: str = ""
    signals: Signals | None = None
    metrics: dict[str, float] = {}


class Intent(msgspec.Struct, frozen=True):
    """A rank's message to the coordinator when a save begins: its step and its setup.

    ``holdings``: the tensors that it holds, also those that DCP lets another rank save. ``None``:
    the same as at its save before. ``metrics``: those that its caller reports.
    """

    step: int
    setup: RankSetup
    holdings: Holdings | None = None
    metrics: dict[str, float] = {}


class DurablePart(msgspec.Struct, frozen=True):
    """A rank's message to the coordinator: the durable part of a save.

    ``sizes``: the bytes of its objects (``names.OBJECT``) by leaf path. They are not known before
    the objects are pickled. ``signals``: what the rank has measured, if the policy needs that.
    """

    report: Report
    sizes: dict[str, int]
    signals: Signals | None = None


inspect_types(TileTask, Intent, DurablePart)


class Restored(NamedTuple):
    """A step that a reader has restored.

    ``chains`` are the chains of its tiles, ``stored`` the bytes of those that were read whole.
    """

    manifest: Manifest
    chains: dict[str, Chain]
    stored: dict[str, U8]


class _Planned(NamedTuple):
    """The plan of the newest save, on the coordinator.

    ``holdings``: the boxes that each rank saves. ``local_holdings``: those that it holds,
    by rank. ``copies`` is ``None`` if nothing is compared. ``signals``: what all ranks have
    measured at that save, once it is committed.
    """

    holdings: list[Holdings]
    local_holdings: dict[int, Holdings]
    tiling: Plan
    copies: Copies | None
    shares: list[Share]
    signals: Signals | None = None


class RootStream:
    """The saves of one process to one root. ``stream_of`` makes one for each root.

    The calls of one save come one after the other, and saves take turns.
    """

    def __init__(self, path: Place, settings: Settings) -> None:
        self.path = path
        self.settings = settings
        self.plans: list[weakref.ref[SavePlan]] = []  # of the newest save, on the coordinator
        self._probe: Probe | None = None
        self.capture = Capture(settings)
        self._writer: RootWriter | None = None
        self._saver: Saver | None = None
        # The items of this rank's plan, also those that DCP lets another rank save.
        self.held_items: list[WriteItem] = []
        self._planned = _Planned([], {}, {}, None, [])
        self._last_seq = -1
        self._committed = -1
        self._is_new = False  # this stream has made the root
        # The sequence number of the save that the shadow is of; -1 if there is none.
        self._last_written = -1
        self._manifest: Manifest | None = None
        # On the coordinator: merges of all ranks, and segments of the step being committed.
        self._merges = Merges()

    def lead(self) -> None:
        """Take the lease of the root if this process does not have it. Raises ``RootBusy``."""
        if self._saver is None:
            self._is_new = not is_root_or_fresh(self.path)
            self._begin(open_alone(self.path, self.settings.durability))
        elif self._root_writer.lease is None:
            lease = take_lease(self.path)
            try:
                # Another process had the lease in between and may have committed steps.
                self._last_seq = max(self._last_seq, self._root_writer.root.next_seq() - 1)
            except BaseException:
                lease.release()
                raise
            self._root_writer.lease = lease

    def follow(self) -> Saver:
        """Return the saver of a root whose lease this process or another one has."""
        if self._saver is None:
            self._begin(
                # Number 0, because each task brings the number of its save.
                Opened(create_store(self.path, durability=self.settings.durability), None, 0)
            )
        assert self._saver is not None
        self._saver.check_usable()
        return self._saver

    def _begin(self, opened: Opened) -> None:
        root = Root(self.path, opened.store)
        self._writer = RootWriter(
            root,
            opened.lease,
            self.settings.keep,
            grace_seconds=self.settings.options.grace_seconds,
            rewrite=compaction.reclaim_history,
        )
        try:
            self._saver = Saver(
                opened.store,
                TorchCodec(),
                self.settings,
                Numbers(opened.next_seq),
            )
        except BaseException:
            self._writer.release()
            raise
        self._writer.protect(self._saver.chains.protected_segments)
        self._writer.protect(lambda: self._merges.protected(opened.store))
        exits.finish_at_exit(self, str(self.path), self.settings.options.exit_timeout_seconds)

    @property
    def _root_writer(self) -> RootWriter:
        assert self._writer is not None
        return self._writer

    def plan(
        self,
        step: int,
        boxes_by_rank: Sequence[Mapping[str, HeldShards]],
        local_holdings: Mapping[int, Holdings],
        tree: Node,
        metrics: Mapping[str, float],
        *,
        overwrite: bool,
    ) -> list[TileTask]:
        """Take the root, and return the task of each rank. The coordinator calls this.

        ``boxes_by_rank``: the boxes that each rank saves of each leaf. ``local_holdings``: those
        that ranks hold, by rank, as far as they have changed. ``tree``: the structure of all ranks.
        ``metrics``: those of the step. ``overwrite``: the step may exist.
        Raises ``RankFailed`` if they do not fit together, ``RootBusy`` and ``SaveFailed``.
        """
        previous = self._planned
        local_by_rank = previous.local_holdings | dict(local_holdings)
        if not self.settings.policy.is_exact and len(local_by_rank) == len(boxes_by_rank):
            # DCP gives replicas to ranks one by one, but the leaves of a parameter belong together.
            boxes_by_rank = [
                {**boxes, **local_by_rank[rank].held()} for rank, boxes in enumerate(boxes_by_rank)
            ]
        holdings = [Holdings.of(boxes) for boxes in boxes_by_rank]
        if (holdings, local_by_rank) != (previous.holdings, previous.local_holdings):
            self._planned = self._divide(holdings, local_by_rank, tree)
        # After all that may refuse the save, which then leaves no files, and before any rank has
        # written.
        self.lead()
        if not overwrite and step in self._root_writer.root.steps():
            raise SaveFailed(
                f"step {step} exists in {self.path}, and overwrite=False: save under another"
                " number, or with overwrite=True, which replaces it once the new one is complete"
            )
        # The number of a failed save is not used again: even if this process wrote nothing for it,
        # others may have.
        self._last_seq = max(
            self._last_seq + self.settings.numbers_of_save, self.follow().proposed_number()
        )
        self._remove_probe()
        # From the first commit on, the segments of the other ranks have shown that they are here.
        if self._committed < 0 and len(boxes_by_rank) > 1:
            self._probe = Probe(self.path)
        probe = "" if self._probe is None else self._probe.name
        # Taken out: what one save has measured counts once, even if the next one fails.
        signals, self._planned = previous.signals, self._planned._replace(signals=None)
        root = full_name(self.path)
        return [
            TileTask(
                step, self._last_seq, self._committed, share, probe, root, signals, dict(metrics)
            )
            for share in self._planned.shares
        ]

    def _divide(
        self, holdings: list[Holdings], local_by_rank: dict[int, Holdings], tree: Node
    ) -> _Planned:
        """Return the plan for what ranks hold, with arguments as in ``_Planned`` and ``plan``."""
        previous = self._planned
        # An old plan leaves tiles on the ranks that have their bases: it is used while it fits.
        tiling = previous.tiling
        if holdings != previous.holdings:
            restored = _restored.get(str(self.path))
            cuts = {} if restored is None else restored.manifest.tiles
            before = {path: Before(cut.cuts) for path, cut in cuts.items()} | {
                path: Before(leaf.cuts, leaf.owners) for path, leaf in previous.tiling.items()
            }
            is_exact = self.settings.policy.is_exact
            groups = [] if is_exact else leaf_groups(sharding.specs(holdings), tree)
            tiling = sharding.plan(holdings, before, groups)
        of_ranks = [local_by_rank[rank] for rank in range(len(holdings)) if rank in local_by_rank]
        # Without what every rank holds, as with plans that DCP has cached for another root, nothing
        # is compared.
        copies = sharding.copies(tiling, of_ranks) if len(of_ranks) == len(holdings) else None
        shares = sharding.shares(tiling, len(holdings), copies)
        return _Planned(holdings, local_by_rank, tiling, copies, shares)

    def _remove_probe(self) -> None:
        if self._probe is not None:
            self._probe.remove()
            self._probe = None

    def save(
        self, task: TileTask, flat: Flat, copies: bytes, state: HeldState | None
    ) -> DurablePart:
        """Write the tiles of this rank, and return once they are durable.

        ``flat``: the tiles as leaves. ``copies``: the digests of the tiles that other ranks write.
        ``state``: the state of which this rank holds a part; ``None`` under an exact policy.
        Raises ``SaveFailed``.
        """
        saver = self.follow()
        # All ranks write the segments of a save under one number.
        saver.number_from(task.seq)
        if saver.next_number() != task.seq:
            raise SaveFailed(
                f"step {task.step} would be save {task.seq} of {self.path}, but this rank has"
                " written later ones: the plan is not of this save. Start the run again from its"
                " newest step"
            )
        if self._last_written not in (-1, task.committed):
            # The segments of a save without a step may be collected, so nothing may build on them.
            saver.chains.drop()
        # Set before the write: if it fails, the next task shows that this save was not committed.
        self._last_written, self._manifest = task.seq, None
        # Its content is the base of the next save only, and takes as much memory as the state.
        restored = _restored.pop(str(self.path), None)
        course = _courses.pop(str(self.path), None)
        if course is not None:
            self._root_writer.course.follow(course)
        if restored is not None and not saver.chains.leaves:
            names = [
                name for name in flat.leaves if name in restored.chains and name in restored.stored
            ]
            chains = {name: restored.chains[name] for name in names}
            saver.adopt(chains, {name: restored.stored[name] for name in names}, restored.manifest)
        manifests: list[Manifest] = []

        # The coordinator commits the step of all ranks; here a save ends once it is durable.
        def record(manifest: Manifest) -> Written:
            manifests.append(manifest)
            return Written(0, "")

        owned = {
            value.untyped_storage().data_ptr()
            for value in flat.arrays.values()
            if hasattr(value, "untyped_storage")
        }
        # DCP changes no tensor before this call returns, so all of them can be read lazily.
        sources = self.capture.sources(flat, lambda: Guarded(owned))
        tiles = task.share.tiles()
        agreed = (
            Agreed() if state is None else agreement(saver, task.step, state, task.signals, tiles)
        )
        saver.save(
            task.step, flat.skeleton, sources, record, metrics=task.metrics, agreed=agreed
        ).wait("committed")
        self._manifest = manifest = manifests[0]
        sizes = {path: leaf.shape[0] for path, leaf in flat.leaves.items() if leaf.tag is not None}
        # A merge that was planned with this save has begun: its segments are among these.
        compactions = saver.chains.compactions()
        report = Report.of(manifest, tiles, copies, agreed.digests, compactions)
        return DurablePart(report, sizes, None if state is None else saver.measured(state))

    def commit(self, parts: Sequence[DurablePart], tree: Node, roots: Sequence[str]) -> None:
        """Make the step of all ranks exist. The coordinator calls this once all parts are durable.

        ``roots``: the address of the root on each rank.
        Raises ``RankFailed`` (among others if copies differ), ``RootBusy``.
        """
        # Every rank has written its part, so it has seen the probe.
        self._remove_probe()
        own_manifest = self._manifest
        assert own_manifest is not None
        sizes = {path: size for part in parts for path, size in part.sizes.items()}
        # The plan was made before the objects were pickled, and had no sizes of them.
        plan = {
            path: dataclasses.replace(tiling, shape=(sizes[path],)) if path in sizes else tiling
            for path, tiling in self._planned.tiling.items()
        }
        reports = [part.report for part in parts]
        manifest = msgspec.structs.replace(
            merged(own_manifest, plan, reports, self._planned.copies), tree=tree
        )
        # Before the commit, which may collect segments: the saver protects those of this rank only.
        merges = Merges.of(reports)
        newest = {ref.id for ref in manifest.segments}
        self._merges = merges._replace(segments=merges.segments | newest)
        require_visible(self.path, manifest, roots)
        self._root_writer.commit(manifest)
        # After the commit: ranks keep a save as a base only if a task names its number.
        self._committed = manifest.seq
        signals = shared_signals([part.signals for part in parts])
        self._planned = self._planned._replace(signals=signals)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the saves under way, of which DCP has already waited for its own."""
        if self._saver is not None:
            self._saver.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Stop and release the root. Raises the failure of a save that no call has raised."""
        exits.forget(self)
        self._remove_probe()
        if self._saver is None or not self._saver.is_ours():
            return
        try:
            self._saver.close(timeout)
            self._root_writer.root.store.close()
        finally:
            self._saver.pipeline.when_stopped(self._release)

    def _release(self) -> None:
        """Give the root back. Remove its files if this stream has made it, and no step."""
        writer = self._root_writer
        try:
            if self._is_new and self._committed < 0 and writer.lease is not None:
                writer.check()
                collect.collect(
                    writer.root, grace_seconds=0, writer_is_dead=True, still_ours=writer.check
                )
                remove_unused(writer.root)
        except (DeltacheckError, OSError):
            log.warning("%s holds no step and could not be removed", self.path, exc_info=True)
        finally:
            writer.release()


# By root. A restored step stays here until the next save to its root.
_streams: dict[str, RootStream] = {}
_restored: dict[str, Restored] = {}
_courses: dict[str, str] = {}
_turns: dict[str, Turns] = {}
# ``async_save`` makes and uses writers on threads of DCP.
_lock = Lock()


def keep(path: Place, restored: Restored) -> None:
    """Let the next save of this process to a root continue from a restored step."""
    _restored[str(path)] = restored


def follow_course(path: Place, manifest: Manifest) -> None:
    """Let the next save of this process to a root belong to the course of a step that was read."""
    _courses[str(path)] = manifest.course


def turns_of(path: Place) -> Turns:
    """Return the turns of the saves to a root."""
    with _lock:
        return _turns.setdefault(str(path), Turns())


def stream_of(path: Place, settings: Settings) -> RootStream:
    """Return the stream of a root.

    Raises ``ValueError`` if this process writes to the root with other settings.
    """
    with _lock:
        stream = _streams.setdefault(str(path), RootStream(path, settings))
    if stream.settings != settings:
        before, now = stream.settings.values(), settings.values()
        differing = [name for name in now if now[name] != before[name]]
        raise ValueError(
            f"{path} is already written with another {differing[0]}; writers of one root share"
            " their options. Close the first one before"
        )
    return stream


def release(path: Place) -> None:
    """Close the stream of a root if there is one, and drop a restored step."""
    with _lock:
        stream = _streams.pop(str(path), None)
        _restored.pop(str(path), None)
        _courses.pop(str(path), None)
    # Outside of the lock, because it may wait for the storage.
    if stream is not None:
        stream.close()
