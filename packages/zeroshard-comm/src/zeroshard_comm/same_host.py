"""The two moves between processes of one host: reads of the owners' or contributors' memory (``process_vm_readv``).

Over loopback a byte is copied into the kernel by one process and out of it by the other, by threads that must be woken.
A read across processes is one copy, made by the rank that needs it. Ranks say where their memory lies, once per layout
with parameters, once per buffer with gradients. Then a move is an agreement, and one call of the kernel per peer:
*ready*, when all ranks have their values; and the reads. All ranks agree once more, at the end of a backward or a step,
before any may write to or free its memory. All this belongs to the thread that calls a collective method, or in which a
framework calls a communication hook. After an agreement that has failed a rank may go on, and what others read then may
be anything; but they cannot agree that they are done, so that no rank takes it for good.
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
from zeroshard_comm.message_reducer import mean_in_rank_order
from zeroshard_comm.messages import PACKED_BYTES, BucketMessage, bucket_messages
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.process_memory import SWITCH, ProcessMemory, machine

WORTH_READING = 512 * 1024
"""Fewer bytes in all travel in messages: agreeing costs more than the copies."""

_READ_BYTES = 512 * 1024
"""Large gradients are read in parts of at most so many bytes, which a cache may hold until they are added."""

_READY, _IN_BACKWARD = "step(), where all ranks have their new values", "backward(), where all ranks have gradients"


@dataclass
class PeerMemory:
    """Whose memory this rank reads on one process group; see :meth:`zeroshard_comm.GroupContext.shared`.

    Attributes:
        is_known: whether the ranks have tried to read each other.
        processes: the processes of peers whose memory this rank reads: all if every rank can read every other.
    """

    is_known: bool = False
    processes: Mapping[int, int] = field(default_factory=dict)


def probe_peer_memory(coordinator: Coordinator) -> None:
    """Find out whether all ranks, which have just agreed, can read each other's memory. Collective the first time."""
    ranks = coordinator.ranks
    found = ranks.context.shared(PeerMemory)
    if coordinator.is_single_rank or found.is_known or not ranks.sends_tagged(torch.device("cpu")):
        return
    secret = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
    mine = (machine(), os.getpid(), secret.data_ptr(), int(secret))
    places = coordinator.gather_ints(mine, "connect()")
    reads = mine[0] > 0 and all(place[0] == mine[0] and _reads(*place[1:]) for place in places)
    # Until all ranks have looked, the number must stay where it is.
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
    """Whether every rank of a group can read from every other: what :func:`probe_peer_memory` has found."""
    return bool(ranks.context.shared(PeerMemory).processes)


def _read(memory: ProcessMemory, peer: int, rank: int, operation: str) -> None:
    try:
        memory.read()
    except ProcessLookupError as failure:
        raise peer_lost(RuntimeError(str(failure)), peer, rank, operation) from failure
    except OSError as failure:
        raise PeerLostError(
            f"rank {rank} could not read memory of rank {peer} during {operation} ({failure}). Set {SWITCH}=0 in the "
            f"environment of all ranks, and they will send instead"
        ) from failure


class SameHostBroadcaster(ParameterBroadcaster):
    """Reads segments where their owners have them, on a group of which :func:`all_read` is true.

    After :meth:`wait` all ranks must agree once more before an owner writes to its segments.
    """

    def __init__(self, coordinator: Coordinator, segments: Sequence[Segment]) -> None:
        super().__init__(coordinator.ranks, segments, coordinator.traffic)
        self.coordinator, self._segments = coordinator, segments
        self._reads: list[tuple[int, ProcessMemory]] | None = None
        self._is_sent = False

    def send(self) -> None:
        """Agree that all owners have their values, and exchange addresses if some rank lacks them."""
        if self.coordinator.agree(_READY, flag=self._reads is None):
            processes = self.ranks.context.shared(PeerMemory).processes
            places = self.coordinator.gather_ints([0, *[segment.view.data_ptr() for segment in self._segments]], _READY)
            self._reads = [
                (peer, ProcessMemory(processes[peer], self._parts_of(peer, places[peer][1:])))
                for peer in self.ranks.peers
            ]
        self._is_sent = True

    def arrive(self) -> None:
        """Read from every peer what it owns."""
        if not self._is_sent:
            return
        self._is_sent, started = False, time.perf_counter()
        for peer, memory in self._reads or ():
            _read(memory, peer, self.ranks.rank, "step()")
        waited = time.perf_counter() - started
        self.traffic.add("share", sent=self.sent, received=self.received, calls=len(self.ranks.peers), waited=waited)

    def _parts_of(self, peer: int, places: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where a peer's segments lie here and there, and their bytes; as few as possible."""
        parts: list[tuple[int, int, int]] = []
        for segment, there in zip(self._segments, places, strict=True):
            if segment.owner == peer:
                here, nbytes = segment.view.data_ptr(), segment.nbytes
                if parts and (parts[-1][0] + parts[-1][2], parts[-1][1] + parts[-1][2]) == (here, there):
                    here, there, nbytes = parts[-1][0], parts[-1][1], parts.pop()[2] + nbytes
                parts.append((here, there, nbytes))
        return parts


def scratch_memory() -> torch.Tensor:
    """Return memory for what is read of gradients: the sum over the ranks before this one, and the next term."""
    return torch.empty((2, max(PACKED_BYTES, _READ_BYTES)), dtype=torch.uint8, device="cpu")


class SameHostReducer(GradientReducer):
    """Reads this rank's part of a bucket from the other ranks' memory, and adds it up.

    Nothing is done before :meth:`BucketReduceWork.finish`, which agrees.
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
        self._addresses: list[int] = []
        self._reads: dict[int, list[ProcessMemory]] = {}

    def begin(self, buffer: torch.Tensor) -> BucketReduceWork:
        """Keep the bucket; nothing is sent yet."""
        return _Gathering(self, buffer)

    def exchange_addresses(self, buffer: torch.Tensor) -> None:
        """Agree that all ranks have their gradients, and learn where the bucket lies there. Collective.

        Raises:
            DisagreementError: if ranks are in different calls.
            PeerLostError: if a rank is gone.
        """
        own = buffer.data_ptr()
        is_known = bool(self._addresses) and self._addresses[self.ranks.rank] == own
        if self.coordinator.agree(_IN_BACKWARD, flag=not is_known):
            self._addresses = [address for [address] in self.coordinator.gather_ints([own], _IN_BACKWARD)]
            processes = self.ranks.context.shared(PeerMemory).processes
            self._reads = {
                peer: [self._memory(process, peer, self._addresses[peer], message) for message in self._messages]
                for peer, process in processes.items()
            }

    def add_up(self, buffer: torch.Tensor) -> None:
        """Make the mean of what this rank owns."""
        waited = 0.0
        for number, message in enumerate(self._messages):
            own = tuple([buffer[start:stop] for start, stop in message.ranges])
            waited += mean_in_rank_order(self.ranks, own, partial(self._take, number), lambda _: None)
        calls = len(self._messages) * len(self.ranks.peers)
        self.coordinator.traffic.add("reduce", sent=self._sent, received=self._received, calls=calls, waited=waited)

    def _take(self, number: int, peer: int) -> torch.Tensor:
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
