"""Keeps the buckets of one optimizer: ranks agree on each when it first arrives, and a new layout rebuilds them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from zeroshard_comm import Coordinator, agreed, choose_transport

from zeroshard.grads.bucket import Bucket, BucketState, Rest, gradient_view
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.grads.table import GradTable
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.param_buffers import ParamBroadcast, ParamBuffers
from zeroshard.plan.layout import Layout, label_in, with_settings

_logger = logging.getLogger(__name__)

_SETTLED = 3
"""Number of equal backwards after which the next one should have the same buckets: DDP rebuilds them once, before."""


class Buckets:
    """Holds the buckets of one sharded optimizer, and the parameters that are in no bucket.

    Only the exchange and a new layout change this object.

    Args:
        coordinator: the channel of the ranks' agreements.
        local: the local optimizer.
        buffers: the memory of the parameters.
        layout: the layout in use.
        table: the states of the gradients.
        is_interleaved: whether each bucket is stepped as soon as it is reduced.

    Attributes:
        by_index: the state of each bucket, by number, equal on all ranks; empty before the first backward.
        arrived: the buckets that have arrived in this backward, or in the last one, in order.
        rest: the parameters that are in no bucket.
        device: the device of all parameters.
        transport: reduces and broadcasts the buckets.
        are_sent: whether parameters are broadcast bucket by bucket, and not all together.

    Raises:
        RuntimeError: if the group has no backend for the device that parameters are on.
        ValueError: if parameters cannot be exchanged in buckets.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        local: LocalOptimizer,
        buffers: ParamBuffers,
        layout: Layout,
        table: GradTable,
        *,
        is_interleaved: bool,
    ) -> None:
        self._coordinator, self._local, self._buffers, self._table = coordinator, local, buffers, table
        self._params, self._layout = local.params, layout
        self.device = common_device(self._params, self._layout)
        nbytes = sum(spec.nbytes for spec in self._layout.plan.tensors)
        self.transport = choose_transport(coordinator, self.device, nbytes)
        self.are_sent = is_interleaved and self.transport.broadcasts_buckets
        self.by_index: dict[int, BucketState] = {}
        self.arrived: list[BucketState] = []
        self._known: frozenset[int] = frozenset()
        """The tensors that finished backwards have reduced."""
        self._is_new = self._is_expected = False
        self._alike = 0
        local.detach_shards()
        self.lay_out(layout)

    def lay_out(self, layout: Layout) -> None:
        """Adopt a layout, or parameters that have moved. Raises as :meth:`check_layout`."""
        self.check_layout(self._local.params, layout)
        self._params, self._layout = self._local.params, layout
        self._table.norms.rebuild(self._layout.plan)
        self._table.rebuild(self._params, self._layout.plan)
        for state in self.by_index.values():
            self._lay_out_bucket(state)
        self._lay_out_rest()

    def check_layout(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise the ValueError of :meth:`lay_out` on this rank only. Call it before the ranks agree on a layout."""
        if common_device(params, layout) != self.device:
            raise ValueError(
                f"parameters were on {self.device} when the communication hook began to work, and have been moved: "
                f"move the model before DistributedDataParallel and the optimizer are built"
            )

    def _lay_out_rest(self) -> None:
        states = list(self.by_index.values())
        self._table.locate(states)
        self._known = frozenset([tensor for state in states for tensor in state.tensors])
        self._outside = [tensor for tensor in range(len(self._params)) if tensor not in self._known]
        rest = [tensor for tensor in self._outside if self._layout.active[tensor]]
        self.rest = Rest(self._local, rest, self._broadcast_of(rest))

    def _lay_out_bucket(self, state: BucketState) -> None:
        broadcast = self._broadcast_of(sorted(state.tensors))
        state.lay_out(self._layout.plan, self._local, self.transport, broadcast)

    def _broadcast_of(self, tensors: Sequence[int]) -> ParamBroadcast:
        """Return the broadcast of some parameters. It is empty if all parameters are broadcast together."""
        if not self.are_sent:
            return ParamBroadcast([], [])
        broadcaster = self.transport.broadcaster(self._buffers.segments(self._layout.plan, tensors))
        return ParamBroadcast([self._params[i] for i in tensors], [broadcaster])

    def check_outside(self) -> None:
        """Raise a RuntimeError if a parameter that is in no bucket has a gradient, which differs between ranks."""
        # Includes frozen parameters, which may be trainable again.
        for tensor in self._outside:
            param = self._params[tensor]
            if param.grad is None or getattr(param, "_ddp_ignored", False):
                continue
            if not self.by_index:
                raise self._table.unreduced(tensor)
            raise RuntimeError(
                f"{label_in(self._layout.plan, tensor)} has a gradient, but DistributedDataParallel does not reduce "
                f"it, so that it differs on every rank: the model has changed since it was wrapped. Wrap it again, and "
                f"build a new optimizer"
            )

    def bind(self) -> Sequence[LocalShard]:
        """Set the gradients of shards in buckets; return the other shards, which take their parameters' gradients."""
        self._table.use()
        for state in self.arrived:
            state.bind(self._table.present(state.tensors))
        return self.rest.shards

    def unarrived(self) -> str:
        """Return the names of parameters whose gradients have not arrived in this backward, for messages."""
        arrived = {tensor for state in self.arrived for tensor in state.tensors}
        # Some may have been frozen or unfrozen since the last step.
        active = zip(self._params, self._layout.active, strict=True)
        missing = [i for i, (param, was) in enumerate(active) if (was or param.requires_grad) and i not in arrived]
        unused = [i for i in missing if self._params[i].grad is None or not self._params[i].requires_grad] or missing
        return ", ".join(label_in(self._layout.plan, i) for i in unused[:3]) + (", ..." if len(unused) > 3 else "")

    def take(self, bucket: Bucket, *, reduces: bool) -> BucketState:
        """Record a bucket that arrives; index 0 begins a backward. Collective if it has other parameters than before.

        Args:
            bucket: the bucket; it is laid out when it arrives for the first time.
            reduces: True if the transport reduces the bucket, False if another hook does.

        Raises:
            ValueError: if the optimizer does not have a parameter of the bucket, or its gradients cannot be sent.
        """
        known = self.by_index.get(bucket.index)
        before = known.buffer if known is not None else None
        is_known = known is not None and known.take(bucket)
        if bucket.index == 0:
            # Prepare for the other buckets if the last backwards had the same ones.
            self._is_expected = is_known and self._alike >= _SETTLED
            for other in self.arrived if self._is_expected and reduces else ():
                other.reducer.expect()
            if before is not None and before.data_ptr() != bucket.buffer.data_ptr():
                # The framework has made new buckets, and needs the memory of the old ones.
                for other in self.by_index.values():
                    if other is not known or not is_known:
                        other.release()
            self.arrived = []
        state = known if known is not None and is_known else self._add(bucket)
        self.arrived.append(state)
        return state

    def release_replaced(self) -> None:
        """Drop used buckets that were new in the last backward, because the framework may replace them now."""
        for state in self.by_index.values() if self._alike == 0 else ():
            if all(param.grad is None for param in state.params):
                state.release()

    def end(self) -> None:
        """End a backward, and drop buckets that a rebuild has removed."""
        self._alike = 0 if self._is_new else self._alike + 1
        if self._is_new:
            self._is_new = False
            self.by_index = {state.index: state for state in self.arrived}
            self._lay_out_rest()

    def _add(self, bucket: Bucket) -> BucketState:
        """Agree with all ranks on a bucket with other parameters than before, and lay it out. Collective."""
        if self._is_expected:
            raise RuntimeError(
                "buckets have changed after many equal backwards, as if the model had been wrapped in another "
                "DistributedDataParallel: build a new optimizer for that"
            )
        layout = self._layout
        with agreed(self._coordinator, "backward()") as proposal:
            index_of, places = self._table.index_of, range(len(bucket.params))
            tensors = [_check_parameter(bucket, place, index_of, layout) for place in places]
            if self._known and self._known.isdisjoint(tensors):
                raise ValueError(
                    f"bucket {bucket.index} has none of the parameters that were reduced before: two models in "
                    f"DistributedDataParallel cannot have one optimizer with a communication hook of zeroshard; give "
                    f"each of them its own"
                )
            state = BucketState(bucket, tensors)
            self._lay_out_bucket(state)
            lies = f"{bucket.buffer.numel()} elements of {bucket.buffer.dtype}: tensors {tensors} at {state.offsets}"
            settings = {
                "tags of hooks, in the order of their first backward": f"{self.transport.tags:#x}",
                f"bucket {bucket.index}": lies,
                "norms": self._table.norms.takes_norms,
            }
            proposal.set(with_settings(layout, settings))
        _logger.debug("bucket %d of %d bytes has the tensors %s", bucket.index, bucket.buffer.nbytes, tensors)
        self.by_index[bucket.index] = state
        # Other tensors keep the bucket from before a rebuild until their new bucket arrives.
        self._table.locate([state])
        self._is_new = True
        return state


def common_device(params: Sequence[torch.Tensor], layout: Layout) -> torch.device:
    """Return the device of all active parameters. Raises ValueError if they are on several."""
    found: dict[torch.device, int] = {}
    for index, (param, is_active) in enumerate(zip(params, layout.active, strict=True)):
        if is_active:
            found.setdefault(param.device, index)
    if len(found) > 1:
        (here, first), (there, second) = [*found.items()][:2]
        raise ValueError(
            f"{label_in(layout.plan, second)} is on {there}, and {label_in(layout.plan, first)} on {here}: a "
            f"communication hook exchanges parameters of one device; move them to one, or train without a hook"
        )
    return next(iter(found), torch.device("cpu"))


def _check_parameter(bucket: Bucket, place: int, index_of: Mapping[torch.Tensor, int], layout: Layout) -> int:
    """Return the tensor index of a parameter of a bucket.

    Raises:
        ValueError: if the optimizer does not have it, or its gradients cannot be sent.
    """
    param = bucket.params[place]
    index = index_of.get(param)
    if index is None:
        raise ValueError(
            f"DistributedDataParallel reduces a parameter of shape {tuple(param.shape)} that the optimizer "
            f"does not have: with a communication hook of zeroshard, it must have all parameters. Give it all, or "
            f"freeze those that are not to be trained before DistributedDataParallel is built"
        )
    title = label_in(layout.plan, index)
    if bucket.buffer.layout is not torch.strided:
        raise ValueError(
            f"{title} has sparse gradients, which cannot be sent to their owners in a bucket; "
            f"use sparse=False, or train without a communication hook"
        )
    if param.is_complex():
        raise ValueError(
            f"{title} is complex, and DistributedDataParallel reduces its gradients as real numbers: train without a "
            f"communication hook"
        )
    if bucket.gradients[place].dtype != param.dtype:
        raise ValueError(
            f"{title} is {param.dtype}, but its gradients are reduced as {bucket.gradients[place].dtype}; mixed "
            f"precision of DistributedDataParallel cannot be combined with the hooks of zeroshard"
        )
    _check_order(bucket, place, title)
    return index


def _check_order(bucket: Bucket, place: int, title: str) -> None:
    """Raise a ValueError if a gradient is not laid out in its bucket like its parameter. Reads the whole gradient."""
    param, grad = bucket.params[place], bucket.params[place].grad
    if param.dim() < 2 or grad is None or type(grad) is GradPlaceholder or not bucket.present[place]:
        return
    if grad.data_ptr() == bucket.gradients[place].data_ptr() and grad.stride() == param.stride():
        # The gradient is a view of the bucket.
        return
    offset = int(bucket.gradients[place].storage_offset()) - int(bucket.buffer.storage_offset())
    view = gradient_view(bucket.buffer, offset, param.shape, param.stride())
    if not bool(((view == grad) | (grad != grad)).all()):
        raise ValueError(
            f"{title} has changed its memory format since DistributedDataParallel was built, which still lays out its "
            f"gradients in the old one: convert the model before"
        )
