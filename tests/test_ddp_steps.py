"""What comes between a backward and its step: nothing, other owners, a further group, or a closure that fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_training import HOOKS, Twins
from torch import nn, optim
from training import EVERYWHERE
from zeroshard_comm import PeerLostError
from zeroshard_testing import Faults, assert_replicas_equal

pytestmark = [pytest.mark.each_choice, pytest.mark.usefixtures("tensors_on_the_device")]


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
@pytest.mark.parametrize("what", ["nothing", "group", "checkpoint"])
def test_gradients_follow_their_tensors_to_other_owners(what: str) -> None:
    twins = Thawed()
    before, given = twins.optimizer.plan.owners, copy.deepcopy(twins.plain.state_dict())
    for ddp, optimizer in twins.sides:
        twins.backward(ddp, 0)
        if what == "group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
        elif what == "checkpoint":
            optimizer.load_state_dict(copy.deepcopy(given))
        optimizer.step()
    assert twins.optimizer.plan.owners[:4] != before
    twins.check("after the step")


# What was interrupted leaves messages without another end. By collectives no message is sent that could be.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
def test_no_rank_waits_for_one_that_is_interrupted_while_gradients_move(rank: int, faults: Faults) -> None:
    twins = Thawed()
    twins.backward(twins.ddp, 0)
    faults.raise_(0, at="send", error=KeyboardInterrupt())
    with pytest.raises(PeerLostError if rank else KeyboardInterrupt):
        twins.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    with pytest.raises(RuntimeError, match="lost rank 0" if rank else "was interrupted by Keyboard"):
        twins.optimizer.step()


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
