"""Describes the allowed entries of optimizer state as JSON and tensors, and sends them without pickle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from zeroshard_comm import Coordinator, Manifest, receive_values, send_values
from zeroshard_core import StateMapError, is_dense

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
            raise StateMapError(f"{where} is a {value.layout} tensor; only strided and sparse_coo tensors can be moved")
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
        f"{where} is a {type(value).__name__}, which cannot be moved without pickle; state may hold tensors, numbers, "
        f"strings, None, sets of these, and lists, tuples and dicts, with strings or integers as keys"
    )


def is_key(key: object) -> bool:
    """Return True if a key of the state can be written."""
    return isinstance(key, (str, int)) and not isinstance(key, bool)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return text such as ``"float32"``."""
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
    """Describe a shard's state: the value, or ``{"part": dtype}`` if a cut tensor has a value per element."""
    described: Described = []
    if not isinstance(entries, Mapping):
        raise StateMapError(f"the state of {name!r} is a {type(entries).__name__}, not a dict")
    for key, value in entries.items():
        if not is_key(key):
            raise StateMapError(f"the state of {name!r} has the key {key!r}; only strings and integers can be saved")
        where = f"state entry {key!r} of {name!r}"
        if shard.is_cut and isinstance(value, torch.Tensor) and value.dim() > 0 and not inner_tensors(value):
            tensors.append(_laid_out_as(shard.tensor, value, where))
            described.append((key, {"part": dtype_name(value)}))
            continue
        if shard.is_cut and any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves(value)):
            raise StateMapError(
                f"{where} consists of several tensors, so it is not elementwise and cannot be joined; use "
                f"partition='whole' for this optimizer"
            )
        described.append((key, write_value(value, tensors, where)))
    return described


def part_dtype(described: Any) -> str:  # noqa: ANN401 - JSON
    """Return the dtype of a part, from its description; ``""`` for the description of a whole entry."""
    return str(described.get("part", "")) if isinstance(described, dict) else ""


def _laid_out_as(part: torch.Tensor, value: torch.Tensor, where: str) -> torch.Tensor:
    """Return the state of a part of a tensor with the part's strides, because ranks send its bytes."""
    if value.shape != part.shape:
        raise StateMapError(
            f"{where} has shape {tuple(value.shape)} for a part of shape {tuple(part.shape)}, so it is not elementwise "
            f"and cannot be joined; use partition='whole' for this optimizer"
        )
    return value if value.stride() == part.stride() else torch.empty_like(part, dtype=value.dtype).copy_(value)


def copy_value(value: Any) -> Any:  # noqa: ANN401 - a state entry
    """Copy a state entry and the tensors in it, so that the copy shares nothing with it."""
    return map_leaves(value, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf))


def send_value(coordinator: Coordinator, peer: int, value: object) -> None:
    """Send a value that :func:`write_value` accepts to a rank, which calls :func:`receive_value`.

    Raises:
        PeerLostError: if the rank is lost.
        StateMapError: if :func:`write_value` does not accept the value. Nothing is sent then.
    """
    tensors: list[torch.Tensor] = []
    description = write_value(value, tensors, "a value")
    sent = [tensor.detach().contiguous() for tensor in tensors]
    send_values(coordinator, peer, Manifest(description, sent), "sending a value")


def receive_value(coordinator: Coordinator, peer: int) -> Any:  # noqa: ANN401 - as send_value
    """Receive the value that :func:`send_value` sends. Its tensors are contiguous, on the CPU."""
    arriving: list[torch.Tensor] = []
    values: list[Any] = []

    def make(dtype: torch.dtype, shape: Sequence[int], *_: object) -> torch.Tensor:
        arriving.append(torch.empty(shape, dtype=dtype, device="cpu"))
        return arriving[-1]

    def place(_: int, description: Any) -> list[torch.Tensor]:  # noqa: ANN401 - JSON
        values.append(read_value(description, make))
        return [tensor.view(-1) for tensor in arriving]

    receive_values(coordinator, peer, place, "receiving a value")
    return values[0]
