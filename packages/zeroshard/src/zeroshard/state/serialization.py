"""Describes the entries of optimizer state as JSON and tensors, and sends them without pickle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from zeroshard_comm import Coordinator, Manifest, receive_values, send_values
from zeroshard_core import StateMapError, is_dense, storage_view

from zeroshard.local.shard import LocalShard
from zeroshard.state.placeholder import inner_tensors, leaves, map_leaves

MakeTensor = Callable[[torch.dtype, Sequence[int], Sequence[int] | None, str], torch.Tensor]
"""Makes a tensor of a dtype, a shape and strides (None: contiguous), given the device type of the described tensor."""

Key = str | int
Described = list[tuple[Key, Any]]
"""Pairs of key and entry, because JSON would turn integer keys of a dict into text."""

PLAIN = (bool, int, float, str, type(None))


def write_value(value: object, tensors: list[torch.Tensor], where: str) -> Any:  # noqa: ANN401 - JSON
    """Describe a state entry as JSON for :func:`read_value`, and append the tensors in it to ``tensors``."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor) and not inner_tensors(value):
        if value.layout is torch.sparse_coo:
            held = value.detach().coalesce()
            parts = [write_value(part, tensors, where) for part in (held.indices(), held.values())]
            return {"sparse": [list(value.shape), *parts]}
        if value.layout is not torch.strided:
            raise StateMapError(f"{where} is a {value.layout} tensor; only strided and sparse_coo tensors can be sent")
        tensors.append(value)
        stride = list(value.stride()) if is_dense(value) else None
        return {"tensor": [dtype_name(value), list(value.shape), stride, value.device.type]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [write_value(item, tensors, where) for item in value]}
    if isinstance(value, set) and all(isinstance(item, PLAIN) for item in value):
        return {"set": sorted(value, key=str)}
    if isinstance(value, dict) and all(map(is_key, value)):
        # A list of pairs, because JSON would turn integer keys into text.
        return {"dict": [[key, write_value(item, tensors, where)] for key, item in value.items()]}
    raise StateMapError(
        f"{where} is a {_kind(value)}, which cannot be sent without pickle; state may hold tensors, Python's "
        f"numbers, strings, None, sets of these, and lists, tuples and dicts, with strings or integers as keys"
    )


def _kind(value: object) -> str:
    """Return the name of a value's type, e.g. ``"numpy.float32"``; torch.typename would give a tensor's dtype."""
    return type(value).__name__ if isinstance(value, torch.Tensor) else torch.typename(value)


def is_key(key: object) -> bool:
    """Return True if :func:`write_value` supports ``key`` as a key of a dict."""
    return isinstance(key, (str, int)) and not isinstance(key, bool)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def read_value(written: Any, make: MakeTensor) -> Any:  # noqa: ANN401 - JSON in, a state entry out
    """Rebuild a state entry from its description. ``make`` returns each tensor in it, in order."""
    if isinstance(written, PLAIN):
        return written
    match written:
        case {"set": items}:
            return set(items)
        case {"tensor": [name, shape, stride, device]}:
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise StateMapError(f"damaged description of a state entry: no dtype {name!r}")
            return make(dtype, shape, stride, device)
        case {"sparse": [shape, *parts]}:
            indices, values = [read_value(part, make) for part in parts]
            # The values may not have arrived yet, so torch must not check their invariants.
            return torch.sparse_coo_tensor(
                indices, values, shape, device=indices.device, check_invariants=False, is_coalesced=True
            )
        case {"dict": entries}:
            return {key: read_value(item, make) for key, item in entries}
        case {"list": items}:
            return [read_value(item, make) for item in items]
        case {"tuple": items}:
            return tuple(read_value(item, make) for item in items)
    raise StateMapError(f"damaged description of a state entry: {written!r}")


def describe_entries(
    shard: LocalShard, entries: Mapping[Any, Any], name: str, tensors: list[torch.Tensor]
) -> Described:
    """Describe each entry of a shard: the value, or ``{"part": dtype}`` for a cut tensor's value per element."""
    described: Described = []
    if not isinstance(entries, Mapping):
        raise StateMapError(f"the state of {name!r} is a {type(entries).__name__}, not a dict")
    for key, value in entries.items():
        if not is_key(key):
            raise StateMapError(f"the state of {name!r} has the key {key!r}; only strings and integers can be saved")
        where = f"state entry {key!r} of {name!r}"
        if shard.is_cut and any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves(value)):
            tensors.append(_part_of(shard, value, where))
            described.append((key, {"part": dtype_name(value)}))
        else:
            described.append((key, write_value(value, tensors, where)))
    return described


def part_dtype(described: Any) -> str:  # noqa: ANN401 - JSON
    """Return the dtype of a part, from its description; ``""`` for the description of a whole entry."""
    return str(described.get("part", "")) if isinstance(described, dict) else ""


def _part_of(shard: LocalShard, value: object, where: str) -> torch.Tensor:
    """Return the state entry of a cut tensor's part, with the strides of the part, because ranks send its bytes."""
    part = shard.tensor
    if not isinstance(value, torch.Tensor) or inner_tensors(value) or value.shape != part.shape:
        raise StateMapError(
            f"{where} is not one tensor of shape {tuple(part.shape)}, the shape of this rank's part of the parameter, "
            f"so it is not elementwise and cannot be joined; use partition='whole' for this optimizer"
        )
    return value if value.stride() == part.stride() else torch.empty_like(part, dtype=value.dtype).copy_(value)


def copy_value(value: Any) -> Any:  # noqa: ANN401 - a state entry
    """Return a copy of a state entry, with copies of the tensors in it."""
    return map_leaves(value, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf))


def read_to_buffers(written: Any, buffers: list[torch.Tensor]) -> Any:  # noqa: ANN401 - as read_value
    """Rebuild a state entry with empty tensors on the CPU, and append a 1-D view of each to ``buffers``."""

    def make(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None, _: str) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if stride is not None:
            made = torch.empty_strided(tuple(shape), stride, dtype=dtype, device="cpu")
        buffers.append(storage_view(made))
        return made

    return read_value(written, make)


def send_value(coordinator: Coordinator, peer: int, value: object) -> None:
    """Send a value to a rank that calls :func:`receive_value`. Raise as :func:`write_value` before anything is sent."""
    tensors: list[torch.Tensor] = []
    description = write_value(value, tensors, "a value")
    send_values(coordinator, peer, Manifest(description, tensors), "the transfer of a value")


def receive_value(coordinator: Coordinator, peer: int) -> Any:  # noqa: ANN401 - as send_value
    """Receive the value that :func:`send_value` sends. Its tensors are on the CPU."""
    values, buffers = list[Any](), list[torch.Tensor]()

    def place(_: int, description: Any) -> list[torch.Tensor]:  # noqa: ANN401 - JSON
        values.append(read_to_buffers(description, buffers))
        return buffers

    receive_values(coordinator, peer, place, "the transfer of a value")
    return values[0]
