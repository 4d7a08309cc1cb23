"""Combines numbers of all ranks on zeroshard's own connections, in a ring if few ranks take part and none is lost.

The *ring* is one collective of gloo, which takes a fraction of the processor time of messages in rounds. It may succeed
on some ranks and fail on others, which then cannot continue together. So a rank leaves the ring only if another rank is
lost, and never because one is slow. It leaves a notice in the store, because gloo does not report that the receiver of
a send is gone, and closes its connections; then all ranks raise. After a timeout all ranks sign in at the store, and
the rank that does not is named. Otherwise ranks find the lost rank by rounds of messages, and the first rank that finds
it adds its number to the notice, so that all ranks name it, even ranks that arrive later or wait for a slow rank.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not an explicit export

from zeroshard_comm._torch_private import group_of
from zeroshard_comm.errors import PeerLostError, lost_by_another, peer_lost, unconnected
from zeroshard_comm.process_group import GroupConnections, RankGroup, close_connections
from zeroshard_comm.rounds import combine_in_rounds
from zeroshard_comm.traffic import Traffic

MOST_RANKS = 16
"""Groups of more ranks combine their numbers in rounds, whose latency grows only with log N."""

_MOST_FOR_ALL = 1024
"""Up to this many numbers are sent from every rank to every other; more are all-reduced."""

_TO_CONNECT = timedelta(seconds=30)
"""Time to connect, for ranks that have just agreed."""

_LOOKS_EVERY = timedelta(seconds=0.25)
"""Interval at which a rank that waits in the ring checks the store for a notice."""

_GLOO_GRACE = timedelta(seconds=10)
"""Added to gloo's timeout, so that this rank leaves a notice before gloo closes the connections."""

_TO_NAME = timedelta(seconds=2)
"""Time for all ranks to sign in, and to send a word, after the ring has failed. Ranks that wait notice at once."""

_LOST, _TIMED_OUT = "a rank was lost", "timed out"
_TAG_LOST = 0x5A530006


