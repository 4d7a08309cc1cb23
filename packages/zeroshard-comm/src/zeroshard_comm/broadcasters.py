"""Sends parameters from their owners to all ranks, by tagged messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zeroshard_comm.interfaces import ParameterBroadcaster, Segment
from zeroshard_comm.messages import PACK_BELOW, Message, PackedMessage, pack_pieces, receive, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_SHARE = 0x5A530010

_OPERATION = "a step"


class MessageBroadcaster(ParameterBroadcaster):
    """Sends each segment to every peer. Tags keep messages apart from everything else on the group, in any order.

    Small segments are packed.

    Args:
        ranks: the group; its backend matches messages by tag (gloo, CPU tensors).
        segments: as for :class:`ParameterBroadcaster`.
        traffic: as for :class:`ParameterBroadcaster`.
        tag: the tag of the messages. Messages with one tag between two ranks are matched in order, so broadcasters that
            ranks do not use in the same order need different tags.
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
        super().__init__(ranks, segments, traffic)
        # A single rank sends nothing.
        pieces = [(segment.owner, segment.view) for segment in segments] if ranks.world_size > 1 else []
        messages = pack_pieces(pieces, pack_below)
        self._own = [message for message in messages if message.owner == ranks.rank]
        self._others = [message for message in messages if message.owner != ranks.rank]
        self._tag = tag
        self._arriving: list[tuple[PackedMessage, Message]] = []
        self._sends: list[Message] = []

    def begin(self) -> None:
        """Post the receives of all segments that peers own."""
        self._arriving = [
            (message, receive(self.ranks, message.owner, message.data, self._tag, _OPERATION))
            for message in self._others
        ]

    def send(self) -> None:
        """Send every peer this rank's messages."""
        self._sends = []
        for message in self._own:
            message.pack()
            self._sends += [send(self.ranks, peer, message.data, self._tag, _OPERATION) for peer in self.ranks.peers]
        calls = len(self._arriving) + len(self._sends)
        self.traffic.add("share", sent=self.sent, received=self.received, calls=calls)

    def arrive(self) -> None:
        """Wait for messages in their order, and unpack each while the rest arrives."""
        started = time.perf_counter()
        arriving, self._arriving = self._arriving, []
        for message, receiving in arriving:
            receiving.wait(_OPERATION)
            message.unpack()
        self.traffic.add("share", waited=time.perf_counter() - started)

    def wait(self) -> None:
        """Wait for the sends, too."""
        self.arrive()
        started = time.perf_counter()
        while self._sends:
            # Removed before the wait: if it raises, this rank must not wait for the message again.
            self._sends.pop(0).wait(_OPERATION)
        self.traffic.add("share", waited=time.perf_counter() - started)
