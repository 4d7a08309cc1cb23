"""The value of ``param.grad`` after a backward that sent gradients to their owners: a tensor without values.

No rank holds the whole gradients of all parameters, so code that reads one (a norm, a scaler, a logger) would silently
get a part of it. A placeholder of the same shape replaces the gradient; reading it raises an error that names the call
to use instead. It supports the usual operations of training loops: set it to None or to zero, clip it by torch's
functions, unscale it by torch's GradScaler, and step.
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zeroshard import _torch_private as private
from zeroshard.grads.norms import GradNorms
from zeroshard.state.placeholder import TensorWithoutValues

if TYPE_CHECKING:
    from zeroshard.grads.table import GradTable

_aten = torch.ops.aten


class Reduced(Enum):
    """The state of a gradient, equal on all ranks between backwards."""

    ABSENT = "no rank has a gradient"
    ZERO = "it was set to zero, and a step uses zeros"
    REDUCING = "it is being sent to its owners"
    REDUCED = "its owners hold the mean"
    USED = "a step has used the mean"


class GradPlaceholder(TensorWithoutValues):
    """Replaces a sharded gradient in ``.grad``. Reading its values raises an error that says what to call instead.

    It has the shape, strides, dtype and device of the parameter, and no memory.

    Args:
        param: the parameter whose gradient it replaces.
        tensor: the parameter's index in the plan.
        name: the parameter's name, for messages.
        table: holds the state of the gradient.
        device: the device of the placeholder; the parameter's device if None.
    """

    _tensor: int
    _title: str
    _table_of: weakref.ref[GradTable]

    @staticmethod
    def __new__(
        cls: type[GradPlaceholder],
        param: torch.Tensor,
        tensor: int,
        name: str,
        table: GradTable,
        device: torch.device | None = None,
    ) -> GradPlaceholder:
        """Make a tensor without memory."""
        made = private.make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=device or param.device
        )
        made._tensor, made._title = tensor, name
        # Weak, because the table refers to the parameter, whose gradient this is: such a cycle is never collected.
        made._table_of = weakref.ref(table)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's
        """Return the name, shape and dtype; there are no values."""
        return f"GradPlaceholder({self._title!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        """Return the name, shape and dtype; raise a RuntimeError if ``spec`` is not empty, as for a scalar's value."""
        if spec:
            raise self.refusal(f"formatting its value as {spec!r}")
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raise a RuntimeError, because a copy would belong to no parameter."""
        raise self.refusal("a deep copy")

    @property
    def data(self) -> torch.Tensor:
        """The placeholder itself. An assigned tensor becomes ``param.grad``, and the next step raises on all ranks."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if isinstance(values, GradPlaceholder) and values._tensor == self._tensor:
            # A conversion of the model.
            torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined] # torch annotates it as a tensor
            return
        if not self._table.is_grad(self):
            self._norms_for("assigning .data")
        self._table.assign(self._tensor, values)

    @property
    def _table(self) -> GradTable:
        """The table that holds the gradient's state; raises a RuntimeError if the optimizer is gone."""
        table = self._table_of()
        if table is None:
            raise RuntimeError(f"the optimizer that held the gradient of {self._title!r} is gone: call zero_grad()")
        return table

    @property
    def _reduced(self) -> Reduced:
        """The state of the gradient in the table."""
        return self._table.reduced(self._tensor)

    @property
    def owned(self) -> torch.Tensor | None:
        """This rank's part of the reduced gradient; None if it owns none of it."""
        return self._table.owned(self._tensor)

    def _norms_for(self, operation: str, *, changes: bool = True) -> GradNorms:
        """Return the norms that record an operation, or raise. ``changes`` is False if it only reads the norm."""
        table, advice = self._table, ""
        if not table.norms.steps_early:
            if table.local(self._tensor) is not None:
                advice = "this rank has added values to it that no backward has reduced yet, as under no_sync()"
            elif changes and not table.is_grad(self):
                advice = "it is a copy or an earlier gradient, not the current one of its parameter: change p.grad"
            elif changes and self._reduced is Reduced.USED:
                # The optimizer class may have changed it, so its norm is no longer known.
                advice = "a step has used it: change gradients before step()"
            else:
                return table.norms
        raise self.refusal(operation, advice)

    def _known_norm(self, operation: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the 2-norm of the gradient, a 0-dim tensor that the caller must not change; raise if it is unknown."""
        norms = self._norms_for(operation, changes=False)
        if self._reduced is Reduced.ZERO:
            return torch.zeros((), dtype=dtype, device=self.device)
        if advice := norms.why_unknown(self._tensor):
            raise self.refusal(operation, advice)
        return norms.norm(self._tensor, dtype).to(self.device)

    def refusal(self, operation: str, advice: str = "") -> RuntimeError:
        """Return the error that refuses an operation; ``advice`` replaces the general advice."""
        if reader := _optimizer_that_steps():
            return RuntimeError(
                f"{reader}.step() reads the gradient of {self._title!r}, which a communication hook has sharded.\n"
                f"Call step() of the hook's own ZeroRedundancyOptimizer, and of no other optimizer"
            )
        if not advice and operation in ("a deep copy", "pickling", "sharing its memory"):
            advice = "call zero_grad() before copying, pickling or sharing the model"
        advice = advice or self._table.norms.advice(operation)
        begin = "\n" if "\n" in advice else " "
        return RuntimeError(
            f"the gradient of {self._title!r} is sharded, and {operation} is not supported on it:{begin}{advice}"
        )


class _Squares(TensorWithoutValues):
    """The squares of the values of a gradient, of which only the sum is known."""

    _gradient: GradPlaceholder
    _sum: torch.Tensor

    def refusal(self, operation: str) -> RuntimeError:
        """Return the error that refuses an operation, by its name."""
        return self._gradient.refusal(f"{operation} of its squares")


def _optimizer_that_steps() -> str:
    """Return the class of the optimizer without a hook whose ``step()`` calls this; empty if there is none."""
    name = ""
    for frame, _ in traceback.walk_stack(None):
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, torch.optim.Optimizer):
            if getattr(caller, "takes_buckets", False):
                return ""
            name = type(caller).__name__
    return name


def _zero(gradient: GradPlaceholder) -> GradPlaceholder:
    if not gradient._table.is_grad(gradient):
        gradient._norms_for("zero_()")
    gradient._table.zero(gradient._tensor)
    return gradient


def _convert(gradient: GradPlaceholder, *, dtype: Any = None, device: Any = None, **_: object) -> GradPlaceholder:  # noqa: ANN401 - torch's
    """Return a placeholder of another dtype or device, for the gradient of a converted model."""
    like = torch.empty_strided(gradient.shape, gradient.stride(), dtype=dtype or gradient.dtype, device="meta")
    return GradPlaceholder(like, gradient._tensor, gradient._title, gradient._table, device or gradient.device)


def _view(gradient: GradPlaceholder, size: Sequence[int]) -> GradPlaceholder:
    """Return a placeholder of another shape, which has the same norm."""
    like = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta").view(size)
    return GradPlaceholder(like, gradient._tensor, gradient._title, gradient._table, gradient.device)


def _clone(gradient: GradPlaceholder, *, memory_format: torch.memory_format | None = None) -> GradPlaceholder:
    """Return a placeholder in row-major order, which flatten() needs; refuse other copies."""
    if memory_format is not torch.contiguous_format or gradient.is_contiguous():
        raise gradient.refusal("copying")
    return _view(gradient, gradient.shape)


def _squares(gradient: GradPlaceholder, exponent: float) -> _Squares:
    if exponent != 2:
        raise gradient.refusal(f"the power {exponent}")
    made = private.make_wrapper_subclass(_Squares, gradient.shape, dtype=gradient.dtype, device=gradient.device)
    # Read the norm now, because the loop may scale the gradient before it asks for the sum.
    made._gradient, made._sum = gradient, gradient._known_norm("a sum of squares", torch.float64).square()
    return made


def _add(gradient: torch.Tensor, other: torch.Tensor, **options: object) -> torch.Tensor:
    """Add the gradient of another backward, as autograd does; any other addition raises."""
    by_autograd = private.in_autograd() and not options
    if not by_autograd or not isinstance(gradient, GradPlaceholder) or isinstance(other, GradPlaceholder):
        held = next(item for item in (gradient, other) if isinstance(item, GradPlaceholder))
        raise held.refusal("adding")
    gradient._table.add_local(gradient._tensor, other)
    return gradient


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001 - aten's
    """Copy between a gradient and its bucket, as DDP does in a backward; any other copy raises."""
    held = target if isinstance(target, GradPlaceholder) else source
    assert isinstance(held, GradPlaceholder)
    if held is target and (held._reduced is Reduced.REDUCING or held._table.left_out):
        # DDP copies the bucket back after the reduction, but the values stay in the bucket.
        return held
    if held is target or not (private.in_autograd() or held._reduced is Reduced.ZERO):
        advice = (
            "DistributedDataParallel copies gradients when it wraps a model, and in its second forward: call "
            "zero_grad() before that. The forward needs no zero_grad() if register_reduce_to_owner(ddp, optimizer) "
            "has registered the hook and you call ddp(...)"
        )
        raise held.refusal("copying", advice)
    return held._table.copy_local(held._tensor, target)


def _norm(
    gradient: GradPlaceholder,
    order: float = 2.0,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the norm that ranks have exchanged at the end of backward; it is equal on every rank."""
    norm = gradient._known_norm("a norm", gradient.dtype)
    if (dim is not None and len(dim) < gradient.dim()) or keepdim or dtype not in (None, gradient.dtype):
        raise gradient.refusal("a norm over some dimensions, or in another dtype,")
    if order != 2:
        advice = f"call optimizer.clip_grad_norm_(max_norm, norm_type={order})"
        raise gradient.refusal(f"a norm of order {order}", advice)
    return norm


def _foreach_norm(
    gradients: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [
        _norm(gradient, order, dtype=dtype).clone()
        if isinstance(gradient, GradPlaceholder)
        else torch.linalg.vector_norm(gradient, order, dtype=dtype)
        for gradient in gradients
    ]


def _scale(gradient: torch.Tensor, factor: float | torch.Tensor, *, divides: bool = False) -> torch.Tensor:
    held = gradient if isinstance(gradient, GradPlaceholder) else factor
    assert isinstance(held, GradPlaceholder)
    if held is factor or (isinstance(factor, torch.Tensor) and factor.numel() != 1):
        raise held.refusal("an operation with a tensor other than a number")
    if isinstance(factor, complex) or (isinstance(factor, torch.Tensor) and factor.is_complex()):
        raise held.refusal("scaling by a complex number", "multiply it by a real number")
    norms, owned = held._norms_for("scaling"), held.owned
    if held._reduced is not Reduced.ZERO:
        # Record it first, because a factor that is not a number raises on every rank.
        norms.record_scaling(held._tensor, "div_" if divides else "mul_", factor, divides=divides)
        if owned is not None:
            _ = owned.div_(factor) if divides else owned.mul_(factor)
    elif factor == 0 if divides else not math.isfinite(factor):
        raise held.refusal(f"scaling by {float(factor)}", "it was set to zero")
    return held


def _clamp(gradient: GradPlaceholder, min: float | None = None, max: float | None = None) -> GradPlaceholder:
    norms, owned = gradient._norms_for("clamping"), gradient.owned
    if gradient._reduced is not Reduced.ZERO:
        # Record it first, because wrong arguments raise on every rank.
        norms.record_clamp(gradient._tensor, min, max)
        if owned is not None:
            owned.clamp_(min, max)
    elif (min is not None and min > 0) or (max is not None and max < 0):
        raise gradient.refusal(f"clamping to {min} and {max}", "it was set to zero")
    return gradient


def _foreach(operation: Callable[..., object]) -> Callable[..., None]:
    """Return a function that applies an operation to each of several gradients, some of which may have values."""

    def call(gradients: Sequence[torch.Tensor], *arguments: object) -> None:
        for gradient in gradients:
            operation(gradient, *arguments)

    return call


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Unscale gradients of one dtype as GradScaler does; some of them may have values."""
    held = [gradient for gradient in gradients if isinstance(gradient, GradPlaceholder)]
    # Check all of them first, so that all are unscaled or none.
    for gradient in held:
        gradient._norms_for("unscaling")
    # Use float64, because norms in half precision may overflow.
    norms = torch.stack([gradient._known_norm("unscaling", torch.float64) for gradient in held]).to(found_inf.device)
    found_inf.copy_(torch.maximum(found_inf, (~norms.isfinite().all()).to(found_inf.dtype)))
    values = [gradient for gradient in gradients if not isinstance(gradient, GradPlaceholder)]
    if values:
        private.amp_unscale_(values, found_inf, inverse)
    owned = [gradient.owned for gradient in held if gradient.owned is not None]
    if owned:
        # Only the owner would find an infinity here, so the result is unused.
        private.amp_unscale_(owned, torch.zeros_like(found_inf), inverse)
    for gradient in held:
        gradient._table.norms.record_scaling(gradient._tensor, "unscale", inverse)


GradPlaceholder.allowed = {
    _aten.detach.default: lambda gradient: gradient,
    _aten.zero_.default: _zero,
    private.ATEN_FOREACH_ZERO_: _foreach(torch.Tensor.zero_),
    _aten.add_.Tensor: _add,
    _aten.add.Tensor: _add,
    private.ATEN_TO_COPY: _convert,
    # torch gives this answer for its own devices.
    private.ATEN_SHALLOW_COPY: lambda one, other: one.device.type == other.device.type,
    _aten.copy_.default: _copy,
    # Return a copy, because loops clamp a norm in place.
    _aten.linalg_vector_norm.default: lambda *args, **options: _norm(*args, **options).clone(),
    private.ATEN_FOREACH_NORM: _foreach_norm,
    _aten.view.default: _view,
    private.ATEN_UNSAFE_VIEW: _view,
    _aten.clone.default: _clone,
    _aten.pow.Tensor_Scalar: _squares,
    _aten.mul_.Tensor: _scale,
    _aten.div_.Tensor: partial(_scale, divides=True),
    **dict.fromkeys(private.ATEN_FOREACH_MUL_, _foreach(torch.Tensor.mul_)),
    **dict.fromkeys(private.ATEN_FOREACH_DIV_, _foreach(torch.Tensor.div_)),
    _aten.clamp_.default: _clamp,
    private.ATEN_FOREACH_CLAMP_MIN_: _foreach(lambda gradient, low: gradient.clamp_(min=low)),
    private.ATEN_FOREACH_CLAMP_MAX_: _foreach(lambda gradient, high: gradient.clamp_(max=high)),
    private.ATEN_AMP_UNSCALE_: _unscale,
}
_Squares.allowed = {
    _aten.sum.default: lambda squares, dtype=None: squares._sum.to(dtype or squares.dtype, copy=True),
}
