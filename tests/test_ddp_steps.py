"""What comes between a backward and its step: nothing, other owners, a further group, or a closure that fails."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_training import HOOKS, Twins, batch
from torch import nn, optim
from training import EVERYWHERE
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "unused allowed"])
def test_a_step_without_gradients_does_nothing(unused: bool) -> None:
    # A batch that is skipped after zero_grad(), in every iteration from the first one on.
    twins = Twins("owner", ddp={"find_unused_parameters": unused})
    for number in range(4):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.zero_grad()
        assert twins.optimizer.clip_grad_norm_(1.0) == 0.0
        for _, optimizer in twins.sides:
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_was_accumulated_outlives_a_group_that_is_added() -> None:
    twins = Twins("owner", groups=lambda module: list(module.parameters()))
    twins.iterate(0)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad(set_to_none=False)
        with ddp.no_sync():
            twins.backward(ddp, 1)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
        twins.backward(ddp, 2)
        optimizer.step()
    twins.check("after the window")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", HOOKS[1:])
def test_a_group_that_is_added_between_backward_and_step_is_no_change(hook: str) -> None:
    twins = Twins(hook, groups=lambda module: list(module.parameters()))
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            if ddp is twins.plain_ddp:
                optimizer.step()
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))], "lr": 0.5})
            if ddp is twins.ddp:
                optimizer.step()
        twins.check(f"after iteration {number}")


def four_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(4)])


def frozen_at_first(module: nn.Module) -> list[nn.Parameter]:
    params = list(module.parameters())
    for param in params[:2]:
        param.requires_grad_(False)
    return params


class Thawed(Twins):
    """Two layers are trained only after the optimizer was built: the next layout deals them out anew."""

    def __init__(self) -> None:
        settings = {"momentum": 0.9}
        super().__init__("owner", model=four_layers, optimizer=optim.SGD, settings=settings, groups=frozen_at_first)
        self.plain_ddp.requires_grad_(True)

    def register(self, *args: Any) -> None:
        self.ddp.requires_grad_(True)
        super().register(*args)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("what", ["nothing", "checkpoint"])
def test_parameters_that_were_unfrozen_have_other_owners_before_the_backward(what: str) -> None:
    twins = Thawed()
    before, given = twins.optimizer.plan.owners, copy.deepcopy(twins.plain.state_dict())
    for ddp, optimizer in twins.sides:
        twins.backward(ddp, 0)
        if what == "checkpoint":
            optimizer.load_state_dict(copy.deepcopy(given))
        optimizer.step()
    assert twins.optimizer.plan.owners != before
    twins.check("after the step")


def unfreeze(twins: Twins) -> None:
    twins.ddp.requires_grad_(True)
    twins.optimizer.step()


def add_group(twins: Twins) -> None:
    twins.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})


def thawing() -> Twins:
    """Two layers are frozen, and in no bucket's gradients yet."""
    settings, unused = {"momentum": 0.9}, {"find_unused_parameters": True}
    twins = Twins(
        "owner", model=four_layers, optimizer=optim.SGD, settings=settings, groups=frozen_at_first, ddp=unused
    )
    twins.iterate(5)
    twins.optimizer.zero_grad()
    twins.plain.zero_grad()
    twins.backward(twins.ddp, 0)
    return twins


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_parameters_that_one_rank_alone_has_unfrozen_before_the_backward(rank: int) -> None:
    twins = thawing()
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    if rank == 1:
        twins.ddp.requires_grad_(True)
    with pytest.raises(DisagreementError, match=r"tensor 0 .*trainable False here, True there"):
        twins.backward(twins.ddp, 1)


