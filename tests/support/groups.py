"""Process groups with timeouts that end what hangs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def group_of(*ranks: int, seconds: float = 20) -> dist.ProcessGroup:
    """Make a group of these ranks, or of all."""
    return dist.new_group(list(ranks) or None, timeout=timedelta(seconds=seconds))
