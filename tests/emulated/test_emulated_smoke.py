"""The emulated accelerator, once over: each kind of error is found, and DDP and our hooks train on it as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import MANY_BUCKETS, PARTITIONS, batch, with_hook
from support.training import assert_bitwise_equal, cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_testing import DifferentCollectivesError, RaceError, assert_replicas_equal

Training = tuple[nn.Module, optim.Optimizer]

ON_1 = pytest.mark.ranks(1, backend="emulated")
ON_2 = pytest.mark.ranks(2, backend="emulated")
RACE = pytest.mark.xfail(raises=RaceError, strict=True, reason="it has a race")
DIFFERENCE = pytest.mark.xfail(raises=DifferentCollectivesError, strict=True, reason="ranks differ")


@ON_1
@RACE
def test_a_side_stream_that_is_not_joined(device: torch.device) -> None:
    side, x = torch.Stream(device), torch.ones(1000, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    assert x.sum() == 2000


@pytest.mark.exhaustive
@ON_1
@RACE
def test_memory_that_is_freed_in_use(device: torch.device) -> None:
    side, x = torch.Stream(device), torch.ones(1000, device=device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    del x
    torch.ones(1000, device=device)


@ON_2
@RACE
def test_a_buffer_that_is_read_before_the_wait(device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    work = dist.all_reduce(x, async_op=True)
    total = x.sum()
    work.wait()
    assert total == 2000


@pytest.mark.exhaustive
@ON_2
@DIFFERENCE
def test_sizes_that_differ(rank: int, device: torch.device) -> None:
    dist.all_reduce(torch.ones(4 + rank, device=device))


@ON_2
@DIFFERENCE
def test_a_collective_that_one_rank_leaves_out(rank: int, device: torch.device) -> None:
    dist.all_reduce(torch.ones(4, device=device))
    if rank == 0:
        dist.all_reduce(torch.ones(4, device=device), async_op=True)


@ON_1
def test_a_wait_of_the_host(
    device: torch.device, device_costs: Callable[[], Any], host_never_waits: Callable[[], Any]
) -> None:
    x = torch.ones(1000, device=device)
    with device_costs() as costs:
        total = x.sum()
        total.item()
    assert [wait.title for wait in costs.host_waits] == ["aten::_local_scalar_dense"]
    with pytest.raises(RuntimeError, match="the host waits for the device here"), host_never_waits():
        total.item()


@ON_2
def test_ddp_trains_as_on_the_cpu(device: torch.device) -> None:
    here, there = (ddp_alone(where) for where in (device, torch.device("cpu")))
    assert_trains_alike(here, there)


@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize(
    ("hook", "partition"),
    [
        ("reduce_to_owner_hook", "whole"),
        ("reduce_to_owner_hook", "split"),
        ("hook_with_zero_step_interleaved", "whole"),
    ],
)
def test_our_hooks_train_as_on_the_cpu_and_the_host_never_waits(
    hook: str, partition: str, device: torch.device, host_never_waits: Callable[[], Any]
) -> None:
    here, there = (ours(hook, partition, where) for where in (device, torch.device("cpu")))
    # DDP makes its buckets anew after the first iteration, and the host waits there.
    assert_trains_alike(here, there)
    assert_steps_without_a_wait(here, there, device, host_never_waits)


@pytest.mark.ranks(2, backend="emulated")
@PARTITIONS
def test_sharded_gradients_train_as_on_the_cpu_and_the_host_never_waits(
    partition: str, device: torch.device, host_never_waits: Callable[[], Any]
) -> None:
    here, there = (sharded(partition, where) for where in (device, torch.device("cpu")))
    assert_trains_alike(here, there)
    assert_steps_without_a_wait(here, there, device, host_never_waits)


def ddp_alone(device: torch.device) -> Training:
    model = wrapped(device)
    return model, optim.AdamW(model.parameters(), lr=1e-2)


def ours(hook: str, partition: str, device: torch.device) -> Training:
    ddp = wrapped(device)
    return ddp, with_hook(hook, ddp, optim.AdamW, partition=partition, lr=1e-2)


def sharded(partition: str, device: torch.device) -> Training:
    model: nn.Module = small_model().double().to(device)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, lr=1e-2, partition=cutting(partition))
    shard_gradients(model, optimizer, bucket_mb=MANY_BUCKETS)
    return model, optimizer


def wrapped(device: torch.device) -> DistributedDataParallel:
    model: nn.Module = small_model().double().to(device)
    return DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=True)


def iterate(training: Training, number: int) -> None:
    model, optimizer = training
    optimizer.zero_grad()
    model(batch(number).to(next(model.parameters()).device)).square().mean().backward()
    optimizer.step()


def assert_trains_alike(here: Training, there: Training) -> None:
    for number in range(3):
        iterate(here, number)
        iterate(there, number)
        assert_same(here, there, f"after iteration {number}")


def assert_steps_without_a_wait(
    here: Training, there: Training, device: torch.device, host_never_waits: Callable[[], Any]
) -> None:
    model, optimizer = here
    optimizer.zero_grad()
    loss = model(batch(3).to(device)).square().mean()
    with host_never_waits():
        loss.backward()
        optimizer.step()
    iterate(there, 3)
    assert_same(here, there, "after a step without a wait")


def assert_same(here: Training, there: Training, when: str) -> None:
    on_cpu = small_model().double()
    on_cpu.load_state_dict(module_of(here).state_dict())
    assert_bitwise_equal(on_cpu, module_of(there), when)
    assert_replicas_equal(here[0].parameters())


def module_of(training: Training) -> nn.Module:
    model = training[0]
    return model.module if isinstance(model, DistributedDataParallel) else model
