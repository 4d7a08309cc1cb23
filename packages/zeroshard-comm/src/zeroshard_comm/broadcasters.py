"""Parameters from their owners to all ranks: by tagged messages, and by collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist

from zeroshard_comm.interfaces import ParameterBroadcaster, Segment
from zeroshard_comm.messages import PACK_BELOW, Message, PackedMessage, pack_pieces, receive, send, wait_for_collective
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_SHARE = 0x5A530010

_OPERATION = "a step"


class _Packed(ParameterBroadcaster):
    """Packs small segments into ``messages``."""

    def __init__(
        self,
        ranks: RankGroup,
        segments: Sequence[Segment],
        traffic: Traffic | None = None,
        *,
        pack_below: int = PACK_BELOW,
    ) -> None:
        super().__init__(ranks, segments, traffic)
        # A single rank has nothing to send.
        pieces = [(segment.owner, segment.buffer) for segment in self.segments] if ranks.world_size > 1 else []
        self.messages = pack_pieces(pieces, pack_below)
        self._arriving: list[tuple[PackedMessage, Callable[[], None]]] = []

    def arrive(self) -> None:
        """Wait for messages in their order, and unpack each while the rest arrives."""
        started = time.perf_counter()
        arriving, self._arriving = self._arriving, []
        for message, wait in arriving:
            wait()
            if message.owner != self.ranks.rank:
                message.unpack()
        self.traffic.add("share", waited=time.perf_counter() - started)


class MessageBroadcaster(_Packed):
    """Sends each message to every peer. Tags keep them apart from everything else on the group, in any order.

    Args:
        ranks: the group; its backend matches messages by tag (gloo, CPU tensors).
        segments: as for :class:`ParameterBroadcaster`.
        traffic: as there.
        tag: of the messages. Messages with one tag between two ranks are matched in order: broadcasters that are
            not used in the same order on all ranks need different tags.
        pack_below: as for :func:`~zeroshard_comm.messages.pack_pieces`.
    """

    def __init__(
        self,
        ranks: RankGroup,
        segments: Sequence[Segment],
        traffic: Traffic | None = None,
        *,
        tag: int = TAG_SHARE,
        pack_below: int = PACK_BELOW,
    ) -> None:
        super().__init__(ranks, segments, traffic, pack_below=pack_below)
        self.tag = tag
        self._sends: list[Message] = []

    def begin(self) -> None:
        """Post the receives of all segments that peers own."""
        self._arriving = [
            (message, partial(receive(self.ranks, message.owner, message.data, self.tag, _OPERATION).wait, _OPERATION))
            for message in self.messages
            if message.owner != self.ranks.rank
        ]
        self.traffic.add("share", received=self.received, calls=len(self._arriving))

    def send(self) -> None:
        """Send every peer this rank's messages."""
        self._sends = []
        for message in self.messages:
            if message.owner == self.ranks.rank:
                message.pack()
                self._sends += [send(self.ranks, peer, message.data, self.tag, _OPERATION) for peer in self.ranks.peers]
        self.traffic.add("share", sent=self.sent, calls=len(self._sends))

    def wait(self) -> None:
        """Wait for the sends, too."""
        self.arrive()
        started = time.perf_counter()
        while self._sends:
            # Even if a later one fails: these messages are not waited for again.
            self._sends.pop(0).wait(_OPERATION)
        self.traffic.add("share", waited=time.perf_counter() - started)


class CollectiveBroadcaster(_Packed):
    """One broadcast for each message, all in flight at once, issued in one order by the thread that calls."""

    def begin(self) -> None:
        """Issue nothing yet: collectives are issued in one order, when there are values to send."""

    def send(self) -> None:
        """Issue the broadcasts of all ranks' messages."""
        self._arriving, moves_data = [], self.ranks.moves_data()
        for message in self.messages:
            if message.owner == self.ranks.rank:
                message.pack()
            # As bytes: backends refuse some dtypes that they would move without looking at them.
            work = dist.broadcast(message.data, group=self.ranks.group, group_src=message.owner, async_op=True)
            if moves_data:
                self._arriving.append((message, partial(wait_for_collective, work, self.ranks, "share")))
        self.traffic.add("share", sent=self.sent, received=self.received, calls=len(self.messages))
