"""``isinstance(ours, torch.distributed.optim.ZeroRedundancyOptimizer)`` is true: frameworks check this."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def register(kind: type) -> None:
    """Make a class a virtual subclass of torch's.

    Call it when the first optimizer is built, and not when the class is made: importing torch's class takes most of a
    second, for modules that the first step would import anyway.
    """
    with warnings.catch_warnings():
        # Importing it warns, because torch is going to remove it.
        warnings.simplefilter("ignore")
        try:
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
        except ImportError:
            return
    TorchZero.register(kind)
