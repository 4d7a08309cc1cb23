"""Sends tagged messages from one rank to another, and packs many tensors into few messages.

Messages with one tag are matched in order. A message costs tens of microseconds regardless of its size; the cost of a
copy grows with its bytes. So pieces below a limit are copied into a staging buffer, sent, and copied out of it; larger
pieces are sent and received in place. Ranks that agree on the plan agree on the messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from zeroshard_core import Run

from zeroshard_comm._torch_private import foreach_copy_
from zeroshard_comm.errors import peer_lost
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_LENGTH = 0x5A530002
TAG_TEXT = 0x5A530003

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A send or a receive in flight.

    Attributes:
        ranks: the process group.
        peer: group rank of the other end.
        work: the handle that torch returned; None with its fake backend.
        buffer: the tensor to send or to fill, which may be in use until :meth:`wait` has returned.
    """

    ranks: RankGroup
    peer: int
    work: dist.Work | None
    buffer: torch.Tensor

    def wait(self, operation: str, timeout: timedelta | None = None) -> None:
        """Wait until a receive has filled the buffer, or until the buffer of a send may be changed.

        Args:
            operation: the operation of the ranks, for errors.
            timeout: how long to wait; the timeout of the group if None. After it, gloo closes the group's connections.

        Raises:
            PeerLostError: if the backend reports a closed connection, a timeout or any other failure.
        """
        limit = timeout or self.ranks.timeout
        started = time.perf_counter()
        try:
            if self.work is not None:
                self.work.wait() if limit is None else self.work.wait(limit)
        except RuntimeError as failure:
            is_late = limit is not None and time.perf_counter() - started >= limit.total_seconds()
            waited = self.ranks.timeout if is_late else None
            raise peer_lost(failure, self.peer, self.ranks.rank, operation, waited) from failure


