"""Interfaces of the two exchanges of a sharded step: reduce gradients to their owners, broadcast new parameters.

The objects are made once for a layout and used in every step. The implementation depends on the backend: tagged
messages, collectives, or reads of peers' memory on one host; see :mod:`zeroshard_comm.transport`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Segment:
    """A buffer, or a range of a buffer, that one rank owns and all ranks hold.

    Attributes:
        owner: group rank of the owner.
        buffer: 1-D contiguous tensor; the same length and dtype on every rank.
        is_part: whether the elements belong to a tensor that is cut over several ranks.
        within: the range of elements of the buffer; the whole buffer by default.
    """

    owner: int
    buffer: torch.Tensor
    is_part: bool = False
    within: slice = field(default_factory=lambda: slice(None), hash=False)

    @property
    def view(self) -> torch.Tensor:
        """The elements, 1-D. Made on each access, not stored, because a cut parameter has a segment for each rank."""
        return self.buffer[self.within]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return len(range(*self.within.indices(self.buffer.numel())))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.buffer.element_size()


class BucketReduceWork(ABC):
    """One reduction of a bucket to its owners.

    The bucket may be written to or freed after :meth:`close` has returned. If peers read it in place, this rank must
    also have finished a later reduction, or all ranks must have agreed. Otherwise peers may read wrong values silently.

    Both methods raise :class:`PeerLostError` if a rank is gone.
    """

    @abstractmethod
    def finish(self) -> None:
        """Wait until the views of :meth:`GradientReducer.owned` hold the means of the ranges that this rank owns.

        The rest of the bucket is then undefined. On an accelerator this orders the current stream after the reduction.
        """

    def close(self) -> None:  # noqa: B027 - some have sent everything when `finish` returns
        """Wait until this rank's values have been sent. Call it after :meth:`finish`."""


class GradientReducer(ABC):
    """Reduces one bucket in every backward: its owners get the mean over all ranks.

    All ranks begin their buckets in the same order, and agree after they have closed the last reduction of a backward.
    :meth:`expect` and :meth:`begin` raise :class:`PeerLostError` if a rank is gone.
    """

    def owned(self, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the 1-D view that holds the mean of a range of this rank after :meth:`BucketReduceWork.finish`.

        The range has the elements from ``start`` up to, but not including, ``stop`` of ``buffer``, the 1-D bucket.
        """
        return buffer[start:stop]

    def release(self) -> None:  # noqa: B027 - some keep no references
        """Drop references to the memory of the last bucket, and to the views that :meth:`owned` has returned."""

    def expect(self) -> None:  # noqa: B027 - some have nothing to prepare
        """Prepare for the next :meth:`begin`, before there are values. Call it at most once for each, in order."""

    @abstractmethod
    def begin(self, buffer: torch.Tensor) -> BucketReduceWork:
        """Send this rank's values, in a 1-D bucket, to their owners."""


class ParameterBroadcaster(ABC):
    """Sends the owners' values of a fixed list of segments to all ranks, in one broadcast after another.

    All methods are collective: every rank calls them in the same order. They raise :class:`PeerLostError` if a rank is
    gone. Segments may be in use until :meth:`wait` has returned.

    Args:
        ranks: the group of the owners.
        segments: their buffers are all on one device. Ranks must agree on the list first; only addresses may differ.
        traffic: counts bytes and time spent waiting, as kind ``"broadcast"``.
    """

    def __init__(self, ranks: RankGroup, segments: Sequence[Segment], traffic: Traffic) -> None:
        self.ranks, self.traffic = ranks, traffic
        owned = sum(segment.nbytes for segment in segments if segment.owner == ranks.rank)
        self.sent = owned * len(ranks.peers)
        self.received = sum(segment.nbytes for segment in segments) - owned

    def begin(self) -> None:  # noqa: B027 - some begin when there are values to send
        """Begin a broadcast. It may write peers' segments from now on, and reads this rank's own after :meth:`send`."""

    @abstractmethod
    def send(self) -> None:
        """Send this rank's segments. Every rank must call it, even if it owns nothing."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait until peers' segments hold their values; peers may still read this rank's own. No-op when done."""

    def wait(self) -> None:
        """Wait as :meth:`arrive` does, and also until this rank's own segments may be changed.

        On an accelerator both methods only order the current stream after the broadcast.
        """
        self.arrive()

    def broadcast(self) -> None:
        """Call :meth:`begin`, :meth:`send` and :meth:`wait`."""
        self.begin()
        self.send()
        self.wait()
