"""Sharing parameters that are sparse tensors: only their owner knows how many elements they have.

Such a parameter has no flat storage to view, belongs to one rank as a whole, and travels after the dense ones: first
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
        make: makes a broadcaster of segments on that device.

    Raises:
        PeerLostError: if a rank is gone.
    """
    if not items:
        return
    held = [item.param.detach().coalesce() for item in items]
    counts = [torch.tensor([tensor.indices().shape[1]], device=tensor.device) for tensor in held]
    make([Segment(item.owner, count) for item, count in zip(items, counts, strict=True)]).broadcast()
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    segments: list[Segment] = []
    for item, tensor, count in zip(items, held, counts, strict=True):
        indices, values = tensor.indices().contiguous(), tensor.values().contiguous()
        if item.owner != rank:
            indices = indices.new_empty(indices.shape[0], int(count))
            values = values.new_empty(int(count), *values.shape[1:])
        arriving.append((indices, values))
        segments += [Segment(item.owner, part.view(-1)) for part in (indices, values) if part.numel() > 0]
    make(segments).broadcast()
    # Into the parameter itself: new elements of a detached sparse tensor do not reach the parameter.
    with torch.no_grad():
        for item, (indices, values) in zip(items, arriving, strict=True):
            shape = item.param.shape
            item.param.copy_(torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True))
