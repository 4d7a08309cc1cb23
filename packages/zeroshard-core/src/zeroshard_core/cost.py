"""What a tensor weighs when owners are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from zeroshard_core.spec import TensorSpec

Cost = Callable[[TensorSpec], float]
"""From a tensor to its weight: finite, not negative, in any unit. Frozen tensors weigh nothing whatever it says."""

# Distinct sizes, so that an entry's sizes tell which of the tensor's dimensions they follow.
_PROBE_SIZES = (5, 7, 3, 11, 13)


def numel(spec: TensorSpec) -> float:
    """Weigh a tensor by its number of elements: the default, and right where all tensors have one dtype."""
    return spec.numel


def nbytes(spec: TensorSpec) -> float:
    """Weigh a tensor by its size in bytes."""
    return spec.nbytes


def state_bytes(optimizer_class: Callable[..., torch.optim.Optimizer], **defaults: Any) -> Cost:  # noqa: ANN401 - passed on
    """Weigh a tensor by the bytes of state that an optimizer holds for it, measured rather than declared.

    The first tensor of each dtype and number of dimensions is measured by stepping the optimizer once on a tiny tensor
    of zeros on the CPU, with a gradient of ones. Every entry of its state is taken to follow the dimensions whose sizes
    it shares (so factored state of matrices counts right); any other size, and 0-dim entries, count as constant per
    tensor. Sizes beyond the fifth dimension are followed only by entries of the tensor's own shape.

    >>> weigh = state_bytes(torch.optim.Adam)
    >>> weigh(TensorSpec("weight", (10, 10), torch.float32))  # two moments of 400 bytes, and the step
    804.0

    Args:
        optimizer_class: the class to measure.
        **defaults: its arguments, as in ``optimizer_class(params, **defaults)``.

    Returns:
        The cost, in bytes. 0.0 everywhere for a class without state, such as plain SGD: weigh by :func:`numel` then,
        or nothing will be balanced. It raises ValueError if the class cannot be stepped on such a tensor.
    """
    measured: dict[tuple[torch.dtype, int], _Footprint] = {}

    def weigh(spec: TensorSpec) -> float:
        key = (spec.dtype, len(spec.shape))
        if key not in measured:
            measured[key] = _measure(optimizer_class, defaults, spec)
        return float(measured[key].of(spec))

    return weigh


class _Footprint:
    """State bytes as a function of a shape; immutable once made.

    Args:
        probe: shape of the tensor that was stepped.
        entries: shape and bytes per element of each tensor in its state.
    """

    def __init__(self, probe: tuple[int, ...], entries: list[tuple[tuple[int, ...], int]]) -> None:
        self._per_element = sum(itemsize for shape, itemsize in entries if shape == probe)
        self._others = [
            ([probe.index(size) if size in probe[: len(_PROBE_SIZES)] else None for size in shape], shape, itemsize)
            for shape, itemsize in entries
            if shape != probe
        ]

    def of(self, spec: TensorSpec) -> int:
        total = self._per_element * spec.numel
        for dimensions, shape, itemsize in self._others:
            total += itemsize * math.prod(
                size if dimension is None else spec.shape[dimension]
                for dimension, size in zip(dimensions, shape, strict=True)
            )
        return total


def _measure(
    optimizer_class: Callable[..., torch.optim.Optimizer], defaults: dict[str, Any], spec: TensorSpec
) -> _Footprint:
    ndim = len(spec.shape)
    shape = (*_PROBE_SIZES[:ndim], *[1] * (ndim - len(_PROBE_SIZES)))
    try:
        probe = torch.zeros(shape, dtype=spec.dtype, device="cpu").requires_grad_()
        probe.grad = torch.ones_like(probe)
        optimizer = optimizer_class([probe], **defaults)
        optimizer.step()
    except Exception as error:
        name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        raise ValueError(
            f"the state of {name} could not be measured for {spec.name!r} on a {ndim}-dimensional {spec.dtype} tensor "
            f"on the CPU ({type(error).__name__}: {error}); use another cost, such as numel"
        ) from error
    entries = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    return _Footprint(shape, [(tuple(entry.shape), entry.element_size()) for entry in entries])
