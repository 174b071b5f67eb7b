"""A small decoder-only transformer over bytes: RMSNorm, rotary positions, causal attention, SwiGLU,
tied embedding.

Weights are bfloat16, as in post-training. The arithmetic is float32: processors without bfloat16
units are several times faster so, and a checkpoint sees the weights only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltacheck.evaluate.workloads.plan import Plan
from deltacheck.evaluate.workloads.text import VOCABULARY


class Linear(nn.Module):
    """A matrix without bias, stored in bfloat16, applied in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(outputs, inputs) * std).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)


class Attention(nn.Module):
    def __init__(self, plan: Plan, out_std: float) -> None:
        super().__init__()
        self.heads = plan.heads
        self.qkv = Linear(plan.width, 3 * plan.width)
        self.out = Linear(plan.width, plan.width, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = (
            self.qkv(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        query, key = _rotate(qkv[:2], cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, plan: Plan, out_std: float) -> None:
        super().__init__()
        hidden = 64 * ((plan.width * 8 // 3 + 63) // 64)
        self.up = Linear(plan.width, 2 * hidden)
        self.down = Linear(hidden, plan.width, out_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        out_std = (
            0.02 / (2 * plan.layers) ** 0.5
        )  # keeps the residual stream's variance independent of the depth
        self.attn_norm, self.attn = RMSNorm(plan.width), Attention(plan, out_std)
        self.mlp_norm, self.mlp = RMSNorm(plan.width), FeedForward(plan, out_std)
        self.dropout = nn.Dropout(plan.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), cos, sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Tokens (batch, length) to logits (batch, length, VOCABULARY)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, plan.width, dtype=torch.bfloat16)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Block(plan) for _ in range(plan.layers))
        self.norm = RMSNorm(plan.width)
        self.head = Linear(plan.width, VOCABULARY)
        self.head.weight = self.embed.weight  # type: ignore[assignment]  # tied: two names, one tensor
        head_width = plan.width // plan.heads
        angles = torch.outer(
            torch.arange(plan.context), 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]  # type: ignore[index]
        x = self.embed(tokens).float()
        for block in self.layers:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, graded: Tensor) -> Tensor:
        """Mean cross-entropy of the graded tokens, each predicted from those before it."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits[graded[:, 1:]], tokens[:, 1:][graded[:, 1:]])


@torch.no_grad()
def spread(model: LanguageModel) -> None:
    """Give every matrix the scale of its inputs: trained narrow models have weights of that size,
    not of a wide model's 0.02.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name != "embed.weight":
            weight.copy_(torch.randn(weight.shape) * weight.shape[1] ** -0.5)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of (..., length, head width)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
