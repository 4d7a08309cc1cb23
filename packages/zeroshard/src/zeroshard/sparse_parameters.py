"""Sharing parameters that are sparse tensors: how many elements they have is known to their owner alone.

Such a parameter has no flat storage to view, belongs to one rank as a whole, and travels behind the dense ones: first
its count of elements, then their indices and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from zeroshard_comm import ParameterBroadcaster, Segment


@dataclass(frozen=True, eq=False)
class SparseParameter:
    """A parameter in COO layout and its owner."""

    owner: int
    param: torch.Tensor


def share_sparse(
    items: Sequence[SparseParameter], rank: int, make: Callable[[Sequence[Segment]], ParameterBroadcaster]
) -> None:
    """Bring every replica the owners' sparse parameters, coalesced. Collective.

    Args:
        items: the same parameters in the same order on every rank, on one device.
        rank: this rank.
        make: makes what moves segments on that device.

    Raises:
        PeerLostError: if a rank is gone.
    """
    if not items:
        return
    held = [item.param.detach().coalesce() for item in items]
    counts = [torch.tensor([tensor.indices().shape[1]], device=tensor.device) for tensor in held]
    make([Segment(item.owner, count) for item, count in zip(items, counts, strict=True)]).broadcast()
    segments: list[Segment] = []
    arriving: list[torch.Tensor] = []
    for item, tensor, count in zip(items, held, counts, strict=True):
        if item.owner != rank:
            tensor = _room(tensor, int(count))
        segments += [
            Segment(item.owner, part.contiguous().view(-1))
            for part in (tensor.indices(), tensor.values())
            if part.numel() > 0
        ]
        arriving.append(tensor)
    make(segments).broadcast()
    # Into the parameter itself: a detached sparse tensor takes new elements for itself alone.
    with torch.no_grad():
        for item, tensor in zip(items, arriving, strict=True):
            item.param.copy_(tensor)


def _room(like: torch.Tensor, count: int) -> torch.Tensor:
    """An uninitialised sparse tensor of the same shape with ``count`` elements."""
    indices = torch.empty(like.sparse_dim(), count, dtype=torch.int64, device=like.device)
    values = torch.empty(count, *like.shape[like.sparse_dim() :], dtype=like.dtype, device=like.device)
    # Invariants would be checked against indices that have not arrived yet.
    return torch.sparse_coo_tensor(
        indices, values, like.shape, device=like.device, check_invariants=False, is_coalesced=True
    )
