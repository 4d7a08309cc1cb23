"""Numbers of all ranks, combined by one all-reduce on a gloo group of our own: the way of agreements of few ranks.

It costs a fraction of the processor time of messages in rounds, since gloo keeps what it needs between the same ranks.
But it is a ring: its latency grows with the number of ranks, and when a rank is lost, its neighbours alone see the
all-reduce fail. So whoever sees it fail closes its connections, and the failure travels on, rank by rank; after it the
group is of no use, to anybody.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it unseen

from zeroshard_comm.errors import PeerLostError
from zeroshard_comm.process_group import RankGroup

MOST_RANKS = 16
"""Above, rounds of messages are faster."""

_MEETING = timedelta(seconds=30)
"""For ranks to connect, who have just agreed."""

_REPORTING = 1.0
"""Seconds in which all ranks that are there should have seen that one is lost."""


class WordRing:
    """Combines numbers by a bitwise OR. Making one is collective, among ranks that have just agreed to.

    Args:
        channel: the ranks, on a group with gloo for CPU tensors.

    Raises:
        PeerLostError: if a rank has been lost meanwhile.
    """

    def __init__(self, channel: RankGroup) -> None:
        self._channel = channel
        timeout = channel.timeout or dist.default_pg_timeout
        self._store = PrefixStore("zeroshard agreements", channel.group.get_group_store())
        self._store.set_timeout(min(timeout, _MEETING))
        self._group: dist.ProcessGroupGloo | None = None
        try:
            self._group = dist.ProcessGroupGloo(self._store, channel.rank, channel.world_size, timeout=timeout)
        except RuntimeError as failure:
            raise self._lost("connect()", failure) from failure
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR)

    def combine(self, numbers: torch.Tensor, operation: str) -> None:
        """Replace numbers by their OR over all ranks. Collective.

        Args:
            numbers: 64-bit integers, as many on every rank.
            operation: what the ranks are doing, for the message of an error.

        Raises:
            PeerLostError: if a rank is gone, now or before.
        """
        if self._group is None:
            raise self._lost(operation, None)
        try:
            self._group.allreduce([numbers], self._options).wait()  # type: ignore[attr-defined]  # not in the stubs
        except RuntimeError as failure:
            # Who follows what waits, as a test harness does, may hold it there, and with it the connections.
            traceback.clear_frames(failure.__traceback__)
            self.close()
            raise self._lost(operation, failure) from failure

    def close(self) -> None:
        """Close this rank's connections, so that all others learn that a rank was lost."""
        if self._group is not None:
            self._group = None
            # Else the others would take this rank for the one that is lost.
            with suppress(RuntimeError):
                self._store.set(f"rank {self._channel.rank}", "")

    def _lost(self, operation: str, failure: RuntimeError | None) -> PeerLostError:
        missing = self._missing()
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "another rank"
        said = f" (The backend said: {str(failure).splitlines()[0]})" if failure is not None else ""
        error = PeerLostError(
            f"rank {self._channel.rank} lost {who} during {operation}: a process has ended, was cut off, has lost "
            f"another one itself, or did not call {operation} within the process group's timeout. Look at the output "
            f"of {who if missing else 'all ranks'} first.{said}"
        )
        error.peer = missing[0] if len(missing) == 1 else None
        return error

    def _missing(self) -> list[int]:
        """Ranks that do not report that they have seen the failure; none if nobody knows."""
        missing, deadline = sorted(self._channel.peers), time.monotonic() + _REPORTING
        try:
            while missing and time.monotonic() < deadline:
                missing = [peer for peer in missing if not self._store.check([f"rank {peer}"])]
                time.sleep(0.01)
        except RuntimeError:
            # The store has gone with the rank that kept it.
            return []
        return missing
