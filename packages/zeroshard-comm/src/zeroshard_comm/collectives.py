"""The two moves by collectives, where messages cannot be matched by tag: as NCCL has them.

What a rank owns of cut tensors travels in an owner-major matrix, see :mod:`zeroshard_comm.owner_major`: gradients by
one reduce-scatter of a bucket, parameters by one all-gather. Whole tensors travel in place, by one group of reduces, or
of broadcasts. A matrix lies in one of two buffers in turn, and a larger one travels in chunks. Headers travel from host
to host, so that reading them does not wait for an accelerator.

Everything is issued by the thread that calls, in one order, which must be the same on all ranks.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from zeroshard_core import Run

from zeroshard_comm._torch_private import all_gather, coalescing_manager, reduce_scatter
from zeroshard_comm.agreement import Coordinator
from zeroshard_comm.headers import BucketHeader, HeaderExchange
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.messages import Waitable, wait_for_collective
from zeroshard_comm.owner_major import Chunk, Item, OwnerMajor
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

STAGING_BYTES = 64 * 1024 * 1024
"""Of each of the two buffers, at most; one unit of columns always fits."""


class _Slot:
    """One of the buffers. Its next user is ordered after the last one, on whatever stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.passage: _Passage | None = None
        self._memory: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory to write to, 1-D."""
        if self.passage is not None:
            self.passage.finish()
        nbytes = numel * dtype.itemsize
        memory = self._memory
        if memory is None or memory.numel() < nbytes:
            self._free()
            memory = self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return memory[:nbytes].view(dtype)

    def _free(self) -> None:
        """Free the memory once the current stream has come as far as now: another one may have allocated it."""
        stream = _current_stream(self.device)
        if stream is not None and self._memory is not None:
            self._memory.record_stream(stream)
        self._memory = None


class _Passage:
    """One collective that uses a slot; ``complete`` waits for it, and copies out of the slot what has arrived."""

    def __init__(self, slot: _Slot, complete: Callable[[], None]) -> None:
        self._device = slot.device
        self._end: torch.Event | None = None
        self._complete: Callable[[], None] | None = complete
        slot.passage = self

    def finish(self) -> None:
        """Order the current stream after it. It may have been finished before, perhaps on another stream."""
        stream = _current_stream(self._device)
        if self._complete is not None:
            self._complete()
            # It refers to the group, by which the slot is found.
            self._complete = None
            self._end = stream.record_event() if stream is not None else None
        elif self._end is not None and stream is not None:
            stream.wait_event(self._end)


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream of a device; None if it has no streams."""
    accelerator = torch.accelerator.current_accelerator()
    has_streams = accelerator is not None and accelerator.type == device.type
    return torch.accelerator.current_stream(device) if has_streams else None


class Staging:
    """Two buffers per device in turn, for all matrices of a process group; they grow to what is asked for."""

    def __init__(self) -> None:
        self._slots: dict[tuple[torch.device, int], _Slot] = {}
        self._turn = 0

    def slot(self, device: torch.device, number: int) -> _Slot:
        """Return one of the two."""
        return self._slots.setdefault((device, number % 2), _Slot(device))

    def next_slot(self, device: torch.device) -> _Slot:
        """Return the one whose turn it is."""
        self._turn += 1
        return self.slot(device, self._turn)


def _together(
    ranks: RankGroup, device: torch.device, calls: Sequence[Callable[[], Waitable | None]]
) -> list[Waitable | None]:
    """Issue collectives as one group, or one by one where the backend has no groups."""
    if not calls:
        return []
    if not ranks.coalesces(device):
        return [call() for call in calls]
    with coalescing_manager(ranks.group, device=device, async_ops=True) as group:
        for call in calls:
            call()
    return [group]


