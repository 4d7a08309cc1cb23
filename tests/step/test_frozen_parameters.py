"""Parameters that are frozen or unfrozen while a model trains."""

from __future__ import annotations

from typing import Any

import pytest
from support.combinations import FLAG, VIEWS, each_of
from support.training import EVERYWHERE, assert_bitwise_equal, set_gradients, train_equally, twin_optimizers, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@each_of("optimizer_class", [optim.Adam, optim.Adagrad, optim.SGD], partition=["whole", "split"], as_bucket_view=FLAG)
def test_parameters_may_be_unfrozen_and_frozen_midway(
    partition: str, as_bucket_view: bool, optimizer_class: type[optim.Optimizer]
) -> None:
    pair = twins()
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if optimizer_class is optim.SGD else {"lr": 0.1}

    def set_trainable(trainable: bool, positions: range) -> None:
        for module in pair:
            params = list(module.parameters())
            for position in positions:
                params[position].requires_grad_(trainable)

    set_trainable(False, range(7))
    sharded, plain = twin_optimizers(pair, optimizer_class, partition, as_bucket_view, **settings)
    train_equally(pair, (sharded, plain), range(2))
    set_trainable(True, range(3, 7))
    train_equally(pair, (sharded, plain), range(2, 4))
    set_trainable(True, range(3))
    set_trainable(False, range(5, 8))
    train_equally(pair, (sharded, plain), range(4, 6))
    set_trainable(True, range(9))
    train_equally(pair, (sharded, plain), range(6, 8))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_frozen_tensors_are_placed_evenly_and_keep_their_owners() -> None:
    model = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(8)])
    for layer in model[:6]:
        layer.requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    before = sharded.plan
    assert before.imbalance == 1.0
    for number in (1, 6):
        model[:number].requires_grad_(True)
        set_gradients(model.parameters(), 0)
        sharded.step()
        assert sharded.plan.owners == before.owners
        assert sharded.plan.imbalance == sharded.describe().imbalance == (4 / 3 if number == 1 else 1.0)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_a_frozen_tensor_with_a_stale_gradient_is_stepped_on_all_replicas(as_bucket_view: bool) -> None:
    pair = twins()
    sharded, plain = twin_optimizers(pair, optim.Adam, as_bucket_view=as_bucket_view)
    train_equally(pair, (sharded, plain), range(1))
    for module in pair:
        list(module.parameters())[4].requires_grad_(False)
    for step in range(2):
        for optimizer in (sharded, plain):
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step} with stale gradients")
        assert_replicas_equal(pair[0].parameters())
