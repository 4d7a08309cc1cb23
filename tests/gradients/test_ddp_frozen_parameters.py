"""Parameters that are frozen, unfrozen or added at any time: their owners stay, and training is that of DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.combinations import FLAG, each_of
from support.ddp_by_collectives import BOTH_WAYS
from support.ddp_training import EVERY_HOOK, HOOKS, Twins, each_hook_with, train
from support.training import EVERYWHERE, small_model
from torch import nn, optim
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@BOTH_WAYS
@EVERY_HOOK
def test_frozen_parameters_stay_and_a_group_added_later_is_stepped(twins_by: type[Twins], hook: str) -> None:
    def model() -> nn.Module:
        made = small_model()
        for param in made[0].parameters():
            param.requires_grad_(False)
        return made

    train(twins_by(hook, model=model), last=4)

    twins = twins_by(hook)
    train(twins, last=2)
    extra = [nn.Parameter(torch.ones(70, 3, dtype=torch.float64)) for _ in twins.sides]
    for param, (_, optimizer) in zip(extra, twins.sides, strict=True):
        param._ddp_ignored = True
        optimizer.add_param_group({"params": [param], "lr": 0.5})
    for number in range(3, 6):
        # DDP does not reduce the gradient of a parameter that it was told to ignore; it is equal on all ranks here.
        for param, (ddp, optimizer) in zip(extra, twins.sides, strict=True):
            optimizer.zero_grad()
            param.grad = torch.full_like(param, float(number))
            twins.backward(ddp, number)
            optimizer.step()
        twins.check(f"after iteration {number}")
        assert torch.equal(extra[0], extra[1])


@pytest.mark.exhaustive_at(1)
@pytest.mark.ranks(1, 2, backend="gloo")
@each_hook_with("partition", "whole", "split", "level")
def test_parameters_that_are_unfrozen_later_are_stepped(hook: str, partition: str) -> None:
    twins = Twins(
        hook,
        partition=partition,
        parameters_as_bucket_view=partition == "split",
        ddp={"find_unused_parameters": True},
        exact=partition == "whole",
    )
    for number in range(6):
        for ddp, _ in twins.sides:
            ddp.module[0].requires_grad_(number > 2)
        twins.iterate(number)
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
    """Two layers were frozen when the optimizer was built, and no longer when its hook was registered."""

    def __init__(self, hook: str = "reduce_to_owner_hook", **arguments: Any) -> None:
        settings = {"momentum": 0.9}
        super().__init__(
            hook, model=four_layers, optimizer=optim.SGD, settings=settings, groups=frozen_at_first, **arguments
        )
        self.plain_ddp.requires_grad_(True)

    def register(self, *args: Any) -> None:
        self.ddp.requires_grad_(True)
        super().register(*args)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("hook", HOOKS, partition=["whole", "split"], views=FLAG)
def test_parameters_that_are_unfrozen_and_frozen_again_keep_their_owners(
    hook: str, partition: str, views: bool
) -> None:
    unused = {"find_unused_parameters": True}
    twins = Thawed(hook, ddp=unused, partition=partition, parameters_as_bucket_view=views)
    owners, is_frozen = twins.optimizer.plan.owners, [True] * 3 + [False] * 3 + [True] * 2 + [False] * 2
    assert len({rank for ranks in owners[:2] for rank in ranks}) == 2
    for number, frozen in enumerate(is_frozen):
        for ddp, _ in twins.sides:
            for param in list(ddp.parameters())[:2]:
                param.requires_grad_(not frozen)
        twins.iterate(number)
        twins.check(f"after iteration {number}")
    assert twins.optimizer.plan.owners == owners


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("what", ["nothing", "checkpoint"])
def test_parameters_that_were_unfrozen_before_the_first_backward_are_stepped(what: str) -> None:
    twins = Thawed()
    before, given = twins.optimizer.plan.owners, copy.deepcopy(twins.plain.state_dict())
    for ddp, optimizer in twins.sides:
        twins.backward(ddp, 0)
        if what == "checkpoint":
            optimizer.load_state_dict(copy.deepcopy(given))
        optimizer.step()
    assert twins.optimizer.plan.owners == before
    twins.check("after the step")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_parameters_that_are_unfrozen_between_backward_and_step_stay_as_they_were() -> None:
    settings, unused = {"momentum": 0.9}, {"find_unused_parameters": True}
    twins = Twins(model=four_layers, optimizer=optim.SGD, settings=settings, groups=frozen_at_first, ddp=unused)
    # Two layers are frozen, and in no bucket's gradients yet.
    twins.iterate(5)
    twins.optimizer.zero_grad()
    twins.plain.zero_grad()
    twins.backward(twins.ddp, 0)
    owners = twins.optimizer.plan.owners
    twins.ddp.requires_grad_(True)
    twins.optimizer.step()
    twins.backward(twins.plain_ddp, 0)
    twins.plain.step()
    twins.check("after the step")
    assert twins.optimizer.plan.owners == owners


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_parameters_that_one_rank_alone_has_unfrozen_are_stepped_with_its_gradients(rank: int, hook: str) -> None:
    twins = Thawed(hook, ddp={"find_unused_parameters": True})
    for ddp, _ in twins.sides:
        for param in list(ddp.parameters())[:2]:
            param.requires_grad_(rank == 1)
    for number in range(3):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("alone", [0, 1])
def test_another_layout_is_agreed_on_after_one_rank_has_given_its_buckets_back(rank: int, alone: int) -> None:
    twins = Thawed()
    before, params = twins.optimizer.plan, list(twins.ddp.parameters())
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
    assert twins.optimizer.plan != before
    assert twins.optimizer.plan.owners == before.owners
    assert_replicas_equal(params)


def two_layers_frozen() -> nn.Module:
    module = four_layers()
    frozen_at_first(module)
    return module


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("iterations", [1, 6])
def test_parameters_that_are_unfrozen_and_in_no_bucket_are_refused(iterations: int) -> None:
    twins = Twins(model=two_layers_frozen, optimizer=optim.SGD)
    twins.iterate(iterations)
    twins.optimizer.zero_grad()
    twins.ddp.requires_grad_(True)
    twins.backward(twins.ddp, iterations)
    with pytest.raises(RuntimeError, match=r"tensor 0 .* has a gradient, but DistributedDataParallel does not reduce"):
        twins.optimizer.step()


# ---------------------------------------------------------------------- groups that are added


def unreduced() -> nn.Parameter:
    """Return a parameter that DDP was told to ignore, which alone may be added later."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    param._ddp_ignored = True
    return param


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_was_accumulated_outlives_a_group_that_is_added() -> None:
    twins = Twins()
    twins.iterate(0)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad(set_to_none=False)
        with ddp.no_sync():
            twins.backward(ddp, 1)
        optimizer.add_param_group({"params": [unreduced()]})
        twins.backward(ddp, 2)
        optimizer.step()
    twins.check("after the window")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_a_group_that_is_added_between_backward_and_step_is_no_change(hook: str) -> None:
    twins = Twins(hook)
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            if ddp is twins.plain_ddp:
                optimizer.step()
            optimizer.add_param_group({"params": [unreduced()], "lr": 0.5})
            if ddp is twins.ddp:
                optimizer.step()
        twins.check(f"after iteration {number}")
