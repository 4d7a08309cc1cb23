"""Builds a GPT whose forward returns its loss, in sizes by name, and its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """The shapes of a GPT."""

    layers: int
    width: int
    heads: int
    vocabulary: int


SIZES = {"1.3B": Size(24, 2048, 16, 50304), "124M": Size(12, 768, 12, 50304), "tiny": Size(2, 64, 4, 256)}
_PLACES = 1024


class Block(nn.Module):
    """Attention and a perceptron, each added to its input after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return values of the same shape, ``(rows, places, width)``."""
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        added: torch.Tensor = x + self.narrow(functional.gelu(self.widen(self.perceptron_norm(x))))
        return added


class Gpt(nn.Module):
    """GPT-2's shapes; the embedding of tokens is the output head too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(_PLACES, size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``(rows, places)`` token ids, each predicted from itself and those before it."""
        x = self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        logits = self.norm(x) @ self.tokens.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def size_of(name: str) -> Size:
    """Return a size by its name; without CUDA always the smallest."""
    return SIZES[name if CUDA else "tiny"]


def build(name: str) -> Gpt:
    """Return a model on the device, with the same weights on every rank."""
    torch.manual_seed(0)
    with DEVICE:
        return Gpt(size_of(name))


def batch(rows: int, places: int, number: int = 0) -> torch.Tensor:
    """Return this rank's token ids of one batch, on the device."""
    made = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randint(0, SIZES["tiny"].vocabulary, (rows, places), generator=made).to(DEVICE)
