"""Checks that the ranks which save together have the same options and see the same folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from deltacheck.errors import RankFailed
from deltacheck.leaf.structs import inspect_types
from deltacheck.save.ranks.folder_probe import awaited, sees_probe
from deltacheck.save.save_options import Settings
from deltacheck.store import layout
from deltacheck.store.files.storage import Place, full_name
from deltacheck.store.manifest import Manifest

_THREADS = 16  # an object store answers many requests at once
REMEDY = (
    "Give every rank the same root, on storage that all of them reach, not in a directory of one"
    " machine"
)


class RankSetup(msgspec.Struct, frozen=True):
    """The setup of a rank, as a message to rank 0.

    Args:
        root: The address of the root on this rank.
        options: The options that all ranks must have in common, by name, as text.
    """

    root: str
    options: dict[str, str]

    @classmethod
    def of(cls, root: Place, settings: Settings, **further: object) -> RankSetup:
        """Return the setup of this rank; ``further`` are options that the record does not hold."""
        return cls(full_name(root), common_options(settings) | _texts(further))


inspect_types(RankSetup)


def common_options(settings: Settings) -> dict[str, str]:
    """Return the options that all ranks must have in common, by the names that users know."""
    values = settings.values()
    # Each machine may have another amount of memory.
    del values["host_cache_bytes"], values["device_cache_bytes"]
    return _texts(values)


def _texts(options: Mapping[str, object]) -> dict[str, str]:
    # ``str``: a member of an enumeration is shown as the word that users give.
    return {
        name: repr(str(value) if isinstance(value, str) else value)
        for name, value in options.items()
    }


def require_same_options(options_by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Raise ``RankFailed`` if an option of two ranks differs.

    Args:
        options_by_rank: The options as text, by name, of the ranks to compare.
    """
    ranks = sorted(options_by_rank)
    for rank in ranks[1:]:
        reference, options = options_by_rank[ranks[0]], options_by_rank[rank]
        differing = [
            name
            for name in sorted(reference.keys() | options.keys())
            if reference.get(name) != options.get(name)
        ]
        if differing:
            values = ", ".join(
                f"{name}={options.get(name)} instead of {reference.get(name)}" for name in differing
            )
            raise RankFailed(
                f"rank {rank} has other options than rank {ranks[0]}: {values}. Ranks that save"
                " together need the same options"
            )


def require_probe(root: Place, name: str, first_root: str, remedy: str = REMEDY) -> None:
    """Raise ``RankFailed`` if this rank does not see the probe that rank 0 has placed.

    Args:
        root: The root of this rank.
        name: The name of the probe.
        first_root: The address of the root on rank 0.
        remedy: Ends the message.
    """
    if not sees_probe(root, name):
        raise RankFailed(
            f"the root of this rank, {full_name(root)}, is another folder than the root of rank 0,"
            f" {first_root}: a file that rank 0 has put there is not in it. {remedy}"
        )


def require_visible(
    root: Place, manifest: Manifest, roots: Sequence[str], earlier: Collection[str] = ()
) -> None:
    """Raise ``RankFailed`` if rank 0 does not see a segment that another rank has just written.

    Without this check, a step could be committed of which no process can read all parts.

    Args:
        root: The store of rank 0.
        manifest: The step of all ranks. Its lanes are in the order of ranks.
        roots: The address of the root on each rank, as far as known.
        earlier: The segments of the step before, which were looked for then. Empty: those that are
            older than this step.
    """

    def is_new(name: str) -> bool:
        return name not in earlier if earlier else layout.seq_of(name) == manifest.seq

    new_segments = [
        (rank, manifest.segments[number].id)
        for rank, lane in enumerate(manifest.lanes)
        for number in lane
        if rank > 0 and is_new(manifest.segments[number].id)
    ]
    if not new_segments:
        return

    def is_visible(segment: tuple[int, str]) -> bool:
        return awaited(root / layout.SEGMENTS / segment[1] / "zarr.json")

    with ThreadPoolExecutor(min(_THREADS, len(new_segments))) as pool:
        for (rank, name), visible in zip(
            new_segments, pool.map(is_visible, new_segments), strict=True
        ):
            if not visible:
                folder = roots[rank] if rank < len(roots) else "its root"
                raise RankFailed(
                    f"rank 0 does not see segment {name} of rank {rank} in {full_name(root)}: rank"
                    f" {rank} writes to {folder}, which is another folder. Step {manifest.step} is"
                    f" not committed. {REMEDY}"
                )