class Connections(GroupConnections):
    """zeroshard's own connections between the ranks of a process group. Closing them closes none of the user's.

    The constructor is a collective of ranks that have just agreed; ``first`` is a group of these ranks with gloo for
    CPU tensors. torch does not list the groups for messages and for the ring.
    """

    def __init__(self, first: RankGroup) -> None:
        # No reference to `first`: the context of its group holds this object, and neither would ever be freed.
        self._store = first.group.get_group_store()
        self._timeout = first.timeout or dist.default_pg_timeout
        self._rank, self._size = first.rank, first.world_size
        self._notice = Notice(self._store)
        if self._rank == 0:
            # No rank has connected before this rank does.
            self._notice.remove(self._size)
        group = group_of(self._connect("messages"), self._store, f"{first.group.group_name} zeroshard")
        self.channel = RankGroup(group, self._rank, self._size, self._timeout)
        has_ring = self._size <= MOST_RANKS
        self._ring = Ring(self._connect("ring"), self._timeout, self._notice) if has_ring else None
        self._told: torch.Tensor | None = None
        # The number of calls of `combine`, which is equal on all ranks.
        self._calls = 0

    def tell(self, number: int, error: tuple[str, str]) -> None:
        """Write an error for the next :meth:`combine`. With a ring, also send this rank's number for it now."""
        if self._told is None:
            # Keeps the error of the call before, which others may not have read. get() waits until the store has this.
            key = f"error {(1 + self._calls) % 2}: {self._rank}"
            self._notice.store.set(key, json.dumps([1 + self._calls, *error]))
            self._notice.store.get(key)
            self._told = torch.tensor([number], dtype=torch.int64, device="cpu")
            if self._ring is not None:
                self._ring.begin(self._told)

    def told(self) -> dict[int, list[str]]:
        """Return the errors that ranks have told for the last :meth:`combine`, by rank."""
        store, keys = self._notice.store, {rank: f"error {self._calls % 2}: {rank}" for rank in range(self._size)}
        found = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        return {rank: error for rank, (call, *error) in found.items() if call == self._calls}

    def combine(
        self, numbers: torch.Tensor, tag: int, operation: str, traffic: Traffic, lost: PeerLostError | None = None
    ) -> torch.Tensor:
        """Return the bitwise OR over all ranks, see :func:`~zeroshard_comm.rounds.combine_in_rounds`."""
        self._calls += 1
        if self._told is not None:
            numbers, self._told = self._told, None
        if self._ring is None:
            return combine_in_rounds(self.channel, numbers, tag, operation, traffic, lost)
        if lost is None and self._ring.combine(numbers, traffic):
            return numbers
        # Closes this rank's connections of the ring, so that it fails on the other ranks too.
        self._ring = None
        has_timed_out = self._notice.leave(_LOST) == _TIMED_OUT
        lost = lost or self._notice.named(self._rank, operation)
        absent = self._notice.absent(self._rank, self._size) if has_timed_out and lost is None else None
        if absent is not None:
            # Messages could not name it: gloo closes the connections of a rank whose wait for the late one times out.
            self._notice.name(absent)
            raise peer_lost(None, absent, self._rank, operation, self._timeout)
        ranks = replace(self.channel, wait=_TO_NAME)
        try:
            # Sends no numbers: another rank may have lost one in a later agreement, which has more of them. A rank that
            # does not answer may only be slow, because no rank has waited for it until the timeout of the group.
            combine_in_rounds(ranks, numbers[:0], _TAG_LOST, operation, traffic, lost, late_is_lost=False)
            raise lost_by_another(self._rank, None, operation)
        except PeerLostError as error:
            self._notice.name(error.peer)
            first = self._notice.named(self._rank, operation)
            if first is None or first.peer in (None, error.peer):
                raise
            raise first from error

    def close(self) -> None:
        """Close this rank's connections, and tell the ranks that wait in the ring."""
        self._ring = None
        self._notice.leave(_LOST)
        close_connections(self.channel.group)

    def _connect(self, purpose: str) -> dist.ProcessGroupGloo:
        # Does not change the timeout of the user's store. gloo connects within the timeout of the group.
        store, timeout = PrefixStore(f"zeroshard {purpose}", self._store), min(self._timeout, _TO_CONNECT)
        try:
            return dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)
        except RuntimeError as failure:
            raise unconnected(failure, self._rank, self._size) from failure


class Notice:
    """The notice of the first rank that left the ring, in the store: why it left, and which rank was lost.

    If the store was on the lost host, it cannot be read. That counts as a notice.
    """

    def __init__(self, store: Store) -> None:
        self.store = PrefixStore("zeroshard notice", store)

    def remove(self, size: int) -> None:
        """Remove the notice of an earlier group with the same store."""
        of_rank = ("is here", "error 0", "error 1")
        for key in ("why", "who", *[f"{what}: {rank}" for rank in range(size) for what in of_rank]):
            with suppress(RuntimeError):
                self.store.delete_key(key)

    def leave(self, why: str) -> str:
        """Write why this rank leaves the ring, unless a rank has written; return why the first one left."""
        with suppress(RuntimeError):
            return self.store.compare_set("why", "", why).decode()
        return why

    def is_there(self) -> bool:
        """Return True if a rank has left the ring."""
        with suppress(RuntimeError):
            return bool(self.store.check(["why"]))
        return True

    def absent(self, rank: int, size: int) -> int | None:
        """Sign in, wait until all ranks have signed in, and return the first one that has not; None if all have."""
        keys = [f"is here: {other}" for other in range(size)]
        with suppress(RuntimeError):
            self.store.set(keys[rank], "")
            with suppress(RuntimeError):
                self.store.wait(keys, _TO_NAME)
            return next((other for other, key in enumerate(keys) if not self.store.check([key])), None)
        return None

    def name(self, peer: int | None) -> None:
        """Write which rank was lost, unless another rank has. None, for unknown, is replaced once a rank knows."""
        with suppress(RuntimeError):
            self.store.compare_set("who", "", "" if peer is None else str(peer))

    def named(self, rank: int, operation: str) -> PeerLostError | None:
        """Return an error with the lost rank in the notice; None if there is none, or the notice names this rank."""
        with suppress(RuntimeError):
            if self.store.check(["who"]):
                who = self.store.get("who").decode()
                return None if who == str(rank) else lost_by_another(rank, int(who) if who else None, operation)
        return None


