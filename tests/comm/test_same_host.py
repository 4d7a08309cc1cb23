"""Ranks that read each other's memory train to the bit as those that send, and say so where they cannot."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import EVERY_HOOK, HOOKS_AND_PARTITIONS, Twins, batch, train
from support.reduction import mean, values_of
from support.training import small_model
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import (
    Coordinator,
    PeerLostError,
    RankGroup,
    transport,
)
from zeroshard_comm.messages import CHUNK_BYTES
from zeroshard_comm.process_memory import SWITCH
from zeroshard_comm.same_host import SameHostReducer, probe_peer_memory, scratch_memory
from zeroshard_comm.same_host import all_read as all_ranks_read
from zeroshard_core import Run
from zeroshard_testing import Faults


@pytest.fixture
def all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read however little there is; skip where the kernel does not let processes read each other."""
    coordinator = Coordinator(RankGroup.of())
    coordinator.agree("a test")
    probe_peer_memory(coordinator)
    if not all_ranks_read(RankGroup.of()):
        pytest.skip("this kernel does not let processes of one user read each other's memory")
    monkeypatch.setattr(transport, "WORTH_READING", 1)


def reducer(runs: list[Run], dtype: torch.dtype = torch.float64) -> SameHostReducer:
    return SameHostReducer(Coordinator(RankGroup.of()), runs, dtype, scratch_memory())


@pytest.mark.exhaustive_at(2, 4)
@pytest.mark.ranks(2, 3, 4, backend="gloo")
@HOOKS_AND_PARTITIONS
@pytest.mark.usefixtures("all_read")
def test_hooks_train_as_ddp_does(hook: str, partition: str) -> None:
    twins = Twins(hook, partition=partition)
    train(twins, last=6)
    assert isinstance(twins.optimizer._engine.exchange.buckets.by_index[0].reducer, SameHostReducer)


class Alternating(nn.Module):
    """Uses other layers in every forward, and on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
        self.numbers = count()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        number = next(self.numbers)
        for place, layer in enumerate(self.layers):
            if (number + place + dist.get_rank()) % 3:
                inputs = layer(inputs)
        return inputs


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
@pytest.mark.usefixtures("all_read")
def test_gradients_that_come_and_go_are_told(hook: str) -> None:
    twins = Twins(hook, model=Alternating, ddp={"find_unused_parameters": True})
    for number in range(8):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.usefixtures("all_read")
def test_what_is_lent_may_be_written_as_soon_as_backward_returns() -> None:
    twins = Twins()
    for number in range(5):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            ddp(batch(number)).square().mean().backward()
            buckets = twins.optimizer._engine.exchange.buckets.arrived if ddp is twins.ddp else []
            for state in buckets:
                for tensor, offset, param in zip(state.tensors, state.offsets, state.params, strict=True):
                    if tensor not in state.owned_gradients():
                        state.buffer[offset : offset + param.numel()].fill_(float("nan"))
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.usefixtures("all_read")
def test_parameters_are_lent_until_all_have_read_them_where_a_step_is_refused(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins("hook_with_zero_step_interleaved")
    twins.iterate(0)
    twins.iterate(1)
    agreed: list[str] = []
    agree = Coordinator.agree

    def noted(coordinator: Coordinator, operation: str, *arguments: Any, **keywords: Any) -> bool:
        agreed.append(operation)
        return agree(coordinator, operation, *arguments, **keywords)

    monkeypatch.setattr(Coordinator, "agree", noted)
    if rank == 1:
        twins.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="the members of param_groups"):
        twins.backward(twins.ddp, 2)
    assert [each for each in agreed if each.endswith("step()")] == ["step()", "the end of step()"]


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.usefixtures("all_read")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owners_hold_the_mean_in_rank_order(rank: int, world_size: int, dtype: torch.dtype) -> None:
    runs, end = [], 0
    for size in (1, 7, 1000, 300_000, CHUNK_BYTES // dtype.itemsize + 5):
        for owner in range(world_size):
            runs.append(Run(owner, end, end + size))
            end += size + 1
    reading, expected = reducer(runs, dtype), mean(world_size, end, dtype)
    for _ in range(3):
        # In a place of its own each time, as buckets that DDP lays out anew.
        bucket = values_of(rank, end, dtype)
        read(reading, bucket)
        for run in runs:
            if run.rank == rank:
                assert torch.equal(bucket[run.start : run.stop], expected[run.start : run.stop]), run
    theirs = sum(run.stop - run.start for run in runs if run.rank != rank)
    assert reading.coordinator.traffic.of("reduce").bytes_sent == 3 * theirs * dtype.itemsize


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.usefixtures("all_read")
@pytest.mark.parametrize("moment", ["before it has said where", "before others have read"])
def test_a_rank_that_ends_while_others_read_is_named(rank: int, moment: str, faults: Faults) -> None:
    reading, bucket = reducer([Run(0, 0, 1000), Run(2, 1000, 2000)]), values_of(rank, 2000)
    faults.kill(rank=1, at="send")
    if rank == 1:
        if moment == "before others have read":
            reading.exchange_addresses(bucket)
        dist.isend(torch.zeros(1), 0)
    with pytest.raises(PeerLostError, match="rank 1"):
        read(reading, bucket)


def read(reading: SameHostReducer, bucket: torch.Tensor) -> None:
    work = reading.begin(bucket)
    work.finish()
    work.close()
    reading.coordinator.agree("the end")


@pytest.mark.ranks(3, backend="gloo", isolation="process")
def test_a_switch_on_one_rank_keeps_all_from_reading(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        monkeypatch.setenv(SWITCH, "0")
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    assert not all_ranks_read(RankGroup.of(sharded.process_group))
