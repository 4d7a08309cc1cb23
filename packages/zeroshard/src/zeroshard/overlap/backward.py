"""The object that a communication hook calls with the gradients of a backward, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, MutableSet, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.distributed.algorithms.join import Joinable
from torch.futures import Future
from zeroshard_comm import agreed

from zeroshard._torch_private import disable_dynamo
from zeroshard.implementations import check_capture
from zeroshard.overlap.bucket import Bucket
from zeroshard.overlap.buckets import common_device
from zeroshard.overlap.norms import GradNorms, norm_orders
from zeroshard.overlap.operations import GradOperations
from zeroshard.overlap.placeholder import GradPlaceholder
from zeroshard.overlap.scheduler import BucketScheduler, StepMode
from zeroshard.param_groups import active_mask
from zeroshard.step import StepCoordinator


class _Participant(Protocol):
    """Announces calls in Join contexts; it is a :class:`zeroshard.joining.Participant`."""

    divides_by_running: bool

    @property
    def exchange(self) -> object: ...
    @property
    def models(self) -> MutableSet[Joinable]: ...
    def announce_backward(self, *, is_own: bool = True, ends: bool = False) -> None: ...
    def left_out(self) -> RuntimeError: ...


class BackwardFollower:
    """Takes the buckets of each backward, and learns of its end.

    Made by :meth:`ZeroRedundancyOptimizer.follow_backward`; all its methods are collective, and only the thread that
    runs backward calls them.

    Args:
        coordinator: makes the steps of the optimizer.
        joining: announces calls in Join contexts; also an attribute.
        mode: when shards are stepped; also an attribute.
        norms: which norms of gradients every rank learns at the end of each backward; see :func:`norm_orders`.

    Raises:
        RuntimeError: if the group has no backend for the device that parameters are on.
        ValueError: if parameters cannot be exchanged in buckets, or norms of other orders are asked for; on every rank.
    """

    def __init__(
        self,
        coordinator: StepCoordinator,
        joining: _Participant,
        mode: StepMode,
        *,
        norms: bool | Sequence[float],
    ) -> None:
        self._coordinator, self.joining, self.mode = coordinator, joining, mode
        sharding, guard = coordinator.sharding, coordinator.guard
        grad_norms = None
        with agreed(sharding.control, "a communication hook's first call"):
            device = common_device(sharding.params, sharding.layout)
            orders = norm_orders(norms)
            if orders and mode is StepMode.IN_STEP:
                grad_norms = GradNorms(sharding.control, device, orders)
        operations = GradOperations(grad_norms, steps_early=mode is not StepMode.IN_STEP)
        self.scheduler = BucketScheduler(
            sharding.control, guard, sharding.local, sharding.sync, sharding.params, sharding.layout, mode, operations
        )
        coordinator.source, sharding.buckets = self.scheduler, self.scheduler.buckets
        self._backwards_since_step = self._stepped_with = 0
        self._is_own = True
        self._refusal = ""

    @property
    def in_backward(self) -> bool:
        """Whether a backward is producing buckets."""
        return self.scheduler.gradients.in_backward

    @property
    def has_stepped(self) -> bool:
        """Whether a backward has stepped since the last call of ``step()``."""
        return self._backwards_since_step > 0

    def has(self, param: torch.Tensor) -> bool:
        """Whether the optimizer has a parameter."""
        return param in self.scheduler.gradients.index_of

    @disable_dynamo
    def on_bucket(
        self, bucket: Bucket, reduce: Callable[[], Future[torch.Tensor]] | None = None
    ) -> Future[torch.Tensor]:
        """Send a bucket of gradients to their owners, and step them if the mode is to step during backward.

        Args:
            bucket: the buckets of a backward come by ascending index, the first with the index 0, in the same order on
                every rank.
            reduce: if given, averages the bucket over the ranks: begins that, and returns a future of the result, of
                the bucket's length.

        Returns:
            A future of the bucket's buffer, in which this rank's parts then hold the means over all ranks. Other parts
            are unchanged.

        Raises:
            DisagreementError: if ranks have other buckets.
            PeerLostError: if a rank is gone.
            RuntimeError: if an earlier call was not finished, or the model is in a Join context without the optimizer.
            ValueError: if the optimizer does not have a parameter of the bucket, or its gradients cannot be sent.
        """
        self._coordinator.guard.check()
        bucket = self._numbered(bucket)
        may_step = False
        if bucket.index == 0:
            check_capture(self._coordinator.sharding.control.ranks, bucket.params)
            self._is_own = bucket.is_own
            self._take_over_unfrozen()
            self.scheduler.gradients.divides_by_running = self.joining.divides_by_running
            # A rank that has run out of data takes part in a backward only at the others' next call.
            self.scheduler.operations.takes_norms = self.joining.exchange is None
            if self.mode is not StepMode.IN_STEP:
                self.joining.announce_backward(is_own=bucket.is_own)
                may_step = self._coordinator.observe_early(self._coordinator.sharding.groups)
        return self.scheduler.on_bucket(bucket, reduce=reduce, may_step=may_step)

    def _take_over_unfrozen(self) -> None:
        """Choose the owners of unfrozen parameters before their gradients are sent. Collective if some were frozen."""
        sharding = self._coordinator.sharding
        if all(sharding.layout.active):
            return
        active = zip(active_mask(sharding.params), sharding.layout.active, strict=True)
        # With gradients that wait for a step, the step refuses.
        grows = any(now and not before for now, before in active) and not self.scheduler.buckets.unstepped
        if sharding.control.agree("backward()", flag=grows):
            with agreed(sharding.control, "backward()") as declared:
                layout = sharding.update_layout(sharding.groups)
                declared.set(layout.declaration)
            if layout is not sharding.layout:
                sharding.adopt(layout, sharding.groups)

    @disable_dynamo
    def on_backward_end(self) -> None:
        """Finish a backward, after its last bucket and after everything else that writes gradients.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: if shards are stepped during backward, any error of a step.
        """
        coordinator = self._coordinator
        self.scheduler.on_backward_end()
        if self.mode is StepMode.IN_STEP:
            return
        problem = None
        try:
            self.scheduler.check_unreduced()
        except RuntimeError as error:
            problem = error
        try:
            self._refusal = "the last backward was left by an exception"
            if self._is_own:
                self.joining.announce_backward(ends=True)
            coordinator.step(coordinator.sharding.groups, None, {}, problem)
            self._refusal = ""
        except Exception as error:
            self._refusal = f"the last backward has not stepped: {error}"
            raise
        if self._is_own:
            self._backwards_since_step += 1
            self.note_hyperparameters()

    def has_same_hyperparameters(self) -> bool:
        """Whether hyperparameters are those that the last backward has stepped with, or that were noted since."""
        sharding = self._coordinator.sharding
        return sharding.hyperparameters.follow(sharding.groups) == self._stepped_with

    def note_hyperparameters(self) -> None:
        """Treat the current hyperparameters as those that the last backward has stepped with."""
        sharding = self._coordinator.sharding
        self._stepped_with = sharding.hyperparameters.follow(sharding.groups)

    @disable_dynamo
    def on_autograd_end(self) -> None:
        """End a backward in which no bucket was marked as the last, such as the first one of a static graph.

        Called at the end of autograd's work, or of a backward inside it, such as one of activation checkpoints.
        """
        arrived = self.scheduler.buckets.arrived
        if self.in_backward and len(arrived) > 1 and not any(state.announced for state in arrived):
            self.on_backward_end()
        self.scheduler.left_with = len(arrived)

    def on_step(self) -> None:
        """Check a call of ``step()`` after a backward that has stepped: there must be one such backward per call.

        Nothing may have happened in between that a step after it would have seen.

        Raises:
            RuntimeError: if it was not, from then on until a state is loaded; or if gradients were never reduced.
        """
        guard = self._coordinator.guard
        guard.check()
        guard.check_loop()
        refusal = self._refusal or self.scheduler.gradients.refusal
        if refusal:
            raise RuntimeError(refusal)
        dropped = self._dropped()
        self.scheduler.check_gradients()
        backwards, self._backwards_since_step = self._backwards_since_step, 0
        found = ""
        if backwards > 1:
            found = f"{backwards} backwards have stepped since the last call of step()"
        elif backwards and not self.has_same_hyperparameters():
            found = "a hyperparameter was changed after the backward that has stepped with it"
        elif backwards and dropped:
            found = f"the gradient of {dropped} was removed or set to zero after the backward that has stepped with it"
        elif not backwards and any(type(param.grad) is GradPlaceholder for param in self._coordinator.sharding.params):
            found = "step() was called again with the same gradients, and no backward has stepped in between"
        if found:
            guard.refused = (
                f"{found}: this communication hook steps during backward, which is for exactly one backward outside of "
                f"no_sync() per step(). Accumulate under no_sync(), and change hyperparameters and gradients after "
                f"step(); or use reduce_to_owner_hook, which leaves stepping to step(). Parameters are not those of a "
                f"run without sharding any more: load a state before you go on"
            )
            guard.check_loop()

    def _dropped(self) -> str:
        """Name a tensor whose gradient was removed or set to zero since the backward that has stepped, if there is."""
        for state in self.scheduler.buckets.arrived:
            if not state.zeroed and self.scheduler.gradients.has_placeholders(state):
                continue
            for tensor, param, present in zip(state.tensors, state.params, state.present, strict=True):
                is_there = type(param.grad) is GradPlaceholder or self.scheduler.gradients.is_replaced(param)
                if present and (tensor in state.zeroed or not is_there):
                    return f"tensor {tensor} {self._coordinator.sharding.layout.plan.tensors[tensor].name!r}"
        return ""

    def begin_anew(self) -> None:
        """Forget how step() was called: a state has been loaded."""
        self._coordinator.guard.refused = ""
        self._backwards_since_step, self._refusal = 0, ""

    def _numbered(self, bucket: Bucket) -> Bucket:
        """Number the buckets by their arrival: in the first backward of a static graph, DDP calls all of them 0.

        Raises:
            RuntimeError: if they are of two models, or an earlier backward did not come to its end.
        """
        before = self.scheduler.buckets.arrived
        if not self.in_backward or (0 < bucket.index == len(before) and not before[-1].is_last):
            return bucket
        seen = {param for other in before for param in other.params}
        error: RuntimeError | None = None
        if not seen.isdisjoint(bucket.params):
            error = RuntimeError("an earlier backward did not come to its end on this rank")
        elif not before or before[-1].is_last or bucket.index not in (0, len(before)):
            error = RuntimeError(
                "buckets of two models arrive in one backward: with a communication hook of zeroshard, each model "
                "in DistributedDataParallel needs an optimizer and a backward of its own"
            )
        if error is not None:
            self._coordinator.guard.mark_broken(error)
            raise error
        return replace(bucket, index=len(before), announced=bucket.index)
