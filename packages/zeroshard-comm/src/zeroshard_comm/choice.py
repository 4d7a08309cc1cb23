"""Which exchange serves a process group and a device: decided by what the backend can do, in this one place."""

from __future__ import annotations

import torch

from zeroshard_comm.collective import CollectiveExchange
from zeroshard_comm.exchange import Exchange
from zeroshard_comm.point_to_point import GlooExchange
from zeroshard_comm.ranks import RankGroup
from zeroshard_comm.traffic import Traffic


def exchange_for(ranks: RankGroup, device: torch.device, traffic: Traffic | None = None) -> Exchange:
    """Choose the fastest exchange that works for tensors on ``device``.

    Args:
        ranks: the group.
        device: where the buffers are.
        traffic: where bytes are counted.

    Returns:
        Broadcasts and direct sends where tagged point-to-point works (gloo on CPU), else collectives alone.

    Raises:
        RuntimeError: if the group has no backend for this device type.
    """
    if ranks.sends_tagged(device):
        return GlooExchange(ranks, traffic)
    if ranks.moves_data() and not ranks.backend(device.type):
        raise RuntimeError(
            f"rank {ranks.rank}: the process group has no backend for tensors on {device.type!r}; initialise it with "
            f"one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
    return CollectiveExchange(ranks, traffic)
