"""Parameters without a gradient, on some ranks or on all: stepped as DDP steps them, or refused on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import FLAG, each_of
from support.ddp_by_collectives import PARTITIONS_BOTH_WAYS
from support.ddp_models import Branches
from support.ddp_training import EVERY_HOOK, HOOKS, Twins, batch, each_hook_with, with_hook
from support.groups import group_of
from support.training import EVERYWHERE, cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.exhaustive_at(2, 4)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@PARTITIONS_BOTH_WAYS
def test_parameters_that_no_rank_uses_are_not_stepped(
    rank: int, twins_by: type[Twins], hook: str, partition: str
) -> None:
    # Momentum and weight decay would move what has no gradient on any rank.
    twins = twins_by(
        hook,
        model=Branches,
        optimizer=optim.SGD,
        settings={"momentum": 0.9, "weight_decay": 0.1},
        partition=partition,
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": partition == "whole"},
    )
    for number in range(1, 9):
        # In turn: all ranks the same branch, then different ones.
        chosen = number % 3 if number % 2 else (number + rank) % 3
        twins.iterate(number, lambda ddp, inputs, chosen=chosen: ddp(inputs, chosen).square().mean())
        twins.check(f"after iteration {number}")


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, inputs: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        return sum(self.halves[number](inputs) for number in chosen)


def halves(twins: Twins, ddp: nn.Module, number: int, chosen: tuple[int, ...]) -> None:
    twins.backward(ddp, number, lambda ddp, inputs: ddp(inputs, chosen).square().mean())


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@pytest.mark.parametrize(("partition", "views"), [("whole", True), ("split", False)], ids=["whole", "split"])
def test_gradients_of_parameters_that_a_later_backward_does_not_use_are_reduced(
    rank: int, partition: str, views: bool
) -> None:
    twins = Twins(
        model=Halves,
        partition=partition,
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": views},
        exact=False,
    )
    for number in range(6):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with ddp.no_sync():
                for chosen in ((0, 1), (0,)):
                    halves(twins, ddp, number, chosen)
            halves(twins, ddp, number, (1, 2) if rank == number % 2 else (0,))
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_parameters_whose_gradient_was_set_to_none_are_not_stepped() -> None:
    twins = Twins()
    for number in range(3):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            for param in list(ddp.parameters())[:2]:
                param.grad = None
            optimizer.step()
        twins.check(f"after iteration {number}")


def zero_what_is_used(model: nn.Module, unused: int) -> None:
    """As a loop does that knows its heads."""
    for name, param in model.named_parameters():
        if f"halves.{unused}" not in name:
            param.grad = None


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("without", ["unused", "frozen"])
@each_of("hook", HOOKS, partition=["split", "whole", "level"], views=[True, False], masters=FLAG)
def test_a_kept_gradient_of_a_parameter_without_a_new_one_is_refused(
    hook: str, partition: str, views: bool, masters: bool, without: str
) -> None:
    """Plain steps it with the gradient of the last step, which its owner has used."""
    model = Halves().to(torch.bfloat16 if masters else torch.float64)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer = with_hook(hook, ddp, optim.AdamW, partition=partition, master_weights=masters, lr=1e-2)

    def backward(number: int, chosen: tuple[int, ...]) -> None:
        ddp(batch(number).to(model.halves[0].weight.dtype), chosen).square().mean().backward()

    # Two heads in turn: the first step uses both.
    for number in range(3):
        optimizer.zero_grad()
        backward(number, (0, 1, 2))
        optimizer.step()
    zero_what_is_used(model, 1)
    model.halves[1].requires_grad_(without == "unused")
    before, sent = [param.detach().clone() for param in model.parameters()], optimizer.traffic.of("reduce")
    says = r"tensor [23] 'halves\.1\.(weight|bias)' still has the gradient of the last step: call .*zero_grad"
    with pytest.raises(RuntimeError, match=says):
        backward(3, (0, 2))
    # Without an agreement where a backward begins, ranks learn of it at the end.
    assert hook == "reduce_to_owner_hook" or optimizer.traffic.of("reduce") == sent
    with pytest.raises(RuntimeError, match=says):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("without", ["unused", "frozen"])
@each_of("partition", ["whole", "split", "level"], masters=FLAG, in_buffer=FLAG)
def test_a_kept_gradient_of_a_parameter_without_a_new_one_is_stepped_without_a_hook(
    partition: str, masters: bool, in_buffer: bool, without: str
) -> None:
    models = [Halves().double() for _ in range(2)]
    ddps = [DistributedDataParallel(model, find_unused_parameters=True) for model in models]
    sharded = ZeroRedundancyOptimizer(
        models[0].parameters(),
        optim.AdamW,
        partition=cutting(partition),
        master_weights=masters,
        parameters_as_bucket_view=in_buffer,
        lr=1e-2,
    )
    optimizers = [sharded, optim.AdamW(models[1].parameters(), lr=1e-2)]
    for number in range(6):
        unused = 1 + number % 2
        for model, ddp, optimizer in zip(models, ddps, optimizers, strict=True):
            zero_what_is_used(model, unused)
            model.requires_grad_(True)
            model.halves[unused].requires_grad_(without == "unused")
            ddp(batch(number), (0, 3 - unused)).square().mean().backward()
            optimizer.step()
        for ours, theirs in zip(*[model.parameters() for model in models], strict=True):
            assert torch.equal(ours, theirs), f"in iteration {number}"


class _Undefined(torch.autograd.Function):
    """Gives its second input no gradient on rank 0."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, scale)
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs, scale = ctx.saved_tensors
        [gradient] = gradients
        return gradient * scale, None if dist.get_rank() == 0 else (gradient * inputs).sum().view(1)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = small_model(), nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(_Undefined.apply(inputs, self.scale))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_gradient_that_one_rank_alone_has_is_stepped_or_told_on_every_rank(hook: str) -> None:
    twins = Twins(hook, model=Scaling, process_group=group_of())
    if hook == "hook_with_zero_step_interleaved":
        with pytest.raises(RuntimeError, match="got no gradient in a backward that steps bucket by bucket"):
            twins.iterate(0)
    else:
        for number in range(3):
            twins.iterate(number)
        twins.check("with a gradient on one rank")


