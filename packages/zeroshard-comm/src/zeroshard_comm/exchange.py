"""The two moves of a sharded step, as an interface, and the choice of who makes them.

*Share from owners* brings every replica the values that the owner computed; *reduce to owners* brings every owner the
sum of what all ranks hold. Both work on *segments*: one-dimensional buffers, each with one owner, that all ranks list
in the same order with the same lengths (agree on that first, see :mod:`zeroshard_comm.agreement`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Segment:
    """A buffer that one rank owns and all ranks have.

    Attributes:
        owner: group rank.
        buffer: 1-D contiguous tensor; the same length and dtype on every rank.
    """

    owner: int
    buffer: torch.Tensor


class Pending(ABC):
    """A move under way. Not thread-safe; the buffers belong to the move until :meth:`wait` has returned.

    Moves are to be waited for in the order in which they were begun, the same on all ranks: a rank's values may be
    fetched from it by whoever waits for them, and no sooner.
    """

    @abstractmethod
    def wait(self) -> None:
        """Return when this rank's buffers hold the result (on CUDA: when the current stream is ordered behind it).

        Raises:
            PeerLostError: if a rank is gone.
        """


class Share(Pending):
    """A share in two halves, so that receives are posted before the values exist.

    The receives are posted when the share is made, where the backend can do that. :meth:`send` sends what this rank
    owns; every rank must call it, also a rank that owns nothing.
    """

    @abstractmethod
    def send(self) -> None:
        """Send this rank's segments to every peer."""

    @abstractmethod
    def arrive(self) -> None:
        """Return when the segments of peers hold their values; this rank's own may still be read. No-op when done.

        Unlike :meth:`wait`, ranks may call it for their shares in different orders.

        Raises:
            PeerLostError: if a rank is gone.
        """


class Exchange(ABC):
    """Makes both moves over one process group.

    All methods are collective: every rank calls them in the same order, from one thread, with segments that match.
    """

    moves_data = True
    """Whether anything arrives; with torch's ``fake`` backend nothing does."""

    def __init__(self, ranks: RankGroup, traffic: Traffic | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic if traffic is not None else Traffic()
        self.moves_data = ranks.moves_data()

    @abstractmethod
    def prepare_share(self, segments: Sequence[Segment]) -> Share:
        """Begin a share. Segments of peers may be written from now on, this rank's own are read from ``send()`` on."""

    def share_from_owners(self, segments: Sequence[Segment]) -> Pending:
        """Bring every rank the owners' values: after ``wait()`` a segment holds on every rank what its owner had.

        Args:
            segments: the same list on every rank, up to the addresses of the buffers.

        Returns:
            The move under way.
        """
        share = self.prepare_share(segments)
        share.send()
        return share

    @abstractmethod
    def reduce_to_owners(self, segments: Sequence[Segment]) -> Pending:
        """Bring every owner the sums: after ``wait()`` an owned segment holds the sum over all ranks.

        Segments that this rank does not own are left unspecified. Sums are made in the dtype of the segment.

        Args:
            segments: the same list on every rank, up to the addresses of the buffers.

        Returns:
            The move under way.
        """


def shared_bytes(segments: Sequence[Segment], rank: int) -> int:
    """Bytes that ``rank`` owns among ``segments``."""
    return sum(segment.buffer.nbytes for segment in segments if segment.owner == rank)
