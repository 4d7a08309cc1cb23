"""Checks that ranks got parameters without names in the same order, by comparing their values.

A plan matches such parameters by position, so two of one shape that have changed places on a rank look right. Ranks may
hold other values until DistributedDataParallel sends them the first rank's, so values that differ prove nothing. The
same values in another order do.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import reduce
from operator import attrgetter, xor

import torch
from zeroshard_comm import Control
from zeroshard_core import TensorSpec, is_dense, storage_view

_kind_of = attrgetter(*[field.name for field in fields(TensorSpec) if field.name != "name"])
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**16
"""Elements that are multiplied by their weights at once, so that a sum needs little memory."""
_ODD = 0x1E3779B97F4A7C15


def read_order(control: Control, specs: Sequence[TensorSpec], params: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return checksums of parameters without names, by title, in the order in which this rank got them.

    Parameters without names are named by their position. Only those count that have the same shape, dtype and other
    properties as another one: the rest cannot be confused. A single rank reads none.
    """
    if control.alone:
        return {}
    kinds = {index: _kind_of(spec) for index, spec in enumerate(specs) if spec.name == f"param.{index}"}
    count = Counter(kinds.values())
    found = [index for index, kind in kinds.items() if count[kind] > 1]
    # Equal values of two kinds are two things.
    seeds = {kind: zlib.crc32(repr(kind).encode()) for kind in count}
    sums = map(xor, [seeds[kinds[index]] for index in found], checksums([params[index] for index in found]))
    titles = [f"tensor {index} {specs[index].name!r} of shape {specs[index].shape}" for index in found]
    return dict(zip(titles, sums, strict=True))


def check_order(control: Control, order: Mapping[str, int], operation: str) -> None:
    """Raise if all ranks hold the same values, but not in the same order. Collective, after they agree on the plan.

    Raises:
        DisagreementError: on every rank, naming two places and the ranks that differ.
        PeerLostError: if a rank is gone.
    """
    if not order:
        return
    sums, titles = list(order.values()), list(order)

    def explain(reference: str, other: str, reference_rank: int, other_rank: int) -> str:
        here, there = json.loads(reference), json.loads(other)
        moved = [place for place in range(len(sums)) if here[place] != there[place]]
        now = next(place for place in moved if there[place] == here[moved[0]])
        return (
            f"what is {titles[moved[0]]} on rank {reference_rank} is {titles[now]} on rank {other_rank}. Parameters "
            f"without names are matched by their order: hand them over in the same one, or by named_parameters()"
        )

    digests = [zlib.crc32(json.dumps(each).encode()) for each in (sorted(sums), sums)]
    values, orders = map(set, zip(*control.all_gather_ints(digests, operation), strict=True))
    if len(values) == 1 and len(orders) > 1:
        control.check_consistent(operation, digests[1], detail=lambda: json.dumps(sums), explain=explain)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number per tensor that is equal where tensors are bitwise equal, and differs, most likely, where not.

    Elements that change places count too. Tensors without gaps in memory are read as they lie there. For a
    tensor whose values cannot be read (on the meta device, quantized, or of a subclass), the number is 0.
    """
    weights: dict[torch.device, torch.Tensor] = {}

    def checksum(tensor: torch.Tensor) -> int:
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.is_quantized:
            return 0
        if tensor.layout is torch.sparse_coo:
            held = tensor.coalesce()
            return checksum(held.values()) + 3 * checksum(held.indices())
        if tensor.device not in weights:
            places = torch.arange(1, _CHUNK + 1, device=tensor.device) * _ODD
            weights[tensor.device] = (places ^ (places >> 29)) | 1
        flat = storage_view(tensor) if is_dense(tensor) else tensor.contiguous().view(-1)
        chunks = as_integers(flat).view(-1).split(_CHUNK)
        sums = [(chunk * weights[tensor.device][: len(chunk)]).sum() for chunk in chunks]
        return int(reduce(lambda total, part: total * 31 + part, sums))

    return [checksum(tensor.detach()) for tensor in tensors]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a dense tensor's elements as integers; of complex ones with one more dimension."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
