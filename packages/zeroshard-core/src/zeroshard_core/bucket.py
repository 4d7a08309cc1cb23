"""Bucket layouts: where whole tensors lie in flat buffers. Plain numbers, without data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from zeroshard_core.plan import Plan
from zeroshard_core.spec import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a whole tensor, by its index in the plan: ``numel`` elements from element ``offset`` of a bucket."""

    tensor: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The places of tensors of one dtype on one logical device, by offset, in a flat buffer of ``numel`` elements."""

    dtype: torch.dtype
    device: str
    slots: tuple[Slot, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Run:
    """The elements ``[start, stop)`` of a bucket, owned by a rank; ``is_part`` if their tensor has several owners."""

    rank: int
    start: int
    stop: int
    is_part: bool = False


def bucket_layouts(plan: Plan, *, tensors: Collection[int] | None = None) -> tuple[BucketLayout, ...]:
    """Lay out tensors in flat buffers, one per device and dtype, in the order in which these first appear.

    Slots are ordered by the rank that owns a tensor's first element, then by tensor index, so that whole tensors of one
    owner lie side by side. Every slot starts at a multiple of :data:`ALIGNMENT` elements.

    Args:
        plan: which rank owns which elements.
        tensors: indices of the tensors to lay out; all if ``None``.

    Returns:
        The layouts, each with at least one slot.

    Raises:
        IndexError: if the plan has no such tensor.
    """
    chosen = range(len(plan.tensors)) if tensors is None else sorted(set(tensors))
    kinds: dict[tuple[str, torch.dtype], list[tuple[int, int]]] = {}
    for index in chosen:
        owner = plan.of_tensor(index)[0].rank
        spec = plan.tensors[index]
        kinds.setdefault((spec.device, spec.dtype), []).append((owner, index))
    layouts: list[BucketLayout] = []
    for (device, dtype), members in kinds.items():
        slots, end = list[Slot](), 0
        for _, index in sorted(members):
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            slots.append(Slot(index, offset, plan.tensors[index].numel))
            end = offset + slots[-1].numel
        layouts.append(BucketLayout(dtype, device, tuple(slots), end))
    return tuple(layouts)
