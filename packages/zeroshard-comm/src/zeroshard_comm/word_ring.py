"""Connections of our own between the ranks of a process group: what closes them closes none of the user's.

Messages travel on them, and numbers of few ranks are combined by one collective, at a fraction of the processor time of
messages in rounds, since gloo keeps what it needs between the same ranks. One number travels by an all-reduce. Several
are sent from every rank to every other, since a ring would cut them into a part for each rank, and take twice as many
messages, one after the other. When a rank is lost, only its neighbours see an all-reduce fail. So a rank that sees it
fail closes its connections, and the failure travels on, rank by rank; after it they are of no use.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it unseen

from zeroshard_comm._torch_private import group_of
from zeroshard_comm.errors import PeerLostError, peer_lost
from zeroshard_comm.process_group import RankGroup

MOST_RANKS = 16
"""Above, rounds of messages are faster than an all-reduce."""

_MEETING = timedelta(seconds=30)
"""Time to connect, for ranks that have just agreed."""

_REPORTING = 1.0
"""Seconds within which all remaining ranks should have seen that one is lost."""


class WordRing:
    """Carries messages, and combines numbers by a bitwise OR. Making one is collective, among ranks that just agreed.

    Args:
        channel: the ranks, on a group with gloo for CPU tensors.

    Attributes:
        ranks: the same ranks, on these connections: a group that torch does not list, and only carries messages.

    Raises:
        PeerLostError: if a rank has been lost meanwhile.
    """

    def __init__(self, channel: RankGroup) -> None:
        # The context of the process group holds this object: with a reference back neither would ever be freed.
        self._rank, self._peers = channel.rank, channel.peers
        timeout = channel.timeout or dist.default_pg_timeout
        store = PrefixStore("zeroshard agreements", channel.group.get_group_store())
        self._store: PrefixStore | None = store
        self._is_closed = False
        try:
            # The store is the user's, and its timeout, too: gloo connects within that of the group.
            self._group = dist.ProcessGroupGloo(store, channel.rank, channel.world_size, timeout=min(timeout, _MEETING))
        except RuntimeError as failure:
            raise peer_lost(failure, None, channel.rank, "connect()") from failure
        group = group_of(self._group, store, f"{channel.group.group_name} zeroshard")
        # Ranks may be later than that from now on.
        self.ranks = RankGroup(group, channel.rank, channel.world_size, timeout)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)
        self._options.timeout = timeout
        self._to_all = dist.AllToAllOptions()
        self._to_all.timeout = timeout

    def combine(self, numbers: torch.Tensor, operation: str) -> None:
        """Replace numbers by their OR over all ranks. Collective.

        Args:
            numbers: 64-bit integers, as many on every rank.
            operation: what the ranks are doing, for the message of an error.

        Raises:
            PeerLostError: if a rank is gone, now or before.
        """
        failure: RuntimeError | None = None
        if not self._is_closed:
            # As the group it has its own methods; the stubs do not know of them.
            if len(numbers) == 1:
                work = self._group.allreduce([numbers], self._options)  # type: ignore[attr-defined]
            else:
                rows = numbers.repeat(1 + len(self._peers), 1)
                everyones = torch.empty_like(rows)
                work = self._group.alltoall_base(everyones, rows, [], [], self._to_all)  # type: ignore[attr-defined]
            failure = self._failure_of(work)
            if failure is None:
                for row in everyones if len(numbers) > 1 else ():
                    numbers |= row
                return
        raise self._lost(operation, failure) from failure

    def _failure_of(self, work: dist.Work) -> RuntimeError | None:
        """Wait, and return what has failed, if something has."""
        patience = 1.0
        while True:
            try:
                work.wait(timedelta(seconds=patience))
            except RuntimeError as failure:
                # gloo drops the queue of a connection that is closed, and waits until the timeout.
                if not work.is_completed() and self._closed():
                    # The thread that waits would be joined when Python ends.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                    return failure
                if work.is_completed():
                    return failure
                patience = min(2 * patience, 8.0)
            else:
                return None

    def close(self, *, has_lost_another: bool = True) -> None:
        """Close this rank's connections, so that all others learn that a rank was lost: this one or another."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(RuntimeError):
                if self._store is not None and has_lost_another:
                    self._store.set(f"rank {self._rank}", "")
            self.ranks.close_connections()

    def _receive(self, peer: int) -> dist.Work:
        room = torch.empty(1, dtype=torch.uint8, device="cpu")
        work: dist.Work = self._group.recv([room], peer, 0)  # type: ignore[attr-defined]  # as above
        return work

    def _closed(self) -> list[int]:
        """Ranks that have closed their connections: nothing can be posted there."""
        closed = []
        for peer in sorted(self._peers):
            try:
                # Not kept: a rank may be late for hours, and this is called repeatedly.
                self._receive(peer)
            except RuntimeError:
                closed.append(peer)
        return closed

    def _silent(self, ranks: list[int]) -> list[int]:
        """Those of these ranks that have not told the store why they closed; if it is gone, the only one, or none."""
        if self._store is not None:
            try:
                return [peer for peer in ranks if not self._store.check([f"rank {peer}"])]
            except RuntimeError:
                # It ended with its host, which may be the rank that is lost. torch prints a page for each attempt.
                self._store = None
        return ranks if len(ranks) == 1 else []

    def _lost(self, operation: str, failure: RuntimeError | None) -> PeerLostError:
        gone = self._silent(self._closed())
        self.close()
        if len(gone) != 1:
            # A rank was late: all connections are open, or gloo has closed all of this rank's own when it had waited
            # long enough. Others are about to say so, or have told others why they closed theirs.
            time.sleep(_REPORTING)
            # With two ranks it is always the other one.
            gone = self._silent(gone or sorted(self._peers)) if len(self._peers) > 1 else list(self._peers)
        who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "another rank"
        said = f" (The backend said: {str(failure).splitlines()[0]})" if failure is not None else ""
        error = PeerLostError(
            f"rank {self._rank} lost {who} during {operation}: a process has ended, was cut off, has lost "
            f"another one itself, or did not call {operation} within the process group's timeout. Look at the output "
            f"of {who if gone else 'all ranks'} first.{said}"
        )
        error.peer = gone[0] if len(gone) == 1 else None
        return error
