"""Several optimizers over one model in DistributedDataParallel, each over its own parameters: without a hook."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.ddp_training import batch
from support.training import EVERYWHERE, assert_bitwise_equal, cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal

pytestmark = [
    pytest.mark.ranks(2, backend=EVERYWHERE),
    pytest.mark.usefixtures("tensors_on_the_device"),
]


@pytest.mark.parametrize("partition", ["whole", "split"])
def test_one_of_two_optimizers_may_step_every_second_backward(partition: str) -> None:
    model = small_model().double()
    twin = copy.deepcopy(model)
    ddp, plain_ddp = DistributedDataParallel(model), DistributedDataParallel(twin)
    halves, twins = ([list(each.parameters())[start::2] for start in range(2)] for each in (model, twin))
    sharded = [
        ZeroRedundancyOptimizer(halves[0], optim.AdamW, partition=cutting(partition), lr=1e-2),
        ZeroRedundancyOptimizer(halves[1], optim.SGD, partition=cutting(partition), lr=0.1, momentum=0.9),
    ]
    plain = [optim.AdamW(twins[0], lr=1e-2), optim.SGD(twins[1], lr=0.1, momentum=0.9)]
    for number in range(6):
        for trained, (often, rarely) in ((ddp, sharded), (plain_ddp, plain)):
            often.zero_grad()
            trained(batch(number)).square().mean().backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 0.01)
            often.step()
            if number % 2:
                rarely.step()
                rarely.zero_grad()
        assert_bitwise_equal(model, twin, f"after iteration {number}")
        assert_replicas_equal(model.parameters())


def test_a_hook_for_several_is_refused() -> None:
    model = small_model()
    optimizers: Any = [ZeroRedundancyOptimizer([param], optim.SGD, lr=0.1) for param in model.parameters()]
    match = "in a list: use one optimizer with a class per param group, or leave the hook out, or wrap one model per"
    with pytest.raises(TypeError, match=match):
        register_reduce_to_owner(DistributedDataParallel(model), optimizers)


def test_what_is_no_sharded_optimizer_is_refused() -> None:
    model = small_model()
    plain: Any = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"expects a zeroshard\.ZeroRedundancyOptimizer, but got a SGD"):
        register_reduce_to_owner(DistributedDataParallel(model), plain)