def two_layers_frozen() -> nn.Module:
    module = four_layers()
    frozen_at_first(module)
    return module


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("iterations", [1, 6])
def test_parameters_that_are_unfrozen_and_in_no_bucket(iterations: int) -> None:
    twins = Twins("owner", model=two_layers_frozen, optimizer=optim.SGD)
    twins.iterate(iterations)
    twins.optimizer.zero_grad()
    twins.ddp.requires_grad_(True)
    twins.backward(twins.ddp, iterations)
    with pytest.raises(RuntimeError, match=r"tensor 0 .* has a gradient, but DistributedDataParallel does not reduce"):
        twins.optimizer.step()


GROWTH = pytest.mark.parametrize("grow", [unfreeze, add_group])
TOO_EARLY = r"added or unfrozen after a backward\(\) and before its step\(\).*call step\(\) or zero_grad\(\) before"


@pytest.mark.ranks(2, backend=EVERYWHERE)
@GROWTH
@pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])
def test_parameters_that_are_added_or_unfrozen_between_backward_and_step_are_refused(
    rank: int, grow: Callable[[Twins], None], where: str
) -> None:
    twins = thawing()
    params, owners = list(twins.ddp.parameters()), twins.optimizer.plan.owners
    before = [param.detach().clone() for param in params]
    # A rank that has unfrozen nothing steps; a group is added by all ranks.
    is_stepping = where == "on rank 1" and rank == 0 and grow is unfreeze
    with pytest.raises(RuntimeError, match=TOO_EARLY):
        _ = twins.optimizer.step() if is_stepping else grow(twins)
    assert all(map(torch.equal, before, params))
    assert twins.optimizer.plan.owners == owners
    assert len(twins.optimizer.param_groups) == 1
    # What was refused can be done by all ranks after the step.
    for param in params[:2]:
        param.requires_grad_(False)
    twins.optimizer.step()
    twins.backward(twins.plain_ddp, 0)
    twins.plain.step()
    twins.check("after the step")
    grow(twins)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@GROWTH
@pytest.mark.parametrize("ended_by", ["step()", "zero_grad()", "zero_grad() to zeros", "a skipped step"])
def test_what_ends_the_time_in_which_parameters_may_not_be_added_or_unfrozen(
    grow: Callable[[Twins], None], ended_by: str
) -> None:
    twins = thawing()
    if ended_by == "step()":
        twins.optimizer.step()
    elif ended_by == "a skipped step":
        twins.optimizer.zero_grad()
        scaler = torch.amp.GradScaler(torch.get_default_device().type)
        scaler.scale(twins.ddp(batch(1)).square().mean() * math.inf).backward()
        scaler.step(twins.optimizer)
        scaler.update()
    else:
        twins.optimizer.zero_grad(set_to_none=ended_by == "zero_grad()")
    grow(twins)
    assert_replicas_equal(twins.ddp.parameters())
    twins.ddp.requires_grad_(True)
    for number in range(2, 4):
        twins.optimizer.zero_grad()
        twins.backward(twins.ddp, number)
        twins.optimizer.step()
        assert_replicas_equal(twins.ddp.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("alone", [0, 1])
def test_other_owners_after_one_rank_has_given_its_buckets_back(rank: int, alone: int) -> None:
    twins = Thawed()
    before, params = twins.optimizer.plan.owners, list(twins.ddp.parameters())
    twins.backward(twins.ddp, 0)
    for param in params[:2]:
        param.requires_grad_(False).grad = None
    twins.optimizer.step()
    kept = [param.grad for param in params]
    if rank == alone:
        kept.clear()
        twins.optimizer.zero_grad()
    twins.ddp.requires_grad_(True)
    twins.optimizer.step()
    assert twins.optimizer.plan.owners != before
    assert_replicas_equal(params)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_closure_that_raises_on_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    twins = Twins("owner")
    twins.iterate(0)

    def closure() -> torch.Tensor:
        if rank == 1:
            raise ValueError("no batch")
        return torch.zeros(())

    with pytest.raises(ValueError, match="no batch"):
        twins.optimizer.step(closure)
    twins.iterate(1)
    twins.check("after an iteration that is as ever")
