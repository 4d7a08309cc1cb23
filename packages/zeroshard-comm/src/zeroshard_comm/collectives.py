"""What travels by collectives, where messages cannot be matched by tag: gradients to their owners.

As in :mod:`zeroshard_comm.message_reducer`, with one reduce for each owner and range of the bucket: large ones in
place, small ones packed into one buffer per owner. Headers travel from host to host, so that reading them does not wait
for an accelerator. Everything is issued by the thread that calls, in the order of :meth:`CollectiveReducer.begin`,
which must be the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from zeroshard_core import Run

from zeroshard_comm._torch_private import foreach_copy_
from zeroshard_comm.agreement import Coordinator
from zeroshard_comm.interfaces import BucketHeader, BucketReduceWork, GradientReducer
from zeroshard_comm.messages import PACK_BELOW, Message, receive, send, wait_for_collective
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_HEADERS = 0x5A530040


@dataclass(frozen=True)
class _PackedReduce:
    """Small ranges of one owner, and their places in one buffer."""

    owner: int
    staging: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    ranges: tuple[tuple[int, int], ...]


class CollectiveReducer(GradientReducer):
    """The collectives of one bucket.

    Args:
        ranks: a group on which nothing else is issued.
        coordinator: has the channel of the headers.
        traffic: where bytes are counted, as kinds ``"reduce"`` and ``"control"``.
        runs: ranges of elements of the bucket and who owns them, in bucket order; elements between them have no owner.
        like: a bucket, or any tensor of its dtype and device.
        tensors: number of tensors in the bucket.
    """

    def __init__(
        self,
        ranks: RankGroup,
        coordinator: Coordinator,
        traffic: Traffic,
        runs: Sequence[Run],
        like: torch.Tensor,
        tensors: int,
    ) -> None:
        self.ranks, self.coordinator, self.traffic, self.tensors = ranks, coordinator, traffic, tensors
        world_size = ranks.world_size
        # A single rank has nothing to reduce.
        moved = [run for run in runs if run.stop > run.start] if world_size > 1 else []
        limit = PACK_BELOW // like.element_size()
        self._large = [run for run in moved if run.stop - run.start >= limit]
        self.packed: list[_PackedReduce] = []
        for owner in range(world_size):
            ranges = [(run.start, run.stop) for run in moved if run.rank == owner and run.stop - run.start < limit]
            if ranges:
                sizes = [stop - start for start, stop in ranges]
                staging = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
                self.packed.append(_PackedReduce(owner, staging, tuple(staging.split(sizes)), tuple(ranges)))

    def begin(self, buffer: torch.Tensor, header: BucketHeader, *, gradients: bool = True) -> BucketReduceWork:
        """Send a header, and issue the reductions of a bucket after what the current stream is doing."""
        headers = HeaderExchange(self.coordinator, header.to_words(), TAG_HEADERS, "backward()")
        works: list[dist.Work | None] = []
        if gradients and self.ranks.world_size > 1:
            # First, as DDP does: a sum in half precision may be too large.
            buffer.div_(self.ranks.world_size)
            moved = [(run.rank, buffer[run.start : run.stop]) for run in self._large]
            for packed in self.packed:
                torch.cat([buffer[start:stop] for start, stop in packed.ranges], out=packed.staging)
                moved.append((packed.owner, packed.staging))
            works = [dist.reduce(part, group=self.ranks.group, group_dst=owner, async_op=True) for owner, part in moved]
            everything = sum(part.nbytes for _, part in moved)
            owned = sum(part.nbytes for owner, part in moved if owner == self.ranks.rank)
            received = owned * len(self.ranks.peers)
            self.traffic.add("reduce", sent=everything - owned, received=received, calls=len(works))
        return _CollectiveWork(self, buffer, headers, works)


class _CollectiveWork(BucketReduceWork):
    def __init__(
        self, reducer: CollectiveReducer, buffer: torch.Tensor, headers: HeaderExchange, works: list[dist.Work | None]
    ) -> None:
        self._reducer, self._buffer, self._headers, self._works = reducer, buffer, headers, works

    def finish(self) -> list[BucketHeader]:
        headers = [BucketHeader.from_words(words, self._reducer.tensors) for words in self._headers.wait()]
        if not self._works:
            return headers
        started = time.perf_counter()
        works, self._works = self._works, []
        for work in works:
            wait_for_collective(work, self._reducer.ranks, "reduce")
        self._reducer.traffic.add("reduce", waited=time.perf_counter() - started)
        for packed in self._reducer.packed:
            if packed.owner == self._reducer.ranks.rank:
                foreach_copy_([self._buffer[start:stop] for start, stop in packed.ranges], packed.slots)
        return headers

    def close(self) -> None:
        """Do nothing: a collective that has been finished has been sent."""


class HeaderExchange:
    """A few numbers from every rank to every rank, sent at once and read later.

    All ranks send the same count of numbers, and make these objects in the same order for each tag.

    Args:
        coordinator: has the channel, and counts the bytes as kind ``"control"``.
        numbers: 64-bit integers.
        tag: of the messages.
        operation: what the ranks are doing, for messages.

    Raises:
        PeerLostError: if a rank is gone.
    """

    def __init__(self, coordinator: Coordinator, numbers: Sequence[int], tag: int, operation: str) -> None:
        self._coordinator, self._numbers, self._operation = coordinator, list(numbers), operation
        self._arriving: dict[int, torch.Tensor] = {}
        self._messages: list[Message] = []
        if coordinator.is_single_rank:
            return
        channel = coordinator.channel
        # What is sent must live as long as the sends.
        self._own = torch.tensor(self._numbers, dtype=torch.int64, device="cpu")
        self._arriving = {peer: torch.empty_like(self._own) for peer in channel.peers}
        self._messages = [receive(channel, peer, theirs, tag, operation) for peer, theirs in self._arriving.items()]
        self._messages += [send(channel, peer, self._own, tag, operation) for peer in channel.peers]
        peers = len(channel.peers)
        nbytes = self._own.nbytes * peers
        coordinator.traffic.add("control", sent=nbytes, received=nbytes, calls=2 * peers)

    def wait(self) -> list[list[int]]:
        """Return the numbers of every rank, in rank order; only this rank's own if nothing is sent.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self._coordinator.is_single_rank:
            return [self._numbers]
        started = time.perf_counter()
        rank = self._coordinator.channel.rank
        for message in self._messages:
            message.wait(self._operation)
        self._messages = []
        self._coordinator.traffic.add("control", waited=time.perf_counter() - started)
        found = {peer: theirs.tolist() for peer, theirs in self._arriving.items()} | {rank: self._numbers}
        return [found[other] for other in range(len(found))]
