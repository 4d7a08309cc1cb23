"""Reducers and broadcasters by collectives, for backends such as NCCL that do not match messages by tag.

Parts of cut tensors are sent in an owner-major matrix, see :mod:`zeroshard_comm.owner_major`: gradients by one
reduce-scatter per bucket, parameters by one all-gather. Whole tensors are sent in place, by reduces or broadcasts that
are issued as one group. Matrices use two buffers in turn, and a matrix that does not fit is sent in chunks.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import torch
import torch.distributed as dist
from zeroshard_core import Run

from zeroshard_comm._torch_private import all_gather, coalescing_manager, foreach_copy_, reduce_scatter
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.messages import wait_for_collective
from zeroshard_comm.owner_major import Block, Chunk, OwnerMajor
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

STAGING_BYTES = 64 * 1024 * 1024
"""Maximum size of each of the two buffers, in bytes, unless a single unit of columns needs more."""

_Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The destinations and the sources."""


class _Slot:
    """One of the buffers. It orders each use after the previous one, even on another stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.passage: _Passage | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Wait for the last use of the buffer, and return its first ``numel`` elements, 1-D, to write to."""
        if self.passage is not None:
            self.passage.finish()
        nbytes = numel * dtype.itemsize
        if self._memory.numel() < nbytes:
            _keep(self._memory)
            # Free the old memory first, so that the device never holds both.
            self._memory = self._memory.new_empty(0)
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._memory[:nbytes].view(dtype)


