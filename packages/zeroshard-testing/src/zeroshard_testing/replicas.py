"""Checks that ranks hold the same tensors, to the bit.

Every rank tells the others a digest of each tensor; only the first tensor that differs is sent, to say where it does.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

# Bytes of what ranks tell of a tensor: its description, cut off, and each of two digests.
_TEXT = 256
_DIGEST = 32


def assert_replicas_equal(
    tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Assert that every rank of a group holds bitwise the same tensors. Collective: all ranks of the group call it.

    NaNs with equal bits are equal, and 0.0 differs from -0.0. Ranks compare SHA-256 digests; if one differs, a rank
    needs room for two copies of the tensor that it names.

    Args:
        tensors: Tensors of any dense dtype and device, in the same order on all ranks; of a mapping, such as a state
            dict, the keys are compared too and name the tensors.
        group: The ranks to compare, all by default.

    Raises:
        AssertionError: On every rank, with the same text, if anything differs: the number of tensors, a name, shape or
            dtype, or a bit. It names the first tensor that differs and the first rank that differs from the group's
            first in it.
    """
    named = _named(tensors)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    counts = _gathered(torch.tensor([len(named)]), group)
    for rank, count in zip(ranks, counts, strict=True):
        if count != counts[0]:
            raise AssertionError(f"rank {rank} has {count.item()} tensors, rank {ranks[0]} has {counts[0].item()}")
    if not named:
        return
    mine = torch.frombuffer(bytearray().join(_record(*one) for one in named), dtype=torch.uint8)
    records = _gathered(mine.view(len(named), -1), group)
    differs = records != records[0]
    if differs.any():
        index = int(differs.any(2).any(0).nonzero()[0])
        other_description = differs[:, index, :-_DIGEST].any(1)
        if other_description.any():
            slot = int(other_description.nonzero()[0])
            theirs, ours = (_text(records[place, index]) for place in (slot, 0))
            raise AssertionError(
                f"tensor {index} differs: rank {ranks[slot]} has tensor {theirs}; rank {ranks[0]} has tensor {ours}"
            )
        slot = int(differs[:, index].any(1).nonzero()[0])
        raise AssertionError(_first_difference(*named[index], ranks[slot], ranks[0], group))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, flat and on the CPU; perhaps a view of it."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def coordinates(element: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of an element of a flattened tensor in the tensor."""
    return tuple(int(part) for part in torch.unravel_index(torch.tensor(element), shape))


def _named(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tensors, Mapping):
        return [(repr(name), tensor) for name, tensor in tensors.items()]
    return [(str(index), tensor) for index, tensor in enumerate(tensors)]


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return what all ranks have, along a new first dimension."""
    there = mine.to(_exchange_device(group))
    everyone = [torch.empty_like(there) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, there, group=group)
    return torch.stack(everyone).cpu()


def _exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _record(name: str, tensor: torch.Tensor) -> bytes:
    """Return a tensor's description, cut to `_TEXT` bytes, its digest and the digest of its bits."""
    text = f"{name} of {tensor.dtype}, shape {tuple(tensor.shape)}".encode()
    bits = bits_of(tensor)
    # Without a copy, and without numpy.
    content = (ctypes.c_char * bits.numel()).from_address(bits.data_ptr())
    return text[:_TEXT].ljust(_TEXT, b"\0") + hashlib.sha256(text).digest() + hashlib.sha256(content).digest()


def _text(record: torch.Tensor) -> str:
    return bytes(record[:_TEXT].tolist()).rstrip(b"\0").decode(errors="replace")


def _first_difference(name: str, tensor: torch.Tensor, rank: int, first: int, group: dist.ProcessGroup | None) -> str:
    theirs, ours = (bits_of(tensor).to(_exchange_device(group), copy=True) for _ in range(2))
    dist.broadcast(theirs, src=rank, group=group)
    dist.broadcast(ours, src=first, group=group)
    unequal = (theirs != ours).view(tensor.numel(), -1).any(1)
    element = int(unequal.nonzero()[0])
    values = [bits.view(tensor.dtype)[element].item() for bits in (theirs, ours)]
    return (
        f"tensor {name} of shape {tuple(tensor.shape)} differs in {int(unequal.sum())} of {tensor.numel()} elements, "
        f"first at {coordinates(element, tensor.shape)}: rank {rank} has {values[0]!r}, rank {first} has {values[1]!r}"
    )
