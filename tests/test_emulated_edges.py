"""Training that needs each ordering edge of the hooks: what `nox -s dropped-edges` runs with one of them left out.

At two ranks most edges are masked by others, by a collective's own for example. Each of these trainings takes such a
mask away: one rank, gradients that are carried from one backward to the next, work of autograd after the last bucket, a
communication hook that reduces into a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import HOOKS, MANY_BUCKETS, register
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from training import cutting, small_model
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import RankGroup, collectives
from zeroshard_integrations.ddp import register_reduce_to_owner

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks(1, 2, backend=["emulated", "nccl"])]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_one_backward_a_step(hook: str, partition: str, device: torch.device) -> None:
    _train(hook, partition, device, backwards=1)


@pytest.mark.parametrize("partition", ["whole", "split"])
def test_gradients_carried_to_the_next_backward(partition: str, device: torch.device) -> None:
    _train("owner", partition, device, backwards=3)


@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_accumulated_without_communication(hook: str, device: torch.device) -> None:
    _train(hook, "whole", device, backwards=2, no_sync=True)


@pytest.mark.parametrize("hook", HOOKS[1:])
@pytest.mark.parametrize("no_sync", [False, True])
def test_a_hook_that_reduces_into_a_tensor_of_its_own(hook: str, no_sync: bool, device: torch.device) -> None:
    _train(hook, "whole", device, backwards=1 + no_sync, no_sync=no_sync, inner=reduced_anew)


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
def test_optimizers_that_share_buffers_on_streams_of_their_own(device: torch.device) -> None:
    current, sides = torch.accelerator.current_stream(), [torch.Stream(device) for _ in range(2)]
    # There are two buffers: every second optimizer has the same one.
    small, _, other, _, large = [_stepping(device, width) for width in (64, 64, 64, 64, 256)]
    torch.accelerator.synchronize()
    # Parameters are gathered through the same buffer by streams that nothing else orders.
    small.step()
    for side, optimizer in zip(sides, (other, large), strict=True):
        with side:
            optimizer.step()
    # The buffers that were too small for the last one are free.
    kept = [torch.zeros(64 * 64, dtype=torch.float64, device=device) for _ in range(4)]
    for side in sides:
        current.wait_stream(side)
    del kept


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
def test_a_backward_beside_the_step_of_another_optimizer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # In chunks, so that the other optimizer uses both buffers.
    monkeypatch.setattr(collectives, "STAGING_BYTES", 20_000)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    stepping = _stepping(device, 64)
    ddp = DistributedDataParallel(small_model().double().to(device), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, lr=1e-2, partition=cutting("split"))
    register("owner", ddp, optimizer)
    inputs = torch.ones(8, 40, dtype=torch.float64, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        # Both pass through the same two buffers.
        with side:
            stepping.step()
        ddp(inputs).square().mean().backward()
        current.wait_stream(side)
        optimizer.step()


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
@pytest.mark.parametrize("staging", [3_000, 20_000])
@pytest.mark.parametrize("coalesces", [True, False])
def test_optimizers_of_one_model(
    device: torch.device, staging: int, coalesces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In so many chunks that the buffers change between the side streams of both.
    monkeypatch.setattr(collectives, "STAGING_BYTES", staging)
    if not coalesces:
        # As a backend that divides by itself, on a group of its own.
        monkeypatch.setattr(RankGroup, "coalesces", lambda *_: False)
    ddp = DistributedDataParallel(
        small_model().double().to(device), bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=True
    )
    params = list(ddp.parameters())
    halves = [params[0::3], params[1::3] + params[2::3]]
    optimizers = [ZeroRedundancyOptimizer(half, optim.SGD, lr=0.1, partition=cutting("split")) for half in halves]
    register_reduce_to_owner(ddp, optimizers)
    inputs = torch.ones(8, 40, dtype=torch.float64, device=device)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def _stepping(device: torch.device, width: int) -> ZeroRedundancyOptimizer:
    """An optimizer of a few cut tensors with gradients."""
    params = [nn.Parameter(torch.ones(width, width, dtype=torch.float64, device=device)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, partition=cutting("split"))
    for param in params:
        param.grad = torch.ones_like(param)
    return optimizer


def reduced_anew(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(gradients, async_op=True).get_future().then(lambda done: done.value()[0])


def _train(
    hook: str,
    partition: str,
    device: torch.device,
    *,
    backwards: int,
    no_sync: bool = False,
    inner: Callable[..., Any] = allreduce_hook,
) -> None:
    # What has no parameters comes last in backward: autograd allocates memory after the last bucket.
    model = nn.Sequential(nn.GELU(), small_model()).double().to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optim.AdamW, lr=1e-2, overlap_with_ddp=hook != "owner", partition=cutting(partition)
    )
    register(hook, ddp, optimizer, inner)
    for iteration in range(4):
        optimizer.zero_grad()
        for number in range(backwards):
            ddp.require_backward_grad_sync = number == backwards - 1 or not no_sync
            generator = torch.Generator().manual_seed(10 * iteration + number)
            inputs = torch.randn(8, 40, generator=generator, dtype=torch.float64).to(device).requires_grad_()
            ddp(inputs).square().mean().backward()
        optimizer.step()
