"""The hooks on CUDA: they train as DDP does, and neither backward nor step makes the host wait for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_training import HOOKS, Twins, batch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from training import small_model

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])


def model() -> nn.Module:
    return small_model().cuda()


def loss(ddp: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return ddp(inputs.cuda()).square().mean()


def train(twins: Twins, last: int = 20) -> None:
    # Kernels may add in an order that depends on where a tensor begins.
    twins.exact = False
    for number in range(1, last + 1):
        twins.iterate(number, loss)
        if number in (1, 2, 3, last):
            twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo-cuda")
@EVERY_HOOK
@PARTITIONS
def test_parity_on_gloo(hook: str, partition: str) -> None:
    train(Twins(hook, model=model, partition=partition))


@pytest.mark.ranks(1, 2, backend="nccl")
@EVERY_HOOK
@PARTITIONS
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_parity_on_nccl(hook: str, partition: str, views: bool) -> None:
    train(Twins(hook, model=model, partition=partition, ddp={"gradient_as_bucket_view": views}))


@pytest.mark.ranks(2, backend=["gloo-cuda", "nccl"])
@STEPPING_HOOKS
def test_a_compressing_hook(hook: str) -> None:
    train(Twins(hook, model=model, inner=fp16_compress_hook), last=5)


@pytest.mark.ranks(1, 2, backend="nccl")
@EVERY_HOOK
def test_accumulation_and_clipping(hook: str) -> None:
    twins = Twins(hook, model=model, exact=False)
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            with ddp.no_sync():
                twins.backward(ddp, 10 * number, loss)
            twins.backward(ddp, 10 * number + 1, loss)
            if hook == "owner" and ddp is twins.ddp:
                twins.optimizer.clip_grad_norm_(1e9)
            optimizer.step()
        twins.check(f"after iteration {number}")


@contextlib.contextmanager
def host_never_waits() -> Iterator[None]:
    """Raise where an operation of torch makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.ranks(1, 2, backend="nccl")
@EVERY_HOOK
@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_the_host_never_waits_for_the_device(hook: str, settings: dict[str, Any]) -> None:
    twins = Twins(hook, model=model, settings=settings)
    # Until DDP has rebuilt its buckets: where gradients lie is looked at once per bucket.
    for number in range(3):
        twins.iterate(number, loss)
    inputs = batch(3).cuda()
    twins.optimizer.zero_grad()
    with host_never_waits():
        twins.ddp(inputs).square().mean().backward()
        twins.optimizer.step()


@pytest.mark.ranks(1, 2, backend="nccl")
@PARTITIONS
def test_step_in_a_cuda_graph(partition: str) -> None:
    twins = Twins("owner", model=model, partition=partition, settings={"capturable": True}, exact=False)
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
    torch.cuda.synchronize()
    twins.check("after three replays")
