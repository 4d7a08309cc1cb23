"""Gradient accumulation on uneven inputs: what a rank had accumulated when it ran out counts."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from join_training import HOOKS, Branches, Uneven, inputs
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from training import small_model
from zeroshard_integrations.join import Join

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)

UNEVEN_WINDOWS = ([4, 8], [5, 8], [8, 6], [3, 16], [9, 11], [0, 7])
"""Lengths that end at the end of a window of 4, within one, some windows before, and both within one."""


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_windows_that_end_unevenly(hook: str, partition: str) -> None:
    for numbers in UNEVEN_WINDOWS:
        Uneven(numbers, hook, window=4, partition=partition).check(Join)


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_windows_on_three_ranks(hook: str) -> None:
    for numbers in ([2, 5, 9], [9, 4, 6], [1, 1, 4]):
        Uneven(numbers, hook, window=3, optimizer="SGD").check(Join)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_last_incomplete_window_is_stepped_by_those_that_end_it(hook: str) -> None:
    for numbers in ([5, 7], [7, 3], [1, 2]):
        Uneven(numbers, hook, window=4, last_incomplete=True).check(Join)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_parameters_that_only_the_joined_rank_has_used(hook: str) -> None:
    for numbers in ([5, 8], [3, 12]):
        Uneven(numbers, hook, window=4, model=Branches, ddp={"find_unused_parameters": True}).check(Join)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_windows_of_backwards_that_all_reduce(hook: str) -> None:
    for numbers in ([4, 8], [6, 9], [2, 6]):
        Uneven(numbers, hook, window=2, always_reduces=True).check(Join)


@pytest.mark.ranks(2, backend="gloo")
def test_clipping_of_windows() -> None:
    class Clipped(Uneven):
        def clipped(self) -> None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.1)

    Clipped([5, 8], "none", window=4, clip=0.1).check(Join)
    Uneven([5, 8], "owner", window=4, clip=0.1).check(Join)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_torchs_context_where_windows_end_evenly(hook: str) -> None:
    for numbers in ([4, 8], [8, 8], [8, 4]):
        Uneven(numbers, hook, window=4).check(TorchJoin)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[1:])
def test_torchs_context_with_a_hook_of_ours(hook: str) -> None:
    for numbers in UNEVEN_WINDOWS:
        Uneven(numbers, hook, window=4).check(TorchJoin)


@pytest.mark.ranks(2, backend="gloo")
def test_what_torchs_context_would_leave_out_is_an_error_on_every_rank(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    with pytest.raises(RuntimeError, match=r"ran out of data with a gradient .* use zeroshard_integrations.join.Join"):
        Uneven([5, 8], "none", window=4, group=group).train(TorchJoin)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_windows_of_backwards_that_all_reduce_with_the_mean_of_those_that_run(hook: str) -> None:
    for numbers in ([2, 6], [8, 4], *([[0, 6]] if hook == "none" else [])):
        Uneven(numbers, hook, window=2, always_reduces=True, divide_by_initial=False).check(Join)


def mean_over(params: Iterable[torch.Tensor], local: list[torch.Tensor], share: int) -> None:
    """Add what was accumulated, divided by the number of ranks, to the reduced gradients."""
    for param, sum_ in zip(params, local, strict=True):
        param.grad = sum_ / share if param.grad is None else param.grad + sum_ / share
        sum_.zero_()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
@pytest.mark.parametrize("divide", [True, False])
def test_windows_in_which_some_backwards_reduce(rank: int, hook: str, divide: bool) -> None:
    # Rank 0 runs out at the end of a window, and within one, behind a backward under no_sync().
    for numbers in ([3, 9], [5, 9], [6, 5]):
        uneven = Uneven(numbers, hook)
        with Join([uneven.ddp, uneven.optimizer], divide_by_initial_world_size=divide):
            for number in range(numbers[rank]):
                with uneven.ddp.no_sync() if number % 3 == 1 else nullcontext():
                    uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                if number % 3 == 2:
                    uneven.optimizer.step()
                    uneven.optimizer.zero_grad()
        params = list(uneven.plain_model.parameters())
        local = [torch.zeros_like(param) for param in params]
        for number in range(max(numbers)):
            running = [other for other in range(2) if number < numbers[other]]
            for other in running:
                grads = torch.autograd.grad(uneven.loss(uneven.plain_model, inputs(number, other)), params)
                for sum_, grad in zip(local, grads, strict=True):
                    sum_ += grad
            if number % 3 != 1:
                mean_over(params, local, 2 if divide else len(running))
            if number % 3 == 2:
                uneven.plain.step()
                uneven.plain.zero_grad()
        assert uneven.distance() < 1e-12, numbers


class Boxed:
    """What nothing can look into that does not know it."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class ReturnsAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, batch: torch.Tensor) -> Boxed:
        return Boxed(self.inner(batch))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_models_that_return_objects(hook: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).output.square().mean()
        return result

    for numbers in ([5, 8], [8, 6]):
        uneven = Uneven(numbers, hook, window=4, model=ReturnsAnObject, loss=loss)
        uneven.check(Join)
        assert all(not param._backward_hooks for param in uneven.ddp.parameters())


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_window_that_began_before_the_block(rank: int, hook: str) -> None:
    for numbers in ([0, 2], [2, 0], [2, 2]):
        uneven = Uneven([2, 2], hook)
        # What is there of a step is none of it.
        uneven.train(Join)
        uneven.optimizer.zero_grad()
        uneven.reference()
        for begins, lengths in ((True, [1, 1]), (False, numbers)):
            with Join([uneven.ddp, uneven.optimizer]):
                for number in range(lengths[rank]):
                    ends = not begins and number == 1
                    with nullcontext() if ends else uneven.ddp.no_sync():
                        uneven.loss(uneven.ddp, inputs(number + 10 * begins, rank)).backward()
                    if ends:
                        uneven.optimizer.step()
            for number in range(max(lengths)):
                for other in range(2):
                    if number < lengths[other]:
                        (uneven.loss(uneven.plain_model, inputs(number + 10 * begins, other)) / 2).backward()
        uneven.plain.step()
        assert uneven.distance() < 1e-12, numbers


@pytest.mark.ranks(2, backend="gloo")
def test_stepped_gradients_that_are_left_do_not_begin_a_window(rank: int) -> None:
    uneven = Uneven([0, 3], "none")
    for other in range(2):
        (uneven.loss(uneven.plain_model, inputs(20, other)) / 2).backward()
    uneven.loss(uneven.ddp, inputs(20, rank)).backward()
    uneven.optimizer.step()
    uneven.plain.step()
    with Join([uneven.ddp, uneven.optimizer]):
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
    uneven.reference()
    assert uneven.distance() < 1e-12


@pytest.mark.ranks(2, backend="gloo")
def test_hooks_of_ddp_in_cpp() -> None:
    for numbers in ([6, 8], [4, 8], [8, 5]):
        uneven = Uneven(numbers, "none", window=4)
        uneven.ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        uneven.check(Join)
