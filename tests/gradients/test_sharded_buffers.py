"""The memory of buckets of sharded gradients is neither written nor freed while it may be read, by any transport.

`Contract` watches what `zeroshard_comm.interfaces` asks of whoever uses a reducer. Each planted error takes away one
thing by which the product keeps that; if no test saw it then, the test of the product would prove nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.buffer_contract import Contract
from support.ddp_training import PARTITIONS
from support.sharded_transports import TRANSPORTS, use_transport
from support.training import cutting
from torch import nn, optim
from zeroshard import GradientSharding, ZeroRedundancyOptimizer, shard_gradients
from zeroshard.grads import sharded, transient
from zeroshard.grads.held import HeldBucket
from zeroshard.grads.sharded import ShardedGradients
from zeroshard.grads.stream import ReductionQueue
from zeroshard.grads.transient import IN_FLIGHT, TransientBuffers
from zeroshard_comm import BucketReduceWork, Coordinator
from zeroshard_comm.same_host import SameHostReducer
from zeroshard_testing import RaceError

PACKED, ALONE = 0.03, 1e-5
"""Sizes of buckets in MiB: for two layers of the model, and for one parameter, which is sent from where it is."""


using = contextlib.contextmanager(use_transport)


# ---------------------------------------------------------------------- what is trained


class Training:
    def __init__(self, device: torch.device, bucket_mb: float, partition: str = "split") -> None:
        self.device, self.model = device, made().to(device)
        named = self.model.named_parameters()
        self.optimizer = ZeroRedundancyOptimizer(named, optim.SGD, lr=0.1, partition=cutting(partition))
        self.sharding: GradientSharding = shard_gradients(self.model, self.optimizer, bucket_mb=bucket_mb)

    def backward(self, number: int) -> None:
        self.model(inputs_of(number, dist.get_rank()).to(self.device)).square().mean().backward()

    def iterate(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(40, 40) for _ in range(12)]).double()


def inputs_of(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 40, generator=generator, dtype=torch.float64)


ITERATIONS = 3
"""In the second one, buckets have the order in which gradients arrive."""


def error_of(training: Training) -> float:
    """How far parameters are from those that one process computes for the batches of all ranks."""
    model, size = made(), dist.get_world_size()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for number in range(ITERATIONS):
        optimizer.zero_grad()
        sum(model(inputs_of(number, rank)).square().mean() / size for rank in range(size)).backward()
        optimizer.step()
    pairs = zip(training.model.parameters(), model.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


CPU = torch.device("cpu")


@pytest.mark.by_default(
    "2-whole-packed-messages | 2-whole-packed-reads | 2-split-alone-messages in turn | 2-split-alone-collectives"
)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("bucket_mb", [PACKED, ALONE], ids=["packed", "alone"])
@PARTITIONS
def test_the_contract_is_kept(name: str, bucket_mb: float, partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = Contract(monkeypatch)
    with using(name, monkeypatch):
        training = Training(CPU, bucket_mb, partition)
        for number in range(ITERATIONS):
            training.iterate(number)
    assert contract.broken == set()
    assert contract.most == (1 if (name, partition) == ("messages", "split") else IN_FLIGHT)
    assert error_of(training) < 1e-12


# ---------------------------------------------------------------------- errors that are planted


def no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is returned, and nobody waits until it has been sent."""
    # gloo loses a message that nobody refers to.
    not_closed: list[BucketReduceWork] = []
    close = ShardedGradients._close

    def returned(source: ShardedGradients, work: BucketReduceWork, *used: torch.Tensor | None) -> None:
        not_closed.append(work)
        close(source, mock.create_autospec(BucketReduceWork, instance=True), *used)

    monkeypatch.setattr(ShardedGradients, "_close", returned)


def return_before_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is returned just before it has been sent."""
    close = ShardedGradients._close

    def returned(source: ShardedGradients, work: BucketReduceWork, *used: torch.Tensor | None) -> None:
        close(source, mock.create_autospec(BucketReduceWork, instance=True), *used)
        work.close()

    monkeypatch.setattr(ShardedGradients, "_close", returned)


def close_before_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is returned before its reduction is finished."""
    close = ShardedGradients._close

    def finished(
        source: ShardedGradients,
        bucket: HeldBucket,
        buffer: torch.Tensor,
        memory: torch.Tensor | None,
        work: BucketReduceWork,
        kept: set[int],
    ) -> None:
        close(source, work, buffer, memory)
        work.finish()
        bucket.accept(buffer, kept)

    monkeypatch.setattr(ShardedGradients, "_finish_bucket", finished)


