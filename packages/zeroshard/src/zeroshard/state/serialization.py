"""Optimizer state as JSON and tensors: what a state entry may be, and how it is written without pickle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from zeroshard_core import StateMapError, is_dense

_PLAIN = (bool, int, float, str, type(None))


def write_value(value: object, tensors: list[torch.Tensor], where: str) -> Any:  # noqa: ANN401 - JSON
    """Describe a state entry as JSON; tensors in it are appended to ``tensors`` and described by dtype and shape.

    Args:
        value: tensors, numbers, strings, None, and lists, tuples and string-keyed dicts of these.
        tensors: receives the tensors, in the order of the description.
        where: names the entry in errors.

    Returns:
        What :func:`read_value` reads.

    Raises:
        StateMapError: for anything else.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            held = value.detach().coalesce()
            parts = [write_value(part, tensors, where) for part in (held.indices(), held.values())]
            return {"sparse": [list(value.shape), *parts]}
        if value.layout is not torch.strided:
            raise StateMapError(f"{where} is a {value.layout} tensor; only strided and sparse_coo tensors can be moved")
        tensors.append(value)
        stride = list(value.stride()) if is_dense(value) else None
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), stride]}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [write_value(item, tensors, where) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: write_value(item, tensors, where) for key, item in value.items()}}
    raise StateMapError(
        f"{where} is a {type(value).__name__}, which cannot be moved without pickle; state may hold tensors, numbers, "
        f"strings, None, and lists, tuples and string-keyed dicts of these"
    )


def read_value(written: Any, make: Callable[[torch.dtype, Sequence[int], Sequence[int] | None], torch.Tensor]) -> Any:  # noqa: ANN401 - JSON in, a state entry out
    """Rebuild a state entry from its description.

    Args:
        written: what :func:`write_value` returned.
        make: called for each tensor, in order, with dtype, shape and strides (None: contiguous).

    Returns:
        The entry, with the tensors that ``make`` returned.

    Raises:
        StateMapError: if the description is damaged.
    """
    if isinstance(written, _PLAIN):
        return written
    if not isinstance(written, dict) or len(written) != 1:
        raise StateMapError(f"damaged description of a state entry: {written!r}")
    ((kind, body),) = written.items()
    if kind == "tensor":
        name, shape, stride = body
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise StateMapError(f"damaged description of a state entry: no dtype {name!r}")
        return make(dtype, shape, stride)
    if kind == "sparse":
        shape, indices, values = body
        # The parts may not have arrived yet, so their invariants cannot be checked.
        where, what = read_value(indices, make), read_value(values, make)
        return torch.sparse_coo_tensor(
            where, what, shape, device=where.device, check_invariants=False, is_coalesced=True
        )
    if kind == "dict":
        return {key: read_value(item, make) for key, item in body.items()}
    if kind in ("list", "tuple"):
        items = [read_value(item, make) for item in body]
        return items if kind == "list" else tuple(items)
    raise StateMapError(f"damaged description of a state entry: {kind!r}")


def copy_value(value: Any) -> Any:  # noqa: ANN401 - a state entry
    """Copy a state entry, tensors included, so that nothing is shared with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copy_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_value(item) for item in value]
    if isinstance(value, tuple):
        return tuple(copy_value(item) for item in value)
    return value
