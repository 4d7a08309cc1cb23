"""The two moves of a sharded step, by every exchange, and the transfer of state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.training import set_gradients, small_model
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import (
    CollectiveBroadcaster,
    Coordinator,
    DisagreementError,
    Manifest,
    MessageBroadcaster,
    ParameterBroadcaster,
    PeerLostError,
    RankGroup,
    Segment,
    agree,
    choose_broadcaster,
    gather,
    message_exchange,
    values,
)
from zeroshard_comm.messages import pack_pieces
from zeroshard_comm.same_host import PeerMemory, SameHostBroadcaster, all_read, probe_peer_memory
from zeroshard_core import TensorSpec, partition

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float64]
LENGTHS = [(0, 5), (1, 70_000), (1, 0), (0, 3), (1, 64)]

Make = Callable[[Coordinator, list[Segment]], ParameterBroadcaster]


def same_host(coordinator: Coordinator, segments: list[Segment]) -> ParameterBroadcaster:
    probe_peer_memory(coordinator)
    assert all_read(coordinator.ranks)
    return SameHostBroadcaster(coordinator, segments)


def in_place(coordinator: Coordinator, segments: list[Segment]) -> ParameterBroadcaster:
    with mock.patch.object(message_exchange, "pack_pieces", partial(pack_pieces, pack_below=0)):
        return MessageBroadcaster(coordinator.ranks, segments, coordinator.traffic)


BROADCASTERS: dict[str, Make] = {
    "messages": lambda coordinator, segments: MessageBroadcaster(coordinator.ranks, segments, coordinator.traffic),
    "messages in place": in_place,
    "collectives": lambda coordinator, segments: CollectiveBroadcaster(
        coordinator.ranks, segments, coordinator.traffic
    ),
    "same host": same_host,
}
MADE_BY = pytest.mark.parametrize("made_by", BROADCASTERS)


@pytest.mark.by_default(
    "2-torch.float32-messages | 2-torch.complex64-collectives | 2-torch.bool-messages | "
    "4-torch.bfloat16-messages in place | 4-torch.int64-same host | 4-torch.float64-messages in place"
)
@pytest.mark.ranks(2, 4, backend="gloo")
@MADE_BY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast_brings_every_rank_the_owners_values(rank: int, made_by: str, dtype: torch.dtype) -> None:
    coordinator = Coordinator(RankGroup.of())
    # Owners hold unlike amounts, and ranks 2 and 3 nothing. Their numbers differ in every dtype, bool included.
    segments = [Segment(owner, torch.empty(n, dtype=dtype)) for owner, n in LENGTHS]
    broadcaster = BROADCASTERS[made_by](coordinator, segments)
    for turn in range(2):
        for segment in segments:
            segment.buffer.copy_(torch.full((len(segment.buffer),), (rank + turn) % 2).to(dtype))
        broadcaster.broadcast()
        coordinator.agree("what an owner may not write before")
        for segment in segments:
            assert torch.equal(segment.buffer, torch.full_like(segment.buffer, (segment.owner + turn) % 2))


@pytest.mark.ranks(3, backend="gloo")
@MADE_BY
def test_traffic_is_what_the_segments_say(rank: int, made_by: str) -> None:
    coordinator = Coordinator(RankGroup.of())
    broadcaster = BROADCASTERS[made_by](coordinator, [Segment(0, torch.zeros(10)), Segment(1, torch.zeros(20))])
    broadcaster.broadcast()
    coordinator.agree("what an owner may not write before")
    owned, everything = (40, 80, 0)[rank], 120
    broadcast = coordinator.traffic.of("broadcast")
    assert (broadcast.bytes_sent, broadcast.bytes_received) == (owned * 2, everything - owned)


@pytest.mark.ranks(4, backend="gloo")
@MADE_BY
def test_ranks_are_group_ranks_in_a_subgroup(rank: int, made_by: str) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        ranks = RankGroup.of(group)
        assert (ranks.rank, ranks.global_rank, ranks.peers) == (rank // 2, rank, (1 - rank // 2,))
        buffer = torch.tensor([float(rank)])
        coordinator = Coordinator(ranks)
        BROADCASTERS[made_by](coordinator, [Segment(1, buffer)]).broadcast()
        coordinator.agree("what an owner may not write before")
        assert buffer.item() == 3.0
    else:
        with pytest.raises(RuntimeError, match="not a member"):
            RankGroup.of(group)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("lengths", "read", "expected"),
    [
        ([1000], True, MessageBroadcaster),
        ([1 << 17, 1000], True, SameHostBroadcaster),
        ([1 << 17, 1000], False, MessageBroadcaster),
    ],
    ids=["small", "large", "not readable"],
)
def test_the_broadcaster_follows_from_sizes_and_from_who_can_read_whom(
    lengths: list[int], read: bool, expected: type[ParameterBroadcaster]
) -> None:
    coordinator = Coordinator(RankGroup.of())
    if read:
        probe_peer_memory(coordinator)
    else:
        coordinator.ranks.context.shared(PeerMemory).is_known = True
    segments = [Segment(0, torch.zeros(length)) for length in lengths]
    assert type(choose_broadcaster(coordinator, segments, torch.device("cpu"))) is expected


@pytest.mark.ranks(2, backend="gloo")
def test_memory_that_cannot_be_read_says_what_to_do(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    buffer = torch.zeros(100_000)
    broadcaster = same_host(coordinator, [Segment(0, buffer)])
    # A place in the first page belongs to nobody, as the memory of a device driver cannot be read.
    with mock.patch.object(torch.Tensor, "data_ptr", return_value=16 if rank == 0 else buffer.data_ptr()):
        broadcaster.begin()
        broadcaster.send()
    if rank == 1:
        with pytest.raises(
            PeerLostError, match=r"rank 1 could not read memory of rank 0 .*Set ZEROSHARD_CROSS_MEMORY=0"
        ):
            broadcaster.arrive()


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_without_a_backend_for_the_device_says_so() -> None:
    cpu_only = dist.new_group(backend="cpu:gloo")
    with pytest.raises(RuntimeError, match="no backend for tensors on 'cuda'"):
        choose_broadcaster(Coordinator(RankGroup.of(cpu_only)), [], torch.device("cuda"))


@pytest.mark.ranks(16, backend="fake")
def test_a_fake_group_is_told_from_a_real_one() -> None:
    ranks = RankGroup.of()
    assert not ranks.moves_data()
    coordinator = Coordinator(ranks)
    assert coordinator.is_single_rank
    choose_broadcaster(coordinator, [Segment(3, torch.zeros(4))], torch.device("cpu")).broadcast()


@pytest.mark.ranks(3, backend="gloo")
def test_agree_names_the_ranks_and_the_first_difference(rank: int) -> None:
    specs = [TensorSpec("a", (4,), torch.float32), TensorSpec("b", (3 if rank == 2 else 5,), torch.float32)]
    with pytest.raises(DisagreementError, match=r"rank 2 differs from rank 0: tensor 1 'b': shape \(5,\) here"):
        agree(partition(specs, 3))
    agree(partition(specs[:1], 3))
    with pytest.raises(DisagreementError, match="ranks 1, 2 differ from rank 0: depth is 0 on rank 0 and 1 on rank 1"):
        agree(partition(specs[:1], 3), settings={"depth": min(rank, 1)})


def odd_tensors(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = torch.randn(2, 3, 4, 5, generator=generator)
    return [
        made.to(memory_format=torch.channels_last),
        made[0].double(),
        torch.tensor(float(rank)),
        torch.zeros(0),
        torch.arange(1000 * (rank + 1), dtype=torch.int32),
        torch.tensor([True, False]),
    ]


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("chunk_bytes", [16, 1 << 20])
def test_gather_brings_tensors_of_any_kind_bit_for_bit(
    rank: int, world_size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "CHUNK_BYTES", chunk_bytes)
    tensors = odd_tensors(rank)
    rooms: dict[int, list[torch.Tensor]] = {}

    def place(source: int, description: Any) -> Sequence[torch.Tensor]:
        assert description == {"from": source}
        rooms[source] = [torch.empty(t.numel(), dtype=t.dtype) for t in odd_tensors(source)]
        return rooms[source]

    coordinator = Coordinator(RankGroup.of())
    gather(coordinator, Manifest({"from": rank}, tensors), 1, place)
    if rank == 1:
        for source in range(world_size):
            for room, tensor in zip(rooms[source], odd_tensors(source), strict=True):
                in_storage_order = tensor.as_strided((tensor.numel(),), (1,)) if tensor.dim() else tensor.view(1)
                assert torch.equal(room, in_storage_order)
    else:
        assert coordinator.traffic.of("state").bytes_sent >= sum(t.nbytes for t in tensors)


@pytest.mark.ranks(3, backend="gloo")
def test_a_target_without_room_is_an_error_on_every_rank(rank: int) -> None:
    def place(source: int, description: Any) -> Sequence[torch.Tensor]:
        raise MemoryError(f"no room for what rank {source} sends")

    coordinator = Coordinator(RankGroup.of())
    with pytest.raises(MemoryError, match="rank 0: no room for what rank 0 sends"):
        gather(coordinator, Manifest(None, [torch.zeros(3)]), 0, place)
    coordinator.agree("afterwards")


@pytest.mark.ranks(2, backend="gloo")
def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    set_gradients(model.parameters(), 0)
    sharded.step()
    sharded.consolidate_state_dict()
    assert set(threading.enumerate()) == before
