"""Numbers of all ranks combined by messages, in rounds of doubling distance, in which lost ranks are named.

In round k each rank sends what it has to the rank 2^k further on, so after log2 N rounds, of one message sent and one
received, every rank has the numbers of all (the dissemination barrier: D. Hensgen, R. Finkel, U. Manber, Two algorithms
for barrier synchronization, 1988). A rank that has lost another one says so in place of numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from zeroshard_comm.errors import PeerLostError
from zeroshard_comm.messages import Message, receive, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

_TELLING = timedelta(seconds=1)
"""How long a rank that has lost another one waits until the others have heard so."""

_SENDING = timedelta(seconds=8)
"""How long a send may take whose receive has been posted: gloo may never report one to a rank that is gone."""


def combine_in_rounds(
    channel: RankGroup, numbers: torch.Tensor, tag: int, operation: str, traffic: Traffic
) -> torch.Tensor:
    """Return the bitwise OR over all ranks. Collective.

    Args:
        channel: a group with gloo for CPU tensors.
        numbers: 64-bit integers, as many on every rank.
        tag: of the messages.
        operation: what the ranks are doing, for messages of errors.
        traffic: where bytes and waiting are counted, as kind ``"control"``.

    Raises:
        PeerLostError: if a rank is gone.
    """
    lost_by_this: dict[int, PeerLostError] = {}
    lost = 0  # or 1 + a rank
    rank, size = channel.rank, channel.world_size

    def issued(issue: Callable[..., Message], payload: torch.Tensor, peer: int) -> Message | None:
        try:
            return issue(channel, peer, payload, tag, operation)
        except PeerLostError as error:
            lost_by_this[peer] = error
            return None

    mine = torch.cat([torch.tensor([lost], dtype=torch.int64, device="cpu"), numbers])
    started = time.perf_counter()
    sends: list[tuple[Message | None, torch.Tensor]] = []
    ahead = [1 << number for number in range(math.ceil(math.log2(size)))]
    # gloo starts a send only once its receive is posted. When a rank has heard of all, theirs are posted, then, and
    # its own sends do not wait.
    rooms = [torch.empty_like(mine) for _ in ahead]
    receives = [issued(receive, room, (rank - distance) % size) for distance, room in zip(ahead, rooms, strict=True)]
    for distance, room, arriving in zip(ahead, rooms, receives, strict=True):
        target, source, payload = (rank + distance) % size, (rank - distance) % size, mine.clone()
        sends.append((issued(send, payload, target), payload))
        if lost:
            # Posted anyway: its sender waits until it is received.
            channel.context.abandoned.append((arriving, room))
            continue
        try:
            if arriving is not None:
                arriving.wait(operation)
        except PeerLostError as error:
            lost_by_this.setdefault(source, error)
        lost = next((1 + peer for peer in (source, target) if peer in lost_by_this), int(room[0]))
        mine |= room
        mine[0] = lost
    for message, _ in sends:
        # If a rank is gone now, the next agreement notices at the latest.
        with suppress(PeerLostError):
            if message is not None:
                message.wait(operation, _TELLING if lost else _SENDING)
    nbytes, waited = mine.nbytes * len(ahead), time.perf_counter() - started
    traffic.add("control", sent=nbytes, received=nbytes, calls=2 * len(ahead), waited=waited)
    if lost:
        # They may arrive when this call has returned, or never.
        channel.context.abandoned += sends
        raise lost_by_this.get(lost - 1) or _lost_by_another(channel.rank, lost - 1, operation)
    return mine[1:]


def _lost_by_another(rank: int, peer: int, operation: str) -> PeerLostError:
    return PeerLostError(
        f"rank {rank} could not finish {operation}: another rank has lost rank {peer}, whose process has ended, was "
        f"cut off, or did not call {operation} within the process group's timeout. Look at the output of rank {peer} "
        f"first"
    )
