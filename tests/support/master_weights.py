"""A model in half precision, and what one process does by hand to step it in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from support.training import set_gradients, small_model
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer


class PlainMasters:
    """What one process does by hand: an optimizer over float32 copies, which are rounded to the parameters.

    Copies take values of parameters that are not the rounded copies any more.
    """

    def __init__(self, params: Iterable[torch.Tensor], optimizer_class: type[optim.Optimizer], **settings: Any) -> None:
        self.params = list(params)
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.inner = optimizer_class(self.masters, **settings)
        self.param_groups = [{"params": self.params}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.copy_(torch.where(master.to(param.dtype) == param, master, param))
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        state_dict = copy.deepcopy(self.inner.state_dict())
        stepped = [index for index, master in enumerate(self.masters) if master.grad is not None]
        for index in stepped:
            state_dict["state"].setdefault(index, {})["master_param"] = self.masters[index].detach()
        return state_dict


class HalfModel(nn.Sequential):
    """In half precision but for one layer."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(*small_model().to(dtype))
        self[1].float()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self:
            inputs = layer(inputs.to(layer.weight.dtype))
        return inputs


def sharded_over(model: nn.Module, group: dist.ProcessGroup | None = None, **settings: Any) -> ZeroRedundancyOptimizer:
    """AdamW with masters."""
    keywords = {"lr": 1e-2, "master_weights": True, **settings}
    return ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, group, **keywords)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int], *, none: int = -1) -> None:
    for step in steps:
        set_gradients(model.parameters(), step, none={none} if step < 2 else ())
        optimizer.step()


def trained(steps: int, **settings: Any) -> tuple[HalfModel, ZeroRedundancyOptimizer, HalfModel, PlainMasters]:
    """Return a model and its sharded optimizer, and the same with masters by hand, after some steps."""
    model, reference = HalfModel(), HalfModel()
    sharded, plain = sharded_over(model, **settings), PlainMasters(reference.parameters(), optim.AdamW, lr=1e-2)
    train(model, sharded, range(steps))
    train(reference, plain, range(steps))
    return model, sharded, reference, plain
