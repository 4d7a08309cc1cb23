"""Numbers of all ranks combined on connections of our own: in a ring while all goes well.

The *ring* is one collective of gloo, at a fraction of the processor time of messages in rounds, since gloo keeps what
it needs between the same ranks. It is a fast path, for few ranks, and waits for a late rank as long as the process
group does. It may end well on some ranks and fail on others, which then cannot go on together: so a rank gives it up
only where another one is lost, and never for a rank that is only late. A rank that gives up leaves a notice in the
store, since gloo does not report that the receiver of a send is gone, and closes its connections. All ranks raise then.
After a timeout they sign in at the store, and the late one is that which has not; else rounds of messages find out
which rank was lost, and tell the others (:mod:`zeroshard_comm.rounds`). The first rank that knows writes it into the
notice, for ranks that come after the rounds, or could only blame one that is late.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports it unseen

from zeroshard_comm._torch_private import group_of
from zeroshard_comm.errors import PeerLostError, peer_lost, unconnected
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.rounds import combine_in_rounds, lost_by_another
from zeroshard_comm.traffic import Traffic

MOST_RANKS = 16
"""Above, rounds of messages are faster than an all-reduce."""

_MOST_FOR_ALL = 1024
"""More numbers than that are not sent from every rank to every other."""

_TO_CONNECT = timedelta(seconds=30)
"""For ranks that have just agreed."""

_LOOKS_EVERY = timedelta(seconds=0.25)
"""How often a rank that waits in a ring looks into the store, whether another one has lost a rank."""

_TO_SAY = timedelta(seconds=10)
"""How much later gloo ends a ring than this rank."""

_TO_NAME = timedelta(seconds=2)
"""How long a rank waits for each word of the others once the ring has failed: those that wait in it hear so at once."""

_LOST, _TIMED_OUT = "a rank was lost", "timed out"
_TAG_LOST = 0x5A530006
_TAG_CLOSING = 0x5A530007


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
        self._notice = Notice(self._store)
        if self._rank == 0:
            # No rank has connected before this rank does.
            self._notice.remove(self._size)
        group = group_of(self._connect("messages"), self._store, f"{self._name} zeroshard")
        self.channel = RankGroup(group, self._rank, self._size, self._timeout)
        has_ring = self._size <= MOST_RANKS
        self._ring = Ring(self._connect("ring"), self._timeout, self._notice) if has_ring else None

    def combine(
        self, numbers: torch.Tensor, tag: int, operation: str, traffic: Traffic, lost: PeerLostError | None = None
    ) -> torch.Tensor:
        """Return the bitwise OR over all ranks; as :func:`~zeroshard_comm.rounds.combine_in_rounds`."""
        if self._ring is None:
            return combine_in_rounds(self.channel, numbers, tag, operation, traffic, lost)
        if lost is None and self._ring.combine(numbers, traffic):
            return numbers
        # Dropped, so that the others' fails too.
        self._ring = None
        has_timed_out = self._notice.leave(_LOST) == _TIMED_OUT
        lost = lost or self._notice.named(self._rank, operation)
        absent = self._notice.absent(self._rank, self._size) if has_timed_out and lost is None else None
        if absent is not None:
            # Not by messages: gloo closes a rank's connections when it has waited for the late one in vain.
            self._notice.name(absent)
            raise peer_lost(RuntimeError("nothing; it has not signed in at the store"), absent, self._rank, operation)
        ranks = replace(self.channel, wait=_TO_NAME)
        try:
            # No numbers: another rank may have lost one in a later agreement, which has more of them.
            # A rank for which no ring has waited as long as the group does may be late, and alive.
            combine_in_rounds(ranks, numbers[:0], _TAG_LOST, operation, traffic, lost, late_is_lost=False)
            raise lost_by_another(self._rank, None, operation)
        except PeerLostError as error:
            self._notice.name(error.peer)
            first = self._notice.named(self._rank, operation)
            if first is None or first.peer in (None, error.peer):
                raise
            raise first from error

    def close(self) -> None:
        """Close this rank's connections, so that no rank waits for it."""
        self._ring = None
        self._notice.leave(_LOST)
        self.channel.close_connections()

    def _connect(self, purpose: str) -> dist.ProcessGroupGloo:
        # The store is the user's, and its timeout, too: gloo connects within that of the group.
        store, timeout = PrefixStore(f"zeroshard {purpose}", self._store), min(self._timeout, _TO_CONNECT)
        try:
            return dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)
        except RuntimeError as failure:
            raise unconnected(failure, self._rank, self._size) from failure


