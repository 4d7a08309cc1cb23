"""The hooks on an accelerator: they train as DDP does, and neither backward nor step makes the host wait for it.

On CUDA where there is some, and on the emulated device, whose results are those of the CPU to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import (
    EVERY_HOOK,
    HOOKS_AND_PARTITIONS,
    PARTITIONS,
    STEPPING_HOOKS,
    VIEWS,
    Twins,
    batch,
    train,
    with_hook,
)
from support.training import small_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from zeroshard_comm import collectives
from zeroshard_core import Cost, TensorSpec
from zeroshard_testing import assert_replicas_equal

ACCELERATORS = ["nccl", "emulated"]


def twins_on(device: torch.device, hook: str, *, exact: bool = True, **arguments: Any) -> Twins:
    # CUDA's kernels may add in an order that depends on where a tensor begins.
    exact = exact and device.type != "cuda"
    return Twins(hook, model=lambda: small_model().to(device), exact=exact, **arguments)


def loss(ddp: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return ddp(inputs.to(next(ddp.parameters()).device)).square().mean()


@pytest.mark.ranks(2, backend="gloo-cuda")
@HOOKS_AND_PARTITIONS
def test_parity_on_gloo(device: torch.device, hook: str, partition: str) -> None:
    train(twins_on(device, hook, partition=partition), loss)


@pytest.mark.ranks(1, 2, backend=ACCELERATORS)
@EVERY_HOOK
@PARTITIONS
@VIEWS
def test_parity(device: torch.device, hook: str, partition: str, views: bool) -> None:
    train(twins_on(device, hook, partition=partition, ddp={"gradient_as_bucket_view": views}), loss)


@pytest.mark.ranks(3, 4, backend=ACCELERATORS)
@EVERY_HOOK
@PARTITIONS
def test_more_ranks_and_a_group_of_some(device: torch.device, rank: int, hook: str, partition: str) -> None:
    train(twins_on(device, hook, partition=partition), loss)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])] if dist.get_world_size() == 4 else []
    if pairs:
        train(twins_on(device, hook, partition=partition, process_group=pairs[rank % 2]), loss, last=4)


def odd_model() -> nn.Module:
    """Tensors of which most begin at no multiple of anything in their buckets, and a cut one that fills several."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 129, bias=False), nn.Linear(129, 7), nn.Linear(7, 1))


@pytest.mark.ranks(1, 2, 3, backend=ACCELERATORS)
@EVERY_HOOK
def test_chunks_and_odd_offsets(device: torch.device, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "STAGING_BYTES", 5_000)
    twins = Twins(hook, model=lambda: odd_model().to(device), partition="split", exact=device.type != "cuda")
    train(twins, loss, last=4)


@pytest.mark.ranks(2, backend=["gloo-cuda", *ACCELERATORS])
@STEPPING_HOOKS
def test_a_compressing_hook(device: torch.device, hook: str) -> None:
    train(twins_on(device, hook, inner=fp16_compress_hook), loss, last=5)


@pytest.mark.ranks(1, 2, backend=ACCELERATORS)
@EVERY_HOOK
def test_accumulation_and_clipping(device: torch.device, hook: str) -> None:
    twins = twins_on(device, hook, exact=False)
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            with ddp.no_sync():
                twins.backward(ddp, 10 * number, loss)
            twins.backward(ddp, 10 * number + 1, loss)
            if hook == "reduce_to_owner_hook" and ddp is twins.ddp:
                twins.optimizer.clip_grad_norm_(1e9)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, 3, backend=ACCELERATORS)
