"""Which optimizers can be chosen, and with which partition."""

from __future__ import annotations

import difflib

import torch
from errors import InputError
from zeroshard import ELEMENTWISE

PARTITIONS = ("whole", "split", "hybrid")

_REFUSED = {
    "LBFGS": "LBFGS cannot be sharded: its direction and line search couple all parameters",
    "SparseAdam": "SparseAdam takes sparse gradients alone, and this model has none",
}


def optimizer_names() -> list[str]:
    """Return the names of all classes of ``torch.optim`` that can be chosen."""
    found = vars(torch.optim).items()
    return sorted(
        name
        for name, value in found
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in _REFUSED
    )


def check_optimizer(name: str, partition: str) -> None:
    """Raise if an optimizer cannot be chosen, or not with this partition.

    Raises:
        InputError: naming what can be chosen instead.
    """
    names = optimizer_names()
    if name in _REFUSED:
        raise InputError(f"{_REFUSED[name]}; choose one of {', '.join(names)}")
    if name not in names:
        by_lower = {known.lower(): known for known in names}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1)
        meant = f" (did you mean {by_lower[close[0]]!r}?)" if close else ""
        raise InputError(f"torch.optim has no optimizer {name!r}{meant}; choose one of {', '.join(names)}")
    check_partition(name, partition)


def check_partition(name: str, partition: str) -> None:
    """Raise if there is no such partition, or if it cuts tensors that this optimizer must see whole.

    Raises:
        InputError: naming what can be chosen instead.
    """
    if partition not in PARTITIONS:
        raise InputError(f"there is no partition {partition!r}; choose one of {', '.join(PARTITIONS)}")
    if partition != "whole" and getattr(torch.optim, name) not in ELEMENTWISE:
        raise InputError(
            f"--partition {partition} cuts tensors, but {name} looks at a whole tensor to update one element; "
            f"choose --partition whole"
        )
