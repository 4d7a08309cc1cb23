"""The mean over all ranks in ascending rank order, with any owner, so that it does not depend on the plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard_comm._torch_private import foreach_add_, foreach_div_
from zeroshard_comm.process_group import RankGroup

Pieces = tuple[torch.Tensor, ...]


def mean_in_rank_order(
    ranks: RankGroup, own: Pieces, take: Callable[[int], torch.Tensor], release: Callable[[int], None]
) -> None:
    """Replace this rank's values by the mean over all ranks.

    Args:
        ranks: the group.
        own: this rank's values, 1-D tensors.
        take: returns the values of a peer, as many bytes in one tensor. Peers come in ascending order, and at most two
            are taken at a time.
        release: gives the memory of a peer's values back.
    """
    rank, world_size = ranks.rank, ranks.world_size
    # Scaling by a power of two is exact, so it can be done while adding.
    exact = world_size & (world_size - 1) == 0
    # Two terms can be added in either order: only from rank 2 on does their sum need memory of its own.
    total: Pieces | None = None
    _divide(own, world_size)
    for peer in range(world_size):
        if peer == rank:
            continue
        term = _cut(take(peer), own)
        if rank > 1 and peer < rank:
            _divide(term, world_size)
            if total is None:
                total = term
                continue
            foreach_add_(total, term)
            if peer == rank - 1:
                foreach_add_(own, total)
                release(0)
        elif exact:
            foreach_add_(own, term, alpha=1 / world_size)
        else:
            _divide(term, world_size)
            foreach_add_(own, term)
        release(peer)


def _divide(tensors: Pieces, world_size: int) -> None:
    # In bfloat16 a factor would be rounded before it is used, but the number of ranks is not.
    foreach_div_(tensors, world_size)


def _cut(values: torch.Tensor, like: Pieces) -> Pieces:
    flat = values.view(like[0].dtype)
    return (flat,) if len(like) == 1 else flat.split([piece.numel() for piece in like])
