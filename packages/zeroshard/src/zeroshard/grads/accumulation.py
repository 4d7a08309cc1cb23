"""Gradients of several backwards before one step: each owner adds further reductions to the gradients it holds.

Autograd adds to ``param.grad`` itself, which is a placeholder: from that moment on the bucket belongs to the next
reduction, so the owner copies the gradient that was reduced before, and adds the copy after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
from zeroshard_core import Plan

from zeroshard._torch_private import in_autograd
from zeroshard.grads.bucket import BucketPhase, BucketState
from zeroshard.grads.norms import GradOperations
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.layout import label_in

_grad_of = attrgetter("grad")


class GradAccumulator:
    """Knows where the reduced gradients of all parameters are, and which are accumulated from earlier backwards.

    Args:
        operations: what the loop may do to gradients before a step; also an attribute.

    Attributes:
        index_of: the tensor index of each parameter.
        placeholders: the placeholder of each gradient, by tensor.
        in_backward: whether a backward is producing buckets; changed by the exchange.
        in_rebuild: whether DDP may be rebuilding its buckets, in a forward; None if the model is not known.
        refusal: why the current backward cannot add to gradients, if it cannot.
    """

    def __init__(self, operations: GradOperations) -> None:
        self.operations = operations
        self.index_of: dict[torch.Tensor, int] = {}
        self.placeholders: list[GradPlaceholder] = []
        self.in_backward, self.refusal = False, ""
        self.in_rebuild: bool | None = None
        self._params: Sequence[torch.Tensor] = ()
        self._state_of: dict[int, BucketState] = {}
        self._accumulated: dict[int, torch.Tensor] = {}
        self._pending: set[int] = set()
        """Accumulated tensors whose next values are in a bucket, so the accumulation continues."""
        self._has_local, self._keeps_reduced = set[int](), set[int]()
        """Tensors to which this rank has added; and those that keep what was reduced, the same on every rank."""
        self._replaced: dict[int, int] = {}
        """By tensor, the address of the gradient by which DDP replaced its placeholder in a forward."""

    def rebuild(self, params: Sequence[torch.Tensor], plan: Plan, local: LocalOptimizer) -> None:
        """Make placeholders for parameters."""
        self._params, self._plan, self._local = params, plan, local
        self.index_of = {param: index for index, param in enumerate(params)}
        self.placeholders = [GradPlaceholder(p, i, plan.tensors[i].name, self) for i, p in enumerate(params)]
        for tensor in self._state_of:
            grad = params[tensor].grad
            if type(grad) is GradPlaceholder:
                # Gradients accumulated and not reduced still belong to the next reduction.
                self.placeholders[tensor]._local = grad._local
                params[tensor].grad = self.placeholders[tensor]

    def locate(self, states: Sequence[BucketState]) -> None:
        """Take note of which parameters are in which bucket; others are unchanged."""
        self._state_of.update({tensor: state for state in states for tensor in state.tensors})

    # ------------------------------------------------------------------ a backward

    def begin(self) -> None:
        """Begin a backward."""
        self.in_backward, self.refusal = True, ""
        self._replaced.clear()

    def add_saved(self, state: BucketState, keep: Callable[[torch.Tensor], None]) -> None:
        """Add the gradients of earlier backwards to a bucket that was reduced; ``keep`` keeps memory for the stream."""
        state.phase = BucketPhase.REDUCED
        if self._accumulated:
            owned = state.owned_gradients()
            for tensor in state.tensors:
                accumulated = self._accumulated.pop(tensor, None)
                if accumulated is not None and tensor in owned and tensor in self._pending:
                    keep(accumulated)
                    owned[tensor].add_(accumulated)
            self._pending.difference_update(state.tensors)
        self.operations.reduced(state, self._keeps_reduced, keep)

    def end(self, states: Sequence[BucketState]) -> None:
        """Put placeholders where the gradients of a backward were."""
        for state in states:
            placeholders = [self.placeholders[tensor] for tensor in state.tensors]
            for param, placeholder in zip(state.params, placeholders, strict=True):
                if param.grad is not None:
                    param.grad = placeholder
        for tensor in self._has_local:
            self.placeholders[tensor]._local = None
        self._has_local.clear()
        self._keeps_reduced.clear()

    def owned(self, tensor: int) -> torch.Tensor | None:
        """Return this rank's part of a reduced gradient; None if it owns none of it."""
        return self._state_of[tensor].owned_gradients().get(tensor)

    # ------------------------------------------------------------------ what the next step will use

    def find_present(self, states: Sequence[BucketState]) -> None:
        """Find out which tensors of some buckets have a gradient to be stepped with.

        Raises:
            RuntimeError: if a gradient was accumulated on this rank and never reduced.
        """
        for state in states:
            if not self._has_local and self.has_placeholders(state):
                continue
            grads = list(map(_grad_of, state.params))
            for grad, tensor in zip(grads, state.tensors, strict=True):
                if grad is None or (type(grad) is GradPlaceholder and grad._local is None):
                    continue
                if self._replaced.get(tensor) != grad.data_ptr():
                    raise self.unreduced(tensor)
            for tensor, param, is_present in zip(state.tensors, state.params, state.present, strict=True):
                # That a parameter was frozen is compared by itself.
                dropped = is_present and param.grad is None and param.requires_grad
                if dropped and state.phase is BucketPhase.REDUCED:
                    self.operations.dropped(tensor)
            state.present = tuple(
                [is_present and grad is not None for is_present, grad in zip(state.present, grads, strict=True)]
            )

    def has_placeholders(self, state: BucketState) -> bool:
        """Whether the placeholders of a bucket are the gradients of all its parameters."""
        return all(map(is_, map(_grad_of, state.params), map(self.placeholders.__getitem__, state.tensors)))

    def unreduced(self, tensor: int) -> RuntimeError:
        """Return the error for a gradient that was never reduced."""
        title = f"the gradient of {label_in(self._plan, tensor)}"
        if type(self._params[tensor].grad) is GradPlaceholder:
            return RuntimeError(
                f"{title} has not been reduced: after the backward() that reduced it, another one added to it under "
                f"no_sync() or over the same forward, which DistributedDataParallel does not reduce. Make the last "
                f"backward() before step() outside of no_sync(), over a forward of its own"
            )
        if not self.is_used(tensor):
            return RuntimeError(
                f"{title} was replaced after backward() had reduced it: .grad is a tensor of this rank alone, "
                f"assigned, or made after zero_grad() by a backward that DistributedDataParallel did not reduce, as "
                f"under no_sync(). Multiply or clamp the gradient in place, or change it in a hook of the tensor"
            )
        return RuntimeError(
            f"{title} has not been reduced: the last backward() before step() was under no_sync(), and must not be; or "
            f"DistributedDataParallel waits for a parameter that it did not use, which needs "
            f"find_unused_parameters=True, or that was frozen since the model was wrapped, which must then be wrapped "
            f"again"
        )

    def is_used(self, tensor: int) -> bool:
        """Whether the reduced gradient of a tensor was stepped or set to zero, so that nothing is added to it."""
        state = self._state_of.get(tensor)
        return state is None or state.phase is BucketPhase.STEPPED or tensor in state.zeroed

    def is_grad(self, placeholder: GradPlaceholder) -> bool:
        """Whether a placeholder is the gradient of its parameter now."""
        return self._params[placeholder._tensor].grad is placeholder

    # ------------------------------------------------------------------ what placeholders do

    def save_reduced(self, tensor: int) -> None:
        """Keep a reduced gradient, before a further backward overwrites it.

        Raises:
            RuntimeError: if it was stepped already.
        """
        state = self._state_of[tensor]
        self._has_local.add(tensor)
        if tensor in state.zeroed:
            return
        if state.phase is BucketPhase.STEPPED:
            self.refusal = (
                f"{label_in(self._plan, tensor)} still has the gradient of the last step: call optimizer.zero_grad() "
                f"before backward()"
            )
            if self.operations.steps_early:
                self.refusal += (
                    ". To accumulate gradients of several backwards, make all but the last one under no_sync(), or use "
                    "reduce_to_owner_hook: this hook steps in every backward"
                )
            raise RuntimeError(self.refusal)
        self._keeps_reduced.add(tensor)
        gradient = self.owned(tensor)
        if gradient is not None:
            self._accumulated[tensor] = gradient.clone()

    def mark_pending(self, tensor: int) -> None:
        """Note that the next values of an accumulated gradient go into a bucket."""
        self._pending.update({tensor} & self._accumulated.keys())

    def zero(self, tensor: int) -> None:
        """Set a reduced gradient to zero."""
        self._state_of[tensor].zeroed.add(tensor)
        self._accumulated.pop(tensor, None)
        self._pending.discard(tensor)
        gradient = self.owned(tensor)
        if gradient is not None:
            gradient.zero_()
        self.operations.zeroed(tensor)

    def is_zeroed(self, tensor: int) -> bool:
        """Whether a reduced gradient was set to zero."""
        state = self._state_of.get(tensor)
        return state is not None and tensor in state.zeroed

    def replace(self, tensor: int, place: torch.Tensor) -> None:
        """Write the values of a placeholder's gradient into ``place``, which is in a bucket.

        DDP copies gradients into its buckets when it rebuilds them in a forward, or if a backward did not use their
        parameters. The owner writes the gradient that was reduced before, times the number of ranks, by
        which the reduction divides. So a further backward before the step adds to it, and setting gradients to zero
        or None discards it. The other ranks write zeros.
        """
        is_used = self.is_used(tensor)
        gradient = None if is_used else self.owned(tensor)
        # It may lie in this place.
        gradient = gradient.clone() if gradient is not None else None
        place.zero_()
        if gradient is not None and in_autograd():
            # This gradient is from an earlier backward and must not be averaged again.
            self._accumulated[tensor] = gradient
            self.mark_pending(tensor)
        elif gradient is not None:
            shard = self._local.shards[tensor]
            shard.shard.narrow(place).copy_(gradient).mul_(self._plan.world_size)
        if not is_used:
            self._replaced[tensor] = place.data_ptr()
            self._keeps_reduced.add(tensor)

    def is_replaced(self, param: torch.Tensor) -> bool:
        """Whether DDP has put a kept gradient into a new bucket since the last backward; see :meth:`replace`."""
        return self.index_of.get(param) in self._replaced
