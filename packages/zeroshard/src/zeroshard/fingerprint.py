"""Numbers by which ranks see whether they hold the same values, without sending them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from zeroshard_core import is_dense, storage_view

from zeroshard._torch_private import sparse_indices, sparse_values

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**61 - 1
_CHUNK = 2**18
"""Elements that are multiplied by their weights at once, so that a sum needs little memory."""
_ODD = 0x1E3779B97F4A7C15


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


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number per tensor that is equal where tensors are bitwise equal, and differs, most likely, where not.

    Elements that change places count too. Tensors without gaps in memory are read as they lie there.

    Args:
        tensors: of any shapes and devices, dense or sparse.

    Returns:
        64-bit numbers, 0 for a tensor whose values cannot be read: on the meta device, quantized, or of a subclass.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    return [part or 0 for part in _read([_ordered_sum(tensor.detach(), weights) for tensor in tensors])]


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
    return _bits(tensor).sum(dtype=torch.int64)


def _ordered_sum(tensor: torch.Tensor, weights: dict[torch.device, torch.Tensor]) -> torch.Tensor | None:
    if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.is_quantized:
        return None
    if tensor.layout is torch.sparse_coo:
        held = tensor.coalesce()
        values, indices = (_ordered_sum(part, weights) for part in (held.values(), held.indices()))
        return values if values is None or indices is None else values + 3 * indices
    if tensor.device not in weights:
        places = torch.arange(1, _CHUNK + 1, device=tensor.device) * _ODD
        weights[tensor.device] = (places ^ (places >> 29)) | 1
    bits = _bits(storage_view(tensor) if is_dense(tensor) else tensor.contiguous()).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(_CHUNK):
        total = total * 31 + (chunk * weights[tensor.device][: len(chunk)]).sum()
    return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
