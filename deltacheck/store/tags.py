"""Names for steps. A tag means one save, not a number: a resumed run repeats steps, and compaction
writes a step again.

Each tag is a group below ``control/tags``, created if absent in one atomic step, that names the
save by the nonce of its manifest; what is compacted keeps that, so tags follow by themselves.
Whoever adds a tag or deletes checkpoints holds a short lock, so that no step goes between the look
at its tags and its deletion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from deltacheck.errors import Damaged, RootBusy, StepNotFound, UnsupportedFormat
from deltacheck.store import documents, layout
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import Place, remove_tree, storage_of, subdirectories
from deltacheck.store.manifest import Manifest, Tag

if TYPE_CHECKING:
    from deltacheck.store.root import Root


def read_all(store: Place) -> tuple[dict[str, Tag], dict[str, Damaged | UnsupportedFormat]]:
    """The tags by name, and what is wrong with those that cannot be read."""
    folder = store / layout.CONTROL / layout.TAGS
    found: dict[str, Tag] = {}
    damaged: dict[str, Damaged | UnsupportedFormat] = {}
    for name in filter(layout.is_tag, [entry.name for entry in subdirectories(folder)]):
        path = folder / name / "zarr.json"
        try:
            tag = documents.from_zarr_json(
                arrays.read_file(path, documents.MAX_DOCUMENT_BYTES), Tag, str(path)
            )
            if tag.name != name:
                raise Damaged(f"{path} is the tag {tag.name!r}")
        except FileNotFoundError:
            continue  # removed since it was listed, or never finished
        except (Damaged, UnsupportedFormat) as error:
            damaged[name] = error
        else:
            found[name] = tag
    return found, damaged


def readable(store: Place) -> dict[str, Tag]:
    """The tags by name. Raises ``Damaged`` where one cannot be read: what it keeps is unknown."""
    found, damaged = read_all(store)
    if damaged:
        name, error = min(damaged.items())
        raise type(error)(
            f"tag {name!r} cannot be read, so nothing is deleted: {error}. Remove it with:"
            f" deltacheck untag ROOT {name}"
        )
    return found


def find(store: Place, name: str) -> Tag:
    """The tag of a name. Raises ``StepNotFound`` naming those that there are, ``Damaged``."""
    found, damaged = read_all(store)
    if name in damaged:
        raise damaged[name]
    if name not in found:
        there = f"Tags that it has: {', '.join(found)}" if found else "It has no tag"
        raise StepNotFound(f"{store} has no tag {name!r}. {there}")
    return found[name]


def put(root: Root, step: int | str | None, name: str, *, move: bool = False) -> Tag:
    """Call a step (by number, by another tag, by default the newest) ``name``, durably. ``move``:
    also
    where the name has another step already.

    Raises ``ValueError`` for a name that cannot be one, ``StepNotFound``, ``RootBusy`` where the
    name is taken and ``move`` is not asked for, or where another process deletes steps for longer
    than a few seconds.
    """
    if not layout.is_tag(name):
        raise ValueError(
            f"{name!r} cannot be a tag: letters, digits and _.- (at most 100, the first a letter or"
            " digit), no number, not 'latest'"
        )
    _refuse_manager(root)
    store = root.store.path
    with lock(store):
        manifest = root.afresh().manifest(step)
        tag = Tag(layout.FORMAT, layout.VERSION, name, manifest.step, manifest.seq, manifest.nonce)
        folder = store / layout.CONTROL / layout.TAGS / name
        folder.mkdir(exist_ok=True)
        content = layout.group_json(documents.to_attributes(tag))
        if move:
            arrays.replace_file(folder, "zarr.json", content)
        elif not arrays.create_file(folder, "zarr.json", content):
            before = read_all(store)[0].get(name)
            if before is None:
                raise RootBusy(
                    f"there is a tag {name!r} already, which cannot be read; untag it first"
                )
            if before.nonce == tag.nonce:
                return before
            raise RootBusy(
                f"tag {name!r} is step {before.step} (seq {before.seq}) already; to give it to step"
                f" {tag.step}, say so: move=True, --move"
            )
        sync_directory(folder)
        sync_directory(folder.parent)
    return tag


def remove(root: Root, name: str) -> None:
    """Take a name away; the step stays until it is deleted. Raises ``StepNotFound`` where there is
    no such tag, ``RootBusy``.
    """
    store = root.store.path
    if (
        not layout.is_tag(name)
        or not storage_of(store / layout.CONTROL / layout.TAGS / name / "zarr.json").name_exists()
    ):
        find(store, name)
    with lock(store):
        folder = store / layout.CONTROL / layout.TAGS / name
        (folder / "zarr.json").unlink(missing_ok=True)
        sync_directory(folder)
        remove_tree(folder)
        sync_directory(folder.parent)


def names_of(tags: Mapping[str, Tag], manifest: Manifest) -> list[str]:
    """The names of a save."""
    return sorted(name for name, tag in tags.items() if tag.nonce == manifest.nonce)


@contextlib.contextmanager
def lock(store: Place) -> Iterator[None]:
    """Keep others from adding tags and from deleting checkpoints. Raises ``RootBusy`` where another
    does so for too long.

    An object store has no locks: there whoever tags a step beside a writer whose retention may
    delete it looks again afterwards.
    """
    folder = store / layout.CONTROL / layout.TAGS
    if not (folder / "zarr.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays.create_file(folder, "zarr.json", layout.group_json({}))
        sync_directory(folder)
        sync_directory(folder.parent)
    with storage_of(folder / "zarr.json").lock(f"changing the tags or deleting steps of {store}"):
        yield


def sweep(store: Place) -> None:
    """Remove what a kill between a tag's directory and its document left behind. REQUIRES: the
    caller holds ``lock``.
    """
    folder = store / layout.CONTROL / layout.TAGS
    for entry in subdirectories(folder):
        if layout.is_tag(entry.name) and not storage_of(entry / "zarr.json").name_exists():
            remove_tree(entry)


def _refuse_manager(root: Root) -> None:
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager, which deletes its steps without"
            " asking for tags: keep a step by its options (keep_period, preservation_policy)"
        )
