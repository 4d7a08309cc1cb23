"""Parameters from their owners to all ranks of one host, by reads of the owners' memory.

Over loopback a byte is copied into the kernel by one process and out of it by the other, by threads that must be woken.
A read across processes is one copy, made by whoever needs the bytes. All ranks tell each other once per layout where
their segments lie. Then a broadcast is two agreements of one word and one call of the kernel per peer: *ready*, when
all owners have their new values; the reads; and *done*, when all have read, before any owner may write or free its
memory. The second one is whatever the ranks agree upon next, see :meth:`SameHostBroadcaster.begin`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from zeroshard_comm.agreement import Control
from zeroshard_comm.broadcasters import MessageBroadcaster
from zeroshard_comm.cross_memory import ProcessMemory
from zeroshard_comm.interfaces import Broadcast, ParameterBroadcaster, Segment
from zeroshard_comm.wire import unread, wire_of

WORTH_READING = 512 * 1024
"""Fewer bytes in all are broadcast: agreeing costs more than the copies."""

_READY = "step(), where all ranks have their new values"


class SameHostBroadcaster(ParameterBroadcaster):
    """Reads segments where their owners have them.

    Only for ranks of which every one reads from every other (:attr:`~zeroshard_comm.Wire.all_read`), and for use by the
    thread that calls a collective method: it agrees.

    Args:
        control: the channel, and the group.
        segments: as for :class:`ParameterBroadcaster`, on the CPU.
    """

    def __init__(self, control: Control, segments: Sequence[Segment]) -> None:
        super().__init__(control.ranks, segments, control.traffic)
        self.control = control
        self._is_new = True
        self._reads: list[tuple[int, ProcessMemory]] = []
        self._instead: MessageBroadcaster | None = None

    def begin(self) -> Broadcast:
        """Begin. After :meth:`Broadcast.wait` all ranks must agree once more before an owner writes to its segments."""
        return _Read(self)

    def meet(self) -> MessageBroadcaster | None:
        """Agree that all owners have their values, and on where, if that is new. Collective.

        Returns:
            What moves them if some memory cannot be read: a device driver's, for instance.
        """
        if self.control.any_raised(self._is_new, _READY):
            self._is_new = False
            # The memory of a driver cannot be read by other processes.
            mine = [0 if s.buffer.is_pinned() else s.buffer.data_ptr() for s in self.segments]
            places = self.control.all_gather_ints(mine, _READY)
            readable = all(map(all, places))
            self._instead = None if readable else MessageBroadcaster(self.ranks, self.segments, self.traffic)
            processes = wire_of(self.ranks).processes
            self._reads = [
                (peer, ProcessMemory(processes[peer], self._parts_of(peer, places[peer]))) for peer in self.ranks.peers
            ]
        return self._instead

    def read(self) -> None:
        """Read from every peer what it owns.

        Raises:
            PeerLostError: if a rank is gone, or may not be read any more.
        """
        started = time.perf_counter()
        for peer, memory in self._reads:
            try:
                memory.read()
            except OSError as failure:
                raise unread(failure, peer, self.ranks.rank, "step()") from failure
        self.traffic.add(
            "share",
            sent=self.sent,
            received=self.received,
            calls=len(self._reads),
            waited=time.perf_counter() - started,
        )

    def _parts_of(self, peer: int, places: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where a peer's segments lie here and there, and their bytes; as few as possible."""
        parts: list[tuple[int, int, int]] = []
        for segment, there in zip(self.segments, places, strict=True):
            if segment.owner != peer:
                continue
            here, nbytes = segment.buffer.data_ptr(), segment.buffer.nbytes
            if parts and (parts[-1][0] + parts[-1][2], parts[-1][1] + parts[-1][2]) == (here, there):
                here, there, nbytes = parts[-1][0], parts[-1][1], parts.pop()[2] + nbytes
            parts.append((here, there, nbytes))
        return parts


class _Read(Broadcast):
    def __init__(self, broadcaster: SameHostBroadcaster) -> None:
        self._broadcaster: SameHostBroadcaster | None = broadcaster
        self._instead: Broadcast | None = None

    def send(self) -> None:
        assert self._broadcaster is not None
        instead = self._broadcaster.meet()
        if instead is not None:
            self._broadcaster, self._instead = None, instead.begin()
            self._instead.send()

    def arrive(self) -> None:
        broadcaster, self._broadcaster = self._broadcaster, None
        if broadcaster is not None:
            broadcaster.read()
        elif self._instead is not None:
            self._instead.arrive()

    def wait(self) -> None:
        self.arrive()
        if self._instead is not None:
            self._instead.wait()
