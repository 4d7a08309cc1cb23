"""Models that are trained by Muon and AdamW together: by one sharded optimizer, and by a plain one for each class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from support.tied_gpt import TiedGPT
from support.training import set_gradients
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer


def language_model() -> nn.Sequential:
    """An embedding, three matrices, norms and biases, in about the proportions of a language model."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(40, 24), *layers, nn.Linear(24, 40))


def small_gpt() -> nn.Module:
    """A model whose output head is its embedding."""
    return TiedGPT(context=8, width=32, layers=2, heads=2)


def parted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices, embedding and output head, and the rest."""
    params = dict(model.named_parameters())
    if "bytes.weight" in params:
        return list(model.blocks.parameters()), [params["bytes.weight"]], [params["positions.weight"]]
    outer = [params["0.weight"], params["4.weight"]]
    hidden = [param for param in params.values() if param.dim() == 2 and all(param is not each for each in outer)]
    return hidden, outer, [param for param in params.values() if param.dim() < 2]


def groups_of(model: nn.Module, matrices: type[optim.Optimizer] = optim.Muon) -> list[dict[str, Any]]:
    hidden, outer, rest = parted(model)
    return [
        {"params": hidden, "optimizer_class": matrices, "lr": 0.02, "name": "matrices"},
        {"params": outer, "lr": 0.6},
        {"params": rest, "lr": 0.04},
    ]


def separate(model: nn.Module, matrices: type[optim.Optimizer] = optim.Muon) -> list[optim.Optimizer]:
    hidden, outer, rest = parted(model)
    groups = [{"params": outer, "lr": 0.6}, {"params": rest, "lr": 0.04}]
    return [
        matrices([{"params": hidden, "lr": 0.02, "name": "matrices"}]),
        optim.AdamW(groups, betas=(0.8, 0.95)),
    ]


def sharded(model: nn.Module, matrices: type[optim.Optimizer] = optim.Muon, **settings: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups_of(model, matrices), optim.AdamW, betas=(0.8, 0.95), **settings)


def step_all(model: nn.Module, optimizers: Iterable[optim.Optimizer], seed: int) -> None:
    set_gradients(model.parameters(), seed)
    for optimizer in optimizers:
        optimizer.step()
