"""Stepping pieces of an optimizer by themselves gives what one step of all of them gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn, optim
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.partial_step import PartialStepper
from zeroshard.plan.eligibility import may_step_in_parts
from zeroshard.plan.group_classes import GroupClass
from zeroshard.plan.layout import Policy
from zeroshard_core import TensorSpec, numel, partition


def local_optimizer(params: list[nn.Parameter], kind: Any = optim.AdamW) -> LocalOptimizer:
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}]
    specs = [
        TensorSpec(str(index), tuple(param.shape), param.dtype, group=int(index >= 2))
        for index, param in enumerate(params)
    ]
    policy = Policy("whole", numel, as_bucket_view=False, world_size=1, classes=[GroupClass(kind, {})] * 2)
    local = LocalOptimizer(policy, groups, partition(specs, 1), 0)
    local.publish_groups()
    local.detach_shards()
    return local


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4)) for _ in range(4)]


def test_portions_step_as_the_whole_does() -> None:
    params = parameters()
    reference = [nn.Parameter(param.detach().clone()) for param in params]
    local = local_optimizer(params)
    plain = optim.AdamW([{"params": reference[:2], "lr": 0.1}, {"params": reference[2:], "lr": 0.2}])
    portions = [PartialStepper(local, [local.shards[i] for i in chosen]) for chosen in ((3, 0), (1, 2))]
    for number in range(4):
        for index, piece in local.shards.items():
            grad = torch.full_like(params[index], number + index + 1.0)
            piece.tensor.grad = grad if index != 1 or number > 1 else None
            reference[index].grad = None if piece.tensor.grad is None else grad.clone()
        for portion in portions:
            portion.step({})
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(params, reference, strict=True))
    assert len(local.groups[0]["params"]) == 2
    assert [local.own_state(piece)["step"].item() for piece in local.shards.values()] == [4, 2, 4, 4]


def test_hyperparameters_are_those_of_the_moment() -> None:
    params = parameters()
    local = local_optimizer(params, optim.SGD)
    portion = PartialStepper(local, list(local.shards.values()))
    for piece in local.shards.values():
        piece.tensor.grad = torch.ones(3, 4)
    before = copy.deepcopy([param.detach() for param in params])
    for group in local.groups:
        group["lr"] = 2.0
    portion.step({})
    assert all(torch.equal(a, b - 2.0) for a, b in zip(params, before, strict=True))


def test_only_optimizers_that_keep_everything_per_tensor_are_stepped_in_pieces() -> None:
    params = [torch.zeros(2, requires_grad=True)]

    class Own(optim.SGD):
        pass

    class Declared(optim.SGD):
        steps_in_pieces = True

    assert may_step_in_parts(optim.AdamW(params))
    assert may_step_in_parts(Declared(params))
    assert not may_step_in_parts(Own(params))
    hooked = optim.SGD(params)
    hooked.register_step_post_hook(lambda *_: None)
    assert not may_step_in_parts(hooked)
    replaced = optim.SGD(params)
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not may_step_in_parts(replaced)
