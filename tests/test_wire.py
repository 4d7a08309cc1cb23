"""How tensors get from rank to rank: by messages, and by reading a peer's memory, with the same results."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeroshard_comm.choice
import zeroshard_comm.wire
from ddp_training import HOOKS, Twins
from torch import optim
from training import assert_bitwise_equal, cutting, set_gradients, small_model, twins
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import Control, DisagreementError, PeerLostError, RankGroup, Wire, connect, wire_of
from zeroshard_comm.cross_memory import SWITCH, ProcessMemory, read_into
from zeroshard_testing import Faults, assert_replicas_equal

TAG = 0x5A530050
LENGTHS = (1, 1000, zeroshard_comm.wire.WORTH_READING - 1, zeroshard_comm.wire.WORTH_READING, 5_000_003)


def connected(group: dist.ProcessGroup | None = None) -> Wire:
    ranks = RankGroup.of(group)
    connect(Control(ranks))
    return wire_of(ranks)


def reading(group: dist.ProcessGroup | None = None) -> Wire:
    wire = connected(group)
    if not wire.reads:
        refusal = first_refusal()
        assert refusal, "every rank can read the next one's memory, and connect() has not found it out"
        pytest.skip(f"this kernel does not let processes of one user read each other's memory: {refusal}")
    return wire


def first_refusal() -> str:
    """Let every rank read from the next one, without what is tested; return the first error, alike on all ranks."""
    here = torch.ones(1)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (os.getpid(), here.data_ptr()))
    said: list[Any] = [None] * dist.get_world_size()
    mine = ""
    try:
        read_into(torch.zeros(1), *places[(dist.get_rank() + 1) % dist.get_world_size()])
    except OSError as refusal:
        mine = str(refusal)
    dist.all_gather_object(said, mine)
    return next(filter(None, said), "")


@pytest.fixture(params=["read", "sent"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every tensor, however small, is read from its sender's memory, or none is: in the end this is asserted."""
    wanted = str(request.param)
    monkeypatch.setattr(zeroshard_comm.wire, "WORTH_READING", 1)
    monkeypatch.setattr(zeroshard_comm.choice, "WORTH_READING", 1)
    monkeypatch.setenv(SWITCH, "1" if wanted == "read" else "0")
    if wanted == "read":
        # Before reads are counted: it tries one.
        reading()
    read: list[int] = []

    def counting(buffer: torch.Tensor, process: int, address: int) -> None:
        read.append(buffer.nbytes)
        read_into(buffer, process, address)

    def counting_whole(memory: ProcessMemory) -> None:
        read.append(0)
        read_whole(memory)

    read_whole = ProcessMemory.read
    monkeypatch.setattr(zeroshard_comm.wire, "read_into", counting)
    monkeypatch.setattr(ProcessMemory, "read", counting_whole)
    yield wanted
    assert bool(read) == (wanted == "read"), f"{len(read)} tensors were read"


