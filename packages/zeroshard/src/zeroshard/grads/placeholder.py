"""The value of ``param.grad`` after a backward that sent gradients to their owners: a tensor without values.

No rank holds the whole gradients of all parameters any more, so code that reads one (a norm, a scaler, a logger) would
silently get a part of it, or local values. The gradient is replaced by a tensor of its shape; reading that raises an
error on every rank, which names the call to use instead. It supports the usual operations of training loops: it can be
set to None or to zero, stepped, and added to by a further backward. It also supports what torch's functions for
clipping and its GradScaler do: each rank knows its norms, and its owners scale or clamp the values.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zeroshard import _torch_private as private
from zeroshard.grads.norms import INF, GradOperations
from zeroshard.state.placeholder import TensorWithoutValues

if TYPE_CHECKING:
    from zeroshard.grads.accumulation import GradAccumulator

_aten = torch.ops.aten


class GradPlaceholder(TensorWithoutValues):
    """Replaces a gradient that is sharded; see the module.

    It has the shape, strides, dtype and device of the parameter and no memory, until a further backward has added this
    rank's own values to it, which are then on their way to the next reduction.

    Args:
        param: the parameter whose gradient it replaces.
        tensor: index of the parameter in the plan.
        name: of the parameter, for messages.
        accumulator: knows where the values are.
    """

    _tensor: int
    _title: str
    _accumulator_of: weakref.ref[GradAccumulator]
    _local: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[GradPlaceholder], param: torch.Tensor, tensor: int, name: str, accumulator: GradAccumulator
    ) -> GradPlaceholder:
        """Make a tensor without memory."""
        return private.make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )

    def __init__(self, param: torch.Tensor, tensor: int, name: str, accumulator: GradAccumulator) -> None:  # noqa: ARG002 - as __new__
        self._tensor, self._title, self._local = tensor, name, None
        # Weakly: the accumulator knows the parameter, whose gradient this is, and such a cycle is never collected.
        self._accumulator_of = weakref.ref(accumulator)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's
        """Describe it, without values."""
        return f"GradPlaceholder({self._title!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would belong to no parameter.

        Raises:
            RuntimeError: always.
        """
        raise self.refusal("a deep copy")

    def is_zero(self) -> bool:
        """Whether it was set to zero, and nothing was added since."""
        return self._local is None and self._accumulator.is_zeroed(self._tensor)

    @property
    def _accumulator(self) -> GradAccumulator:
        accumulator = self._accumulator_of()
        if accumulator is None:
            raise RuntimeError(f"the optimizer that had the gradient of {self._title!r} is gone: call zero_grad()")
        return accumulator

    @property
    def owned(self) -> torch.Tensor | None:
        """This rank's part of the reduced gradient; None if it owns none of it."""
        return self._accumulator.owned(self._tensor)

    def operations(self, operation: str, *, changes: bool) -> GradOperations:
        """Return what does an operation, or raise the error for it.

        Args:
            operation: its name.
            changes: whether it changes the gradient, and does not ask for its norm.
        """
        operations = self._accumulator.operations
        if operations.steps_early:
            raise self.refusal(operation)
        advice = "" if changes else operations.why_unknown(self._tensor)
        if self._local is not None:
            advice = "this rank has added to it what no backward has reduced yet, as under no_sync()"
        elif changes and not self._accumulator.is_grad(self):
            advice = "it is not the gradient of its parameter, but a copy, or an earlier one: change p.grad itself"
        elif not changes and self._accumulator.is_used(self._tensor) and not self.is_zero():
            advice = "a step has used it, and may have changed it: take norms before step()"
        if advice:
            raise self.refusal(operation, advice)
        return operations

    def refusal(self, operation: str, advice: str = "") -> RuntimeError:
        """Return the error for an operation, by its name; ``advice`` says what to do if it depends on more."""
        if not advice and operation in ("a deep copy", "pickling", "share_memory_()"):
            advice = "call zero_grad() before copying, pickling or sharing the model"
        advice = advice or self._accumulator.operations.advice(operation)
        return RuntimeError(
            f"the gradient of {self._title!r} is sharded, and {operation} is not supported on it: {advice}"
        )


def _zero(gradient: GradPlaceholder) -> GradPlaceholder:
    if not gradient._accumulator.is_grad(gradient):
        gradient.operations("zero_()", changes=True)
    gradient._local = None
    gradient._accumulator.zero(gradient._tensor)
    return gradient


def _convert(gradient: GradPlaceholder, *, dtype: Any = None, device: Any = None, **_: object) -> GradPlaceholder:  # noqa: ANN401 - torch's
    """Follow the conversion of a model, with no more than the name of the gradient."""
    like = torch.empty_strided(
        gradient.shape, gradient.stride(), dtype=dtype or gradient.dtype, device=device or gradient.device
    )
    return GradPlaceholder(like, gradient._tensor, gradient._title, gradient._accumulator)