class CollectiveReducer(GradientReducer):
    """The collectives of one bucket.

    Args:
        ranks: a group whose collectives are issued in one order.
        coordinator: exchanges the headers.
        traffic: where bytes are counted, as kind ``"reduce"``.
        runs: ranges of elements of the bucket and who owns them, in bucket order; elements between them have no owner.
        like: a bucket, or any tensor of its dtype and device.
        tensors: number of tensors in the bucket.

    Attributes:
        matrix: which runs travel by reduce-scatter.
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
        self.ranks, self.traffic, self.headers = ranks, traffic, HeaderExchange(coordinator, tensors)
        self._dtype, self._device = like.dtype, like.device
        # NCCL multiplies by 1/N before it adds. Others divide the sum, which may overflow in half precision.
        self._averages = ranks.coalesces(like.device)
        self._op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        # A single rank has nothing to reduce.
        self._runs = runs = [run for run in runs if run.stop > run.start] if ranks.world_size > 1 else []
        self.matrix = matrix = OwnerMajor.of(
            [Item(run.rank, run.stop - run.start, run.is_part) for run in runs], ranks.world_size
        )
        self._chunks = matrix.chunks(STAGING_BYTES // like.element_size())
        self._owned = torch.empty(matrix.width, dtype=like.dtype, device=like.device)
        self._starts, self._whole = [run.start for run in runs], matrix.outside
        sizes = [(run.stop - run.start) * like.element_size() for run in runs]
        owned = sum(size for size, run in zip(sizes, runs, strict=True) if run.rank == ranks.rank)
        self._sent, self._received = sum(sizes) - owned, owned * len(ranks.peers)
        self._packed: tuple[int, list[list[torch.Tensor]]] = (-1, [])

    def owned(self, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return where the mean of a range lies: in the bucket, or in this rank's row of the matrix."""
        number = bisect_right(self._starts, start) - 1
        column = self.matrix.columns[number] if self._runs else None
        if column is None:
            return buffer[start:stop]
        place = column + start - self._runs[number].start
        return self._owned[place : place + stop - start]

    def release(self) -> None:
        """Drop what refers to the memory of the last bucket."""
        self._packed = (-1, [])

    def begin(self, buffer: torch.Tensor, header: BucketHeader, *, gradients: bool = True) -> BucketReduceWork:
        """Issue the reductions of a bucket after what the current stream is doing."""
        scatters: list[_Passage] = []
        if gradients and self._runs and not self._averages:
            buffer.div_(self.ranks.world_size)
        works: list[Waitable | None] = []
        if gradients and self._runs:
            staging = self.ranks.context.shared(Staging)
            for chunk, views in zip(self._chunks, self._views_of(buffer), strict=True):
                slot = staging.next_slot(self._device)
                packed = slot.take(chunk.width * self.ranks.world_size, self._dtype)
                torch.cat(views, out=packed)
                row = self._owned[chunk.columns.start : chunk.columns.stop]
                work = reduce_scatter(row, packed, op=self._op, group=self.ranks.group, async_op=True)
                scatters.append(_Passage(slot, partial(wait_for_collective, work, self.ranks, "reduce")))
            works = _together(self.ranks, self._device, [self._reduce_of(buffer, i) for i in self._whole])
            calls = len(scatters) + len(works)
            self.traffic.add("reduce", sent=self._sent, received=self._received, calls=calls)
        return _CollectiveWork(self, header, scatters, works)

    def _reduce_of(self, buffer: torch.Tensor, number: int) -> Callable[[], Waitable | None]:
        run = self._runs[number]
        part = buffer[run.start : run.stop]
        return partial(dist.reduce, part, group=self.ranks.group, group_dst=run.rank, op=self._op, async_op=True)

    def _views_of(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        """Per chunk, what is packed into it: views of the bucket and padding, kept as long as the bucket stays."""
        if self._packed[0] != buffer.data_ptr():
            pieces = [piece for chunk in self._chunks for piece in chunk.pieces]
            most = max([piece.numel for piece in pieces if piece.item is None], default=0)
            padding = torch.zeros(most, dtype=self._dtype, device=self._device)
            starts = self._starts
            views = [
                [
                    padding[:numel] if item is None else buffer[starts[item] + start : starts[item] + start + numel]
                    for item, start, numel in ((piece.item, piece.start, piece.numel) for piece in chunk.pieces)
                ]
                for chunk in self._chunks
            ]
            self._packed = buffer.data_ptr(), views
        return self._packed[1]


class _CollectiveWork(BucketReduceWork):
    def __init__(
        self,
        reducer: CollectiveReducer,
        header: BucketHeader,
        scatters: Sequence[_Passage],
        works: Sequence[Waitable | None],
    ) -> None:
        self._reducer, self._header, self._scatters, self._works = reducer, header, scatters, works

    def finish(self) -> list[BucketHeader]:
        headers, _ = self._reducer.headers.exchange(self._header)
        started = time.perf_counter()
        for scatter in self._scatters:
            scatter.finish()
        for work in self._works:
            wait_for_collective(work, self._reducer.ranks, "reduce")
        self._scatters = self._works = ()
        self._reducer.traffic.add("reduce", waited=time.perf_counter() - started)
        return headers

    def close(self) -> None:
        """Do nothing: a collective that has been finished has been sent."""


class CollectiveBroadcaster(ParameterBroadcaster):
    """All-gathers and broadcasts of segments, issued in one order by the thread that calls.

    Args:
        ranks: a group whose collectives are issued in one order.
        segments: as for :class:`ParameterBroadcaster`.
        traffic: as there.
    """

    def __init__(self, ranks: RankGroup, segments: Sequence[Segment], traffic: Traffic | None = None) -> None:
        super().__init__(ranks, segments, traffic)
        staging = ranks.context.shared(Staging)
        by_dtype: dict[torch.dtype, list[Segment]] = {}
        # A single rank has nothing to send.
        for segment in [segment for segment in segments if segment.buffer.nbytes] if ranks.peers else ():
            by_dtype.setdefault(segment.buffer.dtype, []).append(segment)
        self._gathers: list[_Gather] = []
        self._whole: list[Segment] = []
        self._arriving: list[_Passage] = []
        self._works: list[Waitable | None] = []
        for alike in by_dtype.values():
            items = [Item(segment.owner, segment.buffer.numel(), segment.is_part) for segment in alike]
            matrix = OwnerMajor.of(items, ranks.world_size)
            self._whole += [alike[index] for index in matrix.outside]
            buffers = [segment.buffer for segment in alike]
            for chunk in matrix.chunks(STAGING_BYTES // buffers[0].element_size()):
                slot = staging.slot(buffers[0].device, len(self._gathers))
                self._gathers.append(_Gather(ranks, slot, buffers, chunk))

    def begin(self) -> None:
        """Issue nothing yet: collectives are issued in one order, when there are values to send."""

    def send(self) -> None:
        """Issue all collectives. Each all-gather from the third on waits until one of two buffers is free."""
        group = self.ranks.group
        self._arriving = [gather.issue() for gather in self._gathers]
        calls = [
            partial(dist.broadcast, whole.buffer.view(torch.uint8), group=group, group_src=whole.owner, async_op=True)
            for whole in self._whole
        ]
        if calls:
            self._works = _together(self.ranks, self._whole[0].buffer.device, calls)
        issued = len(self._arriving) + len(self._works)
        self.traffic.add("share", sent=self.sent, received=self.received, calls=issued)

    def arrive(self) -> None:
        """Wait for all, and unpack what has been gathered."""
        started = time.perf_counter()
        for gather in self._arriving:
            gather.finish()
        for work in self._works:
            wait_for_collective(work, self.ranks, "share")
        self._arriving, self._works = [], []
        self.traffic.add("share", waited=time.perf_counter() - started)


class _Gather:
    """One chunk of a matrix of segments: this rank's row is packed, gathered with the others', and unpacked.

    Pieces whose places are next to each other in memory are unpacked together, as parts of one parameter are.
    """

    def __init__(self, ranks: RankGroup, slot: _Slot, buffers: Sequence[torch.Tensor], chunk: Chunk) -> None:
        self._ranks, self._slot, self._width, self._dtype = ranks, slot, chunk.width, buffers[0].dtype
        self._sizes = [piece.numel for piece in chunk.pieces]
        placed: list[tuple[int, int, int]] = []
        self._own: list[torch.Tensor] = []
        rows = [(stop - 1) // chunk.width for stop in accumulate(self._sizes)]
        for place, (piece, row) in enumerate(zip(chunk.pieces, rows, strict=True)):
            if piece.item is not None:
                placed.append((piece.item, piece.start, place))
                if row == ranks.rank:
                    self._own.append(buffers[piece.item][piece.start : piece.start + piece.numel])
        self._targets: list[torch.Tensor] = []
        self._places: list[list[int]] = []
        """Per target, the pieces that lie there, one after another."""
        end = 0
        for item, start, place in sorted(placed):
            target = buffers[item][start : start + self._sizes[place]]
            if end and target.data_ptr() == end and _share_memory(self._targets[-1], target):
                before = self._targets.pop()
                self._targets.append(before.as_strided((before.numel() + target.numel(),), (1,)))
                self._places[-1].append(place)
            elif rows[place] != ranks.rank:
                self._targets.append(target)
                self._places.append([place])
            else:
                continue
            end = target.data_ptr() + target.nbytes
        self._sources: tuple[int, list[list[torch.Tensor]]] = (-1, [])

    def issue(self) -> _Passage:
        packed = self._slot.take(self._width * self._ranks.world_size, self._dtype)
        row = packed.view(self._ranks.world_size, -1)[self._ranks.rank]
        if self._own:
            torch.cat(self._own, out=row[: sum(map(torch.Tensor.numel, self._own))])
        if self._sources[0] != packed.data_ptr():
            views = packed.split(self._sizes)
            self._sources = packed.data_ptr(), [[views[place] for place in places] for places in self._places]
        # As bytes: backends refuse some dtypes that they would move without looking at them.
        everything, mine = packed.view(torch.uint8), row.view(torch.uint8)
        work = all_gather(everything, mine, group=self._ranks.group, async_op=True)
        return _Passage(self._slot, partial(self._unpack, work))

    def _unpack(self, work: dist.Work | None) -> None:
        wait_for_collective(work, self._ranks, "share")
        if self._ranks.moves_data():
            for target, sources in zip(self._targets, self._sources[1], strict=True):
                torch.cat(sources, out=target)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    address = one.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()
