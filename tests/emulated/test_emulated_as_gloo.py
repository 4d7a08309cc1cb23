"""Training on the emulated device gives what it gives on the CPU by gloo: to the bit where sums have no order."""

from __future__ import annotations

import pytest
import torch
from support.ddp_training import EVERY_HOOK, MANY_BUCKETS, PARTITIONS, batch, with_hook
from support.training import small_model
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard_testing import assert_replicas_equal


def trained(device: torch.device, hook: str | None, partition: str = "whole") -> list[torch.Tensor]:
    """Train in float64 on a device, by a hook of ours or by DDP alone, and return the parameters on the CPU."""
    model = small_model().double().to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=True)
    if hook is None:
        optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = with_hook(hook, ddp, optim.AdamW, partition=partition, lr=1e-2)
    for number in range(5):
        optimizer.zero_grad()
        ddp(batch(number).to(device)).square().mean().backward()
        optimizer.step()
    assert_replicas_equal(model.parameters())
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.ranks(2, 3, 4, backend="emulated")
def test_ddp_alone_trains_as_on_the_cpu(device: torch.device) -> None:
    assert all(map(torch.equal, trained(device, None), trained(torch.device("cpu"), None)))


@pytest.mark.ranks(2, 3, 4, backend="emulated")
@EVERY_HOOK
@PARTITIONS
def test_every_hook_trains_as_on_the_cpu(device: torch.device, world_size: int, hook: str, partition: str) -> None:
    here, there = (trained(place, hook, partition) for place in (device, torch.device("cpu")))
    for ours, theirs in zip(here, there, strict=True):
        # Collectives add three terms in another order than messages do.
        is_close = world_size > 2 and (ours - theirs).norm() <= 1e-12 * theirs.norm()
        assert is_close or torch.equal(ours, theirs)
