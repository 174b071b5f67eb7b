"""The manifests that a root has read, kept by the version of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from deltacheck.store import documents
from deltacheck.store.files.storage import Place, storage_of
from deltacheck.store.manifest import Brief, Manifest


class _Known(NamedTuple):
    version: object
    manifest: Manifest
    digest: str


class ManifestCache:
    """The manifests of one root. A file is read again only if its version has changed.

    Briefs are kept apart from manifests: collection looks at every manifest of a root and needs
    little of each, so a root that is only collected holds no whole manifest in memory.
    """

    def __init__(self) -> None:
        self._manifests: dict[Place, _Known] = {}
        self._briefs: dict[Place, tuple[object, Brief]] = {}
        # Reads that ``start`` has begun. A local file is read when its result is asked for.
        self._reads: dict[Place, Callable[[], tuple[bytes | None, object]]] = {}

    def start(self, paths: Iterable[Place], *, whole: bool) -> None:
        """Begin to read some manifests, all at once if the storage can do so.

        Args:
            paths: The files.
            whole: ``True``: for ``read``; ``False``: for ``brief``.
        """
        self._reads = {path: self._start(path, whole) for path in paths}

    def read(self, path: Place) -> Manifest:
        """Return a manifest.

        Raises:
            FileNotFoundError: There is no such file.
            Damaged: The file is not a manifest.
        """
        content, version = self._finish(path, whole=True)
        cached = self._manifests.get(path)
        # The file still has the version that the read began with, so the cached manifest is the
        # content.
        if content is None and cached is not None and cached.version == version:
            return cached.manifest
        # The entry was dropped or replaced since the read began.
        if content is None:
            content, version = self._read_again(path)
        manifest = documents.decode_manifest(content, path)
        self._manifests[path] = _Known(version, manifest, documents.manifest_digest(content))
        return manifest

    def brief(self, path: Place) -> Brief:
        """Return the brief of a manifest. Raises what ``read`` raises."""
        content, version = self._finish(path, whole=False)
        if content is None:
            if path in self._briefs and self._briefs[path][0] == version:
                return self._briefs[path][1]
            # A whole manifest of this version has been read since, so no file needs to be read.
            cached = self._manifests.get(path)
            if cached is not None and cached.version == version:
                self._briefs[path] = version, Brief.of(cached.manifest)
                return self._briefs[path][1]
            content, version = self._read_again(path)
        brief = documents.decode_brief(content, path)
        self._briefs[path] = version, brief
        return brief

    def digest_of(self, manifest: Manifest) -> str:
        """Return the ``manifest_digest`` of the file that ``manifest`` was read from."""
        return next(
            cached.digest for cached in self._manifests.values() if cached.manifest is manifest
        )

    def known(self) -> list[Place]:
        """Return the paths of all files that were read and not found missing since."""
        return list(self._manifests.keys() | self._briefs.keys())

    def forget(self, listed: Iterable[Place]) -> None:
        """Drop the files that a listing lacks: a run that saves often deletes as often.

        If a listing may lag, nothing is dropped: the caller asks for these files by name.
        """
        for path in (self._manifests.keys() | self._briefs.keys()) - set(listed):
            if storage_of(path).listing_is_current:
                self._manifests.pop(path, None)
                self._briefs.pop(path, None)

    def _start(self, path: Place, whole: bool) -> Callable[[], tuple[bytes | None, object]]:
        version: object = None
        if not whole and path in self._briefs:
            version = self._briefs[path][0]
        elif path in self._manifests:
            version = self._manifests[path].version
        return storage_of(path).start_read(documents.MAX_DOCUMENT_BYTES, version)

    def _finish(self, path: Place, whole: bool) -> tuple[bytes | None, object]:
        try:
            return (self._reads.pop(path, None) or self._start(path, whole))()
        except FileNotFoundError:
            # The step was deleted. ``known`` must not name its file for ever.
            self._manifests.pop(path, None)
            self._briefs.pop(path, None)
            raise

    def _read_again(self, path: Place) -> tuple[bytes, object]:
        """Read a file whose version was known when the read began, and no longer is."""
        content, version = storage_of(path).start_read(documents.MAX_DOCUMENT_BYTES)()
        assert content is not None
        return content, version
