"""Uneven inputs with models of every kind."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from collections.abc import Callable

import pytest
import torch
from support.join_training import (
    EVERY_ENDING,
    MEANS_AND_ENDINGS,
    Branches,
    Loop,
    Script,
    Uneven,
    lengths_of,
    usual,
    windows,
)
from support.training import EVERYWHERE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")

UNUSED = {"find_unused_parameters": True, "broadcast_buffers": False}
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


# ---------------------------------------------------------------------- what losses are made of


class Smooth(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(40, 10), nn.Tanh(), nn.Linear(10, 1))


def adversarial(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of the fast gradient sign method: a forward whose gradient is that of the batch alone, and a second one."""
    batch = batch.clone().requires_grad_()
    [slope] = torch.autograd.grad(model(batch).square().mean(), batch)
    result: torch.Tensor = model(batch.detach() + 0.1 * slope.sign()).square().mean()
    return result


def with_penalties(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """With the norms of the gradients of the batch and of the weights in it."""
    batch = batch.clone().requires_grad_()
    output = model(batch)
    slopes = torch.autograd.grad(output.sum(), [batch, *model.parameters()], create_graph=True)
    result: torch.Tensor = output.square().mean() + sum(slope.square().mean() for slope in slopes)
    return result


class Odd(nn.Module):
    """Returns something that nothing can look into, and keeps a loss that does not go through it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.other = nn.Linear(40, 5), nn.Linear(40, 5)

    def forward(self, batch: torch.Tensor) -> torch.distributions.Normal:
        mean = self.out(batch)
        self.loss = self.other(batch).square().mean() + mean.square().mean()
        return torch.distributions.Normal(mean, 1.0)


def of_distribution(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    # By its name: hooks of modules are not called.
    inner = getattr(model, "module", model)
    result: torch.Tensor = model.forward(batch).mean.square().mean() + inner.loss
    return result


def kept(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model(batch)
    result: torch.Tensor = getattr(model, "module", model).loss
    return result


class WithIgnored(Smooth):
    """Has a layer that DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Sequential(nn.Linear(40, 5))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["beside.0.weight", "beside.0.bias"])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self[2](self[1](self[0](batch)))
        return result


def after_one_of_ignored(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A backward of ignored parameters alone comes between the forward and its backward."""
    result: torch.Tensor = model(batch).square().mean()
    beside = getattr(model, "module", model).beside
    beside(batch).square().mean().backward()
    beside.zero_grad()
    return result


@pytest.mark.exhaustive_at(2)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("model", "loss", "ending"),
    [
        (Smooth, adversarial, 0),
        (Smooth, with_penalties, 1),
        (Odd, of_distribution, 2),
        (Odd, kept, 0),
        (WithIgnored, after_one_of_ignored, 1),
    ],
    ids=["adversarial", "penalties", "of a distribution", "kept", "of ignored ones"],
)
def test_losses_of_every_kind_end_as_in_one_process(
    world_size: int, ending: int, model: Callable[[], nn.Module], loss: Loss
) -> None:
    Uneven(lengths_of(world_size)[ending], model=model, loss=loss).check(usual)


# ---------------------------------------------------------------------- parameters that are unused, frozen, sparse


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@MEANS_AND_ENDINGS
def test_unused_parameters_end_as_in_one_process(world_size: int, divide: bool, ending: int) -> None:
    def kept(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()

    for script in (usual, windows(2), kept):
        Uneven(lengths_of(world_size)[ending], model=Branches, ddp=UNUSED, divide=divide).check(script)


class Switched(Branches):
    """Uses its second branch while it is told to."""

    uses_second = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.always(batch)
        return hidden + self.sometimes(hidden) if self.uses_second else hidden


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_ENDING
def test_unused_parameters_are_known_after_the_block(ending: int) -> None:
    script = windows(1, to_none=ending != 1)
    uneven = Uneven(lengths_of(2)[ending], model=Switched, ddp=UNUSED)
    uneven.check(script)
    for model in (uneven.ddp.module, uneven.plain_model):
        model.uses_second = False
    uneven.lengths, uneven.arguments = [2, 2], {"enable": False}
    uneven.check(script)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_parameters_are_frozen_and_unfrozen_in_the_block() -> None:
    def script(loop: Loop, number: int) -> None:
        loop.change(lambda model: freeze(model, number))
        usual(loop, number)

    def freeze(model: nn.Module, number: int) -> None:
        for param in list(model.parameters())[:2]:
            param.requires_grad_(number >= 2)

    for numbers in ([3, 6], [5, 3], [3, 3]):
        Uneven(numbers, ddp=UNUSED).check(script)


# The emulated device has no sparse tensors.
@pytest.mark.ranks(2, backend="gloo")
def test_sparse_gradients_of_a_rank_that_had_batches_are_known() -> None:
    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(20, 3, sparse=True)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model((batch[:, 0].abs() * 19 % 20).long()).square().mean()
        return result

    Uneven([2, 5], model=table, loss=loss, optimizer="SGD without decay").check(usual)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_static_graph_is_known_from_a_block_before() -> None:
    uneven = Uneven([1, 4], ddp={"static_graph": True})
    for uneven.lengths in ([1, 4], [0, 3]):
        uneven.check(usual)


class Checkpointed(nn.Module):
    """Computes its first layer again in backward, in a backward of its own if it is reentrant."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.reentrant = nn.Linear(40, 20), nn.Linear(20, 30), reentrant

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, batch.detach().requires_grad_(), use_reentrant=self.reentrant)
        result: torch.Tensor = self.second(hidden)
        return result


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("reentrant", "script", "numbers"),
    [(True, usual, [2, 5]), (False, windows(2), [6, 3])],
    ids=["reentrant", "not reentrant, windows"],
)
def test_checkpointed_activations_end_as_in_one_process(reentrant: bool, script: Script, numbers: list[int]) -> None:
    Uneven(numbers, model=lambda: Checkpointed(reentrant)).check(script)
