"""Names for steps.

A tag names one save, not a step number: a resumed run repeats numbers, and compaction writes a step
again. Each tag is a group below ``control/tags``, created in one atomic step, that identifies the
save by the nonce of its manifest. Compaction keeps the nonce, so tags remain valid. A process that
adds a tag or deletes checkpoints holds a short lock, so no step is deleted between the check of its
tags and its deletion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from deltacheck.errors import Damaged, StepNotFound, UnsupportedFormat
from deltacheck.store import documents, layout
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import Place, inside, remove_tree, storage_of, subdirectories
from deltacheck.store.manifest import Brief, Manifest, Tag


def read_all(store: Place) -> tuple[dict[str, Tag], dict[str, Damaged | UnsupportedFormat]]:
    """Return the tags by name, and the errors of those that cannot be read."""
    folder = inside(store, store / layout.CONTROL / layout.TAGS)
    tags: dict[str, Tag] = {}
    damaged: dict[str, Damaged | UnsupportedFormat] = {}
    for name in filter(layout.is_tag, storage_of(folder).directory_names()):
        path = folder / name / "zarr.json"
        try:
            inside(folder, path.parent)
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
            tags[name] = tag
    return tags, damaged


def readable(store: Place) -> dict[str, Tag]:
    """Return the tags by name.

    Raises:
        Damaged: A tag cannot be read, so it is unknown which step it protects.
    """
    tags, damaged = read_all(store)
    if damaged:
        name, error = min(damaged.items())
        raise type(error)(
            f"tag {name!r} cannot be read, so nothing is deleted: {error}. Remove it with:"
            f" deltacheck tag ROOT --delete {name}"
        )
    return tags


def find(store: Place, name: str) -> Tag:
    """Return the tag of a name.

    Raises:
        StepNotFound: There is no such tag; the message names the existing ones.
        Damaged: The tag cannot be read.
    """
    tags, damaged = read_all(store)
    if name in damaged:
        raise damaged[name]
    if name not in tags:
        existing = f"Tags that it has: {', '.join(tags)}" if tags else "It has no tag"
        raise StepNotFound(f"{store} has no tag {name!r}. {existing}")
    return tags[name]


def names_of(tags: Mapping[str, Tag], manifest: Manifest | Brief) -> list[str]:
    """Return the tags of a save."""
    return sorted(name for name, tag in tags.items() if tag.nonce == manifest.nonce)


@contextlib.contextmanager
def lock(store: Place) -> Iterator[None]:
    """Keep other processes from adding tags and from deleting checkpoints.

    An object store has no locks: a process that tags a step there checks again afterwards.

    Raises:
        RootBusy: Another process holds the lock for more than a few seconds.
    """
    folder = inside(store, store / layout.CONTROL / layout.TAGS)
    # Made at the first use: a root without tags needs no such group.
    if not storage_of(folder / "zarr.json").name_exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays.create_file(folder, "zarr.json", layout.group_json({}))
        sync_directory(folder)
        sync_directory(folder.parent)
    with storage_of(folder / "zarr.json").lock(f"changing the tags or deleting steps of {store}"):
        yield


def sweep(store: Place) -> None:
    """Remove the directories of tags without a document, which a kill left behind.

    The caller must hold ``lock``.
    """
    folder = inside(store, store / layout.CONTROL / layout.TAGS)
    for entry in subdirectories(folder):
        if layout.is_tag(entry.name) and not storage_of(entry / "zarr.json").name_exists():
            remove_tree(store, entry)
