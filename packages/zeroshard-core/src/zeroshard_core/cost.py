"""Cost models: the weight of a tensor when owners are chosen. They time nothing, so all ranks compute the same cost.

A FLOP-equivalent is the time of one operation of a matrix product. It is the unit of memory-bound updates, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard_core.probe import probe
from zeroshard_core.spec import TensorSpec

Cost = Callable[[TensorSpec], float]
"""A function that returns the weight of a tensor: finite, not negative, in any unit."""

_CALL = 1e6
"""Cost of calling an operator, in FLOP-equivalents: 5 us on a CPU that computes matrix products at 200 GFLOP/s."""


@dataclass(frozen=True)
class GroupCost:
    """The costs of the tensors of one param group, and whether the tensors may be cut.

    Attributes:
        name: the name of the optimizer class, for reports.
        work: the cost of updating a tensor, in FLOP-equivalents.
        state: the size of the optimizer state of a whole tensor, in bytes.
        elementwise: whether the update of an element depends on this element alone, so that tensors may be cut.
        is_assumed: whether the class is unknown, so that ``work`` is :func:`numel`.
    """

    name: str
    work: Cost
    state: Cost
    elementwise: bool
    is_assumed: bool = False


def numel(spec: TensorSpec) -> float:
    """Weigh a tensor by its number of elements. This is the default, and suits tensors of one dtype."""
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
        **defaults: the arguments of the class, as in ``optimizer_class(params, **defaults)``.

    Returns:
        The cost, in bytes. It raises ValueError for a tensor that the class cannot step. It is 0.0 for a class without
        state, such as plain SGD, which balances nothing: use :func:`numel` for such a class.
    """
    known: dict[tuple[tuple[int, ...], torch.dtype], float] = {}

    def weigh(spec: TensorSpec) -> float:
        key = (spec.shape, spec.dtype)
        if key not in known:
            try:
                known[key] = float(sum(e.nbytes for e in probe(optimizer_class, defaults, [spec])[key].values()))
            except Exception as error:
                name = getattr(optimizer_class, "__name__", repr(optimizer_class))
                kind = f"{len(spec.shape)}-dimensional {spec.dtype} tensor on the CPU ({type(error).__name__}: {error})"
                text = f"the state of {name} could not be measured for {spec.name!r} on a {kind}"
                raise ValueError(f"{text}; use another cost, such as numel") from error
        return known[key]

    return weigh


def adam(per_element: float = 800.0) -> Cost:
    """Weigh a tensor by the work of a memory-bound elementwise update, such as the update of AdamW.

    >>> adam(120)(TensorSpec("bias", (1000,), torch.float32))
    5120000.0

    Args:
        per_element: FLOP-equivalents per element. On CPUs we measured 600 to 1,000 for torch's default implementation
            and 100 to 140 with ``fused=True``, where :class:`torch.optim.Muon` reaches 190 GFLOP/s.

    Returns:
        The cost, in FLOP-equivalents. It includes 5e6 per tensor for calling the operators.
    """
    return lambda spec: per_element * spec.numel + 5 * _CALL


def newton_schulz(steps: int = 5) -> Cost:
    """Weigh a tensor by the work of orthogonalizing it by Newton-Schulz iterations, as Muon does.

    An iteration on a matrix X multiplies X X^T, its square, and their sum with X (K. Jordan and others, Muon, 2024).
    A 3-D tensor is a stack of matrices. A tensor of more dimensions is a convolution, flattened to (out, rest).

    >>> newton_schulz()(TensorSpec("weight", (100, 200), torch.float32))
    65000000.0

    Args:
        steps: number of iterations.

    Returns:
        The cost, steps x (2 s^2 (2 l + s) + 3e6) FLOP-equivalents for an l x s matrix, where s is the smaller size. The
        3e6 are for calling the operators.
    """

    def work(spec: TensorSpec) -> float:
        stack, rows = spec.shape[:2] if len(spec.shape) == 3 else (1, spec.shape[0] if spec.shape[1:] else 1)
        small, large = sorted((rows, spec.numel // max(1, stack * rows)))
        return steps * (stack * 2.0 * small**2 * (2 * large + small) + 3 * _CALL)

    return work


def cost_function(cost: Cost | Mapping[str, float]) -> Cost:
    """Return ``cost`` as a function. A dict gives the cost by tensor name, and must be equal on all ranks.

    >>> cost_function({"weight": 3.5})(TensorSpec("weight", (4,), torch.float32))
    3.5

    Returns:
        The function. It raises ValueError for a tensor that the dict does not have.
    """
    if not isinstance(cost, Mapping):
        return cost

    def weigh(spec: TensorSpec) -> float:
        if spec.name not in cost:
            raise ValueError(f"the dict of costs has no tensor {spec.name!r}")
        return cost[spec.name]

    return weigh
