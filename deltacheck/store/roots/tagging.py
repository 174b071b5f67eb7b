"""Give steps of an engine root names, and take them away."""

from __future__ import annotations

import contextlib

from deltacheck.errors import RootBusy, StepNotFound
from deltacheck.store import documents, layout
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import inside, remove_tree, storage_of
from deltacheck.store.manifest import Tag
from deltacheck.store.roots.root import Root
from deltacheck.store.roots.tags import find, lock, read_all


def put(root: Root, step: int | str | None, name: str, *, move: bool = False) -> Tag:
    """Give a step a name, durably.

    Args:
        root: An engine root.
        step: A step number or another tag; ``None``: the newest step.
        name: The tag.
        move: ``True``: the name is taken from another step that has it; ``False``: that is an
            error.

    Raises:
        ValueError: The name cannot be a tag.
        StepNotFound: There is no such step.
        RootBusy: The name has another step and ``move`` is false, or another process has been
            deleting steps for more than a few seconds.
    """
    if not layout.is_tag(name):
        raise ValueError(
            f"{name!r} cannot be a tag: letters, digits and _.- (at most 100, the first a letter or"
            " digit), no number, not 'latest'"
        )
    _refuse_manager(root)
    store = root.store.path
    with lock(store):
        # Read again under the lock: a step that is cached may have been deleted since.
        manifest = root.afresh().manifest(step)
        # The step may be of a commit that is not synced yet. A tag that outlives its step would
        # promise a step that a power cut has taken.
        checkpoint = root.path / layout.CHECKPOINTS / layout.checkpoint_id(manifest.seq)
        # Compaction may have deleted it meanwhile: the new form of the step is durable.
        with contextlib.suppress(FileNotFoundError):
            sync_directory(checkpoint)
        sync_directory(checkpoint.parent)
        tag = Tag(layout.FORMAT, layout.VERSION, name, manifest.step, manifest.seq, manifest.nonce)
        folder = inside(store, store / layout.CONTROL / layout.TAGS / name)
        folder.mkdir(exist_ok=True)
        content = layout.group_json(documents.to_attributes(tag))
        if move:
            arrays.replace_file(folder, "zarr.json", content)
        elif not arrays.create_file(folder, "zarr.json", content):
            existing = read_all(store)[0].get(name)
            if existing is None:
                raise RootBusy(
                    f"there is a tag {name!r} already, which cannot be read; delete it first"
                )
            # The same tag again is no error, so a caller may repeat the call. It is synced again,
            # because a killed process may have left it.
            if existing.nonce != tag.nonce:
                raise RootBusy(
                    f"tag {name!r} is step {existing.step} (seq {existing.seq}) already; to give it"
                    f" to step {tag.step}, say so: move=True, --move"
                )
            tag = existing
        # Synced even if saves are not: from here on, the tag protects a step.
        sync_directory(folder)
        sync_directory(folder.parent)
        # The process that made the directory of the tags may be about to sync its name, or may have
        # been killed before.
        sync_directory(folder.parent.parent)
    return tag


def remove(root: Root, name: str) -> None:
    """Remove a tag; its step stays until it is deleted.

    Raises:
        StepNotFound: There is no such tag.
        RootBusy: Another process holds the lock of the tags.
    """
    store = root.store.path
    inside(store, store / layout.CONTROL / layout.TAGS)
    if (
        not layout.is_tag(name)
        or not storage_of(store / layout.CONTROL / layout.TAGS / name / "zarr.json").name_exists()
    ):
        find(store, name)
    with lock(store):
        folder = inside(store, store / layout.CONTROL / layout.TAGS / name)
        # A directory without a document is no tag (section 3.1 of the format), so this ends the
        # tag.
        (folder / "zarr.json").unlink(missing_ok=True)
        sync_directory(folder)
        remove_tree(store, folder)
        sync_directory(folder.parent)


def _refuse_manager(root: Root) -> None:
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager, which deletes its steps without"
            " asking for tags: keep a step by its options (keep_period, preservation_policy)"
        )
