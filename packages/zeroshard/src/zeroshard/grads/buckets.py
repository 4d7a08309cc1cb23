"""Holds the buckets of DistributedDataParallel: the owners of their ranges, the averaged gradients, and their steps.

Ranks agree on each bucket when it first arrives. All buckets adopt each new layout.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_

import torch
from torch.profiler import record_function
from zeroshard_comm import Coordinator, Transport, agreed, choose_transport
from zeroshard_core import Plan

from zeroshard._torch_private import is_ignored_by_ddp
from zeroshard.grads.bucket import Bucket, OwnedGradients, common_device, runs_of
from zeroshard.grads.ddp_checks import index_of_param
from zeroshard.grads.source import END, on_any_rank
from zeroshard.grads.table import GradTable
from zeroshard.local.optimizer import LocalOptimizer, bound_gradients
from zeroshard.local.partial_step import PartialStepper
from zeroshard.param_buffers import ParamBroadcast, ParamBuffers
from zeroshard.plan.layout import Layout, label_in, with_settings

_logger = logging.getLogger(__name__)
_EXPLAIN = "rank {2} has ended {0}, and rank {3} {1}: ranks must make the same calls on the same model".format

_SETTLED = 3
"""The number of equal backwards after which buckets should not change again: DDP rebuilds them once, before that."""


class BucketState(OwnedGradients):
    """Holds the ranges of a bucket that each rank owns, and the buffer of the last backward.

    Owners never change. Call :meth:`lay_out_with` before anything else, and after this rank's shards have changed. The
    table has the states of the gradients: ``steppable`` says for each parameter whether a step uses its gradient.
    ``broadcast`` sends the new values of the parameters; it is empty if all are broadcast together.
    """

    def __init__(self, bucket: Bucket, tensors: Sequence[int], plan: Plan, transport: Transport) -> None:
        super().__init__(bucket.index, tensors, bucket.params, bucket.offsets, bucket.buffer.numel())
        self.reducer = transport.reducer(runs_of(plan, self.tensors, self.offsets), bucket.buffer)
        self._views: dict[int, torch.Tensor] = {}
        # The argument and the result of the last call of `gradients`.
        self._bound: tuple[tuple[bool, ...], list[torch.Tensor | None]] | None = None
        self.buffer: torch.Tensor | None = None
        self.adopt_buffer(bucket)

    def has_params(self, bucket: Bucket) -> bool:
        """Return True if a bucket has the same parameters."""
        return len(self.params) == len(bucket.params) and all(map(is_, self.params, bucket.params))

    def is_replaced_by(self, bucket: Bucket) -> bool:
        """Return True if there is a buffer, and a bucket is in other memory."""
        return self.buffer is not None and self.buffer.data_ptr() != bucket.buffer.data_ptr()

    def adopt_buffer(self, bucket: Bucket) -> None:
        """Use the buffer of another backward, whose bucket has the same parameters."""
        if self.is_replaced_by(bucket):
            self.release()
        self.buffer = bucket.buffer
        self.is_last, self.announced, self.present = bucket.is_last, bucket.announced, bucket.present
        self.is_stepped_early = False
        self.failure: Exception | None = None

    def release(self) -> None:
        """Drop the buffer after its gradients were used, because the framework needs its memory for another bucket."""
        self.buffer, self._bound, self._views = None, None, {}
        self.reducer.release()
        for shard in self._owned.values():
            shard.unset_grad()

    def lay_out_with(self, plan: Plan, local: LocalOptimizer, broadcast: ParamBroadcast) -> None:
        """Use the shards of a new layout. Raise a ValueError if a cut parameter has changed its memory format."""
        for index, param, stride in zip(self.tensors, self.params, self._strides, strict=True):
            if param.stride() != stride and plan.is_cut(index):
                raise ValueError(
                    f"{label_in(plan, index)} is cut and has changed its memory format, but its gradients have the old "
                    f"format: convert the model before you build DistributedDataParallel and the optimizer"
                )
        self.lay_out(local)
        self._partial = PartialStepper(local, list(self._owned.values()))
        self.broadcast = broadcast

    def owned_gradients(self) -> Mapping[int, torch.Tensor]:
        """Return views of this rank's parts of the bucket, by tensor. They are made once for each buffer."""
        if self.buffer is not None and not self._views:
            self._views = self._views_in(partial(self.reducer.owned, self.buffer))
        return self._views

    def replace(self, reduced: torch.Tensor, keep: Callable[[torch.Tensor], None]) -> None:
        """Copy in values that another communication hook has reduced. Raises ValueError if their number differs."""
        if reduced.numel() != self.length:
            raise ValueError(f"the inner hook has returned {reduced.numel()} elements for a bucket of {self.length}")
        keep(reduced)
        sources = self._views_in(lambda start, stop: reduced.view(-1)[start:stop])
        for tensor, target in self.owned_gradients().items():
            if sources[tensor].data_ptr() != target.data_ptr():
                target.copy_(sources[tensor])

    def gradients(self, steppable: tuple[bool, ...]) -> Sequence[torch.Tensor | None]:
        """Return the gradient of each shard that this rank owns, None where ``steppable`` is False."""
        if self.buffer is None and any(steppable):
            raise RuntimeError("the memory of these gradients was released: call backward() before the next step()")
        if self._bound is None or self._bound[0] != steppable:
            owned = self.owned_gradients()
            gradients = [owned[self.tensors[place]] if steppable[place] else None for place in self._owned]
            self._bound = steppable, gradients
        return self._bound[1]

    def step(self, steppable: tuple[bool, ...], arguments: Mapping[str, object]) -> None:
        """Step this rank's shards, or raise the error of their step during backward. No-op if that step succeeded."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if not self.is_stepped_early:
            with record_function(f"zeroshard::update bucket {self.index}"):
                self.set_grads(steppable)
                self._partial.step(arguments)

    def step_early(self) -> None:
        """Step during backward, which needs a gradient of every parameter. :meth:`step` raises the error."""
        try:
            if not all(self.present):
                raise RuntimeError(
                    "a parameter got no gradient in a backward that steps bucket by bucket: build "
                    "DistributedDataParallel with find_unused_parameters=True"
                )
            self.step(self.present, {})
            self.is_stepped_early = True
        except Exception as error:  # noqa: BLE001 - reported after all ranks have sent their shards
            self.failure = error


class Rest:
    """Holds the parameters that are in no bucket. A step uses their ``.grad`` and broadcasts them after the buckets."""

    def __init__(self, local: LocalOptimizer, tensors: Sequence[int], broadcast: ParamBroadcast) -> None:
        self.broadcast = broadcast
        self.shards = [local.shards[index] for index in tensors if index in local.shards]
        self.detached = [shard for shard in self.shards if shard.is_detached]
        self._partial = PartialStepper(local, self.shards)

    def gradients(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of this rank's shards."""
        found = [(shard, shard.param.grad) for shard in self.shards]
        return [None if grad is None else shard.shard.narrow(grad.detach()) for shard, grad in found]

    def step(self, arguments: Mapping[str, object]) -> None:
        """Step this rank's shards."""
        with bound_gradients(self.detached):
            self._partial.step(arguments)


