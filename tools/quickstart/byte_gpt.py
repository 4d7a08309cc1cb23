"""The model: a small GPT that reads and predicts bytes.

Every parameter is a matrix (norms have no gains, linear layers no biases), so that optimizers for matrices alone, such
as Muon, can train it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import nn

BYTES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the model; the defaults make 10.7 million parameters.

    Attributes:
        context: longest sequence, in bytes.
        width: elements per position.
        layers: number of blocks.
        heads: attention heads per block; divides ``width``.
    """

    context: int = 48
    width: int = 384
    layers: int = 6
    heads: int = 6


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attend = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attend_out = nn.Linear(shape.width, shape.width, bias=False)
        self.feed = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.feed_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``(sequences, context, width)`` to the same shape."""
        sequences, context, width = hidden.shape
        mixed = self.attend(_norm(hidden)).view(sequences, context, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attend_out(attended.transpose(1, 2).reshape(sequences, context, width))
        added: torch.Tensor = hidden + self.feed_out(F.gelu(self.feed(_norm(hidden))))
        return added


class ByteGPT(nn.Module):
    """A GPT over bytes whose output layer is its input embedding.

    Args:
        shape: the size.
        seed: of the initial weights; the same seed gives the same weights in every process.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        for name, weight in self.named_parameters():
            # What is added to the residual stream shrinks with depth, as in GPT-2.
            depth = math.sqrt(2 * shape.layers) if name.endswith("_out.weight") else 1.0
            nn.init.normal_(weight, std=0.02 / depth)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte, 0-dim.

        Args:
            inputs: bytes as int64, ``(sequences, context)``.
            targets: the byte after each of them, same shape.
        """
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(_norm(hidden), self.bytes.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:])
