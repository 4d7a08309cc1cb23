"""Which state an optimizer class keeps for a tensor: found by stepping it once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard_core.spec import TensorSpec

_IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters of torch's optimizers that choose how a step is computed, and not what it keeps."""


_SMALL = (5, 7, 3, 11, 13)
"""Distinct sizes, so that an entry's sizes tell which of the tensor's dimensions they follow."""


@dataclass(frozen=True)
class StateEntry:
    """One entry of the state of a tensor.

    Attributes:
        shape: of a tensor; ``()`` for a number, and None for anything else.
        dtype: of a tensor; else None.
        nbytes: of a tensor; else 0.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None
    nbytes: int = 0


Probed = dict[tuple[tuple[int, ...], torch.dtype], dict[str, StateEntry]]
"""By shape and dtype of a tensor, the entries of its state."""


def probe(
    cls: Callable[..., torch.optim.Optimizer], hyperparameters: Mapping[str, Any], tensors: Iterable[TensorSpec]
) -> Probed:
    """Step an optimizer once for each distinct shape and dtype, with a gradient of ones, and return the state it keeps.

    On the meta device, where nothing is allocated; or, if the class refuses that, with a small tensor of zeros on the
    CPU. An entry of its state is then taken to follow the dimensions whose sizes it shares, the first five of them, or
    all if it has the tensor's own shape.

    >>> found = probe(torch.optim.Adam, {"lr": 0.1}, [TensorSpec("weight", (10, 4), torch.float32)])
    >>> found[(10, 4), torch.float32]["exp_avg"]
    StateEntry(shape=(10, 4), dtype=torch.float32, nbytes=160)

    Args:
        cls: an optimizer class, or a function that builds an optimizer from a list of parameters.
        hyperparameters: its keyword arguments. Those that only choose torch's implementation are left out.
        tensors: what to step.

    Raises:
        Exception: what the class raises on a tensor of the CPU.
    """
    found: Probed = {}
    arguments = {key: value for key, value in hyperparameters.items() if key not in _IMPLEMENTATIONS}
    for spec in tensors:
        if (spec.shape, spec.dtype) not in found:
            shape = spec.shape
            try:
                state = _stepped(cls, arguments, shape, spec.dtype, "meta")
            except Exception:  # noqa: BLE001 - whatever it is, a real tensor tells
                shape = (*_SMALL[: len(shape)], *[1] * (len(shape) - len(_SMALL)))
                state = _stepped(cls, arguments, shape, spec.dtype, "cpu")
            found[spec.shape, spec.dtype] = {key: _entry(value, shape, spec.shape) for key, value in state.items()}
    return found


def _stepped(
    cls: Callable[..., torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> Mapping[str, Any]:
    param = torch.zeros(shape, dtype=dtype, device=device).requires_grad_()
    param.grad = torch.ones_like(param)
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    optimizer = cls([param], **copied)
    for group in optimizer.param_groups:
        # Also where the class, or a function that builds it, has chosen one by itself.
        group.update(dict.fromkeys(_IMPLEMENTATIONS & group.keys(), False))
    # Without the hooks that users register for all optimizers: torch marks the wrapper that calls them.
    step: Callable[..., Any] = type(optimizer).step
    (getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step)(optimizer)
    state: Mapping[str, Any] = optimizer.state[param]
    return state


def _entry(value: object, stepped: tuple[int, ...], shape: tuple[int, ...]) -> StateEntry:
    if isinstance(value, torch.Tensor):
        sizes = dict(zip(stepped[: len(_SMALL)], shape, strict=False)) if stepped != shape else {}
        own = shape if value.shape == stepped else tuple(sizes.get(size, size) for size in value.shape)
        # A quantised tensor wraps others, which hold its bytes.
        flatten = getattr(type(value), "__tensor_flatten__", None)
        inner = [_entry(getattr(value, name), stepped, shape).nbytes for name in flatten(value)[0]] if flatten else []
        return StateEntry(own, value.dtype, sum(inner) if inner else math.prod(own) * value.element_size())
    return StateEntry(() if isinstance(value, (int, float)) else None)
