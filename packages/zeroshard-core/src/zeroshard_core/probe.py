"""Measures which state an optimizer class keeps for a tensor, and how much its update allocates, by stepping it."""

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
"""Hyperparameters of torch's optimizers that choose the implementation of a step and do not change its state."""

_Factory = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class StateEntry:
    """One entry of the state of a tensor.

    Attributes:
        shape: the shape of a tensor; ``()`` for a number, None for any other value.
        dtype: the dtype of a tensor, else None.
        nbytes: the size of all tensors in it, including those that a quantized tensor or an object holds, in bytes.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None
    nbytes: int = 0


Probed = dict[tuple[tuple[int, ...], torch.dtype], dict[str, StateEntry]]
"""The entries of the state of a tensor, by the shape and dtype of the tensor."""


def probe(cls: _Factory, hyperparameters: Mapping[str, Any], tensors: Iterable[TensorSpec]) -> Probed:
    """Step an optimizer once for each distinct shape and dtype, with a gradient of ones, and return the state it keeps.

    It steps tensors on the meta device, which allocates nothing. If the class reads a value there, it gets 1, or False
    for a comparison; operators that only write values do not run. If the class raises there, a tensor of zeros on the
    CPU is stepped instead.

    >>> found = probe(torch.optim.Adam, {"lr": 0.1}, [TensorSpec("weight", (10, 4), torch.float32)])
    >>> found[(10, 4), torch.float32]["exp_avg"]
    StateEntry(shape=(10, 4), dtype=torch.float32, nbytes=160)

    Args:
        cls: an optimizer class, or a function that builds an optimizer from a list of parameters.
        hyperparameters: the keyword arguments of ``cls``. Those that only choose torch's implementation are ignored.
        tensors: the tensors to step.

    Raises:
        Exception: the error that the class raises for a tensor on the CPU.
    """
    kinds = {(spec.shape, spec.dtype): spec for spec in tensors}
    return {kind: _step(cls, hyperparameters, spec)[0] for kind, spec in kinds.items()}


def update_bytes(cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, *, foreach: bool = False) -> int:
    """Return the peak size of the temporaries of an update of a tensor, in bytes, without the state.

    >>> spec = TensorSpec("weight", (10, 4), torch.float32)
    >>> update_bytes(torch.optim.Adam, {}, spec), update_bytes(torch.optim.Adam, {}, spec, foreach=True)
    (320, 160)

    The arguments and errors are as for :func:`probe`. The tensor is stepped twice, because the first update allocates
    the state. With ``foreach``, an update works on all tensors at once, so that their temporaries add up.
    """
    return _step(cls, hyperparameters, spec, steps=2, foreach=foreach)[1]


def _step(
    cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, *, steps: int = 1, foreach: bool = False
) -> tuple[dict[str, StateEntry], int]:
    """Return the state after ``steps`` steps, and the peak of the temporaries of the last step, in bytes."""
    given = {key: value for key, value in hyperparameters.items() if key not in _IMPLEMENTATIONS}

    def on(device: str) -> tuple[dict[str, StateEntry], int]:
        with _Allocations() as mode:
            param = torch.zeros(spec.shape, dtype=spec.dtype, device=device).requires_grad_()
            param.grad = torch.ones(spec.shape, dtype=spec.dtype, device=device)
            optimizer = cls([param], **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
            for group in optimizer.param_groups:
                # The class, or the function that builds it, may have chosen an implementation itself.
                group.update({key: foreach and key == "foreach" for key in _IMPLEMENTATIONS & group.keys()})
            # Skip the hooks that users register for all optimizers: torch marks the wrapper that calls them.
            step: Any = type(optimizer).step
            step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
            for _ in range(steps):
                before = mode.highest = mode.now
                step(optimizer)
            return {key: _entry(value, param) for key, value in optimizer.state[param].items()}, mode.highest - before

    try:
        return on("meta")
    except Exception:  # noqa: BLE001 - the step on the CPU shows whether it is an error of the class
        return on("cpu")


def _entry(value: object, param: torch.Tensor) -> StateEntry:
    size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value, {id(param)}))
    if isinstance(value, torch.Tensor):
        return StateEntry(tuple(value.shape), value.dtype, size)
    return StateEntry(() if isinstance(value, (int, float)) else None, None, size)


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: in containers, in attributes of objects, and inside of tensor subclasses."""
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
    """Counts the bytes of tensors that operators return, and supplies values that meta tensors do not have."""

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
                    raise RuntimeError("the class keeps reading values, each of which is 1 on the meta device")
                return torch.ones((), dtype=args[0].dtype).item() if args[0].dtype != torch.bool else False
            if func in _QUESTIONS:
                return False
            if _writes_alone(func):
                # A kernel for meta tensors would only check shapes, which takes most of the time of a step.
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
    """Return True if an operator only writes values to its first argument."""
    name = str(func).split(".")[1]
    return name.endswith("_") and not name.endswith("__") and torch.Tag.inplace_view not in func.tags


_MOST_QUESTIONS = 10_000
_QUESTIONS = (torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
