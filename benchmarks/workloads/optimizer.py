"""AdamW for bfloat16 weights, with master weights and moments in float32.

An update of post-training is mostly smaller than the spacing of bfloat16 and would be lost if it
were added to the weight itself. It is added to the float32 master; the weight is the rounded
master. The optimizer owns both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class MixedPrecisionAdamW(Optimizer):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019); deterministic.

    ``state[parameter]`` holds ``master``, ``exp_avg`` and ``exp_avg_sq`` from construction on, all
    float32 and of the parameter's shape. Each operation is one fused pass over all tensors.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        )
        # Created here and not in the first step, so that a checkpoint of step 0 is complete and a
        # restored state always has the structure of a fresh one.
        for group in self.param_groups:
            for parameter in group["params"]:
                master = parameter.detach().float().clone()
                self.state[parameter] = {
                    "master": master,
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters, and round them into the weights."""
        loss = closure() if closure else None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            group["step"] += 1
            beta1, beta2 = group["betas"]
            # The ``_foreach_`` functions run one kernel over all tensors. Updates of thousands of
            # small leaves would otherwise take longer than the training step.
            masters, means, squares = (
                [self.state[parameter][name] for parameter in parameters]
                for name in ("master", "exp_avg", "exp_avg_sq")
            )
            gradients = [parameter.grad.float() for parameter in parameters]
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            deviations = torch._foreach_sqrt(squares)
            torch._foreach_div_(deviations, (1 - beta2 ** group["step"]) ** 0.5)
            torch._foreach_add_(deviations, group["eps"])
            torch._foreach_mul_(masters, 1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] / (1 - beta1 ** group["step"])
            torch._foreach_addcdiv_(masters, means, deviations, -rate)
            torch._foreach_copy_(parameters, masters)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as the base class does, but keep float32.

        The base class casts each tensor to the dtype of its parameter, which would round the
        masters.
        """
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            self.state[parameter] = {
                name: value.detach().to(parameter.device, copy=True)
                for name, value in state_dict["state"][number].items()
            }
