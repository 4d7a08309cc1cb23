"""Numbers of all ranks combined on connections of our own: in a ring while all goes well, in rounds otherwise.

The *ring* is one collective of gloo, at a fraction of the processor time of messages in rounds, since gloo keeps what
it needs between the same ranks. It is a fast path, for few ranks, and knows of no faults. Where it fails, because a
rank is lost or is only late, a rank closes it, so that it soon fails on all others, and repeats the same agreement in
rounds, which wait for late ranks, and name the lost one and tell the others (:mod:`zeroshard_comm.rounds`). If all have
come, the ranks make a new ring.

The ring may have ended well on some ranks and failed on others. No rank can be further ahead than by one agreement, in
which it then fails, too: before the rounds ranks tell each other where they are, and those ahead repeat their last
result. A bitwise OR allows that: what it is combined with again does not change it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it unseen

from zeroshard_comm._torch_private import group_of
from zeroshard_comm.errors import PeerLostError, unconnected
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.rounds import combine_in_rounds
from zeroshard_comm.traffic import Traffic

MOST_RANKS = 16
"""Above, rounds of messages are faster than an all-reduce."""

_MOST_FOR_ALL = 1024
"""More numbers than that are not sent from every rank to every other."""

_TO_CONNECT = timedelta(seconds=30)
"""For ranks that have just agreed."""

_PATIENCE = timedelta(seconds=5)
"""A ring waits that long. Then a rank is late, or gloo has not reported that it is gone, as happens with a send."""

TAG_TURN = 0x5A530006


class Connections:
    """Connections of our own between the ranks of a process group: what closes them closes none of the user's.

    Messages travel on ``channel``, a group that torch does not list, and the ring has others. Making them is
    collective, among ranks that just agreed; ``first`` is a group of theirs with gloo for CPU tensors.
    """

    def __init__(self, first: RankGroup) -> None:
        # The context of the process group holds this object: with a reference back neither would ever be freed.
        self._store, self._name = first.group.get_group_store(), first.group.group_name
        self._timeout = first.timeout or dist.default_pg_timeout
        self._rank, self._size = first.rank, first.world_size
        self._made = 0
        group = group_of(self._connect(), self._store, f"{self._name} zeroshard")
        self.channel = RankGroup(group, self._rank, self._size, self._timeout)
        self._ring = self._make_ring()
        self._agreements = self._ring_from = 0
        self._last: tuple[torch.Tensor, int] | None = None

    def combine(
        self, numbers: torch.Tensor, tag: int, operation: str, traffic: Traffic, lost: PeerLostError | None = None
    ) -> torch.Tensor:
        """Return the bitwise OR over all ranks; as :func:`~zeroshard_comm.rounds.combine_in_rounds`."""
        started, combined = time.monotonic(), None
        if self._ring is not None and lost is None:
            combined = self._ring.combine(numbers, traffic)
        if combined is None:
            in_rounds = partial(combine_in_rounds, operation=operation, traffic=traffic, lost=lost)
            if self._ring is not None:
                self._ring = None
                # In ring and rounds together a late rank is waited for until the timeout.
                left = self._timeout - timedelta(seconds=time.monotonic() - started)
                channel = replace(self.channel, wait=max(left, timedelta(milliseconds=1)))
                is_ahead = int(in_rounds(channel, self._turn(0), TAG_TURN)) & int(self._turn(-1)) > 0
                if is_ahead and self._last is not None:
                    in_rounds(self.channel, *self._last)
                # The agreement after that of the ranks behind, so that all make a ring at the same time.
                self._ring_from = self._agreements + (not is_ahead)
            combined = in_rounds(self.channel, numbers, tag)
            if self._agreements >= self._ring_from:
                self._ring = self._make_ring()
        self._agreements, self._last = self._agreements + 1, (combined.clone(), tag)
        return combined

    def close(self) -> None:
        """Close this rank's connections, so that no rank waits for it."""
        self._ring = None
        self.channel.close_connections()

    def _turn(self, step: int) -> torch.Tensor:
        """A bit for this agreement, or another one; of three in a row every one has another bit."""
        return torch.tensor([1 << (self._agreements + step) % 3], dtype=torch.int64, device="cpu")

    def _connect(self) -> dist.ProcessGroupGloo:
        self._made += 1
        # The store is the user's, and its timeout, too: gloo connects within that of the group.
        store, timeout = PrefixStore(f"zeroshard agreements {self._made}", self._store), min(self._timeout, _TO_CONNECT)
        try:
            return dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)
        except RuntimeError as failure:
            raise unconnected(failure, self._rank, self._size) from failure

    def _make_ring(self) -> Ring | None:
        return Ring(self._connect(), min(self._timeout / 2, _PATIENCE)) if self._size <= MOST_RANKS else None


class Ring:
    """Combines numbers by a collective on a group that nothing else uses: dropping it closes this rank's connections.

    One number travels by an all-reduce. A few are sent from every rank to every other, since an all-reduce cuts them
    into a part for each rank, and takes twice as many messages, one after the other.
    """

    def __init__(self, group: dist.ProcessGroupGloo, patience: timedelta) -> None:
        self._group = group
        self._reduce, self._to_all = dist.AllreduceOptions(), dist.AllToAllOptions()
        self._reduce.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)
        self._reduce.timeout = self._to_all.timeout = patience

    def combine(self, numbers: torch.Tensor, traffic: Traffic) -> torch.Tensor | None:
        """Return the OR over all ranks; None if that has failed, which may leave an OR over some of them in numbers."""
        started, copies = time.perf_counter(), 1
        with suppress(RuntimeError):
            # As the group it has its own methods; the stubs do not know of them. An error must not hold its work: a
            # work that is not freed keeps connections open.
            if 1 < len(numbers) <= _MOST_FOR_ALL:
                copies = self._group.size() - 1
                rows = numbers.repeat(1 + copies, 1)
                everyones = torch.empty_like(rows)
                self._group.alltoall_base(everyones, rows, [], [], self._to_all).wait()  # type: ignore[attr-defined]
                for row in everyones:
                    numbers |= row
            else:
                self._group.allreduce([numbers], self._reduce).wait()  # type: ignore[attr-defined]
            nbytes, waited = copies * numbers.nbytes, time.perf_counter() - started
            traffic.add("control", sent=nbytes, received=nbytes, calls=1, waited=waited)
            return numbers
        return None
