"""A few numbers from every rank to every rank, sent at once and read later.

They travel over the control channel, from host to host, so that reading them does not wait for an accelerator.
If nothing is sent (a single rank, or torch's ``fake`` backend), a rank gets only its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from zeroshard_comm.agreement import Control
from zeroshard_comm.messages import Message, receive, send

TAG_NOTES = 0x5A530040


class Words:
    """Numbers under way. All ranks send as many, and make these objects in the same order for each tag.

    Args:
        control: has the channel, and counts the bytes as kind ``"control"``.
        words: 64-bit integers.
        tag: of the messages.
        operation: what the ranks are doing, for messages.

    Raises:
        PeerLostError: if a rank is gone.
    """

    def __init__(self, control: Control, words: Sequence[int], tag: int, operation: str) -> None:
        self._control, self._words, self._operation = control, list(words), operation
        self._arriving: dict[int, torch.Tensor] = {}
        self._messages: list[Message] = []
        channel = control.channel
        if channel is None:
            return
        # What is sent must live as long as the sends.
        self._own = torch.tensor(self._words, dtype=torch.int64, device="cpu")
        self._arriving = {peer: torch.empty_like(self._own) for peer in channel.peers}
        self._messages = [receive(channel, peer, theirs, tag, operation) for peer, theirs in self._arriving.items()]
        self._messages += [send(channel, peer, self._own, tag, operation) for peer in channel.peers]
        peers = len(channel.peers)
        nbytes = self._own.nbytes * peers
        control.traffic.add("control", sent=nbytes, received=nbytes, calls=2 * peers)

    def wait(self) -> list[list[int]]:
        """Return the numbers of every rank, in rank order; only this rank's own if nothing is sent.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self._control.channel is None:
            return [self._words]
        started = time.perf_counter()
        rank = self._control.channel.rank
        for message in self._messages:
            message.wait(self._operation)
        self._messages = []
        self._control.traffic.add("control", waited=time.perf_counter() - started)
        found = {peer: words.tolist() for peer, words in self._arriving.items()} | {rank: self._words}
        return [found[other] for other in range(len(found))]
