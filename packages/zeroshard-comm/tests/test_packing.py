"""Which messages the pieces of a broadcast travel in."""

from __future__ import annotations

import torch
from zeroshard_comm.messages import STAGING_LIMIT, PackedMessage, pack_pieces

Piece = tuple[int, torch.Tensor]


def pieces(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[Piece]:
    return [(owner, torch.full((numel,), float(i), dtype=dtype)) for i, (owner, numel) in enumerate(shapes)]


def sizes(messages: tuple[PackedMessage, ...]) -> list[tuple[int, int]]:
    return [(message.owner, message.data.numel()) for message in messages]


def test_small_pieces_of_one_owner_travel_together_and_large_ones_alone() -> None:
    messages = pack_pieces(pieces((0, 10), (1, 10), (0, 20), (0, 1000)), pack_below=400)
    assert sizes(messages) == [(0, 4 * 30), (1, 4 * 10), (0, 4000)]


def test_large_pieces_travel_from_where_they_lie() -> None:
    (owned,) = pieces((0, 1000))
    (message,) = pack_pieces([owned], pack_below=400)
    assert message.data.data_ptr() == owned[1].data_ptr()


def test_dtypes_do_not_mix_and_empty_pieces_do_not_travel() -> None:
    made = pack_pieces(pieces((0, 4), (0, 0)) + pieces((0, 4), dtype=torch.float64))
    assert sizes(made) == [(0, 16), (0, 32)]


def test_a_full_staging_buffer_ends_a_message() -> None:
    quarter = STAGING_LIMIT // 16
    messages = pack_pieces(pieces(*[(0, quarter)] * 5), pack_below=STAGING_LIMIT)
    assert sizes(messages) == [(0, STAGING_LIMIT), (0, STAGING_LIMIT // 4)]


def test_small_pieces_that_lie_one_after_another_travel_from_where_they_lie() -> None:
    flat = torch.arange(30.0)
    parts = flat.split([10, 15, 5])
    (message,) = pack_pieces([(0, part) for part in parts])
    assert (message.data.data_ptr(), message.data.numel()) == (flat.data_ptr(), flat.nbytes)
    assert sizes((message,)) == sizes(pack_pieces([(0, part.clone()) for part in parts]))
    # In another order, or with a gap, they are copied.
    for pieces_apart in (parts[::-1], (parts[0], parts[2])):
        (apart,) = pack_pieces([(0, part) for part in pieces_apart])
        apart.pack()
        assert torch.equal(apart.data.view(torch.float32), torch.cat(pieces_apart))


def test_what_is_packed_is_unpacked_where_it_belongs() -> None:
    sent, received = pieces((0, 3), (0, 5)), pieces((0, 3), (0, 5))
    (there,) = pack_pieces(sent)
    (here,) = pack_pieces(received)
    for _, piece in sent:
        piece.add_(7)
    there.pack()
    here.data.copy_(there.data)
    here.unpack()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(sent, received, strict=True))
