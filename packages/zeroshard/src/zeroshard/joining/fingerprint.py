"""Numbers by which ranks see whether they hold the same values, without sending them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard._torch_private import sparse_indices, sparse_values
from zeroshard.param_order import as_integers

_MODULUS = 2**61 - 1


def fingerprint(tensors: Sequence[torch.Tensor | None]) -> int:
    """Return a number that is equal where tensors are bitwise equal, and differs, most likely, where they are not.

    The elements' bits are added up as integers, tensor by tensor; that does not see elements that change places.

    Args:
        tensors: of any shapes and devices, dense or sparse; None counts as well.

    Returns:
        From 0 to 2**61 - 2.
    """
    total = 0
    for part in _read([None if tensor is None else _sum(tensor.detach()) for tensor in tensors]):
        total = (total * 31 + (1 if part is None else 2 + part)) % _MODULUS
    return total


def _read(parts: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Bring 0-dim tensors to the host, those of one device at once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        if part is not None:
            by_device.setdefault(part.device, []).append(part)
    values = {device: iter(torch.stack(found).tolist()) for device, found in by_device.items()}
    return [None if part is None else next(values[part.device]) for part in parts]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        return _sum(sparse_values(tensor)) + 3 * _sum(sparse_indices(tensor))
    return as_integers(tensor).sum(dtype=torch.int64)
