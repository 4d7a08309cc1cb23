"""The order of the buckets: each is reduced to its owners, stepped and shared, some of them while backward computes.

Buckets are sent in the order in which they come. A worker thread finishes each reduction when its values arrive, so
that it overlaps with backward; or, if a transport needs the same order on all ranks, the thread that runs backward
does: after the last bucket, or one bucket later, if each is stepped as soon as it is reduced.

Whether shards may be stepped during a backward must be the same on all ranks, because it changes the order of
operations: each rank says so with each bucket, and a bucket is stepped early only if all said yes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch.futures import Future
from torch.profiler import record_function
from zeroshard_comm import BucketHeader, BucketReduceWork, Control

from zeroshard.exchange_guard import ExchangeGuard
from zeroshard.grads.accumulation import GradAccumulator
from zeroshard.grads.bucket import Bucket, BucketState, Unbucketed
from zeroshard.grads.buckets import Buckets
from zeroshard.grads.operations import GradOperations
from zeroshard.grads.stream import ReductionQueue
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import ParameterSync
from zeroshard.plan.eligibility import may_step_in_parts
from zeroshard.plan.layout import Layout


class StepMode(Enum):
    """When shards are stepped."""

    IN_STEP = "in step()"
    AFTER_BACKWARD = "after the last bucket"
    PER_BUCKET = "as soon as a bucket is reduced"


class BucketScheduler:
    """Holds the buckets of one sharded optimizer, and decides what happens to each, and when.

    Args:
        control: the channel of the ranks' agreements, and the group.
        guard: tells whether earlier exchanges were completed.
        local: the local optimizer.
        sync: where parameters lie.
        params: all parameters, by tensor index.
        layout: who owns what.
        mode: when shards are stepped.
        operations: what the loop does to gradients before a step; also an attribute.

    Attributes:
        mode: as given.
        steps_early: whether shards are stepped during backward.
        gradients: where gradients are, and which are carried over from earlier backwards.
        buckets: those of the last backward.
        left_with: how many buckets had come at the end of autograd's work, or of a backward inside it.

    Raises:
        RuntimeError, ValueError: if parameters cannot be exchanged in buckets.
    """

    def __init__(
        self,
        control: Control,
        guard: ExchangeGuard,
        local: LocalOptimizer,
        sync: ParameterSync,
        params: Sequence[torch.Tensor],
        layout: Layout,
        mode: StepMode,
        operations: GradOperations,
    ) -> None:
        self.mode, self._control, self._guard, self.operations = mode, control, guard, operations
        self.steps_early = operations.steps_early
        self.gradients = GradAccumulator(control.ranks.world_size, operations)
        self.buckets = buckets = Buckets(control, self.gradients, local, sync, params, layout)
        self._queue = ReductionQueue(control.ranks.rank, buckets.device, uses_thread=buckets.transport.uses_thread)
        # On a device with streams, waiting for a future also waits for the stream on which it was set.
        self._devices: list[int | str | torch.device] = [] if buckets.device.type == "cpu" else [buckets.device]
        self._local, self._backwards, self.left_with, self._may_step, self._all_may_step = local, 0, 0, False, False

    # ------------------------------------------------------------------ a backward

    def on_bucket(
        self, bucket: Bucket, *, reduce: Callable[[], Future[torch.Tensor]] | None, may_step: bool
    ) -> Future[torch.Tensor]:
        """Send a bucket of gradients to their owners; see :meth:`BackwardFollower.on_bucket`.

        Args:
            bucket: the first of a backward has the index 0.
            reduce: as there.
            may_step: whether this rank's shards may be stepped during this backward.
        """
        self._guard.check()
        try:
            if bucket.index == 0:
                self._may_step, self._all_may_step = may_step, True
                self._backwards, self.left_with = self._backwards + 1, 0
                self.buckets.begin(bucket, gradients=reduce is None)
                self.gradients.begin()
            state = self.buckets.by_index.get(bucket.index)
            if state is not None and state.fits(bucket):
                state.take(bucket)
            else:
                state = self.buckets.add(bucket)
            self.buckets.order.append(bucket.index)
            header = BucketHeader(self._backwards, bucket.index, bucket.present, self._may_step_early, bucket.is_own)
            with record_function(f"zeroshard::send bucket {bucket.index}"):
                work = state.reducer.begin(bucket.buffer, header, gradients=reduce is None)
            # Nobody reads its gradients any more: the hook that reduces it may write to it in a thread.
            result = reduce() if reduce is not None else None
            done: Future[torch.Tensor] = Future(devices=self._devices)
            self._expect_parameters(bucket, state)
            self._queue.add(partial(self._finish, state, work, result, done), work)
            # A bucket without a number of its own may be the last, after which DDP waits for all.
            if bucket.is_last or bucket.announced != bucket.index:
                self._queue.finish(leave=0)
            elif self.mode is StepMode.PER_BUCKET:
                self._queue.finish(leave=1)
            for other in self.buckets.arrived if bucket.is_last and self.mode is StepMode.AFTER_BACKWARD else ():
                self._queue.then(partial(self._step_early, other))
            return done
        except BaseException as error:
            self._guard.mark_broken(error)
            raise

    def _expect_parameters(self, bucket: Bucket, state: BucketState) -> None:
        """Post the receives of buckets that are stepped early, before a thread may send, in one order."""
        if not self.buckets.transport.uses_thread or not self._may_step_early:
            return
        if self.mode is StepMode.PER_BUCKET:
            state.sharing.expect()
        elif self.mode is StepMode.AFTER_BACKWARD and bucket.is_last:
            for other in self.buckets.arrived:
                other.sharing.expect()

    def on_backward_end(self) -> None:
        """Wait until every gradient lies at its owner, and replace gradients by placeholders.

        Raises:
            PeerLostError, RuntimeError: if a rank is gone, or in another backward.
        """
        try:
            with record_function("zeroshard::wait for gradients"):
                self._queue.drain()
            self.buckets.end()
            self.gradients.end(self.buckets.arrived)
            with record_function("zeroshard::norms"):
                self.operations.renew(self.buckets.arrived, agreed=self.buckets.transport.settles)
        except BaseException as error:
            self._guard.mark_broken(error)
            raise
        finally:
            self.gradients.in_backward = False

    # ------------------------------------------------------------------ the rest of a reduction

    def _finish(
        self,
        state: BucketState,
        work: BucketReduceWork,
        result: Future[torch.Tensor] | None,
        done: Future[torch.Tensor],
    ) -> None:
        """Finish the reduction of one bucket, and step it if mode is PER_BUCKET."""
        buffer = state.buffer
        assert buffer is not None
        try:
            self._queue.keep(buffer)
            if self._guard.broken is None:
                with record_function(f"zeroshard::reduce bucket {state.index}"):
                    self._take_in(state, work.finish(), result)
        except BaseException as error:
            self._guard.mark_broken(error)
            raise
        finally:
            # Even after an error, which is raised at the end of backward: DDP would wait for ever.
            done.set_result(buffer)
        if self.mode is StepMode.PER_BUCKET:
            self._step_early(state)

    def _take_in(
        self, state: BucketState, headers: Sequence[BucketHeader], result: Future[torch.Tensor] | None
    ) -> None:
        for other, header in enumerate(headers):
            if (header.backward, header.bucket) != (self._backwards, state.index):
                raise RuntimeError(
                    f"rank {other} is in bucket {header.bucket} of its backward number {header.backward}, rank "
                    f"{self._control.ranks.rank} in bucket {state.index} of number {self._backwards}: a backward has "
                    f"failed or was left out on one of them. Every rank must make the same calls in the same order"
                )
        if result is not None:
            state.replace(result.wait(), self._queue.keep)
        running = sum(header.is_own for header in headers)
        if self.gradients.divides_by_running and 0 < running < len(headers):
            state.scale(len(headers) / running)
        state.present = tuple([any(bits) for bits in zip(*[header.present for header in headers], strict=True)])
        self._all_may_step = self._all_may_step and all(header.may_step for header in headers)
        self.gradients.reduced(state, self._queue.keep)

    @property
    def _may_step_early(self) -> bool:
        """Whether this rank may step during this backward."""
        return self._may_step and may_step_in_parts(self._local.optim)

    def _step_early(self, state: BucketState) -> None:
        """Step a bucket during backward, and share it, even after a failure: all ranks have agreed to."""
        if not self._all_may_step or self._guard.broken:
            return
        if self._may_step:
            state.step_early()
            self._may_step = state.failure is None
        with record_function(f"zeroshard::share bucket {state.index}"):
            state.sharing.send()

    # ------------------------------------------------------------------ between backward and step

    @property
    def has_buckets(self) -> bool:
        """Whether buckets are known: from the first backward on, the same on all ranks."""
        return bool(self.buckets.by_index)

    @property
    def has_parts(self) -> bool:
        """Whether parts are stepped one by one."""
        return self.steps_early or self.buckets.transport.shares_buckets

    @property
    def parts(self) -> Sequence[BucketState | Unbucketed]:
        """The parts that a step updates and shares: the buckets, and the parameters in no bucket."""
        return [*self.buckets.arrived, self.buckets.rest]

    def check_gradients(self) -> None:
        """Find out which gradients the next step will use; raise if some were never reduced."""
        error = self.end_abandoned()
        if error is not None:
            raise error
        for state in self.buckets.arrived:
            state.present = self.gradients.present(state)
        if not self.has_buckets:
            self.gradients.check_reduced()

    def check_unreduced(self) -> None:
        """Raise if parameters that are in no bucket have gradients."""
        if self.has_buckets:
            self.buckets.check_rest()
        else:
            self.gradients.check_reduced()

    def owned_gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of all gradients that the next step will use."""
        self.check_gradients()
        return [gradient for part in self.parts for gradient in part.gradients() if gradient is not None]

    def end_abandoned(self) -> RuntimeError | None:
        """End a backward left after its last bucket, and return an error for all ranks; raise if it was left before."""
        if not self.gradients.in_backward:
            return None
        error = self._unended()
        if self._guard.broken:
            raise error
        self.on_backward_end()
        return error

    def _unended(self) -> RuntimeError:
        """Return an error for a backward that has not ended; let no rank wait for buckets that will not be sent."""
        arrived, rank = self.buckets.arrived, self._control.ranks.rank
        why = "an exception has left it"
        if self.left_with == len(arrived):
            why = (
                f"DistributedDataParallel still waits for the gradients of {self.buckets.unarrived()}. Parameters that "
                f"a forward does not use need find_unused_parameters=True; a model of which parameters were frozen "
                f"must be wrapped anew"
            )
        error = RuntimeError(
            f"the last backward did not come to its end on rank {rank}: {why}. Its gradients are not complete: start "
            f"again from a checkpoint"
        )
        if not arrived or not arrived[-1].is_last:
            self._guard.mark_broken(error)
            self._control.ranks.context.close(error)
        return error
