"""The bond between a memory root and its durable root, and the check that both are of one run.

Each memory root records the name of its durable root and the newest checkpoint of it that it has
seen. A process that wrote to the durable root without the memory root has left a newer checkpoint,
so a memory root that another run or another machine went past is recognized when it is opened.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection
from typing import NamedTuple

from deltacheck.errors import Damaged, ForeignMemory
from deltacheck.store import collect, layout
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, inside
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")

# The group under control/ that holds the bond of a memory root, and the name of a durable root.
BOND = "tier"
# Larger files are refused before they are parsed. A bond has a few hundred bytes and a path.
_MAX_DOCUMENT_BYTES = 1 << 20


class Bond(NamedTuple):
    """The record in a memory root of its durable root.

    ``root``: the random name of the durable root; ``path``: its path, for messages; ``seq``,
    ``nonce``: its newest checkpoint that this memory has seen, -1 and empty if there is none;
    ``boot``: the start of the machine (``collect.boot``) in which the bond was written.
    """

    root: str
    path: str
    seq: int
    nonce: str
    boot: str = ""


class Stale(NamedTuple):
    """The reason why a memory root does not hold the newest steps of a run.

    ``is_behind``: all of its steps are older than the newest step of the durable root.
    """

    why: str
    is_behind: bool


def stale(
    bond: Bond | None,
    held: Collection[tuple[int, str]],
    root: str,
    newest: tuple[int, str] | None,
    boot: str = "",
) -> Stale | None:
    """Return why the steps of a memory root are not the newest of a run; ``None`` if they are.

    Args:
        bond: The bond of the memory root; ``None`` if it cannot be read.
        held: The sequence numbers and nonces of its checkpoints. If there are none, nothing is
            stale.
        root: The name of the durable root.
        newest: The newest checkpoint of the durable root, with an empty nonce if its manifest
            cannot be read; ``None`` if there is none.
        boot: This start of the machine; empty if it is not known.
    """
    if not held:
        return None
    if bond is None:
        return Stale("it holds steps, but no record of the run whose memory it is", False)
    if bond.root != root:
        return Stale(f"it is the memory of another run, {bond.path}", False)
    # An unknown start of the machine, on either side, proves nothing.
    if boot and bond.boot not in ("", boot):
        return Stale(
            "the machine was started anew since it was written, so it lies on a disk, and nothing"
            " of it was synced",
            False,
        )
    if newest is None:
        return (
            None
            if bond.seq < 0
            else Stale(
                "the run on the disk has lost the steps that this memory continues from", False
            )
        )
    known_checkpoints = {*held, (bond.seq, bond.nonce)}
    if newest in known_checkpoints or (
        not newest[1] and newest[0] in {seq for seq, _ in known_checkpoints}
    ):
        return None
    text = (
        f"the run on the disk went on without it: this memory does not know checkpoint {newest[0]},"
        " the newest there"
    )
    return Stale(text, max(seq for seq, _ in held) <= newest[0])


class Pairing:
    """The bond of one memory root to one durable root.

    Args:
        memory: The memory root.
        durable: The durable root, which gets a random name if it has none.
        discards_stale: Delete the steps of a stale memory instead of refusing it.
    """

    def __init__(self, memory: Root, durable: Root, *, discards_stale: bool) -> None:
        self._memory, self._durable = memory, durable
        self._discards_stale = discards_stale
        self._identity = identity(durable)

    def claim(self) -> int:
        """Make sure that both roots are of one run, and remove what a killed process left.

        Returns:
            The newest sequence number in the durable root, or -1.

        Raises:
            ForeignMemory: The memory holds steps that are not the newest of this run.
        """
        briefs, damaged = self._memory.briefs()
        memory_checkpoints = {(brief.seq, brief.nonce) for brief in briefs.values()} | {
            (seq_at(path), "") for path in damaged
        }
        newest = newest_checkpoint(self._durable)
        bond = read_bond(self._memory.path)
        reason = stale(bond, memory_checkpoints, self._identity, newest, collect.boot())
        if reason is None and damaged:
            reason = Stale(f"it is damaged: {next(iter(damaged.values()))}", False)
        if reason is not None:
            self._discard(reason)
        # The bond is written before the collection, and before the first save: from here on the
        # memory is that of this run.
        seq = self.record_newest()
        collect.collect(self._memory, grace_seconds=0, writer_is_dead=True)
        return seq

    def record_newest(self) -> int:
        """Record the newest checkpoint of the durable root, and return its number or -1."""
        seq, nonce = newest_checkpoint(self._durable) or (-1, "")
        self.record(seq, nonce)
        return seq

    def record(self, seq: int, nonce: str) -> None:
        """Record a checkpoint as the newest of the durable root."""
        path = storage.full_name(self._durable.path)
        write_bond(self._memory.path, Bond(self._identity, path, seq, nonce))

    def _discard(self, reason: Stale) -> None:
        """Delete the steps of the memory root if that is allowed; else raise ``ForeignMemory``."""
        memory, disk, steps = self._memory.path, self._durable.path, self._memory.steps()
        # A root without a bond may be one that somebody saved to directly: it is never discarded.
        if read_bond(memory) is None or not (reason.is_behind or self._discards_stale):
            raise ForeignMemory(
                f"{memory} cannot be the memory of {disk}: {reason.why}. Nothing was changed. Its"
                f" steps are {steps}, which deltacheck.open({str(memory)!r}) reads. To go on from"
                f" {disk}, remove {memory}, name another directory, or (for what was a memory root)"
                " say MemoryTier(on_stale='discard')"
            )
        log.warning(
            "%s, steps %s, is discarded: it cannot be the memory of %s: %s",
            memory,
            steps,
            disk,
            reason.why,
        )
        for path in self._memory.manifest_paths():
            collect.delete_checkpoint(self._memory, seq_at(path))


def read_bond(root: Place) -> Bond | None:
    """Return the bond of a memory root, or ``None`` if it has none that can be read."""
    try:
        content = arrays.read_file(root / layout.CONTROL / BOND / "zarr.json", _MAX_DOCUMENT_BYTES)
        document = json.loads(content)["attributes"][layout.ATTRIBUTE]
        return Bond(
            str(document["root"]),
            str(document["path"]),
            int(document["seq"]),
            str(document["nonce"]),
            str(document["boot"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged):
        # A bond that cannot be read is treated as none. The memory is then refused if it holds
        # steps.
        return None


def write_bond(root: Place, bond: Bond) -> None:
    """Write the bond of a memory root, as of this start of the machine."""
    bond = bond._replace(boot=collect.boot())
    folder = inside(root, root / layout.CONTROL / BOND)
    folder.mkdir(exist_ok=True)
    content = layout.group_json({layout.ATTRIBUTE: bond._asdict()})
    # The bond is not synced, because memory does not survive a power cut either.
    arrays.replace_file(folder, "zarr.json", content, Durability.PROCESS)


def seq_at(manifest_path: Place) -> int:
    """Return the sequence number of a checkpoint from the path of its manifest."""
    return layout.seq_of(manifest_path.parent.name)


def newest_checkpoint(root: Root) -> tuple[int, str] | None:
    """Return the newest checkpoint of a root, with an empty nonce if its manifest is damaged."""
    briefs, damaged = root.briefs()
    checkpoints = [(brief.seq, brief.nonce) for brief in briefs.values()]
    checkpoints += [(seq_at(path), "") for path in damaged]
    return max(checkpoints, default=None)


def has_identity(durable: Root) -> bool:
    """Return True if a durable root has a name."""
    return (durable.store.path / layout.CONTROL / BOND / "zarr.json").is_file()


def identity(durable: Root, name: str | None = None) -> str:
    """Return the random name of a durable root, and give it one if it has none.

    Args:
        durable: The root.
        name: The name that it gets if it has none, as the copy of another root. Default: a new one.

    Raises:
        Damaged: The name cannot be read.
    """
    store = durable.store
    folder = inside(store.path, store.path / layout.CONTROL / BOND)
    folder.mkdir(exist_ok=True)
    content = layout.group_json({layout.ATTRIBUTE: {"root": name or secrets.token_hex(16)}})
    # Created if absent: two processes that open the root at once agree on the name of the first
    # one.
    if arrays.create_file(folder, "zarr.json", content, store.durability):
        store.durability.sync_directory(folder)
        store.durability.sync_directory(folder.parent)
    path = folder / "zarr.json"
    try:
        document = json.loads(arrays.read_file(path, _MAX_DOCUMENT_BYTES))
        return str(document["attributes"][layout.ATTRIBUTE]["root"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(
            f"{path} is damaged: {error}. Remove it; memory roots of this run are refused then",
            file=path,
        ) from error
