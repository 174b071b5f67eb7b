"""torch tensors as leaves: what they are, their bytes, and tensors from bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes, place_numpy
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.tree import ArrayLeaf, Node, shape_in, unflatten
from deltacheck.restore.content import Loaded
from deltacheck.restore.values import unshared_paths

_NAMES_ONLY = (
    "int2",
    "int4",
    "uint2",
    "uint4",
)  # torch has these dtypes, but no operation on them, not even a copy


def describe(value: object) -> ArrayLeaf | None:
    """Tensors and NumPy arrays; ``None`` for anything else.

    Raises ``UnsupportedLeaf`` for tensors whose bytes are not a dense array in this process.
    """
    if not isinstance(value, torch.Tensor):
        return describe_numpy(value)
    if value.is_meta or type(value).__name__ == "FakeTensor":
        raise UnsupportedLeaf("a meta or fake tensor has no content; materialise it first")
    if type(value).__name__ == "DTensor":
        raise UnsupportedLeaf(
            "a DTensor is one shard of a leaf, and this engine saves whole leaves of one process;"
            " open it in every rank with Engine(root, process_group=...)"
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise UnsupportedLeaf(
            f"a tensor of layout {value.layout} (quantized: {value.is_quantized}) is not a dense"
            " array; save its parts"
        )
    name = _name_of(value.dtype)
    identity = None
    if value.numel():
        identity = (value.device, value.data_ptr(), value.stride(), value.is_conj(), value.is_neg())
    return ArrayLeaf(tuple(value.shape), name, identity)


@cache
def _name_of(dtype: torch.dtype) -> str:
    return dtype_named(str(dtype).removeprefix("torch.")).name


def local_of(value: object) -> object:
    """The dense tensor of this process where ``value`` is a DTensor; else ``value``."""
    return getattr(value, "_local_tensor", value) if type(value).__name__ == "DTensor" else value


def is_plain(value: torch.Tensor) -> bool:
    """Whether the tensor's memory is its bytes in C order: only then can it be read where it lies,
    later.
    """
    return (
        value.is_contiguous()
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_inference()
    )


def flat_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor where it lies, uint8 1-D in C order: a view of plain tensors, a copy of
    all others.
    """
    plain = value.detach()
    if not is_plain(value):
        with torch.no_grad():
            plain = plain.resolve_conj().resolve_neg().contiguous()
    return viewed(plain)


def viewed(plain: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor where it lies, uint8 1-D. REQUIRES: it is plain, and detached."""
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).view(torch.uint8)


def bytes_of(value: object) -> NDArray[np.uint8]:
    """The bytes of a leaf, uint8 1-D in C order: a view of plain host tensors, a copy of all
    others.
    """
    if not isinstance(value, torch.Tensor):
        assert isinstance(value, np.ndarray | np.generic)  # describe() admits nothing else
        return numpy_bytes(value)
    flat: NDArray[np.uint8] = flat_bytes(value.cpu()).numpy()
    return flat


def memory_of(value: object) -> NDArray[np.uint8] | None:
    """The memory of a leaf, uint8 1-D, to be written to; ``None`` where its bytes do not lie on the
    host in C order, or there are none.
    """
    if (
        not isinstance(value, torch.Tensor)
        or value.device.type != "cpu"
        or not is_plain(value)
        or not value.numel()
    ):
        return None
    memory: NDArray[np.uint8] = viewed(value.detach()).numpy()
    return memory


def tensor_of(item: Loaded) -> torch.Tensor:
    """A loaded leaf as a host tensor that shares its memory."""
    spec = item.spec
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or spec.dtype in _NAMES_ONLY:
        raise UnsupportedLeaf(
            f"leaf {spec.path!r} is of type {spec.dtype}, which torch does not have; read it with"
            " deltacheck.open(root).restore()"
        )
    if item.data.size == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.from_numpy(item.data).view(dtype).reshape(spec.shape)


def place(item: Loaded, tag: str | None, *, copy: bool = True) -> object:
    """A loaded leaf as what it was saved from. ``copy``: whether a tensor gets memory of its own;
    NumPy's arrays do.
    """
    found = place_numpy(item, tag)
    if found is not None:
        return found
    tensor = shaped(item, tag)
    return tensor.clone() if copy else tensor


def shaped(item: Loaded, tag: str | None) -> torch.Tensor:
    """``tensor_of``, in the shape that a leaf which is stored flat has."""
    tensor = tensor_of(item)
    shape = shape_in(tag, tensor.numel(), item.spec.path)
    return tensor if shape is None else tensor.reshape(shape)


def tree_of(
    skeleton: Node,
    loaded: Mapping[str, Loaded],
    move: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    stored: Mapping[str, NDArray[np.uint8]] | None = None,
) -> object:
    """The nested state of a step with its leaves in memory of their own, tied leaves as one.
    ``move``:
    called with each tensor once.

    ``stored``: what is kept of what was read, which the leaves must not share.
    """
    placed: dict[tuple[str, str | None], object] = {}
    free = unshared_paths(loaded, stored or {})

    def put(path: str, owner: str, tag: str | None) -> object:
        if (owner, tag) not in placed:
            leaf = place(loaded[owner], tag, copy=owner not in free)
            free.discard(owner)  # another tag is another leaf
            placed[owner, tag] = move(leaf) if isinstance(leaf, torch.Tensor) else leaf
        return placed[owner, tag]

    return unflatten(skeleton, put)
