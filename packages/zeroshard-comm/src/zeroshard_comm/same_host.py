"""Reducers and broadcasters for processes of one host, which read each other's memory (``process_vm_readv``).

Ranks exchange the addresses of their memory: of parameters once per layout, of gradients once per buffer. Then each
exchange is one agreement, that all ranks have their values, and one system call per peer. All ranks agree once more at
the end of a backward or a step, before any of them writes to or frees its memory. If an agreement fails, a rank may
continue and change its memory, so others may read wrong values; but their closing agreement fails too, so no rank uses
these values. Only the thread that calls a collective method or a communication hook uses this module.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from zeroshard_core import Run

from zeroshard_comm.agreement import Coordinator
from zeroshard_comm.errors import PeerLostError, peer_lost
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.message_exchange import mean_in_rank_order
from zeroshard_comm.messages import PACKED_BYTES, BucketMessage, bucket_messages
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.process_memory import SWITCH, ProcessMemory, machine

WORTH_READING = 512 * 1024
"""Fewer bytes in total are sent by messages, because agreeing would cost more than the copies."""

_READ_BYTES = 512 * 1024
"""Large gradients are read in parts of at most this many bytes, which a cache can hold until they are added."""

_READY, _IN_BACKWARD = "step(), before parameters are read", "backward(), before gradients are read"


@dataclass
class PeerMemory:
    """The process ids of all peers of a group, by rank; empty unless every rank can read every other's memory."""

    is_known: bool = False
    processes: Mapping[int, int] = field(default_factory=dict)


def probe_peer_memory(coordinator: Coordinator) -> None:
    """Test whether all ranks, which have just agreed, can read each other's memory. Collective the first time."""
    ranks = coordinator.ranks
    found = ranks.context.shared(PeerMemory)
    if coordinator.is_single_rank or found.is_known or not ranks.sends_tagged(torch.device("cpu")):
        return
    secret = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
    mine = (machine(), os.getpid(), secret.data_ptr(), int(secret))
    places = coordinator.gather_ints(mine, "connect()")
    reads = mine[0] > 0 and all(place[0] == mine[0] and _reads(*place[1:]) for place in places)
    # `secret` must live until all ranks have read it.
    reads = not coordinator.agree("connect()", flag=not reads)
    found.is_known, found.processes = True, {peer: places[peer][1] for peer in ranks.peers} if reads else {}
    del secret


def _reads(process: int, address: int, expected: int) -> bool:
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        ProcessMemory(process, [(found.data_ptr(), address, found.nbytes)]).read()
    except OSError:
        return False
    return int(found) == expected


def all_read(ranks: RankGroup) -> bool:
    """Return True if :func:`probe_peer_memory` found that every rank of a group can read every other."""
    return bool(ranks.context.shared(PeerMemory).processes)


def _read(memory: ProcessMemory, peer: int, rank: int, operation: str) -> None:
    try:
        memory.read()
    except ProcessLookupError as failure:
        raise peer_lost(RuntimeError(str(failure)), peer, rank, operation) from failure
    except OSError as failure:
        raise PeerLostError(
            f"rank {rank} could not read memory of rank {peer} during {operation} ({failure}). Set {SWITCH}=0 in the "
            f"environment of all ranks to send messages instead"
        ) from failure


