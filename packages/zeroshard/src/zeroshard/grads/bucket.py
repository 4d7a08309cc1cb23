"""Maps the ranges of one bucket of gradients to their owners, and hands this rank's to the local optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from torch.profiler import record_function
from zeroshard_comm import Transport
from zeroshard_core import Plan, Run

from zeroshard.local.optimizer import LocalOptimizer, bound_gradients
from zeroshard.local.partial_step import PartialStepper
from zeroshard.local.shard import LocalShard, gradient_of
from zeroshard.param_buffers import ParamBroadcast
from zeroshard.plan.layout import label_in

_grad_of = attrgetter("grad")


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
        announced: the number that the framework gave the bucket.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    gradients: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    present: tuple[bool, ...]
    announced: int = 0

    @property
    def offsets(self) -> list[int]:
        """The first element of each gradient in the buffer."""
        start = int(self.buffer.storage_offset())
        return [int(gradient.storage_offset()) - start for gradient in self.gradients]


class BucketState:
    """Holds the layout of a bucket for a plan, and its buffer in the current backward.

    :class:`zeroshard.grads.table.GradTable` holds the states of its gradients.

    Args:
        bucket: the bucket, as it arrives for the first time.
        tensors: the indices of its parameters in the plan; also an attribute.

    Attributes:
        params: the parameters.
        offsets: the first element of each parameter's gradient in the bucket.
        length: the number of elements of the bucket.
        buffer: the bucket, 1-D; None after :meth:`release`.
        is_last: whether the bucket was the last one of its backward.
        announced: the number that the framework gave the bucket.
        present: for each parameter, whether this rank has computed a gradient in the last backward.
        owned_tensors: the tensors of the local optimizer that belong to the bucket.
        reducer: sends gradients to their owners.
        broadcast: broadcasts the owners' new values; does nothing if all parameters are broadcast together.
        is_stepped_early: whether the bucket was stepped during this backward.
        failure: the error that the optimizer raised in that step; None without one.
    """

    def __init__(self, bucket: Bucket, tensors: Sequence[int]) -> None:
        self.index, self.tensors, self.params = bucket.index, tuple(tensors), list(bucket.params)
        self.offsets, self.length = bucket.offsets, bucket.buffer.numel()
        self._strides = [param.stride() for param in bucket.params]
        self._like = bucket.buffer.new_empty(0)
        self._owned: dict[int, LocalShard] = {}
        self.failure: Exception | None = None
        self._bound: tuple[tuple[int, tuple[bool, ...]], list[torch.Tensor | None]] | None = None
        self._views: tuple[int, dict[int, torch.Tensor]] = (0, {})
        self._begin(bucket)

    def take(self, bucket: Bucket) -> bool:
        """Adopt the buffer of another backward. Return False if the bucket has other parameters."""
        if not self.has_params(bucket):
            return False
        if self.buffer is not None and self.buffer.data_ptr() != bucket.buffer.data_ptr():
            self.release()
        self._begin(bucket)
        return True

    def has_params(self, bucket: Bucket) -> bool:
        """Return True if a bucket has the same parameters."""
        return len(self.params) == len(bucket.params) and all(map(is_, self.params, bucket.params))

    def _begin(self, bucket: Bucket) -> None:
        self.buffer: torch.Tensor | None = bucket.buffer
        self.is_last, self.announced, self.present = bucket.is_last, bucket.announced, bucket.present
        self.is_stepped_early, self.failure = False, None

    def release(self) -> None:
        """Drop the buffer, whose gradients were used, because the framework needs its memory for another bucket."""
        self.buffer, self._bound, self._views = None, None, (0, {})
        self.reducer.release()
        for tensor in self.owned_tensors:
            tensor.grad = None

    def lay_out(self, plan: Plan, local: LocalOptimizer, transport: Transport, broadcast: ParamBroadcast) -> None:
        """Lay out the bucket for a plan and the parameters' current memory. No reduction may be in progress.

        Raises:
            ValueError: if a cut parameter has changed its memory format, because its gradients have the old one.
        """
        for index, param, stride in zip(self.tensors, self.params, self._strides, strict=True):
            if param.stride() != stride and plan.is_cut(index):
                raise ValueError(
                    f"{label_in(plan, index)} is cut over several ranks and has changed its memory format, but "
                    f"DistributedDataParallel still lays out its gradients in the old one: convert the model before "
                    f"DistributedDataParallel and the optimizer are built"
                )
        before = self.owned_gradients()
        self._owned = {place: local.shards[i] for place, i in enumerate(self.tensors) if i in local.shards}
        self.owned_tensors = [shard.tensor for shard in self._owned.values()]
        self._partial = PartialStepper(local, list(self._owned.values()))
        self._bound, self._views, self.broadcast = None, (0, {}), broadcast
        self.reducer = transport.reducer(self._runs(plan), self._like)
        for tensor, gradient in before.items():
            place = self.owned_gradients().get(tensor)
            if place is not None and place.data_ptr() != gradient.data_ptr():
                # A step may still use the gradient.
                place.copy_(gradient)

    def owned_gradients(self) -> Mapping[int, torch.Tensor]:
        """Return the views of the bucket that this rank owns, by tensor; makes them once for each buffer."""
        if self.buffer is None:
            return {}
        if self._views[0] != self.buffer.data_ptr():
            views = {}
            for place, shard in self._owned.items():
                start, flat = self.offsets[place], shard.shard.flat
                owned = self.reducer.owned(self.buffer, start + flat.start, start + flat.stop)
                view = gradient_view(owned, 0, shard.tensor.shape, self._strides[place])
                views[self.tensors[place]] = view
            self._views = self.buffer.data_ptr(), views
        return self._views[1]

    def replace(self, reduced: torch.Tensor, keep: Callable[[torch.Tensor], None]) -> None:
        """Copy in values that another communication hook has reduced. Raises ValueError if their number differs."""
        assert self.buffer is not None
        if reduced.numel() != self.buffer.numel():
            raise ValueError(
                f"the communication hook that reduces gradients has returned {reduced.numel()} elements for a bucket "
                f"of {self.buffer.numel()}"
            )
        if reduced.data_ptr() != self.buffer.data_ptr():
            keep(reduced)
        for place, target in zip(self._owned, self.owned_gradients().values(), strict=True):
            start = self.offsets[place] + self._owned[place].shard.flat.start
            source = gradient_view(reduced.view(-1), start, target.shape, self._strides[place])
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def gradients(self, present: tuple[bool, ...]) -> Sequence[torch.Tensor | None]:
        """Return the gradient of each shard that this rank owns, None where ``present`` is False."""
        if self.buffer is None and any(present):
            raise RuntimeError(
                "gradients of the first backward have been stepped and set to None, and their memory was given back: "
                "call backward() before the next step()"
            )
        key = (self.buffer.data_ptr() if self.buffer is not None else 0, present)
        if self._bound is None or self._bound[0] != key:
            owned = self.owned_gradients()
            self._bound = (key, [owned[self.tensors[place]] if present[place] else None for place in self._owned])
        return self._bound[1]

    def bind(self, present: tuple[bool, ...]) -> None:
        """Set ``.grad`` of this rank's shards to :meth:`gradients`."""
        gradients = self.gradients(present)
        # Optimizers and users may have replaced them since.
        if not all(map(is_, map(_grad_of, self.owned_tensors), gradients)):
            for shard, gradient in zip(self._owned.values(), gradients, strict=True):
                shard.tensor.grad = shard.converted(gradient)

    def step(self, present: tuple[bool, ...], arguments: Mapping[str, object]) -> None:
        """Step this rank's shards of the bucket with :meth:`gradients`. No-op if they were stepped during backward.

        Raises:
            Exception: the error of the optimizer, in this step or in the one during backward.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if not self.is_stepped_early:
            with record_function(f"zeroshard::update bucket {self.index}"):
                self.bind(present)
                self._partial.step(arguments)

    def step_early(self) -> None:
        """Step during backward, when all ranks have all gradients. :meth:`step` raises the optimizer's error."""
        try:
            self.step(self.present, {})
            self.is_stepped_early = True
        except Exception as error:  # noqa: BLE001 - reported after all ranks have sent their shards
            self.failure = error

    def _runs(self, plan: Plan) -> list[Run]:
        """Return the ranges of the bucket by owner, with adjacent ranges of one owner merged."""
        runs: list[Run] = []
        for index, offset in sorted(zip(self.tensors, self.offsets, strict=True), key=lambda item: item[1]):
            is_part = plan.is_cut(index)
            for shard in plan.of_tensor(index):
                start, stop = offset + shard.flat.start, offset + shard.flat.stop
                if start == stop:
                    continue
                if runs and runs[-1].rank == shard.rank and runs[-1].stop == start:
                    before = runs.pop()
                    start, is_part = before.start, before.is_part or is_part
                runs.append(Run(shard.rank, start, stop, is_part))
        return runs


class Rest:
    """Holds the parameters that are in no bucket. A step uses their ``.grad`` and broadcasts them after the buckets."""

    def __init__(self, local: LocalOptimizer, tensors: Sequence[int], broadcast: ParamBroadcast) -> None:
        self.tensors, self.broadcast = tensors, broadcast
        self.shards = [local.shards[index] for index in tensors if index in local.shards]
        self._partial = PartialStepper(local, self.shards)

    def gradients(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of this rank's shards."""
        return [gradient_of(shard) for shard in self.shards]

    def step(self, arguments: Mapping[str, object]) -> None:
        """Step this rank's shards."""
        with bound_gradients(self.shards):
            self._partial.step(arguments)


def gradient_view(buffer: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return the view of a bucket that is the gradient of one tensor, or of one part of it.

    DDP lays out gradients by the strides of their parameters, but its own views are in row-major order.
    """
    return buffer.as_strided(shape, stride, int(buffer.storage_offset()) + offset)
