"""Which exchange serves a process group and a device: decided by what the backend can do, in this one place."""

from __future__ import annotations

import torch

from zeroshard_comm.collective import CollectiveExchange
from zeroshard_comm.exchange import Exchange
from zeroshard_comm.point_to_point import GlooExchange
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic


def choose_exchange(ranks: RankGroup, device: torch.device, traffic: Traffic | None = None) -> Exchange:
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
    _refuse_without_backend(ranks, device)
    return CollectiveExchange(ranks, traffic)


def choose_own_exchange(ranks: RankGroup, device: torch.device, traffic: Traffic | None = None) -> CollectiveExchange:
    """Make an exchange whose collectives never meet those that anybody else issues on ``ranks``. Collective.

    They travel on a group of the same ranks, with the same backend and timeout, that is made once per process group.

    Args:
        ranks: the group.
        device: where the buffers are.
        traffic: where bytes are counted.

    Raises:
        RuntimeError: if the group has no backend for this device type.
        ValueError: if such a group cannot be made.
    """
    _refuse_without_backend(ranks, device)
    if ranks.moves_data() and ranks.world_size > 1:
        ranks = ranks.private_group(ranks.backend(device.type), "buckets")
    return CollectiveExchange(ranks, traffic)


def _refuse_without_backend(ranks: RankGroup, device: torch.device) -> None:
    if ranks.moves_data() and not ranks.backend(device.type):
        raise RuntimeError(
            f"rank {ranks.rank}: the process group has no backend for tensors on {device.type!r}; initialise it with "
            f"one, e.g. init_process_group('cpu:gloo,cuda:nccl')"
        )
