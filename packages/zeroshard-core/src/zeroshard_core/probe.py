"""Which state an optimizer class keeps for a tensor, and what its update allocates: found by stepping it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from zeroshard_core._torch_private import ATEN_ITEM, DispatchMode
from zeroshard_core.spec import TensorSpec

_IMPLEMENTATIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Hyperparameters of torch's optimizers that choose how a step is computed, and not what it keeps."""

_Factory = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class StateEntry:
    """One entry of the state of a tensor.

    Attributes:
        shape: of a tensor; ``()`` for a number, and None for anything else.
        dtype: of a tensor; else None.
        nbytes: of all tensors in it, those that a quantised tensor or an object holds among them.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None
    nbytes: int = 0


Probed = dict[tuple[tuple[int, ...], torch.dtype], dict[str, StateEntry]]
"""By shape and dtype of a tensor, the entries of its state."""


def probe(cls: _Factory, hyperparameters: Mapping[str, Any], tensors: Iterable[TensorSpec]) -> Probed:
    """Step an optimizer once for each distinct shape and dtype, with a gradient of ones, and return the state it keeps.

    On the meta device, where nothing is allocated, and what is asked of a value is answered by 1, or by no; operators
    that only write values are left out, so that they do not check shapes. Or, if the class refuses that, with a tensor
    of zeros on the CPU, one shape after the other.

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
    kinds = {(spec.shape, spec.dtype): spec for spec in tensors}
    return {kind: _step(cls, hyperparameters, spec)[0] for kind, spec in kinds.items()}


def update_bytes(cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, *, foreach: bool = False) -> int:
    """Return how many bytes an update of a tensor allocates, at the highest, beside state: its temporaries.

    >>> spec = TensorSpec("weight", (10, 4), torch.float32)
    >>> update_bytes(torch.optim.Adam, {}, spec), update_bytes(torch.optim.Adam, {}, spec, foreach=True)
    (320, 160)

    Args:
        cls: as for :func:`probe`.
        hyperparameters: as there.
        spec: what to step, as there; twice, as the first update allocates the state.
        foreach: whether torch's optimizers update all tensors at a time, so that the temporaries of all add up.

    Raises:
        Exception: as :func:`probe`.
    """
    return _step(cls, hyperparameters, spec, steps=2, foreach=foreach)[1]


def _step(
    cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, *, steps: int = 1, foreach: bool = False
) -> tuple[dict[str, StateEntry], int]:
    """Return the state after so many steps, and what the last one allocated beside it at the highest."""
    given = {key: value for key, value in hyperparameters.items() if key not in _IMPLEMENTATIONS}

    def on(device: str) -> tuple[dict[str, StateEntry], int]:
        with _Allocations() as mode:
            param = torch.zeros(spec.shape, dtype=spec.dtype, device=device).requires_grad_()
            param.grad = torch.ones(spec.shape, dtype=spec.dtype, device=device)
            optimizer = cls([param], **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
            for group in optimizer.param_groups:
                # Also where the class, or a function that builds it, has chosen one by itself.
                group.update({key: foreach and key == "foreach" for key in _IMPLEMENTATIONS & group.keys()})
            # Without the hooks that users register for all optimizers: torch marks the wrapper that calls them.
            step: Any = type(optimizer).step
            step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
            for _ in range(steps):
                before = mode.highest = mode.now
                step(optimizer)
            return {key: _entry(value, param) for key, value in optimizer.state[param].items()}, mode.highest - before

    try:
        return on("meta")
    except Exception:  # noqa: BLE001 - whatever it is, a tensor with values tells
        return on("cpu")


def _entry(value: object, param: torch.Tensor) -> StateEntry:
    size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value, {id(param)}))
    if isinstance(value, torch.Tensor):
        return StateEntry(tuple(value.shape), value.dtype, size)
    return StateEntry(() if isinstance(value, (int, float)) else None, None, size)


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Find the tensors in a value: in containers, in the attributes of objects, and those that a tensor wraps."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[object] = getattr(value, "__dict__", {}).values()
    if isinstance(value, torch.Tensor):
        flatten = getattr(type(value), "__tensor_flatten__", None)
        if flatten is None:
            yield value
        inside = [getattr(value, name) for name in flatten(value)[0]] if flatten is not None else []
    elif isinstance(value, (Mapping, list, tuple, set)):
        inside = value.values() if isinstance(value, Mapping) else value
    for each in inside:
        yield from _tensors(each, seen)


class _Allocations(DispatchMode):
    """Counts the bytes of tensors that operators return, and answers what is asked of values that meta tensors lack."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.now = self.highest = self._asked = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        if written and all(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in written):
            if func is ATEN_ITEM:
                self._asked += 1
                if self._asked > _MOST_QUESTIONS:
                    raise RuntimeError("the class asks for values without end, and 1 is always the answer")
                return torch.ones((), dtype=args[0].dtype).item() if args[0].dtype != torch.bool else False
            if func in _QUESTIONS:
                return False
            if _writes_alone(func):
                # A kernel for meta tensors would check shapes, which is most of the time of a step.
                return None if written is args[0] else args[0]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self._known:
                self._add(id(storage), storage.nbytes())
                weakref.finalize(storage, self._add, id(storage), -storage.nbytes())
        return result

    def _add(self, key: int, nbytes: int) -> None:
        self._known ^= {key}
        self.now += nbytes
        self.highest = max(self.highest, self.now)


@cache
def _writes_alone(func: Any) -> bool:  # noqa: ANN401 - an operator
    """Whether an operator writes values to its first argument and changes nothing else of it."""
    name = str(func).split(".")[1]
    return name.endswith("_") and not name.endswith("__") and torch.Tag.inplace_view not in func.tags


_MOST_QUESTIONS = 10_000
_QUESTIONS = (torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