class Ring:
    """Combines numbers by a collective on a group of its own. Dropping the group closes this rank's connections.

    One number is combined by an all-reduce. A few are sent from every rank to every other, because an all-reduce cuts
    them into a part for each rank, and takes twice as many messages, one after the other.
    """

    def __init__(self, group: dist.ProcessGroupGloo, timeout: timedelta, notice: Notice) -> None:
        self._group, self._notice, self._timeout = group, notice, timeout
        self._reduce, self._to_all = dist.AllreduceOptions(), dist.AllToAllOptions()
        self._reduce.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)
        # This rank leaves a notice at its timeout, before gloo closes the connections.
        self._reduce.timeout = self._to_all.timeout = timeout + _GLOO_GRACE
        self._begun: dist.Work | None = None

    def begin(self, number: torch.Tensor) -> None:
        """Begin to combine one number. The next :meth:`combine`, of the same tensor, waits for it."""
        self._begun = self._group.allreduce([number], self._reduce)  # type: ignore[attr-defined] # not in the stubs
        # If no rank answers, dropping the group, or the end of the process, would wait for the timeout.
        self._ending = weakref.finalize(self, close_connections, self._group)

    def combine(self, numbers: torch.Tensor, traffic: Traffic) -> bool:
        """Replace numbers with the OR over all ranks. Return False if that failed; some may be missing then."""
        started, copies = time.perf_counter(), 1
        with suppress(RuntimeError):
            # The stubs lack these methods of the group. An error must not hold its work, because a work that is not
            # freed keeps connections open.
            if self._begun is not None:
                self._wait(self._begun)
                self._ending.detach()
                self._begun = None
            elif 1 < len(numbers) <= _MOST_FOR_ALL:
                copies = self._group.size() - 1
                rows = numbers.repeat(1 + copies, 1)
                everyones = torch.empty_like(rows)
                self._wait(self._group.alltoall_base(everyones, rows, [], [], self._to_all))  # type: ignore[attr-defined]
                for row in everyones:
                    numbers |= row
            else:
                self._wait(self._group.allreduce([numbers], self._reduce))  # type: ignore[attr-defined]
            nbytes, waited = copies * numbers.nbytes, time.perf_counter() - started
            traffic.add("control", sent=nbytes, received=nbytes, calls=1, waited=waited)
            return True
        return False

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective. Raise RuntimeError if it fails, or another rank is lost meanwhile."""
        ends = time.monotonic() + self._timeout.total_seconds()
        try:
            while True:
                # The timeout ends the wait, not the collective.
                with suppress(RuntimeError):
                    work.wait(_LOOKS_EVERY)
                    return
                if work.is_completed():
                    break
                if time.monotonic() >= ends:
                    self._notice.leave(_TIMED_OUT)
                    raise RuntimeError("timed out")
                if self._notice.is_there():
                    raise RuntimeError("another rank was lost")
        except BaseException:
            self._give_up(work)
            raise
        work.wait()

    def _give_up(self, work: dist.Work) -> None:
        """Close this rank's connections, which ends the collective.

        If gloo does not notice, it ends at its timeout. Dropping the group would wait, so a thread holds it.
        """
        threading.Thread(target=_hold, args=(self._group, work), daemon=True).start()
        close_connections(self._group)


def _hold(_: dist.ProcessGroupGloo, work: dist.Work) -> None:
    with suppress(RuntimeError):
        work.wait()