def send(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
    """Send a tensor.

    Args:
        ranks: the process group; its backend matches messages by tag (gloo, CPU tensors).
        peer: group rank of the receiver.
        buffer: a contiguous tensor.
        tag: the tag of the message. Messages with the same tag between two ranks are matched in order.
        operation: the operation of the ranks, for errors.

    Raises:
        PeerLostError: if the peer is gone.
    """
    try:
        return Message(ranks, peer, dist.isend(buffer, group=ranks.group, group_dst=peer, tag=tag), buffer)
    except RuntimeError as failure:
        raise peer_lost(failure, peer, ranks.rank, operation) from failure


def receive(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
    """Receive into a tensor of the same length as the tensor sent. The arguments are as for :func:`send`.

    Post receives before sends: gloo starts a send only once its receive is posted.

    Raises:
        PeerLostError: if the peer is gone.
    """
    try:
        return Message(ranks, peer, dist.irecv(buffer, group=ranks.group, group_src=peer, tag=tag), buffer)
    except RuntimeError as failure:
        raise peer_lost(failure, peer, ranks.rank, operation) from failure


def send_text(ranks: RankGroup, peer: int, text: str, operation: str, traffic: Traffic, kind: str) -> None:
    """Send a text to a rank that calls :func:`receive_text`, and count its bytes as traffic of ``kind``."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    send(ranks, peer, torch.tensor([data.numel()], device="cpu"), TAG_LENGTH, operation).wait(operation)
    send(ranks, peer, data, TAG_TEXT, operation).wait(operation)
    traffic.add(kind, sent=data.numel(), calls=2)


def receive_text(ranks: RankGroup, peer: int, operation: str) -> str:
    """Receive a text from a rank that calls :func:`send_text`."""
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    receive(ranks, peer, length, TAG_LENGTH, operation).wait(operation)
    data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    receive(ranks, peer, data, TAG_TEXT, operation).wait(operation)
    return bytes(data.tolist()).decode()


def wait_for_collective(work: dist.Work | None, ranks: RankGroup, operation: str) -> None:
    """Wait for a collective. If the backend raises, raise PeerLostError from its error."""
    try:
        if work is not None:
            work.wait()
    except RuntimeError as failure:
        raise peer_lost(failure, None, ranks.rank, operation) from failure


PACK_BELOW = 256 * 1024
"""Pieces of fewer bytes than this are packed."""

CHUNK_BYTES = 4 * 1024 * 1024
"""A large run of gradients is sent in messages of this many bytes; each is added while the next ones arrive."""

PACKED_BYTES = 2 * 1024 * 1024
"""Small runs of gradients are copied into messages of at most this many bytes."""

STAGING_LIMIT = 8 * 1024 * 1024
"""A staging buffer holds at most this many bytes. Each packed piece fits, because ``PACK_BELOW`` is smaller."""


@dataclass(frozen=True, eq=False)
class PackedMessage:
    """A message from an owner to all ranks: the memory of a piece, or a staging buffer with a slot for each piece."""

    owner: int
    data: torch.Tensor
    slots: tuple[torch.Tensor, ...] = ()
    pieces: tuple[torch.Tensor, ...] = ()

    def pack(self) -> None:
        """Copy the pieces into the staging buffer."""
        if self.slots:
            torch.cat(self.pieces, out=self.data.view(self.pieces[0].dtype))

    def unpack(self) -> None:
        """Copy the received bytes from the staging buffer to the pieces."""
        if self.slots:
            foreach_copy_(self.pieces, self.slots)


def pack_pieces(pieces: Sequence[tuple[int, torch.Tensor]], pack_below: int = PACK_BELOW) -> tuple[PackedMessage, ...]:
    """Lay out owners' 1-D contiguous tensors as messages.

    Pieces of fewer bytes than ``pack_below``, which must be equal on all ranks, are packed. Packed messages come first,
    so that they are unpacked while the rest arrives. Empty pieces are skipped.
    """
    small: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    direct: list[PackedMessage] = []
    for owner, piece in pieces:
        if 0 < piece.nbytes < pack_below:
            small.setdefault((owner, piece.dtype), []).append(piece)
        elif piece.nbytes:
            direct.append(PackedMessage(owner, piece.view(torch.uint8)))
    packed = [
        _staged(owner, batch)
        for (owner, _), group in small.items()
        for batch in _batches(group, [piece.nbytes for piece in group], STAGING_LIMIT)
    ]
    return (*packed, *direct)


def _batches(items: Sequence[_T], sizes: Sequence[int], limit: int) -> list[list[_T]]:
    """Cut a list into batches of at most ``limit`` in total; a larger item is a batch of its own."""
    batches: list[list[_T]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not batches or room < size:
            batches.append([])
            room = limit
        batches[-1].append(item)
        room -= size
    return batches


def _staged(owner: int, pieces: Sequence[torch.Tensor]) -> PackedMessage:
    first, sizes = pieces[0], [piece.numel() for piece in pieces]
    expected = accumulate([piece.nbytes for piece in pieces[:-1]], initial=first.data_ptr())
    if len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1 and all(
        piece.data_ptr() == address for piece, address in zip(pieces, expected, strict=True)
    ):
        # The pieces are adjacent in memory, as parameters are in a flat buffer.
        return PackedMessage(owner, first.as_strided((sum(sizes),), (1,)).view(torch.uint8))
    staging = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    return PackedMessage(owner, staging.view(torch.uint8), staging.split(sizes), tuple(pieces))


@dataclass(frozen=True)
class BucketMessage:
    """One message of gradients to an owner: its ranges of elements of the bucket, and their size in bytes."""

    ranges: tuple[tuple[int, int], ...]
    nbytes: int


def bucket_messages(runs: Sequence[Run], itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> list[BucketMessage]:
    """Lay out the runs of one owner, in bucket order, as messages: large runs in chunks, small runs together."""
    cut = PACK_BELOW // itemsize
    small = [(run.start, run.stop) for run in runs if 0 < run.stop - run.start < cut]
    large = [(run.start, run.stop) for run in runs if run.stop - run.start >= cut]
    packed = _batches(small, [stop - start for start, stop in small], PACKED_BYTES // itemsize)
    step = chunk_bytes // itemsize
    chunks = [[(at, min(at + step, stop))] for start, stop in large for at in range(start, stop, step)]
    return [
        BucketMessage(tuple(ranges), sum(stop - start for start, stop in ranges) * itemsize)
        for ranges in (*packed, *chunks)
    ]
