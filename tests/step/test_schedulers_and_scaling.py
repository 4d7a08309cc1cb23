"""Learning rate schedulers, clipping and gradient scalers around a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import PARTITIONS
from support.training import EVERYWHERE, assert_bitwise_equal, train_equally, twin_optimizers, twins
from torch import nn, optim
from torch.optim import lr_scheduler
from zeroshard import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@PARTITIONS
def test_gradients_are_clipped_before_a_step(partition: str) -> None:
    pair = twins()
    sharded, plain = twin_optimizers(pair, optim.AdamW, partition)
    train_equally(
        pair, (sharded, plain), range(3), lambda module: nn.utils.clip_grad_norm_(module.parameters(), max_norm=0.5)
    )


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=2),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_the_rates_of_all_ranks(name: str) -> None:
    pair = twins()
    optimizers = twin_optimizers(pair, optim.AdamW, lr=0.001)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    for step in range(5):
        train_equally(pair, optimizers, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_learning_rate_may_be_in_a_tensor() -> None:
    pair = twins()
    rates = (torch.tensor(0.01), torch.tensor(0.01))
    optimizers = (
        ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, lr=rates[0], foreach=False),
        optim.AdamW(pair[1].parameters(), lr=rates[1], foreach=False),
    )
    train_equally(pair, optimizers, range(2))
    for rate in rates:
        rate.fill_(0.1)
    train_equally(pair, optimizers, range(2, 4))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_gradient_scaler_skips_the_same_steps(partition: str) -> None:
    pair = twins()
    optimizers = twin_optimizers(pair, optim.AdamW, partition)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in optimizers]
    for step in range(4):
        for module, optimizer, scaler in zip(pair, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            inputs = torch.randn(5, 40, generator=torch.Generator().manual_seed(step))
            loss = module(inputs).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_bitwise_equal(*pair, f"after step {step}")
        assert scalers[0].get_scale() == scalers[1].get_scale()
