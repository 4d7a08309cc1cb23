"""Checks that ranks hold the same tensors, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

# Fixed size on the wire, in bytes, of what one rank has to say about one tensor.
_TEXT_SIZE = 256
_NO_DIFFERENCE = -1


def assert_replicas_equal(
    tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Assert that every rank of a group holds bitwise the same tensors. Collective: all ranks of the group call it.

    NaNs with equal bits are equal, and 0.0 differs from -0.0. Each tensor is broadcast once, in full, so a rank needs
    room for a copy of its largest tensor.

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
    device = _exchange_device(group)
    counts = _gathered(torch.tensor([len(named)], device=device), group)
    for rank, count in zip(ranks, counts, strict=True):
        if count != counts[0]:
            raise AssertionError(f"rank {rank} has {count.item()} tensors, rank {ranks[0]} has {counts[0].item()}")
    if not named:
        return
    _compare_descriptions(named, ranks, device, group)
    _compare_bits(named, ranks, device, group)


def _named(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tensors, Mapping):
        return [(repr(name), tensor.detach()) for name, tensor in tensors.items()]
    return [(str(index), tensor.detach()) for index, tensor in enumerate(tensors)]


def _exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gathered(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [tensor.cpu() for tensor in everyone]


def _compare_descriptions(
    named: list[tuple[str, torch.Tensor]], ranks: list[int], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    texts = [f"{name} of {tensor.dtype}, shape {tuple(tensor.shape)}" for name, tensor in named]
    # The digest tells texts apart that are longer than what is shown of them.
    mine = torch.stack([torch.cat([_encoded(text), _digest(text)]) for text in texts])
    everyone = _gathered(mine.to(device), group)
    for index in range(len(named)):
        for rank, theirs in zip(ranks, everyone, strict=True):
            if not torch.equal(theirs[index], everyone[0][index]):
                raise AssertionError(
                    f"tensor {index} differs: rank {rank} has tensor {_decoded(theirs[index, :_TEXT_SIZE])}; "
                    f"rank {ranks[0]} has tensor {_decoded(everyone[0][index, :_TEXT_SIZE])}"
                )


def _compare_bits(
    named: list[tuple[str, torch.Tensor]], ranks: list[int], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    position, text = _NO_DIFFERENCE, ""
    for index, (name, tensor) in enumerate(named):
        mine = tensor.reshape(-1).contiguous()
        first = mine.to(device).clone()
        dist.broadcast(_bits(first), src=ranks[0], group=group)
        if position == _NO_DIFFERENCE:
            unequal = (_bits(first) != _bits(mine.to(device))).view(mine.numel(), -1).any(1) if mine.numel() else mine
            if unequal.any():
                element = int(unequal.nonzero()[0])
                position = index
                text = (
                    f"tensor {name} of shape {tuple(tensor.shape)} differs in {int(unequal.sum())} of {mine.numel()} "
                    f"elements, first at {_coordinates(element, tensor.shape)}: {{rank}} has {mine[element].item()!r}, "
                    f"{{first}} has {first[element].item()!r}"
                )
    positions = _gathered(torch.tensor([position], device=device), group)
    texts = _gathered(_encoded(text).to(device), group)
    found = [
        (int(place), rank, _decoded(words))
        for place, rank, words in zip(positions, ranks, texts, strict=True)
        if place != _NO_DIFFERENCE
    ]
    if found:
        _, rank, words = min(found)
        raise AssertionError(words.replace("{rank}", f"rank {rank}").replace("{first}", f"rank {ranks[0]}"))


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _coordinates(element: int, shape: torch.Size) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(shape):
        element, place = divmod(element, size)
        coordinates.append(place)
    return tuple(reversed(coordinates))


def _encoded(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()[:_TEXT_SIZE].ljust(_TEXT_SIZE, b"\0")), dtype=torch.uint8)


def _digest(text: str) -> torch.Tensor:
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def _decoded(words: torch.Tensor) -> str:
    return bytes(words.tolist()).rstrip(b"\0").decode(errors="replace")