class SameHostBroadcaster(ParameterBroadcaster):
    """Reads segments from their owners' memory, on a group for which :func:`all_read` is true.

    After :meth:`wait` all ranks must agree once more before an owner writes to its segments.
    """

    def __init__(self, coordinator: Coordinator, segments: Sequence[Segment]) -> None:
        super().__init__(coordinator.ranks, segments, coordinator.traffic)
        self.coordinator, self._segments = coordinator, segments
        self._reads: list[tuple[int, ProcessMemory]] | None = None
        self._is_sent = False

    def send(self) -> None:
        """Agree that all owners have their values, and exchange addresses if a rank lacks them."""
        if self.coordinator.agree(_READY, flag=self._reads is None):
            processes = self.ranks.context.shared(PeerMemory).processes
            places = self.coordinator.gather_ints([0, *[segment.view.data_ptr() for segment in self._segments]], _READY)
            self._reads = [
                (peer, ProcessMemory(processes[peer], self._parts_of(peer, places[peer][1:])))
                for peer in self.ranks.peers
            ]
        self._is_sent = True

    def arrive(self) -> None:
        """Read the segments of every peer."""
        if not self._is_sent:
            return
        self._is_sent, started = False, time.perf_counter()
        for peer, memory in self._reads or ():
            _read(memory, peer, self.ranks.rank, "step()")
        calls, waited = len(self.ranks.peers), time.perf_counter() - started
        self.traffic.add("broadcast", sent=self.sent, received=self.received, calls=calls, waited=waited)

    def _parts_of(self, peer: int, places: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return local address, remote address and bytes of a peer's segments."""
        return [
            (segment.view.data_ptr(), place, segment.nbytes)
            for segment, place in zip(self._segments, places, strict=True)
            if segment.owner == peer
        ]


def scratch_memory() -> torch.Tensor:
    """Return memory for gradients that are read: one row for the sum over lower ranks, one for the next term."""
    return torch.empty((2, max(PACKED_BYTES, _READ_BYTES)), dtype=torch.uint8, device="cpu")


class SameHostReducer(GradientReducer):
    """Adds up this rank's part of a bucket from the other ranks' memory, in :meth:`BucketReduceWork.finish`.

    Reducers that are used one after another share :func:`scratch_memory`.
    """

    def __init__(
        self, coordinator: Coordinator, runs: Sequence[Run], dtype: torch.dtype, scratch: torch.Tensor
    ) -> None:
        self.coordinator, self.ranks, self.dtype = coordinator, coordinator.ranks, dtype
        owned_runs = [run for run in runs if run.rank == self.ranks.rank]
        self._messages = bucket_messages(owned_runs, dtype.itemsize, _READ_BYTES)
        owned = sum(message.nbytes for message in self._messages)
        self._received = owned * len(self.ranks.peers)
        self._sent = sum(run.stop - run.start for run in runs) * dtype.itemsize - owned
        self._scratch = scratch
        # The address of this rank's bucket that the peers know; 0 if they know none.
        self._known = 0
        self._reads: dict[int, list[ProcessMemory]] = {}

    def begin(self, buffer: torch.Tensor) -> BucketReduceWork:
        """Return the reduction of a bucket, which sends nothing yet."""
        return _Gathering(self, buffer)

    def exchange_addresses(self, buffer: torch.Tensor) -> None:
        """Agree that all ranks have their gradients, and exchange addresses if a rank lacks them. Collective."""
        own = buffer.data_ptr()
        if self.coordinator.agree(_IN_BACKWARD, flag=own != self._known):
            addresses = self.coordinator.gather_ints([own], _IN_BACKWARD)
            self._known = own
            processes = self.ranks.context.shared(PeerMemory).processes
            self._reads = {
                peer: [self._memory(process, peer, addresses[peer][0], message) for message in self._messages]
                for peer, process in processes.items()
            }

    def add_up(self, buffer: torch.Tensor) -> None:
        """Compute the mean of the ranges that this rank owns."""
        waited = 0.0
        for number, message in enumerate(self._messages):
            own = tuple([buffer[start:stop] for start, stop in message.ranges])
            waited += mean_in_rank_order(self.ranks, own, partial(self._fetch, number), lambda _: None)
        calls = len(self._messages) * len(self.ranks.peers)
        self.coordinator.traffic.add("reduce", sent=self._sent, received=self._received, calls=calls, waited=waited)

    def _fetch(self, number: int, peer: int) -> torch.Tensor:
        _read(self._reads[peer][number], peer, self.ranks.rank, "backward()")
        return self._scratch[min(peer, 1), : self._messages[number].nbytes]

    def _memory(self, process: int, peer: int, address: int, message: BucketMessage) -> ProcessMemory:
        here, parts = self._scratch[min(peer, 1)].data_ptr(), list[tuple[int, int, int]]()
        for start, stop in message.ranges:
            nbytes = (stop - start) * self.dtype.itemsize
            parts.append((here, address + start * self.dtype.itemsize, nbytes))
            here += nbytes
        return ProcessMemory(process, parts)


class _Gathering(BucketReduceWork):
    def __init__(self, reducer: SameHostReducer, buffer: torch.Tensor) -> None:
        self._reducer, self._buffer = reducer, buffer

    def finish(self) -> None:
        self._reducer.exchange_addresses(self._buffer)
        self._reducer.add_up(self._buffer)
