"""Gradients of another dtype than their parameters are refused on every rank when gradients are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer, shard_gradients

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have their parameters' dtype"
)


class WideGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        [inputs] = ctx.saved_tensors
        return grad.float().t() @ inputs.float(), None


def half() -> tuple[nn.Linear, ZeroRedundancyOptimizer]:
    model = nn.Linear(64, 64, bias=False).bfloat16()
    return model, ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)


@pytest.mark.ranks(2, backend="gloo")
def test_another_dtype_of_gradients_is_refused_at_once(rank: int) -> None:
    model, optimizer = half()
    model.weight.grad_dtype = torch.float32
    with pytest.raises(ValueError, match=r"'weight' is torch.bfloat16, but its `grad_dtype` is not"):
        shard_gradients(model, optimizer)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("bucket_mb", [25, 1e-3], ids=["packed", "alone"])
def test_another_dtype_that_backward_has_computed_is_refused(rank: int, bucket_mb: float) -> None:
    model, optimizer = half()
    # Any dtype is allowed, which nobody knows before.
    model.weight.grad_dtype = None
    shard_gradients(model, optimizer, bucket_mb=bucket_mb)
    loss = WideGradients.apply(model.weight, torch.ones(1, 64, dtype=torch.bfloat16)).float().sum()
    with pytest.raises(ValueError, match=r"'weight' has a gradient of torch.float32, which cannot be sharded"):
        loss.backward()
