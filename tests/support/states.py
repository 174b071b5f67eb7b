"""States for tests to save, and exact comparison of restored ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from deltacheck.leaf.spec import LeafKind

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random bits, which include NaN payloads, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (math.prod(shape) * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> bytes:
    """Return the bytes in C order."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(value).tobytes()


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Return the paths at which two trees differ in type, structure, dtype, shape or a bit."""
    if isinstance(a, torch.Tensor | np.ndarray | np.generic):
        if type(a) is not type(b) and not (
            isinstance(a, torch.nn.Parameter) and isinstance(b, torch.Tensor)
        ):
            yield f"{path}: {type(a).__name__} against {type(b).__name__}"
        elif (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
            yield f"{path}: {a.dtype}{tuple(a.shape)} against {b.dtype}{tuple(b.shape)}"
        elif bits(a) != bits(b):
            yield f"{path}: bits differ"
    elif isinstance(a, dict):
        if not isinstance(b, dict) or list(a) != list(b):
            yield f"{path}: keys {list(a)} against {list(b) if isinstance(b, dict) else type(b)}"
        else:
            for key in a:
                yield from differences(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        if type(a) is not type(b) or len(a) != len(b):
            yield f"{path}: {type(a).__name__} of {len(a)} against {type(b).__name__}"
        else:
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                yield from differences(x, y, f"{path}/{number}")
    elif type(a) is not type(b) or (a != b and not (a != a and b != b)):
        yield f"{path}: {a!r} against {b!r}"


def assert_same(a: Any, b: Any) -> None:
    found = list(differences(a, b))
    assert not found, found[:5]


def training_state(width: int = 64, seed: int = 0) -> dict[str, Any]:
    """Return a small state with the shapes of a real one.

    It has a leaf of several chunks, small leaves, optimizer state and scalars.
    """
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(700, 1000, generator=generator)
    return {
        "model": {
            "embed.weight": big.to(torch.bfloat16),
            "head.bias": torch.randn(width, generator=generator),
        },
        "optimizer": {
            "state": {
                0: {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.randn(700, 1000, generator=generator),
                    "master": big,
                }
            },
            "param_groups": [{"lr": 1e-5, "betas": (0.9, 0.999), "params": [0]}],
        },
        "rng": torch.get_rng_state(),
        "step": seed,
    }


def nudge(state: dict[str, Any], share: float = 0.02, seed: int = 1) -> None:
    """Change a share of the elements of large leaves slightly, in place, as training does."""
    generator = torch.Generator().manual_seed(seed)
    for leaf in (
        state["model"]["embed.weight"],
        state["optimizer"]["state"][0]["exp_avg"],
        state["optimizer"]["state"][0]["master"],
    ):
        mask = torch.rand(leaf.shape, generator=generator) < share
        leaf[mask] = leaf[mask] * 1.01
    state["step"] += 1


def kinds(handle: Any) -> dict[str, LeafKind]:
    """Wait for a save, and return the way in which it stored each leaf."""
    return {leaf.path: leaf.kind for leaf in handle.result(240).leaves}