# ---------------------------------------------------------------------- backwards that DDP does not finish


class Layers(nn.Module):
    """Leaves one of its layers out where it is told to; each has a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.unused = nn.ModuleList(nn.Linear(40, 40) for _ in range(3)), -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            inputs = inputs if number == self.unused else layer(inputs)
        return inputs


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("when, place", ("unused", 0), ("unused later", 2), ("frozen later", 0))
def test_a_parameter_without_a_gradient_is_told_so(hook: str, when: str, place: int) -> None:
    twins = Twins(hook, model=Layers, process_group=group_of(), ddp={"bucket_cap_mb": 0.001})
    layers = twins.ddp.module
    for number in range(0 if when == "unused" else 3):
        twins.iterate(number)
    if when == "frozen later":
        layers.layers[place].requires_grad_(False)
    else:
        layers.unused = place
    twins.optimizer.zero_grad()

    def iterate() -> None:
        # Before the hook was called once there is no sign of it, and it is DDP that finds out, in the second forward.
        for _ in range(2):
            twins.backward(twins.ddp, 5)
            twins.optimizer.step()

    words = r"(?s)^(?!.*(inside no_sync|exception interrupted)).*find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=words):
        iterate()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_rank_that_is_first_in_step_tells_a_slower_one_what_is_missing(rank: int, hook: str) -> None:
    """The slower one sends its last bucket when the other has raised."""
    twins = Twins(hook, model=Layers, process_group=group_of(), ddp={"bucket_cap_mb": 0.001})
    layers = twins.ddp.module.layers
    for number in range(3):
        twins.iterate(number)
    layers[0].requires_grad_(False)
    layers[1].weight.register_hook(lambda _: time.sleep(0.5 * rank))
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 5)
    with pytest.raises(RuntimeError, match=r"still waits for the gradients of .*find_unused_parameters=True"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_that_miss_different_buckets_do_not_wait_for_each_other(rank: int) -> None:
    """No bucket arrives on rank 1, where the first one is not complete."""
    twins = Twins(model=Layers, process_group=group_of(), ddp={"bucket_cap_mb": 0.001})
    for number in range(3):
        twins.iterate(number)
    twins.ddp.module.unused = 2 * rank
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 5)
    with pytest.raises(RuntimeError, match="still waits for the gradients of" if rank == 0 else None):
        twins.optimizer.step()
