"""The private names of torch that this package uses, each with its reason."""

from __future__ import annotations

import torch

try:
    # `probe` uses it to supply the values that meta tensors do not have, and to count allocations.
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode
    ATEN_ITEM = torch.ops.aten._local_scalar_dense.default
except (ImportError, AttributeError) as error:
    raise ImportError(f"torch {torch.__version__} lacks a name that zeroshard-core needs: {error}") from error
