"""Checks that ranks hold bitwise equal tensors.

Ranks exchange a digest of each tensor. Only the first tensor that differs is sent, to find the element that differs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def assert_replicas_equal(
    tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Assert that every rank of a group holds bitwise the same tensors. Collective: all ranks of the group call it.

    NaNs with equal bits are equal, and 0.0 differs from -0.0. Ranks compare SHA-256 digests. If one differs, each rank
    needs memory for two copies of that tensor.

    Args:
        tensors: Tensors of any dense dtype and device, in the same order on all ranks. A mapping, such as a state dict,
            may be passed: its keys are compared too, and name the tensors.
        group: The ranks to compare; all ranks by default.

    Raises:
        AssertionError: On every rank, with the same text, if the number of tensors, a name, shape or dtype, or a bit
            differs. It names the first tensor that differs, and the first rank whose tensor differs from the tensor of
            the group's first rank.
    """
    named = _named(tensors)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    records = _gathered([_record(*one) for one in named], group)
    for rank, record in zip(ranks, records, strict=True):
        if len(record) != len(records[0]):
            raise AssertionError(f"rank {rank} has {len(record)} tensors, rank {ranks[0]} has {len(records[0])}")
    for index, found in enumerate(zip(*records, strict=True)):
        for rank, (description, _) in zip(ranks, found, strict=True):
            if description != found[0][0]:
                texts = f"rank {rank} has tensor {description}; rank {ranks[0]} has tensor {found[0][0]}"
                raise AssertionError(f"tensor {index} differs: {texts}")
        for rank, (_, digest) in zip(ranks, found, strict=True):
            if digest != found[0][1]:
                raise AssertionError(_first_difference(*named[index], rank, ranks[0], group))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, flat and on the CPU. The result may be a view of it."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def coordinates(element: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of an element of a flattened tensor in the tensor."""
    return tuple(int(part) for part in torch.unravel_index(torch.tensor(element), shape))


def _named(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tensors, Mapping):
        return [(repr(name), tensor) for name, tensor in tensors.items()]
    return [(str(index), tensor) for index, tensor in enumerate(tensors)]


def _gathered(mine: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, sent as JSON: torch's own collectives of objects need numpy."""
    text = json.dumps(mine).encode()
    size = max(_all_gather(torch.tensor([len(text)]), group))
    padded = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8)
    return [json.loads(ctypes.string_at(one.data_ptr(), one.numel())) for one in _all_gather(padded, group)]


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    there = mine.to(_exchange_device(group))
    everyone = [torch.empty_like(there) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, there, group=group)
    return [one.cpu() for one in everyone]


def _exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _record(name: str, tensor: torch.Tensor) -> tuple[str, str]:
    """Return a tensor's description and the digest of its bits."""
    bits = bits_of(tensor)
    # This needs neither a copy nor numpy.
    content = (ctypes.c_char * bits.numel()).from_address(bits.data_ptr())
    return f"{name} of {tensor.dtype}, shape {tuple(tensor.shape)}", hashlib.sha256(content).hexdigest()


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
