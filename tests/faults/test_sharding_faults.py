"""Sharded gradients under faults: a late rank changes nothing, and all raise if one is gone or returns early."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.training import cutting, small_model
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard.grads.held import HeldBucket
from zeroshard_comm import DisagreementError, PeerLostError, transport
from zeroshard_comm.message_exchange import MessageReduceWork
from zeroshard_testing import Faults, assert_replicas_equal

BUCKET_MB = 0.02
READS = pytest.mark.parametrize("reads", [False, True], ids=["messages", "reads"])


@pytest.fixture(autouse=True)
def travels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models be read by other ranks too, if the test says so."""
    reads = "reads" in request.fixturenames and request.getfixturevalue("reads")
    monkeypatch.setattr(transport, "WORTH_READING", 1 if reads else 2**60)


def short_group() -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=3))


class Training:
    """A model whose gradients are sharded, and the same one, which one process trains with the batches of all ranks."""

    def __init__(self, *, has_buffers: bool = False, process_group: dist.ProcessGroup | None = None) -> None:
        self.model, self.plain = (made(has_buffers=has_buffers) for _ in range(2))
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.named_parameters(),
            optim.AdamW,
            lr=1e-2,
            partition=cutting("split"),
            process_group=process_group,
        )
        shard_gradients(self.model, self.optimizer, bucket_mb=BUCKET_MB)
        self.plain_optimizer = optim.AdamW(self.plain.parameters(), lr=1e-2)

    def backward(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(batch(number, dist.get_rank())).square().mean().backward()

    def iterate(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()

    def iterate_plain(self, number: int) -> None:
        self.plain_optimizer.zero_grad()
        size = dist.get_world_size()
        for rank in range(size):
            (self.plain(batch(number, rank)).square().mean() / size).backward()
        self.plain_optimizer.step()

    def check(self) -> None:
        assert_replicas_equal(self.model.parameters())
        for ours, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def batch(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 40, generator=generator, dtype=torch.float64)


def made(*, has_buffers: bool = False) -> nn.Module:
    model = small_model()
    if has_buffers:
        model.insert(1, nn.BatchNorm1d(64))
    return model.double()


@pytest.mark.ranks(3, backend="gloo")
@READS
def test_a_rank_that_is_late_in_backward_is_waited_for(rank: int, reads: bool) -> None:
    training = Training()
    late = 0

    def wait(_: torch.Tensor) -> None:
        if rank == late:
            time.sleep(0.2)

    training.model[2].weight.register_hook(wait)
    for late in range(3):
        training.iterate(late)
        training.iterate_plain(late)
    training.check()


@pytest.mark.by_default("3-0")
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 4))])
def test_random_delays_of_one_rank_change_nothing(seed: int, faults: Faults) -> None:
    training = Training()
    for number in range(20):
        slow = (seed + number) % dist.get_world_size()
        for operation in ("send", "recv"):
            faults.delay(slow, f"{operation}#{1 + (7 * number + seed) % 9}", (0.0, 0.01), seed=number)
        training.iterate(number)
        training.iterate_plain(number)
    training.check()


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_that_dies_in_backward(rank: int, faults: Faults) -> None:
    training = Training(process_group=short_group())
    training.iterate(0)
    training.iterate(1)
    faults.kill(1, "send#2")
    with pytest.raises(PeerLostError, match=rf"rank {rank} lost rank"):
        training.iterate(2)


# What is not sent leaves messages without another end.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
def test_no_thread_waits_for_a_bucket_that_could_not_be_sent(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.iterate(0)
    if rank == 1:
        # As when the other rank is gone after it has sent all of its values. The two threads may raise either error.
        monkeypatch.setattr(MessageReduceWork, "close", mock.Mock(side_effect=PeerLostError("cable pulled")))
    with pytest.raises(PeerLostError, match=r"cable pulled|lost rank"):
        training.iterate(1)
    with pytest.raises(PeerLostError, match="build the optimizer again"):
        training.optimizer.step()


# What is not sent leaves messages without another end.
@pytest.mark.by_default("2-pack-False-messages | 2-accept-True-reads")
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages no:collectives no:deadlock")
@READS
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("method", ["pack", "accept"])
def test_no_rank_waits_after_an_error_of_another(
    rank: int, reads: bool, threads: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 0 if threads else 2**60)
    training, began = Training(), time.monotonic()
    training.iterate(0)
    if rank == 1:
        monkeypatch.setattr(HeldBucket, method, mock.Mock(side_effect=MemoryError("no memory is left")))
    with pytest.raises(MemoryError if rank == 1 else PeerLostError, match=r"no memory is left|lost rank 1"):
        training.iterate(1)
    assert time.monotonic() - began < 10


@pytest.mark.by_default("3-False-messages | 3-True-reads")
@pytest.mark.ranks(3, backend="gloo")
@READS
@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_rank_that_returns_early_from_its_loop(rank: int, reads: bool, has_buffers: bool) -> None:
    training = Training(has_buffers=has_buffers, process_group=short_group())
    training.iterate(0)
    # Ranks that broadcast buffers wait for each other there, before they agree to begin.
    words = r"did not call backward\(\) within 3 s|lost .* during" if has_buffers else "^rank 1 did not call"
    if rank != 1:
        with pytest.raises(PeerLostError, match=words):
            training.iterate(1)
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
@READS
def test_a_rank_that_skips_step(rank: int, reads: bool) -> None:
    training = Training(process_group=short_group())
    training.iterate(0)
    training.backward(1)
    call = training.optimizer.step if rank == 0 else partial(training.backward, 2)
    with pytest.raises(DisagreementError, match=r"^rank 0 called step\(\) .*; rank 1 called backward\(\)"):
        call()
