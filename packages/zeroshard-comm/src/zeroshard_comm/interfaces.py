"""The two moves of a sharded step as interfaces: gradients to their owners, and the owners' new values to all.

Each is made once for a layout and used in every step. The implementation depends on the backend: tagged messages,
collectives, or reads of peers' memory on one host; see :mod:`zeroshard_comm.transport`.
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
    """A buffer, or a range of one, that one rank owns and all ranks have.

    Attributes:
        owner: group rank.
        buffer: 1-D contiguous tensor; the same length and dtype on every rank.
        is_part: whether it is of a tensor that is cut over several ranks.
        within: the elements of the buffer that are meant, from a start to a stop.
    """

    owner: int
    buffer: torch.Tensor
    is_part: bool = False
    within: slice = field(default_factory=lambda: slice(None), hash=False)

    @property
    def view(self) -> torch.Tensor:
        """The elements, 1-D. Made when asked for: a cut parameter has as many segments as ranks."""
        return self.buffer[self.within]

    @property
    def numel(self) -> int:
        """How many elements."""
        return len(range(*self.within.indices(self.buffer.numel())))

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.numel * self.buffer.element_size()


class BucketReduceWork(ABC):
    """One reduction of a bucket to its owners. It may use the bucket until it is closed."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for what this rank owns: the means of all ranks, at :meth:`GradientReducer.owned`.

        The bucket then holds anything elsewhere. On an accelerator the current stream is ordered after that.

        Raises:
            PeerLostError: if a rank is gone.
        """

    def close(self) -> None:  # noqa: B027 - some have sent all when they are finished
        """Wait until this rank's values have been sent. The ranks agree once more before buckets are written to again.

        Raises:
            PeerLostError: if a rank is gone.
        """


class GradientReducer(ABC):
    """Reduces one bucket in every backward: its owners get the mean over all ranks.

    All ranks begin their buckets in the same order, and agree on something when the last of a backward is closed.
    """

    def owned(self, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return where the mean of a range lies that this rank owns, after :meth:`BucketReduceWork.finish`: 1-D.

        Args:
            buffer: the bucket, 1-D.
            start: first element of the range in the bucket.
            stop: one past the last element.
        """
        return buffer[start:stop]

    def release(self) -> None:  # noqa: B027 - not all keep any
        """Drop what refers to the memory of the last bucket."""

    def expect(self) -> None:  # noqa: B027 - not all can prepare anything
        """Prepare for the next :meth:`begin`, once for each and in their order, before there is anything to send.

        Raises:
            PeerLostError: if a rank is gone.
        """

    @abstractmethod
    def begin(self, buffer: torch.Tensor) -> BucketReduceWork:
        """Send this rank's values to their owners.

        Args:
            buffer: the bucket, 1-D.

        Raises:
            PeerLostError: if a rank is gone.
        """


class ParameterBroadcaster(ABC):
    """Sends the owners' values of the same segments to all ranks, as often as asked, one broadcast after another.

    All methods are collective: every rank calls them in the same order. Segments may be in use until :meth:`wait` has
    returned.

    Args:
        ranks: the group.
        segments: the same list on every rank, up to the addresses of the buffers, which are all on one device. Agree on
            that first.
        traffic: where bytes are counted, as kind ``"share"``.
    """

    def __init__(self, ranks: RankGroup, segments: Sequence[Segment], traffic: Traffic | None = None) -> None:
        self.ranks, self.traffic = ranks, traffic if traffic is not None else Traffic()
        owned = sum(segment.nbytes for segment in segments if segment.owner == ranks.rank)
        self.sent = owned * len(ranks.peers)
        self.received = sum(segment.nbytes for segment in segments) - owned

    def begin(self) -> None:  # noqa: B027 - some do nothing before there are values to send
        """Begin. Segments of peers may be written from now on, this rank's own are read from :meth:`send` on.

        Raises:
            PeerLostError: if a rank is gone.
        """

    @abstractmethod
    def send(self) -> None:
        """Send this rank's segments. Every rank must call it, even if it owns nothing.

        Raises:
            PeerLostError: if a rank is gone.
        """

    @abstractmethod
    def arrive(self) -> None:
        """Return when the segments of peers hold their values; this rank's own may still be read. No-op when done.

        Raises:
            PeerLostError: if a rank is gone.
        """

    def wait(self) -> None:
        """As :meth:`arrive`, and until this rank's own segments may be changed.

        On an accelerator both return when the current stream is ordered after that.

        Raises:
            PeerLostError: if a rank is gone.
        """
        self.arrive()

    def broadcast(self) -> None:
        """Begin, send and wait."""
        self.begin()
        self.send()
        self.wait()
