"""Uneven inputs with models of every kind, with several of them, and with several optimizers."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_training import (
    EVERY_ENDING,
    EVERY_HOOK_AND_ENDING,
    HOOKS,
    Branches,
    Loop,
    Script,
    Uneven,
    inputs,
    lengths_of,
    usual,
    whole,
    windows,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import EVERYWHERE
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
EVERY_MEAN = pytest.mark.parametrize("divide", [True, False], ids=["of all", "of those that run"])
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


LOSSES = [
    (Smooth, adversarial),
    (Smooth, with_penalties),
    (Odd, of_distribution),
    (Odd, kept),
    (WithIgnored, after_one_of_ignored),
]


@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_HOOK
@EVERY_ENDING
@pytest.mark.parametrize(("model", "loss"), LOSSES)
def test_losses(world_size: int, hook: str, ending: int, model: Callable[[], nn.Module], loss: Loss) -> None:
    Uneven(lengths_of(world_size)[ending], hook, model=model, loss=loss).check(usual)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK_AND_ENDING
def test_several_backwards_of_forwards_under_no_sync(rank: int, hook: str, ending: int) -> None:
    def script(loop: Loop, number: int) -> None:
        loop.zero()
        for more in (0, 50):
            loop.backward(number + more, reduces=False)
        loop.backward(number + 90)
        loop.step()

    numbers = lengths_of(2)[ending]
    uneven = Uneven(numbers, hook)
    with Join([uneven.ddp, uneven.optimizer]):
        for number in range(numbers[rank]):
            uneven.optimizer.zero_grad()
            with uneven.ddp.no_sync():
                losses = [uneven.loss(uneven.ddp, inputs(number + more, rank)) for more in (0, 50)]
                for loss in losses:
                    loss.backward()
            uneven.loss(uneven.ddp, inputs(number + 90, rank)).backward()
            uneven.optimizer.step()
    uneven.refer(script)
    uneven.compare()


# ---------------------------------------------------------------------- parameters that are unused, frozen, sparse


@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_HOOK
@EVERY_MEAN
@EVERY_ENDING
def test_unused_parameters(world_size: int, hook: str, divide: bool, ending: int) -> None:
    def kept(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()

    scripts = [
        windows(3),
        *([windows(2, reduces=True)] if hook in HOOKS[:2] else []),
        *([kept] if hook == "none" else []),
    ]
    least = 2 if hook == "owner" else 0
    numbers = [max(number, least) for number in lengths_of(world_size)[ending]]
    for script in scripts:
        lengths = [whole(script, number) for number in numbers]
        Uneven(lengths, hook, model=Branches, ddp=UNUSED, divide=divide).check(script)


class Switched(Branches):
    """Uses its second branch while it is told to."""

    uses_second = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.always(batch)
        return hidden + self.sometimes(hidden) if self.uses_second else hidden


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK_AND_ENDING
def test_unused_parameters_after_the_block(hook: str, ending: int) -> None:
    script = windows(1, to_none=ending != 1)
    uneven = Uneven(lengths_of(2)[ending], hook, model=Switched, ddp=UNUSED)
    uneven.check(script)
    for model in (uneven.ddp.module, uneven.plain_model):
        model.uses_second = False
    uneven.lengths, uneven.arguments = [2, 2], {"enable": False}
    uneven.check(script)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_freezing_and_unfreezing() -> None:
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
def test_sparse_gradients_of_a_rank_that_had_batches() -> None:
    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(20, 3, sparse=True)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model((batch[:, 0].abs() * 19 % 20).long()).square().mean()
        return result

    Uneven([2, 5], model=table, loss=loss, optimizer="SGD without decay").check(usual)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_a_static_graph_that_a_rank_knows_from_a_block_before(hook: str) -> None:
    uneven = Uneven([1, 4], hook, ddp={"static_graph": True})
    for uneven.lengths in ([1, 4], [0, 3]):
        uneven.check(usual)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_communication_hooks_of_ddp_in_cpp() -> None:
    for numbers in lengths_of(2):
        uneven = Uneven([whole(windows(3), number) for number in numbers])
        uneven.ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        uneven.check(windows(3))


# ---------------------------------------------------------------------- several models, several optimizers

Turn = tuple[Callable[[Sequence[nn.Module], torch.Tensor], torch.Tensor], Sequence[int]]
"""A loss of several models, and which of them are trained by it."""


def take_turn(
    models: Sequence[nn.Module], optimizers: Sequence[optim.Optimizer], turn: Turn, share: int, batches: Iterable[Any]
) -> None:
    loss, trained = turn
    for index, model in enumerate(models):
        model.requires_grad_(index in trained)
    for index in trained:
        optimizers[index].zero_grad()
    for batch in batches:
        (loss(models, batch) / share).backward()
    for index in trained:
        optimizers[index].step()
    for model in models:
        model.requires_grad_(True)


def check_turns(parts: Sequence[Uneven], turns: Callable[[int], list[Turn]]) -> None:
    """Train several models, on ranks and in one process."""
    lengths, rank, divide = parts[0].lengths, parts[0].rank, parts[0].divide
    models, optimizers = [part.ddp for part in parts], [part.optimizer for part in parts]
    with Join([*models, *optimizers], divide_by_initial_world_size=divide):
        for number in range(lengths[rank]):
            for turn in turns(number):
                take_turn(models, optimizers, turn, 1, [inputs(number, rank)])
    for number in range(max(lengths)):
        running = [other for other, length in enumerate(lengths) if number < length]
        share, batches = len(lengths) if divide else len(running), [inputs(number, other) for other in running]
        for turn in turns(number):
            take_turn([part.plain_model for part in parts], [part.plain for part in parts], turn, share, batches)
    for part in parts:
        part.compare()


class Encoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30))


class Decoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))


def decoded(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = models[1](models[0](batch)).square().mean()
    return result


def beside(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (models[0](batch).sum(1) + models[1](batch[:, :30]).sum(1)).square().mean()
    return result


def judged(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
    made = getattr(models[0], "module", models[0])(batch).detach()
    result: torch.Tensor = models[1](torch.cat([batch[:, :30], 1 - made])).square().mean()
    return result


@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_HOOK
@EVERY_MEAN
@EVERY_ENDING
@pytest.mark.parametrize(
    "turns",
    [[(decoded, (0, 1))], [(judged, (1,)), (decoded, (0,))], [(beside, (0, 1))]],
    ids=["encoder and decoder", "adversaries", "branches"],
)
def test_models_with_a_common_loss(world_size: int, hook: str, divide: bool, ending: int, turns: list[Turn]) -> None:
    numbers = lengths_of(world_size)[ending]
    parts = [Uneven(numbers, hook, model=model, divide=divide) for model in (Encoder, Decoder)]
    check_turns(parts, lambda number: turns)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("numbers", [[2, 5], [5, 2]], ids=str)
def test_models_that_have_nothing_in_common(hook: str, numbers: list[int]) -> None:
    def alone(index: int) -> Turn:
        return lambda models, batch: models[index](batch).square().mean(), (0, 1)[index : index + 1]

    # In any order, the second alone from time to time.
    parts = [Uneven(numbers, hook), Uneven(numbers, hook, optimizer="SGD")]
    check_turns(parts, lambda number: [alone(each) for each in ((1, 0) if number % 2 else (1,))])


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_ENDING
def test_two_optimizers_of_one_model_that_step_at_different_rates(rank: int, ending: int) -> None:
    def iterate(optimizers: Sequence[optim.Optimizer], number: int, backward: Callable[[], None]) -> None:
        optimizers[0].zero_grad()
        backward()
        optimizers[0].step()
        if number % 3 == 2:
            optimizers[1].step()
            optimizers[1].zero_grad()

    uneven = Uneven(lengths_of(2)[ending])
    halves = [list(model.parameters()) for model in (uneven.ddp, uneven.plain_model)]
    sharded = [ZeroRedundancyOptimizer(halves[0][each::2], optim.Adam, lr=1e-2) for each in range(2)]
    plain = [optim.Adam(halves[1][each::2], lr=1e-2) for each in range(2)]
    with Join([uneven.ddp, *sharded]):
        for number in range(uneven.lengths[rank]):
            iterate(sharded, number, lambda: uneven.loss(uneven.ddp, inputs(number, rank)).backward())  # noqa: B023

    def script(loop: Loop, number: int) -> None:
        iterate(plain, number, lambda: loop.backward(number))

    uneven.refer(script)
    uneven.compare()


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
@EVERY_HOOK
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("script", [usual, windows(2)], ids=["usual", "windows"])
@pytest.mark.parametrize("numbers", [[2, 5], [6, 3]], ids=str)
def test_checkpoints(hook: str, reentrant: bool, script: Script, numbers: list[int]) -> None:
    lengths = [whole(script, number) for number in numbers]
    uneven = Uneven(lengths, hook, model=lambda: Checkpointed(reentrant))
    # The reference differentiates by `torch.autograd.grad`, which reentrant checkpoints do not support.
    uneven.plain_model.reentrant = False
    uneven.check(script)
