"""Bringing a bucket of gradients to its owners by collectives, where messages cannot be matched by tag.

As :mod:`zeroshard_comm.message_reducer`, with one reduce for each owner and stretch of the bucket: large ones in place,
small ones packed into one buffer per owner. Headers travel from host to host. Everything is issued by the thread that
calls, in the order of :meth:`CollectiveReducer.begin`, which must be the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from zeroshard_core import Run

from zeroshard_comm._torch_private import foreach_copy_
from zeroshard_comm.agreement import Control
from zeroshard_comm.broadcasters import wait_for_collective
from zeroshard_comm.interfaces import BucketHeader, BucketReduceWork, GradientReducer
from zeroshard_comm.packing import PACK_BELOW
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic
from zeroshard_comm.words import TAG_NOTES, Words


@dataclass(frozen=True)
class _Crate:
    """Small stretches of one owner, and their places in one buffer."""

    owner: int
    staging: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    ranges: tuple[tuple[int, int], ...]


class CollectiveReducer(GradientReducer):
    """The collectives of one bucket.

    Args:
        ranks: a group on which nothing else is issued.
        control: has the channel of the headers.
        traffic: where bytes are counted, as kinds ``"reduce"`` and ``"control"``.
        runs: ranges of elements of the bucket and who owns them, in bucket order; elements between them have no owner.
        like: a bucket, or any tensor of its dtype and device.
        tensors: number of tensors in the bucket.
    """

    def __init__(
        self,
        ranks: RankGroup,
        control: Control,
        traffic: Traffic,
        runs: Sequence[Run],
        like: torch.Tensor,
        tensors: int,
    ) -> None:
        self.ranks, self.control, self.traffic, self.tensors = ranks, control, traffic, tensors
        world_size = ranks.world_size
        # A single rank has nothing to reduce.
        moved = [run for run in runs if run.stop > run.start] if world_size > 1 else []
        limit = PACK_BELOW // like.element_size()
        self._large = [run for run in moved if run.stop - run.start >= limit]
        self.crates: list[_Crate] = []
        for owner in range(world_size):
            ranges = [(run.start, run.stop) for run in moved if run.rank == owner and run.stop - run.start < limit]
            if ranges:
                sizes = [stop - start for start, stop in ranges]
                staging = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
                self.crates.append(_Crate(owner, staging, tuple(staging.split(sizes)), tuple(ranges)))

    def begin(self, buffer: torch.Tensor, header: BucketHeader, *, gradients: bool = True) -> BucketReduceWork:
        """Send a header, and issue the reductions of a bucket after what the current stream is doing."""
        words = Words(self.control, header.to_words(), TAG_NOTES, "backward()")
        works: list[dist.Work | None] = []
        if gradients and self.ranks.world_size > 1:
            # First, as DDP does: a sum in half precision may be too large.
            buffer.div_(self.ranks.world_size)
            moved = [(run.rank, buffer[run.start : run.stop]) for run in self._large]
            for crate in self.crates:
                torch.cat([buffer[start:stop] for start, stop in crate.ranges], out=crate.staging)
                moved.append((crate.owner, crate.staging))
            works = [dist.reduce(part, group=self.ranks.group, group_dst=owner, async_op=True) for owner, part in moved]
            everything = sum(part.nbytes for _, part in moved)
            owned = sum(part.nbytes for owner, part in moved if owner == self.ranks.rank)
            received = owned * len(self.ranks.peers)
            self.traffic.add("reduce", sent=everything - owned, received=received, calls=len(works))
        return _CollectiveWork(self, buffer, words, works)


class _CollectiveWork(BucketReduceWork):
    def __init__(
        self, reducer: CollectiveReducer, buffer: torch.Tensor, words: Words, works: list[dist.Work | None]
    ) -> None:
        self._reducer, self._buffer, self._words, self._works = reducer, buffer, words, works

    def finish(self) -> list[BucketHeader]:
        headers = [BucketHeader.from_words(words, self._reducer.tensors) for words in self._words.wait()]
        if not self._works:
            return headers
        started = time.perf_counter()
        works, self._works = self._works, []
        for work in works:
            wait_for_collective(work, self._reducer.ranks, "reduce")
        self._reducer.traffic.add("reduce", waited=time.perf_counter() - started)
        for crate in self._reducer.crates:
            if crate.owner == self._reducer.ranks.rank:
                foreach_copy_([self._buffer[start:stop] for start, stop in crate.ranges], crate.slots)
        return headers

    def close(self) -> None:
        """Do nothing: a collective that has been finished has been sent."""
