"""Bringing a bucket of gradients to its owners by collectives, where messages cannot be matched by tag.

As :mod:`zeroshard_comm.reduction`, with one reduce for each owner and stretch of the bucket: large ones in place, small
ones packed into one buffer per owner. The notes travel from host to host. Everything is issued by the thread that
calls, in the order of :meth:`CollectiveReduction.begin`, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from zeroshard_core import Run

from zeroshard_comm._torch_private import foreach_copy_
from zeroshard_comm.agreement import Control
from zeroshard_comm.bits import pack_bits, unpack_bits
from zeroshard_comm.exchange import Exchange, Pending, Segment
from zeroshard_comm.packing import PACK_BELOW
from zeroshard_comm.reduction import NOTE_WORDS, Note
from zeroshard_comm.words import TAG_NOTES, Words


@dataclass(frozen=True)
class _Crate:
    """Small stretches of one owner, and where they lie one behind the other."""

    owner: int
    staging: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    ranges: tuple[tuple[int, int], ...]


class CollectiveReduction:
    """The collectives of one bucket.

    Args:
        exchange: issues them, on a group on which nobody else issues anything.
        control: has the channel of the notes.
        runs: ranges of elements of the bucket and who owns them, in bucket order; what lies between belongs to nobody.
        like: a bucket, or any tensor of its dtype and device.
        tensors: number of tensors in the bucket.
    """

    def __init__(
        self, exchange: Exchange, control: Control, runs: Sequence[Run], like: torch.Tensor, tensors: int
    ) -> None:
        self.exchange, self.control, self.tensors = exchange, control, tensors
        world_size = exchange.ranks.world_size
        # A rank alone has nobody to reduce with.
        moved = [run for run in runs if run.stop > run.start] if world_size > 1 else []
        limit = PACK_BELOW // like.element_size()
        self._large = [run for run in moved if run.stop - run.start >= limit]
        self.crates: list[_Crate] = []
        for owner in range(world_size):
            ranges = [(run.start, run.stop) for run in moved if run.rank == owner and run.stop - run.start < limit]
            if ranges:
                sizes = [stop - start for start, stop in ranges]
                staging = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
                self.crates.append(_Crate(owner, staging, tuple(staging.split(sizes)), tuple(ranges)))

    def begin(self, buffer: torch.Tensor, note: Note, *, gradients: bool = True) -> CollectiveUnderway:
        """Send a note, and issue the reductions of a bucket behind what the current stream is doing.

        Args:
            buffer: the bucket, 1-D; it belongs to the reduction until :meth:`CollectiveUnderway.finish` has returned,
                and is then specified only where this rank owns it.
            note: what this rank has to say.
            gradients: False to exchange notes alone, which all ranks must do then.

        Raises:
            PeerLostError: if a rank is gone.
        """
        words = Words(self.control, [*note.words, *pack_bits(note.present)], TAG_NOTES, "backward()")
        pending: Pending | None = None
        if gradients and self.exchange.ranks.world_size > 1:
            # First, as DDP does: a sum in half precision may be too large.
            buffer.div_(self.exchange.ranks.world_size)
            segments = [Segment(run.rank, buffer[run.start : run.stop]) for run in self._large]
            for crate in self.crates:
                torch.cat([buffer[start:stop] for start, stop in crate.ranges], out=crate.staging)
                segments.append(Segment(crate.owner, crate.staging))
            pending = self.exchange.reduce_to_owners(segments)
        return CollectiveUnderway(self, buffer, words, pending)


class CollectiveUnderway:
    """One bucket on its way to its owners; see :meth:`CollectiveReduction.begin`. Finished once."""

    def __init__(
        self, reduction: CollectiveReduction, buffer: torch.Tensor, words: Words, pending: Pending | None
    ) -> None:
        self._reduction, self._buffer, self._words, self._pending = reduction, buffer, words, pending

    def notes(self) -> list[Note]:
        """Wait for the notes of all ranks on the host, and return them in rank order; this rank's own on a fake group.

        Raises:
            PeerLostError: if a rank is gone.
        """
        tensors = self._reduction.tensors
        return [
            Note(tuple(numbers[:NOTE_WORDS]), unpack_bits(numbers[NOTE_WORDS:], tensors))
            for numbers in self._words.wait()
        ]

    def finish(self) -> None:
        """Order the current stream behind what this rank owns: the bucket holds the means over all ranks there.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        for crate in self._reduction.crates:
            if crate.owner == self._reduction.exchange.ranks.rank:
                foreach_copy_([self._buffer[start:stop] for start, stop in crate.ranges], crate.slots)
