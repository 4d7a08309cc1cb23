"""Few messages for many tensors: small pieces travel packed in one buffer per owner, large ones from where they lie.

A message costs tens of microseconds whatever its size, a copy costs its bytes. So pieces below a limit are copied into
a staging buffer of their owner before they are sent and out of it after they have arrived; pieces above it are sent and
received in place. What is packed with what depends on the lengths, dtypes, devices and owners alone, so ranks that
agree on the plan agree on the messages.

Every owner's *status*, a few numbers, can ride along in one of its messages. A rank that may not go on, because it
failed or was asked for something else, still sends what the agreed layout says, and a status that tells the others: so
nobody waits for a message that does not come, and no step pays for a message that only says that all is well.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zeroshard_comm._torch_private import foreach_copy_
from zeroshard_comm.exchange import Exchange, Segment, Share

PACK_BELOW = 256 * 1024
"""Pieces of fewer bytes than this are packed."""

STAGING_LIMIT = 8 * 1024 * 1024
"""A staging buffer holds at most this many bytes of pieces (one piece always fits, being smaller)."""

STATUS_WORDS = 4
"""Numbers in a status, 64-bit integers."""

STATUS_BYTES = 8 * STATUS_WORDS

Status = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Crate:
    """One staging buffer, in bytes, and the pieces that travel in it."""

    owner: int
    staging: torch.Tensor
    contents: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    pieces: tuple[torch.Tensor, ...]


class Shipment:
    """The messages of one share, made once per plan and used every step.

    Args:
        segments: the pieces in agreed order; 1-D contiguous, any number, any lengths (empty ones are left out).
        rank: this rank.
        world_size: number of ranks.
        rooms: given, every owner's status travels too. Maps an owner to a 64-bit view, of ``STATUS_WORDS`` numbers, of
            a place inside one of its segments that is at least ``pack_below`` long; owners that have no such place get
            one in a staging buffer, or a message of its own. CPU only, since statuses are read on the host. None sends
            no status.
        pack_below: pieces of fewer bytes are packed; 0 sends everything in place. Equal on all ranks.

    Attributes:
        messages: the segments that really travel, as bytes.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        rank: int,
        world_size: int,
        *,
        rooms: Mapping[int, torch.Tensor] | None = None,
        pack_below: int = PACK_BELOW,
    ) -> None:
        direct = [s for s in segments if s.buffer.nbytes >= max(pack_below, 1)]
        small: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for segment in segments:
            if 0 < segment.buffer.nbytes < pack_below:
                key = (segment.owner, segment.buffer.dtype, segment.buffer.device)
                small.setdefault(key, []).append(segment.buffer)
        crates = [_crate(owner, run) for (owner, _, _), pieces in small.items() for run in _runs(pieces)]
        self._crates = crates
        messages = [Segment(s.owner, s.buffer.view(torch.uint8)) for s in direct]
        self._rank = rank
        self._statuses: list[torch.Tensor] | None = None
        if rooms is not None:
            places = dict(rooms)
            for crate in crates:
                places.setdefault(crate.owner, crate.staging[-STATUS_BYTES:].view(torch.int64))
            for owner in range(world_size):
                if owner not in places:
                    places[owner] = torch.zeros(STATUS_WORDS, dtype=torch.int64, device="cpu")
                    messages.append(Segment(owner, places[owner].view(torch.uint8)))
            self._statuses = [places[owner] for owner in range(world_size)]
        self._plain = tuple(messages)
        self._packed = [Segment(crate.owner, crate.staging) for crate in crates]
        self.messages: tuple[Segment, ...] = (*self._packed, *self._plain)

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging buffers on this rank."""
        return sum(crate.staging.nbytes for crate in self._crates)

    def prepare(self, exchange: Exchange) -> PackedShare:
        """Begin a share of these pieces; see :meth:`zeroshard_comm.Exchange.prepare_share`."""
        # In the order in which they are sent: point-to-point messages of one tag are matched in order.
        packed = [exchange.prepare_share([segment]) for segment in self._packed]
        return PackedShare(self, packed, exchange.prepare_share(self._plain), unpacks=exchange.moves_data)


class PackedShare(Share):
    """A share that packs before it sends and unpacks after it has waited."""

    def __init__(self, shipment: Shipment, packed: Sequence[Share], plain: Share, *, unpacks: bool) -> None:
        self._shipment, self._packed, self._plain, self._unpacks = shipment, packed, plain, unpacks
        self._arriving, self._arrived = threading.Lock(), False

    def set_status(self, status: Status) -> None:
        """Say what the others shall know of this rank; before :meth:`send`. No-op for a shipment without statuses."""
        statuses = self._shipment._statuses
        if statuses is not None:
            statuses[self._shipment._rank].copy_(torch.tensor(status, device="cpu"))

    def statuses(self) -> list[list[int]]:
        """What all ranks said, in rank order; after :meth:`wait`. Empty for a shipment without statuses."""
        return [status.tolist() for status in self._shipment._statuses or ()]

    def send(self) -> None:
        """Send everything this rank owns, small pieces first, from the staging buffers that they are copied to."""
        for crate, share in zip(self._shipment._crates, self._packed, strict=True):
            if crate.owner == self._shipment._rank:
                torch.cat(crate.pieces, out=crate.contents)
            share.send()
        self._plain.send()

    def arrive(self) -> None:
        """Wait for what others send, and copy it from staging buffers to where it belongs while the rest arrives.

        Any thread may call it, also several.
        """
        with self._arriving:
            if self._arrived:
                return
            for crate, share in zip(self._shipment._crates, self._packed, strict=True):
                share.arrive()
                if self._unpacks and crate.owner != self._shipment._rank:
                    foreach_copy_(crate.pieces, crate.slots)
            self._plain.arrive()
            self._arrived = True

    def wait(self) -> None:
        """Wait for everything, also until what this rank has sent may be written to."""
        self.arrive()
        for share in (*self._packed, self._plain):
            share.wait()


def _runs(pieces: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut a list of pieces where a staging buffer is full."""
    runs: list[list[torch.Tensor]] = [[]]
    filled = 0
    for piece in pieces:
        if runs[-1] and filled + piece.nbytes > STAGING_LIMIT:
            runs.append([])
            filled = 0
        runs[-1].append(piece)
        filled += piece.nbytes
    return runs


def _crate(owner: int, pieces: Sequence[torch.Tensor]) -> _Crate:
    filled = sum(piece.nbytes for piece in pieces)
    # The status behind the pieces must lie at a multiple of its own size.
    staging = torch.zeros(-(-filled // 8) * 8 + STATUS_BYTES, dtype=torch.uint8, device=pieces[0].device)
    contents = staging[:filled].view(pieces[0].dtype)
    slots = contents.split([piece.numel() for piece in pieces])
    return _Crate(owner, staging, contents, tuple(slots), tuple(pieces))
