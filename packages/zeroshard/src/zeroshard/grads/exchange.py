"""Reduces the gradients of each backward bucket by bucket, and gives them to the step.

Buckets are sent in the order in which they arrive. A worker thread finishes each reduction when its values arrive, so
that it overlaps with backward. If a transport needs the same order on all ranks, the thread that runs backward finishes
reductions: after the last bucket, or one bucket later if each is stepped as soon as it is reduced.

At the end of each backward all ranks agree that it was the same backward with the same buckets. They exchange which
tensors have gradients only if a rank lacks one. With a hook that steps in backward, ranks also agree at the first
bucket: on whether a rank has an error, and whether to step bucket by bucket, which changes the order of operations.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.futures import Future
from torch.profiler import record_function
from zeroshard_comm import BucketReduceWork, Coordinator, DisagreementError, PeerLostError, agreed

from zeroshard._torch_private import disable_dynamo
from zeroshard.grads.bucket import Bucket, OwnedGradients, common_device
from zeroshard.grads.buckets import Buckets, BucketState
from zeroshard.grads.ddp_checks import settings_of_ignored
from zeroshard.grads.early_steps import EarlySteps, StepCalls
from zeroshard.grads.norms import GradNorms
from zeroshard.grads.placeholder import Reduced
from zeroshard.grads.source import GradSource, StepMode, check_norms
from zeroshard.grads.stream import ReductionQueue
from zeroshard.grads.table import Advice, GradTable
from zeroshard.guard import Guard
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import ParamBroadcast, ParamBuffers
from zeroshard.plan.layout import Layout, with_settings

_BucketFuture = Future[torch.Tensor]
_ADVICE = Advice(
    held="accumulate under ddp.no_sync(), and synchronize only the last backward; or call zero_grad() before it; or "
    "use zeroshard.shard_gradients(), which adds up gradients, in place of DistributedDataParallel",
    unreduced="perhaps .grad was assigned, for example after torch.autograd.grad(); or the last backward() before "
    "step() was under no_sync(): run it outside; or a parameter is unused: pass find_unused_parameters=True; or a "
    "parameter was frozen: wrap the model again",
)
_USED_EARLY = ". To accumulate gradients, use ddp.no_sync(), reduce_to_owner_hook or zeroshard.shard_gradients()"
_PATIENCE = 5.0
"""Seconds for which a rank with an incomplete backward waits for slower ranks."""


class GradExchange(GradSource):
    """Reduces the buckets of DistributedDataParallel, and ends the backward on all ranks.

    :meth:`ZeroRedundancyOptimizer.follow_backward` makes it. The thread that runs backward and the thread that trains
    call it. :meth:`begin`, :meth:`end` and :meth:`end_of_autograd` are collective; so is :meth:`prepare_step` after a
    backward that did not finish.

    Args:
        coordinator: makes the agreements of the ranks.
        guard: records incomplete exchanges, and loops that misuse the hook.
        local: the local optimizer.
        buffers: the memory of the parameters.
        layout: the layout in use.
        calls: the functions that step during backward.
        mode: when shards are stepped; also an attribute.
        norms: whether ranks exchange the 2-norms of all gradients at the end of each backward.

    Attributes:
        table: the state of each gradient.
        buckets: the buckets of the last backward.
        is_receiving: whether a backward has begun to pass its buckets, and has not ended yet.
        early_steps: checks calls of ``step()`` if shards are stepped during backward; else None.
        uses_all: whether every backward makes a gradient for every parameter; if not, no bucket is stepped before the
            last one is reduced. The function that registers a hook sets it.

    Raises:
        RuntimeError: if the group has no backend for the device that parameters are on.
        ValueError: if parameters cannot be exchanged in buckets, or ``norms`` is not a bool, on every rank.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        guard: Guard,
        local: LocalOptimizer,
        buffers: ParamBuffers,
        layout: Layout,
        calls: StepCalls,
        mode: StepMode,
        *,
        norms: bool,
    ) -> None:
        self._coordinator, self._guard, self._local, self._calls, self.mode = coordinator, guard, local, calls, mode
        self._is_interleaved = mode is StepMode.PER_BUCKET
        with agreed(coordinator, "a communication hook's first call") as proposal:
            device = common_device(local.params, layout)
            if self._is_interleaved:
                local.check_may_detach()
            check_norms(norms)
            proposal.set(with_settings(layout, settings_of_ignored(local.params, layout)))
        steps_early = mode is not StepMode.IN_STEP
        known = GradNorms(coordinator, device, takes_norms=norms, steps_early=steps_early)
        self.table = GradTable(known, [Reduced.ZERO], replace(_ADVICE, used=_USED_EARLY if steps_early else ""))
        self.buckets = Buckets(coordinator, local, buffers, layout, self.table, is_interleaved=self._is_interleaved)
        local.hook_gradients = weakref.WeakMethod(self._bound)
        self._queue = ReductionQueue(coordinator.ranks.rank, device, uses_thread=self.buckets.transport.uses_thread)
        # On a device with streams, waiting for a future also waits for the stream on which it was set.
        self._devices: list[int | str | torch.device] = [] if device.type == "cpu" else [device]
        self._backwards = self._arrived_before = 0
        self.is_receiving = self._may_step = self._steps_buckets = False
        self.uses_all = True
        self._left_out = self._skipped = ""
        """Why gradients of the last backward are wrong on this rank; why all ranks send nothing in this one."""
        self.early_steps = EarlySteps(guard, calls) if steps_early else None

    def hide_for_rebuild(self) -> None:
        """Prepare for a forward in which DDP rebuilds its buckets, and copies ``param.grad``."""
        # The forward before may have been interrupted.
        self.table.show()
        if not self.is_receiving:
            self.buckets.release_replaced()
        self.table.hide()

    def show_after_rebuild(self) -> None:
        """Undo :meth:`hide_for_rebuild`; no-op without it."""
        self.table.show()

    @disable_dynamo
    def begin(self, bucket: Bucket, reduce: Callable[[], Future[torch.Tensor]] | None = None) -> Future[torch.Tensor]:
        """Send a bucket of gradients to their owners, and step them if the mode steps during backward.

        Args:
            bucket: the next bucket; the indices of a backward ascend from 0, in the same order on every rank.
            reduce: if given, begins to average the bucket over the ranks, and returns a future of the result, which has
                the bucket's length.

        Returns:
            A future of the bucket's buffer. When it completes, this rank's parts hold the means over all ranks, and
            other parts are undefined.

        Raises:
            DisagreementError: if the buckets of ranks differ.
            PeerLostError: if a rank is gone.
            RuntimeError: if an earlier call did not finish, or a parameter still has a reduced gradient.
            ValueError: if the optimizer does not have a parameter of the bucket, or its gradients cannot be sent.
        """
        self._guard.check_broken()
        with self._guard.breaking():
            bucket = self.buckets.numbered(bucket, is_first=not self.is_receiving)
        if bucket.index == 0:
            self._guard.check_capture(bucket.params, self._local.plan)
            self.table.begin()
        with self._guard.breaking():
            return self._send(bucket, reduce)

    def _send(self, bucket: Bucket, reduce: Callable[[], _BucketFuture] | None) -> _BucketFuture:
        done: _BucketFuture = Future(devices=self._devices)
        if bucket.index == 0 and self.early_steps is not None and not self._skipped:
            self._agree_to_begin(self.early_steps)
        if self._skipped:
            # An error would leave DistributedDataParallel in the middle of a backward.
            done.set_result(bucket.buffer)
            return done
        if bucket.index == 0:
            self._backwards, self._arrived_before = self._backwards + 1, 0
            self.is_receiving = self._coordinator.defers = True
        state = self.buckets.record_bucket(bucket, reduces=reduce is None)
        self.table.launch(state.tensors)
        # From now on the other hook may write to the bucket in a thread. `beside` is ordered after the work that the
        # hook queues now, because waiting for its future orders no stream if the future has no devices.
        result = reduce() if reduce is not None else None
        with record_function(f"zeroshard::send bucket {bucket.index}"), self._queue.beside(bucket.buffer):
            work = state.reducer.begin(bucket.buffer) if reduce is None else None
        if self._steps_buckets and self.buckets.transport.uses_thread:
            # Post receives before the worker thread may send, so that their order is fixed.
            state.broadcast.expect()
        # A bucket without its own number may be the last one, after which DDP waits for all.
        is_last = bucket.is_last or bucket.announced not in (None, bucket.index)
        leave = 0 if is_last else 1 if self._is_interleaved else None
        self._queue.add(partial(self._finish_bucket, state, work, result, done), work, leave=leave)
        return done

    def _finish_bucket(
        self, state: BucketState, work: BucketReduceWork | None, result: _BucketFuture | None, done: _BucketFuture
    ) -> None:
        """Finish the reduction of one bucket, and step it if buckets are stepped one by one."""
        buffer, guard = state.buffer, self._guard
        assert buffer is not None
        try:
            if guard.broken is None:
                with self._guard.breaking(), record_function(f"zeroshard::reduce bucket {state.index}"):
                    if work is not None:
                        work.finish()
                    if result is not None:
                        state.replace(result.wait(), self._queue.keep)
                    self.table.norms.compute(state, self._queue.keep)
        finally:
            # Set it even after an error, which the end of backward raises, because DDP would wait forever.
            done.set_result(buffer)
        if self._steps_buckets and not guard.broken:
            # Broadcast even after a failure, because all ranks have agreed to.
            if self._may_step:
                state.step_early()
                self._may_step = state.failure is None
            with record_function(f"zeroshard::broadcast bucket {state.index}"):
                state.broadcast.send()

    @disable_dynamo
    def end(self) -> None:
        """Finish a backward, after its last bucket and after everything else that writes gradients.

        Then each rank holds its parts of all gradients, ``.grad`` is a placeholder, and a stepping hook has stepped.

        Raises:
            PeerLostError, RuntimeError: if a rank is gone, or in another backward.
            Exception: any error of a step, if shards are stepped during backward.
        """
        self._left_out, self.table.left_out = self.table.left_out, ""
        skipped, self._skipped = self._skipped, ""
        if not skipped:
            self._end_reductions()
        if self.early_steps is not None:
            self.early_steps.make_step(self.prepare_step, skipped)
        elif self._left_out:
            error = RuntimeError(self._left_out)
            self._coordinator.tell(error)
            raise error

    @disable_dynamo
    def end_of_autograd(self) -> None:
        """End a backward in which no bucket was marked as the last, such as the first one of a static graph.

        A callback of autograd calls this at the end of a backward, or of one nested in it by activation checkpoints.
        """
        arrived = self.buckets.arrived
        is_static = self.is_receiving and len(arrived) > 1 and all(state.announced == 0 for state in arrived)
        if is_static or self._skipped:
            self.end()
        self._arrived_before = len(arrived)

    def _end_reductions(self) -> None:
        try:
            with self._guard.breaking():
                failure = self._drain()
                with record_function("zeroshard::agree"):
                    computed = self.buckets.end(self._backwards, failure)
                for state, of_state in zip(self.buckets.arrived, computed, strict=True):
                    self.table.record_reduced(state, of_state)
                with record_function("zeroshard::norms"):
                    self.table.norms.exchange()
        finally:
            self.is_receiving = self._coordinator.defers = False

    def _drain(self) -> Exception | None:
        """Wait for all reductions. Return the first error of one, which the agreement raises on every rank."""
        try:
            with record_function("zeroshard::wait for gradients"):
                self._queue.drain()
        except Exception as error:  # noqa: BLE001 - any error of a reduction
            return error
        return None

    def prepare_step(self) -> None:
        """Determine which gradients the next step uses.

        Raises:
            RuntimeError: if gradients were never reduced, or a backward has not ended. In the second case this ends the
                backward with the other ranks, or closes the connections.
        """
        if self.is_receiving:
            error = self._unended()
            if not self._guard.broken:
                self._end_reductions()
            raise error
        if self._skipped or self._left_out:
            raise RuntimeError(self._skipped or self._left_out)
        self.table.refresh()
        self.buckets.check_outside()

    def _unended(self) -> RuntimeError:
        """Return the error for a backward that has not ended; close connections, so that no rank waits for buckets."""
        arrived, ranks = self.buckets.arrived, self._coordinator.ranks
        why, still_waits = "an exception interrupted it", self._arrived_before == len(arrived)
        if still_waits:
            why = (
                f"DistributedDataParallel still waits for the gradients of {self.buckets.unarrived()}. If they are "
                f"unused, pass find_unused_parameters=True; if parameters were frozen, wrap the model again"
            )
        error = RuntimeError(
            f"the last backward did not finish on rank {ranks.rank}: {why}. Start again from a checkpoint"
        )
        if not arrived or not arrived[-1].is_last:
            if still_waits:
                # A slower rank may still send these buckets, and then raises by itself. If not, this wait times out.
                ending = threading.Thread(target=self._drain, daemon=True)
                ending.start()
                ending.join(_PATIENCE)
            self._guard.mark_broken(error)
            ranks.close(error)
        return error

    @property
    def broadcasts(self) -> Sequence[ParamBroadcast]:
        """The broadcasts for which a step waits, by bucket; empty if all parameters are broadcast together."""
        return self.buckets.broadcasts

    def accept_step(self) -> None:
        """Accept a call of ``step()`` for a backward that has stepped already.

        Raises:
            RuntimeError: if the loop has since changed something that the step uses, or gradients were never reduced.
        """
        assert self.early_steps is not None
        changed = self.table.changed()
        self.prepare_step()
        has_gradients = any(self.table.steppable(range(len(self._local.params))))
        self.early_steps.accept_step(changed, has_gradients=has_gradients)

    def step_rest(self, arguments: Mapping[str, Any]) -> None:
        """Step and broadcast, bucket by bucket, the shards that backward has not stepped."""
        for broadcast in self.broadcasts:
            broadcast.expect()
        self.table.use()
        for bucket in self.buckets.arrived:
            bucket.step(self.table.steppable(bucket.tensors), arguments)
            bucket.broadcast.send()
        self.buckets.rest.step(arguments)
        self.buckets.rest.broadcast.send()

    def check_hook(self, mode: StepMode) -> None:
        """Raise a ValueError if another communication hook steps this optimizer in another mode."""
        if self.mode is not mode:
            raise ValueError(
                f"a communication hook already steps this optimizer {self.mode.value!r}, so another hook cannot step "
                f"it {mode.value!r}; build a new optimizer for that hook"
            )

    def _bound(self) -> AbstractContextManager[None]:
        """Set the gradients of this rank's shards to the reduced ones, in the block."""
        return self.table.bound(self.buckets.arrived, self.buckets.rest.detached)

    def unreduced_gradients(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of this rank's shards of parameters that are in no bucket."""
        return self.buckets.rest.gradients()

    def release(self) -> None:
        """Do nothing, because DistributedDataParallel owns the memory of its buckets."""

    @property
    def states(self) -> Sequence[OwnedGradients]:
        """The buckets of the last backward, in order."""
        return self.buckets.arrived

    def check_layout(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise a ValueError, on this rank only, if parameters were moved or added. Call it before ranks agree."""
        self.buckets.check_layout(params, layout)

    def lay_out(self, layout: Layout) -> None:
        """Adopt a layout that has passed :meth:`check_layout`, or parameters that have moved."""
        self.buckets.lay_out(layout)

    def settings(self, params: Sequence[torch.Tensor], layout: Layout, first: int = 0) -> Mapping[str, int]:
        """Return the checksums of parameters that DistributedDataParallel ignores, which must be equal on all ranks."""
        return settings_of_ignored(params, layout, first)

    def _agree_to_begin(self, early_steps: EarlySteps) -> None:
        """Skip a backward if a rank has an error. Step buckets early if no rank has changed anything. Collective."""
        seen, error = None, RuntimeError(self.table.left_out) if self.table.left_out else None
        if self._is_interleaved:
            self._local.copy_attributes()
            seen = self._calls.look(True)
        is_alike = seen is not None and seen.error is None and not seen.is_new
        may_step = is_alike and self.uses_all and self._local.may_step_in_parts
        try:
            steps = not self._coordinator.agree("backward()", 1 + self._backwards, error=error, flag=not may_step)
        except (PeerLostError, DisagreementError):
            raise
        except Exception as raised:  # noqa: BLE001 - raised at the end of this backward
            self._skipped = str(raised)
            return
        self._may_step = self._steps_buckets = steps
        early_steps.seen = seen and replace(seen, is_agreed=steps)
