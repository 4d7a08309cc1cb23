"""Training that needs each ordering edge of the hooks: what `tools/dropped_edges.py` runs with one of them left out.

At two ranks most edges are masked by others, by a collective's own for example. Each of these trainings takes such a
mask away: one rank, gradients that are added to those of an earlier backward, work of autograd after the last bucket, a
communication hook that reduces into a tensor of its own, two models, a backward that raises.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import (
    EVERY_HOOK,
    MANY_BUCKETS,
    PARTITIONS,
    STEPPING_HOOKS,
    with_hook,
)
from support.training import cutting, small_model
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_comm import RankGroup, collectives

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks(1, 2, backend=["emulated", "nccl"])]


@EVERY_HOOK
@PARTITIONS
def test_one_backward_a_step(hook: str, partition: str, device: torch.device) -> None:
    _train(hook, partition, device, backwards=1)


@EVERY_HOOK
def test_gradients_accumulated_without_communication(hook: str, device: torch.device) -> None:
    _train(hook, "whole", device, backwards=2, no_sync=True)


@STEPPING_HOOKS
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("knows_device", [True, False])
def test_a_hook_that_reduces_into_a_tensor_of_its_own(
    hook: str, no_sync: bool, knows_device: bool, device: torch.device
) -> None:
    inner = reduced_anew if knows_device else reduced_at_once
    _train(hook, "whole", device, backwards=1 + no_sync, no_sync=no_sync, inner=inner)


@EVERY_HOOK
@PARTITIONS
@pytest.mark.parametrize("on_its_own", [False, True])
def test_memory_that_is_freed_after_an_error_in_backward(
    hook: str, partition: str, on_its_own: bool, device: torch.device
) -> None:
    training = torch.Stream(device) if on_its_own else torch.accelerator.current_stream()
    with training:
        model = small_model().double().to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=True)
        optimizer = with_hook(hook, ddp, optim.AdamW, partition=partition, lr=1e-2)
        inputs = torch.ones(8, 40, dtype=torch.float64, device=device)
        # The first backward has one bucket.
        for _ in range(2):
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        model[1].register_forward_hook(_failing_in_backward)
        with pytest.raises(ArithmeticError):
            ddp(inputs).square().mean().backward()
    # Nothing has joined the side stream, on which buckets are still reduced.
    del model, ddp, optimizer
    gc.collect()
    with training:
        kept = [torch.zeros(size, dtype=torch.float64, device=device) for size in (64, 1_000, 20_000)]
    torch.accelerator.synchronize()
    del kept


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
    # The buffer that was too small for the last one is free when those are gone that have used it.
    params = [group["params"] for each in (small, other) for group in each.param_groups]
    del small, other, optimizer
    gc.collect()
    kept = [torch.zeros(64 * 64, dtype=torch.float64, device=device) for _ in range(4)]
    for side in sides:
        current.wait_stream(side)
    del kept, params


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
def test_a_backward_beside_the_step_of_another_optimizer(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # In chunks, so that the other optimizer uses both buffers.
    monkeypatch.setattr(collectives, "STAGING_BYTES", 20_000)
    current, side = torch.accelerator.current_stream(), torch.Stream(device)
    stepping = _stepping(device, 64)
    ddp = DistributedDataParallel(small_model().double().to(device), gradient_as_bucket_view=True)
    optimizer = with_hook("reduce_to_owner_hook", ddp, optim.AdamW, partition="split", lr=1e-2)
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


class Around(nn.Module):
    """Calls another model between its layers. The tensors of its last bucket are whole, and pass through no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 2), nn.Linear(300, 40)

    def forward(self, inputs: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        made: torch.Tensor = self.second(inner(self.first(inputs)))
        return made


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
@pytest.mark.parametrize("staging", [3_000, 20_000])
@pytest.mark.parametrize("coalesces", [True, False])
def test_two_models_whose_buckets_come_in_turns(
    device: torch.device, staging: int, coalesces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In so many chunks that the buffers change between the side streams of both optimizers.
    monkeypatch.setattr(collectives, "STAGING_BYTES", staging)
    if not coalesces:
        # As a backend that divides by itself, on a group of its own.
        monkeypatch.setattr(RankGroup, "coalesces", lambda *_: False)
    outer, inner = (
        DistributedDataParallel(model.double().to(device), bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=True)
        for model in (Around(), nn.Sequential(nn.Linear(2, 300), nn.Linear(300, 300)))
    )
    optimizers = [with_hook("reduce_to_owner_hook", ddp, partition="split") for ddp in (outer, inner)]
    inputs = torch.ones(8, 40, dtype=torch.float64, device=device)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        outer(inputs, inner).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
def test_a_buffer_that_grows_for_the_next_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # One chunk of the second model, two of the first, the second one through the buffer of the second model.
    monkeypatch.setattr(collectives, "STAGING_BYTES", 200_000)
    large, small = (
        DistributedDataParallel(nn.Linear(width, width, bias=False).double().to(device), gradient_as_bucket_view=True)
        for width in (200, 80)
    )
    optimizers = [with_hook("reduce_to_owner_hook", ddp, partition="split") for ddp in (large, small)]
    inputs = torch.ones(8, 200, dtype=torch.float64, device=device)
    (large(inputs)[:, :80] - small(inputs[:, :80])).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
def test_a_buffer_that_grows_after_an_error_in_backward(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # In two chunks, of which each model has one through either buffer.
    monkeypatch.setattr(collectives, "STAGING_BYTES", 200_000)
    for _ in range(2):
        _stepping(device, 80).step()

    def backward(width: int, *, fails: bool) -> None:
        # Autograd allocates as much as the buffer of the smaller model had, after the bucket.
        model = nn.Sequential(nn.GELU(), nn.Linear(width, width, bias=False)).double().to(device)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        _kept = with_hook("reduce_to_owner_hook", ddp, partition="split")
        inputs = torch.ones(64, width, dtype=torch.float64, device=device, requires_grad=True)
        if fails:
            model[0].register_forward_hook(_failing_in_backward)
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            ddp(inputs).square().mean().backward()

    backward(80, fails=True)
    gc.collect()
    backward(200, fails=False)


@pytest.mark.ranks(2, backend=["emulated", "nccl"])
def test_two_models_in_one_backward(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "STAGING_BYTES", 20_000)
    # Parameters are read at the end of a step that backward has made.
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    towers = [DistributedDataParallel(small_model().double().to(device)) for _ in range(2)]
    settings: dict[str, Any] = {"partition": "split", "lr": 1e-2, "inner": reduced_anew}
    optimizers = [with_hook("hook_with_zero_step_interleaved", tower, optim.AdamW, **settings) for tower in towers]
    inputs = torch.ones(8, 40, dtype=torch.float64, device=device)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The parameters of the second tower arrive on the side stream of the first, which needs their buffers.
        (towers[0](inputs) - towers[1](inputs) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


class Repeated(nn.Module):
    """Layers of which a bucket holds two, and some that autograd computes again in two nested backwards.

    The buckets of these are sent after the first of the two, and once more for the second: three, so that the third one
    uses the memory of the first. The last layers are used by every third forward only. What has no parameters comes
    last in backward, and allocates memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.GELU()
        self.repeated, self.used, self.unused = (
            nn.Sequential(*[nn.Linear(40, 40) for _ in range(layers)]) for layers in (6, 8, 8)
        )

    def forward(self, inputs: torch.Tensor, *, uses_all: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.repeated, hidden, use_reentrant=True)
        made: torch.Tensor = self.used(hidden)
        return self.unused(made) if uses_all else made


TWO_LAYERS = 0.03
"""The MiB of a bucket for two layers of `Repeated` in float64."""


@PARTITIONS
@pytest.mark.parametrize("zeroes", [False, True])
def test_sharded_gradients(partition: str, zeroes: bool, device: torch.device) -> None:
    model = Repeated().double().to(device)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, lr=1e-2, partition=cutting(partition))
    sharding = shard_gradients(model, optimizer, bucket_mb=TWO_LAYERS)
    for iteration in range(4):
        optimizer.zero_grad(set_to_none=not zeroes)
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * iteration + number)
            inputs = torch.randn(8, 40, generator=generator, dtype=torch.float64).to(device).requires_grad_()
            with sharding.no_sync() if number == 1 else nullcontext():
                model(inputs, uses_all=number == 2).square().mean().backward()
        optimizer.step()


@PARTITIONS
@pytest.mark.parametrize("bucket_mb", [TWO_LAYERS, 1e-5], ids=["packed", "alone"])
@pytest.mark.parametrize("on_its_own", [False, True])
def test_sharded_gradients_that_are_freed_after_an_error_in_backward(
    partition: str, bucket_mb: float, on_its_own: bool, device: torch.device
) -> None:
    training = torch.Stream(device) if on_its_own else torch.accelerator.current_stream()
    with training:
        model = Repeated().double().to(device)
        optimizer = ZeroRedundancyOptimizer(
            model.named_parameters(), optim.AdamW, lr=1e-2, partition=cutting(partition)
        )
        sharding = shard_gradients(model, optimizer, bucket_mb=bucket_mb)
        inputs = torch.ones(8, 40, dtype=torch.float64, device=device, requires_grad=True)
        model(inputs, uses_all=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.used[2].register_forward_hook(_failing_in_backward)
        with pytest.raises(ArithmeticError):
            model(inputs, uses_all=True).square().mean().backward()
    # Nothing has joined the side stream, on which buckets are still reduced.
    del model, optimizer, sharding
    gc.collect()
    with training:
        kept = [torch.zeros(size, dtype=torch.float64, device=device) for size in (64, 1_000, 20_000)]
    torch.accelerator.synchronize()
    del kept


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


def reduced_at_once(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer() / dist.get_world_size()
    dist.all_reduce(gradients)
    # As torch's documentation has it: without devices, so that waiting for it orders no stream.
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def _failing_in_backward(_: object, __: object, output: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    output.register_hook(fail)


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
    optimizer = with_hook(hook, ddp, optim.AdamW, partition=partition, lr=1e-2, inner=inner)
    for iteration in range(4):
        optimizer.zero_grad()
        for number in range(backwards):
            ddp.require_backward_grad_sync = number == backwards - 1 or not no_sync
            generator = torch.Generator().manual_seed(10 * iteration + number)
            inputs = torch.randn(8, 40, generator=generator, dtype=torch.float64).to(device).requires_grad_()
            ddp(inputs).square().mean().backward()
        optimizer.step()
