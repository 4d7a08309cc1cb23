"""Gradients that reduce_to_owner_hook has sent to their owners, beside those of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.ddp_training import Twins
from torch import nn
from zeroshard import GradPlaceholder
from zeroshard_integrations.ddp import reduce_to_owner_hook


class BareTwins(Twins):
    """The hook is registered at DDP alone, which does not tell when it rebuilds its buckets."""

    def register(self, hook: str, inner: Callable[..., Any], inner_state: object) -> None:
        self.ddp.register_comm_hook(self.optimizer, reduce_to_owner_hook)


def reduced(**arguments: Any) -> tuple[Twins, list[nn.Parameter], list[nn.Parameter]]:
    """Return twins after a backward of each, in the second iteration, and the parameters of both."""
    twins = Twins("reduce_to_owner_hook", **arguments)
    twins.iterate(0)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad()
        twins.backward(ddp, 1)
    ours, theirs = (list(ddp.parameters()) for ddp, _ in twins.sides)
    assert all(type(param.grad) is GradPlaceholder for param in ours)
    return twins, ours, theirs


def step_and_check(twins: Twins) -> None:
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after the step")


def clip_by_norm(params: list[nn.Parameter], order: float = 2.0, foreach: bool | None = None) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(params, 0.01, order, foreach=foreach)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, partition: str = "whole") -> None:
    """Compare norms bitwise for tensors with one owner; the squares of parts are added in another order, in float64."""
    assert type(actual) is torch.Tensor
    assert (actual.dtype, actual.device, actual.shape) == (expected.dtype, expected.device, expected.shape)
    rounding = 1e-12 if partition == "split" else 0.0
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=0, equal_nan=True)
