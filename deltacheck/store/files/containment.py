"""The guard of every change below a root: no link may lead it to another place.

The root itself may be reached through links, because the user names it. Below it, everything is a
directory or a regular file (``docs/reference/format.md``, section 1). A process that puts a link in
place between the check and the change is not kept out.
"""

from __future__ import annotations

from pathlib import Path

from deltacheck.store.files.storage import Place, storage_of


def inside(root: Place, path: Place) -> Place:
    """Return ``path``, which may be written to or deleted.

    Every directory from below ``root`` down to ``path`` is looked at; those that do not exist yet
    pass. On an object store there are no links.

    Args:
        root: The root, or the store of a manager root.
        path: A directory below it.

    Raises:
        Damaged: A link or a file stands in the place of one of the directories; names it.
    """
    if isinstance(root, Path) and isinstance(path, Path):
        directory = root
        for name in path.relative_to(root).parts:
            directory = directory / name
            storage_of(directory).check_directory()
    return path


def remove_tree(root: Place, path: Place, *, ignore_errors: bool = False) -> None:
    """Remove a directory below a root and all below it. Raises what ``inside`` raises."""
    storage_of(inside(root, path)).remove_tree(ignore_errors)