@pytest.mark.ranks(3, backend="gloo")
def test_ranks_of_one_machine_read_each_other(rank: int) -> None:
    wire = reading()
    assert set(wire.processes) == wire.readers == set(wire.ranks.peers)
    # Once per process group.
    assert wire_of(wire.ranks).processes is connected().processes


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_with_the_switch_neither_reads_nor_is_read(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reading()
    if rank == 1:
        monkeypatch.setenv(SWITCH, "0")
    wire = connected(dist.new_group())
    assert set(wire.processes) == wire.readers == ({0, 2} - {rank} if rank != 1 else set())
    assert all_to_all(wire) == [0, 1, 2]


@pytest.mark.ranks(3, backend="gloo")
def test_messages_of_one_tag_are_matched_in_order(rank: int, way: str) -> None:
    wire = connected()
    if way == "sent":
        assert not wire.reads
        assert not wire.readers
    assert all_to_all(wire) == [0, 1, 2]


@pytest.mark.ranks(3, backend="gloo")
def test_long_and_short_messages_of_one_tag(rank: int) -> None:
    assert all_to_all(connected()) == [0, 1, 2]


def all_to_all(wire: Wire) -> list[int]:
    """Send tensors of all lengths from every rank to every other; return the ranks whose values came as they were."""
    rank = wire.ranks.rank

    def values(sender: int, nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(sender))

    arriving = {
        (peer, nbytes): torch.zeros(nbytes, dtype=torch.uint8) for nbytes in LENGTHS for peer in wire.ranks.peers
    }
    receives = [wire.receive(peer, buffer, TAG, "a test") for (peer, _), buffer in arriving.items()]
    own = {nbytes: values(rank, nbytes) for nbytes in LENGTHS}
    sends = [wire.send(peer, own[nbytes], TAG, "a test") for nbytes in LENGTHS for peer in wire.ranks.peers]
    for message in receives + sends:
        message.wait("a test")
    # Whoever has waited for a send may change what was sent.
    for buffer in own.values():
        buffer.zero_()
    dist.barrier()
    wrong = {peer for (peer, nbytes), found in arriving.items() if not torch.equal(found, values(peer, nbytes))}
    return [peer for peer in range(wire.ranks.world_size) if peer not in wrong]


@pytest.mark.ranks(2, backend="gloo")
def test_a_send_ends_when_its_receiver_has_read(rank: int) -> None:
    wire = reading()
    values = torch.full((100_000,), float(rank))
    if rank == 0:
        message = wire.send(1, values, TAG, "a test")
        ended = threading.Event()
        thread = threading.Thread(target=lambda: (message.wait("a test"), ended.set()))
        thread.start()
        # Rank 1 has posted its receive, and has not waited for it.
        dist.barrier()
        assert not ended.wait(0.2)
        dist.barrier()
        thread.join()
    else:
        message = wire.receive(0, values, TAG, "a test")
        dist.barrier()
        dist.barrier()
        message.wait("a test")
        assert torch.equal(values, torch.zeros(100_000))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("is_pinned", [False, True])
def test_messages_are_waited_for_in_any_order(rank: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = reading()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: is_pinned)
    values = [torch.full((100_000,), float(number)) for number in range(1, 4)]
    if rank == 0:
        sends = [wire.send(1, value, TAG, "a test") for value in values]
        for number in (1, 2, 0):
            sends[number].wait("a test")
            # Whoever has waited for it may change it.
            values[number].fill_(99)
            dist.barrier()
    else:
        receives = [wire.receive(0, buffer, TAG, "a test") for buffer in [torch.zeros(100_000) for _ in values]]
        for number in (1, 2, 0):
            receives[number].wait("a test")
            dist.barrier()
        assert [message._buffer.unique().tolist() for message in receives] == [[1.0], [2.0], [3.0]]  # type: ignore[attr-defined]


# Rank 1 refuses what rank 0 offers, and never answers it.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_lengths_that_differ_are_told(rank: int) -> None:
    wire = reading()
    values = torch.zeros(100_000 + rank)
    message = wire.send(1, values, TAG, "a test") if rank == 0 else wire.receive(0, values, TAG, "a test")
    if rank == 1:
        with pytest.raises(DisagreementError, match="rank 0 has offered 400000 bytes where rank 1 expects 400004"):
            message.wait("a test")
    dist.barrier()


# Rank 1 cannot read what rank 0 offers, and never answers it.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_memory_that_cannot_be_read_after_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = reading()
    values = torch.zeros(100_000)
    if rank == 0:
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 16)
    message = wire.send(1, values, TAG, "a test") if rank == 0 else wire.receive(0, values, TAG, "a test")
    if rank == 1:
        with pytest.raises(PeerLostError, match=r"rank 1 could not read what rank 0 .*Bad address.*CROSS_MEMORY=0"):
            message.wait("a test")
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
def test_memory_of_a_device_driver_is_sent(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no such memory without a device; here all memory of rank 0 is said to be of that kind.
    if rank == 0:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert all_to_all(reading()) == [0, 1]


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_peer_that_ends_before_it_was_read(rank: int, faults: Faults) -> None:
    faults.kill(1, at="barrier")
    wire = reading()
    values = torch.zeros(100_000)
    message = wire.receive(1, values, TAG, "a test") if rank == 0 else wire.send(0, values, TAG, "a test")
    if rank == 1:
        dist.barrier()
    # What it had said before it ended may have come, while its memory was still there.
    later = wire.receive(1, values, TAG, "a test")

    def wait() -> None:
        message.wait("a test")
        later.wait("a test")

    with pytest.raises(PeerLostError, match="rank 0 lost rank 1 during a test"):
        wait()


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_peer_that_does_not_read_within_the_timeout(rank: int) -> None:
    wire = reading(dist.new_group(timeout=timedelta(seconds=2)))
    values = torch.zeros(100_000)
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 0 lost rank 1 during a test"):
            wire.send(1, values, TAG, "a test").wait("a test")
    else:
        wire.receive(0, values, TAG, "a test")
    dist.barrier()


@pytest.mark.ranks(2, 4, backend="gloo")
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_steps_are_the_same_in_both_ways(rank: int, way: str, partition: str) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, partition=cutting(partition))
    plain = optim.Adam(pair[1].parameters())
    for step in range(3):
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step()
    assert_bitwise_equal(*pair, "after 3 steps")
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_hooks_do_the_same_in_both_ways(rank: int, way: str, hook: str, partition: str) -> None:
    twins = Twins(hook, partition=partition)
    for number in range(6):
        twins.iterate(number)
    twins.check("after 6 iterations")


@pytest.mark.ranks(2, backend="gloo")
def test_bytes_are_counted_alike_in_both_ways(rank: int, way: str) -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, partition=cutting("split"))
    before = sharded.traffic.of("share").bytes_sent
    set_gradients(model.parameters(), 0)
    sharded.step()
    shared = sum(4 * shard.numel for shard in sharded.plan.of_rank(rank))
    assert sharded.traffic.of("share").bytes_sent - before == shared


@pytest.mark.ranks(2, backend="gloo")
def test_a_slow_reader_never_sees_what_an_owner_has_freed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reading()

    class Doubling(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(2)

    def slowly(memory: ProcessMemory) -> None:
        time.sleep(0.3)
        read(memory)

    read = ProcessMemory.read
    if rank == 1:
        monkeypatch.setattr(ProcessMemory, "read", slowly)
    indices = torch.arange(4000).repeat(2)[None]
    sparse = torch.nn.Parameter(torch.sparse_coo_tensor(indices, torch.ones(8000, 64), (4000, 64)))
    dense = torch.nn.Parameter(torch.ones(1 << 18))
    for param in (sparse, dense):
        param.grad = torch.zeros_like(param)
    sharded = ZeroRedundancyOptimizer([sparse, dense], Doubling, lr=0.1)
    for step in (1, 2):
        sharded.step()
        assert torch.equal(sparse.detach().to_dense(), torch.full((4000, 64), 2.0 * 2**step))
        assert torch.equal(dense.detach(), torch.full((1 << 18,), 2.0**step))
