"""Packs the gradients of a plain module into buckets for their owners, and keeps only this rank's parts."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate

import torch
from zeroshard_comm import Transport
from zeroshard_core import Plan, TensorSpec

from zeroshard._torch_private import foreach_add_, foreach_copy_, storage_users
from zeroshard.grads.bucket import OwnedGradients, gradient_view, runs_of
from zeroshard.grads.placeholder import GradPlaceholder, Reduced
from zeroshard.grads.table import GradTable
from zeroshard.grads.transient import TransientBuffers
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import active_mask


class HeldBucket(OwnedGradients):
    """Some parameters whose gradients are sent together. This rank's parts are in ``held``, which all buckets share."""

    def __init__(
        self,
        index: int,
        tensors: Sequence[int],
        params: Sequence[torch.Tensor],
        plan: Plan,
        transport: Transport,
        held: dict[int, torch.Tensor],
    ) -> None:
        *offsets, length = accumulate(map(torch.Tensor.numel, params), initial=0)
        super().__init__(index, tensors, params, offsets, length)
        self.dtype, self.is_cut = params[0].dtype, any(map(plan.is_cut, tensors))
        self.reducer = transport.reducer(runs_of(plan, self.tensors, self.offsets), params[0].new_empty(0))
        self._held = held
        self._is_plain = all(param.is_contiguous() for param in params)
        self.missing: set[int] = set()
        """The tensors whose gradients have not arrived in this backward."""
        self.is_sent, self.present = False, (False,) * len(params)
        """Whether the bucket was sent in this backward, and which gradients this rank had then."""

    def begin(self) -> None:
        """Prepare for a backward."""
        pairs = zip(self.tensors, self.params, strict=True)
        self.missing = {tensor for tensor, param in pairs if param.requires_grad}
        self.is_sent = False

    def pack(
        self, values: Sequence[torch.Tensor | None], buffers: TransientBuffers
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the bucket, 1-D, with gradients or zeros for None; and the memory that was lent, if any.

        If a gradient is alone in its bucket and in its memory, it is sent from that memory.
        """
        first = values[0]
        if len(values) == 1 and first is not None and _is_alone(first, self.params[0]):
            return first.as_strided((self.length,), (1,)), None
        memory, buffer = buffers.lend(self.length, self.dtype)
        given = [value for value in values if value is not None and value.is_contiguous()]
        if self._is_plain and len(given) == len(values):
            torch.cat([value.view(-1) for value in given], out=buffer)
            return buffer, memory
        for value, param, offset, stride in zip(values, self.params, self.offsets, self._strides, strict=True):
            place = gradient_view(buffer, offset, param.shape, stride)
            _ = place.zero_() if value is None else place.copy_(value)
        return buffer, memory

    def reserve(self, kept: Collection[int]) -> torch.Tensor | None:
        """Allocate memory for this rank's parts, and return it. ``kept`` tensors already have theirs."""
        wanted = [(place, shard) for place, shard in self._owned.items() if self.tensors[place] not in kept]
        if not wanted:
            return None
        flat = self.params[0].new_empty(sum(shard.shard.numel for _, shard in wanted))
        offset = 0
        for place, shard in wanted:
            view = gradient_view(flat, offset, shard.tensor.shape, self._strides[place])
            self._held[self.tensors[place]] = view
            offset += shard.shard.numel
        return flat

    def is_own(self, kept: Collection[int]) -> bool:
        """Return True if a bucket is one whole gradient that this rank owns and that is not among ``kept`` tensors."""
        owned = [shard.shard.numel for shard in self._owned.values()]
        return len(self.tensors) == 1 and self.tensors[0] not in kept and owned == [self.length]

    def accept(self, buffer: torch.Tensor, kept: Collection[int]) -> None:
        """Copy this rank's means out of a reduced bucket, or add them to the values of ``kept`` tensors.

        If :meth:`reserve` has made no memory for them, they stay in the bucket.
        """
        arrived = self._views_in(partial(self.reducer.owned, buffer))
        copied = [tensor for tensor in arrived if tensor not in kept and tensor in self._held]
        added = [tensor for tensor in arrived if tensor in kept]
        self._held.update({tensor: arrived[tensor] for tensor in arrived if tensor not in self._held})
        if copied:
            foreach_copy_([self._held[tensor] for tensor in copied], [arrived[tensor] for tensor in copied])
        if added:
            foreach_add_([self._held[tensor] for tensor in added], [arrived[tensor] for tensor in added])
        self.reducer.release()

    def owned_gradients(self) -> dict[int, torch.Tensor]:
        """Return this rank's parts of reduced gradients, by tensor."""
        tensors = [self.tensors[place] for place in self._owned]
        return {tensor: self._held[tensor] for tensor in tensors if tensor in self._held}

    def gradients(self, steppable: tuple[bool, ...]) -> Sequence[torch.Tensor | None]:
        """Return the gradient of each shard that this rank owns; make zeros where it was set to zero and freed."""
        found: list[torch.Tensor | None] = []
        for place, shard in self._owned.items():
            tensor = self.tensors[place]
            if steppable[place] and tensor not in self._held:
                self._held[tensor] = torch.zeros_like(shard.local_view)
            found.append(self._held[tensor] if steppable[place] else None)
        return found


class HeldBuckets:
    """Holds the buckets of one model, in the order in which they are sent, and this rank's parts of gradients.

    Only :class:`~zeroshard.grads.sharded.ShardedGradients` changes this object. ``limit`` is a bucket's size in bytes.
    """

    def __init__(
        self, local: LocalOptimizer, table: GradTable, transport: Transport, order: Sequence[int], limit: float
    ) -> None:
        self._local, self._table, self._transport, self._limit = local, table, transport, limit
        self._order = [*order]
        self._ordered: tuple[bool, ...] = ()
        """Which parameters were trained when rank 0 decided the order."""
        self.parts: dict[int, torch.Tensor] = {}
        """This rank's parts of reduced gradients, by tensor."""

    def lay_out(self, plan: Plan) -> None:
        """Make buckets of the parameters that are trained now."""
        params = self._local.params
        self._plan, self._trained = plan, active_mask(params)
        self._order += range(len(self._order), len(params))
        order = [tensor for tensor in self._order if self._trained[tensor]]
        self.all = [
            HeldBucket(index, tensors, [params[i] for i in tensors], plan, self._transport, self.parts)
            for index, tensors in enumerate(split_into_buckets(order, params, self._limit))
        ]
        self.of_tensor = {tensor: bucket for bucket in self.all for tensor in bucket.tensors}
        self.untrained = [tensor for tensor in range(len(params)) if not self._trained[tensor]]
        for bucket in self.all:
            bucket.lay_out(self._local)
            self._table.locate(bucket)
        self.digest = zlib.crc32(str(self).encode())

    def __str__(self) -> str:
        """Return the tensors of each bucket."""
        return f"buckets of the tensors {[list(bucket.tensors) for bucket in self.all]}"

    @property
    def is_ordered(self) -> bool:
        """True if buckets are sent in the order in which gradients of these parameters arrived on rank 0."""
        return self._ordered == self._trained

    def follow_params(self) -> None:
        """Lay out buckets again if other parameters are trained now, or raise if gradients wait for a step."""
        trained = active_mask(self._local.params)
        if trained == self._trained:
            return
        if waiting := self._table.waiting():
            raise RuntimeError(
                f"parameters were frozen or unfrozen while the gradient of {waiting} waits for step(): call step() or "
                f"zero_grad() first"
            )
        self.lay_out(self._plan)

    def use_order(self, arrived: Sequence[int]) -> None:
        """Send buckets in the order in which gradients have ``arrived`` on rank 0, and others after these."""
        self._ordered = self._trained
        trained = [tensor for tensor in self._order if self._trained[tensor]]
        if [*arrived] != trained:
            self._order = [*dict.fromkeys([*arrived, *self._order])]
            self.lay_out(self._plan)

    def release(self) -> None:
        """Free the memory of gradients that were removed or set to zero."""
        for tensor in [*self.parts]:
            is_removed = type(self._local.params[tensor].grad) is not GradPlaceholder
            if is_removed:
                self._table.remove(tensor)
            if is_removed or self._table.reduced(tensor) is Reduced.ZERO:
                del self.parts[tensor]
                self._local.shards[tensor].unset_grad()


def split_into_buckets(
    order: Sequence[int], params: Sequence[torch.Tensor | TensorSpec], limit: float
) -> list[list[int]]:
    """Fill buckets with tensors of one dtype in order. Buckets of several tensors have at most ``limit`` bytes.

    A tensor of half a bucket or more gets its own bucket, so that it is sent from the memory that autograd made for its
    gradient. Smaller tensors before and after it share a bucket. Buckets that are not full come last, so that both
    buckets in flight are large before that, which uses both directions of a link.
    """
    buckets: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for tensor in order:
        param = params[tensor]
        bucket, filled = filling.get(param.dtype, ([], 0))
        is_large = param.nbytes * 2 >= limit
        if is_large or filled + param.nbytes > limit or not bucket:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        if not is_large:
            filling[param.dtype] = bucket, filled + param.nbytes
    position = {tensor: number for number, tensor in enumerate(order)}
    last = [bucket for bucket, _ in filling.values()]
    return sorted(buckets, key=lambda bucket: (bucket in last, position[bucket[-1]]))


def _is_alone(gradient: torch.Tensor, param: torch.Tensor) -> bool:
    """Return True if a gradient has its own memory, which only autograd may share, with its parameter's strides."""
    is_whole = gradient.stride() == param.stride() and gradient.untyped_storage().nbytes() == gradient.nbytes
    # Memory that torch did not allocate is in use elsewhere, for example by a NumPy array.
    return is_whole and storage_users(gradient) <= 2 and gradient.untyped_storage().resizable()
