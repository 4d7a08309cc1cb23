"""Uneven inputs end where one process would have ended that sees the batches of all ranks, whatever the loop."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.join_training import (
    EVERY_ENDING,
    EVERY_MEAN,
    EVERY_PARTITION,
    PARTITIONS,
    Branches,
    Loop,
    Uneven,
    inputs,
    lengths_of,
    never_zero,
    usual,
)
from support.training import small_model
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

# ---------------------------------------------------------------------- one forward, backward and step


class Normed(nn.Module):
    """With running statistics, which DDP sends around from a rank that has data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(40, affine=False), nn.Linear(40, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        result: torch.Tensor = self.out(self.norm(batch))
        return result


MODELS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (small_model, {}),
    (Branches, {"find_unused_parameters": True}),
    (Normed, {}),
]
GAPS: list[Callable[[int], list[int]]] = [
    lambda ranks: [3] * ranks,
    lambda ranks: [3 + (rank == ranks - 1) for rank in range(ranks)],
    lambda ranks: [3 * (ranks - 1 - rank) // (ranks - 1) + 2 for rank in range(ranks)],
    lambda ranks: [1 + 10 * rank // (ranks - 1) for rank in range(ranks)],
    lambda ranks: [0, *[3 + rank for rank in range(1, ranks)]],
]
COMBINATIONS = list(product(PARTITIONS, [True, False], range(len(MODELS)), ("Adam", "SGD")))


@pytest.mark.by_default(
    "2-Adam-small_model-of all-whole | 3-SGD-Branches-of those that run-split | 4-Adam-Normed-of all-whole"
)
@pytest.mark.ranks(2, 3, 4, backend="gloo")
@EVERY_PARTITION
@EVERY_MEAN
@pytest.mark.parametrize("kind", range(len(MODELS)), ids=[model.__name__ for model, _ in MODELS])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_models_optimizers_and_partitions_end_as_in_one_process(
    world_size: int, partition: str, divide: bool, kind: int, optimizer: str
) -> None:
    place = COMBINATIONS.index((partition, divide, kind, optimizer)) + world_size
    model, options = MODELS[kind]
    uneven = Uneven(
        GAPS[place % len(GAPS)](world_size),
        model=model,
        optimizer=optimizer,
        partition=partition,
        divide=divide,
        ddp=options,
    )
    uneven.check(usual)
    if model is Normed:
        assert_replicas_equal(uneven.ddp.module.buffers())
        assert uneven.ddp.module.seen == max(uneven.lengths)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_ENDING
def test_clipping_and_schedules_go_on_until_all_have_ended(world_size: int, ending: int) -> None:
    def clipped(loop: Loop, number: int) -> None:
        loop.zero()
        loop.backward(number)
        loop.clip()
        loop.step()

    Uneven(lengths_of(world_size)[ending], schedule=True).check(clipped)


@pytest.mark.ranks(4, backend="gloo")
@EVERY_PARTITION
def test_subgroups_end_each_for_itself(rank: int, partition: str) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    numbers = [[3, 5], [4, 2]][rank % 2]
    Uneven(numbers, group=groups[rank % 2], partition=partition, divide=False).check(usual)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("numbers", "options"),
    [([3, 6], {"gradient_as_bucket_view": False}), ([4, 1], {"static_graph": True})],
    ids=["copies", "static graph"],
)
def test_other_kinds_of_ddp_end_alike(options: dict[str, bool], numbers: list[int]) -> None:
    Uneven(numbers, ddp=options).check(usual)


@pytest.mark.ranks(1, backend="gloo")
def test_one_rank_trains_alone() -> None:
    Uneven([4]).check(usual)


@pytest.mark.ranks(2, backend="gloo")
def test_a_model_with_the_plain_optimizer_is_brought_along(rank: int) -> None:
    # The others' steps are not shadowed; the model is brought along at the end.
    for divide in (True, False):
        uneven = Uneven([2, 5], divide=divide)
        plain = optim.Adam(uneven.ddp.parameters(), lr=1e-2, weight_decay=0.01)
        with Join([uneven.ddp], divide_by_initial_world_size=divide):
            for number in range(uneven.lengths[rank]):
                plain.zero_grad()
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                plain.step()
        uneven.refer(usual)
        uneven.compare()


@pytest.mark.ranks(2, 3, backend="gloo")
def test_an_optimizer_without_a_model_steps_on_all_ranks(rank: int, world_size: int) -> None:
    model, plain = (small_model().double() for _ in range(2))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=1e-2)
    reference = optim.Adam(plain.parameters(), lr=1e-2)

    def iterate(made: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        made(inputs(number, 0)).square().mean().backward()
        optimizer.step()

    numbers = lengths_of(world_size)[0]
    with Join([sharded]):
        for number in range(numbers[rank]):
            iterate(model, sharded, number)
    for number in range(max(numbers)):
        iterate(plain, reference, number)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.ranks(2, backend="gloo")
def test_several_blocks_follow_each_other_of_which_one_is_disabled() -> None:
    def script(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()
        loop.zero()

    uneven = Uneven([1, 4])
    for numbers in ([1, 4], [2, 2], [0, 3], [3, 1]):
        uneven.lengths, uneven.arguments = numbers, {"enable": False} if numbers == [2, 2] else {}
        uneven.check(script)


# ---------------------------------------------------------------------- the block itself


@pytest.mark.ranks(2, backend="gloo")
def test_the_block_tells_who_runs_and_leaves_nothing_behind(rank: int) -> None:
    uneven, filters, seen = Uneven([2, 5], divide=False), list(warnings.filters), []
    hooks = list(uneven.ddp._forward_hooks)
    joinables: list[Any] = [uneven.ddp, uneven.optimizer]
    with Join(joinables, enable=False, divide_by_initial_world_size=False):
        pass
    join = Join(joinables, divide_by_initial_world_size=False)

    def script(loop: Loop, number: int) -> None:
        loop.zero()
        loop.backward(number)
        if join.running:
            seen.append(join.running)
        loop.step()

    # Entered twice.
    for _ in range(2):
        uneven.check(script, lambda joinables, **arguments: join)
        assert join.running == 0
    assert seen == ([2, 2] if rank == 0 else [2, 2, 1, 1, 1]) * 2
    assert warnings.filters == filters
    assert not uneven.ddp._join_config.enable
    assert not uneven.optimizer._join_config.enable
    assert list(uneven.ddp._forward_hooks) == hooks
    assert all(not param._backward_hooks for param in uneven.ddp.parameters())
    if rank == 0:
        # The others take no part in it.
        with torch.no_grad():
            uneven.ddp(inputs(0, 0))
    # The mean is that of all ranks again.
    uneven.lengths, uneven.divide, uneven.arguments = [2, 2], True, {"enable": False}
    uneven.check(usual)


@pytest.mark.ranks(3, backend="gloo")
@EVERY_ENDING
def test_gradients_are_the_same_on_all_ranks_after_the_block(world_size: int, ending: int) -> None:
    def zeroed(loop: Loop, number: int) -> None:
        usual(loop, number)
        loop.zero()

    for script in (usual, zeroed, never_zero):
        uneven = Uneven(lengths_of(world_size)[ending])
        uneven.check(script)
        grads = [param.grad for param in uneven.ddp.parameters()]
        assert all((grad is None) is (script is zeroed) for grad in grads)
        if script is not zeroed:
            for grad, param in zip(grads, uneven.plain_model.parameters(), strict=True):
                torch.testing.assert_close(grad, param.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2, backend="gloo")
def test_outputs_of_the_block_are_used_after_it(rank: int) -> None:
    uneven = Uneven([3, 3], model=lambda: nn.Linear(40, 5))
    with Join([uneven.ddp, uneven.optimizer]):
        output = uneven.ddp(inputs(9, rank))
    # It needs none of the weights, which DDP has brought from one of the last ranks.
    output.sum().backward()
    assert torch.equal(uneven.ddp.module.bias.grad, torch.full((5,), 8.0, dtype=torch.float64))


def test_the_import_gives_no_warning() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", "import zeroshard_integrations.join"], check=True)
