"""Reduces the gradients of a plain module bucket by bucket during backward, and keeps only this rank's parts.

A bucket whose gradients are complete is packed into transient memory and sent to its owners; ``.grad`` becomes a
placeholder at once. Buckets are sent in one order on every rank: the reverse of registration in the first backward, and
then the order in which gradients arrived on rank 0. All ranks agree when a backward begins, and when it ends.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch.profiler import record_function
from zeroshard_comm import BucketReduceWork, Coordinator, PeerLostError, agreed, choose_transport

from zeroshard._torch_private import current_node, disable_dynamo, in_autograd, in_compiled_backward, queue_callback
from zeroshard.grads.bucket import common_device
from zeroshard.grads.held import HeldBucket, HeldBuckets
from zeroshard.grads.norms import GradNorms
from zeroshard.grads.placeholder import Reduced
from zeroshard.grads.source import END, GradSource, StepMode, check_norms, on_any_rank
from zeroshard.grads.stream import ReductionQueue
from zeroshard.grads.table import Advice, GradTable
from zeroshard.grads.transient import IN_FLIGHT, TransientBuffers
from zeroshard.guard import Guard
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.layout import Layout, label_in, with_settings

_EXPLAIN = "rank {2} begins {0}, and rank {3} {1}: ranks must make the same calls on the same model".format
_ADVICE = Advice(
    held="call zero_grad() before backward()",
    unreduced="perhaps .grad was assigned, for example after torch.autograd.grad(); or the last backward() before "
    "step() was under no_sync(): run it outside; or a parameter was unfrozen after forward()",
)


class ShardedGradients(GradSource):
    """Sends complete buckets to their owners, and keeps this rank's parts of gradients.

    The hooks of the model call :meth:`arrive` in the thread that runs backward.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        guard: Guard,
        local: LocalOptimizer,
        layout: Layout,
        prepare: Callable[[], tuple[Sequence[int], Mapping[str, object]]],
        *,
        bucket_mb: float,
        norms: bool,
    ) -> None:
        self._coordinator, self._guard, self._local = coordinator, guard, local
        with agreed(coordinator, "shard_gradients()") as proposal:
            first, settings = prepare()
            check_norms(norms)
            if not bucket_mb > 0:
                raise ValueError(f"bucket_mb={bucket_mb!r} is not a size: pass a number of MiB above 0")
            self._device = common_device(local.params, layout)
            said = {"bucket_mb": bucket_mb, "norms": norms, "order": str([*first]), **settings}
            proposal.set(with_settings(layout, said))
        known = GradNorms(coordinator, self._device, takes_norms=norms, steps_early=False)
        self.table = GradTable(known, [Reduced.ZERO, Reduced.REDUCING, Reduced.REDUCED], _ADVICE)
        nbytes = sum(spec.nbytes for spec in layout.plan.tensors)
        self.transport = choose_transport(coordinator, self._device, nbytes)
        uses_thread = self.transport.uses_thread
        self._queue = ReductionQueue(coordinator.ranks.rank, self._device, uses_thread=uses_thread)
        self._transient = TransientBuffers(self._device, waits=uses_thread)
        self.buckets = HeldBuckets(local, self.table, self.transport, first, bucket_mb * 2**20)
        self.in_backward = False
        """Whether a backward has begun to send its buckets, and has not ended yet."""
        self.accumulates = False
        """Whether backward sends nothing, as under ``no_sync()``."""
        self._backwards = self._next = 0
        self.model_hooks: object = None
        """The hooks that call this object. Without this reference they would be freed."""
        self.announce_forward: Callable[[], int] | None = None
        """Announces in ``join()`` that buffers are broadcast, and returns the rank that sends them."""
        self.announce_backward: Callable[[], float] | None = None
        """Announces in ``join()`` that a backward begins, and returns the factor by which to scale its gradients."""
        self._scale = 1.0
        self._arrivals: dict[int, None] = {}
        self._late: set[int] = set()
        self._failure: Exception | None = None
        self._read: tuple[torch.Tensor | None, ...] = (None,)
        """The memory that peers may still read, until the next bucket is finished."""
        local.hook_gradients = weakref.WeakMethod(self._bound)
        self.lay_out(layout)

    @property
    def states(self) -> Sequence[HeldBucket]:
        """The buckets, in the order in which they are sent."""
        return self.buckets.all

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """The parameters of the optimizer, in its order."""
        return self._local.params

    @property
    def transient_bytes(self) -> int:
        """The largest number of bytes of buckets in flight."""
        sizes = sorted([bucket.length * bucket.dtype.itemsize for bucket in self.states])
        return sum(sizes[-IN_FLIGHT:])

    # ------------------------------------------------------------------ the layout

    def check_layout(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise a ValueError, on this rank only, if parameters were moved. Call it before ranks agree."""
        if common_device(params, layout) != self._device:
            raise ValueError(
                f"parameters were moved from {self._device} after shard_gradients(): move the model before you build "
                f"the optimizer"
            )

    def lay_out(self, layout: Layout) -> None:
        """Adopt a layout that has passed :meth:`check_layout`, or parameters that have moved."""
        self._plan = layout.plan
        self.table.rebuild(self._local.params, layout.plan)
        self.buckets.lay_out(layout.plan)

    # ------------------------------------------------------------------ backward

    @disable_dynamo
    def arrive(self, tensor: int) -> None:
        """Record that the gradient of a parameter is complete, and send the buckets that are complete. Collective."""
        if self.accumulates:
            return
        if not self.in_backward:
            self._begin(_unsupported())
            self._queue_end()
        bucket = self.buckets.of_tensor.get(tensor)
        if bucket is None:
            return
        self._arrivals.setdefault(tensor)
        if bucket.is_sent:
            # A parameter in two segments of an activation checkpoint gets a gradient from each.
            self._late.add(bucket.index)
            return
        bucket.missing.discard(tensor)
        while self._next < len(self.states) and not self.states[self._next].missing:
            self._next += 1
            self._send(self.states[self._next - 1])

    def _begin(self, refusal: str = "") -> None:
        """Agree with all ranks to begin a backward with the same buckets, or raise a rank's error. Collective."""
        with self._guard:
            self._scale = self.announce_backward() if self.announce_backward is not None else 1.0
            self._backwards += 1
            with record_function("zeroshard::agree"), agreed(self._coordinator, "backward()", _EXPLAIN) as proposal:
                self._guard.check_capture(self._local.params, self._plan)
                if refusal:
                    raise RuntimeError(refusal)
                self.table.begin()
                if self.table.left_out:
                    raise RuntimeError(self.table.left_out)
                self.buckets.follow_params()
                number, checksum = f"backward number {self._backwards}", self.table.norms.checksum
                done = f", and the checksum of operations on gradients before it is {checksum}" if checksum else ""
                proposal.digest = zlib.crc32(f"{number}{done}".encode(), self.buckets.digest)
                proposal.detail = lambda: f"{number} in {self.buckets}{done}"
        self.release()
        self.in_backward, self._next, self._failure = True, 0, None
        self._late.clear()
        self._arrivals.clear()
        for bucket in self.states:
            bucket.begin()
        for bucket in self.states[:IN_FLIGHT]:
            bucket.reducer.expect()

    def _send(self, bucket: HeldBucket, *, again: bool = False) -> None:
        """Send a bucket to its owners. If ``again``, send the gradients that arrived after it was sent."""
        if self._guard.broken is not None:
            return
        with self._closing_after_error(), torch.no_grad():
            table, tensors = self.table, bucket.tensors
            kept = set(tensors) if again else {t for t in tensors if table.reduced(t) is Reduced.REDUCED}
            values = [self._checked(tensor) for tensor in tensors]
            if not again:
                bucket.is_sent, bucket.present = True, tuple([param.grad is not None for param in bucket.params])
            if not self.transport.uses_thread:
                # If peers read it, the memory of a bucket is free when all ranks have finished the next bucket.
                self._queue.finish(0 if self.transport.is_read_by_peers else IN_FLIGHT - 1)
            self._transient.enter(is_cut=bucket.is_cut)
            with record_function(f"zeroshard::send bucket {bucket.index}"):
                buffer, memory = bucket.pack(values, self._transient)
                values.clear()
                if self._scale != 1.0:
                    buffer.mul_(self._scale)
                table.launch(tensors)
                table.replace(tensors)
                # A gradient in memory that autograd made stays there, on the rank that owns all of it.
                made = None if memory is None and bucket.is_own(kept) else bucket.reserve(kept)
                with self._queue.beside(buffer):
                    if made is not None:
                        self._queue.keep(made)
                    work = bucket.reducer.begin(buffer)
            self._queue.add(partial(self._finish_bucket, bucket, buffer, memory, work, kept), None)
            ahead = bucket.index + IN_FLIGHT
            if not again and ahead < len(self.states):
                self.states[ahead].reducer.expect()

    def _checked(self, tensor: int) -> torch.Tensor | None:
        """Return the values that this rank has for a gradient. Record an error if they cannot be sent."""
        value, dtype = self.table.local(tensor), self._local.params[tensor].dtype
        if value is None or (value.layout is torch.strided and value.dtype is dtype):
            return value
        why = "a sparse gradient, which cannot be sharded: use sparse=False"
        if value.dtype is not dtype:
            why = f"a gradient of {value.dtype}, which cannot be sharded: let backward compute it as {dtype}"
        self._failure = self._failure or ValueError(f"{label_in(self._plan, tensor)} has {why}")
        return None

    def _finish_bucket(
        self,
        bucket: HeldBucket,
        buffer: torch.Tensor,
        memory: torch.Tensor | None,
        work: BucketReduceWork,
        kept: set[int],
    ) -> None:
        with self._closing_after_error(), torch.no_grad(), record_function(f"zeroshard::reduce bucket {bucket.index}"):
            work.finish()
            bucket.accept(buffer, kept)
            self.table.norms.compute(bucket, self._queue.keep)
            self._close(work, buffer, memory)

    def _close(self, work: BucketReduceWork, *used: torch.Tensor | None) -> None:
        """Wait until a bucket has been sent, and give its memory back. ``used``: the bucket, and memory lent for it."""
        work.close()
        if self.transport.is_read_by_peers:
            # All ranks have finished the bucket before this one.
            used, self._read = self._read, used
        self._transient.leave(used[-1])

    @contextmanager
    def _closing_after_error(self) -> Iterator[None]:
        """After any error in the block, refuse further calls, and let no rank and no thread wait for this bucket."""
        try:
            yield
        except BaseException as error:
            if self.transport.uses_thread and self._guard.broken is not None and isinstance(error, PeerLostError):
                return  # The other thread has closed the connections; the end of backward raises its error.
            self._guard.mark_broken(error)
            self._coordinator.ranks.close(error)
            self._transient.leave(None)
            raise

    def _end(self) -> None:
        """Send the buckets in which gradients are missing, and end the backward on all ranks. Collective."""
        try:
            with self._guard.breaking():
                while self._next < len(self.states):
                    self._next += 1
                    self._send(self.states[self._next - 1])
                self._queue.drain()
                for bucket in self.states:
                    self._failure = self._failure or self.table.lost_in_backward(bucket.tensors, bucket.present)
                with record_function("zeroshard::agree"):
                    computed = self._agree_to_end()
                for bucket, of_bucket in zip(self.states, computed, strict=True):
                    self.table.record_reduced(bucket, of_bucket)
                with record_function("zeroshard::norms"):
                    self.table.norms.exchange()
                if not self.buckets.is_ordered:
                    arrived = [*dict.fromkeys([*self._arrivals, *self.buckets.of_tensor])]
                    self.buckets.use_order(self._coordinator.gather_ints(arrived, END)[0] if arrived else [])
        finally:
            self.in_backward, self._read = False, (None,)
            self._transient.clear()

    def _agree_to_end(self) -> list[tuple[bool, ...]]:
        """Return for each bucket which gradients any rank has. Send late gradients of any rank. Collective."""
        coordinator, buckets = self._coordinator, self.states
        computed = [bucket.present for bucket in buckets]
        is_unusual = bool(self._late) or not all(map(all, computed))
        if not coordinator.agree(END, self._backwards, error=self._failure, flag=is_unusual):
            return computed
        is_late = tuple([bucket.index in self._late for bucket in buckets])
        *computed, is_late = on_any_rank(coordinator, [*computed, is_late])
        if any(is_late):
            for bucket, is_again in zip(buckets, is_late, strict=True):
                if is_again:
                    self._send(bucket, again=True)
            self._queue.drain()
            coordinator.agree(END, self._backwards)
        return computed

    def send_zeros(self) -> None:
        """Take part in a backward of other ranks, without gradients. Collective."""
        with torch.no_grad():
            self._begin()
            self._end()

    def _queue_end(self) -> None:
        """Call :meth:`_end_task` at the end of the graph task that runs now."""
        ended = weakref.WeakMethod(self._end_task)
        queue_callback(lambda: call() if (call := ended()) is not None else None)

    @disable_dynamo
    def _end_task(self) -> None:
        """End the backward when its outermost graph task ends. A reentrant checkpoint runs others within its node."""
        node = current_node()
        if node is None and self.in_backward:
            self._end()
        elif node is not None:
            again = weakref.WeakMethod(self._queue_end)

            def queue(*_: object) -> None:
                handle.remove()
                if (call := again()) is not None:
                    call()

            handle = node.register_hook(queue)

    def close_interrupted(self) -> None:
        """Close the connections and raise a RuntimeError if an error has interrupted the last backward."""
        if in_autograd():
            return
        self._guard.check_broken()
        if self.in_backward:
            error = RuntimeError(
                f"the last backward did not finish on rank {self._coordinator.ranks.rank}: an exception interrupted "
                f"it. Start again from a checkpoint"
            )
            self._guard.mark_broken(error)
            self._coordinator.ranks.close(error)
            raise error

    # ------------------------------------------------------------------ steps

    def prepare_step(self) -> None:
        """Determine which gradients the next step uses; raise a RuntimeError if a gradient was never reduced."""
        self.close_interrupted()
        if self.in_backward:
            raise RuntimeError(
                "step() or clip_grad_norm_() was called inside of backward(), for example in a hook, while gradients "
                "are in flight: call it after backward()"
            )
        self.table.refresh()
        for tensor in self.buckets.untrained:
            if self._local.params[tensor].grad is not None:
                raise self.table.unreduced(tensor)

    def release(self) -> None:
        """Free the memory of gradients that were removed or set to zero."""
        if not self.in_backward:
            self.buckets.release()

    def check_hook(self, mode: StepMode) -> NoReturn:  # noqa: ARG002 - no mode is possible
        """Raise a ValueError, because shard_gradients() takes the place of a communication hook."""
        raise ValueError(
            "the gradients of this optimizer are sharded by shard_gradients(), which takes the place of "
            "DistributedDataParallel and its communication hooks: call remove() before you register a hook"
        )


def _unsupported() -> str:
    """Return why the backward that calls this in a hook is not supported; empty if it is supported."""
    if torch.is_grad_enabled():
        return (
            "backward(create_graph=True) is not supported with sharded gradients: compute the first gradients with "
            "torch.autograd.grad(..., create_graph=True), and call backward() on the sum"
        )
    if in_compiled_backward():
        return (
            "compiled autograd is not supported with sharded gradients: it calls nothing at the end of backward. "
            "Compile the model or its blocks, and leave torch._dynamo.config.compiled_autograd off"
        )
    return ""
