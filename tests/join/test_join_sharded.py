"""Uneven inputs with sharded gradients end where one process ends that sees the batches of all ranks."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from support.training import cutting
from torch import nn, optim
from zeroshard import GradientSharding, ZeroRedundancyOptimizer, shard_gradients
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

LENGTHS = {
    "even": lambda rank, _: 3,
    "rank 0 is last": lambda rank, ranks: 2 + 2 * (ranks - 1 - rank),
    "rank 0 is first": lambda rank, _: 1 + 2 * rank,
    "rank 0 has none": lambda rank, _: 2 * rank,
}


class Model(nn.Module):
    """Has buffers that a forward changes, and a parameter that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))
        self.sometimes = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        result: torch.Tensor = self.body(inputs).square().sum()
        return result + self.sometimes(inputs).sum() if inputs[0, 0] > 0 else result


def batches_of(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [*torch.randn(count, 4, 6, generator=generator, dtype=torch.float64).unbind()]


class Training:
    """What a loop uses: one model and optimizer, sharded or not."""

    def __init__(self, partition: str = "") -> None:
        self.model = Model().double()
        self.sharding: GradientSharding | None = None
        if partition:
            self.optimizer: optim.Optimizer = ZeroRedundancyOptimizer(
                self.model.named_parameters(), optim.AdamW, lr=1e-2, partition=cutting(partition)
            )
            # A forward that broadcasts buffers is announced, and one that does not is not.
            self.sharding = shard_gradients(
                self.model, self.optimizer, bucket_mb=1e-3, broadcast_buffers=partition != "split"
            )
        else:
            self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sharding.no_sync() if self.sharding is not None else nullcontext()

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        self.optimizer.step()


Backward = Callable[[int], None]


def plain(training: Training, numbers: Sequence[int], backward: Backward) -> None:
    for number in numbers:
        training.optimizer.zero_grad()
        backward(number)
        training.step()


def clipped(training: Training, numbers: Sequence[int], backward: Backward) -> None:
    for number in numbers:
        training.optimizer.zero_grad(set_to_none=False)
        backward(number)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        nn.utils.clip_grad_value_(training.model.parameters(), 0.02)
        training.step()


def clipped_by_the_optimizer(training: Training, numbers: Sequence[int], backward: Backward) -> None:
    for number in numbers:
        training.optimizer.zero_grad()
        backward(number)
        if isinstance(training.optimizer, ZeroRedundancyOptimizer):
            training.optimizer.clip_grad_norm_(0.5)
        else:
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        training.step()


def accumulated(training: Training, numbers: Sequence[int], backward: Backward) -> None:
    """Three backwards before a step: one unsynchronized, one that reduces, and one that adds to that."""
    training.optimizer.zero_grad()
    for number in numbers:
        with training.no_sync():
            backward(number)
        backward(number + 50)
        for param in training.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        backward(number + 100)
        training.step()
        training.optimizer.zero_grad(set_to_none=number % 2 == 0)


def scaled(training: Training, numbers: Sequence[int], backward: Backward) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number in numbers:
        training.optimizer.zero_grad()
        scaler.scale(torch.ones((), dtype=torch.float64))
        scale = scaler.get_scale()
        backward(number)
        for param in training.model.parameters():
            if param.grad is not None:
                param.grad.mul_(scale)
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        scaler.step(training.optimizer)
        scaler.update()


def changed_weights(training: Training, numbers: Sequence[int], backward: Backward) -> None:
    for number in numbers:
        training.optimizer.zero_grad()
        backward(number)
        training.step()
        with torch.no_grad():
            for param in training.model.parameters():
                param.clamp_(-0.2, 0.2)


LOOPS = [plain, clipped, clipped_by_the_optimizer, accumulated, scaled, changed_weights]


@pytest.mark.by_default(
    "2-of all-even-plain-whole | 2-of all-even-scaled-split | "
    "2-of all-rank 0 is first-clipped_by_the_optimizer-level | "
    "3-of those that run-rank 0 is last-clipped-split | "
    "3-of those that run-rank 0 is last-changed_weights-level | "
    "3-of those that run-rank 0 has none-accumulated-whole"
)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("partition", ["whole", "split", "level"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("divide", [True, False], ids=["of all", "of those that run"])
def test_uneven_inputs_end_as_in_one_process(
    rank: int, world_size: int, partition: str, loop: Callable[..., None], lengths: str, divide: bool
) -> None:
    counts = [LENGTHS[lengths](each, world_size) for each in range(world_size)]
    every = [batches_of(each, 200) for each in range(world_size)]
    training, reference = Training(partition), Training()

    def sharded(number: int) -> None:
        training.model(every[rank][number]).backward()

    def replicated(number: int) -> None:
        here = [batches[number] for batches, count in zip(every, counts, strict=True) if number % 50 < count]
        share = 1 / (world_size if divide else len(here))
        (share * torch.stack([reference.model(batch) for batch in here]).sum()).backward()

    assert training.sharding is not None
    for _ in range(2):
        with training.sharding.join(divide_by_initial_world_size=divide):
            loop(training, range(counts[rank]), sharded)
        loop(reference, range(max(counts)), replicated)
        training.optimizer.zero_grad()
        reference.optimizer.zero_grad()
    names = dict(reference.model.named_parameters())
    for name, param in training.model.named_parameters():
        # One process adds up gradients in another order than the reduction.
        torch.testing.assert_close(param, names[name], rtol=1e-10, atol=1e-12, msg=name)
    assert_replicas_equal([*training.model.parameters(), *training.model.buffers()])


# ---------------------------------------------------------------------- errors


def train(training: Training, batches: Sequence[torch.Tensor], **options: bool) -> None:
    assert training.sharding is not None
    with training.sharding.join(**options):
        for batch in batches:
            training.optimizer.zero_grad()
            training.model(batch).backward()
            training.step()


@pytest.mark.ranks(2, backend="gloo")
def test_a_backward_after_the_block_averages_over_all_ranks(rank: int) -> None:
    training, batch = Training("split"), batches_of(7, 1)[0]
    train(training, batches_of(rank, 1 + rank), divide_by_initial_world_size=False)
    plain = copy.deepcopy(training.model)
    plain(batch).backward()
    training.optimizer.zero_grad()
    training.model(batch).backward()
    norms = [
        nn.utils.get_total_norm([p.grad for p in each.parameters() if p.grad is not None])
        for each in (training.model, plain)
    ]
    torch.testing.assert_close(*norms)


@pytest.mark.ranks(2, backend="gloo")
def test_every_rank_raises_as_soon_as_one_has_run_out(rank: int) -> None:
    training = Training("split")
    with pytest.raises(RuntimeError, match="rank 0 has run out of data"):
        train(training, batches_of(rank, 2 + rank), throw_on_early_termination=True)
    # The block can be entered again.
    train(training, batches_of(rank, 1 + rank))
    assert_replicas_equal(training.model.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_with_other_settings_are_told(rank: int) -> None:
    with pytest.raises(DisagreementError, match="divide_by_initial_world_size=False"):
        train(Training("split"), batches_of(rank, 1), divide_by_initial_world_size=rank == 0)


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_that_no_backward_has_reduced_are_refused(rank: int) -> None:
    training = Training("split")
    assert training.sharding is not None
    with pytest.raises(RuntimeError, match="gradients that no backward has reduced"), training.sharding.join():
        for batch in batches_of(rank, 1 + rank):
            with training.sharding.no_sync():
                training.model(batch).backward()
            if rank == 1:
                training.model(batch).backward()


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("place", ["before forward", "after backward"])
def test_an_exception_on_one_rank_is_raised_on_all(rank: int, place: str) -> None:
    training = Training("whole")
    assert training.sharding is not None
    with pytest.raises(ValueError, match="file 7 is damaged"), training.sharding.join():
        for number, batch in enumerate(batches_of(rank, 1 + 2 * rank)):
            if rank == 2 and number == 2 and place == "before forward":
                raise ValueError("file 7 is damaged")
            training.optimizer.zero_grad()
            training.model(batch).backward()
            if rank == 2 and number == 2:
                raise ValueError("file 7 is damaged")
            training.step()


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_with_data_that_make_other_calls_are_told(rank: int) -> None:
    training = Training("whole")
    assert training.sharding is not None
    with pytest.raises(DisagreementError, match="make a step"), training.sharding.join():
        training.model(batches_of(rank, 1)[0]).backward()
        if rank == 0:
            training.step()
        else:
            training.model(batches_of(rank, 1)[0]).backward()


@pytest.mark.ranks(2, backend="gloo")
def test_calls_that_need_all_ranks_are_refused(rank: int) -> None:
    training = Training("whole")
    assert training.sharding is not None
    with pytest.raises(RuntimeError, match="need all ranks, but a rank has run out of data"), training.sharding.join():
        if rank == 1:
            training.optimizer.load_state_dict(training.optimizer.state_dict())


@pytest.mark.ranks(2, backend="gloo")
def test_a_block_in_a_block_is_refused() -> None:
    training = Training("whole")
    assert training.sharding is not None
    with training.sharding.join(), pytest.raises(RuntimeError, match="already in a join"), training.sharding.join():
        pass
