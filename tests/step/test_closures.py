"""A class gets one loss a step, before it changes anything: it has asked for another, and every rank says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import FLAG, LAYOUTS, each_of
from support.ddp_training import register
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    cutting,
    set_gradients,
    small_model,
    train_equally,
    twin_optimizers,
    twins,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


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
REFUSED: dict[type[optim.Optimizer], str] = {
    Extragradient: TWICE,
    EverySecond: TWICE,
    SharpnessAware: CHANGED,
    ThroughData: CHANGED,
    KeepingGradients: CHANGED,
}


@pytest.mark.ranks(2, backend=["gloo", "emulated"])
@each_of(
    "kind",
    REFUSED,
    partition=["whole", "split", "level"],
    as_bucket_view=FLAG,
    master_weights=FLAG,
    has_hook=FLAG,
)
def test_a_second_loss_is_refused_on_every_rank(
    kind: Any, has_hook: bool, partition: str, as_bucket_view: bool, master_weights: bool
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
    with pytest.raises(RuntimeError, match=rf"{kind.__name__} {REFUSED[kind]}.*cannot be sharded"):
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


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_a_closure_is_evaluated_as_by_the_unsharded_optimizer(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    optimizers = twin_optimizers(pair, optim.Adam, partition, as_bucket_view)
    inputs = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        losses = []
        for module, optimizer in zip(pair, optimizers, strict=True):

            def closure(module: nn.Module = module, optimizer: optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = module(inputs).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)
        assert_bitwise_equal(*pair, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_a_closure_may_rebind_data_and_drop_gradients_of_frozen_tensors(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    optimizers = twin_optimizers(pair, optim.Adam, partition, as_bucket_view)
    train_equally(pair, optimizers, range(2))
    for step in range(2, 5):
        for module, optimizer in zip(pair, optimizers, strict=True):
            # Frozen now, but with the gradient of the last step, which the closure drops.
            module[0].weight.requires_grad_(step != 3)

            def closure(module: nn.Module = module, step: int = step) -> None:
                for param in module.parameters():
                    param.data = param.data * 0.5
                set_gradients(module.parameters(), step)

            optimizer.step(closure)
        assert_bitwise_equal(*pair, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("how", ["unfrozen", "converted"], on_rank_1_alone=FLAG, partition=["whole", "split"], as_bucket_view=FLAG)
def test_closures_of_all_ranks_may_change_what_they_agree_upon(
    rank: int, partition: str, as_bucket_view: bool, on_rank_1_alone: bool, how: str
) -> None:
    model, reference = twins()
    for module in (model, reference):
        module[0].weight.requires_grad_(False)
    sharded, plain = twin_optimizers((model, reference), optim.Adam, partition, as_bucket_view)

    def change(module: nn.Module) -> None:
        if how == "unfrozen":
            module[0].weight.requires_grad_(True)
        else:
            module[2].double()

    def closure() -> None:
        if rank == 1 or not on_rank_1_alone:
            change(model)
        set_gradients(model.parameters(), 0)

    if as_bucket_view and how == "converted":
        with pytest.raises(RuntimeError, match="is a view of a flat buffer"):
            sharded.step(closure)
        return
    if on_rank_1_alone:
        differs = {"unfrozen": "trainable False here, True", "converted": "dtype torch.float32 here, torch.float64"}
        words = f"{differs[how]} there .here: rank 0, there: rank 1"
        with pytest.raises(DisagreementError, match=words):
            sharded.step(closure)
        return
    # It is evaluated once, before the ranks agree.
    sharded.step(closure)
    change(reference)
    set_gradients(reference.parameters(), 0)
    plain.step()
    assert_bitwise_equal(model, reference, "after the step")
    for step in range(3):
        sharded.step(closure)
        set_gradients(reference.parameters(), 0)
        plain.step()
        assert_bitwise_equal(model, reference, f"after step {step}")
