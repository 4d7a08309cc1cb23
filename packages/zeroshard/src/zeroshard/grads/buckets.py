"""Keeps the buckets of one optimizer: ranks agree on each when it first arrives, and a new layout is given to each."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from zeroshard_comm import Coordinator, agreed, choose_transport
from zeroshard_core import Plan

from zeroshard._torch_private import is_ignored_by_ddp
from zeroshard.debug.checks import digest_of
from zeroshard.grads.bucket import Bucket, BucketState, Rest
from zeroshard.grads.owned import common_device, gradient_view
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.grads.table import GradTable
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import ParamBroadcast, ParamBuffers
from zeroshard.plan.layout import Layout, label_in, with_settings

_logger = logging.getLogger(__name__)
_END = "the end of backward()"

_SETTLED = 3
"""Number of equal backwards after which the next one should have the same buckets: DDP rebuilds them once, before."""


class Buckets:
    """Holds the buckets of one sharded optimizer, and the parameters that are in no bucket.

    Only the exchange and a new layout change this object. ``by_index`` has the state of each bucket by number, equal on
    all ranks; ``arrived`` the buckets of this backward, or of the last one, in order; ``rest`` the other parameters.
    ``broadcasts_each`` says whether parameters are broadcast bucket by bucket, and not all together.
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
        self._device = common_device(local.params, layout)
        nbytes = sum(spec.nbytes for spec in layout.plan.tensors)
        self.transport = choose_transport(coordinator, self._device, nbytes)
        self.broadcasts_each = is_interleaved and self.transport.broadcasts_buckets
        self.by_index: dict[int, BucketState] = {}
        self.arrived: list[BucketState] = []
        self._is_new = self._is_expected = False
        self._alike = 0
        if is_interleaved:
            local.detach_shards()
        self.lay_out(layout)

    def lay_out(self, layout: Layout) -> None:
        """Adopt a layout that has passed :meth:`check_layout`, or parameters that have moved."""
        self._layout = layout
        self._table.rebuild(self._local.params, layout.plan)
        for state in self.by_index.values():
            state.lay_out_with(layout.plan, self._local, self._broadcast_of(state.tensors))
        self._lay_out_rest()

    def check_layout(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise a ValueError, on this rank only, if parameters were moved or added. Call it before ranks agree."""
        if common_device(params, layout) != self._device:
            raise ValueError(
                f"parameters were on {self._device} when the communication hook began to work, and have been moved: "
                f"move the model before DistributedDataParallel and the optimizer are built"
            )
        # Before the first backward nobody knows what DistributedDataParallel reduces.
        for index in range(len(self._local.params), len(params)) if self.by_index else ():
            if not is_ignored_by_ddp(params[index]):
                raise ValueError(
                    f"{label_in(layout.plan, index)} is added after the first backward with a communication hook, and "
                    f"DistributedDataParallel does not reduce it.\nBuild both with all parameters and "
                    f"find_unused_parameters=True; then freeze some, and unfreeze them later"
                )

    def _lay_out_rest(self) -> None:
        self._known = frozenset([tensor for state in self.by_index.values() for tensor in state.tensors])
        self._outside = [tensor for tensor in range(len(self._local.params)) if tensor not in self._known]
        rest = [tensor for tensor in self._outside if self._layout.active[tensor]]
        self.rest = Rest(self._local, rest, self._broadcast_of(rest))

    def _broadcast_of(self, tensors: Sequence[int]) -> ParamBroadcast:
        """Return the broadcast of some parameters. It is empty if all parameters are broadcast together."""
        if not self.broadcasts_each:
            return ParamBroadcast([], [])
        broadcaster = self.transport.broadcaster(self._buffers.segments(self._layout.plan, sorted(tensors)))
        return ParamBroadcast([self._local.params[i] for i in tensors], [broadcaster])

    def check_outside(self) -> None:
        """Raise a RuntimeError if a parameter that is in no bucket has a gradient, which differs between ranks."""
        # Includes frozen parameters, which may be trainable again.
        for tensor in self._outside:
            param = self._local.params[tensor]
            if param.grad is None or is_ignored_by_ddp(param):
                continue
            if not self.by_index:
                raise self._table.unreduced(tensor)
            raise RuntimeError(
                f"{label_in(self._layout.plan, tensor)} has a gradient, but DistributedDataParallel does not reduce "
                f"it, so that it differs on every rank. Wrap the model again, and build a new optimizer"
            )

    def unarrived(self) -> str:
        """Return the names of parameters whose gradients have not arrived in this backward, for messages."""
        params, arrived = self._local.params, {tensor for state in self.arrived for tensor in state.tensors}
        # Some may have been frozen or unfrozen since the last step.
        active = zip(params, self._layout.active, strict=True)
        missing = [i for i, (param, was) in enumerate(active) if (was or param.requires_grad) and i not in arrived]
        unused = [i for i in missing if params[i].grad is None or not params[i].requires_grad] or missing
        return ", ".join(label_in(self._layout.plan, i) for i in unused[:3]) + (", ..." if len(unused) > 3 else "")

    def record_bucket(self, bucket: Bucket, *, reduces: bool) -> BucketState:
        """Record a bucket that arrives; index 0 begins a backward. Collective if it has other parameters than before.

        ``reduces`` is True if the transport reduces the bucket, and False if another hook does.
        """
        state = self.by_index.get(bucket.index)
        is_known = state is not None and state.has_params(bucket)
        if bucket.index == 0:
            # Prepare for the other buckets if the last backwards had the same ones.
            self._is_expected = is_known and self._alike >= _SETTLED
            for other in self.arrived if self._is_expected and reduces else ():
                other.reducer.expect()
            if state is not None and state.is_replaced_by(bucket):
                # The framework has made new buckets, and needs the memory of the old ones.
                for other in self.by_index.values():
                    other.release()
            self.arrived = []
        if state is not None and is_known:
            state.adopt_buffer(bucket)
        else:
            state = self._add(bucket)
        self.arrived.append(state)
        return state

    def release_replaced(self) -> None:
        """Drop used buckets that were new in the last backward, because the framework may replace them now."""
        for state in self.by_index.values() if self._alike == 0 else ():
            if all(param.grad is None for param in state.params):
                state.release()

    def end(self, number: int, error: Exception | None) -> list[tuple[bool, ...]]:
        """End a backward on all ranks. Return for each bucket which gradients any rank has computed. Collective."""
        computed = [state.present for state in self.arrived]
        done = f"backward number {number}, in buckets of {[state.length for state in self.arrived]} elements"
        digest, lacks_some, explain = zlib.crc32(done.encode()), not all(map(all, computed)), _explain_backwards
        if self._coordinator.agree(_END, digest, error=error, detail=lambda: done, explain=explain, flag=lacks_some):
            bits = iter(self._coordinator.any_of([*chain.from_iterable(computed)], _END))
            computed = [tuple([next(bits) for _ in of_state]) for of_state in computed]
        self._alike += 1
        if self._is_new:
            # A rebuild has removed the buckets that have not arrived.
            self._is_new, self._alike = False, 0
            self.by_index = {state.index: state for state in self.arrived}
            self._lay_out_rest()
        return computed

    def _add(self, bucket: Bucket) -> BucketState:
        """Agree with all ranks on a bucket with other parameters than before, and lay it out. Collective."""
        if self._is_expected:
            raise RuntimeError(
                "buckets have changed after many equal backwards, as if the model had been wrapped in another "
                "DistributedDataParallel: build a new optimizer for that"
            )
        layout = self._layout
        with agreed(self._coordinator, "backward()") as proposal:
            index_of = {param: index for index, param in enumerate(self._local.params)}
            tensors = [_index_of(bucket, place, index_of, layout.plan) for place in range(len(bucket.params))]
            if self._known and self._known.isdisjoint(tensors):
                raise ValueError(
                    f"bucket {bucket.index} has no parameter that was reduced before: two models need two optimizers"
                )
            state = BucketState(bucket, tensors, layout.plan, self.transport)
            state.lay_out_with(layout.plan, self._local, self._broadcast_of(state.tensors))
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
        self._table.locate(state)
        self._is_new = True
        return state


def _explain_backwards(here: str, there: str, rank: int, other: int) -> str:
    return f"rank {rank} has ended {here}, and rank {other} {there}: ranks must make the same calls on the same model"


def settings_of_ignored(params: Sequence[torch.Tensor], layout: Layout, first: int = 0) -> dict[str, int]:
    """Return settings that differ between ranks if parameters do that DistributedDataParallel ignores, from ``first``.

    All ranks get the owner's values of such a parameter in a step. Frozen ones are not stepped.
    """
    return {
        f"with a communication hook, the checksum of {label_in(layout.plan, index)}, which DistributedDataParallel "
        f"ignores (give experts, one per rank, an optimizer of their own),": digest_of(params[index])
        for index in range(first, len(params))
        if params[index].requires_grad and is_ignored_by_ddp(params[index])
    }


def _index_of(bucket: Bucket, place: int, index_of: Mapping[torch.Tensor, int], plan: Plan) -> int:
    """Return the tensor index of a parameter. Raises ValueError if it is unknown, or its gradients cannot be sent."""
    param = bucket.params[place]
    index = index_of.get(param)
    if index is None:
        raise ValueError(
            f"DistributedDataParallel reduces a parameter of shape {tuple(param.shape)} that the optimizer does not "
            f"have: give it all, or freeze others before DistributedDataParallel is built"
        )
    if refusal := _refusal(bucket, place):
        raise ValueError(f"{label_in(plan, index)} {refusal}; or train without a communication hook")
    return index


def _refusal(bucket: Bucket, place: int) -> str:
    """Return why a gradient cannot be sent to its owners, and what to do; empty if it can."""
    param = bucket.params[place]
    if bucket.buffer.layout is not torch.strided:
        return "has sparse gradients, which cannot be sent to their owners in a bucket: use sparse=False"
    if param.is_complex():
        return "is complex, and DistributedDataParallel reduces its gradients as real numbers: use real parameters"
    if bucket.gradients[place].dtype != param.dtype:
        return f"is {param.dtype}, and mixed precision of DistributedDataParallel cannot be combined with the hooks"
    if bucket.present[place] and not _has_order(bucket, place):
        return "has changed its memory format since DistributedDataParallel was built: convert the model before"
    return ""


def _has_order(bucket: Bucket, place: int) -> bool:
    """Return True if a gradient is laid out in its bucket like its parameter. May read the whole gradient."""
    param, view = bucket.params[place], bucket.gradients[place]
    grad = param.grad
    if param.dim() < 2 or grad is None or type(grad) is GradPlaceholder:
        return True
    if grad.data_ptr() == view.data_ptr() and grad.stride() == param.stride():
        # The gradient is a view of the bucket.
        return True
    offset = int(view.storage_offset()) - int(bucket.buffer.storage_offset())
    view = gradient_view(bucket.buffer, offset, param.shape, param.stride())
    return bool(((view == grad) | (grad != grad)).all())
