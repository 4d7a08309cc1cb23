"""An error on one rank inside Join reaches the others, with its cause, at their next call or when it has ended."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import Failing
from support.groups import group_of
from support.join_training import UNCHECKED, Loop, inputs, short, usual
from support.training import small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.join import Join

# ---------------------------------------------------------------------- errors of one rank


class DamagedFileError(ValueError):
    pass


class Strike:
    """Raises on rank 1, once, at a place and in an iteration."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank, self.where, self.number = rank, where, 0

    def __call__(self, here: str) -> None:
        if self.rank == 1 and here == self.where and self.number == 2:
            raise DamagedFileError("file 7 is damaged")


class Struck(nn.Sequential):
    strike: Strike

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and hasattr(self, "strike"):
            self.strike("in the forward")
        result: torch.Tensor = super().forward(batch)
        return result


PLACES = ["before the forward", "in the forward", "before backward", "after backward", "before the step", "at the end"]


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(("where", "numbers"), [*zip(PLACES, 3 * ([4, 4, 4], [2, 4, 4]), strict=True)], ids=PLACES)
def test_an_exception_on_one_rank_is_raised_on_all(rank: int, where: str, numbers: list[int]) -> None:
    strike = Strike(rank, where)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        strike("before backward")
        return result

    def script(loop: Loop, number: int) -> None:
        strike.number = number
        strike("before the forward")
        loop.backward(number)
        strike("after backward")
        loop.backward(number + 50)
        loop.clip()
        strike("before the step")
        loop.step()
        loop.zero()
        strike("at the end")

    uneven = short(numbers, model=lambda: Struck(*small_model()), loss=loss)
    uneven.ddp.module.strike = strike
    caught = uneven.refuse(script, "file 7 is damaged", error=ValueError, until=UNCHECKED)
    assert type(caught) is (DamagedFileError if rank == 1 else ValueError)
    assert rank == 1 or "rank 1" in str(caught)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 1500), nn.Linear(1500, 30)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(batch))
        return result


class FailsInTheMiddle(Halves):
    """Some gradients are on their way already when its backward raises."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(Failing.apply(self.first(batch)))  # type: ignore[no-untyped-call]
        return result


@pytest.mark.ranks(2, backend="gloo")
def test_an_exception_in_a_backward_is_raised_on_all(rank: int) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return Failing.apply(model(batch)).square().mean()  # type: ignore[no-untyped-call,no-any-return]

    # Before the first gradient the others are told; after it they wait for the group's timeout.
    uneven = short([3, 3], loss=loss)
    uneven.refuse(usual, "in backward" if rank else "rank 1.*in backward", error=ZeroDivisionError, until=UNCHECKED)
    uneven = short([3, 3], seconds=2, model=FailsInTheMiddle)
    uneven.refuse(
        usual, "in backward" if rank else "", error=ZeroDivisionError if rank else RuntimeError, until=UNCHECKED
    )


@pytest.mark.ranks(3, backend="gloo")
def test_a_local_step_that_raises_is_an_error_on_all(rank: int) -> None:
    class Picky(optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            type(self).steps += 1
            if rank == 1 and self.steps >= 3:
                raise ArithmeticError("no more steps")
            return super().step(closure)

    uneven = short([1, 5, 5], optimizer=(Picky, {"lr": 0.1}))
    uneven.refuse(usual, "no more steps", error=ArithmeticError, until=UNCHECKED)


@pytest.mark.ranks(2, backend="gloo")
def test_training_goes_on_in_another_block_after_an_error(rank: int) -> None:
    def script(loop: Loop, number: int) -> None:
        if rank == 1 and number == 2:
            raise DamagedFileError("file 7 is damaged")
        usual(loop, number)

    uneven = short([4, 4])
    with pytest.raises(ValueError, match="file 7"):
        uneven.train(script)
    uneven.lengths = [2, 2]
    uneven.refer(usual)
    uneven.lengths = [3, 5]
    uneven.check(usual)


@pytest.mark.ranks(2, backend="gloo")
def test_errors_that_are_caught_inside_the_block_are_raised_at_its_end(rank: int) -> None:
    uneven = short([2, 4])
    with (
        pytest.raises(RuntimeError, match=r"has ended with an error on every rank|rank 0 has run out of data"),
        Join([uneven.ddp, uneven.optimizer], throw_on_early_termination=True),
    ):
        for number in range(uneven.lengths[rank]):
            try:
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                uneven.optimizer.step()
            except RuntimeError:
                break


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("when", ["made", "called"])
def test_a_hook_of_another_joinable_may_raise(rank: int, when: str) -> None:
    class Picky(DistributedDataParallel):
        def join_hook(self, **kwargs: Any) -> Any:
            hook = super().join_hook(**kwargs)
            synchronize = hook.post_hook

            def refuse(is_last_joiner: bool) -> None:
                synchronize(is_last_joiner)
                raise OSError("no space left")

            if rank == 1:
                if when == "made":
                    raise OSError("no space left")
                hook.post_hook = refuse
            return hook

    group = group_of(seconds=4)
    model = Picky(small_model().double(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, process_group=group, lr=0.1)
    # What it raises when all have left is the matter of its rank.
    raises = rank == 1 or when == "made"
    with pytest.raises(OSError, match="no space left") if raises else nullcontext(), Join([model, optimizer]):
        pass
    assert not model._join_config.enable
    assert not optimizer._join_config.enable
    model(inputs(0, rank)).sum().backward()
    optimizer.step()


@pytest.mark.ranks(2, 3, backend="gloo")
def test_a_call_of_an_optimizer_outside_of_the_block_is_told_from_one_inside(rank: int) -> None:
    inside, outside = (ZeroRedundancyOptimizer(small_model().parameters(), optim.SGD, lr=0.1) for _ in range(2))
    with pytest.raises(DisagreementError, match=r"called a method inside Join; .* called step\(\)"), Join([inside]):
        (inside if rank == 0 else outside).step()