class Buckets:
    """Holds the buckets of one sharded optimizer, and the parameters that are in no bucket.

    Only the exchange and a new layout change this object. ``by_index`` has the state of each bucket by number, equal on
    all ranks; ``arrived`` the buckets of this backward, or of the last one, in order; ``rest`` the other parameters.
    ``broadcasts_each`` says whether parameters are broadcast bucket by bucket rather than all together.
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

    @property
    def broadcasts(self) -> list[ParamBroadcast]:
        """The broadcasts of the last backward's buckets and of the rest; empty if all are broadcast together."""
        if not self.broadcasts_each:
            return []
        return [*[state.broadcast for state in self.arrived], self.rest.broadcast]

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
                f"parameters were moved from {self._device} after the first call of the communication hook: move the "
                f"model before you build DistributedDataParallel and the optimizer"
            )
        # Before the first backward it is unknown what DistributedDataParallel reduces.
        for index in range(len(self._local.params), len(params)) if self.by_index else ():
            if not is_ignored_by_ddp(params[index]):
                raise ValueError(
                    f"{label_in(layout.plan, index)} was added after the first backward with a communication hook, but "
                    f"DistributedDataParallel does not reduce it.\nBuild both with all parameters, pass "
                    f"find_unused_parameters=True, then freeze some, and unfreeze them later"
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
                f"it, so it differs between ranks. Wrap the model again, and build a new optimizer"
            )

    def unarrived(self) -> str:
        """Return the names of parameters whose gradients have not arrived in this backward, for messages."""
        params, arrived = self._local.params, {tensor for state in self.arrived for tensor in state.tensors}
        # Some may have been frozen or unfrozen since the last step.
        active = zip(params, self._layout.active, strict=True)
        missing = [i for i, (param, was) in enumerate(active) if (was or param.requires_grad) and i not in arrived]
        unused = [i for i in missing if params[i].grad is None or not params[i].requires_grad] or missing
        return ", ".join(label_in(self._layout.plan, i) for i in unused[:3]) + (", ..." if len(unused) > 3 else "")

    def numbered(self, bucket: Bucket, *, is_first: bool) -> Bucket:
        """Number a bucket by its arrival, because DDP numbers all of them 0 in the first backward of a static graph."""
        before = self.arrived
        if is_first or (0 < bucket.index == len(before) and not before[-1].is_last):
            return bucket
        seen = {param for other in before for param in other.params}
        if not seen.isdisjoint(bucket.params):
            raise RuntimeError("an earlier backward did not finish on this rank")
        if not before or before[-1].is_last or bucket.index not in (0, len(before)):
            raise RuntimeError(
                "buckets of two models arrive in one backward: each model needs an optimizer and a backward of its own"
            )
        return replace(bucket, index=len(before), announced=bucket.index)

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
        digest, lacks_some = zlib.crc32(done.encode()), not all(map(all, computed))
        if self._coordinator.agree(END, digest, error=error, detail=lambda: done, explain=_EXPLAIN, flag=lacks_some):
            computed = on_any_rank(self._coordinator, computed)
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
                "buckets have changed after many equal backwards, as they do if the model was wrapped in "
                "DistributedDataParallel again: build a new optimizer"
            )
        layout = self._layout
        with agreed(self._coordinator, "backward()") as proposal:
            index_of = {param: index for index, param in enumerate(self._local.params)}
            tensors = [index_of_param(bucket, place, index_of, layout.plan) for place in range(len(bucket.params))]
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
