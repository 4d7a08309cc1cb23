"""Models in which not all parameters have gradients, or gradients lie in memory in an unusual way."""

from __future__ import annotations

from typing import Any

import torch
from support.sharded_model import Add, Plain, Rank
from torch import nn
from torch.nn.functional import linear

# ---------------------------------------------------------------------- which parameters have gradients


class Unused(Plain):
    """Other branches on other ranks; one that no rank uses, one only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.branches[self.rank](x)
        return y + self.branches[4](x) if self.number % 2 and self.rank == 0 else y


class OnOneRank(Plain):
    """Most of the model is used by one rank, and not always by the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(y))) if self.rank == self.number % 2 else y


class OnlyLocal(Unused):
    """Some gradients come from backwards under no_sync() alone."""

    def backward(self, on: Rank) -> None:
        with on.no_sync():
            on.loss(0).backward()
        on.loss(1).backward(inputs=[self.a.weight])


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.hidden(x), self.c.weight.t(), self.c.bias)


class Repeated(Plain):
    """A layer that is called several times in one forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.b(self.hidden(x))))))


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight.requires_grad_(False)
        self.c.bias.requires_grad_(False)


class FrozenAndNotOptimized(Frozen):
    optimizes_all = False


class FreezesAndUnfreezes(Plain):
    """Layers are frozen and unfrozen between iterations."""

    def prepare(self, number: int, add: Add) -> None:
        self.b.requires_grad_(number not in (1, 2))
        self.a.requires_grad_(number != 2)


class FreezesBetween(Plain):
    """A layer is frozen between two backwards, and keeps the gradient of the first."""

    is_exact = False

    def backward(self, on: Rank) -> None:
        on.loss(0).backward()
        self.b.requires_grad_(False)
        on.loss(1).backward()
        self.b.requires_grad_(True)


class BeginsFrozen(Plain):
    """A layer that is frozen first. The first backward after it was unfrozen goes through a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def prepare(self, number: int, add: Add) -> None:
        self.b.requires_grad_(number >= 2)

    def backward(self, on: Rank) -> None:
        (self.hidden(on.batch()).square().mean() if on.number == 2 else on.loss()).backward()


class LoRA(Plain):
    """Adapters over a frozen model; the optimizer has the adapters alone."""

    optimizes_all = False

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        sizes = (64, 4), (4, 64), (12, 40), (40, 12)
        self.down, self.up, self.down2, self.up2 = (nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(y) + self.up(self.down(y)))) + self.up2(self.down2(x))


class AddsFrozen(Plain):
    """Parameters that the model had frozen are unfrozen, and added to the optimizer."""

    optimizes_all = False

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def prepare(self, number: int, add: Add) -> None:
        if number == 2:
            self.b.requires_grad_(True)
            add(list(self.b.named_parameters("b")))


class AddsNew(Plain):
    """A layer is added to the model, and to the optimizer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(x)
        return self.c(self.d(y) if "d" in self._modules else y)

    def prepare(self, number: int, add: Add) -> None:
        if number == 2:
            torch.manual_seed(5)
            self.d = nn.Linear(64, 64).double()
            add(list(self.d.named_parameters("d")))


class BatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(torch.tanh(self.a(x))))


class EvalBatchNorm(BatchNorm):
    """The outputs depend on buffers, of which all ranks have rank 0's."""

    def backward(self, on: Rank) -> None:
        on.output(3)
        self.eval()
        on.loss(0).backward()
        self.train()


# ---------------------------------------------------------------------- how gradients lie in memory


class Aliased(Plain):
    """Parameters, small ones and ones that are buckets of their own, whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.w, self.x = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.hidden(x) @ (self.w + self.x)) * (self.u.view(12) + self.v.view(12))

    def backward(self, on: Rank) -> None:
        # Plain PyTorch adds a second gradient to the memory of both parameters, twice.
        on.loss().backward()


class _Halves(torch.autograd.Function):
    """Returns gradients that are halves of one storage."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return u * 2 + v

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([grad * 2, grad])
        return both[0], both[1]


class HalvesOfOneStorage(Aliased):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.hidden(x) @ _Halves.apply(self.w, self.x)) * _Halves.apply(self.u, self.v)


class Expanded(Plain):
    """A gradient that is expanded, as of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(64, 64))

    def backward(self, on: Rank) -> None:
        (on.loss() + self.u.sum() * (1 + on.rank) + self.b.weight.t().sum()).backward()


class ManyVectors(Plain):
    """Neighbours in a bucket of one owner, which travel as one range, and parameters of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.ones(n, 64)) for n in (1, 6, 1, 1, 4, 3, 1, 8)])
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(x)
        for rows in self.rows:
            y = y * rows.mean(0)
        return self.c(y) * self.scale + self.empty.sum()


class TwoDtypes(Plain):
    bound = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(64, 64)

    def double(self) -> TwoDtypes:
        super().double().middle.float()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.middle(self.hidden(x).float()).double())


class ChannelsLast(Plain):
    """A convolution in channels_last, and parameters that are dense and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 64, 3), nn.Linear(64, 12)
        self.to(memory_format=torch.channels_last)
        self.a.weight = nn.Parameter(self.a.weight.detach().t().contiguous().t())
        self.cube = nn.Parameter(torch.randn(3, 4, 12).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.conv(x.view(-1, 3, 2, 2).repeat(1, 1, 2, 2)).mean((2, 3)))
        return y + super().forward(x) + (x @ self.cube.flatten(1) @ self.cube.flatten(1).t())
