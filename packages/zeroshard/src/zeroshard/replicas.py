"""Keeping replicas equal: where parameters lie in memory, and which pieces of them travel after a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from zeroshard_comm import Exchange, RankGroup, Segment, Share, Shipment, Traffic, exchange_for
from zeroshard_core import FlatBuffer, Plan, TensorSpec, bucket_layouts, is_dense, owned_runs, storage_view


class Replicas:
    """Owns the flat buffers of the parameters (if wanted) and the messages of a share.

    Only :meth:`follow` changes it; a step only reads it.

    Args:
        ranks: the group.
        traffic: where shared bytes are counted.
        as_bucket_view: whether parameters are packed into flat buffers and become views of them.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic, *, as_bucket_view: bool) -> None:
        self._ranks, self._traffic, self._as_bucket_view = ranks, traffic, as_bucket_view
        self._buffers: list[FlatBuffer] = []
        self._packed: dict[int, TensorSpec] = {}
        self._params: list[torch.Tensor] = []
        self._shared: list[torch.Tensor] = []
        self._exchanges: dict[torch.device, Exchange] = {}
        self._shipments: list[tuple[Exchange, Shipment]] = []
        self._loose: list[_Loose] = []
        self._addresses: list[int] = []

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The storage of the flat buffers, 1-D; empty without bucket views."""
        return tuple(buffer.storage for buffer in self._buffers)

    def moved(self, params: Sequence[torch.Tensor]) -> bool:
        """Tell whether some parameter's ``.data`` was rebound, or parameters were added, since :meth:`follow`."""
        return [_address(param) for param in params] != self._addresses

    def follow(self, params: Sequence[torch.Tensor], plan: Plan, active: Sequence[bool]) -> None:
        """Lay out and prepare everything for these parameters and this plan.

        Parameters that were packed already stay where they are, and are packed again if their ``.data`` was rebound.

        Args:
            params: all parameters, by tensor index.
            plan: who owns what.
            active: per parameter, whether a step may change it; only these are shared.
        """
        self._params = list(params)
        if self._as_bucket_view:
            self._pack(plan, active)
        self._shared = [param for param, is_shared in zip(params, active, strict=True) if is_shared]
        self._addresses = [_address(param) for param in params]
        self._shipments, self._loose = [], []
        if self._ranks.world_size == 1:
            return
        by_device: dict[torch.device, list[Segment]] = {}
        for segment in self._segments(plan, active):
            by_device.setdefault(segment.buffer.device, []).append(segment)
        self._shipments = [
            (self._exchange(device), Shipment(segments, self._ranks.rank)) for device, segments in by_device.items()
        ]

    def prepare_share(self) -> Share:
        """Begin to share every active parameter from its owner; see :meth:`zeroshard_comm.Exchange.prepare_share`."""
        shares = [shipment.prepare(exchange) for exchange, shipment in self._shipments]
        return _ReplicaShare(shares, self._loose, self._shared, self._ranks.rank)

    def _exchange(self, device: torch.device) -> Exchange:
        if device not in self._exchanges:
            self._exchanges[device] = exchange_for(self._ranks, device, self._traffic)
        return self._exchanges[device]

    def _pack(self, plan: Plan, active: Sequence[bool]) -> None:
        """Pack what became active; repack what was rebound; start over what changed its dtype or shape."""
        kept: list[FlatBuffer] = []
        packed: dict[int, TensorSpec] = {}
        for buffer in self._buffers:
            members = [slot.tensor for slot in buffer.layout.slots]
            rebound = buffer.rebound()
            if all(
                _same_place(self._packed[i], plan.tensors[i]) and self._params[i].device == buffer.storage.device
                for i in members
            ):
                if rebound:
                    buffer.adopt({i: self._params[i] for i in rebound})
                kept.append(buffer)
                packed.update({i: plan.tensors[i] for i in members})
            else:
                buffer.release([i for i in members if i not in rebound])
        wanted = [
            i for i, is_active in enumerate(active) if is_active and i not in packed and is_dense(self._params[i])
        ]
        for layout in bucket_layouts(plan, tensors=wanted):
            members = [slot.tensor for slot in layout.slots]
            buffer = FlatBuffer(layout, plan.tensors, self._params[members[0]].device)
            buffer.adopt({i: self._params[i] for i in members})
            kept.append(buffer)
            packed.update({i: plan.tensors[i] for i in members})
        self._buffers, self._packed = kept, packed

    def _segments(self, plan: Plan, active: Sequence[bool]) -> list[Segment]:
        """The pieces that travel, in an order that follows from plan and activity alone."""
        segments: list[Segment] = []
        alone: list[int] = [i for i, is_active in enumerate(active) if is_active and i not in self._packed]
        for buffer in self._buffers:
            members = [slot.tensor for slot in buffer.layout.slots]
            if all(active[i] for i in members):
                segments += [
                    Segment(run.rank, buffer.storage[run.start : run.stop]) for run in owned_runs(buffer.layout, plan)
                ]
            else:
                alone += [i for i in members if active[i]]
        for i in alone:
            segments += self._pieces(plan, i)
        return segments

    def _pieces(self, plan: Plan, tensor: int) -> list[Segment]:
        param = self._params[tensor].detach()
        if is_dense(param):
            flat = storage_view(param)
            return [Segment(shard.rank, flat[shard.start : shard.stop]) for shard in plan.of_tensor(tensor)]
        # Gaps or overlaps in memory: such a tensor travels as a contiguous copy.
        owner = plan.of_tensor(tensor)[0].rank
        loose = _Loose(owner, param, torch.empty(param.shape, dtype=param.dtype, device=param.device))
        self._loose.append(loose)
        return [Segment(owner, loose.copy.view(-1))]


class _Loose:
    """A parameter without a flat view of its storage, and the contiguous copy that travels for it."""

    def __init__(self, owner: int, param: torch.Tensor, copy: torch.Tensor) -> None:
        self.owner, self.param, self.copy = owner, param, copy


class _ReplicaShare(Share):
    """The shares of all devices as one; afterwards autograd knows that parameters were written."""

    def __init__(
        self, shares: Sequence[Share], loose: Collection[_Loose], written: Sequence[torch.Tensor], rank: int
    ) -> None:
        self._shares, self._loose, self._written, self._rank = shares, loose, written, rank

    def send(self) -> None:
        for item in self._loose:
            if item.owner == self._rank:
                item.copy.copy_(item.param)
        for share in self._shares:
            share.send()

    def wait(self) -> None:
        try:
            for share in self._shares:
                share.wait()
            for item in self._loose:
                if item.owner != self._rank:
                    item.param.copy_(item.copy)
        finally:
            # Receives and flat buffers write behind autograd's back; a graph that saved a parameter must notice.
            torch.autograd.graph.increment_version(self._written)


def _address(param: torch.Tensor) -> int:
    return param.data_ptr() if param.layout is torch.strided else 0


def _same_place(old: TensorSpec, new: TensorSpec) -> bool:
    """Whether a tensor described by ``new`` fits where ``old`` was packed."""
    return (old.shape, old.dtype, old.device, old.stride) == (new.shape, new.dtype, new.device, new.stride)
