"""``isinstance(ours, torch.distributed.optim.ZeroRedundancyOptimizer)`` is true: frameworks ask that."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def register(kind: type) -> None:
    """Make a class a virtual subclass of torch's.

    To be called when the first optimizer is built, and not when the class is made: importing torch's takes most of a
    second, of what its first step would import anyway.
    """
    with warnings.catch_warnings():
        # Importing it warns, as it is going to leave torch.
        warnings.simplefilter("ignore")
        try:
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
        except ImportError:
            return
    TorchZero.register(kind)
