"""Builds a GPT whose forward returns its loss, in sizes by name, and its batches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


SIZES = {"1.3B": (24, 2048, 16, 50304), "124M": (12, 768, 12, 50304), "tiny": (2, 64, 4, 256)}
"""Layers, width, heads and vocabulary."""
_PLACES = 1024


class Gpt(nn.Module):
    """A model with GPT-2's shapes; the token embedding is also the output head."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(_PLACES, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``(rows, places)`` token ids, each predicted from itself and those before it."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        # With is_causal, attention does not read the mask.
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits = self.norm(x) @ self.tokens.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def size_of(name: str) -> tuple[int, int, int, int]:
    """Return a size by its name; without CUDA, always the smallest."""
    return SIZES[name if CUDA else "tiny"]


def build(name: str) -> Gpt:
    """Return a model on the device, with the same weights on every rank."""
    torch.manual_seed(0)
    with DEVICE:
        return Gpt(*size_of(name))


def batch(rows: int, places: int, number: int = 0) -> torch.Tensor:
    """Return this rank's token ids of one batch, on the device."""
    made = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randint(0, SIZES["tiny"][-1], (rows, places), generator=made).to(DEVICE)
