"""What a tensor weighs when owners are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroshard_core.probe import Probed, probe
from zeroshard_core.spec import TensorSpec

Cost = Callable[[TensorSpec], float]
"""From a tensor to its weight: finite, not negative, in any unit. Frozen tensors do not count."""


def numel(spec: TensorSpec) -> float:
    """Weigh a tensor by its number of elements: the default, and right where all tensors have one dtype."""
    return spec.numel


def nbytes(spec: TensorSpec) -> float:
    """Weigh a tensor by its size in bytes."""
    return spec.nbytes


def state_bytes(optimizer_class: Callable[..., torch.optim.Optimizer], **defaults: Any) -> Cost:  # noqa: ANN401 - passed on
    """Weigh a tensor by the bytes of state that an optimizer holds for it, measured by :func:`probe`.

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
    known: Probed = {}

    def weigh(spec: TensorSpec) -> float:
        key = (spec.shape, spec.dtype)
        if key not in known:
            try:
                known.update(probe(optimizer_class, defaults, [spec]))
            except Exception as error:
                name = getattr(optimizer_class, "__name__", repr(optimizer_class))
                raise ValueError(
                    f"the state of {name} could not be measured for {spec.name!r} on a {len(spec.shape)}-dimensional "
                    f"{spec.dtype} tensor on the CPU ({type(error).__name__}: {error}); use another cost, such as numel"
                ) from error
        return float(sum(entry.nbytes for entry in known[key].values()))

    return weigh