def return_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By reads, memory is returned when this rank has finished, as by messages."""

    def returned(source: ShardedGradients, work: BucketReduceWork, *used: torch.Tensor | None) -> None:
        work.close()
        source._transient.leave(used[-1])

    monkeypatch.setattr(ShardedGradients, "_close", returned)


def hold_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """By reads, a gradient that was sent from its own memory is freed when this rank has finished."""
    close = ShardedGradients._close
    monkeypatch.setattr(ShardedGradients, "_close", lambda source, work, *used: close(source, work, used[-1]))


def free_before_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """By reads, the memory of the last buckets is freed before all ranks have agreed."""
    agree_to_end = ShardedGradients._agree_to_end

    def agreed(source: ShardedGradients) -> list[tuple[bool, ...]]:
        source._read = (None,)
        source._transient.clear()
        return agree_to_end(source)

    monkeypatch.setattr(ShardedGradients, "_agree_to_end", agreed)


def no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the last buckets."""
    monkeypatch.setattr(ReductionQueue, "drain", lambda _: None)


def lend_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All buckets are lent the same memory."""
    memory = torch.empty(2**20, dtype=torch.uint8)

    def lent(_: TransientBuffers, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return memory, memory[: numel * dtype.itemsize].view(dtype)

    monkeypatch.setattr(TransientBuffers, "lend", lent)


def one_more_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three buckets have memory at one time."""
    monkeypatch.setattr(sharded, "IN_FLIGHT", IN_FLIGHT + 1)
    monkeypatch.setattr(transient, "IN_FLIGHT", IN_FLIGHT + 1)


@dataclass(frozen=True)
class Planted:
    """An error, what the contract says of it (nothing if it only takes more memory), and the transports that show it.

    By default it is planted in the first transport.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    found: str
    transports: tuple[str, ...]
    bucket_mb: float = PACKED


_MESSAGES = TRANSPORTS[:2]
# With a thread, the last buckets may have been finished before anybody looks.
_IN_TURN = TRANSPORTS[1:]
ERRORS = [
    Planted(no_close, "not waited for", TRANSPORTS),
    Planted(no_close, "not waited for", (*_IN_TURN, "messages"), ALONE),
    Planted(return_before_close, "given back", ("collectives", *_MESSAGES)),
    Planted(close_before_finish, "closed too early", ("reads", *_MESSAGES, "collectives")),
    Planted(return_at_once, "given back", ("reads",)),
    Planted(hold_no_gradient, "freed", ("reads",), ALONE),
    Planted(free_before_agreement, "freed", ("reads",)),
    Planted(free_before_agreement, "freed", ("reads",), ALONE),
    Planted(no_drain, "not waited for", _IN_TURN),
    Planted(lend_one, "lent", TRANSPORTS),
    Planted(lend_one, "written", (*_MESSAGES, "reads")),
    # With a thread, buckets may be reduced too fast for three to be on their way.
    Planted(one_more_in_flight, "", ("messages in turn", "collectives")),
]


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param(
            name,
            error,
            id=f"{error.plant.__name__}-{error.found}-{'alone' if error.bucket_mb == ALONE else 'packed'}-{name}",
            marks=[] if name == error.transports[0] else pytest.mark.exhaustive,
        )
        for error in ERRORS
        for name in error.transports
    ],
)
def test_an_error_that_breaks_the_contract_is_found(name: str, error: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(name, monkeypatch):
        with monkeypatch.context() as planted:
            error.plant(planted)
            contract = Contract(planted)
            # A thread has one bucket of cut tensors in flight, and two of whole ones.
            training = Training(CPU, error.bucket_mb, "whole" if name == "messages" else "split")
            with contextlib.suppress(Exception):
                training.backward(0)
        training.sharding._source._queue.drain()
    assert {error.found} - {""} <= contract.broken
    assert contract.broken or contract.most > IN_FLIGHT


# ---------------------------------------------------------------------- errors that are seen in the numbers


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 0 read a bucket only when the others have begun to agree on the next one, or to end the backward."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    agree, add_up = Coordinator.agree, SameHostReducer.add_up
    count = 0

    def agreed(coordinator: Coordinator, *arguments: Any, **options: Any) -> bool:
        nonlocal count
        count += 1
        store.set(f"agreement {count} of rank {rank}", "begun")
        return agree(coordinator, *arguments, **options)

    def added(reducer: SameHostReducer, buffer: torch.Tensor) -> None:
        if rank == 0:
            store.wait([f"agreement {count + 1} of rank {peer}" for peer in range(1, dist.get_world_size())])
        add_up(reducer, buffer)

    monkeypatch.setattr(Coordinator, "agree", agreed)
    monkeypatch.setattr(SameHostReducer, "add_up", added)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("is_planted", [False, True], ids=["right", "wrong"])
def test_a_late_reader_gets_other_numbers_only_if_memory_is_returned_at_once(
    is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using("reads", monkeypatch):
        if is_planted:
            return_at_once(monkeypatch)
        read_late(monkeypatch)
        training = Training(CPU, PACKED, "whole")
        for number in range(ITERATIONS):
            training.iterate(number)
    assert (error_of(training) > 1e-6) == is_planted


@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.xfail(raises=RaceError, strict=True, reason="memory is written while another stream reads it")
def test_memory_that_is_packed_beside_the_stream_that_reads_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransientBuffers, "enter", lambda _: None)
    training = Training(device, PACKED)
    for number in range(ITERATIONS):
        training.iterate(number)
