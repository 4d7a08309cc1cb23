"""Models with which autograd is used in unusual ways train with the hooks as with DDP, and stale graphs are noticed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ddp_by_collectives import BOTH_WAYS, PARTITIONS_BOTH_WAYS, CollectiveTwins
from support.ddp_models import Detached
from support.ddp_training import EVERY_HOOK, Twins, batch, each_hook_with, not_freed, train
from support.training import EVERYWHERE
from torch import nn, optim
from torch._dynamo.convert_frame import input_codes
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outer = nn.Linear(40, 40, bias=False)
        self.inner = nn.Linear(40, 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.inner(self.outer(inputs).relu()), self.outer.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_hook_with("kind, partition", ("tied", "whole"), ("reentrant", "split"), ("non-reentrant", "whole"))
def test_tied_weights_and_checkpointed_activations_train_alike(hook: str, partition: str, kind: str) -> None:
    model = Tied if kind == "tied" else lambda: Checkpointed(reentrant=kind == "reentrant")
    static = {"static_graph": True} if kind != "tied" else {}
    twins = Twins(hook, model=model, partition=partition, ddp={"bucket_cap_mb": 0.001, **static})
    for number in range(5):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS_BOTH_WAYS
def test_a_graph_that_saw_old_parameters_cannot_be_used_again(twins_by: type[Twins], hook: str, partition: str) -> None:
    twins = twins_by(hook, partition=partition)
    twins.iterate(0)
    loss = twins.ddp(torch.ones(2, 40, dtype=torch.float64)).sum()
    twins.optimizer.zero_grad()
    before = [param._version for param in twins.ddp.parameters()]
    loss.backward(retain_graph=True)
    twins.optimizer.step()
    # Of what this rank owns, and of what it has received.
    assert all(param._version > version for param, version in zip(twins.ddp.parameters(), before, strict=True))
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# An error breaks off the backward on every rank: what it had announced is never sent.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_stepping_a_weight_that_backward_still_needs_is_noticed() -> None:
    twins = Twins("hook_with_zero_step_interleaved", model=Detached, ddp={"bucket_cap_mb": 0.001})
    # In the first iteration all parameters are in one bucket, which is stepped last.
    twins.iterate(0)
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twins.backward(twins.ddp, 1)


@pytest.mark.ranks(2, backend="gloo")
def test_a_weight_that_backward_still_needs_is_stepped_behind_it_by_collectives() -> None:
    # By the time of the next bucket, backward has read it.
    train(CollectiveTwins("hook_with_zero_step_interleaved", model=Detached, ddp={"bucket_cap_mb": 0.001}), last=4)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@BOTH_WAYS
@EVERY_HOOK
def test_a_model_that_is_dropped_is_freed(twins_by: type[Twins], hook: str) -> None:
    twins = twins_by(hook)
    twins.iterate(0)
    twins.iterate(1)
    seen = [weakref.ref(param) for param in twins.ddp.parameters()]
    seen.append(weakref.ref(twins.optimizer))
    del twins
    assert not_freed(seen) == []


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_a_model_may_be_converted_after_its_step(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.iterate(1)
    twins.ddp.module.float()
    assert all(param.dtype is torch.float32 for param in twins.ddp.parameters())


# ---------------------------------------------------------------------- memory formats


def convolution() -> nn.Module:
    torch.manual_seed(0)
    flat = nn.Linear(4 * 4 * 6, 5)
    flat.weight = nn.Parameter(torch.randn(4 * 4 * 6, 5).t())
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 6, 3), nn.Flatten(), flat
    )


@pytest.mark.exhaustive_at(1)
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@each_hook_with("partition, views", ("whole", True), ("split", False), ("whole", True))
def test_other_memory_formats_train_alike(hook: str, partition: str, views: bool) -> None:
    twins = Twins(
        hook,
        model=lambda: convolution().to(memory_format=torch.channels_last),
        partition=partition,
        ddp={"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001},
    )
    for number in range(4):
        twins.iterate(number, lambda ddp, inputs: ddp(inputs[:, :36]).square().mean())
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_hook_with("views", True, False, True)
def test_a_memory_format_that_changes_behind_ddp_is_refused(hook: str, views: bool) -> None:
    twins = Twins(hook, model=convolution, ddp={"gradient_as_bucket_view": views})
    twins.ddp.module.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="has changed its memory format since DistributedDataParallel was built"):
        twins.backward(twins.ddp, 0, lambda ddp, inputs: ddp(inputs[:, :36]).square().mean())


# ---------------------------------------------------------------------- torch.compile


def deep_model() -> nn.Module:
    """More than the first bucket of DDP, of which torch.compile wants to make graphs of their own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.GELU(), *(nn.Linear(300, 300) for _ in range(3)), nn.Linear(300, 5))


def compiled(function: Any) -> Any:
    # The others need a C++ compiler, and differ in what becomes of a graph alone.
    return torch.compile(function, backend="eager")


def forward_and_backward(ddp: nn.Module, inputs: torch.Tensor) -> None:
    ddp(inputs).square().mean().backward()


def whole_step(ddp: nn.Module, optimizer: optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    forward_and_backward(ddp, inputs)
    optimizer.step()


class CompiledTwins(Twins):
    """Twins of which one part of the sharded one is compiled."""

    def __init__(self, hook: str, what: str) -> None:
        torch._dynamo.reset()
        model = (lambda: compiled(deep_model())) if what == "model" else deep_model
        super().__init__(hook, model=model, ddp={"bucket_cap_mb": 1})
        self.forward = compiled(self.ddp) if what == "DDP" else self.ddp
        self.forward_and_backward = compiled(forward_and_backward) if what == "backward" else forward_and_backward
        self.stepping = compiled(self.optimizer.step) if what == "step()" else self.optimizer.step
        self.whole_step = compiled(whole_step) if what == "whole step" else None

    def iterate(self, seed: int, loss: Any = None) -> None:
        whole_step(self.plain_ddp, self.plain, batch(seed))
        if self.whole_step is not None:
            self.whole_step(self.ddp, self.optimizer, batch(seed))
            return
        self.optimizer.zero_grad()
        self.forward_and_backward(self.forward, batch(seed))
        self.stepping()


# Compiling takes long where others compute too. The whole step has a backward and a step() in it.
@pytest.mark.by_default(
    "2-reduce_to_owner_hook-whole step | 2-hook_with_zero_step-model | 2-hook_with_zero_step_interleaved-DDP"
)
@pytest.mark.ranks(2, backend="gloo", timeout=240)
@pytest.mark.parametrize("what", ["whole step", "model", "DDP", "backward", "step()"])
@EVERY_HOOK
def test_what_is_compiled_trains_alike(what: str, hook: str) -> None:
    twins = CompiledTwins(hook, what)
    for number in range(4):
        twins.iterate(number)
        twins.check(f"after iteration {number}")
    # Of our code it looks into the hooks, and not into the much that they call.
    seen = {Path(code.co_filename).name for code in (seen() for seen in input_codes.seen) if code is not None}
    assert not {"sharded_optimizer.py", "scheduler.py", "buckets.py"} & seen


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_ddp_in_python_is_refused_by_name(hook: str) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        twins = Twins(hook)
        with pytest.raises((RuntimeError, ValueError, TypeError), match="python_reducer"):
            twins.iterate(0)
