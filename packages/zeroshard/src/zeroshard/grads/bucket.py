"""Maps the ranges of one bucket of gradients to their owners, and hands this rank's to the local optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_

import torch
from torch.profiler import record_function
from zeroshard_comm import Transport
from zeroshard_core import Plan

from zeroshard.grads.owned import OwnedGradients, runs_of
from zeroshard.local.optimizer import LocalOptimizer, bound_gradients
from zeroshard.local.partial_step import PartialStepper
from zeroshard.param_buffers import ParamBroadcast
from zeroshard.plan.layout import label_in


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients, as a framework passes it during backward.

    Attributes:
        index: the number of the bucket; buckets have the same order on every rank.
        is_last: whether it is the last bucket of this backward.
        buffer: the gradients of the bucket, 1-D.
        gradients: views of the buffer, each in the shape of its parameter.
        params: the parameters, in the order of ``gradients``.
        present: for each parameter, whether this rank has computed a gradient.
        announced: the number that the framework gave the bucket; None if it is ``index``.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    gradients: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    present: tuple[bool, ...]
    announced: int | None = None

    @property
    def offsets(self) -> list[int]:
        """The first element of each gradient in the buffer."""
        start = int(self.buffer.storage_offset())
        return [int(gradient.storage_offset()) - start for gradient in self.gradients]


class BucketState(OwnedGradients):
    """Holds which ranges of a bucket each rank owns, and the buffer of the last backward.

    Owners never change; call :meth:`lay_out` before anything else, and when this rank's shards have changed. The table
    has the states of the gradients: ``steppable`` says for each parameter whether a step uses its gradient.
    ``broadcast`` sends the new values of the parameters; it is empty if all are broadcast together.
    """

    def __init__(self, bucket: Bucket, tensors: Sequence[int], plan: Plan, transport: Transport) -> None:
        super().__init__(bucket.index, tensors, bucket.params, bucket.offsets, bucket.buffer.numel())
        self.reducer = transport.reducer(runs_of(plan, self.tensors, self.offsets), bucket.buffer)
        self._views: dict[int, torch.Tensor] = {}
        # The last result of `gradients`, with its argument.
        self._bound: tuple[tuple[bool, ...], list[torch.Tensor | None]] | None = None
        self.buffer: torch.Tensor | None = None
        self.adopt_buffer(bucket)

    def has_params(self, bucket: Bucket) -> bool:
        """Return True if a bucket has the same parameters."""
        return len(self.params) == len(bucket.params) and all(map(is_, self.params, bucket.params))

    def is_replaced_by(self, bucket: Bucket) -> bool:
        """Return True if a bucket lies in other memory than the buffer."""
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
        """Drop the buffer, whose gradients were used, because the framework needs its memory for another bucket."""
        self.buffer, self._bound, self._views = None, None, {}
        self.reducer.release()
        for shard in self._owned.values():
            shard.unset_grad()

    def lay_out_with(self, plan: Plan, local: LocalOptimizer, broadcast: ParamBroadcast) -> None:
        """Use the shards of a new layout. Raise a ValueError if a cut parameter has changed its memory format."""
        for index, param, stride in zip(self.tensors, self.params, self._strides, strict=True):
            if param.stride() != stride and plan.is_cut(index):
                raise ValueError(
                    f"{label_in(plan, index)} is cut and has changed its memory format, and its gradients have the old "
                    f"one: convert the model before DistributedDataParallel and the optimizer are built"
                )
        self.lay_out(local)
        self._partial = PartialStepper(local, list(self._owned.values()))
        self.broadcast = broadcast

    def owned_gradients(self) -> Mapping[int, torch.Tensor]:
        """Return the views of the bucket that this rank owns, by tensor; makes them once for each buffer."""
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
            raise RuntimeError("the memory of these gradients was given back: call backward() before the next step()")
        if self._bound is None or self._bound[0] != steppable:
            owned = self.owned_gradients()
            gradients = [owned[self.tensors[place]] if steppable[place] else None for place in self._owned]
            self._bound = steppable, gradients
        return self._bound[1]

    def step(self, steppable: tuple[bool, ...], arguments: Mapping[str, object]) -> None:
        """Step this rank's shards, or raise the error of their step during backward. No-op if that has succeeded."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if not self.is_stepped_early:
            with record_function(f"zeroshard::update bucket {self.index}"):
                self.set_grads(steppable)
                self._partial.step(arguments)

    def step_early(self) -> None:
        """Step during backward, when all ranks have all gradients. :meth:`step` raises the error."""
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
