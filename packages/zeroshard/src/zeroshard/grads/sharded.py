"""Reduces the gradients of a plain module bucket by bucket during backward, and keeps this rank's parts alone.

A bucket whose gradients are complete is packed into transient memory and sent to its owners; ``.grad`` becomes a
placeholder at once. Buckets are sent in one order on every rank: the reverse of registration in the first backward, and
then the order in which gradients arrived on rank 0. All ranks agree when a backward begins, and when it ends.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NoReturn

import torch
from torch.profiler import record_function
from zeroshard_comm import BucketReduceWork, Coordinator, agreed, choose_transport

from zeroshard._torch_private import disable_dynamo, graph_task_id, in_autograd, in_nested_task, queue_callback
from zeroshard.grads.bucket import common_device
from zeroshard.grads.held import HeldBucket, buckets_of
from zeroshard.grads.norms import GradNorms
from zeroshard.grads.placeholder import GradPlaceholder, Reduced
from zeroshard.grads.source import GradSource, StepMode
from zeroshard.grads.stream import ReductionQueue
from zeroshard.grads.table import Advice, GradTable
from zeroshard.grads.transient import IN_FLIGHT, TransientBuffers
from zeroshard.guard import Guard
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import active_mask
from zeroshard.plan.layout import Layout, label_in, with_settings

_BEGIN, _END = "backward()", "the end of backward()"
_ADVICE = Advice(
    held="call zero_grad() before backward()",
    used="",
    unreduced=".grad was assigned, as after torch.autograd.grad(); or the last backward() before step() was under "
    "no_sync(), and must not be; or a parameter was unfrozen after forward()",
)


@dataclass(frozen=True)
class ShardingSettings:
    """The size of a bucket in bytes, and whether ranks exchange the 2-norms of all gradients."""

    bucket_bytes: int
    norms: bool


class ShardedGradients(GradSource):
    """Sends complete buckets to their owners, and keeps this rank's parts of gradients.

    The hooks of the model call :meth:`arrive` and :meth:`end_of_task` in the thread that runs backward.

    Attributes:
        in_backward: whether a backward has begun to send its buckets, and was not ended yet.
        accumulates: whether backward sends nothing, as under ``no_sync()``.
        model_hooks: what calls this object, and would be freed without this reference.
        announce_forward: announces in ``join()`` that buffers are broadcast, and returns the rank that sends them.
        announce_backward: announces in ``join()`` that a backward begins, and returns a factor of its gradients.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        guard: Guard,
        local: LocalOptimizer,
        layout: Layout,
        order: Callable[[], Sequence[int]],
        settings: ShardingSettings,
    ) -> None:
        self._coordinator, self._guard, self._local = coordinator, guard, local
        with agreed(coordinator, "shard_gradients()") as proposal:
            self._order = [*order()]
            self._device = common_device(local.params, layout)
            said = {"bucket_mb": settings.bucket_bytes / 2**20, "norms": settings.norms, "order": str(self._order)}
            proposal.set(with_settings(layout, said))
        self._settings = settings
        norms = GradNorms(coordinator, self._device, takes_norms=settings.norms, steps_early=False)
        self.table = GradTable(norms, [Reduced.ZERO, Reduced.REDUCING, Reduced.REDUCED], _ADVICE)
        nbytes = sum(spec.nbytes for spec in layout.plan.tensors)
        self.transport = choose_transport(coordinator, self._device, nbytes)
        uses_thread = self.transport.uses_thread
        self._queue = ReductionQueue(coordinator.ranks.rank, self._device, uses_thread=uses_thread, open_works=0)
        self._transient = TransientBuffers(self._device, waits=uses_thread)
        self._held: dict[int, torch.Tensor] = {}
        self.buckets: list[HeldBucket] = []
        self.in_backward = self.accumulates = self._is_ordered = False
        self._backwards = self._next = 0
        self.model_hooks: object = None
        self.announce_forward: Callable[[], int] | None = None
        self.announce_backward: Callable[[], float] | None = None
        self._scale = 1.0
        self._trained: tuple[bool, ...] = ()
        self._arrivals: dict[int, None] = {}
        self._late: set[int] = set()
        self._failure: Exception | None = None
        self._read: tuple[torch.Tensor | None, ...] = (None,)
        """The memory that peers may still read, until the next bucket is finished."""
        self._queued: set[int] = set()
        """The graph tasks of autograd at whose end a callback of this object is due."""
        weak = weakref.ref(self)
        local.hook_gradients = lambda: (
            found.table.bound(found.buckets) if (found := weak()) is not None else nullcontext()
        )
        self.lay_out(layout)

    @property
    def states(self) -> Sequence[HeldBucket]:
        """The buckets, in the order in which they are sent."""
        return self.buckets

    # ------------------------------------------------------------------ the layout

    def check_layout(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise a ValueError, on this rank only, if parameters were moved. Call it before ranks agree."""
        if common_device(params, layout) != self._device:
            raise ValueError(f"parameters were on {self._device} when gradients were sharded, and have been moved")

    def lay_out(self, layout: Layout) -> None:
        """Adopt a layout that has passed :meth:`check_layout`, or parameters that have moved."""
        self._layout = layout
        self.table.rebuild(self._local.params, layout.plan)
        self._order += range(len(self._order), len(self._local.params))
        self._lay_out_buckets(active_mask(self._local.params))

    def _lay_out_buckets(self, trained: tuple[bool, ...]) -> None:
        params, plan = self._local.params, self._layout.plan
        self._trained = trained
        order = [tensor for tensor in self._order if trained[tensor]]
        self.buckets = [
            HeldBucket(index, tensors, [params[i] for i in tensors], plan, self.transport, self._held)
            for index, tensors in enumerate(buckets_of(order, params, self._settings.bucket_bytes))
        ]
        self._bucket_of = {tensor: bucket for bucket in self.buckets for tensor in bucket.tensors}
        self._outside = [tensor for tensor in range(len(params)) if not trained[tensor]]
        for bucket in self.buckets:
            bucket.lay_out(self._local)
            self.table.locate(bucket)
        self._said = f"in buckets of the tensors {[list(bucket.tensors) for bucket in self.buckets]}"

    def _follow_params(self) -> None:
        """Lay out buckets again if other parameters are trained now, or raise if gradients wait for a step."""
        trained = active_mask(self._local.params)
        if trained == self._trained:
            return
        waiting = [i for i in range(len(trained)) if self.table.reduced(i) is Reduced.REDUCED]
        if waiting:
            raise RuntimeError(
                f"parameters were frozen or unfrozen while the gradient of {label_in(self._layout.plan, waiting[0])} "
                f"waits for step(): call step() or zero_grad() first"
            )
        self._is_ordered = False
        self._lay_out_buckets(trained)

    # ------------------------------------------------------------------ backward

    @disable_dynamo
    def arrive(self, tensor: int) -> None:
        """Record that the gradient of a parameter is complete, and send the buckets that are complete. Collective."""
        if self.accumulates:
            return
        if not self.in_backward:
            self._begin()
        if not self._queued:
            self.queue_end()
        bucket = self._bucket_of.get(tensor)
        if bucket is None:
            return
        self._arrivals.setdefault(tensor)
        if bucket.is_sent:
            # A parameter of two segments of a checkpoint gets a gradient from each.
            self._late.add(bucket.index)
            return
        bucket.missing.discard(tensor)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._next += 1
            self._send(self.buckets[self._next - 1])

    def _begin(self) -> None:
        """Agree with all ranks to begin a backward with the same buckets. Collective."""
        error: Exception | None = None
        with self._guard:
            if self.announce_backward is not None:
                self._scale = self.announce_backward()
            try:
                self._guard.check_capture(self._local.params, self._layout.plan)
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        "backward(create_graph=True) is not supported with sharded gradients: compute the first "
                        "gradients by torch.autograd.grad(..., create_graph=True), and call backward() on the sum"
                    )
                self.table.begin()
                if self.table.left_out:
                    raise RuntimeError(self.table.left_out)
                self._follow_params()
            except Exception as raised:  # noqa: BLE001 - the agreement raises any error on every rank
                error = raised
            self._backwards += 1
            said = f"backward number {self._backwards} {self._said}"
            with record_function("zeroshard::agree"):
                self._coordinator.agree(
                    _BEGIN, zlib.crc32(said.encode()), error=error, detail=lambda: said, explain=_explain
                )
        self.release()
        self.in_backward, self._next, self._failure = True, 0, None
        self._late.clear()
        self._arrivals.clear()
        for bucket in self.buckets:
            bucket.begin()
        for bucket in self.buckets[:IN_FLIGHT]:
            bucket.reducer.expect()

    def _send(self, bucket: HeldBucket, *, again: bool = False) -> None:
        """Send a bucket to its owners; ``again`` says that this adds what has come after it was sent."""
        if self._guard.broken is not None:
            return
        with self._marked_broken(), torch.no_grad():
            table, tensors = self.table, bucket.tensors
            kept = set(tensors) if again else {t for t in tensors if table.reduced(t) is Reduced.REDUCED}
            values = [self._checked(tensor) for tensor in tensors]
            if not again:
                bucket.is_sent, bucket.present = True, tuple([param.grad is not None for param in bucket.params])
            if not self.transport.uses_thread:
                # By reads, the memory of a bucket is free when all ranks have finished the next one.
                self._queue.finish(0 if self.transport.is_read_by_peers else IN_FLIGHT - 1)
            self._transient.enter()
            with record_function(f"zeroshard::send bucket {bucket.index}"):
                buffer, memory = bucket.pack(values, self._transient)
                values.clear()
                if self._scale != 1.0:
                    buffer.mul_(self._scale)
                table.launch(tensors)
                table.replace(tensors)
                made = bucket.reserve(kept)
                with self._queue.beside(buffer):
                    if made is not None:
                        self._queue.keep(made)
                    work = bucket.reducer.begin(buffer)
            finish = partial(self._finish_bucket, bucket, buffer, work, kept)
            self._queue.add(finish, _Closing(work, partial(self._return, buffer, memory)))
            ahead = bucket.index + IN_FLIGHT
            if not again and ahead < len(self.buckets):
                self.buckets[ahead].reducer.expect()

    def _checked(self, tensor: int) -> torch.Tensor | None:
        """Return the values that this rank has for a gradient. Record an error if they cannot be sent."""
        value, dtype = self.table.local(tensor), self._local.params[tensor].dtype
        if value is None or (value.layout is torch.strided and value.dtype is dtype):
            return value
        why = "a sparse gradient, which cannot be sharded: use sparse=False"
        if value.dtype is not dtype:
            why = f"a gradient of {value.dtype}, which cannot be sharded: let backward compute it as {dtype}"
        self._failure = self._failure or ValueError(f"{label_in(self._layout.plan, tensor)} has {why}")
        return None

    def _finish_bucket(self, bucket: HeldBucket, buffer: torch.Tensor, work: BucketReduceWork, kept: set[int]) -> None:
        try:
            with self._marked_broken(), torch.no_grad(), record_function(f"zeroshard::reduce bucket {bucket.index}"):
                work.finish()
                bucket.accept(buffer, kept)
                self.table.norms.compute(bucket, self._queue.keep)
        except BaseException:
            # The thread that runs backward may wait for room.
            self._transient.leave(None)
            raise

    def _return(self, *used: torch.Tensor | None) -> None:
        """Return the memory of a bucket that is finished and sent: the bucket, and what was lent for it."""
        if self.transport.is_read_by_peers:
            # All ranks have finished the bucket before this one.
            used, self._read = self._read, used
        self._transient.leave(used[-1])

    @contextmanager
    def _marked_broken(self) -> Iterator[None]:
        """Refuse all further calls after an error in the block."""
        try:
            yield
        except BaseException as error:
            self._guard.mark_broken(error)
            raise

    def _end(self) -> None:
        """Send the buckets in which gradients are missing, and end the backward on all ranks. Collective."""
        try:
            with self._marked_broken():
                failure: Exception | None = None
                try:
                    while self._next < len(self.buckets):
                        self._next += 1
                        self._send(self.buckets[self._next - 1])
                    self._queue.drain()
                except Exception as raised:  # noqa: BLE001 - the agreement raises any error on every rank
                    failure = raised
                with record_function("zeroshard::agree"):
                    computed = self._agree_to_end(failure or self._failure)
                for bucket, of_bucket in zip(self.buckets, computed, strict=True):
                    self.table.record_reduced(bucket, of_bucket)
                with record_function("zeroshard::norms"):
                    self.table.norms.exchange()
                if not self._is_ordered:
                    self._learn_order()
        finally:
            self.in_backward, self._read = False, (None,)
            self._transient.clear()

    def _agree_to_end(self, failure: Exception | None) -> list[Sequence[bool]]:
        """Return for each bucket which gradients any rank has. Send again what came late on any rank. Collective."""
        coordinator, buckets = self._coordinator, self.buckets
        is_unusual = bool(self._late) or not all(all(bucket.present) for bucket in buckets)
        if not coordinator.agree(_END, self._backwards, error=failure, flag=is_unusual):
            return [bucket.present for bucket in buckets]
        here = [*chain.from_iterable(bucket.present for bucket in buckets)]
        bits = iter(coordinator.any_of([*here, *(bucket.index in self._late for bucket in buckets)], _END))
        computed: list[Sequence[bool]] = [[next(bits) for _ in bucket.present] for bucket in buckets]
        late = [bucket for bucket in buckets if next(bits)]
        for bucket in late:
            self._send(bucket, again=True)
        if late:
            self._queue.drain()
            coordinator.agree(_END, self._backwards)
        return computed

    def _learn_order(self) -> None:
        """Send buckets in the order in which gradients have arrived on rank 0, from now on. Collective."""
        trained = [tensor for bucket in self.buckets for tensor in bucket.tensors]
        order = [*self._arrivals, *[tensor for tensor in trained if tensor not in self._arrivals]]
        if order:
            order = self._coordinator.gather_ints(order, _END)[0]
        self._is_ordered = True
        self._order = [*order, *[tensor for tensor in self._order if not self._trained[tensor]]]
        if order != trained:
            self._lay_out_buckets(self._trained)

    def send_zeros(self) -> None:
        """Take part in a backward of other ranks, without gradients. Collective."""
        with torch.no_grad():
            self._begin()
            self._end()

    def queue_end(self) -> None:
        """Let the graph task that runs now end the backward. Autograd calls this in a backward of the model."""
        task = graph_task_id()
        if task not in self._queued and not self.accumulates:
            self._queued.add(task)
            ended = weakref.WeakMethod(self._end_task)
            queue_callback(lambda: call(task) if (call := ended()) is not None else None)

    @disable_dynamo
    def _end_task(self, task: int) -> None:
        self._queued.discard(task)
        # A task that is nested in another one, as of a reentrant checkpoint, ends nothing. If no other follows, the
        # next forward or step does.
        if self.in_backward and not self._queued and not in_nested_task():
            self._end()

    def end_last(self) -> None:
        """End a backward that no callback has ended; if an error has left it, raise a RuntimeError on every rank."""
        if in_autograd():
            return
        is_interrupted = bool(self._queued)
        self._queued.clear()
        if self.in_backward and not is_interrupted:
            self._end()
        elif self.in_backward:
            error = RuntimeError(
                f"the last backward did not come to its end on rank {self._coordinator.ranks.rank}: an exception has "
                f"left it. Start again from a checkpoint"
            )
            self._guard.mark_broken(error)
            self._coordinator.ranks.close(error)
            raise error

    # ------------------------------------------------------------------ steps

    def prepare_step(self) -> None:
        """Determine which gradients the next step uses; raise a RuntimeError if a gradient was never reduced."""
        self.end_last()
        self.table.refresh()
        for tensor in self._outside:
            if self._local.params[tensor].grad is not None:
                raise self.table.unreduced(tensor)

    def release(self) -> None:
        """Free the memory of gradients that were removed or set to zero."""
        if self.in_backward:
            return
        for tensor in [*self._held]:
            is_removed = type(self._local.params[tensor].grad) is not GradPlaceholder
            if is_removed:
                self.table.remove(tensor)
            if is_removed or self.table.reduced(tensor) is Reduced.ZERO:
                del self._held[tensor]
                self._local.shards[tensor].unset_grad()

    def check_hook(self, mode: StepMode) -> NoReturn:  # noqa: ARG002 - no mode is possible
        """Raise a ValueError, because shard_gradients() takes the place of a communication hook."""
        raise ValueError(
            "the gradients of this optimizer are sharded by shard_gradients(), which takes the place of "
            "DistributedDataParallel and its communication hooks: call remove() before a hook is registered"
        )


@dataclass(frozen=True)
class _Closing(BucketReduceWork):
    """Closes a reduction, and then returns the memory of its bucket."""

    work: BucketReduceWork
    then: Callable[[], None]

    def finish(self) -> None:
        self.work.finish()

    def close(self) -> None:
        self.work.close()
        self.then()


def _explain(here: str, there: str, rank: int, other: int) -> str:
    return f"rank {rank} begins {here}, and rank {other} {there}: ranks must make the same calls on the same model"
