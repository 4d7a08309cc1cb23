"""One tensor from one rank to another, by the fastest way there is between these two.

Between machines, and wherever nothing else is allowed, that is a tagged message of the process group. Between processes
of one machine the message says where the tensor lies; the receiver reads it there, and answers when it has.

Which it is was found out once per process group, see :func:`connect`, for each pair and direction: the receiver has
read a random number in the sender's memory, and has told it so. Messages match in the same way in both cases: of one
tag and pair of ranks, in order.
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard_comm.agreement import Control
from zeroshard_comm.bits import pack_bits, unpack_bits
from zeroshard_comm.cross_memory import SWITCH, Readable, machine, read_into
from zeroshard_comm.errors import DisagreementError, PeerLostError, lost, wait_for
from zeroshard_comm.process_group import RankGroup

_ANSWER = 0x0100
"""Added to the tag of a message for the answer to it."""

WORTH_READING = 64 * 1024
"""Tensors of fewer bytes travel in the message itself: the answer costs more than the copies."""


class Message(ABC):
    """A send or a receive under way. Its buffer belongs to it until :meth:`wait` has returned.

    Messages may be waited for in any order, but a receive may take place in :meth:`wait` alone. So whoever waits for
    sends must have waited before for all receives whose senders may be waiting in the same way.
    """

    @abstractmethod
    def wait(self, operation: str) -> None:
        """Return when the buffer has been filled, or may be changed.

        Args:
            operation: what the ranks are doing, for the message of an error.

        Raises:
            PeerLostError: if the peer is gone, or was too late.
        """


class _Answers:
    """Which offers of one tag a peer has read. It answers in the order in which it reads; any thread may wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        self._read: set[int] = set()
        self._offers = 0

    def expect(self, ranks: RankGroup, peer: int, tag: int, operation: str) -> int:
        """Post the receive of one more answer, and return the number of the offer that it makes room for."""
        with self._lock:
            answer = torch.empty(1, dtype=torch.int64, device="cpu")
            self._posted.append((_receive(ranks, peer, answer, tag + _ANSWER, operation), answer))
            self._offers += 1
            return self._offers

    def wait(self, number: int, peer: int, rank: int, operation: str) -> None:
        """Wait until an offer has been read."""
        with self._lock:
            while number not in self._read:
                work, answer = self._posted[0]
                wait_for(work, peer, rank, operation)
                self._posted.popleft()
                self._read.add(int(answer))
            self._read.remove(number)


