"""A small GPT whose output layer is its input embedding, for tests of models that are trained by several classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer. Each normalizes what it gets, and adds to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.attend, self.attend_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed, self.feed_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``(sequences, context, width)`` to the same shape."""
        parts = self.attend(self.norm(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attend_out(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_out(F.gelu(self.feed(self.norm(hidden))))


class TiedGPT(nn.Module):
    """Predicts bytes. Its weights are the same in every process, and its output layer is its input embedding."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        for name, weight in self.named_parameters():
            nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if "_out" in name else 0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting ``targets``, both of shape ``(sequences, context)``."""
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.bytes.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
