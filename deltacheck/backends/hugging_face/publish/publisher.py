"""Write the weights of a run as versions, each complete or absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Self

import numpy as np

from deltacheck.backends.hugging_face import model_export
from deltacheck.backends.hugging_face.publish.held_weights import HeldWeights
from deltacheck.backends.hugging_face.publish.receiver import Receiver
from deltacheck.backends.hugging_face.publish.version_folder import Tensor, Version
from deltacheck.backends.hugging_face.publish.version_series import VersionContent, VersionSeries
from deltacheck.leaf.external_errors import typed
from deltacheck.restore import damage
from deltacheck.restore.export import shapes
from deltacheck.restore.follow.new_steps import NewSteps, polled
from deltacheck.store.files import storage
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root


@typed
class Publisher:
    """A writer of published versions of a run's weights.

    It takes no lock on the run, and one on the folder. It holds a copy of the weights in host
    memory to compare each step with. See ``docs/how-to/publish.md``.

    Args:
        run: The root of the run: a directory, or a prefix of an object store.
        to: The folder: new, empty, or with versions of the same run. A directory, or a prefix of
            an object store.
        leaves: Paths or patterns of the weights. Empty: the leaves below ``model``; all leaves if
            there are none there.
        strip: A prefix to remove from the names of tensors. Without ``leaves``, ``model/`` is
            removed in any case.
        files: A folder with configuration and tokenizer for full versions; ``None``: the files that
            the step keeps.
        full_every: The most versions from one full version to the next, 1 to 64. Larger: fewer
            bytes; smaller: late receivers read less, and damage harms fewer versions.
        encoding: ``"slime"``: the engines of slime and miles read the versions.
            ``"compact"``: fewer bytes, for ``Receiver`` only.
        checksum: The sums of tensors that other receivers compare: ``"xxh3-128"`` for those of
            slime and miles, ``"adler32"`` for ModelExpress and cwtrain. ``Receiver`` compares with
            xxh3-128 in any case.
        item: The item of a ``CheckpointManager``'s steps, if they have several.

    Raises:
        NotACheckpointRoot: There is no root at ``run``; or ``to`` is not empty and has no versions,
            or those of another run.
        RootBusy: Another process publishes to the folder.
        UnsupportedFormat: A newer version of deltacheck has written one of them.
        StorageFailed: An object store does not answer, refuses, or has no conditional writes.
    """

    def __init__(  # noqa: PLR0913 - one argument per option
        self,
        run: str | os.PathLike[str],
        to: str | os.PathLike[str],
        *,
        leaves: Sequence[str] = (),
        strip: str = "",
        files: str | os.PathLike[str] | None = None,
        full_every: int = 20,
        encoding: Literal["slime", "compact"] = "slime",
        checksum: Literal["xxh3-128", "adler32"] = "xxh3-128",
        item: str | None = None,
    ) -> None:
        self._root = open_root(run, item)
        self._leaves, self._strip = tuple(leaves), strip
        self._copies = {} if files is None else model_export.files_of(Path(files))
        owner = storage.full_name(self._root.path)
        self._series = VersionSeries(to, owner, full_every, encoding, checksum)
        self._newest: Version | None = None
        self._steps = NewSteps(self._root)
        self._held = HeldWeights(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back; more than once does nothing."""
        self._series.close()
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
            Damaged, StepNotFound, UnsupportedLeaf: As ``poll`` raises them.
            RootBusy, StorageFailed: The same.
        """
        versions: list[Version] = []
        for version in polled(partial(self.poll, newest_only=newest_only), poll_seconds, timeout):
            versions.append(version)
            if on_version is not None:
                on_version(version)
        return versions

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
            StorageFailed: An object store does not answer, or refuses.
        """
        self._series.check()
        if self._newest is None and not full:
            self._newest = self._series.read_newest()
            if self._newest is not None:
                self._steps.seq = max(self._steps.seq, self._newest.seq)
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
        return version

    def _publish(self, manifest: Manifest, full: bool) -> Version:
        keys = model_export.model_keys(manifest, self._leaves, self._strip)
        flat = shapes(manifest, keys.weights)
        specs = {name: manifest.spec(owner) for name, owner in keys.weights.items()}
        types = {name: (spec.dtype, flat.get(name, spec.shape)) for name, spec in specs.items()}
        held = self._held
        is_full = full or self._series.is_full_due
        if not is_full and not held.tensors:
            receiver = Receiver(str(self._series.folder))
            receiver.poll(self._series.newest)
            held.tensors = {
                name: Tensor(array.dtype.name, array.shape, array.reshape(-1).view(np.uint8))
                for name, array in receiver.tensors.items()
            }
        is_full = is_full or types != {name: t[:2] for name, t in held.tensors.items()}
        if is_full:
            held.tensors = {n: t for n, t in held.tensors.items() if types.get(n) == t[:2]}
        first = {owner: name for name, owner in reversed(keys.weights.items())}
        content = VersionContent(
            manifest.step,
            manifest.seq,
            (
                (name, before, held.tensors[name])
                for name, before in held.read(manifest, keys.weights, types)
            ),
            lambda: held.tensors,
            {name: first[owner] for name, owner in keys.weights.items() if first[owner] != name},
            lambda path: model_export.write_description(
                path, self._root, manifest, keys.files, self._copies
            ),
        )
        return self._series.write(content, full=is_full)
