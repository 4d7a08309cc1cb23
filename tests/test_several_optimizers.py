"""Several optimizers over one model in DistributedDataParallel with one hook, each over its own parameters."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from ddp_training import MANY_BUCKETS, assert_close, batch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from training import EVERYWHERE, assert_bitwise_equal, cutting, small_model
from zeroshard import GradPlaceholder, ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import reduce_to_owner_hook, register_reduce_to_owner
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

pytestmark = [
    pytest.mark.ranks(2, backend=EVERYWHERE),
    pytest.mark.usefixtures("tensors_on_the_device"),
]
KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-2}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]


def halves(model: nn.Module) -> list[list[nn.Parameter]]:
    """Every second parameter, so that buckets have parameters of both halves; and the others."""
    params = list(model.parameters())
    return [params[::2], params[1::2]]


class Pairs:
    """A model with two sharded optimizers and one hook, and its twin with plain ones."""

    def __init__(self, partition: str = "whole", split: Any = halves, **ddp: Any) -> None:
        model = small_model().double()
        twin = copy.deepcopy(model)
        arguments = {"bucket_cap_mb": MANY_BUCKETS, **ddp}
        self.ddp, self.plain_ddp = (DistributedDataParallel(each, **arguments) for each in (model, twin))
        self.ours = [
            ZeroRedundancyOptimizer(half, kind, partition=cutting(partition), **settings)
            for half, (kind, settings) in zip(split(model), KINDS, strict=True)
        ]
        self.plain = [kind(half, **settings) for half, (kind, settings) in zip(split(twin), KINDS, strict=True)]
        register_reduce_to_owner(self.ddp, self.ours)

    @property
    def sides(self) -> list[tuple[DistributedDataParallel, list[Any]]]:
        return [(self.ddp, self.ours), (self.plain_ddp, self.plain)]

    def check(self, when: str) -> None:
        assert_bitwise_equal(self.ddp.module, self.plain_ddp.module, when)
        assert_replicas_equal(self.ddp.module.parameters())


@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "unclipped"])
def test_one_steps_every_second_backward(partition: str, views: bool, clips: bool) -> None:
    pairs = Pairs(partition, gradient_as_bucket_view=views)
    for number in range(6):
        norms = []
        for ddp, (often, rarely) in pairs.sides:
            often.zero_grad()
            rarely.zero_grad()
            ddp(batch(number)).square().mean().backward()
            if clips:
                norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.01))
            often.step()
            if number % 2:
                rarely.step()
        if clips:
            # Parts of cut tensors add their squares in another order.
            torch.testing.assert_close(*norms, rtol=0 if partition == "whole" else 1e-12, atol=0)
        if clips and partition == "split":
            assert_close(pairs.ddp.module, pairs.plain_ddp.module, 1e-12, f"after iteration {number}")
        else:
            pairs.check(f"after iteration {number}")


@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", "unclipped"])
def test_one_accumulates_two_backwards(partition: str, views: bool, clips: bool) -> None:
    pairs = Pairs(partition, gradient_as_bucket_view=views)
    for number in range(6):
        for ddp, (often, rarely) in pairs.sides:
            often.zero_grad()
            ddp(batch(number)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
            often.step()
            if number % 2:
                rarely.step()
                rarely.zero_grad()
    # What was reduced before is rounded on its own here, and together with the rest by DDP.
    assert_close(pairs.ddp.module, pairs.plain_ddp.module, 1e-12, "at the end")
    assert_replicas_equal(pairs.ddp.module.parameters())


def in_one_bucket_each(model: nn.Module) -> list[list[nn.Parameter]]:
    """The last parameter, which is in one bucket, and all others: most buckets have nothing of the first."""
    params = list(model.parameters())
    return [params[-1:], params[:-1]]


@pytest.mark.parametrize("static", [True, False], ids=["static_graph", "dynamic"])
def test_buckets_with_parameters_of_one_alone(static: bool) -> None:
    pairs = Pairs(split=in_one_bucket_each, static_graph=static)
    for number in range(5):
        for ddp, optimizers in pairs.sides:
            for optimizer in optimizers:
                optimizer.zero_grad()
            # DDP learns a static graph in its first backward, which must reduce.
            with ddp.no_sync() if not static else contextlib.nullcontext():
                ddp(batch(10 * number)).square().mean().backward()
            for optimizer in optimizers if static else ():
                optimizer.zero_grad()
            ddp(batch(10 * number + 1)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        pairs.check(f"after iteration {number}")
    assert all(type(param.grad) is GradPlaceholder for param in pairs.ddp.parameters())


def test_checkpoints_of_both() -> None:
    pairs = Pairs()
    for number in range(4):
        for ddp, optimizers in pairs.sides:
            for optimizer in optimizers:
                optimizer.zero_grad()
            ddp(batch(number)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        if number == 1:
            for ours, plain in zip(pairs.ours, pairs.plain, strict=True):
                ours.load_state_dict(plain.state_dict())
        pairs.check(f"after iteration {number}")


def test_parameters_of_none_and_of_two_are_refused(rank: int) -> None:
    model = small_model()
    ddp = DistributedDataParallel(model)
    params = list(model.parameters())
    first, second = (ZeroRedundancyOptimizer(part, optim.SGD, lr=0.1) for part in (params[:2], params[1:]))
    with pytest.raises(ValueError, match=r"two optimizers of one hook have the parameter '0.bias'"):
        register_reduce_to_owner(ddp, [first, second])
    with pytest.raises(ValueError, match=r"reduces '1.weight', which the optimizer does not have"):
        register_reduce_to_owner(ddp, first)
    third = ZeroRedundancyOptimizer(params[3:], optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="the optimizers given to register_reduce_to_owner must have all parameters"):
        register_reduce_to_owner(ddp, [first, third])


def test_what_is_no_sharded_optimizer_is_refused() -> None:
    model = small_model()
    ddp = DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"register_reduce_to_owner one or a sequence of them, and not a SGD"):
        register_reduce_to_owner(ddp, [optim.SGD(model.parameters(), lr=0.1)])
    ddp.register_comm_hook([], reduce_to_owner_hook)
    with pytest.raises(TypeError, match=r"register_reduce_to_owner one or a sequence of them, and not a list"):
        ddp(batch(0).float()).sum().backward()


def test_join_refuses_them() -> None:
    pairs = Pairs()
    with pytest.raises(ValueError, match="one hook for several optimizers"), Join([pairs.ddp, *pairs.ours]):
        pass