@EVERY_HOOK
@pytest.mark.parametrize("master_weights", [False, True], ids=["alone", "masters"])
def test_replicas_stay_equal_in_bfloat16(device: torch.device, hook: str, master_weights: bool) -> None:
    # Parity cannot be asserted: DDP's all-reduce adds in another order.
    model = small_model().to(device, torch.bfloat16)
    before = [param.detach().clone() for param in model.parameters()]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = with_hook(hook, ddp, torch.optim.AdamW, partition="split", master_weights=master_weights, lr=1e-2)
    for number in range(4):
        optimizer.zero_grad()
        ddp(batch(number).to(device, torch.bfloat16)).square().mean().backward()
        optimizer.step()
        assert_replicas_equal(ddp.parameters())
    assert all(not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


class Many(nn.Module):
    """As many small parameters as asked for, all of which are used."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.full((2,), 1.0 + place) for place in range(number)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.params)).sum() * inputs.sum()


def first_rank(tensors: Sequence[TensorSpec], _: Sequence[float], __: Cost) -> list[tuple[int, ...]]:
    return [(0,)] * len(tensors)


@pytest.mark.ranks(2, backend="emulated")
def test_clipping_and_unscaling_cost_the_same_for_any_number_of_tensors(
    device: torch.device, rank: int, device_costs: Callable[[], AbstractContextManager[Any]]
) -> None:
    kernels: dict[str, list[int]] = {"clip": [], "unscale": []}
    for number in (10, 1_000):
        ddp = DistributedDataParallel(Many(number).to(device), gradient_as_bucket_view=True)
        optimizer = with_hook("reduce_to_owner_hook", ddp, partition=first_rank)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        for _ in range(2):
            # The second time, what is made once is there.
            optimizer.zero_grad()
            scaler.scale(ddp(torch.ones(3, device=device))).backward()
            with device_costs() as unscaling:
                scaler.unscale_(optimizer)
            with device_costs() as clipping:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        kernels["clip"].append(clipping.kernels)
        kernels["unscale"].append(unscaling.kernels)
    if rank == 1:
        assert kernels["clip"][0] == kernels["clip"][1], kernels
        assert kernels["unscale"][0] == kernels["unscale"][1], kernels


def fixed(twins: Twins) -> Twins:
    """Train until DDP has rebuilt its buckets: where gradients lie is looked at once per bucket."""
    for number in range(3):
        twins.iterate(number, loss)
    twins.optimizer.zero_grad()
    return twins


@pytest.mark.ranks(1, 2, backend=ACCELERATORS)
@EVERY_HOOK
@PARTITIONS
@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_the_host_never_waits_for_the_device(
    device: torch.device,
    host_never_waits: Callable[[], AbstractContextManager[None]],
    hook: str,
    partition: str,
    settings: dict[str, Any],
) -> None:
    twins = fixed(twins_on(device, hook, partition=partition, settings=settings))
    inputs = batch(3).to(device)
    with host_never_waits():
        twins.ddp(inputs).square().mean().backward()
        twins.optimizer.step()


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clipped by the norm": lambda params: nn.utils.clip_grad_norm_(params, 0.01),
    "clipped by value": lambda params: nn.utils.clip_grad_value_(params, 1e-3),
    "multiplied": lambda params: torch._foreach_mul_([param.grad for param in params], 2.0),
    "asked for norms": lambda params: nn.utils.get_total_norm([param.grad for param in params]),
    "asked for the largest": lambda params: [param.grad.norm() for param in params],
    "set to zero, and asked": lambda params: [param.grad.zero_().norm() for param in params],
}


@pytest.mark.ranks(1, 2, backend=ACCELERATORS)
@PARTITIONS
@pytest.mark.parametrize("change", CHANGES)
def test_the_host_never_waits_for_what_is_done_to_gradients(
    device: torch.device, host_never_waits: Callable[[], AbstractContextManager[None]], partition: str, change: str
) -> None:
    twins = fixed(twins_on(device, "reduce_to_owner_hook", partition=partition))
    inputs, params = batch(3).to(device), list(twins.ddp.parameters())
    with host_never_waits():
        twins.ddp(inputs).square().mean().backward()
        CHANGES[change](params)
        twins.optimizer.step()


@pytest.mark.ranks(1, 2, backend=ACCELERATORS)
@PARTITIONS
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 3.0])
def test_the_host_never_waits_for_clipping_by_the_optimizer(
    device: torch.device,
    host_never_waits: Callable[[], AbstractContextManager[None]],
    partition: str,
    norm_type: float,
) -> None:
    twins = fixed(twins_on(device, "reduce_to_owner_hook", partition=partition))
    inputs = batch(3).to(device)
    with host_never_waits():
        twins.ddp(inputs).square().mean().backward()
        norm = twins.optimizer.clip_grad_norm_(0.01, norm_type)
        after = nn.utils.get_total_norm([param.grad for param in twins.ddp.parameters()])
        twins.optimizer.step()
    assert norm.device == device
    if norm_type == 2.0:
        torch.testing.assert_close(after, torch.full_like(after, 0.01), rtol=1e-4, atol=0)


@pytest.mark.ranks(2, backend=ACCELERATORS)
@PARTITIONS
def test_norms_follow_factors_and_what_becomes_infinite(device: torch.device, partition: str) -> None:
    twins = fixed(twins_on(device, "reduce_to_owner_hook", partition=partition))
    twins.plain.zero_grad()
    for ddp, _ in twins.sides:
        twins.backward(ddp, 3, loss)
    ours, theirs = (list(ddp.parameters()) for ddp, _ in twins.sides)
    # By the host and by the device.
    for factor in (3.0, torch.tensor(0.5, device=device), 1e100):
        for params in (ours, theirs):
            torch._foreach_mul_([param.grad for param in params], factor)
        norms = [torch.stack([param.grad.norm() for param in params]) for params in (ours, theirs)]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
    # Infinite in the end, and no less for a factor below 1. The squares that torch adds up are infinite before.
    for factor in (torch.tensor(1e200, device=device), 1e200, 1e-300):
        torch._foreach_mul_([param.grad for param in ours], factor)
    assert torch.stack([param.grad.norm() for param in ours]).isinf().all()


# The emulated device has no graphs.
@pytest.mark.ranks(1, 2, backend="nccl")
def test_step_in_a_cuda_graph(device: torch.device) -> None:
    twins = twins_on(device, "reduce_to_owner_hook", partition="whole", settings={"capturable": True})
    for number in range(3):
        twins.iterate(number, loss)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad()
        twins.backward(ddp, 3, loss)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twins.optimizer.step()
    for _ in range(3):
        # The same gradients again, as torch's optimizer with the gradients that are there.
        graph.replay()
        twins.plain.step()
    torch.accelerator.synchronize()
    twins.check("after three replays")
