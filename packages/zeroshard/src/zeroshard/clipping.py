"""Clipping of gradients of which every rank holds only a part."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from zeroshard_comm import agreed

from zeroshard._torch_private import foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from zeroshard.engine import Engine
    from zeroshard.grads.exchange import GradExchange


def clip_over_ranks(
    engine: Engine, exchange: GradExchange, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``. Collective.

    Arguments and result are as for :meth:`ZeroRedundancyOptimizer.clip_grad_norm_`. The host does not wait for an
    accelerator, unless ``error_if_nonfinite`` asks for the norm.
    """
    coordinator, first = engine.coordinator, engine.params[0]
    parts = torch.zeros(coordinator.ranks.world_size, dtype=torch.float64, device=first.device)
    with agreed(coordinator, "clip_grad_norm_()", _explain) as proposal:
        max_norm, norm_type = float(max_norm), float(norm_type)
        wanted = f"max_norm={max_norm}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}"
        proposal.digest, proposal.detail = zlib.crc32(wanted.encode()), lambda: wanted
        held = exchange.owned_gradients()
        if held:
            norms = torch.stack([norm.double() for norm in foreach_norm(held, norm_type)])
            parts[coordinator.ranks.rank] = torch.linalg.vector_norm(norms, norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(coordinator.combine_disjoint(parts, "clip_grad_norm_()"), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the {norm_type}-norm of all gradients is {float(total)}, so they cannot be clipped. Pass "
            f"error_if_nonfinite=False to scale them anyway"
        )
    # As torch: NaN stays, and spreads.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if first.device.type != "cpu" or float(scale) != 1.0:
        factor = float(scale) if first.device.type == "cpu" else scale
        if held:
            foreach_mul_(held, factor)
        exchange.operations.clipped(factor)
    return total.to(first.dtype)


def _explain(here: str, there: str, rank: int, other: int) -> str:
    return f"rank {rank} called it with {here}, rank {other} with {there}"
