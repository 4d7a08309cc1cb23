"""Which messages a share consists of; one rank stands for all, by a recording exchange that copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from zeroshard_comm import STATUS_WORDS, Exchange, Pending, Segment, Share, Shipment


class RecordingShare(Share):
    def __init__(self, log: list[str], segments: Sequence[Segment]) -> None:
        self._log, self._owners = log, [segment.owner for segment in segments]

    def send(self) -> None:
        self._log.append(f"send {self._owners}")

    def arrive(self) -> None:
        self._log.append(f"arrive {self._owners}")

    def wait(self) -> None:
        self._log.append(f"wait {self._owners}")


class RecordingExchange(Exchange):
    """Stands for an exchange: notes what is asked of it and moves nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def prepare_share(self, segments: Sequence[Segment]) -> Share:
        return RecordingShare(self.log, segments)

    def reduce_to_owners(self, segments: Sequence[Segment]) -> Pending:
        raise AssertionError("a share reduces nothing")


def pieces(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Segment]:
    return [Segment(owner, torch.full((numel,), float(i), dtype=dtype)) for i, (owner, numel) in enumerate(shapes)]


def sizes(shipment: Shipment) -> list[tuple[int, int]]:
    return [(message.owner, message.buffer.numel()) for message in shipment.messages]


def test_small_pieces_of_one_owner_travel_together_and_large_ones_alone() -> None:
    shipment = Shipment(pieces((0, 10), (1, 10), (0, 20), (0, 1000)), 0, 2, pack_below=400)
    status = 8 * STATUS_WORDS
    assert sizes(shipment) == [(0, 4 * 30 + status), (1, 4 * 10 + status), (0, 4000)]


def test_dtypes_do_not_mix_and_empty_pieces_do_not_travel() -> None:
    segments = pieces((0, 4), (0, 0)) + pieces((0, 4), dtype=torch.float64)
    assert [owner for owner, _ in sizes(Shipment(segments, 0, 2))] == [0, 0]


def test_a_rank_that_owns_nothing_sends_its_status_alone() -> None:
    shipment = Shipment(pieces((0, 4)), 0, 3, rooms={})
    assert sizes(shipment)[1:] == [(1, 8 * STATUS_WORDS), (2, 8 * STATUS_WORDS)]
    share = shipment.prepare(RecordingExchange())
    share.set_status((7, 1, 2, 3))
    assert share.statuses() == [[7, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_status_finds_room_in_a_segment_that_offers_it() -> None:
    buffer = torch.zeros(1000, dtype=torch.float64)
    room = buffer[-STATUS_WORDS:].view(torch.int64)
    shipment = Shipment([Segment(0, buffer), Segment(1, torch.zeros(3))], 0, 2, rooms={0: room}, pack_below=400)
    shipment.prepare(RecordingExchange()).set_status((5, 0, 0, 0))
    assert room.tolist() == [5, 0, 0, 0]
    assert len(shipment.messages) == 2


def test_without_rooms_no_status_travels() -> None:
    share = Shipment(pieces((0, 4), (1, 4)), 0, 3).prepare(RecordingExchange())
    share.set_status((1, 1, 1, 1))
    assert share.statuses() == []


def test_what_a_rank_owns_is_packed_and_what_arrives_is_unpacked_in_one_order() -> None:
    exchange = RecordingExchange()
    segments = pieces((0, 3), (0, 3), (1, 3), (1, 3), (1, 500))
    shipment = Shipment(segments, 0, 2, pack_below=400)
    share = shipment.prepare(exchange)
    share.send()
    own, theirs = (message.buffer for message in shipment.messages[:2])
    assert own[:24].view(torch.float32).tolist() == [0, 0, 0, 1, 1, 1]
    theirs[:24].view(torch.float32).copy_(torch.arange(6.0))
    share.wait()
    assert segments[2].buffer.tolist() == [0, 1, 2]
    assert segments[3].buffer.tolist() == [3, 4, 5]
    # What arrives is waited for before what was sent, for others may do the same.
    expected = [f"{what} [{owner}]" for what in ("send", "arrive", "wait") for owner in (0, 1, 1)]
    assert exchange.log == expected


def test_staging_buffers_have_a_limit() -> None:
    many = pieces(*[(0, 50_000)] * 100)
    shipment = Shipment(many, 0, 2)
    assert len(shipment.messages) == 3
    assert shipment.staging_bytes <= 100 * 200_000 + 3 * (8 * STATUS_WORDS + 8)
