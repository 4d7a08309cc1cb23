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
    channel: RankGroup,
    numbers: torch.Tensor,
    tag: int,
    operation: str,
    traffic: Traffic,
    lost: PeerLostError | None = None,
    *,
    late_is_lost: bool = True,
) -> torch.Tensor:
    """Return the bitwise OR over all ranks of 64-bit integers, as many on every rank, or raise PeerLostError.

    The channel has gloo for CPU tensors. A rank that has lost another one before sets ``lost``, and only tells the
    others. Without ``late_is_lost`` a rank that does not send within the channel's timeout is not named.
    """
    rank, size = channel.rank, channel.world_size
    # By the rank that was lost; it is the number of ranks if nobody knows which.
    errors: dict[int, PeerLostError] = {}
    if lost is not None:
        errors[size if lost.peer is None else lost.peer] = lost
    # By the rank that refused a send: it is lost, or has closed its connections because it has heard of a lost rank.
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
    # gloo starts a send only once its receive is posted. When a rank has heard of all, theirs are posted, then, and
    # its own sends do not wait.
    receives = [issued(receive, torch.empty_like(mine), (rank - distance) % size, errors) for distance in ahead]
    for number, (distance, arriving) in enumerate(zip(ahead, receives, strict=True)):
        target, source = (rank + distance) % size, (rank - distance) % size
        if errors and not gone:
            gone = mine[0] = next(1 + peer for peer in errors)
        sends.append(issued(send, mine.clone(), target, refused))
        # That a rank is lost is only passed on: a rank that is late may come in hours.
        if arriving is None or gone or errors:
            continue
        waiting = time.perf_counter()
        try:
            # The ranks that this one has yet to send to hear of the rank that refused before they wait for this one.
            limit = _TELLING if refused else channel.timeout
            if limit is not None and not refused:
                # The rank that is waited for may wait as long, in the round before.
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
        # Else all ranks name the lost one in the same words.
        errors = errors or refused
        gone = next((1 + peer for peer in errors), 0)
    for message in filter(None, sends):
        # If a rank is gone now, the next agreement notices at the latest.
        with suppress(PeerLostError):
            message.wait(operation, _TELLING if gone else _SENDING)
    nbytes, waited = mine.nbytes * len(ahead), time.perf_counter() - started
    traffic.add("control", sent=nbytes, received=nbytes, calls=2 * len(ahead), waited=waited)
    if gone:
        raise errors.get(gone - 1) or lost_by_another(rank, gone - 1 if gone <= size else None, operation)
    return mine[1:]


def lost_by_another(rank: int, peer: int | None, operation: str) -> PeerLostError:
    """Return the error of a rank that hears of a lost one; ``peer`` is None if it is not known which one."""
    who = f"rank {peer}" if peer is not None else "one"
    error = PeerLostError(
        f"rank {rank} could not finish {operation}: another rank has lost {who}, whose process has ended, was cut off, "
        f"or did not call {operation} within the process group's timeout. Look at the output of "
        f"{who if peer is not None else 'all ranks'} first"
    )
    error.peer = peer
    return error