class _Passage:
    """One use of a slot. ``complete`` waits for a collective, and copies the result out of the slot."""

    def __init__(self, slot: _Slot, complete: Callable[[], None]) -> None:
        self._device = slot.device
        self._end: torch.Event | None = None
        self._complete: Callable[[], None] | None = complete
        slot.passage = self

    def finish(self) -> None:
        """Order the current stream after the collective. Safe to call again, including on another stream."""
        stream = _current_stream(self._device)
        if self._complete is not None:
            self._complete()
            # Break a cycle: the function refers to the process group, whose context holds the slot.
            self._complete = None
            self._end = stream.record_event() if stream is not None else None
        elif self._end is not None and stream is not None:
            stream.wait_event(self._end)


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of a device; None if it has no streams."""
    accelerator = torch.accelerator.current_accelerator()
    has_streams = accelerator is not None and accelerator.type == device.type
    return torch.accelerator.current_stream(device) if has_streams else None


def _keep(memory: torch.Tensor) -> None:
    """Keep freed memory until the current stream has done the work queued so far, if another stream allocated it."""
    stream = _current_stream(memory.device)
    if stream is not None:
        memory.record_stream(stream)


class Staging:
    """Holds two buffers per device, for all matrices of a process group. They grow to the largest matrix or chunk."""

    def __init__(self) -> None:
        self._slots: dict[tuple[torch.device, int], _Slot] = {}
        self._turn = 0

    def next_slot(self, device: torch.device) -> _Slot:
        """Return one of the two slots of a device; calls alternate between them."""
        self._turn = 1 - self._turn
        return self._slots.setdefault((device, self._turn), _Slot(device))


def _together(
    ranks: RankGroup, device: torch.device, operation: str, calls: Sequence[Callable[[], dist.Work | None]]
) -> list[Callable[[], None]]:
    """Issue collectives, as one group if the backend can coalesce them; return functions that wait for them."""
    if calls and ranks.coalesces(device):
        with coalescing_manager(ranks.group, device=device, async_ops=True) as group:
            for call in calls:
                call()
        return [partial(wait_for_collective, group, ranks, operation)]
    return [partial(wait_for_collective, call(), ranks, operation) for call in calls]


def _finish_all(unfinished: list[Callable[[], None]], traffic: Traffic, kind: str) -> None:
    started = time.perf_counter()
    for finish in unfinished:
        finish()
    unfinished.clear()
    traffic.add(kind, waited=time.perf_counter() - started)


class CollectiveReducer(GradientReducer):
    """Reduces one bucket by collectives.

    Args:
        ranks: a group on which all ranks issue collectives in the same order.
        traffic: counts bytes and time spent waiting, as kind ``"reduce"``.
        runs: ranges of elements of the bucket with their owners, in order; equal on all ranks. Gaps have no owner.
        like: the bucket, or any tensor with its dtype and device.

    Attributes:
        matrix: the runs that are sent by reduce-scatter.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic, runs: Sequence[Run], like: torch.Tensor) -> None:
        self.ranks, self.traffic = ranks, traffic
        self._dtype, self._device = like.dtype, like.device
        # For AVG, NCCL multiplies by 1/N before it adds. Others divide the sum, which may overflow in half precision.
        self._averages = ranks.coalesces(like.device)
        self._op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        # A single rank reduces nothing.
        self._runs = runs = [run for run in runs if run.stop > run.start] if ranks.world_size > 1 else []
        self.matrix = OwnerMajor.of(runs, ranks.world_size)
        self._chunks = self.matrix.chunks(
            STAGING_BYTES // like.element_size(), lambda number: runs[number - 1].stop == runs[number].start
        )
        staging = ranks.context.shared(Staging)
        self._slots = [staging.next_slot(like.device) for _ in self._chunks]
        self._owned: torch.Tensor | None = None
        """This rank's row of the matrix, from its first use until :meth:`release`."""
        self._whole = [runs[index] for index in self.matrix.outside]
        owned = sum(run.stop - run.start for run in runs if run.rank == ranks.rank) * like.element_size()
        self._sent = sum(run.stop - run.start for run in runs) * like.element_size() - owned
        self._received = owned * len(ranks.peers)
        self._places: dict[int, tuple[tuple[int, int], _Copies]] = {}

    def owned(self, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the view that holds the mean of a range: in the bucket, or in this rank's row of the matrix."""
        number = bisect_right(self._runs, start, key=attrgetter("start")) - 1
        column = self.matrix.columns[number] if self._runs else None
        if column is None:
            return buffer[start:stop]
        place = column + start - self._runs[number].start
        return self._row()[place : place + stop - start]

    def release(self) -> None:
        """Free this rank's row of the matrix, and drop references to the memory of the last bucket."""
        if self._owned is not None:
            _keep(self._owned)
            self._owned = None
        self._places.clear()

    def begin(self, buffer: torch.Tensor) -> BucketReduceWork:
        """Issue the reductions of a bucket, after the work of the current stream."""
        unfinished: list[Callable[[], None]] = []
        if self._runs:
            group, op = self.ranks.group, self._op
            own = self._row()
            _keep(own)
            if not self._averages:
                buffer.div_(self.ranks.world_size)
            for number, (slot, chunk) in enumerate(zip(self._slots, self._chunks, strict=True)):
                packed = slot.reserve(chunk.width * self.ranks.world_size, self._dtype)
                foreach_copy_(*self._packing(number, buffer, packed))
                row = own[chunk.columns.start : chunk.columns.stop]
                work = reduce_scatter(row, packed, op=op, group=group, async_op=True)
                unfinished.append(_Passage(slot, partial(wait_for_collective, work, self.ranks, "backward()")).finish)
            reduce = partial(dist.reduce, group=group, op=op, async_op=True)
            calls = [partial(reduce, buffer[run.start : run.stop], group_dst=run.rank) for run in self._whole]
            unfinished += _together(self.ranks, self._device, "backward()", calls)
            self.traffic.add("reduce", sent=self._sent, received=self._received, calls=len(unfinished))
        return _CollectiveWork(self.traffic, unfinished)

    def _row(self) -> torch.Tensor:
        """Return this rank's row of the matrix; make it if :meth:`begin` did not, as when another hook reduces."""
        if self._owned is None:
            self._owned = torch.empty(self.matrix.width, dtype=self._dtype, device=self._device)
        return self._owned

    def _packing(self, number: int, buffer: torch.Tensor, packed: torch.Tensor) -> _Copies:
        """Return the blocks of a chunk in the matrix and in the bucket. Cached until either has another address."""
        key, chunk = (buffer.data_ptr(), packed.data_ptr()), self._chunks[number]
        if number not in self._places or self._places[number][0] != key:
            sources = [_in_memory(buffer[self._runs[block.run].start :], block) for block in chunk.blocks]
            self._places[number] = key, (_in_matrix(packed, chunk), sources)
        return self._places[number][1]


def _in_memory(run: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the 2-D view of a block. ``run`` is the 1-D memory that begins with the run of the first row."""
    start = int(run.storage_offset()) + block.offset
    return run.as_strided((len(block.rows), len(block.columns)), (block.stride, 1), start)


def _in_matrix(packed: torch.Tensor, chunk: Chunk) -> list[torch.Tensor]:
    """Return the views of the blocks of a chunk in the 1-D memory of its matrix."""
    matrix = packed.view(-1, chunk.width)
    return [
        matrix[block.rows.start : block.rows.stop, block.columns.start : block.columns.stop] for block in chunk.blocks
    ]


class _CollectiveWork(BucketReduceWork):
    def __init__(self, traffic: Traffic, unfinished: list[Callable[[], None]]) -> None:
        self._traffic, self._unfinished = traffic, unfinished

    def finish(self) -> None:
        _finish_all(self._unfinished, self._traffic, "reduce")


class CollectiveBroadcaster(ParameterBroadcaster):
    """Sends segments by all-gathers and broadcasts, which all ranks of the group issue in the same order.

    The arguments are as for :class:`ParameterBroadcaster`.
    """

    def __init__(self, ranks: RankGroup, segments: Sequence[Segment], traffic: Traffic) -> None:
        super().__init__(ranks, segments, traffic)
        staging = ranks.context.shared(Staging)
        by_dtype: dict[torch.dtype, list[Segment]] = {}
        for segment in segments:
            # A single rank sends nothing.
            if segment.nbytes and ranks.peers:
                by_dtype.setdefault(segment.buffer.dtype, []).append(segment)
        self._gathers: list[_Gather] = []
        self._whole: list[tuple[int, torch.Tensor]] = []
        self._unfinished: list[Callable[[], None]] = []
        for alike in by_dtype.values():
            device, itemsize = alike[0].buffer.device, alike[0].buffer.element_size()
            runs = [Run(segment.owner, 0, segment.numel, segment.is_part) for segment in alike]
            matrix = OwnerMajor.of(runs, ranks.world_size)
            self._whole += [(alike[index].owner, alike[index].view.view(torch.uint8)) for index in matrix.outside]
            for chunk in matrix.chunks(STAGING_BYTES // itemsize, partial(_follows, alike)):
                self._gathers.append(_Gather(ranks, staging.next_slot(device), alike, chunk))

    def send(self) -> None:
        """Issue all collectives. From the third all-gather on, each waits until one of the two buffers is free."""
        group = self.ranks.group
        self._unfinished = [gather.issue().finish for gather in self._gathers]
        calls = [
            partial(dist.broadcast, whole, group=group, group_src=owner, async_op=True) for owner, whole in self._whole
        ]
        if calls:
            self._unfinished += _together(self.ranks, self._whole[0][1].device, "step()", calls)
        self.traffic.add("broadcast", sent=self.sent, received=self.received, calls=len(self._unfinished))

    def arrive(self) -> None:
        """Wait for all collectives, and unpack the gathered rows."""
        _finish_all(self._unfinished, self.traffic, "broadcast")


class _Gather:
    """One chunk of a matrix of segments: packs this rank's row, gathers all rows, and unpacks them."""

    def __init__(self, ranks: RankGroup, slot: _Slot, segments: Sequence[Segment], chunk: Chunk) -> None:
        self._ranks, self._slot, self._chunk = ranks, slot, chunk
        self._dtype = segments[0].buffer.dtype
        self._targets = [_in_memory(segments[block.run].view, block) for block in chunk.blocks]
        self._packed_at = -1
        self._own: _Copies = ([], [])
        self._others: _Copies = ([], [])

    def issue(self) -> _Passage:
        size = self._ranks.world_size
        packed = self._slot.reserve(self._chunk.width * size, self._dtype)
        if self._packed_at != packed.data_ptr():
            self._locate(packed)
        if self._own[0]:
            foreach_copy_(*self._own)
        # Sent as bytes, because backends refuse some dtypes.
        everything, mine = packed.view(torch.uint8), packed.view(size, -1)[self._ranks.rank].view(torch.uint8)
        work = all_gather(everything, mine, group=self._ranks.group, async_op=True)
        return _Passage(self._slot, partial(self._unpack, work))

    def _locate(self, packed: torch.Tensor) -> None:
        self._packed_at, self._own, self._others = packed.data_ptr(), ([], []), ([], [])
        rank, sources = self._ranks.rank, _in_matrix(packed, self._chunk)
        for block, target, source in zip(self._chunk.blocks, self._targets, sources, strict=True):
            if rank in block.rows:
                row = rank - block.rows.start
                self._own[0].append(source[row])
                self._own[1].append(target[row])
            if len(block.rows) > 1 or rank not in block.rows:
                self._others[0].append(target)
                self._others[1].append(source)

    def _unpack(self, work: dist.Work | None) -> None:
        wait_for_collective(work, self._ranks, "step()")
        if self._others[0] and self._ranks.moves_data():
            foreach_copy_(*self._others)


def _follows(segments: Sequence[Segment], number: int) -> bool:
    """Return True if a segment begins in memory where the one before it ends."""
    one, other = segments[number - 1], segments[number]
    return one.buffer is other.buffer and one.within.stop is not None and one.within.stop == other.within.start
