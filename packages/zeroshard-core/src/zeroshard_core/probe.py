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
    found: Probed = {}
    for spec in tensors:
        if (spec.shape, spec.dtype) not in found:
            try:
                with _MetaMode():
                    entries = _stepped(cls, hyperparameters, spec, "meta")
            except Exception:  # noqa: BLE001 - whatever it is, a tensor with values tells
                entries = _stepped(cls, hyperparameters, spec, "cpu")
            found[spec.shape, spec.dtype] = entries
    return found


def update_bytes(cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, *, foreach: bool = False) -> int:
    """Return how many bytes an update of a tensor allocates, at the highest, beside state: its temporaries.

    >>> spec = TensorSpec("weight", (10, 4), torch.float32)
    >>> update_bytes(torch.optim.Adam, {}, spec), update_bytes(torch.optim.Adam, {}, spec, foreach=True)
    (320, 160)

    Args:
        cls: as for :func:`probe`; it must take tensors of the meta device.
        hyperparameters: as for :func:`probe`.
        spec: what to step, twice: the first update allocates the state.
        foreach: whether torch's optimizers update all tensors at a time, so that the temporaries of all add up.

    Raises:
        Exception: what the class raises on the meta device.
    """
    with _MetaMode() as mode:
        optimizer, _ = _built(cls, hyperparameters, spec, "meta", foreach=foreach)
        _step(optimizer)
        before: int = mode.now
        mode.highest = before
        _step(optimizer)
    return int(mode.highest) - before


def _stepped(cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, device: str) -> dict[str, StateEntry]:
    optimizer, param = _built(cls, hyperparameters, spec, device)
    _step(optimizer)
    return {key: _entry(value, param) for key, value in optimizer.state[param].items()}


def _built(
    cls: _Factory, hyperparameters: Mapping[str, Any], spec: TensorSpec, device: str, *, foreach: bool = False
) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    param = torch.zeros(spec.shape, dtype=spec.dtype, device=device).requires_grad_()
    param.grad = torch.ones(spec.shape, dtype=spec.dtype, device=device)
    given = {key: value for key, value in hyperparameters.items() if key not in _IMPLEMENTATIONS}
    optimizer = cls([param], **{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()})
    for group in optimizer.param_groups:
        # Also where the class, or a function that builds it, has chosen one by itself.
        group.update({key: foreach and key == "foreach" for key in _IMPLEMENTATIONS & group.keys()})
    return optimizer, param


def _step(optimizer: torch.optim.Optimizer) -> None:
    # Without the hooks that users register for all optimizers: torch marks the wrapper that calls them.
    step: Callable[..., Any] = type(optimizer).step
    (getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step)(optimizer)


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


class _MetaMode(DispatchMode):
    """Answers what is asked of values that meta tensors lack, and counts the bytes of tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.now = self.highest = 0
        self._asked = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        if func is ATEN_ITEM and args[0].is_meta:
            dtype = args[0].dtype
            self._asked += 1
            if self._asked > _MOST_QUESTIONS:
                raise RuntimeError("the class asks for values without end, and 1 is always the answer")
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func in _QUESTIONS and args[0].is_meta:
            return False
        if _writes_alone(func):
            # A kernel for meta tensors would check shapes, which is most of the time of a step.
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            if all(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in written):
                return None if written is args[0] else args[0]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self.now += storage.nbytes()
            self.highest = max(self.highest, self.now)
            weakref.finalize(storage, self._drop, id(storage), storage.nbytes())

    def _drop(self, key: int, nbytes: int) -> None:
        self._known.remove(key)
        self.now -= nbytes


@cache
def _writes_alone(func: Any) -> bool:  # noqa: ANN401 - an operator
    """Whether an operator writes values to its first argument and changes nothing else of it."""
    name = str(func).split(".")[1]
    resizes = torch.Tag.inplace_view in func.tags or name.startswith(("_resize", "resize"))
    return name.endswith("_") and not name.endswith("__") and not resizes


_MOST_QUESTIONS = 10_000
_QUESTIONS = (torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
