"""A tensor that wraps others, in the shape of the optimizer states of torchao."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.states import random_tensor


class Blocks(torch.Tensor):
    """Codes and scales of blocks, as torchao's optimizers keep their moments."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, shape: torch.Size, block: int
    ) -> Blocks:
        wrapper: Blocks = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=torch.float32, device=codes.device
        )
        return wrapper

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, shape: torch.Size, block: int
    ) -> None:
        self.codes, self.scale, self.block = codes, scale, block

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.block, self.shape, torch.uint8]

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: list[Any], size: Any, stride: Any
    ) -> Blocks:
        return cls(parts["codes"], parts["scale"], context[1], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Blocks(args[0].codes, args[0].scale, args[0].shape, args[0].block)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func}")


def blocks(seed: int) -> Blocks:
    return Blocks(
        random_tensor(torch.uint8, (64,), seed),
        random_tensor(torch.float32, (4,), seed),
        torch.Size([8, 8]),
        16,
    )


def sharded_blocks(seed: int) -> torch.Tensor:
    """Return a DTensor whose local part wraps tensors, as torchao's optimizers make under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(blocks(seed), init_device_mesh("cpu", (1,)), [Shard(0)])
