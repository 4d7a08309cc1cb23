"""A sharded optimizer in torch's own Join: one forward, one reducing backward and one step; or an error."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_training import HOOKS, Branches, Loop, Script, Uneven, inputs, usual, windows
from torch import optim
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from zeroshard_comm import PeerLostError

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
UNCHECKED = -1


def short(numbers: list[int], hook: str = "none", seconds: float = 4, **options: Any) -> Uneven:
    return Uneven(numbers, hook, group=dist.new_group(timeout=timedelta(seconds=seconds)), **options)


@pytest.mark.ranks(2, backend="gloo")
def test_torchs_optimizer_ends_elsewhere(rank: int) -> None:
    uneven = Uneven([3, 8])
    uneven.optimizer = TorchZero(uneven.ddp.parameters(), optim.Adam, lr=1e-2, weight_decay=0.01)
    uneven.train(usual, TorchJoin)
    uneven.refer(usual)
    # The rank without data has stepped its shard with the gradients of its last batch.
    assert 1e-4 < uneven.distance() < 1


@pytest.mark.ranks(4, backend="gloo")
@EVERY_HOOK
def test_unused_parameters_as_ranks_run_out_one_after_another(hook: str) -> None:
    Uneven([5, 4, 3, 2], hook, model=Branches, ddp={"find_unused_parameters": True}).check(usual, TorchJoin)


def evaluated(loop: Loop, number: int) -> None:
    usual(loop, number)
    loop.forward(number, with_grad=False)
    loop.forward(number, with_grad=False)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("hook", "script"),
    [("none", windows(2)), ("owner", windows(2)), ("behind", windows(2)), ("none", evaluated)],
    ids=["none", "owner", "behind", "evaluated"],
)
def test_a_second_forward_without_a_step(hook: str, script: Script) -> None:
    # While all have data, and when one waits for the others' step, or else for their backward until the timeout.
    for numbers in ([4, 4], *([] if script is evaluated else [[0, 4], [4, 0]])):
        short(numbers, hook).refuse(
            script,
            "a second forward without step.* use zeroshard_integrations.join.Join",
            join=TorchJoin,
            until=UNCHECKED,
        )


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_that_are_never_zero() -> None:
    def script(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()

    Uneven([3, 3]).check(script, TorchJoin)
    short([2, 4]).refuse(script, "call zero_grad.* in every iteration", join=TorchJoin, until=UNCHECKED)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_the_optimizer_before_its_model(rank: int, hook: str) -> None:
    uneven = short([2, 4], hook)
    with (
        pytest.raises(ValueError, match=r"write Join\(\[ddp, optimizer\]\)"),
        TorchJoin([uneven.optimizer, uneven.ddp]),
    ):
        for number in range(2):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_throw_on_early_termination(hook: str) -> None:
    uneven = short([2, 4], hook)
    uneven.arguments = {"throw_on_early_termination": True}
    with pytest.raises(RuntimeError, match="exhausted"):
        uneven.train(usual, TorchJoin)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_an_exception_on_one_rank(rank: int, hook: str) -> None:
    def script(loop: Loop, number: int) -> None:
        if rank == 1 and number == 2:
            raise ZeroDivisionError("on rank 1")
        usual(loop, number)

    # torch's tells nobody: the others wait for the group's timeout.
    uneven = short([4, 4], hook, seconds=2)
    with pytest.raises(ZeroDivisionError if rank else (PeerLostError, RuntimeError)):
        uneven.train(script, TorchJoin)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_training_goes_on_after_an_error_that_has_left_the_block(rank: int, hook: str) -> None:
    uneven = Uneven([4, 4], hook)
    with suppress(ZeroDivisionError), TorchJoin([uneven.ddp, uneven.optimizer]):
        with torch.no_grad():
            uneven.loss(uneven.ddp, inputs(0, rank))
        raise ZeroDivisionError
    # Two forwards to a step, which torch's Join does not allow.
    uneven.check(windows(2), lambda joinables, **arguments: nullcontext())
