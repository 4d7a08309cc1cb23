"""A word from every rank to every rank, again and again, at next to no cost while all of them compute.

Where ranks read each other's memory, a rank writes its word where the others look: nobody is woken, and who reads late
does not wait at all. Between machines, and where ranks may not be read, words are small messages.
"""

from __future__ import annotations

import ctypes
import time

from zeroshard_comm.agreement import Control
from zeroshard_comm.cross_memory import Peephole
from zeroshard_comm.errors import lost
from zeroshard_comm.wire import connect, unread, wire_of
from zeroshard_comm.words import Words

_WORD_BITS = 32
_SPINS = 20
"""Looks before a rank sleeps between them."""
_LONGEST_NAP = 1e-3

_Places = ctypes.c_uint64 * 2


class Noticeboard:
    """Words by number: the first that a rank posts is told with the first of the others, and so on.

    A rank posts another one only when it has read the last ones. Two places are enough, then: a peer may be one number
    ahead, and no more. Each word is written in one piece with its number. It belongs to the thread that calls it;
    making one is collective.

    Args:
        control: the channel of the ranks.
        tag: of messages, where there are any.
        operation: what ranks are doing, for messages of errors.

    Raises:
        PeerLostError: if a rank is gone.
    """

    def __init__(self, control: Control, tag: int, operation: str) -> None:
        self._control, self._tag, self._operation = control, tag, operation
        self._mine: int | None = None
        self._posted: Words | None = None
        self._places: ctypes.Array[ctypes.c_uint64] | None = None
        self._number = 0
        channel = control.channel
        if channel is None:
            return
        # The group that carries messages, which may be one of our own beside that of the ranks.
        connect(Control(channel))
        if not wire_of(channel).all_read:
            return
        self._places = _Places()
        channel.context.read_by_peers.append(self._places)
        told = control.all_gather_ints([ctypes.addressof(self._places)], operation)
        processes, size = wire_of(channel).processes, ctypes.sizeof(ctypes.c_uint64)
        self._peepholes = {
            peer: [Peephole(processes[peer], told[peer][0] + place * size) for place in range(2)]
            for peer in channel.peers
        }
        timeout = channel.timeout
        self._seconds = timeout.total_seconds() if timeout is not None else float("inf")

    @property
    def by_memory(self) -> bool:
        """Whether words are read where the others write them, and are no messages."""
        return self._places is not None

    @property
    def is_posted(self) -> bool:
        """Whether a word has been posted, and the others' not been read."""
        return self._mine is not None

    def post(self, word: int) -> None:
        """Tell the others.

        Args:
            word: from 0 to 2**32 - 1.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert self._mine is None
        assert 0 <= word < 1 << _WORD_BITS
        self._mine = word
        self._number += 1
        if self._places is None:
            self._posted = Words(self._control, [word], self._tag, self._operation)
        else:
            self._places[self._number % 2] = self._number << _WORD_BITS | word

    def read(self) -> list[int]:
        """Wait for the words of all ranks, and return them in rank order.

        Raises:
            PeerLostError: if a rank is gone, or posts nothing within the timeout.
        """
        assert self._mine is not None
        mine, self._mine = self._mine, None
        posted, self._posted = self._posted, None
        if posted is not None:
            return [word for [word] in posted.wait()]
        assert self._control.channel is not None
        started = time.monotonic()
        words = [
            mine if rank == self._control.channel.rank else self._look(rank, started + self._seconds)
            for rank in range(self._control.channel.world_size)
        ]
        self._control.traffic.add("control", waited=time.monotonic() - started)
        return words

    def settle(self) -> None:
        """Wait until all ranks have read what was posted last, before this process may end. Collective.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self._places is not None:
            self._control.all_gather_ints([self._number], self._operation)
            assert self._control.channel is not None
            kept = self._control.channel.context.read_by_peers
            kept[:] = [places for places in kept if places is not self._places]

    def _look(self, peer: int, deadline: float) -> int:
        assert self._control.channel is not None
        look = self._peepholes[peer][self._number % 2].look
        before, looks, nap = 0, 0, 5e-5
        while True:
            try:
                found = look()
            except OSError as failure:
                raise unread(failure, peer, self._control.channel.rank, self._operation) from failure
            if found >> _WORD_BITS == self._number:
                # Twice the same: a copy in several pieces would have met the writer only once.
                if found == before:
                    return found & (1 << _WORD_BITS) - 1
                before = found
                continue
            looks += 1
            if time.monotonic() > deadline:
                rank = self._control.channel.rank
                raise lost(RuntimeError("timed out"), peer, rank, self._operation)
            if looks > _SPINS:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
