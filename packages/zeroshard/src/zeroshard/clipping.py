"""Clips gradients of which every rank holds only a part."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from zeroshard_comm import Coordinator, agreed

from zeroshard._torch_private import foreach_mul_, foreach_norm


def clip_over_ranks(
    coordinator: Coordinator,
    owned_gradients: Callable[[], list[torch.Tensor]],
    first: torch.Tensor,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> tuple[torch.Tensor, float | torch.Tensor | None]:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``. Collective.

    The host does not wait for an accelerator, unless ``error_if_nonfinite`` asks for the norm. ``owned_gradients``
    returns this rank's parts of all gradients, or raises an error, which every rank raises. Returns the norm before
    clipping, in the dtype and on the device of the ``first`` parameter, and the factor, None if nothing was scaled.
    """
    parts = torch.zeros(coordinator.ranks.world_size, dtype=torch.float64, device=first.device)
    with agreed(coordinator, "clip_grad_norm_()", _explain) as proposal:
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} is not supported with a communication hook: pass a positive order")
        wanted = f"max_norm={max_norm}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}"
        proposal.digest, proposal.detail = zlib.crc32(wanted.encode()), lambda: wanted
        held = owned_gradients()
        if held:
            norms = torch.stack([norm.double() for norm in foreach_norm(held, norm_type)])
            parts[coordinator.ranks.rank] = torch.linalg.vector_norm(norms, norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(coordinator.combine_disjoint(parts, "clip_grad_norm_()"), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the {norm_type}-norm of all gradients is {float(total)}, so they cannot be clipped. Pass "
            f"error_if_nonfinite=False to scale them anyway"
        )
    # As in torch, NaN propagates.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if first.device.type == "cpu" and float(scale) == 1.0:
        return total.to(first.dtype), None
    factor = float(scale) if first.device.type == "cpu" else scale
    if held:
        foreach_mul_(held, factor)
    return total.to(first.dtype), factor


def _explain(here: str, there: str, rank: int, other: int) -> str:
    return f"rank {rank} called it with {here}, rank {other} with {there}"
