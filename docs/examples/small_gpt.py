"""What the scripts under frameworks train: a small GPT that predicts bytes of one of Python's own sources."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

CONTEXT, WIDTH = 32, 64


class SmallGPT(nn.Module):
    """Two blocks of causal attention; the same weights in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting ``targets``, both of shape ``(sequences, CONTEXT)``."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, inputs.device, self.head.weight.dtype)
        hidden = self.bytes(inputs) + self.positions.weight
        logits: torch.Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text, each with the bytes that follow.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count, self._text = count, torch.tensor(list(Path(os.__file__).read_bytes()))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # A large odd stride: neighbours in a batch come from all over the text.
        start = index * 7919 % (len(self._text) - CONTEXT - 1)
        window = self._text[start : start + CONTEXT + 1]
        return {"inputs": window[:-1], "targets": window[1:]}
