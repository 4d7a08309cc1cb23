"""Consolidated state on every rank, as a file that all of them read would bring it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from zeroshard import ZeroRedundancyOptimizer


def from_rank(value: Any, source: int) -> Any:
    """Bring a checkpoint to all ranks of the test, as a shared file would."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def saved_everywhere(sharded: ZeroRedundancyOptimizer, to: int = 0) -> dict[str, Any]:
    sharded.consolidate_state_dict(to=to)
    saved: dict[str, Any] = from_rank(sharded.state_dict() if sharded.rank == to else None, to)
    return saved
