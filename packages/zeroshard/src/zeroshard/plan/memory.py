"""Where parameters lie in memory: each in one unbroken range of its own, which can be cut and sent."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from zeroshard_core import TensorSpec, is_dense

from zeroshard.plan.groups import label_of, parameters_of


def check_memory(groups: Sequence[Mapping[str, Any]], active: Sequence[bool]) -> None:
    """Raise if a parameter that a step may change has gaps in memory, or shares memory with another one.

    Args:
        groups: the public param groups.
        active: per parameter, whether a step may change it; the others may lie anywhere.

    Raises:
        ValueError: naming the parameter, or the two that share memory.
    """
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for index, param in enumerate(parameters_of(groups)):
        if not active[index]:
            continue
        if not is_dense(param):
            raise ValueError(
                f"{label_of(groups, index)}, of shape {tuple(param.shape)} and strides {param.stride()}, has gaps in "
                f"memory, or elements that share memory: call p.data = p.data.contiguous() first"
            )
        if param.is_conj() or param.is_neg():
            raise ValueError(
                f"{label_of(groups, index)}, of shape {tuple(param.shape)}, is a conjugate or negative view: call "
                f"p.data = p.data.resolve_conj().resolve_neg() first"
            )
        if param.device.type != "meta" and param.numel() > 0:
            start = param.data_ptr()
            by_device.setdefault(param.device, []).append((start, start + param.nbytes, index))
    for ranges in by_device.values():
        ranges.sort()
        # If any two ranges overlap, so do two that are neighbours by their starts.
        for (_, stop, one), (start, _, two) in itertools.pairwise(ranges):
            if start < stop:
                one, two = sorted((one, two))
                raise ValueError(
                    f"{label_of(groups, one)} and {label_of(groups, two)} share memory: use one Parameter in both "
                    f"places of the model, which then has one owner, or give one of them memory of its own"
                )


def same_place(old: TensorSpec, new: TensorSpec) -> bool:
    """Whether a tensor described by ``new`` fits where ``old`` lies."""
    return (old.shape, old.dtype, old.device, old.stride) == (new.shape, new.dtype, new.device, new.stride)
