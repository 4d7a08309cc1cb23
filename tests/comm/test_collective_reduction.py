"""Buckets of gradients reach their owners as means by collectives, on a group that nobody else uses."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.reduction import mean, values_of
from zeroshard_comm import (
    CollectiveReducer,
    RankGroup,
    Traffic,
    choose_private_group,
    collectives,
)
from zeroshard_core import Run

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.exhaustive_at(1, 3)
@pytest.mark.ranks(1, 2, 3, backend="gloo")
@each_of("cut", ["none", "some", "evenly"], dtype=DTYPES, staging=[10_000, collectives.STAGING_BYTES])
def test_owners_hold_the_mean(
    rank: int, world_size: int, dtype: torch.dtype, cut: str, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "STAGING_BYTES", staging)
    # Small runs of all owners in turn, with gaps, and one large run for each.
    runs, end = [], 0
    for number in range(30):
        size = (1, 7, 0, 1000)[number % 4]
        runs.append(Run(number % world_size, end, end + size, is_part=cut != "none" and number % 3 == 0))
        end += size + number % 2
    for owner in range(world_size):
        runs.append(Run(owner, end, end + 10_000 * (1 + 9 * owner), is_part=cut == "evenly"))
        end = runs[-1].stop
    traffic = Traffic()
    ranks = RankGroup.of()
    bucket = values_of(rank, end, dtype)
    reduction = CollectiveReducer(choose_private_group(ranks, CPU), traffic, runs, bucket)
    for _ in range(2):
        bucket = values_of(rank, end, dtype)
        reduction.begin(bucket).finish()
        expected = mean(world_size, end, dtype)
        for run in runs:
            if run.rank == rank and world_size <= 2:
                # A sum of two has no order.
                assert torch.equal(reduction.owned(bucket, run.start, run.stop), expected[run.start : run.stop]), run
            elif run.rank == rank:
                # Two roundings of partial sums of a size of about 1, in an order of the backend's own.
                off = (reduction.owned(bucket, run.start, run.stop) - expected[run.start : run.stop]).abs()
                assert (off <= 4 * torch.finfo(dtype).eps).all(), run
    theirs = sum(run.stop - run.start for run in runs if run.rank != rank)
    assert traffic.of("reduce").bytes_sent == 2 * theirs * dtype.itemsize


@pytest.mark.ranks(2, backend="gloo")
def test_values_of_another_hook_are_kept_without_a_reduction(rank: int) -> None:
    runs = [Run(0, 0, 1000, is_part=True), Run(1, 1000, 2000, is_part=True)]
    bucket, place = values_of(rank, 2000), (1000 * rank, 1000 * (rank + 1))
    reduction = CollectiveReducer(choose_private_group(RankGroup.of(), CPU), Traffic(), runs, bucket)
    reduction.owned(bucket, *place).fill_(3)
    assert torch.equal(reduction.owned(bucket, *place), torch.full((1000,), 3.0, dtype=torch.float64))


@pytest.mark.ranks(5, backend="fake", fake_rank=2)
def test_a_fake_group_needs_no_group_of_its_own() -> None:
    assert choose_private_group(RankGroup.of(), CPU) == RankGroup.of()


@pytest.mark.ranks(4, backend="gloo")
def test_a_group_of_its_own_for_each_purpose(rank: int) -> None:
    # Subgroups too, without the others; and only once.
    halves = [dist.new_group([0, 2], timeout=timedelta(seconds=77)), dist.new_group([1, 3])]
    ranks = RankGroup.of(halves[rank % 2])
    made = ranks.private_group("gloo", "buckets")
    assert made.group is ranks.private_group("gloo", "buckets").group
    assert made.group is not ranks.group
    assert made.group is not ranks.private_group("gloo", "control").group
    assert dist.get_process_group_ranks(made.group) == dist.get_process_group_ranks(ranks.group)
    if rank == 0:
        assert made.group._get_backend(CPU).options._timeout == timedelta(seconds=77)
    context = weakref.ref(ranks.context)
    gone = weakref.ref(ranks.group)
    dist.destroy_process_group(ranks.group)
    del ranks, halves
    # The harness may be looking at the groups of this process just now.
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    assert gone() is None
    assert context() is None


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_that_nccl_would_split_off_without_the_others_is_refused(rank: int) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    world = mock.Mock(bound_device_id="cuda:0", size=lambda: 2)
    with (
        mock.patch.object(dist.group.__class__, "WORLD", world),
        pytest.raises(ValueError, match="leave out device_id"),
    ):
        RankGroup(alone, 0, 1).private_group("nccl", "buckets")


@pytest.mark.ranks(2, backend="gloo")
def test_a_device_without_a_backend_is_refused(rank: int) -> None:
    cpu_only = RankGroup.of(dist.new_group(backend="cpu:gloo"))
    with pytest.raises(RuntimeError, match="no backend for tensors on 'cuda'"):
        choose_private_group(cpu_only, torch.device("cuda"))
