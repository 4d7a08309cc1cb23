"""Models and optimizers that are dropped are freed at once: training does not wait for the garbage collector."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from support.combinations import FLAG, each_of
from support.ddp_by_collectives import STEPPING, without_tags
from support.ddp_training import HOOKS, MANY_BUCKETS, batch, register, steps_in_backward
from support.training import small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import StepMode, ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_integrations.join import Join

References = Mapping[str, "weakref.ref[Any]"]


def large_model() -> nn.Module:
    """Large enough for ranks of one host to read each other's memory."""
    return nn.Sequential(nn.Linear(40, 1500), nn.Linear(1500, 5))


def made(hook: str, model: nn.Module) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = DistributedDataParallel(model.double(), bucket_cap_mb=MANY_BUCKETS)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optim.Adam,
        overlap_with_ddp=steps_in_backward(hook),
        lr=0.1,
    )
    if hook != "none":
        register(hook, ddp, optimizer)
    return ddp, optimizer


def train(ddp: nn.Module, optimizer: optim.Optimizer) -> None:
    for number in range(3):
        optimizer.zero_grad()
        ddp(batch(number)).square().mean().backward()
        optimizer.step()


def references(ddp: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer) -> References:
    param = next(ddp.parameters())
    return {name: weakref.ref(item) for name, item in {"ddp": ddp, "optimizer": optimizer, "param": param}.items()}


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left(seen: References) -> list[str]:
    return [name for name, reference in seen.items() if reference() is not None]


@pytest.mark.ranks(2, backend="gloo")
@each_of("hook", ["none", *HOOKS], by=["messages", "collectives", "memory"])
def test_nothing_is_left_after_training(hook: str, by: str) -> None:
    def use() -> References:
        with without_tags() if by == "collectives" else contextlib.nullcontext():
            ddp, optimizer = made(hook, large_model() if by == "memory" else small_model())
            if hook != "none":
                optimizer.follow_backward(STEPPING[hook])
        train(ddp, optimizer)
        return references(ddp, optimizer)

    use()
    with without_collector():
        assert left(use()) == []


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("fails", FLAG, ids=["ends", "raises"])
def test_nothing_is_left_after_a_join_context(fails: bool) -> None:
    def use() -> References:
        ddp, optimizer = made("none", small_model())
        with contextlib.suppress(ZeroDivisionError), Join([ddp, optimizer]):
            train(ddp, optimizer)
            if fails:
                raise ZeroDivisionError
        return references(ddp, optimizer)

    use()
    with without_collector():
        assert left(use()) == []


@pytest.mark.ranks(2)
def test_used_buckets_are_given_back_when_ddp_may_replace_them() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    register_reduce_to_owner(ddp, optimizer)
    exchange, held = optimizer.follow_backward(StepMode.IN_STEP), list[list[bool]]()
    ddp.register_forward_pre_hook(
        lambda *_: held.append([state.buffer is not None for state in exchange.buckets.by_index.values()])
    )
    for _ in range(4):
        ddp(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # DDP makes new buckets in its second forward alone.
    assert held == [[], [False], [True], [True]]
