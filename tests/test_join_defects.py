"""Of Join: what fails now."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from join_training import HOOKS, Loop, Uneven, inputs, usual, windows
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from zeroshard_comm import DisagreementError
from zeroshard_integrations.join import Join


def short(numbers, hook, **options):
    return Uneven(numbers, hook, group=dist.new_group(timeout=timedelta(seconds=4)), **options)


EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[2:])
def test_a_window_that_began_before_the_block(hook: str) -> None:
    uneven = short([1, 1], hook)
    uneven.check(windows(2))
    uneven.lengths = [0, 2]
    with pytest.raises(RuntimeError, match="whose part of them"):
        uneven.train(lambda loop, number: loop.backward(number))


class Around(nn.Module):
    """Calls another model between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 20), nn.Linear(20, 30)

    def forward(self, batch: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        result: torch.Tensor = self.second(inner(self.first(batch)))
        return result


# The gradients of the first model that were on their way stay there.
@pytest.mark.ranks(2, backend="gloo", checks="no:collectives no:messages")
@EVERY_HOOK
def test_models_whose_gradients_come_in_turns(rank: int, hook: str) -> None:
    outer = short([2, 4], hook, model=Around)
    inner = Uneven([2, 4], hook, model=lambda: nn.Linear(20, 20), group=outer.group)
    done = 0
    with (
        pytest.raises(RuntimeError, match=r"come in turns in one backward.* put both models into one"),
        Join([outer.ddp, inner.ddp, outer.optimizer, inner.optimizer]),
    ):
        for number in range(outer.lengths[rank]):
            outer.ddp(inputs(number, rank), inner.ddp).square().mean().backward()
            for part in (outer, inner):
                part.optimizer.step()
                part.optimizer.zero_grad()
            done += 1
    assert done == 2


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_parameters_that_are_trained_only_after_a_rank_has_run_out(rank: int, hook: str) -> None:
    def script(loop: Loop, number: int) -> None:
        loop.change(lambda model: [param.requires_grad_(number >= 2) for param in list(model.parameters())[:2]])
        usual(loop, number)

    uneven = short([1, 4], hook, ddp={"find_unused_parameters": True})
    if hook == "owner":
        # It hands over gradients of all parameters.
        uneven.check(script)
        return
    with pytest.raises(DisagreementError, match="is frozen on rank 0"):
        uneven.train(script)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_leaving_after_the_first_forward(hook: str) -> None:
    # Its calls are zero, the forward, the backward, step.
    with pytest.raises(ValueError, match="leave the loop before that, or after the backward"):
        Uneven([4, 4], hook, calls=[2, 99]).train(usual)


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_that_are_never_zero_in_torchs_with_the_owner_hook(rank: int) -> None:
    def script(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()

    with pytest.raises(RuntimeError, match=r"zero_grad\(\)" if rank else ""):
        short([2, 4], "owner").train(script, TorchJoin)
