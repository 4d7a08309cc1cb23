"""A class gets one loss a step, before it changes anything: it has asked for another, and every rank says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_training import register
from support.training import assert_bitwise_equal, cutting, small_model, twins
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split", "level"])
VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])
MASTERS = pytest.mark.parametrize("master_weights", [False, True], ids=["", "masters"])
HOOK = pytest.mark.parametrize("has_hook", [False, True], ids=["no hook", "hook"])


class Extragradient(optim.SGD):
    """Steps by the gradients at the point to which a first step leads."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        params = [param for group in self.param_groups for param in group["params"]]
        loss, before = closure(), [param.clone() for param in params]
        super().step()
        closure()
        for param, old in zip(params, before, strict=True):
            param.copy_(old)
        super().step()
        return loss


class SharpnessAware(optim.SGD):
    """Climbs by the gradients that are there, and asks for those at the top once, as a well-known SAM does."""

    by_hand: Callable[[torch.Tensor], Any] = staticmethod(lambda param: param.add_(param.grad, alpha=0.05))
    keeps_gradients = False

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for param in params:
            self.by_hand(param)
        if not self.keeps_gradients:
            self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for param, old in zip(params, before, strict=True):
            param.data = old
        super().step()
        return loss


class ThroughData(SharpnessAware):
    by_hand = staticmethod(lambda param: param.data.add_(param.grad, alpha=0.05))


class KeepingGradients(SharpnessAware):
    keeps_gradients = True


class EverySecond(optim.SGD):
    """Asks for a second loss on the ranks that own the first tensor alone."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        if any(param.shape[-1:] == (40,) for group in self.param_groups for param in group["params"]):
            closure()
        return loss


def closure_of(module: nn.Module, optimizer: optim.Optimizer, calls: list[int] | None = None) -> Callable[[], Any]:
    def closure() -> torch.Tensor:
        if calls is not None:
            calls.append(1)
        optimizer.zero_grad()
        dtype = next(module.parameters()).dtype
        loss: torch.Tensor = module(torch.full((2, 40), 0.3, dtype=dtype)).square().mean()
        loss.backward()
        return loss

    return closure


TWICE, CHANGED = "called its closure again in one step", "called its closure after it had changed"


@pytest.mark.by_default(
    "2-Extragradient-called its closure again in one step--params-whole-no hook | "
    "2-EverySecond-called its closure again in one step--params-level-no hook | "
    "2-SharpnessAware-called its closure after it had changed-masters-views-split-hook | "
    "2-ThroughData-called its closure after it had changed-masters-views-whole-hook | "
    "2-KeepingGradients-called its closure after it had changed--params-split-no hook"
)
@pytest.mark.ranks(2, backend=["gloo", "emulated"])
@HOOK
@PARTITIONS
@VIEWS
@MASTERS
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Extragradient, TWICE),
        (EverySecond, TWICE),
        (SharpnessAware, CHANGED),
        (ThroughData, CHANGED),
        (KeepingGradients, CHANGED),
    ],
)
def test_a_second_loss_is_refused_on_every_rank(
    kind: Any, told: str, has_hook: bool, partition: str, as_bucket_view: bool, master_weights: bool
) -> None:
    model: nn.Module = small_model().to(torch.bfloat16 if master_weights else torch.float64)
    ddp = DistributedDataParallel(model) if has_hook else model
    sharded = ZeroRedundancyOptimizer(
        model.parameters(),
        kind,
        lr=0.1,
        partition=cutting(partition),
        elementwise=True,
        parameters_as_bucket_view=as_bucket_view,
        master_weights=master_weights,
        coupled="allow",
    )
    if isinstance(ddp, DistributedDataParallel):
        register("reduce_to_owner_hook", ddp, sharded)
    calls: list[int] = []
    closure = closure_of(ddp, sharded, calls)
    with pytest.raises(RuntimeError, match=rf"{kind.__name__} {told}.*cannot be sharded"):
        sharded.step(closure)
    assert len(calls) == 1
    assert_replicas_equal(model.parameters())


class Usual(optim.SGD):
    """Asks for its loss once, at the start."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.ranks(2, backend="gloo")
def test_each_of_several_classes_asks_once() -> None:
    model, reference = twins()
    layers = list(model.parameters())
    groups = [{"params": layers[:3]}, {"params": layers[3:], "optimizer_class": Usual, "lr": 0.1}]
    sharded = ZeroRedundancyOptimizer(groups, optim.SGD, lr=0.1)
    plain = optim.SGD(reference.parameters(), lr=0.1)
    for module, optimizer in ((model, sharded), (reference, plain)):
        for _ in range(2):
            optimizer.step(closure_of(module, optimizer))
    assert_bitwise_equal(model, reference, "after two steps")