class Notice:
    """What the first ranks that gave a ring up say in the store: why, and which rank was lost.

    If the store was on the lost host, it cannot be read, which means the same.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("zeroshard notice", store)

    def remove(self, size: int) -> None:
        """Remove the notice of an earlier group with the same store."""
        for key in ("why", "who", *[f"is here: {rank}" for rank in range(size)]):
            with suppress(RuntimeError):
                self._store.delete_key(key)

    def leave(self, why: str) -> str:
        """Say why this rank gives the ring up; return why the first one did."""
        with suppress(RuntimeError):
            return self._store.compare_set("why", "", why).decode()
        return why

    def is_there(self) -> bool:
        """Tell whether a rank has given the ring up."""
        with suppress(RuntimeError):
            return bool(self._store.check(["why"]))
        return True

    def absent(self, rank: int, size: int) -> int | None:
        """Sign in, wait until all ranks have, and return the first one that has not; None if all have."""
        keys = [f"is here: {other}" for other in range(size)]
        with suppress(RuntimeError):
            self._store.set(keys[rank], "")
            with suppress(RuntimeError):
                self._store.wait(keys, _TO_NAME)
            return next((other for other, key in enumerate(keys) if not self._store.check([key])), None)
        return None

    def name(self, peer: int | None) -> None:
        """Say who was lost; None, if this rank could not find out, stands until another rank knows."""
        with suppress(RuntimeError):
            self._store.compare_set("who", "", "" if peer is None else str(peer))

    def named(self, rank: int, operation: str) -> PeerLostError | None:
        """Return the error of a rank that reads who was lost; None if nothing is said, or it is said of that rank."""
        with suppress(RuntimeError):
            if self._store.check(["who"]):
                who = self._store.get("who").decode()
                return None if who == str(rank) else lost_by_another(rank, int(who) if who else None, operation)
        return None


class Ring:
    """Combines numbers by a collective on a group that nothing else uses: dropping it closes this rank's connections.

    One number travels by an all-reduce. A few are sent from every rank to every other, since an all-reduce cuts them
    into a part for each rank, and takes twice as many messages, one after the other.
    """

    def __init__(self, group: dist.ProcessGroupGloo, timeout: timedelta, notice: Notice) -> None:
        self._group, self._notice, self._timeout = group, notice, timeout
        self._reduce, self._to_all = dist.AllreduceOptions(), dist.AllToAllOptions()
        self._reduce.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)
        # A rank says that its time has passed before gloo closes its connections.
        self._reduce.timeout = self._to_all.timeout = timeout + _TO_SAY

    def combine(self, numbers: torch.Tensor, traffic: Traffic) -> bool:
        """Make numbers the OR over all ranks; False if that has failed, and they may be an OR over some of them."""
        started, copies = time.perf_counter(), 1
        with suppress(RuntimeError):
            # As the group it has its own methods; the stubs do not know of them. An error must not hold its work: a
            # work that is not freed keeps connections open.
            if 1 < len(numbers) <= _MOST_FOR_ALL:
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
        """Wait for a collective; a RuntimeError if it fails, or another rank was lost meanwhile."""
        ends = time.monotonic() + self._timeout.total_seconds()
        try:
            while True:
                # By its timeout this ends the wait, and not the collective.
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

        If gloo does not notice, it ends by its timeout, and dropping the group would wait for that: a thread holds it.
        """
        threading.Thread(target=_hold, args=(self._group, work), daemon=True).start()
        for peer in range(self._group.size()):
            # As RankGroup.close_connections().
            if peer != self._group.rank():
                with suppress(RuntimeError):
                    room = torch.empty(1, dtype=torch.uint8, device="cpu")
                    work = self._group.recv([room], peer, _TAG_CLOSING)  # type: ignore[attr-defined]
                    work.wait(timedelta(milliseconds=1))


def _hold(_: dist.ProcessGroupGloo, work: dist.Work) -> None:
    with suppress(RuntimeError):
        work.wait()
