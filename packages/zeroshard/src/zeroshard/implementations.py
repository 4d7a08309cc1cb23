"""Which of torch's ways to compute a step can be sharded: all but ``differentiable``, and some CUDA graphs.

``foreach``, ``fused``, ``capturable`` and ``maximize`` are passed on to the optimizer class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import optim
from zeroshard_comm import RankGroup


def check_differentiable(optimizer: optim.Optimizer) -> None:
    """Raise a ValueError if autograd is to pass through the steps of an optimizer."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__}(differentiable=True) cannot be sharded: autograd does not pass from "
            f"one rank to another. Leave it out, or use the optimizer unsharded"
        )


def check_capture(ranks: RankGroup, params: Sequence[torch.Tensor]) -> None:
    """Raise if a CUDA graph is being captured whose replay would not exchange anything.

    Args:
        ranks: that exchange parameters.
        params: the parameters.

    Raises:
        RuntimeError: with what to do.
    """
    if not is_captured(params) or ranks.world_size == 1:
        return
    backend = ranks.backend("cuda")
    if backend != "nccl":
        raise RuntimeError(
            f"step() of a sharded optimizer cannot be captured in a CUDA graph over the backend {backend or 'gloo'!r}: "
            f"values travel through the host, and a replay would leave that out. Use nccl, or capture forward and "
            f"backward alone, for example by torch.cuda.make_graphed_callables"
        )


def is_captured(params: Sequence[torch.Tensor]) -> bool:
    """Whether what is done to these parameters now is captured in a CUDA graph."""
    return bool(params) and params[0].is_cuda and torch.cuda.is_current_stream_capturing()
