"""What every rank tells every other in a Join block: whether it still has data, and which call it is about to make.

One small message to and from each peer, tagged, over the control channel of the ranks: so it never meets a collective
that DistributedDataParallel has issued on the same group, also after an error. It is posted in one place and waited for
in another, with a forward in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from zeroshard_comm import Control, Words

TAG_ANNOUNCEMENT = 0x5A530060

_OPERATION = "an iteration inside Join"


class Status(IntEnum):
    """How a rank is."""

    RUNNING = 0
    JOINED = 1
    """It has run out of data."""
    FAILED = 2
    """It leaves the block with an error."""


@dataclass(frozen=True)
class Announcement:
    """What a rank says.

    Attributes:
        status: how it is.
        joinable: the place in the block's list of what it is about to call.
        reduces: of a model, whether gradients will be reduced in the backward of this forward.
        with_grad: of a model, whether gradients are enabled.
    """

    status: Status
    joinable: int = 0
    reduces: bool = False
    with_grad: bool = False


class Announcements:
    """Sends announcements and receives those of the peers, one at a time. It belongs to the thread that trains.

    Args:
        control: the channel.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._posted: Words | None = None

    @property
    def is_posted(self) -> bool:
        """Whether an announcement has been posted whose answers were not waited for."""
        return self._posted is not None

    def post(self, announcement: Announcement) -> None:
        """Send an announcement and expect those of the peers, without waiting.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert self._posted is None
        self._posted = Words(self._control, [_written(announcement)], TAG_ANNOUNCEMENT, _OPERATION)

    def answers(self) -> Sequence[Announcement]:
        """Wait for the announcements of all ranks, and return them in rank order.

        Raises:
            PeerLostError: if a rank is gone, or announces nothing within the timeout.
        """
        posted, self._posted = self._posted, None
        assert posted is not None
        return [_read(word) for [word] in posted.wait()]


def _written(announcement: Announcement) -> int:
    flags = announcement.status | announcement.reduces << 2 | announcement.with_grad << 3
    return flags | announcement.joinable << 4


def _read(word: int) -> Announcement:
    return Announcement(Status(word & 3), word >> 4, bool(word >> 2 & 1), bool(word >> 3 & 1))
