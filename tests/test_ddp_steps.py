"""What comes between a backward and the step that it belongs to: nothing, a further group, or a closure that fails."""

from __future__ import annotations

import pytest
import torch
from ddp_training import HOOKS, Twins
from torch import nn

pytestmark = pytest.mark.pairwise


@pytest.mark.ranks(2, backend="gloo")
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


@pytest.mark.ranks(2, backend="gloo")
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


@pytest.mark.ranks(2, backend="gloo")
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


@pytest.mark.ranks(2, backend="gloo")
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
