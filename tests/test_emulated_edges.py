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
