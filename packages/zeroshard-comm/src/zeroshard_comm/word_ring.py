"""Numbers of all ranks, combined by one all-reduce on a gloo group of our own: the way of agreements of few ranks.

It costs a fraction of the processor time of messages in rounds, since gloo keeps what it needs between the same ranks.
But it is a ring: its latency grows with the number of ranks, and when a rank is lost, its neighbours alone see the
all-reduce fail. So whoever sees it fail closes its connections, and the failure travels on, rank by rank; after it the
group is of no use, to anybody.
"""

from __future__ import annotations

import time
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

_TAG_PROBE = 0x5A530005


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
        store = PrefixStore("zeroshard agreements", channel.group.get_group_store())
        store.set_timeout(min(timeout, _MEETING))
        self._group: dist.ProcessGroupGloo | None = None
        try:
            self._group = dist.ProcessGroupGloo(store, channel.rank, channel.world_size, timeout=timeout)
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
            self.close()
            raise self._lost(operation, failure) from failure

    def close(self) -> None:
        """Close this rank's connections, so that all others learn that a rank was lost."""
        self._group = None

    def _lost(self, operation: str, failure: RuntimeError | None) -> PeerLostError:
        rank, gone = self._channel.rank, self._gone() if failure is not None else []
        who = f"rank {', '.join(map(str, gone))}" if gone else "another rank"
        said = f" (The backend said: {str(failure).splitlines()[0]})" if failure is not None else ""
        error = PeerLostError(
            f"rank {rank} lost {who} during {operation}, or before: its process has ended, was cut off, did not call "
            f"{operation} within the process group's timeout, or has lost another rank itself. Look at the output of "
            f"{who if gone else 'all ranks'} first.{said}"
        )
        error.peer = gone[0] if gone else None
        return error

    def _gone(self) -> list[int]:
        """Ranks whose connections to this one are closed: nothing can be posted there."""
        channel = self._channel
        for _ in range(10):
            gone = []
            for peer in channel.peers:
                room = torch.empty(1, dtype=torch.int64, device="cpu")
                try:
                    work = dist.irecv(room, group=channel.group, group_src=peer, tag=_TAG_PROBE)
                except RuntimeError:
                    gone.append(peer)
                else:
                    channel.context.abandoned.append((work, room))
            if gone:
                return sorted(gone)
            time.sleep(0.01)
        return []
