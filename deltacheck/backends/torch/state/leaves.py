"""Treat torch tensors as leaves: describe them, read their bytes, and create them from bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes, place_numpy
from deltacheck.backends.torch.state.classes import build, expand
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.containers import DTYPE
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.instances import name_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node, shape_in
from deltacheck.restore.buffers import copy_all
from deltacheck.restore.content import Loaded, as_array
from deltacheck.restore.values import StepReader, unshared_paths

# torch has these dtypes, but no operation on them, not even a copy.
_NO_COPY = {
    dtype
    for bits in range(1, 8)
    for name in (f"int{bits}", f"uint{bits}")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def describe(value: object) -> ArrayLeaf | None:
    """Describe a tensor or NumPy array; return ``None`` for anything else.

    Raises:
        UnsupportedLeaf: The bytes of the tensor are not a dense array in this process.
    """
    if not isinstance(value, torch.Tensor):
        return describe_numpy(value)
    # Classes are compared by name here, because their modules take long to import.
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
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        # The tensors inside of a wrapper are the leaves (``classes.expand``).
        if is_traceable_wrapper_subclass(value):
            return None
        _refuse(value)
    name, tag = _form_of(value.dtype)
    identity = None
    # Leaves of equal identity are tied. Stride and lazy bits belong to it, because a transposed or
    # conjugated view of the same memory has other bytes.
    if value.numel():
        require_memory(value)
        identity = (value.device, value.data_ptr(), value.stride(), value.is_conj(), value.is_neg())
    return ArrayLeaf(tuple(value.shape), name, identity, tag)


def require_memory(value: torch.Tensor) -> None:
    """Raise ``UnsupportedLeaf`` for a tensor whose storage was freed: reads would go beyond it."""
    strides = zip(value.shape, value.stride(), strict=True)
    last = value.storage_offset() + sum((size - 1) * stride for size, stride in strides)
    needed, actual = (last + 1) * value.itemsize, value.untyped_storage().nbytes()
    if actual < needed:
        raise UnsupportedLeaf(
            f"its storage has {actual} bytes and not {needed}, as after an offload; bring its"
            " content back first (after Engine.offload, by Engine.reload)"
        )


def _refuse(value: torch.Tensor) -> NoReturn:
    """Raise ``UnsupportedLeaf`` for a tensor that would be restored without its class."""
    if isinstance(value, UninitializedParameter | UninitializedBuffer):
        remedy = "run a batch through its lazy module first, which gives it a shape"
    elif type(value).__name__ == "MaskedTensor":
        remedy = "save value.get_data() and value.get_mask()"
    else:
        remedy = "save value.as_subclass(torch.Tensor), and what the class has beside it"
    raise UnsupportedLeaf(
        f"it is a {name_of(type(value))}, a tensor that cannot be kept exactly; {remedy}"
    )


def flatten(state: object, described: Callable[[object], ArrayLeaf | None] = describe) -> Flat:
    """Return the leaves and the skeleton of a state.

    Args:
        state: The state.
        described: Describes the arrays.

    Raises:
        UnsupportedLeaf, DuplicatePath: As ``tree.flatten`` raises them.
    """
    return tree.flatten(state, described, expand)


@cache
def _form_of(dtype: torch.dtype) -> tuple[str, str | None]:
    """Return the element type that a dtype is stored as, and the tag if that is another type."""
    try:
        return dtype_named(str(dtype).removeprefix("torch.")).name, None
    except UnsupportedLeaf:
        # The bits of a quantized dtype mean nothing without the scale of the tensor.
        if str(dtype).startswith(("torch.q", "torch.uint", "torch.int")) and dtype not in _NO_COPY:
            raise
        return dtype_named(f"uint{8 * dtype.itemsize}").name, DTYPE + str(dtype)


def _dtype_of(spec: LeafSpec, tag: str | None) -> torch.dtype:
    """Return the dtype in which a leaf is restored."""
    name = spec.dtype
    if tag is not None and tag.startswith(DTYPE):
        name = tag.removeprefix(DTYPE).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    # JAX has element types that torch lacks, and a tag may be one of a newer torch.
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != spec.element.item_bytes:
        raise UnsupportedLeaf(
            f"leaf {spec.path!r} is of type {name}, which torch does not have; read it with"
            " deltacheck.open(root).restore()"
        )
    return dtype


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as torch can copy it: itself, or its bytes if torch cannot copy its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in _NO_COPY else tensor


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of ``copyable(value)`` in the dtype of the value."""
    # A view of the same dtype would only hide that the tensor owns its memory.
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def local_of(value: object) -> object:
    """Return the dense tensor of this process if ``value`` is a DTensor, else ``value``."""
    return getattr(value, "_local_tensor", value) if type(value).__name__ == "DTensor" else value


