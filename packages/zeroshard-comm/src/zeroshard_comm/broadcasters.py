"""Parameters from their owners to all ranks, by tagged messages."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from zeroshard_comm.interfaces import Broadcast, ParameterBroadcaster, Segment
from zeroshard_comm.messages import PACK_BELOW, Message, pack_pieces, receive, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_SHARE = 0x5A530010

_OPERATION = "a step"


class _Packed(ParameterBroadcaster):
    """Packs small segments into ``messages``, which carry values if it ``unpacks`` them."""

    unpacks = True

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


class _Arriving(Broadcast):
    """Waits for messages in their order, and unpacks each while the rest arrives."""

    def __init__(self, broadcaster: _Packed) -> None:
        self._broadcaster, self._rank = broadcaster, broadcaster.ranks.rank
        self._arrived = False

    def arrive(self) -> None:
        if self._arrived:
            return
        started = time.perf_counter()
        for place, message in enumerate(self._broadcaster.messages):
            self._wait_for(place)
            if message.owner != self._rank and self._broadcaster.unpacks:
                message.unpack()
        self._arrived = True
        self._broadcaster.traffic.add("share", waited=time.perf_counter() - started)

    @abstractmethod
    def _wait_for(self, place: int) -> None:
        """Wait until a message of another rank has arrived."""


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

    def begin(self) -> Broadcast:
        """Post the receives of all segments that peers own."""
        return _Sent(self)


class _Sent(_Arriving):
    def __init__(self, broadcaster: MessageBroadcaster) -> None:
        super().__init__(broadcaster)
        self._receives = {
            place: receive(broadcaster.ranks, message.owner, message.data, broadcaster.tag, _OPERATION)
            for place, message in enumerate(broadcaster.messages)
            if message.owner != self._rank
        }
        self._broadcaster: MessageBroadcaster = broadcaster
        self._sends: list[Message] = []
        broadcaster.traffic.add("share", received=broadcaster.received, calls=len(self._receives))

    def send(self) -> None:
        broadcaster = self._broadcaster
        for message in broadcaster.messages:
            if message.owner == self._rank:
                message.pack()
                self._sends += [
                    send(broadcaster.ranks, peer, message.data, broadcaster.tag, _OPERATION)
                    for peer in broadcaster.ranks.peers
                ]
        broadcaster.traffic.add("share", sent=broadcaster.sent, calls=len(self._sends))

    def wait(self) -> None:
        self.arrive()
        started = time.perf_counter()
        while self._sends:
            # Even if a later one fails: these messages are not waited for again.
            self._sends.pop(0).wait(_OPERATION)
        self._broadcaster.traffic.add("share", waited=time.perf_counter() - started)

    def _wait_for(self, place: int) -> None:
        arriving = self._receives.pop(place, None)
        if arriving is not None:
            arriving.wait(_OPERATION)
