"""Combines numbers of all ranks by messages, in rounds of doubling distance, and names lost ranks.

In round k each rank sends its numbers to rank + 2^k, and combines them with those that it receives from rank - 2^k, so
every rank has the numbers of all after log2 N rounds (the dissemination barrier: D. Hensgen, R. Finkel, U. Manber, Two
algorithms for barrier synchronization, 1988). A rank that has lost another one sends the number of the lost rank, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from zeroshard_comm.errors import PeerLostError, lost_by_another
from zeroshard_comm.messages import Message, receive, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

_TELLING = timedelta(seconds=1)
"""How long a rank that has lost another one waits for its messages to the others to be sent."""

_SENDING = timedelta(seconds=8)
"""Timeout of a send whose receive has been posted: gloo may never report that the receiver is gone."""


def combine_in_rounds(
    channel: RankGroup,
    numbers: torch.Tensor,
    tag: int,
    operation: str,
    traffic: Traffic,
    lost: PeerLostError | None = None,
    *,
    late_is_lost: bool = True,
) -> torch.Tensor:
    """Return the bitwise OR of 64-bit integers over all ranks. Every rank passes equally many. Collective.

    The channel has gloo for CPU tensors. A rank that has lost another one before passes that error as ``lost``, tells
    the others, and raises the error. Raises PeerLostError if a rank is gone, or does not send within the timeout of the
    channel; without ``late_is_lost`` the error does not name a rank that only timed out.
    """
    rank, size = channel.rank, channel.world_size
    # By lost rank; the key is the number of ranks if it is unknown.
    errors: dict[int, PeerLostError] = {}
    if lost is not None:
        errors[size if lost.peer is None else lost.peer] = lost
    # By the rank that refused a send: it is lost, or has closed its connections because another rank is lost.
    refused: dict[int, PeerLostError] = {}

    def issued(
        issue: Callable[..., Message], payload: torch.Tensor, peer: int, failed: dict[int, PeerLostError]
    ) -> Message | None:
        try:
            return issue(channel, peer, payload, tag, operation)
        except PeerLostError as error:
            failed.setdefault(peer, error)
            return None

    gone = next((1 + peer for peer in errors), 0)
    mine = torch.cat([torch.tensor([gone], dtype=torch.int64, device="cpu"), numbers])
    started = time.perf_counter()
    sends: list[Message | None] = []
    ahead = [1 << number for number in range(math.ceil(math.log2(size)))]
    # Post all before any wait: gloo starts a send only after its receive is posted, which a slow rank would delay.
    receives = [issued(receive, torch.empty_like(mine), (rank - distance) % size, errors) for distance in ahead]
    for number, (distance, arriving) in enumerate(zip(ahead, receives, strict=True)):
        target, source = (rank + distance) % size, (rank - distance) % size
        if errors and not gone:
            gone = mine[0] = next(1 + peer for peer in errors)
        sends.append(issued(send, mine.clone(), target, refused))
        # A rank that knows of a lost one only tells the others: it must not wait for one that is slow.
        if arriving is None or gone or errors:
            continue
        waiting = time.perf_counter()
        try:
            # After a refused send, the next ranks must hear of it before their own wait for this rank times out.
            limit = _TELLING if refused else channel.timeout
            if limit is not None and not refused:
                # The sender may itself wait as long in the round before.
                limit += number * _TELLING
            arriving.wait(operation, limit)
        except PeerLostError as error:
            is_late = limit is not None and time.perf_counter() - waiting >= limit.total_seconds()
            unnamed = {} if late_is_lost else {size: lost_by_another(rank, None, operation)}
            errors.update((refused or unnamed or {source: error}) if is_late else {source: error})
        else:
            mine |= arriving.buffer
            gone = int(arriving.buffer[0])
    if not gone:
        # A rank that was told of a lost one raises the same message as the others that were told.
        errors = errors or refused
        gone = next((1 + peer for peer in errors), 0)
    for message in filter(None, sends):
        # If a rank is gone now, the next agreement raises.
        with suppress(PeerLostError):
            message.wait(operation, _TELLING if gone else _SENDING)
    nbytes, waited = mine.nbytes * len(ahead), time.perf_counter() - started
    traffic.add("control", sent=nbytes, received=nbytes, calls=2 * len(ahead), waited=waited)
    if gone:
        raise errors.get(gone - 1) or lost_by_another(rank, gone - 1 if gone <= size else None, operation)
    return mine[1:]