def is_plain(value: torch.Tensor) -> bool:
    """Return ``True`` if the tensor's memory is its bytes in C order.

    Only such a tensor can be read later, in its place.
    """
    return (
        value.is_contiguous()
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_inference()
    )


def flat_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor on its device, uint8 1-D in C order.

    The result is a view of plain tensors, and a copy of all others.
    """
    plain = copyable(value.detach())
    if not is_plain(value):
        with torch.no_grad():
            plain = plain.resolve_conj().resolve_neg().contiguous()
    return viewed(plain)


def viewed(plain: torch.Tensor) -> torch.Tensor:
    """Return a view of the bytes of a plain, detached tensor on its device, uint8 1-D."""
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).view(torch.uint8)


def bytes_of(value: object) -> NDArray[np.uint8]:
    """Return the bytes of a leaf, uint8 1-D in C order.

    The result is a view of plain host tensors, and a copy of all others.
    """
    if not isinstance(value, torch.Tensor):
        assert isinstance(value, np.ndarray | np.generic)  # describe() admits nothing else
        return numpy_bytes(value)
    # ``cpu`` returns the tensor itself if it is on the host.
    flat: NDArray[np.uint8] = flat_bytes(copyable(value).cpu()).numpy()
    return flat


def _memory_of(value: object) -> NDArray[np.uint8] | None:
    """Return the memory of a leaf, uint8 1-D, to be written to.

    Return ``None`` if its bytes are not on the host in C order, or if it has none.
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


def tensor_of(item: Loaded, tag: str | None = None) -> torch.Tensor:
    """Return a loaded leaf as a host tensor that shares its memory.

    Args:
        item: The leaf.
        tag: The leaf's tag, which may have a dtype that only torch has.

    Raises:
        UnsupportedLeaf: torch does not have the element type.
    """
    dtype = _dtype_of(item.spec, tag)
    if item.data.size == 0:
        return torch.empty(item.spec.shape, dtype=dtype)
    return torch.from_numpy(item.data).view(dtype).reshape(item.spec.shape)


def empty(spec: LeafSpec, tag: str | None, device: torch.device) -> torch.Tensor | None:
    """Return a tensor to be filled with a leaf; ``None`` if the leaf is no tensor of its shape."""
    if tag is not None and not tag.startswith(DTYPE):
        return None
    return torch.empty(spec.shape, dtype=_dtype_of(spec, tag), device=device)


def require_writable(values: Mapping[str, object]) -> None:
    """Raise ``UnsupportedLeaf`` if a leaf of a restore target cannot hold any content.

    Args:
        values: The leaves of the target, by path.
    """
    for path, value in values.items():
        local = local_of(value)
        if not isinstance(local, torch.Tensor):
            continue
        if local.is_inference() and not torch.is_inference_mode_enabled():
            raise UnsupportedLeaf(
                f"leaf {path!r} of the target is an inference tensor, which may not be written to"
                " here. Restore within torch.inference_mode(), or give its clone()"
            )
        if not local.is_contiguous() and _has_overlap(local):
            raise UnsupportedLeaf(
                f"leaf {path!r} of the target, of shape {tuple(local.shape)} and strides"
                f" {local.stride()}, has several elements at one place in memory (an expanded"
                " tensor or a view). Give its clone()"
            )


def _has_overlap(tensor: torch.Tensor) -> bool:
    """Return true if two elements of a tensor are at one place in memory."""
    axes = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    if not tensor.numel():
        return False
    last = 0
    for stride, size in axes:
        if stride <= last:
            break
        last += stride * (size - 1)
    else:
        return False
    # Rare strides, such as interleaved ones, need a look at each element.
    offsets = np.zeros((), np.int64)
    for stride, size in axes:
        offsets = offsets[..., np.newaxis] + stride * np.arange(size)
    return len(np.unique(offsets)) < tensor.numel()


