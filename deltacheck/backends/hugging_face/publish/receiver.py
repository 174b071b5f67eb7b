"""Apply published versions to weights in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.hugging_face.publish import version_folder
from deltacheck.backends.hugging_face.publish.version_folder import (
    FULL_REMEDY,
    WORDS,
    Index,
    Tensor,
    Version,
)
from deltacheck.codec import changed_words, frames
from deltacheck.codec.base import U8
from deltacheck.errors import Damaged, StepNotFound
from deltacheck.leaf import limits
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import escape_key
from deltacheck.restore.follow.follower import LeafChange, Update, changed_elements
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place

# Attempts to read a version while old ones are removed beside it.
_ATTEMPTS = 5


@typed
class Receiver:
    """A copy of published weights in host memory, brought to newer versions by ``poll``.

    A version is applied whole or not at all: each tensor is compared with its digest before the
    copy changes. Applying takes memory for the tensors that change, beside the copy.

    Args:
        folder: The folder that ``deltacheck publish --to`` writes: a directory, or a prefix of an
            object store.
        limits: The most that each ``poll`` may take. ``None``: the bytes of files, and at most 64
            times what they occupy on disk if that is above 256 MiB.

    Raises:
        StorageFailed: The object store does not answer, or refuses. So does ``poll``.
        NotACheckpointRoot: It is no such folder.
        UnsupportedFormat: A newer version of deltacheck has written it.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, limits: limits.Limits | None = None
    ) -> None:
        self._limits = limits
        self._folder = storage.of(folder)
        version_folder.require_identity(self._folder)
        self._version: Version | None = None
        self._tensors: dict[str, Tensor] = {}
        self._ties: Mapping[str, str] = {}

    @property
    def version(self) -> Version | None:
        """The version that the copy has; ``None`` before the first."""
        return self._version

    @property
    def tensors(self) -> Mapping[str, NDArray[Any]]:
        """The weights by name, read-only. A later ``poll`` replaces arrays and never writes them.

        Types that NumPy lacks are those of ml_dtypes.
        """
        return MappingProxyType(
            {name: _array(_spec(name, t), t.data) for name, t in self._tensors.items()}
        )

    def poll(self, number: int | None = None) -> Update | None:
        """Bring the copy to a version.

        It begins with the newest full version if that is newer than the copy, and with the copy
        otherwise. After an exception the copy is what it was before.

        Args:
            number: The version; ``None``: the newest.

        Returns:
            The changes since the version before, for ``apply`` of a backend, with the names of
            tensors as the keys of a state dict; whole tensors if there was none. ``None`` if the
            copy has this version, or nothing is published.

        Raises:
            StepNotFound: There is no such version.
            Damaged: A file is damaged, or a version does not continue the copy. Names tensor, file
                and both digests.
            BudgetExceeded: The files take more than the limits allow.
        """
        for attempt in range(_ATTEMPTS):
            try:
                with limits.applied(self._limits):
                    return self._poll(number)
            except FileNotFoundError as error:
                # Old versions are removed while a slow receiver reads them.
                if attempt == _ATTEMPTS - 1:
                    raise Damaged(
                        f"{self._folder} lacks a file of a version: {error}. {FULL_REMEDY}"
                    ) from error
        raise AssertionError

    def _poll(self, number: int | None) -> Update | None:
        published = version_folder.numbers(self._folder)
        if number is not None and number not in published:
            raise StepNotFound(
                f"{self._folder} has no version {number}; it has"
                f" {f'{published[0]} to {published[-1]}' if published else 'none'}"
            )
        if not published:
            return None
        target = published[-1] if number is None else number
        if self._version is not None and target == self._version.number:
            return None
        chain = self._chain(target)
        version_folder.check_size(self._folder, chain)
        is_full = chain[0].version.base is None
        tensors, ties = ({}, chain[0].ties) if is_full else (dict(self._tensors), self._ties)
        for index in chain:
            self._apply(index, tensors)
        update = self._update(chain[-1].version, tensors, ties)
        self._version, self._tensors, self._ties = chain[-1].version, tensors, ties
        return update

    def _chain(self, target: int) -> list[Index]:
        """Return the versions to apply, oldest first: a full one, or one that continues the copy.

        Only versions that are needed are read, so damage to others does not matter.
        """
        chain: list[Index] = []
        number: int | None = target
        while number is not None and (self._version is None or number != self._version.number):
            chain.append(version_folder.read_index(self._folder, number))
            number = chain[-1].version.base
        return chain[::-1]

    def _apply(self, index: Index, tensors: dict[str, Tensor]) -> None:
        path = version_folder.version_path(self._folder, index.version.number)
        names: set[str] = set()
        for file in sorted(set(index.tensors.values())):
            limits.check_time()
            contents = version_folder.read_tensors(path / file, index)
            for name, content in contents.items():
                if index.tensors.get(name) != file:
                    raise _damaged(index, path / file, name, "is not in its index")
                names.add(name)
                if index.version.base is None:
                    fresh = content._replace(data=content.data.copy())
                elif name in tensors:
                    fresh = _changed(index, path / file, name, content.data, tensors[name])
                else:
                    raise _damaged(index, path / file, name, "is in no version before")
                digest = version_folder.digest(fresh.data)
                if digest != index.checksums[name]:
                    fault = f"has digest {digest}, expected is {index.checksums[name]}"
                    raise _damaged(index, path / file, name, fault)
                fresh.data.flags.writeable = False
                tensors[name] = fresh
        if missing := sorted(index.tensors.keys() - names):
            raise _damaged(index, path, missing[0], "is in no file")

    def _update(
        self, version: Version, tensors: Mapping[str, Tensor], ties: Mapping[str, str]
    ) -> Update:
        before = self._tensors
        types_before = {name: t[:2] for name, t in before.items()}
        is_whole = types_before != {name: t[:2] for name, t in tensors.items()}
        changes = {}
        for name, tensor in tensors.items():
            if ties.get(name, name) != name:
                continue
            old = None if is_whole else before[name]
            if old is not None and old.data is tensor.data:
                continue
            spec = _spec(name, tensor)
            values = _array(spec, tensor.data).reshape(-1)
            positions = None if old is None else changed_elements(spec, old.data, tensor.data)
            if positions is not None:
                if not positions.size:
                    continue
                values = values[positions]
            changes[spec.path] = LeafChange(spec, positions, values, digest_of(spec, tensor.data))
        names = {escape_key(name): escape_key(ties.get(name, name)) for name in tensors}
        last_step = None if is_whole or self._version is None else self._version.step
        return Update(version.step, version.seq, last_step, changes, names, {})


def _changed(index: Index, file: Place, name: str, stored: U8, before: Tensor) -> Tensor:
    try:
        if index.encoding == WORDS:
            word_bytes = dtype_named(before.dtype).word_bytes
            return before._replace(data=changed_words.decode(stored, before.data, word_bytes))
        difference = frames.decompress(stored, before.data.size)
    except Damaged as error:
        raise _damaged(index, file, name, f"cannot be decoded ({error})") from error
    return before._replace(data=np.bitwise_xor(before.data, difference, out=difference))


def _damaged(index: Index, file: Place, name: str, fault: str) -> Damaged:
    return Damaged(
        f"tensor {name!r} of version {index.version.number} (step {index.version.step}) in {file}"
        f" {fault}. The copy was left as it is. {FULL_REMEDY}",
        file=file,
        leaf=name,
    )


def _spec(name: str, tensor: Tensor) -> LeafSpec:
    return LeafSpec.of(escape_key(name), tensor.shape, tensor.dtype)


def _array(spec: LeafSpec, data: U8) -> NDArray[Any]:
    return data.view(spec.element.numpy).reshape(spec.shape)