def _add(gradient: torch.Tensor, other: torch.Tensor, **options: object) -> torch.Tensor:
    """Add the gradient of a further backward, as autograd does; nothing else may."""
    by_autograd = private.in_autograd() and not options
    if not by_autograd or not isinstance(gradient, GradPlaceholder) or isinstance(other, GradPlaceholder):
        held = next(item for item in (gradient, other) if isinstance(item, GradPlaceholder))
        raise held.refusal("adding")
    if gradient._local is None:
        gradient._accumulator.save_reduced(gradient._tensor)
        gradient._local = torch.empty_strided(
            gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(other)
    else:
        gradient._local.add_(other)
    return gradient


_COPYING = (
    "if DistributedDataParallel copies it to rebuild its buckets, in its second forward, call zero_grad() before that, "
    "or register the hook by register_reduce_to_owner(ddp, optimizer), which knows when that is"
)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Move this rank's own values, as DDP does between a gradient and its bucket; nothing else may."""
    held = target if isinstance(target, GradPlaceholder) else source
    assert isinstance(held, GradPlaceholder)
    if not (held._accumulator.in_backward or private.in_autograd() or held._accumulator.in_rebuild):
        raise held.refusal("copying", _COPYING if held._accumulator.in_rebuild is None else "")
    if isinstance(target, GradPlaceholder):
        # DDP copies the bucket back after the reduction, but the values stay in the bucket.
        target._local = None
        return target
    if held._local is not None:
        held._accumulator.mark_pending(held._tensor)
        return target.copy_(held._local, non_blocking=non_blocking)
    held._accumulator.replace(held._tensor, target)
    return target


def _norm(
    gradient: GradPlaceholder,
    order: float = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a norm that was exchanged at the end of backward, the same on every rank."""
    operations = gradient.operations("a norm", changes=False)
    if (dim is not None and len(dim) < gradient.dim()) or keepdim or dtype not in (None, gradient.dtype):
        raise gradient.refusal("a norm over some dimensions, or in another dtype,")
    if order not in operations.orders and not gradient.is_zero():
        advice = f"call optimizer.clip_grad_norm_(max_norm, norm_type={order})"
        if order in (2, INF):
            advice += ", or register the hook by register_reduce_to_owner(ddp, optimizer, norms=(2, math.inf))"
        raise gradient.refusal(f"a norm of order {order}", advice)
    return operations.norm(gradient._tensor, order, gradient, gradient.dtype)


def _foreach_norm(
    gradients: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients]


def _scale(gradient: torch.Tensor, factor: float | torch.Tensor, *, divides: bool = False) -> torch.Tensor:
    held = gradient if isinstance(gradient, GradPlaceholder) else factor
    assert isinstance(held, GradPlaceholder)
    if held is factor or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        raise held.refusal("an operation with another tensor than a number")
    operations = held.operations("scaling", changes=True)
    if not held.is_zero():
        operations.scale(held._tensor, held.owned, factor, divides=divides)
    elif not (divides or math.isfinite(factor)):
        raise held.refusal(f"multiplying with {float(factor)}", "it was set to zero")
    return held


def _clamp(gradient: GradPlaceholder, min: float | None = None, max: float | None = None) -> GradPlaceholder:
    operations = gradient.operations("clamping", changes=True)
    if not gradient.is_zero():
        operations.clamp(gradient._tensor, gradient.owned, min, max)
    elif (min is not None and min > 0) or (max is not None and max < 0):
        raise gradient.refusal(f"clamping to {min} and {max}", "it was set to zero")
    return gradient


def _foreach(operation: Callable[..., object]) -> Callable[..., None]:
    """Return what does an operation to each of several gradients, some of which may be values."""

    def call(gradients: Sequence[torch.Tensor], *arguments: object) -> None:
        for gradient in gradients:
            operation(gradient, *arguments)

    return call


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Do what GradScaler does to gradients of one dtype, some of which may be values."""
    held = [gradient for gradient in gradients if isinstance(gradient, GradPlaceholder)]
    # All of them, or none.
    followers = [gradient.operations("unscaling", changes=changes) for gradient in held for changes in (True, False)]
    # In float64: norms in half precision may overflow.
    norms = torch.stack(
        [
            known.norm(gradient._tensor, max(known.orders, default=INF), found_inf, torch.float64)
            for gradient, known in zip(held, followers[1::2], strict=True)
        ]
    )
    found_inf.copy_(torch.maximum(found_inf, (~norms.isfinite().all()).to(found_inf.dtype)))
    values = [gradient for gradient in gradients if not isinstance(gradient, GradPlaceholder)]
    if values:
        private.amp_unscale_(values, found_inf, inverse)
    owned = [gradient.owned for gradient in held if gradient.owned is not None]
    if owned:
        # What the owner finds, the others may not know.
        private.amp_unscale_(owned, torch.zeros_like(found_inf), inverse)
    for gradient, operations in zip(held, followers[::2], strict=True):
        operations.found_inf = found_inf
        operations.scaled(gradient._tensor, "unscale", inverse)


GradPlaceholder.allowed = {
    _aten.detach.default: lambda gradient: gradient,
    _aten.zero_.default: _zero,
    private.ATEN_FOREACH_ZERO_: _foreach(torch.Tensor.zero_),
    _aten.add_.Tensor: _add,
    _aten.add.Tensor: _add,
    private.ATEN_TO_COPY: _convert,
    # As torch answers for its own devices without asking.
    private.ATEN_SHALLOW_COPY: lambda one, other: one.device.type == other.device.type,
    _aten.copy_.default: _copy,
    _aten.linalg_vector_norm.default: _norm,
    private.ATEN_FOREACH_NORM: _foreach_norm,
    _aten.mul_.Tensor: _scale,
    _aten.div_.Tensor: partial(_scale, divides=True),
    **dict.fromkeys(private.ATEN_FOREACH_MUL_, _foreach(torch.Tensor.mul_)),
    **dict.fromkeys(private.ATEN_FOREACH_DIV_, _foreach(torch.Tensor.div_)),
    _aten.clamp_.default: _clamp,
    private.ATEN_FOREACH_CLAMP_MIN_: _foreach(lambda gradient, low: gradient.clamp_(min=low)),
    private.ATEN_FOREACH_CLAMP_MAX_: _foreach(lambda gradient, high: gradient.clamp_(max=high)),
    private.ATEN_AMP_UNSCALE_: _unscale,
}
