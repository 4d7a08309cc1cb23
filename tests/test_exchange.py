"""The two moves of a sharded step, by every exchange, and the transfer of state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zeroshard_comm import (
    CollectiveExchange,
    Consignment,
    Control,
    DisagreementError,
    Exchange,
    GlooExchange,
    PointToPointExchange,
    RankGroup,
    Segment,
    Shipment,
    agree,
    choose_exchange,
    gather,
)
from zeroshard_core import TensorSpec, partition

EXCHANGES = pytest.mark.parametrize("kind", [PointToPointExchange, GlooExchange, CollectiveExchange])
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float64]
LENGTHS = [(0, 5), (1, 70_000), (1, 0), (0, 3), (1, 64)]


@pytest.mark.ranks(2, 4, backend="gloo")
@EXCHANGES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_share_brings_every_rank_the_owners_values(rank: int, kind: type[Exchange], dtype: torch.dtype) -> None:
    exchange = kind(RankGroup.of())
    # Owners hold unlike amounts, and ranks 2 and 3 nothing. Their numbers differ in every dtype, bool included.
    segments = [Segment(owner, torch.full((n,), rank).to(dtype)) for owner, n in LENGTHS]
    exchange.share_from_owners(segments).wait()
    for segment in segments:
        assert torch.equal(segment.buffer, torch.full_like(segment.buffer, segment.owner))


@pytest.mark.ranks(2, 4, backend="gloo")
@EXCHANGES
def test_reduce_brings_owners_the_sum(rank: int, world_size: int, kind: type[Exchange]) -> None:
    exchange = kind(RankGroup.of())
    segments = [Segment(owner, torch.full((n,), float(rank + 1))) for owner, n in LENGTHS]
    exchange.reduce_to_owners(segments).wait()
    for segment in segments:
        if segment.owner == rank:
            assert torch.equal(segment.buffer, torch.full_like(segment.buffer, sum(range(world_size + 1))))


@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.parametrize("owner", range(4))
def test_direct_sums_run_in_rank_order_whoever_owns(rank: int, owner: int) -> None:
    terms = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    mine = terms[rank].clone()
    PointToPointExchange(RankGroup.of()).reduce_to_owners([Segment(owner, mine)]).wait()
    if rank == owner:
        assert torch.equal(mine, ((terms[0] + terms[1]) + terms[2]) + terms[3])


@pytest.mark.ranks(3, backend="gloo")
@EXCHANGES
def test_traffic_is_what_the_segments_say(rank: int, kind: type[Exchange]) -> None:
    exchange = kind(RankGroup.of())
    segments = [Segment(0, torch.zeros(10)), Segment(1, torch.zeros(20))]
    owned, everything = (40, 80, 0)[rank], 120
    exchange.share_from_owners(segments).wait()
    exchange.reduce_to_owners(segments).wait()
    share, reduce = exchange.traffic.of("share"), exchange.traffic.of("reduce")
    assert (share.bytes_sent, share.bytes_received) == (owned * 2, everything - owned)
    assert (reduce.bytes_sent, reduce.bytes_received) == (everything - owned, owned * 2)


@pytest.mark.ranks(4, backend="gloo")
@EXCHANGES
def test_ranks_are_group_ranks_in_a_subgroup(rank: int, kind: type[Exchange]) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        ranks = RankGroup.of(group)
        assert (ranks.rank, ranks.global_rank, ranks.peers) == (rank // 2, rank, (1 - rank // 2,))
        buffer = torch.tensor([float(rank)])
        kind(ranks).share_from_owners([Segment(1, buffer)]).wait()
        assert buffer.item() == 3.0
    else:
        with pytest.raises(RuntimeError, match="not a member"):
            RankGroup.of(group)


@pytest.mark.ranks(2, 3, backend="gloo")
@EXCHANGES
@pytest.mark.parametrize("pack_below", [0, 1000])
def test_a_shipment_moves_small_and_large_pieces_and_statuses(
    rank: int, world_size: int, kind: type[Exchange], pack_below: int
) -> None:
    exchange = kind(RankGroup.of())
    segments = [Segment(owner, torch.empty(n)) for owner, n in [(0, 3), (1, 7), (0, 900), (1, 5)]]
    shipment = Shipment(segments, rank, world_size, rooms={}, pack_below=pack_below)
    for turn in range(2):
        for segment in segments:
            segment.buffer.fill_(10 * turn + rank)
        share = shipment.prepare(exchange)
        share.set_status((rank, turn, 0, -1))
        share.send()
        share.wait()
        assert share.statuses() == [[r, turn, 0, -1] for r in range(world_size)]
        for segment in segments:
            assert torch.equal(segment.buffer, torch.full_like(segment.buffer, 10 * turn + segment.owner))


@pytest.mark.ranks(2, backend="gloo")
def test_gloo_on_cpu_gets_its_own_exchange() -> None:
    assert type(choose_exchange(RankGroup.of(), torch.device("cpu"))) is GlooExchange


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_without_a_backend_for_the_device_says_so() -> None:
    cpu_only = dist.new_group(backend="cpu:gloo")
    with pytest.raises(RuntimeError, match="no backend for tensors on 'cuda'"):
        choose_exchange(RankGroup.of(cpu_only), torch.device("cuda"))


@pytest.mark.ranks(16, backend="fake")
def test_a_fake_group_is_told_from_a_real_one() -> None:
    ranks = RankGroup.of()
    assert not ranks.moves_data()
    assert Control(ranks).alone
    choose_exchange(ranks, torch.device("cpu")).share_from_owners([Segment(3, torch.zeros(4))]).wait()


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


@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("chunk_bytes", [16, 1 << 20])
def test_gather_brings_tensors_of_any_kind_bit_for_bit(rank: int, world_size: int, chunk_bytes: int) -> None:
    tensors = odd_tensors(rank)
    rooms: dict[int, list[torch.Tensor]] = {}

    def place(source: int, description: Any) -> Sequence[torch.Tensor]:
        assert description == {"from": source}
        rooms[source] = [torch.empty(t.numel(), dtype=t.dtype) for t in odd_tensors(source)]
        return rooms[source]

    seen: list[tuple[int, int]] = []
    control = Control(RankGroup.of())
    gather(
        control,
        Consignment({"from": rank}, tensors),
        1,
        place,
        chunk_bytes=chunk_bytes,
        progress=lambda done, total: seen.append((done, total)),
    )
    if rank == 1:
        for source in range(world_size):
            for room, tensor in zip(rooms[source], odd_tensors(source), strict=True):
                in_storage_order = tensor.as_strided((tensor.numel(),), (1,)) if tensor.dim() else tensor.view(1)
                assert torch.equal(room, in_storage_order)
        assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for r in range(world_size) for t in odd_tensors(r))
    else:
        assert not seen
        assert control.traffic.of("state").bytes_sent >= sum(t.nbytes for t in tensors)


@pytest.mark.ranks(3, backend="gloo")
def test_a_target_without_room_is_an_error_on_every_rank(rank: int) -> None:
    def place(source: int, description: Any) -> Sequence[torch.Tensor]:
        raise MemoryError(f"no room for what rank {source} sends")

    control = Control(RankGroup.of())
    with pytest.raises(MemoryError, match="rank 0: no room for what rank 0 sends"):
        gather(control, Consignment(None, [torch.zeros(3)]), 0, place)
    control.check_consistent("afterwards")
