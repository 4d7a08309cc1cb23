"""Models, and an optimizer, that are hard for a communication hook of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim


class Failing(torch.autograd.Function):
    """Raises in backward on rank 1 alone."""

    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in backward, on this rank alone")
        return grad


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.second(Failing.apply(hidden) if self.fails else hidden)


class Detached(nn.Module):
    """Its first weight is read once more, behind autograd's back, by a node that runs last in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 40)
        self.last = nn.Linear(40, 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        early = self.first(inputs) @ self.last.weight.detach()
        return self.last(early)


class Branches(nn.Module):
    """Uses one of its branches only; with the last one nobody ever trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(40, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, inputs: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.branches[chosen](self.stem(inputs))


class TwoKinds(nn.Module):
    """Parameters of two dtypes, which DDP puts into buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 5)

    def double(self) -> nn.Module:
        self.first.double()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).float())


class Counting(optim.Optimizer):
    """Keeps its step count in the param groups, and lets it decide how far a step goes, as schedule-free ones do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] / group["k"]
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * group["weight_sum"] / group["k"])
