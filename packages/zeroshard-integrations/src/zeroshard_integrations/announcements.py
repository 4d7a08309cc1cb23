"""What every rank tells every other in a Join block: whether it still has data, and which call it is about to make.

One small message to and from each peer, tagged, over the control channel of the ranks: so it never meets a collective
that DistributedDataParallel has issued on the same group, also after an error. It is posted in one place and waited for
in another, with a forward in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from zeroshard_comm import Control
from zeroshard_comm.control import lost, wait_for

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
        self._control, self._ranks = control, control.ranks
        self._own: Announcement | None = None
        self._alone = control.alone
        if self._alone:
            return
        assert control.channel is not None
        self._group = control.channel.group
        self._sent = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._received = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self._ranks.world_size)]
        self._works: list[tuple[int, dist.Work | None]] = []

    @property
    def is_posted(self) -> bool:
        """Whether an announcement has been posted whose answers were not waited for."""
        return self._own is not None

    def post(self, announcement: Announcement) -> None:
        """Send an announcement and expect those of the peers, without waiting.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert self._own is None
        self._own = announcement
        if self._alone:
            return
        self._sent[0] = _written(announcement)
        rank, group = self._ranks.rank, self._group
        for peer in self._ranks.peers:
            try:
                # Receives first: gloo starts a send once its receive is posted.
                # And without dist.irecv and dist.isend: what they check takes longer than what they do.
                received = group.recv([self._received[peer]], peer, TAG_ANNOUNCEMENT)
                sent = group.send([self._sent], peer, TAG_ANNOUNCEMENT)
            except RuntimeError as failure:
                raise lost(failure, peer, rank, _OPERATION) from failure
            self._works += [(peer, received), (peer, sent)]
        peers = len(self._ranks.peers)
        self._control.traffic.add("control", sent=8 * peers, received=8 * peers, calls=2 * peers)

    def answers(self) -> Sequence[Announcement]:
        """Wait for the announcements of all ranks, and return them in rank order.

        Raises:
            PeerLostError: if a rank is gone, or announces nothing within the timeout.
        """
        own, self._own = self._own, None
        assert own is not None
        if self._alone:
            return [own]
        works, self._works = self._works, []
        for peer, work in works:
            wait_for(work, peer, self._ranks.rank, _OPERATION)
        self._received[self._ranks.rank][0] = self._sent[0]
        return [_read(int(word)) for word in self._received]


def _written(announcement: Announcement) -> int:
    flags = announcement.status | announcement.reduces << 2 | announcement.with_grad << 3
    return flags | announcement.joinable << 4


def _read(word: int) -> Announcement:
    return Announcement(Status(word & 3), word >> 4, bool(word >> 2 & 1), bool(word >> 3 & 1))
