"""Uneven inputs end where a single process would have ended, with our context manager and with torch's."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_by_collectives import STEPPING, without_tags
from ddp_training import register
from join_training import HOOKS, Uneven, inputs
from torch import nn, optim
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from training import small_model
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join

pytestmark = pytest.mark.pairwise
CONTEXTS: dict[str, Any] = {"torchs": TorchJoin, "ours": Join}
EVERY_CONTEXT = pytest.mark.parametrize("context", CONTEXTS)
EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
GAPS = (0, 1, 3, 10)


def lengths(world_size: int, gap: int, first: int = 3) -> list[int]:
    """Rank 0 has the fewest batches, the last rank the most."""
    return [first + gap * rank // max(world_size - 1, 1) for rank in range(world_size)]


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torchs"])
def test_beside_what_torch_gives(ours: bool) -> None:
    uneven = Uneven([3, 8], "none")
    if ours:
        uneven.check(Join)
        return
    uneven.optimizer = TorchZero(uneven.ddp.parameters(), optim.Adam, lr=1e-2, weight_decay=0.01)
    uneven.train(TorchJoin)
    uneven.reference()
    # The rank without data has stepped its shard with the gradients of its last batch.
    assert 1e-4 < uneven.distance() < 1


@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_CONTEXT
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_clipping_and_schedules(world_size: int, context: str, hook: str) -> None:
    class Clipped(Uneven):
        def clipped(self) -> None:
            if self.hook == "none":
                nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.1)
            else:
                super().clipped()

    for numbers in (lengths(world_size, 4), lengths(world_size, 4)[::-1]):
        Clipped(numbers, hook, clip=0.1, schedule=True).check(CONTEXTS[context])


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
@EVERY_HOOK
def test_schedules(context: str, hook: str) -> None:
    Uneven([2, 6], hook, schedule=True, partition="split").check(CONTEXTS[context])


@pytest.mark.ranks(4, backend="gloo")
@EVERY_CONTEXT
@EVERY_HOOK
@pytest.mark.parametrize(
    ("partition", "divide"),
    [
        pytest.param(partition, divide, marks=[pytest.mark.exhaustive] if number else [])
        for number, (partition, divide) in enumerate(product(["whole", "split", "hybrid"], [True, False]))
    ],
)
def test_on_subgroups(rank: int, context: str, hook: str, partition: str, divide: bool) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    numbers = [[3, 5], [4, 2]][rank % 2]
    uneven = Uneven(numbers, hook, group=groups[rank % 2], partition=partition, divide_by_initial=divide)
    uneven.check(CONTEXTS[context])


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
@EVERY_CONTEXT
@EVERY_HOOK
def test_other_kinds_of_ddp(context: str, hook: str, options: dict[str, bool]) -> None:
    for numbers in ([3, 6], [4, 3]):
        Uneven(numbers, hook, ddp=options).check(CONTEXTS[context])


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
def test_two_models_and_their_optimizers(rank: int, context: str) -> None:
    numbers = [3, 5]
    pairs = [Uneven(numbers, "none", optimizer="SGD"), Uneven(numbers, "none")]
    joinables: list[Any] = [pair.ddp for pair in pairs]
    with CONTEXTS[context]([*joinables, *[pair.optimizer for pair in pairs]]):
        for number in range(numbers[rank]):
            for pair in pairs:
                pair.optimizer.zero_grad()
                pair.loss(pair.ddp, inputs(number, rank)).backward()
            for pair in pairs:
                pair.optimizer.step()
    for pair in pairs:
        pair.reference()
        assert pair.distance() < 1e-12


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_joinables_are_called_in_any_order(rank: int, hook: str) -> None:
    numbers = [2, 5]
    first, second = Uneven(numbers, hook), Uneven(numbers, hook, optimizer="SGD")
    with Join([first.ddp, second.ddp, first.optimizer, second.optimizer]):
        for number in range(numbers[rank]):
            # The second alone from time to time.
            for pair in (second, first) if number % 2 else (second,):
                pair.optimizer.zero_grad()
                pair.loss(pair.ddp, inputs(number, rank)).backward()
                pair.optimizer.step()
    for number in range(max(numbers)):
        for pair in (second, first) if number % 2 else (second,):
            pair.plain.zero_grad()
            for other in range(2):
                if number < numbers[other]:
                    (pair.loss(pair.plain_model, inputs(number, other)) / 2).backward()
            pair.plain.step()
    assert max(first.distance(), second.distance()) < 1e-12


@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_CONTEXT
def test_an_optimizer_without_ddp(rank: int, world_size: int, context: str) -> None:
    model, plain = (small_model().double() for _ in range(2))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=1e-2)
    reference = optim.Adam(plain.parameters(), lr=1e-2)
    numbers = lengths(world_size, 4)
    with CONTEXTS[context]([sharded]):
        for number in range(numbers[rank]):
            for made, optimizer in ((model, sharded), (plain, reference)):
                optimizer.zero_grad()
                made(inputs(number, 0)).square().mean().backward()
                optimizer.step()
    for number in range(numbers[rank], max(numbers)):
        reference.zero_grad()
        plain(inputs(number, 0)).square().mean().backward()
        reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
def test_sparse_gradients_of_a_rank_that_had_batches(rank: int, context: str) -> None:
    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(20, 3, sparse=True)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model((batch[:, 0].abs() * 19 % 20).long()).square().mean()
        return result

    Uneven([2, 5], "none", model=table, loss=loss, optimizer="SGD without decay").check(CONTEXTS[context])


@pytest.mark.ranks(2, backend="gloo")
def test_the_block_tells_who_runs_and_leaves_nothing_behind(rank: int) -> None:
    import warnings

    uneven = Uneven([2, 5], "none", divide_by_initial=False)
    filters = list(warnings.filters)
    seen: list[int] = []
    with Join([uneven.ddp, uneven.optimizer], divide_by_initial_world_size=False) as join:
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            seen.append(join.running)
            uneven.optimizer.step()
    assert seen == ([2, 2] if rank == 0 else [2, 2, 1, 1, 1])
    assert (join.running, join.shadowed_steps) == (0, 0 if rank else 3)
    assert warnings.filters == filters
    assert not uneven.ddp._join_config.enable
    assert not uneven.optimizer._join_config.enable
    assert not uneven.ddp._forward_hooks
    if rank == 0:
        # Nobody else takes part.
        with torch.no_grad():
            uneven.ddp(inputs(0, 0))
    # The mean is that of all ranks again.
    uneven.reference()
    uneven.optimizer.zero_grad()
    uneven.plain.zero_grad()
    uneven.loss(uneven.ddp, inputs(9, rank)).backward()
    for other in range(2):
        (uneven.loss(uneven.plain_model, inputs(9, other)) / 2).backward()
    uneven.optimizer.step()
    uneven.plain.step()
    assert uneven.distance() < 1e-12


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
def test_disabled_it_does_nothing(rank: int, context: str) -> None:
    uneven = Uneven([3, 3], "none")
    join = CONTEXTS[context]
    uneven.check(lambda joinables, **kwargs: join(joinables, enable=False, **kwargs))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_a_block_that_is_entered_again_and_one_that_never_is(rank: int, hook: str) -> None:
    uneven = Uneven([2, 4], hook)
    joinables: list[Any] = [uneven.ddp, uneven.optimizer]
    with Join(joinables, enable=False, divide_by_initial_world_size=False):
        pass
    Join(joinables, divide_by_initial_world_size=False)
    assert getattr(uneven.ddp, "_divide_by_initial_world_size", True)
    assert not uneven.optimizer._sharded.joining.divides_by_running
    uneven.divide_by_initial = False
    join = Join(joinables, divide_by_initial_world_size=False)
    for _ in range(2):
        uneven.train(lambda joinables, **kwargs: join)
        uneven.reference()
        assert uneven.distance() < 1e-12
        assert join.shadowed_steps == (0 if rank else 2)
    assert getattr(uneven.ddp, "_divide_by_initial_world_size", True)
    assert not uneven.optimizer._sharded.joining.divides_by_running


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
def test_two_blocks_one_after_the_other(rank: int, context: str) -> None:
    uneven = Uneven([2, 4], "none")
    uneven.train(CONTEXTS[context])
    uneven.reference()
    uneven.lengths = [3, 1]
    uneven.check(CONTEXTS[context])


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
@EVERY_HOOK
def test_two_blocks_with_gradients_zeroed_behind_the_step(rank: int, context: str, hook: str) -> None:
    uneven = Uneven([2, 4], hook)
    for epoch, numbers in enumerate(([2, 4], [3, 2], [1, 2])):
        with CONTEXTS[context]([uneven.ddp, uneven.optimizer]):
            for number in range(numbers[rank]):
                uneven.loss(uneven.ddp, inputs(10 * epoch + number, rank)).backward()
                uneven.optimizer.step()
                uneven.optimizer.zero_grad()
        for number in range(max(numbers)):
            for other in range(2):
                if number < numbers[other]:
                    (uneven.loss(uneven.plain_model, inputs(10 * epoch + number, other)) / 2).backward()
            uneven.plain.step()
            uneven.plain.zero_grad()
    assert uneven.distance() < 1e-12


@pytest.mark.ranks(2, backend="gloo")
def test_models_called_without_gradients_inside_the_block(rank: int) -> None:
    uneven = Uneven([2, 5], "owner")
    with Join([uneven.ddp, uneven.optimizer]):
        for number in range(uneven.lengths[rank]):
            with torch.no_grad():
                uneven.ddp(inputs(77, rank))
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
    uneven.reference()
    assert uneven.distance() < 1e-12
    assert isinstance(uneven.ddp, DistributedDataParallel)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
@pytest.mark.parametrize("hook", ["behind", "interleaved"])
def test_hooks_that_reduce_on_all_ranks(context: str, hook: str) -> None:
    uneven = Uneven([2, 5], "none", divide_by_initial=False)
    uneven.optimizer = ZeroRedundancyOptimizer(
        uneven.ddp.parameters(), optim.Adam, overlap_with_ddp=True, lr=1e-2, weight_decay=0.01
    )
    register(hook, uneven.ddp, uneven.optimizer, own_mean)
    uneven.check(CONTEXTS[context])


def own_mean(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@pytest.mark.ranks(1, backend="gloo")
@EVERY_CONTEXT
@EVERY_HOOK
def test_one_rank(context: str, hook: str) -> None:
    Uneven([4], hook, schedule=True).check(CONTEXTS[context])


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
@pytest.mark.parametrize("divide", [True, False])
def test_a_model_with_the_plain_optimizer(rank: int, context: str, divide: bool) -> None:
    # The others' steps are not shadowed; the model is brought along at the end, as with torch's.
    uneven = Uneven([2, 5], "none", divide_by_initial=divide)
    plain = optim.Adam(uneven.ddp.parameters(), lr=1e-2, weight_decay=0.01)
    with CONTEXTS[context]([uneven.ddp], divide_by_initial_world_size=divide):
        for number in range(uneven.lengths[rank]):
            plain.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            plain.step()
    uneven.reference()
    assert uneven.distance() < 1e-12


@pytest.mark.ranks(3, backend="gloo")
def test_closures(rank: int) -> None:
    for hook in ("none", "owner"):
        uneven = Uneven([2, 5, 4], hook)
        with Join([uneven.ddp, uneven.optimizer]):
            for number in range(uneven.lengths[rank]):

                def closure(uneven: Uneven = uneven, number: int = number) -> torch.Tensor:
                    uneven.optimizer.zero_grad()
                    loss = uneven.loss(uneven.ddp, inputs(number, rank))
                    loss.backward()
                    return loss

                uneven.optimizer.step(closure)
        uneven.reference()
        assert uneven.distance() < 1e-12


@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_CONTEXT
@pytest.mark.parametrize("hook", HOOKS[1:])
def test_gradients_that_travel_by_collectives(world_size: int, context: str, hook: str) -> None:
    for numbers, divide in ((lengths(world_size, 3), True), ([0, *[3] * (world_size - 1)], False)):
        with without_tags():
            uneven = Uneven(numbers, hook, divide_by_initial=divide, partition="split")
            uneven.optimizer.follow_backward(STEPPING[hook])
        uneven.check(CONTEXTS[context])


class Scaled(optim.SGD):
    """Takes an argument in its step."""

    def step(self, closure: Any = None, scale: Any = 1.0) -> Any:
        for group in self.param_groups:
            group["before"], group["lr"] = group["lr"], float(group["lr"]) * float(scale)
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] = group.pop("before")
        return result


@pytest.mark.ranks(2, backend="gloo")
@EVERY_CONTEXT
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_arguments_of_steps_and_numbers_of_numpy(rank: int, context: str, hook: str) -> None:
    for numbers in ([2, 5], [5, 2]):
        uneven = Uneven(numbers, "none")
        uneven.optimizer = ZeroRedundancyOptimizer(uneven.ddp.parameters(), Scaled, lr=0.1)
        uneven.plain = Scaled(uneven.plain_model.parameters(), lr=0.1)
        if hook != "none":
            register(hook, uneven.ddp, uneven.optimizer)
        with CONTEXTS[context]([uneven.ddp, uneven.optimizer]):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                for group in uneven.optimizer.param_groups:
                    group["lr"] = np.float32(0.1 / (number + 1))
                uneven.optimizer.step(scale=[0.5, np.float64(0.25), torch.tensor(0.75)][number % 3])
        for number in range(max(numbers)):
            uneven.plain.zero_grad()
            for other in range(2):
                if number < numbers[other]:
                    (uneven.loss(uneven.plain_model, inputs(number, other)) / 2).backward()
            for group in uneven.plain.param_groups:
                group["lr"] = float(np.float32(0.1 / (number + 1)))
            uneven.plain.step(scale=[0.5, 0.25, 0.75][number % 3])
        assert uneven.distance() < 1e-12
