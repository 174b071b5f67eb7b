"""Move storages from accelerators to host memory and back.

A storage keeps its identity: it is resized to zero and back. So tensors, views, parameters, entries
of optimizers and local shards stay the same objects, and what they share stays shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltacheck.backends.torch.capture import tensor_codec
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import BudgetExceeded, TreeMismatch, UnsupportedLeaf
from deltacheck.leaf.external_errors import is_out_of_memory
from deltacheck.save.saver import Saver


# Without equality: a comparison of tensors has no single truth value.
@dataclass(slots=True, eq=False)
class _Storage:
    """A storage on an accelerator.

    Args:
        path: The first leaf in it.
        device: The accelerator.
        storage: The storage.
        is_leaf: True if the leaf is all of it, so that its bytes may be those of the shadow.
        content: The bytes in host memory, uint8 1-D; ``None`` until they are copied.
    """

    path: str
    device: Accelerator
    storage: torch.UntypedStorage
    is_leaf: bool
    content: torch.Tensor | None = None

    def memory(self) -> torch.Tensor:
        """Return the bytes on the device, uint8 1-D."""
        memory = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return memory.set_(self.storage)


class Offload:
    """The storages of one engine that are in host memory.

    Args:
        saver: Its saver, whose shadow leaves the devices, too.
    """

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._away: list[_Storage] = []

    def require_none(self) -> None:
        """Raise ``UnsupportedLeaf`` if a storage is in host memory.

        A save could update the shadow, which may be the only copy of its content.
        """
        if self._away:
            raise UnsupportedLeaf(
                f"{len(self._away)} storages, the first of leaf {self._away[0].path!r}, are in host"
                " memory since offload(); call reload() before save()"
            )

    def offload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy storages to host memory, and free them and the shadow on their devices.

        If it raises, every storage is as it was.

        Args:
            tensors: Leaf paths and tensors. Those in host memory stay where they are.
        """
        storages = _on_devices(tensors)
        devices = {item.device for item in storages}

        def move(shadow: Mapping[str, Any]) -> dict[str, Any]:
            on_devices = {
                path: base for path, base in shadow.items() if isinstance(base, torch.Tensor)
            }
            devices.update(map(tensor_codec.device_of, on_devices.values()))
            # Other streams may still write to what is copied, or read what is freed.
            for device in devices:
                device.finish()
            moved = {}
            for item in storages:
                base = shadow.get(item.path) if item.is_leaf else None
                item.content = _to_host(item, base)
                if isinstance(base, torch.Tensor) and _is_equal(base, item.memory()):
                    # One copy serves both.
                    moved[item.path] = item.content.numpy()
            return moved | {
                path: self._saver.codec.host(base)
                for path, base in on_devices.items()
                if path not in moved
            }

        self._saver.move_shadow(move)
        for item in storages:
            # First, so that no interruption loses the copy.
            self._away.append(item)
            item.storage.resize_(0)
        for device in devices:
            device.trim()

    def reload(self) -> None:
        """Bring all storages back. If it raises, it may be called again.

        Raises:
            TreeMismatch: A storage has got memory meanwhile. Nothing is changed then.
            BudgetExceeded: A device has too little memory.
        """
        for item in self._away:
            if item.storage.nbytes():
                raise TreeMismatch(
                    f"the storage of leaf {item.path!r} has {item.storage.nbytes()} bytes and not"
                    " 0: it has got memory since offload(), and what it holds would be lost. Free"
                    " it with tensor.untyped_storage().resize_(0), then call reload() again"
                )
        while self._away:
            _bring_back(self._away[-1])
            self._away.pop()


def _bring_back(item: _Storage) -> None:
    assert item.content is not None  # it was copied before it was freed
    try:
        item.storage.resize_(item.content.numel())
        item.memory().copy_(item.content)
    except BaseException as error:
        item.storage.resize_(0)
        if not is_out_of_memory(error):
            raise
        raise BudgetExceeded(
            f"leaf {item.path!r} needs {item.content.numel()} bytes on {item.device.name}, which"
            f" has too little free memory ({error}). Free some, then call reload() again: what is"
            " not back yet is safe in host memory"
        ) from error


def _on_devices(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[_Storage]:
    """Return the storages on accelerators, each once."""
    storages: dict[int, _Storage] = {}
    for path, tensor in tensors:
        device, storage = tensor_codec.accelerator_of(tensor), tensor.untyped_storage()
        if device is None or not storage.nbytes() or storage._cdata in storages:
            continue
        if not storage.resizable():
            raise UnsupportedLeaf(
                f"leaf {path!r} lies in memory of another library, which torch cannot free (its"
                " storage is not resizable); leave it out of the state of offload()"
            )
        is_leaf = leaves.is_plain(tensor) and tensor.nbytes == storage.nbytes()
        storages[storage._cdata] = _Storage(path, device, storage, is_leaf)
    return list(storages.values())


def _to_host(item: _Storage, base: Any) -> torch.Tensor:
    """Return a storage's bytes in host memory: those of the shadow if they are equal."""
    memory = item.memory()
    host = item.device.pinned(memory.numel())
    host.copy_(memory)
    if isinstance(base, np.ndarray) and _is_equal(torch.from_numpy(base), host):
        return torch.from_numpy(base)
    return host


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    # In windows, because a comparison on a device takes as much memory as what it compares.
    parts = (torch.split(tensor, tensor_codec.WINDOW_BYTES) for tensor in (first, second))
    return first.numel() == second.numel() and all(map(torch.equal, *parts))
