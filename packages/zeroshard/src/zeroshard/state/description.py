"""The state of one shard as text and tensors, for consolidation and for the exchange of metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from zeroshard_core import StateMapError

from zeroshard.local.shard import LocalShard
from zeroshard.state.serialization import dtype_name, is_key, write_value

Key = str | int
Described = list[tuple[Key, Any]]
"""Entries by their keys, as pairs, since JSON would turn integers into text."""


def describe_entries(
    shard: LocalShard, entries: Mapping[Any, Any], name: str, tensors: list[torch.Tensor], *, leaves_objects: bool
) -> Described:
    """Describe the state of a shard as JSON, :func:`~zeroshard.state.serialization.write_value` of each entry.

    An entry with one value per element of a part of a tensor is ``{"part": dtype}``.

    Args:
        shard: what the state belongs to.
        entries: its state.
        name: of the parameter, for errors.
        tensors: receives the tensors, in the order of the description.
        leaves_objects: omit entries that hold objects that cannot be sent, instead of raising.

    Raises:
        StateMapError: if an entry can be neither sent nor joined to those of other parts.
    """
    described: Described = []
    if not isinstance(entries, Mapping):
        raise StateMapError(f"the state of {name!r} is a {type(entries).__name__}, not a dict")
    for key, value in entries.items():
        if not is_key(key):
            raise StateMapError(f"the state of {name!r} has the key {key!r}; only strings and integers can be saved")
        where, found = f"state entry {key!r} of {name!r}", list[torch.Tensor]()
        if shard.is_cut and isinstance(value, torch.Tensor) and value.dim() > 0:
            tensors.append(_laid_out_as(shard.tensor, value, where))
            described.append((key, {"part": dtype_name(value)}))
            continue
        try:
            described.append((key, write_value(value, found, where)))
        except StateMapError as error:
            if not leaves_objects:
                raise StateMapError(f"{error}. With objects='leave out' checkpoints omit such entries") from None
            continue
        tensors += found
    return described


def part_dtype(described: Any) -> str:  # noqa: ANN401 - JSON
    """Return the dtype of the whole entry of which a part was described, ``""`` if it was no part."""
    return str(described.get("part", "")) if isinstance(described, dict) else ""


def _laid_out_as(part: torch.Tensor, value: torch.Tensor, where: str) -> torch.Tensor:
    """The state of a part of a tensor, laid out in memory as the part is, since its bytes are sent."""
    if value.shape != part.shape:
        raise StateMapError(
            f"{where} has shape {tuple(value.shape)} for a part of shape {tuple(part.shape)}, so it is not elementwise "
            f"and cannot be joined; use partition='whole' for this optimizer"
        )
    return value if value.stride() == part.stride() else torch.empty_like(part, dtype=value.dtype).copy_(value)