@dataclass(frozen=True)
class Wire:
    """The ways from one rank of a group to the others, and from them. Any thread may use it.

    Attributes:
        ranks: the group; its backend matches messages by tag.
        found: what :func:`connect` has found out.
    """

    ranks: RankGroup
    found: Readable

    @property
    def processes(self) -> Mapping[int, int]:
        """By peer, the process that this rank reads from."""
        return self.found.processes

    @property
    def readers(self) -> frozenset[int]:
        """Peers that read from this rank."""
        return self.found.readers

    @property
    def all_read(self) -> bool:
        """Whether every rank of the group reads from every other; the same on all ranks."""
        return self.found.all_read

    @property
    def reads(self) -> bool:
        """Whether this rank reads the memory of a peer: nothing arrives from there but while it is waited for."""
        return bool(self.processes)

    def send(self, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
        """Send a tensor, 1-D and contiguous.

        Raises:
            PeerLostError: if the peer is gone.
        """
        if peer in self.readers and buffer.nbytes >= WORTH_READING:
            answers = self.found.answers.setdefault((peer, tag), _Answers())
            return _Offer(self.ranks, peer, buffer, tag, operation, answers)
        return _Plain(self.ranks, peer, _send(self.ranks, peer, buffer, tag, operation))

    def receive(self, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
        """Receive a tensor, 1-D and contiguous, of the length that the peer sends.

        Raises:
            PeerLostError: if the peer is gone.
        """
        if peer in self.processes and buffer.nbytes >= WORTH_READING:
            return _Read(self.ranks, peer, buffer, tag, operation, self.processes[peer])
        return _Plain(self.ranks, peer, _receive(self.ranks, peer, buffer, tag, operation))


def wire_of(ranks: RankGroup) -> Wire:
    """Return the wire of a group: messages of the group alone, until it was connected."""
    return Wire(ranks, ranks.context.readable or Readable())


def connect(control: Control) -> None:
    """Find out who can read whose memory, once per process group. Collective.

    Args:
        control: the channel of a group whose ranks have just met.

    Raises:
        PeerLostError: if a rank is gone.
    """
    ranks = control.ranks
    if control.alone or ranks.context.readable is not None or not ranks.sends_tagged(torch.device("cpu")):
        return
    secret = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
    mine = (machine(), os.getpid(), secret.data_ptr(), int(secret))
    places = control.all_gather_ints(mine, "connect()")
    readable = {
        peer: process
        for peer, (theirs, process, address, expected) in enumerate(places)
        if peer != ranks.rank and mine[0] and theirs == mine[0] and _reads(process, address, expected)
    }
    # Until everybody has looked, the number must stay where it is.
    everyone = range(ranks.world_size)
    told = control.all_gather_ints(pack_bits([peer in readable for peer in everyone]), "connect()")
    reads = [unpack_bits(words, ranks.world_size) for words in told]
    readers = frozenset([peer for peer in ranks.peers if reads[peer][ranks.rank]])
    all_read = all(reads[one][other] for one in everyone for other in everyone if one != other)
    # Found by all ranks or by none.
    control.check_consistent("connect()")
    ranks.context.readable = Readable(readable, readers, all_read)
    del secret


def _reads(process: int, address: int, expected: int) -> bool:
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        read_into(found, process, address)
    except OSError:
        return False
    return int(found) == expected


class _Plain(Message):
    def __init__(self, ranks: RankGroup, peer: int, work: dist.Work | None) -> None:
        self._ranks, self._peer, self._work = ranks, peer, work

    def wait(self, operation: str) -> None:
        wait_for(self._work, self._peer, self._ranks.rank, operation)


class _Offer(Message):
    """Says where a tensor lies, and waits until it has been read."""

    def __init__(
        self, ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str, answers: _Answers
    ) -> None:
        self._ranks, self._peer, self._answers = ranks, peer, answers
        # A device driver's memory cannot be read by other processes.
        self._buffer = buffer.clone() if buffer.is_pinned() else buffer
        # The answer's receive first, so that whoever answers finds it posted.
        self._number = answers.expect(ranks, peer, tag, operation)
        place = [self._buffer.data_ptr(), self._buffer.nbytes, self._number]
        self._place = torch.tensor(place, dtype=torch.int64, device="cpu")
        self._sent = _send(ranks, peer, self._place, tag, operation)

    def wait(self, operation: str) -> None:
        wait_for(self._sent, self._peer, self._ranks.rank, operation)
        self._answers.wait(self._number, self._peer, self._ranks.rank, operation)


class _Read(Message):
    """Learns where a tensor lies, reads it, and says so."""

    def __init__(
        self, ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str, process: int
    ) -> None:
        self._ranks, self._peer, self._buffer, self._tag, self._process = ranks, peer, buffer, tag, process
        self._place = torch.empty(3, dtype=torch.int64, device="cpu")
        self._told = _receive(ranks, peer, self._place, tag, operation)

    def wait(self, operation: str) -> None:
        rank = self._ranks.rank
        wait_for(self._told, self._peer, rank, operation)
        address, nbytes, number = self._place.tolist()
        if nbytes != self._buffer.nbytes:
            raise DisagreementError(
                f"during {operation} rank {self._peer} has offered {nbytes} bytes where rank {rank} expects "
                f"{self._buffer.nbytes}: they are not in the same exchange. Every rank must make the same calls in the "
                f"same order"
            )
        try:
            read_into(self._buffer, self._process, address)
        except OSError as failure:
            raise unread(failure, self._peer, rank, operation) from failure
        answer = torch.tensor([number], dtype=torch.int64, device="cpu")
        # Before the peer is told, it may not have gone on; if it cannot be told, what was read may not be right.
        work = _send(self._ranks, self._peer, answer, self._tag + _ANSWER, operation)
        wait_for(work, self._peer, rank, operation)


def unread(failure: OSError, peer: int, rank: int, operation: str) -> PeerLostError:
    """Make the error for memory of a peer that could not be read.

    Args:
        failure: of the read.
        peer: whose memory.
        rank: this rank.
        operation: what the ranks are doing.
    """
    if isinstance(failure, ProcessLookupError):
        return lost(RuntimeError(str(failure)), peer, rank, operation)
    return PeerLostError(
        f"rank {rank} could not read what rank {peer} has offered during {operation} ({failure}). Set {SWITCH}=0 in "
        f"the environment of all ranks, and they will send instead"
    )


def _send(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> dist.Work | None:
    try:
        return dist.isend(buffer, group=ranks.group, group_dst=peer, tag=tag)
    except RuntimeError as failure:
        raise lost(failure, peer, ranks.rank, operation) from failure


def _receive(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> dist.Work | None:
    try:
        return dist.irecv(buffer, group=ranks.group, group_src=peer, tag=tag)
    except RuntimeError as failure:
        raise lost(failure, peer, ranks.rank, operation) from failure
