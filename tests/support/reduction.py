"""Values to reduce, different on each rank, and the mean that the ranks must come to."""

from __future__ import annotations

import torch


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def mean(world_size: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Each rank's values divided, and added in ascending rank order."""
    scaled = [values_of(rank, numel, dtype).div_(world_size) for rank in range(world_size)]
    total = scaled[0]
    for term in scaled[1:]:
        total = total + term
    return total
