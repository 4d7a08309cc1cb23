"""Few messages for many tensors: small pieces travel packed in one buffer per owner, large ones from where they lie.

A message costs tens of microseconds whatever its size, a copy costs its bytes. So pieces below a limit are copied into
a staging buffer of their owner before they are sent and out of it after they have arrived; pieces above it are sent and
received in place. What is packed with what depends on the lengths, dtypes, devices and owners alone, so ranks that
agree on the plan agree on the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard_comm.exchange import Exchange, Segment, Share

PACK_BELOW = 256 * 1024
"""Pieces of fewer bytes than this are packed."""

STAGING_LIMIT = 8 * 1024 * 1024
"""A staging buffer holds at most this many bytes (one piece always fits, being smaller)."""


@dataclass(frozen=True)
class _Crate:
    """One staging buffer and the pieces that travel in it."""

    owner: int
    staging: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    pieces: tuple[torch.Tensor, ...]


class Shipment:
    """The messages of one share, made once per plan and used every step.

    Args:
        segments: the pieces in agreed order; 1-D contiguous, any number, any lengths (empty ones are left out).
        rank: this rank.
        pack_below: pieces of fewer bytes are packed; 0 sends everything in place. Equal on all ranks.

    Attributes:
        messages: the segments that really travel.
    """

    def __init__(self, segments: Sequence[Segment], rank: int, *, pack_below: int = PACK_BELOW) -> None:
        large = [s for s in segments if s.buffer.nbytes >= max(pack_below, 1)]
        small: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for segment in segments:
            if 0 < segment.buffer.nbytes < pack_below:
                key = (segment.owner, segment.buffer.dtype, segment.buffer.device)
                small.setdefault(key, []).append(segment.buffer)
        # A lone small piece needs no staging: it is one message either way.
        lone = [Segment(key[0], pieces[0]) for key, pieces in small.items() if len(pieces) == 1]
        crates = [
            _crate(owner, run)
            for (owner, _, _), pieces in small.items()
            if len(pieces) > 1
            for run in _runs(pieces)
        ]
        self._outgoing = [crate for crate in crates if crate.owner == rank]
        self._incoming = [crate for crate in crates if crate.owner != rank]
        self.messages: tuple[Segment, ...] = (
            *large,
            *lone,
            *(Segment(crate.owner, crate.staging) for crate in crates),
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of all staging buffers on this rank."""
        return sum(crate.staging.nbytes for crate in (*self._outgoing, *self._incoming))

    def prepare(self, exchange: Exchange) -> PackedShare:
        """Begin a share of these pieces; see :meth:`zeroshard_comm.Exchange.prepare_share`."""
        return PackedShare(exchange.prepare_share(self.messages), self._outgoing, self._incoming)


class PackedShare(Share):
    """A share that packs before it sends and unpacks after it has waited."""

    def __init__(self, inner: Share, outgoing: Sequence[_Crate], incoming: Sequence[_Crate]) -> None:
        self._inner, self._outgoing, self._incoming = inner, outgoing, incoming

    def send(self) -> None:
        """Copy this rank's small pieces into their staging buffers and send everything this rank owns."""
        for crate in self._outgoing:
            torch._foreach_copy_(crate.slots, crate.pieces)
        self._inner.send()

    def wait(self) -> None:
        """Wait for everything, then copy what arrived in staging buffers to where it belongs."""
        self._inner.wait()
        for crate in self._incoming:
            torch._foreach_copy_(crate.pieces, crate.slots)


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
    staging = torch.empty(sum(piece.numel() for piece in pieces), dtype=pieces[0].dtype, device=pieces[0].device)
    slots = staging.split([piece.numel() for piece in pieces])
    return _Crate(owner, staging, tuple(slots), tuple(pieces))
