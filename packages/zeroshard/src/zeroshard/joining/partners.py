"""Which other joinables are in a context of torch's: torch does not tell a joinable, but its caller knows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_DEPTH = 4
"""Frames between a ``join_hook`` and the constructor of the context that asks for it, at most."""


def partners_in_torch() -> Sequence[Joinable]:
    """Return the joinables of the context of torch's that is being built by a caller, in its order.

    Returns:
        The list; empty if no caller builds one.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            break
        if frame.f_code is Join.__init__.__code__:
            found = frame.f_locals.get("joinables")
            return found if isinstance(found, (list, tuple)) else ()
    return ()


def refuse_before_model(joinables: Sequence[object], optimizer: Optimizer) -> None:
    """Raise if an optimizer comes before a model whose gradients it steps.

    Args:
        joinables: of a context, in its order.
        optimizer: one of them, or of another context.

    Raises:
        ValueError: saying so.
    """
    own = {param for group in optimizer.param_groups for param in group["params"]}
    behind = False
    for joinable in joinables:
        behind = behind or joinable is optimizer
        if behind and isinstance(joinable, DistributedDataParallel) and not own.isdisjoint(joinable.parameters()):
            raise ValueError(
                "the optimizer comes before its model in Join, so a rank without data would step before it has "
                "gradients: write Join([ddp, optimizer])"
            )
