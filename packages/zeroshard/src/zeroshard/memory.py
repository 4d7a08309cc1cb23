"""Where parameters lie in memory. Shared memory is refused, because two owners would update the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from zeroshard_core import is_dense

from zeroshard.param_groups import parameters_of, title_of


def lies_flat(param: torch.Tensor) -> bool:
    """Tell whether a parameter's values are one unbroken range of memory, which can be sent and cut.

    False for tensors with gaps or overlaps, conjugate views and negative views, whose memory differs from their values.
    """
    return is_dense(param) and not param.is_conj() and not param.is_neg()


def check_shared_memory(groups: Sequence[Mapping[str, Any]], active: Sequence[bool]) -> None:
    """Raise if elements of parameters share memory, which would be stepped twice.

    Parameters that lie in one storage without overlap, such as columns of one matrix, are allowed, and so are
    all parameters that no step may change; ``active`` tells which may be changed.

    Raises:
        ValueError: naming the two parameters, or the one whose own elements share memory.
    """
    params = parameters_of(groups)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for index, param in enumerate(params):
        if active[index] and param.layout is torch.strided and param.device.type != "meta" and param.numel() > 0:
            by_device.setdefault(param.device, []).append(_ranges(index, param))
    for ranges in by_device.values():
        starts, stops, indices = torch.cat(ranges, dim=1)
        order = starts.argsort()
        # If any two ranges overlap, so do two that are neighbours by their starts.
        meeting = (starts[order[1:]] < stops[order[:-1]]).nonzero()
        if len(meeting) == 0:
            continue
        one, two = sorted(indices[order[meeting[0, 0] :][:2]].tolist())
        if one != two:
            raise ValueError(
                f"{title_of(groups, one)} and {title_of(groups, two)} share memory: use one Parameter in both places "
                f"of the model, which then has one owner, or give one of them memory of its own"
            )
        raise ValueError(
            f"{title_of(groups, one)}, of shape {tuple(params[one].shape)} and strides {params[one].stride()}, has "
            f"elements that share memory, as those of an expanded tensor do: give each its own with clone() or "
            f"contiguous()"
        )


def _ranges(index: int, param: torch.Tensor) -> torch.Tensor:
    """The unbroken ranges of a parameter's memory, (3, ranges): first byte, byte after the last, and ``index``."""
    length, start = param.element_size(), param.data_ptr()
    if is_dense(param):
        return torch.tensor([[start], [start + param.numel() * length], [index]], device="cpu")
    starts = torch.tensor([start], device="cpu")
    for step, size in sorted(zip(param.stride(), param.shape, strict=True)):
        nbytes = step * param.element_size()
        if nbytes == length:
            length *= size
        elif size > 1:
            # For an expanded dimension, two repeats are enough to detect the overlap.
            repeats = torch.arange(size if step else 2, device="cpu") * nbytes
            starts = (starts[:, None] + repeats).view(-1)
    return torch.stack([starts, starts + length, torch.full_like(starts, index)])
