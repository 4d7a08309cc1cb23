"""The exchange for any backend: one broadcast or reduce per segment, all in flight at once.

This is what NCCL offers for segments of unequal lengths, and the only thing gloo offers for CUDA tensors (it has no
point-to-point for them). Operations are issued in the order of the segments, which is the same on all ranks. On NCCL
``wait()`` orders the current stream behind the operations and does not block the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeroshard_comm.errors import PeerLostError
from zeroshard_comm.exchange import Exchange, Pending, Segment, Share, shared_bytes
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic


class CollectiveExchange(Exchange):
    """Broadcasts from, and reduces to, the owners (NCCL, gloo on CUDA, fake, anything else)."""

    def prepare_share(self, segments: Sequence[Segment]) -> Share:
        """Remember the segments: collectives must be issued in one order, so nothing is posted before ``send()``."""
        return _BroadcastShare(self, segments)

    def reduce_to_owners(self, segments: Sequence[Segment]) -> Pending:
        """Issue one reduce per segment; the order of the additions is the backend's own."""
        ranks = self.ranks
        works = [dist.reduce(s.buffer, group=ranks.group, group_dst=s.owner, async_op=True) for s in segments]
        owned = shared_bytes(segments, ranks.rank)
        everything = sum(s.buffer.nbytes for s in segments)
        self.traffic.add("reduce", sent=everything - owned, received=owned * len(ranks.peers), calls=len(works))
        return _InFlight(works, ranks, self.traffic, "reduce")


class _InFlight(Pending):
    def __init__(self, works: list[dist.Work | None], ranks: RankGroup, traffic: Traffic, kind: str) -> None:
        self._works, self._ranks, self._traffic, self._kind = works, ranks, traffic, kind

    def wait(self) -> None:
        started = time.perf_counter()
        try:
            for work in self._works:
                if work is not None:
                    work.wait()
        except RuntimeError as failure:
            raise PeerLostError(
                f"rank {self._ranks.rank} could not finish the {self._kind} of a step: another rank has ended, was cut "
                f"off, or did not call step() within the process group's timeout. Look at the other ranks' output "
                f"first. (The backend said: {str(failure).splitlines()[0]})"
            ) from failure
        self._works = []
        self._traffic.add(self._kind, waited=time.perf_counter() - started)


class _BroadcastShare(Share):
    def __init__(self, exchange: CollectiveExchange, segments: Sequence[Segment]) -> None:
        self._exchange, self._segments = exchange, segments
        self._in_flight: _InFlight | None = None

    def send(self) -> None:
        ranks, traffic = self._exchange.ranks, self._exchange.traffic
        works = [
            dist.broadcast(_movable(s.buffer), group=ranks.group, group_src=s.owner, async_op=True)
            for s in self._segments
        ]
        owned = shared_bytes(self._segments, ranks.rank)
        everything = sum(s.buffer.nbytes for s in self._segments)
        traffic.add("share", sent=owned * len(ranks.peers), received=everything - owned, calls=len(works))
        self._in_flight = _InFlight(works, ranks, traffic, "share")

    def arrive(self) -> None:
        self.wait()

    def wait(self) -> None:
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None


def _movable(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer as bytes: backends refuse some dtypes in a broadcast that they would move without looking at them."""
    return buffer if buffer.dtype is torch.uint8 else buffer.view(torch.uint8)
