"""State on its way to one rank: every kind of tensor, every target, and what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zeroshard_comm import (
    CollectiveBroadcaster,
    Coordinator,
    Manifest,
    MessageBroadcaster,
    ParameterBroadcaster,
    PeerLostError,
    RankGroup,
    Segment,
    Traffic,
    gather,
    receive_values,
    send_values,
    values,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def of_every_dtype(rank: int) -> list[torch.Tensor]:
    return [torch.arange(rank, rank + 7).remainder(3).to(dtype) for dtype in DTYPES]


def rooms_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(tensor.numel(), dtype=tensor.dtype) for tensor in tensors]


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("target", range(3))
def test_every_dtype_arrives_at_every_target(rank: int, target: int) -> None:
    rooms: dict[int, list[torch.Tensor]] = {}

    def place(source: int, description: Any) -> Sequence[torch.Tensor]:
        rooms[source] = rooms_for(of_every_dtype(source))
        return rooms[source]

    gather(Coordinator(RankGroup.of()), Manifest(None, of_every_dtype(rank)), target, place)
    assert list(rooms) == (list(range(3)) if rank == target else [])
    for source, arrived in rooms.items():
        assert all(map(torch.equal, arrived, of_every_dtype(source)))


@pytest.mark.ranks(3, backend="gloo")
def test_descriptions_travel_as_they_are_and_senders_may_have_nothing(rank: int) -> None:
    description = {"name": "Gewicht \u2211", "nested": [1, None, {"x": 2.5}], "rank": rank}
    heard: list[Any] = []

    def place(source: int, told: Any) -> Sequence[torch.Tensor]:
        heard.append(told)
        return []

    gather(Coordinator(RankGroup.of()), Manifest(description, []), 0, place)
    assert heard == ([{**description, "rank": source} for source in range(3)] if rank == 0 else [])


@pytest.mark.ranks(4, backend="gloo")
def test_the_target_is_a_group_rank(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        rooms = [torch.empty(2), torch.empty(2)]
        mine = Manifest(None, [torch.full((2,), float(rank))])
        gather(Coordinator(RankGroup.of(group)), mine, 1, lambda source, _: [rooms[source]])
        if rank == 3:
            assert [room.tolist() for room in rooms] == [[1.0, 1.0], [3.0, 3.0]]


@pytest.mark.ranks(2, backend="gloo")
def test_nothing_is_written_over_what_is_sent_and_the_bytes_are_counted(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    tensor = torch.arange(12.0).view(3, 4).t()
    before = tensor.clone()
    room = torch.zeros(12)
    gather(coordinator, Manifest(None, [tensor]), 0, lambda *_: [room])
    assert torch.equal(tensor, before)
    moved = coordinator.traffic.of("state")
    assert moved.bytes_received == (48 if rank == 0 else 0)
    assert (moved.bytes_sent >= 48) == (rank == 1)


@pytest.mark.ranks(3, backend="gloo")
def test_rooms_of_another_size_are_an_error_on_every_rank_before_anything_is_sent(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    with pytest.raises(RuntimeError, match=r"rank 1 sends tensors of \[12\] bytes, but the buffers have \[8\]"):
        gather(
            coordinator,
            Manifest(None, [torch.zeros(3)]),
            0,
            lambda source, _: [torch.zeros(2 if source == 1 else 3)],
        )
    coordinator.agree("afterwards")


@pytest.mark.ranks(2, 3, backend=["nccl", "emulated"])
def test_what_lies_on_an_accelerator_arrives_in_chunks(
    rank: int, world_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "CHUNK_BYTES", 64)
    rooms: dict[int, list[torch.Tensor]] = {}

    def of(rank: int, place: torch.device) -> list[torch.Tensor]:
        # On the CPU too, between those that pass through a buffer.
        return [torch.full((n,), float(10 * rank + n)).to(place if n % 2 else "cpu") for n in (33, 8, 1, 0, 100, 17)]

    def make_rooms(source: int, _: Any) -> Sequence[torch.Tensor]:
        rooms[source] = rooms_for(of(source, torch.device("cpu")))
        return rooms[source]

    gather(Coordinator(RankGroup.of()), Manifest(None, of(rank, device)), 0, make_rooms)
    assert len(rooms) == (world_size if rank == 0 else 0)
    for source, arrived in rooms.items():
        assert all(map(torch.equal, arrived, of(source, torch.device("cpu"))))


@pytest.mark.ranks(1, backend="gloo")
def test_a_group_of_one_copies() -> None:
    room = torch.zeros(3)
    gather(Coordinator(RankGroup.of()), Manifest(None, [torch.ones(3)]), 0, lambda *_: [room])
    assert room.tolist() == [1, 1, 1]


@pytest.mark.ranks(4, backend="fake")
def test_a_fake_group_gathers_nothing_and_says_so() -> None:
    with pytest.raises(RuntimeError, match="moves no data"):
        gather(Coordinator(RankGroup.of()), Manifest(None, []), 0, lambda *_: [])


@pytest.mark.by_default("2-MessageBroadcaster | 4-CollectiveBroadcaster")
@pytest.mark.ranks(2, 4, backend="gloo")
@pytest.mark.parametrize("kind", [MessageBroadcaster, CollectiveBroadcaster])
def test_several_moves_may_be_under_way_at_once(rank: int, kind: type[ParameterBroadcaster]) -> None:
    buffers = [[torch.full((n,), float(10 * move + rank)) for n in (3, 5000)] for move in range(4)]
    moves = []
    for pair in buffers:
        moves.append(kind(RankGroup.of(), [Segment(owner, b) for owner, b in enumerate(pair)], Traffic()))
        moves[-1].begin()
        moves[-1].send()
    for move in moves:
        move.wait()
    for number, pair in enumerate(buffers):
        for owner, buffer in enumerate(pair):
            assert torch.equal(buffer, torch.full_like(buffer, 10 * number + owner))


@pytest.mark.ranks(2, backend="gloo")
def test_a_description_that_is_no_json_is_an_error_on_every_rank(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    description: Any = {"bad": object()} if rank == 1 else None
    with pytest.raises(TypeError, match=r"rank 1: .*not JSON serializable"):
        gather(coordinator, Manifest(description, []), 0, lambda *_: [])
    coordinator.agree("afterwards")


WITH_GAPS: dict[str, Callable[[], torch.Tensor]] = {
    "every second": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.ones(()).expand(5),
    "every second row": lambda: torch.arange(12.0).view(6, 2)[::2],
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", WITH_GAPS)
def test_tensors_with_gaps_arrive_as_contiguous_ones(rank: int, kind: str) -> None:
    tensor, coordinator = WITH_GAPS[kind](), Coordinator(RankGroup.of())
    rooms = [torch.empty(tensor.numel(), dtype=tensor.dtype) for _ in range(2)]
    gather(coordinator, Manifest(None, [tensor]), 0, lambda source, _: [rooms[source]])
    for room in rooms if rank == 0 else ():
        assert torch.equal(room, tensor.resolve_conj().reshape(-1))


@pytest.mark.ranks(3, backend="gloo", checks="no:messages")
def test_a_receiver_that_fails_keeps_no_rank_waiting(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of(dist.new_group(timeout=timedelta(minutes=10))))
    coordinator.agree("warming up")
    coordinator.agree("connected")

    def place(*_: object) -> list[torch.Tensor]:
        raise MemoryError("no room")

    manifest = Manifest(None, [torch.ones(30_000_000)])
    if rank == 0:
        # Large enough to wait for the receiver.
        with pytest.raises(PeerLostError, match="rank 0 lost rank 1"):
            send_values(coordinator, 1, manifest, "sending")
    elif rank == 1:
        with pytest.raises(MemoryError, match="no room"):
            receive_values(coordinator, 0, place, "receiving")
    with pytest.raises(PeerLostError):
        coordinator.agree("the next call")
