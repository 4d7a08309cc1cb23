"""Buckets of gradients reach their owners as means, in few messages and little memory."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from support.reduction import mean, values_of
from zeroshard_comm import MessageReducer, PeerLostError, RankGroup, Traffic
from zeroshard_comm.message_exchange import WINDOW_BYTES, ReceiveWindow
from zeroshard_comm.messages import CHUNK_BYTES, PACKED_BYTES
from zeroshard_core import Run
from zeroshard_testing import Faults


def reduced(runs: list[Run], values: torch.Tensor, *, window: int = 2 * CHUNK_BYTES) -> torch.Tensor:
    """What this rank's bucket holds behind a reduction."""
    ranks = RankGroup.of()
    receives = ReceiveWindow(ranks, window)
    reduction = MessageReducer(ranks, runs, values.dtype, receives, Traffic())
    bucket = values.clone()
    underway = reduction.begin(bucket)
    underway.finish()
    underway.close()
    return bucket


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owners_hold_the_mean_in_rank_order(rank: int, world_size: int, dtype: torch.dtype) -> None:
    # Small runs of all owners in turn, one large run for each, and one that takes several messages.
    runs, end = [], 0
    for number in range(30):
        size = (1, 7, 1000)[number % 3]
        runs.append(Run(number % world_size, end, end + size))
        end += size + number % 2
    for owner in range(world_size):
        runs.append(Run(owner, end, end + 300_000 // dtype.itemsize))
        end = runs[-1].stop
    runs.append(Run(world_size - 1, end, end + 2 * CHUNK_BYTES // dtype.itemsize + 5))
    end = runs[-1].stop
    bucket = reduced(runs, values_of(rank, end, dtype))
    expected = mean(world_size, end, dtype)
    for run in runs:
        if run.rank == rank:
            assert torch.equal(bucket[run.start : run.stop], expected[run.start : run.stop]), run


@pytest.mark.ranks(3, backend="gloo")
def test_the_sum_does_not_depend_on_the_owner(rank: int) -> None:
    sums = []
    for owner in range(3):
        bucket = reduced([Run(owner, 0, 1000)], values_of(rank, 1000))
        dist.broadcast(bucket, src=owner)
        sums.append(bucket)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@pytest.mark.ranks(2, backend="gloo")
def test_an_empty_bucket_and_owners_of_nothing(rank: int) -> None:
    assert torch.equal(reduced([], values_of(rank, 3)), values_of(rank, 3))
    bucket = reduced([Run(1, 0, 3)], values_of(rank, 3))
    assert torch.equal(bucket, mean(2, 3) if rank == 1 else values_of(0, 3))


@pytest.mark.ranks(4, backend="gloo")
def test_a_window_holds_no_more_than_its_limit(rank: int) -> None:
    ranks = RankGroup.of()
    window = ReceiveWindow(ranks, 2 * CHUNK_BYTES)
    # Everything belongs to rank 3, whose sum of the ranks before needs a place of its own.
    numel = 5 * CHUNK_BYTES // 4
    reduction = MessageReducer(ranks, [Run(3, 0, numel)], torch.float32, window, Traffic())
    bucket = torch.full((numel,), rank + 1.0)
    underway = reduction.begin(bucket)
    assert (0 < window._held <= 2 * CHUNK_BYTES) if rank == 3 else window._held == 0
    underway.finish()
    underway.close()
    assert window._held == 0
    assert torch.equal(bucket, torch.full((numel,), 2.5 if rank == 3 else rank + 1.0))
    assert len(window._free.get(CHUNK_BYTES, ())) <= 2


@pytest.mark.ranks(4, backend="gloo")
def test_every_owner_may_have_less_room_than_there_are_peers(rank: int, world_size: int) -> None:
    numel = 3 * CHUNK_BYTES // 8
    runs = [Run(owner, owner * numel, (owner + 1) * numel) for owner in range(4)]
    values = values_of(rank, 4 * numel)
    bucket = reduced(runs, values)
    own = slice(rank * numel, (rank + 1) * numel)
    assert torch.equal(bucket[own], mean(world_size, 4 * numel)[own])


@pytest.mark.ranks(2, backend="gloo")
def test_a_window_keeps_no_more_memory_than_its_limit(rank: int) -> None:
    ranks = RankGroup.of()
    window = ReceiveWindow(ranks, 1000)
    for numel in range(20, 60):
        # Each length is new.
        runs = [Run(0, 0, numel), Run(1, numel, 2 * numel)]
        reduction = MessageReducer(ranks, runs, torch.float32, window, Traffic())
        underway = reduction.begin(torch.ones(2 * numel))
        underway.finish()
        underway.close()
    assert 0 < sum(scratch.nbytes for free in window._free.values() for scratch in free) <= 1000


@pytest.mark.ranks(2, backend="gloo")
def test_a_reduced_bucket_is_not_kept(rank: int) -> None:
    # DDP replaces its buckets once, and has no memory to spare then.
    ranks = RankGroup.of()
    window = ReceiveWindow(ranks, 2 * CHUNK_BYTES)
    reduction = MessageReducer(ranks, [Run(0, 0, 40), Run(1, 40, 100)], torch.float64, window, Traffic())
    bucket = torch.ones(100, dtype=torch.float64)
    underway = reduction.begin(bucket)
    underway.finish()
    underway.close()
    kept = weakref.ref(bucket)
    del bucket, underway
    assert kept() is None


@pytest.mark.ranks(2, backend="gloo")
def test_buckets_follow_each_other_from_two_threads(rank: int) -> None:
    ranks = RankGroup.of()
    window = ReceiveWindow(ranks, 2 * CHUNK_BYTES)
    reduction = MessageReducer(ranks, [Run(0, 0, 40), Run(1, 40, 100_000)], torch.float64, window, Traffic())
    buckets = [values_of(rank, 100_000) * number for number in range(20)]
    waiting = [reduction.begin(bucket) for bucket in buckets]

    def finish() -> None:
        for underway in waiting:
            underway.finish()

    worker = threading.Thread(target=finish)
    worker.start()
    worker.join()
    for number, (bucket, underway) in enumerate(zip(buckets, waiting, strict=True)):
        underway.close()
        own = slice(0, 40) if rank == 0 else slice(40, 100_000)
        terms = [values_of(other, 100_000) * number / 2 for other in range(2)]
        assert torch.equal(bucket[own], (terms[0] + terms[1])[own])


@pytest.mark.ranks(2, backend="gloo")
def test_a_rank_that_dies_is_named(rank: int, faults: Faults) -> None:
    faults.kill(1, "send#1")
    with pytest.raises(PeerLostError, match=r"rank 0 lost rank 1 during backward\(\)"):
        reduced([Run(0, 0, 100_000)], values_of(rank, 100_000))


def test_the_window_has_room_for_two_messages_and_is_small() -> None:
    assert 2 * max(CHUNK_BYTES, PACKED_BYTES) <= WINDOW_BYTES <= 16 * 1024 * 1024
