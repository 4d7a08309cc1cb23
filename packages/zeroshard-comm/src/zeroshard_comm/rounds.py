"""Messages without tensor data: rounds of doubling distance that combine all ranks' numbers, and texts for one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from zeroshard_comm.errors import PeerLostError
from zeroshard_comm.messages import Message, receive, receive_text, send, send_text
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

_TELLING = timedelta(seconds=1)
"""How long a rank that has lost another one waits until the others have heard so."""

_SENDING = timedelta(seconds=8)
"""How long a send may take whose receive has been posted: gloo may never report one to a rank that is gone."""


class Rounds:
    """Sends over the channel of a process group, and remembers who was lost.

    Args:
        channel: a group with gloo for CPU tensors.
        traffic: where bytes and waiting are counted, as kind ``"control"``.
    """

    def __init__(self, channel: RankGroup, traffic: Traffic) -> None:
        self._channel, self._traffic = channel, traffic
        self._lost: dict[int, PeerLostError] = {}

    def combine(self, numbers: torch.Tensor, tag: int, operation: str) -> torch.Tensor:
        """Return the bitwise OR over all ranks. Collective, in log2 N rounds of one message sent and one received.

        In round k each rank sends what it has to the rank 2^k further on. A rank that has lost another one says so in
        place of numbers, and no longer waits for any.

        Args:
            numbers: 64-bit integers, as many on every rank.
            tag: of the messages.
            operation: what the ranks are doing, for messages of errors.

        Raises:
            PeerLostError: if a rank is gone.
        """
        lost = 0  # or 1 + a rank
        rank, size = self._channel.rank, self._channel.world_size
        mine = torch.cat([torch.tensor([lost], dtype=torch.int64, device="cpu"), numbers])
        started = time.perf_counter()
        sends: list[tuple[Message | None, torch.Tensor]] = []
        ahead = [1 << number for number in range(math.ceil(math.log2(size)))]
        # gloo starts a send only once its receive is posted. When a rank has heard of all, theirs are posted, then, and
        # its own sends do not wait.
        rooms = [torch.empty_like(mine) for _ in ahead]
        receives = [
            self._issued(receive, room, (rank - distance) % size, tag, operation)
            for distance, room in zip(ahead, rooms, strict=True)
        ]
        for distance, room, arriving in zip(ahead, rooms, receives, strict=True):
            target, source, payload = (rank + distance) % size, (rank - distance) % size, mine.clone()
            sends.append((self._issued(send, payload, target, tag, operation), payload))
            if lost:
                # Posted anyway: its sender waits until it is received.
                self._channel.context.abandoned.append((arriving, room))
                continue
            try:
                if arriving is not None:
                    arriving.wait(operation)
            except PeerLostError as error:
                self._lost.setdefault(source, error)
            lost = next((1 + peer for peer in (source, target) if peer in self._lost), int(room[0]))
            mine |= room
            mine[0] = lost
        for message, _ in sends:
            # If a rank is gone now, the next agreement notices at the latest.
            with suppress(PeerLostError):
                if message is not None:
                    message.wait(operation, _TELLING if lost else _SENDING)
        if lost:
            # They may arrive when this object is gone, or never.
            self._channel.context.abandoned += sends
        calls = 2 * math.ceil(math.log2(size))
        nbytes = mine.nbytes * calls // 2
        self._traffic.add("control", sent=nbytes, received=nbytes, calls=calls, waited=time.perf_counter() - started)
        if lost:
            raise self._error_for(lost - 1, operation)
        return mine[1:]

    def _issued(
        self, issue: Callable[..., Message], payload: torch.Tensor, peer: int, tag: int, operation: str
    ) -> Message | None:
        try:
            return issue(self._channel, peer, payload, tag, operation)
        except PeerLostError as error:
            self._lost[peer] = error
            return None

    def _error_for(self, peer: int, operation: str) -> PeerLostError:
        """Make the error for a rank that was lost, by this rank or another one."""
        return self._lost.get(peer) or PeerLostError(
            f"rank {self._channel.rank} could not finish {operation}: another rank has lost rank {peer}, whose process "
            f"has ended, was cut off, or did not call {operation} within the process group's timeout. Look at the "
            f"output of rank {peer} first"
        )

    def send_text(self, peer: int, text: str, operation: str) -> None:
        """Send a text to a rank.

        Raises:
            PeerLostError: if it is gone.
        """
        sent = send_text(self._channel, peer, text, operation)
        self._traffic.add("control", sent=sent, calls=2)

    def receive_text(self, peer: int, operation: str) -> str:
        """Receive a text from a rank.

        Raises:
            PeerLostError: if it is gone.
        """
        text = receive_text(self._channel, peer, operation)
        self._traffic.add("control", received=len(text.encode()), calls=2)
        return text
