"""What ``param.grad`` is after a backward that sent gradients to their owners: a place without values.

No rank holds the whole gradient of all parameters any more, so whatever would read it (a norm, a scaler, a logger)
would get a part of it, or local values, in silence. In place of the gradient stands a tensor of its shape that refuses
to be read, by an error that names the right call, on every rank alike. It takes part in what training loops rightly do:
it can be set to None or to zero, stepped, and added to by a further backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

_aten = torch.ops.aten


class Keeper(Protocol):
    """Knows where the values are."""

    def carry(self, tensor: int) -> None:
        """Keep the reduced gradient of a tensor for the next reduction, before a further backward overwrites it.

        Raises:
            RuntimeError: if it was stepped already.
        """

    def zero(self, tensor: int) -> None:
        """Set the reduced gradient of a tensor to zero."""

    def rebuilt(self, tensor: int, place: torch.Tensor) -> None:
        """Take note that DDP has rebuilt its buckets, and that ``place``, zero, is the tensor's gradient now."""

    def advice(self, operation: str) -> str:
        """Say why an operation cannot be done, and what to call instead."""


class ReducedGradient(torch.Tensor):
    """Stands for a gradient that lies at its owner; see the module.

    It has the shape, strides, dtype and device of the parameter and no memory, until a further backward has added this
    rank's own values to it, which are then on their way to the next reduction.

    Args:
        param: whose gradient it stands for.
        tensor: index of the parameter in the plan.
        name: of the parameter, for messages.
        keeper: knows where the values are.
    """

    _tensor: int
    _title: str
    _keeper: Keeper
    _local: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[ReducedGradient], param: torch.Tensor, tensor: int, name: str, keeper: Keeper
    ) -> ReducedGradient:
        """Make a tensor without memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )

    def __init__(self, param: torch.Tensor, tensor: int, name: str, keeper: Keeper) -> None:  # noqa: ARG002 - as __new__
        self._tensor, self._title, self._keeper, self._local = tensor, name, keeper, None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's
        """Describe it, without values."""
        return f"ReducedGradient({self._title!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves out that it is a classmethod
        cls,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Do the few things that training loops do with a gradient that is not read; refuse all others."""
        known = _ALLOWED.get(func)
        if known is not None:
            return known(*args)
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
        found = next(item for item in flat if isinstance(item, ReducedGradient))
        raise RuntimeError(
            f"the gradient of {found._title!r} lies at its owner, and {func} cannot be done with it: "
            f"{found._keeper.advice(str(func))}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedGradient:
        """Refuse: a copy would belong to no parameter.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"the gradient of {self._title!r} lies at its owner and cannot be copied: call zero_grad() before copying "
            f"the model"
        )


def _detach(gradient: ReducedGradient) -> ReducedGradient:
    return gradient


def _zero(gradient: ReducedGradient) -> ReducedGradient:
    gradient._local = None
    gradient._keeper.zero(gradient._tensor)
    return gradient


def _foreach_zero(gradients: Sequence[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient.zero_()


def _add(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add what a further backward has computed, as autograd does."""
    if not isinstance(gradient, ReducedGradient) or isinstance(other, ReducedGradient):
        held = next(item for item in (gradient, other) if isinstance(item, ReducedGradient))
        raise RuntimeError(
            f"the gradient of {held._title!r} lies at its owner, and cannot be added to something: "
            f"{held._keeper.advice('add')}"
        )
    if gradient._local is None:
        gradient._keeper.carry(gradient._tensor)
        gradient._local = torch.empty_strided(
            gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(other)
    else:
        gradient._local.add_(other)
    return gradient


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Move this rank's own values, as DDP does between a gradient and its bucket."""
    if isinstance(target, ReducedGradient):
        # DDP copies the bucket back after the reduction; what it brings lies in the bucket.
        target._local = None
        return target
    assert isinstance(source, ReducedGradient)
    if source._local is not None:
        return target.copy_(source._local)
    target.zero_()
    source._keeper.rebuilt(source._tensor, target)
    return target


_ALLOWED: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _foreach_zero,
    _aten.add_.Tensor: _add,
    _aten.add.Tensor: _add,
    _aten.copy_.default: _copy,
}
