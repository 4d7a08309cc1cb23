"""Gradient accumulation on uneven inputs: what a rank had accumulated when it ran out counts."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from datetime import timedelta

import pytest
import torch.distributed as dist
from join_training import HOOKS, Branches, Uneven
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
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
