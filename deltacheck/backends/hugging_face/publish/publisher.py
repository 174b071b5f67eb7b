"""Write the weights of a run as versions, each complete or absent."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np

from deltacheck.backends.hugging_face import model_export
from deltacheck.backends.hugging_face.publish import version_folder
from deltacheck.backends.hugging_face.publish.held_weights import HeldWeights
from deltacheck.backends.hugging_face.publish.new_steps import NewSteps
from deltacheck.backends.hugging_face.publish.receiver import Receiver
from deltacheck.backends.hugging_face.publish.version_folder import (
    ENCODINGS,
    INDEX,
    PRIVATE,
    WORDS,
    XOR,
    DigestingFile,
    Index,
    Tensor,
    Version,
)
from deltacheck.codec import changed_words, frames
from deltacheck.codec.base import U8
from deltacheck.errors import Damaged, NotACheckpointRoot, RootBusy, UnsupportedFormat
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.external_errors import typed
from deltacheck.restore import damage
from deltacheck.restore.export import safetensors_header, shapes
from deltacheck.store import layout
from deltacheck.store.files import storage
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.lock.lease import LocalLease
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import open_root

# The most bytes of a file of weights. Larger: fewer files; smaller: receivers take less memory.
_SHARD_BYTES = 10**9
# Full versions that are kept, with the deltas after them. A receiver that reads the older one is
# not disturbed when a new one appears.
_KEPT_FULL = 2


@typed
class Publisher:
    """A writer of published versions of a run's weights.

    It takes no lock on the run, and one on the folder. It holds a copy of the weights in host
    memory to compare each step with. See ``docs/how-to/publish.md``.

    Args:
        run: The root of the run: a directory, or a prefix of an object store.
        to: The folder: new, empty, or with versions of the same run.
        leaves: Paths or patterns of the weights. Empty: the leaves below ``model``; all leaves if
            there are none there.
        strip: A prefix to remove from the names of tensors. Without ``leaves``, ``model/`` is
            removed in any case.
        files: A folder with configuration and tokenizer for full versions; ``None``: the files that
            the step keeps.
        full_every: The most versions from one full version to the next. Larger: fewer bytes;
            smaller: late receivers read less, and damage harms fewer versions.
        encoding: ``"slime"``: the engines of slime and miles read the versions.
            ``"compact"``: fewer bytes, for ``Receiver`` only.
        item: The item of a ``CheckpointManager``'s steps, if they have several.

    Raises:
        NotACheckpointRoot: There is no root at ``run``; or ``to`` is not empty and has no versions,
            or those of another run.
        RootBusy: Another process publishes to the folder.
        UnsupportedFormat: A newer version of deltacheck has written one of them.
        StorageFailed: ``to`` is in an object store.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        to: str | os.PathLike[str],
        *,
        leaves: Sequence[str] = (),
        strip: str = "",
        files: str | os.PathLike[str] | None = None,
        full_every: int = 20,
        encoding: Literal["slime", "compact"] = "slime",
        item: str | None = None,
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every must be at least 1, not {full_every}")
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be 'slime' or 'compact', not {encoding!r}")
        self._encoding = ENCODINGS[encoding]
        self._root = open_root(run, item)
        self._folder = Path(storage.local(to, "a folder of published versions")).absolute()
        self._leaves, self._strip = tuple(leaves), strip
        self._copies = {} if files is None else model_export.files_of(Path(files))
        self._full_every = full_every
        self._lease = _claim(self._folder, storage.full_name(self._root.path))
        self._newest: Version | None = None
        self._steps = NewSteps(self._root)
        self._held = HeldWeights(self._root)
        with self._released_on_error():
            _remove_leftovers(self._folder)
            self._history = _history(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back; more than once does nothing."""
        self._lease.release()
        self._held.forget()

    def run(
        self,
        *,
        poll_seconds: float = 0.2,
        timeout: float | None = None,
        newest_only: bool = False,
        on_version: Callable[[Version], object] | None = None,
    ) -> list[Version]:
        """Publish steps until no new one has come for some time.

        Args:
            poll_seconds: Time between two looks for a new step. Shorter: versions appear earlier;
                longer: fewer requests to the storage.
            timeout: End after this many seconds without a new step; 0: publish the present steps.
                ``None``: never end.
            newest_only: As in ``poll``.
            on_version: Called with each version.

        Returns:
            The versions that were published.

        Raises:
            Damaged, StepNotFound, UnsupportedLeaf, RootBusy: As ``poll`` raises them.
        """
        versions: list[Version] = []
        begin = time.monotonic()
        while True:
            version = self.poll(newest_only=newest_only)
            if version is not None:
                versions.append(version)
                if on_version is not None:
                    on_version(version)
                begin = time.monotonic()
            elif timeout is not None and time.monotonic() - begin >= timeout:
                return versions
            else:
                time.sleep(poll_seconds)

    def poll(self, *, full: bool = False, newest_only: bool = False) -> Version | None:
        """Publish the next step, if there is one.

        The first version of a folder is that of the newest step. After an exception no version was
        published, and the next call continues with the step after it.

        Args:
            full: Write a full version, of the newest step if there is no new one. Nothing that was
                published is read, so it is the remedy for damage.
            newest_only: Skip steps that were committed since the last call: less work and bytes,
                but not every step is published. ``False``: publish every step that still exists.

        Returns:
            The version, or ``None`` if no new step is committed.

        Raises:
            Damaged: The step or the newest version is damaged.
            StepNotFound: The step has no weights.
            UnsupportedLeaf: safetensors lacks an element type of the weights.
            RootBusy: The lock on the folder was lost.
        """
        self._lease.check()
        if self._newest is None and not full:
            self._newest = self._read_newest()
        reference = self._steps.next(newest_only or full, repeat=full)
        if reference is None:
            return None
        try:
            manifest = self._root.read(reference.manifest_path)
        except FileNotFoundError:
            return None  # deleted since it was listed
        try:
            # Set before the version is written: after an error the next call goes on.
            self._steps.seq = manifest.seq
            with damage.named(self._root, manifest):
                version = self._publish(manifest, full)
        except BaseException:
            # The copy may be that of the step, and not of the newest version.
            self._held.forget()
            raise
        self._newest = version
        self._history[version.number] = version
        self._remove_old()
        return version

    @contextlib.contextmanager
    def _released_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._lease.release()
            raise

    def _read_newest(self) -> Version | None:
        if not self._history:
            return None
        newest = version_folder.read_index(self._folder, max(self._history)).version
        self._steps.seq = max(self._steps.seq, newest.seq)
        return newest

    def _publish(self, manifest: Manifest, full: bool) -> Version:
        keys = model_export.model_keys(manifest, self._leaves, self._strip)
        flat = shapes(manifest, keys.weights)
        specs = {name: manifest.spec(owner) for name, owner in keys.weights.items()}
        types = {name: (spec.dtype, flat.get(name, spec.shape)) for name, spec in specs.items()}
        held, number = self._held, max(self._history, default=0) + 1
        is_full = full or self._is_full_due(number)
        if not is_full and not held.tensors:
            receiver = Receiver(self._folder)
            receiver.poll(number - 1)
            held.tensors = {
                name: Tensor(array.dtype.name, array.shape, array.reshape(-1).view(np.uint8))
                for name, array in receiver.tensors.items()
            }
        is_full = is_full or types != {name: t[:2] for name, t in held.tensors.items()}
        if is_full:
            held.tensors = {n: t for n, t in held.tensors.items() if types.get(n) == t[:2]}
        with _new_version(self._folder, number) as path:
            writer = _Writer(path, None if is_full else number - 1, self._encoding)
            for name, before in held.read(manifest, keys.weights, types):
                if not is_full and before is not None:
                    writer.add_change(name, before, held.tensors[name])
            if is_full or writer.is_too_long:
                writer.discard()
                writer = _Writer(path, None)
                # Wide elements come first, so that each tensor is aligned.
                for name, tensor in sorted(held.tensors.items(), key=_width_and_name):
                    writer.add_tensor(name, tensor)
            base = writer.base
            tensors, files = writer.finish()
            if base is None:
                names = model_export.write_description(
                    path, self._root, manifest, keys.files, self._copies
                )
                files |= {name: version_folder.digest((path / name).read_bytes()) for name in names}
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            version = Version(number, base, manifest.step, manifest.seq, size)
            first = {owner: name for name, owner in reversed(keys.weights.items())}
            ties = {n: first[o] for n, o in keys.weights.items() if base is None and first[o] != n}
            index = Index(version, tensors, writer.checksums, files, ties, self._encoding)
            _write_file(path / INDEX, index.encoded())
        return version

    def _is_full_due(self, number: int) -> bool:
        full = max(
            (n for n, v in self._history.items() if v is not None and v.base is None), default=None
        )
        if full is None or number - full >= self._full_every:
            return True
        # A late receiver reads the full version and all deltas: then a new one is less to read.
        delta_bytes = sum(
            v.file_bytes for n, v in self._history.items() if v is not None and n > full
        )
        newest = self._history[full]
        return newest is not None and delta_bytes > newest.file_bytes

    def _remove_old(self) -> None:
        """Remove the versions before the oldest full one that is kept."""
        full = sorted(n for n, v in self._history.items() if v is not None and v.base is None)
        if len(full) < _KEPT_FULL:
            return
        for number in [n for n in self._history if n < full[-_KEPT_FULL]]:
            # Renamed first, so that no reader sees a part of it.
            removed = self._folder / PRIVATE / f"removed-{secrets.token_hex(4)}"
            with contextlib.suppress(FileNotFoundError):
                version_folder.version_path(self._folder, number).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            del self._history[number]


class _Shard(NamedTuple):
    """Tensors for one file: their bytes and how the file describes them."""

    content: dict[str, U8]
    types: dict[str, tuple[str, tuple[int, ...], int]]


class _Writer:
    """The files of weights of one version.

    Args:
        path: The folder of the version.
        base: The version that the changes are relative to; ``None``: whole tensors.
        encoding: ``XOR`` or ``WORDS``.
    """

    def __init__(self, path: Path, base: int | None, encoding: str = XOR) -> None:
        self.base = base
        self._encoding = encoding
        self.checksums: dict[str, str] = {}
        self.is_too_long = False
        self._path = path
        self._shard = _Shard({}, {})
        self._bytes = 0
        # Files under temporary names, because a name has the number of files.
        self._files: list[tuple[Path, str, list[str]]] = []

    def add_change(self, name: str, before: U8, tensor: Tensor) -> None:
        """Add the difference of a tensor, if there is any."""
        now = tensor.data
        if np.array_equal(before, now):
            return
        if now.size > frames.MAX_FRAME_BYTES:
            self.is_too_long = True
        if self.is_too_long:
            return
        if self._encoding == WORDS:
            word_bytes = dtype_named(tensor.dtype).word_bytes
            content = changed_words.encode(before, now, word_bytes)
        else:
            content = frames.compress(np.bitwise_xor(before, now))
        frame = np.frombuffer(content, np.uint8)
        self._add(name, ("uint8", (frame.size,)), frame, version_folder.digest(now))

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor."""
        self._add(name, tensor[:2], tensor.data, version_folder.digest(tensor.data))

    def _add(
        self, name: str, dtype_and_shape: tuple[str, tuple[int, ...]], data: U8, checksum: str
    ) -> None:
        if self._shard.content and self._bytes + data.size > _SHARD_BYTES:
            self._flush()
        self._shard.content[name] = data
        self._shard.types[name] = (*dtype_and_shape, data.size)
        self._bytes += data.size
        self.checksums[name] = checksum

    def _flush(self) -> None:
        # Receivers of slime read the digests from the file, and those of Hugging Face "format".
        metadata = (
            {"format": "pt"}
            if self.base is None
            else {name: self.checksums[name] for name in self._shard.content}
        )
        path = self._path / f"part-{len(self._files)}"
        header = safetensors_header(self._shard.types, metadata)
        with path.open("xb") as plain:
            file = DigestingFile(plain)
            file.write(header)
            for data in self._shard.content.values():
                file.write(data.data)
            plain.flush()
            os.fsync(plain.fileno())
        self._files.append((path, file.digest, list(self._shard.content)))
        self._shard, self._bytes = _Shard({}, {}), 0

    def discard(self) -> None:
        """Remove the files."""
        for path, _, _ in self._files:
            path.unlink()

    def finish(self) -> tuple[dict[str, str], dict[str, str]]:
        """Write the rest; return the file of each tensor, and the digest of each file."""
        if self._shard.content:
            self._flush()
        tensors: dict[str, str] = {}
        files: dict[str, str] = {}
        shard_names = model_export.shard_names(len(self._files))
        for (path, digest, names), file in zip(self._files, shard_names, strict=True):
            path.rename(self._path / file)
            tensors |= dict.fromkeys(names, file)
            files[file] = digest
        return tensors, files


def _width_and_name(item: tuple[str, Tensor]) -> tuple[int, str]:
    return -dtype_named(item[1].dtype).item_bytes, item[0]


def _claim(folder: Path, run: str) -> LocalLease:
    """Take the lock of a folder, and write its identity if it is new."""
    private = folder / PRIVATE
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run)):
        raise NotACheckpointRoot(
            f"{folder} is inside the run {run}, which cannot hold other files; publish to another"
            " folder"
        )
    # Before anything is made in a folder that belongs to somebody else.
    if folder.is_dir() and not private.is_dir() and any(folder.iterdir()):
        raise NotACheckpointRoot(
            f"{folder} is not empty and has no published versions; name a folder that is new"
        )
    (private / layout.CONTROL).mkdir(parents=True, exist_ok=True)
    try:
        lease = LocalLease(private)
    except RootBusy as error:
        raise RootBusy(
            f"another process publishes to {folder} ({error}). End it, or publish to another folder"
        ) from None
    try:
        owner = version_folder.read_identity(folder)
        if owner is None:
            version_folder.write_identity(folder, run)
            sync_directory(folder)
        elif owner != run:
            raise NotACheckpointRoot(
                f"{folder} has the versions of {owner}, and not of {run}; publish to another folder"
            )
    except BaseException:
        lease.release()
        raise
    return lease


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished versions of a publisher that was killed. The lock is held."""
    for entry in (folder / PRIVATE).iterdir():
        if entry.name.startswith(("new-", "removed-")):
            shutil.rmtree(entry, ignore_errors=True)


def _history(folder: Path) -> dict[int, Version | None]:
    """Return the versions by number; ``None``: its index is damaged."""
    history: dict[int, Version | None] = {}
    for number in version_folder.numbers(folder):
        try:
            history[number] = version_folder.read_index(folder, number).version
        except (Damaged, UnsupportedFormat):
            history[number] = None
    return history


@contextlib.contextmanager
def _new_version(folder: Path, number: int) -> Iterator[Path]:
    """Fill a version under a temporary name, and give it its name when the block ends."""
    temporary = folder / PRIVATE / f"new-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
        sync_directory(temporary)
        temporary.rename(version_folder.version_path(folder, number))
        sync_directory(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