def fill(value: torch.Tensor, item: Loaded) -> None:
    """Fill a tensor in place with a loaded leaf, which has its shape and dtype."""
    restored = tensor_of(item, _form_of(value.dtype)[1])
    if restored.data_ptr() != value.data_ptr():  # else it was decoded there
        with torch.no_grad():
            copyable(value).copy_(copyable(restored))


def read_into(
    values: Mapping[str, object],
    reader: StepReader,
    saved_paths: Mapping[str, str],
    settle_reads: Callable[[], None],
    paths: Sequence[str] | None = None,
) -> dict[str, object]:
    """Read leaves and return those of a restore target with the restored content, by path.

    Tensors and arrays are filled in place; NumPy scalars are immutable and made anew.

    Args:
        values: The leaves of the target.
        reader: Reads the step.
        saved_paths: The leaf of the step for each, which has its shape and dtype.
        settle_reads: Called before the first tensor is written to, which a save may still read.
        paths: The leaves to read; ``None``: all of the step.
    """

    def memory() -> dict[str, NDArray[np.uint8]]:
        settle_reads()
        parts = {saved_paths[path]: _memory_of(value) for path, value in values.items()}
        return {path: array for path, array in parts.items() if array is not None}

    loaded = reader.whole(paths, into=memory)
    result = dict(values)
    copies, tensors = [], []
    for path, value in values.items():
        item = loaded[saved_paths[path]]
        if isinstance(value, np.ndarray):
            np.copyto(value, as_array(item))
        elif not isinstance(value, torch.Tensor):
            result[path] = as_array(item)[()]
        elif (place_of := _memory_of(value)) is None:
            fill(value, item)
        else:
            _dtype_of(item.spec, _form_of(value.dtype)[1])
            tensors.append(value)
            if place_of.ctypes.data != item.data.ctypes.data:  # else it was decoded there
                copies.append((place_of, item.data))
    # A copy of torch would keep its threads waiting actively for each other at every tensor.
    copy_all(copies)
    # torch has not seen these writes.
    torch.autograd.graph.increment_version(tensors)
    return result


def place(item: Loaded, tag: str | None, *, copy: bool = True) -> object:
    """Return a loaded leaf as the kind of value that was saved.

    Args:
        item: The leaf.
        tag: The leaf's tag.
        copy: Give a tensor memory of its own. NumPy arrays always have it.
    """
    array = place_numpy(item, tag)
    if array is not None:
        return array
    tensor = shaped(item, tag)
    return as_dtype(copyable(tensor).clone(), tensor.dtype) if copy else tensor


def shaped(item: Loaded, tag: str | None) -> torch.Tensor:
    """Return ``tensor_of``; a leaf that is stored flat gets the shape of its tag."""
    tensor = tensor_of(item, tag)
    shape = shape_in(tag, tensor.numel(), item.spec.path)
    return tensor if shape is None else tensor.reshape(shape)


def tree_of(
    skeleton: Node,
    loaded: Mapping[str, Loaded],
    move: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    *,
    stored: Mapping[str, NDArray[np.uint8]] | None = None,
) -> object:
    """Return the nested state of a step, with leaves in memory of their own and ties restored.

    Args:
        skeleton: The tree.
        loaded: The leaves, by path.
        move: Called once with each tensor; returns the tensor to use.
        stored: Arrays that are kept of the read; leaves must not share their memory.
    """
    values: dict[tuple[str, str | None], object] = {}
    # Leaves that own their memory alone are used without a copy.
    free = unshared_paths(loaded, stored or {})

    def put(path: str, owner: str, tag: str | None) -> object:
        if (owner, tag) not in values:
            leaf = place(loaded[owner], tag, copy=owner not in free)
            free.discard(owner)  # a second tag needs a copy
            values[owner, tag] = move(leaf) if isinstance(leaf, torch.Tensor) else leaf
        return values[owner, tag]

    return tree.unflatten(skeleton, put, build)
