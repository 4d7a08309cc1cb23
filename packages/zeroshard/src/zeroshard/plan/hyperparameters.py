"""Writes hyperparameters as text that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from zeroshard.plan.groups import MEMBERS


def settings_of(groups: Sequence[Mapping[str, Any]], *, first: int = 0, in_step: bool = False) -> dict[str, str]:
    """Write hyperparameters by :func:`to_text`: ``{"lr of group 0": "0.1"}``. ``first`` is the first group's number."""
    return {
        f"{key} of group {number}": to_text(value, in_step=in_step)
        for number, group in enumerate(groups, first)
        for key, value in group.items()
        if key not in MEMBERS
    }


def to_text(value: object, *, in_step: bool = False) -> str:
    """Write a value so that ranks can compare it: values with the same meaning give the same text."""
    # Other objects give only their type, because the text of two ranks' objects may differ. In a step, tensors and
    # containers of such values do so too, because reading a tensor may wait for a device.
    try:
        return _words(value, in_step)
    except TypeError:
        return type(value).__name__


def _words(value: Any, in_step: bool) -> str:  # noqa: ANN401 - a hyperparameter
    if isinstance(value, torch.Tensor) and not in_step:
        if value.numel() != 1 or value.device.type == "meta":
            return f"a tensor of shape {tuple(value.shape)}"
        value = value.item()
    elif hasattr(value, "tolist") and not isinstance(value, (torch.Tensor, type)):
        # Convert NumPy's scalars and arrays to Python's numbers and lists.
        value = value.tolist()
    if isinstance(value, float):
        # Write an integral float as an integer, because 0 and 0.0 mean the same.
        return repr(int(value)) if value.is_integer() else float.__repr__(value)
    if isinstance(value, (int, str, torch.dtype, type(None), Number)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join([_words(part, in_step) for part in value])})"
    if isinstance(value, Mapping):
        parts = [f"{_words(key, in_step)}: {_words(part, in_step)}" for key, part in value.items()]
        return f"{{{', '.join(sorted(parts))}}}"
    if in_step:
        raise TypeError
    return type(value).__name__
