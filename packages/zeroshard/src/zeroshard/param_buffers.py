"""Packs parameters into flat buffers, and broadcasts their ranges from the owners after a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import groupby

import torch
from zeroshard_comm import Coordinator, ParameterBroadcaster, Segment, choose_broadcaster
from zeroshard_core import BucketLayout, FlatBuffer, Plan, Slot, bucket_layouts, storage_view

from zeroshard.plan.layout import label_in


class ParamBroadcast:
    """Broadcasts parameters from their owners to all ranks. Repeated calls are no-ops until :meth:`reset`."""

    def __init__(self, params: Sequence[torch.Tensor], broadcasters: Sequence[ParameterBroadcaster]) -> None:
        self._params, self._broadcasters = list(params), broadcasters
        self.reset()

    def reset(self) -> None:
        """Prepare for the next broadcast."""
        self._is_expected = self._is_sent = False

    def expect(self) -> None:
        """Post the receives of the owners' new values, once. From now on autograd may not use the old values."""
        if not self._is_expected:
            self._is_expected = True
            for broadcaster in self._broadcasters:
                broadcaster.begin()
            # Autograd does not see writes by receives and flat buffers; a graph that saved a parameter must raise.
            torch.autograd.graph.increment_version(self._params)

    def send(self) -> Sequence[ParameterBroadcaster]:
        """Send this rank's shards once, and return the broadcasts to wait for."""
        self.expect()
        for broadcaster in self._broadcasters if not self._is_sent else ():
            broadcaster.send()
        self._is_sent = True
        return self._broadcasters


def broadcast_all(broadcasts: Sequence[ParamBroadcast]) -> None:
    """Send this rank's shards, and wait for the other ranks' shards. Collective.

    The broadcasts are in the same order on every rank; some may have been sent before. Until all ranks agree
    afterwards, other ranks may still be reading this rank's shards.
    """
    try:
        # Send to all ranks before waiting for any.
        sent = [each for broadcast in broadcasts for each in broadcast.send()]
        for each in sent:
            each.arrive()
        for each in sent:
            each.wait()
    finally:
        for broadcast in broadcasts:
            broadcast.reset()


def broadcast_params(
    coordinator: Coordinator, params: Sequence[torch.Tensor], plan: Plan, chosen: Sequence[bool]
) -> None:
    """Broadcast the chosen parameters outside of a step. Collective.

    Ranks must agree afterwards, because other ranks may still be reading this rank's shards.
    """
    buffers = ParamBuffers(coordinator, as_bucket_view=False)
    buffers.lay_out(params, plan, chosen)
    broadcast_all([buffers.broadcast])


class ParamBuffers:
    """Owns the flat buffers of the parameters, if requested, and broadcasts the parameters.

    With ``as_bucket_view``, parameters are packed into flat buffers and become views of them. A parameter that was
    packed stays in its buffer. ``broadcast`` sends, together, all parameters that a step may change. Only
    :meth:`lay_out` and :meth:`restore` change this object; a step only reads it.
    """

    def __init__(self, coordinator: Coordinator, *, as_bucket_view: bool) -> None:
        self._coordinator, self._as_bucket_view = coordinator, as_bucket_view
        self._buffers: list[FlatBuffer] = []
        self._packed: dict[int, FlatBuffer] = {}
        self._params: list[torch.Tensor] = []

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The storage of the flat buffers, 1-D; empty without bucket views."""
        return tuple(buffer.storage for buffer in self._buffers)

    def lay_out(self, params: Sequence[torch.Tensor], plan: Plan, active: Sequence[bool]) -> None:
        """Pack these parameters for a plan if requested, and prepare the broadcast of the active ones."""
        self._params = list(params)
        if self._as_bucket_view:
            self._pack(plan, active)
        changing = [index for index, is_active in enumerate(active) if is_active]
        by_device: dict[torch.device, list[Segment]] = {}
        for segment in self.segments(plan, changing) if plan.world_size > 1 else ():
            by_device.setdefault(segment.buffer.device, []).append(segment)
        self.broadcast = ParamBroadcast(
            [params[index] for index in changing],
            [choose_broadcaster(self._coordinator, segments, device) for device, segments in by_device.items()],
        )

    def _pack(self, plan: Plan, active: Sequence[bool]) -> None:
        """Pack parameters that became active."""
        wanted = [index for index, is_active in enumerate(active) if is_active and index not in self._packed]
        for layout in bucket_layouts(plan, tensors=wanted):
            members = {slot.tensor: self._params[slot.tensor] for slot in layout.slots}
            buffer = FlatBuffer(layout, plan.tensors, next(iter(members.values())).device)
            buffer.adopt(members)
            self._buffers.append(buffer)
            self._packed |= dict.fromkeys(members, buffer)

    def restore(self, plan: Plan, moved: Sequence[int]) -> bool:
        """Copy packed parameters among ``moved`` back into their buffers; return True if there are any.

        Raises:
            RuntimeError: if one does not fit its place in shape, dtype, device or memory format; then none is copied.
        """
        rebound = {index: self._params[index] for index in moved if index in self._packed}
        for index, param in rebound.items():
            view = self._packed[index].view(index)
            has_format = param.is_contiguous() or param.stride() == view.stride()
            if not has_format or (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"{label_in(plan, index)} is a view of a flat buffer, and its .data was rebound to a tensor of "
                    f"{_form(param)}, which cannot be copied into its place of {_form(view)}: convert the model before "
                    f"the optimizer is built, or build it with parameters_as_bucket_view=False"
                )
        storages = {buffer.storage.untyped_storage().data_ptr() for buffer in self._buffers}
        for param in rebound.values():
            if param.untyped_storage().data_ptr() in storages:
                # Two parameters may have exchanged their data: save the values before another copy overwrites them.
                param.data = param.detach().clone()
        for index, param in rebound.items():
            self._packed[index].adopt({index: param})
        # A graph may have saved the old values.
        torch.autograd.graph.increment_version([*rebound.values()])
        return bool(rebound)

    def segments(self, plan: Plan, wanted: Sequence[int]) -> list[Segment]:
        """Return as few segments as possible that cover some parameters, in the same order on every rank."""
        chosen = frozenset(wanted)
        found: list[Segment] = []
        alone = [index for index in wanted if index not in self._packed]
        for buffer in self._buffers:
            for owner, members, start, stop in _runs(buffer.layout, plan, chosen):
                if owner is None:
                    alone += members
                else:
                    found.append(Segment(owner, buffer.storage, within=slice(start, stop)))
        for index in alone:
            flat = storage_view(self._params[index].detach())
            shards = plan.of_tensor(index)
            found += [Segment(shard.rank, flat, len(shards) > 1, shard.flat) for shard in shards]
        return found


def _form(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()} and {tensor.dtype} on {tensor.device}"


def _runs(layout: BucketLayout, plan: Plan, wanted: Set[int]) -> Iterator[tuple[int | None, list[int], int, int]]:
    """Yield the runs of wanted tensors of one owner: owner (None if cut), tensors, start and stop in elements."""
    ends = [slot.offset for slot in layout.slots[1:]] + [layout.numel]

    def owner_of(slot: Slot) -> tuple[bool, int | None]:
        owners = plan.owners[slot.tensor]
        return slot.tensor in wanted, owners[0] if len(owners) == 1 else None

    for (is_wanted, owner), run in groupby(zip(layout.slots, ends, strict=True), lambda item: owner_of(item[0])):
        if is_wanted:
            slots = list(run)
            yield owner, [slot.tensor for slot, _ in slots], slots[0][0].offset, slots[-1][1]
