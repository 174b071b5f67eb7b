"""A small decoder-only transformer over bytes, in PyTorch.

It has RMSNorm, rotary positions, causal attention, SwiGLU and a tied embedding. Weights are
bfloat16, as in post-training. The arithmetic is float32: processors without bfloat16 units are
several times faster with it, and a checkpoint sees the weights only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.recipe import Recipe
from benchmarks.workloads.text import VOCABULARY


class Linear(nn.Module):
    """A matrix without bias, stored in bfloat16 and applied in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(outputs, inputs) * std).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-6)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, recipe: Recipe, out_std: float) -> None:
        super().__init__()
        self.heads = recipe.heads
        self.qkv = Linear(recipe.width, 3 * recipe.width)
        self.out = Linear(recipe.width, recipe.width, out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, key = _rotate(qkv[:2], cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.out(joined)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A SwiGLU layer (Shazeer, 2020)."""

    def __init__(self, recipe: Recipe, out_std: float) -> None:
        super().__init__()
        self.up = Linear(recipe.width, 2 * recipe.hidden)
        self.down = Linear(recipe.hidden, recipe.width, out_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention and feed-forward layer, each with its normalization and residual connection."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        # Keeps the variance of the residual stream independent of the depth (GPT-2's scaling).
        out_std = 0.02 / (2 * recipe.layers) ** 0.5
        self.attn_norm, self.attn = RMSNorm(recipe.width), Attention(recipe, out_std)
        self.mlp_norm, self.mlp = RMSNorm(recipe.width), FeedForward(recipe, out_std)
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), cos, sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """A map of tokens (batch, length) to logits (batch, length, VOCABULARY)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, recipe.width, dtype=torch.bfloat16)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(TransformerBlock(recipe) for _ in range(recipe.layers))
        self.norm = RMSNorm(recipe.width)
        self.head = Linear(recipe.width, VOCABULARY)
        # Tied: two names of one tensor, so that checkpoints contain a tie.
        self.head.weight = self.embed.weight  # type: ignore[assignment]
        head_width = recipe.width // recipe.heads
        rates = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(recipe.context), rates)
        # Not persistent: they follow from the sizes, and a checkpoint need not contain them.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]  # type: ignore[index]
        x = self.embed(tokens).float()
        for block in self.layers:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, graded: Tensor) -> Tensor:
        """Return the mean cross-entropy of the graded tokens, each predicted from its prefix."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits[graded[:, 1:]], tokens[:, 1:][graded[:, 1:]])


@torch.no_grad()
def scale_by_inputs(model: LanguageModel) -> None:
    """Draw every matrix anew at the scale of its inputs.

    The weights of trained narrow models have that size. The usual 0.02 is that of wide models.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and name != "embed.weight":
            drawn = torch.randn(weight.shape, device=weight.device)
            weight.copy_(drawn * weight.shape[1] ** -0.5)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al., 2021) to (..., length, head width)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
