"""Resharding: what has to travel when one plan takes the place of another."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard_core.plan import Plan
from zeroshard_core.plan_difference import field_difference


@dataclass(frozen=True, slots=True)
class Move:
    """Rows ``start`` to ``stop`` of a tensor (see :class:`zeroshard_core.Shard`), and the ranks they go from and to.

    Attributes:
        tensor: index of the tensor. One without elements moves too, for its state.
        start: first row.
        stop: one past the last row.
        source: the owner in the old plan, a rank of the old world.
        target: the owner in the new plan, a rank of the new world.
    """

    tensor: int
    start: int
    stop: int
    source: int
    target: int


def moves(old: Plan, new: Plan) -> tuple[Move, ...]:
    """List what changes its owner: the smallest list, with ranges as long as they can be.

    >>> import torch
    >>> from zeroshard_core import TensorSpec, partition
    >>> specs = [TensorSpec("weight", (256, 1024), torch.float32)]
    >>> moves(partition(specs, 2, strategy="split"), partition(specs, 1))
    (Move(tensor=0, start=128, stop=256, source=1, target=0),)

    Args:
        old: who owns what now.
        new: who is to own it; its world size may differ.

    Returns:
        The moves, by tensor and start. What stays with its rank is not among them.

    Raises:
        ValueError: if the plans are for different numbers of tensors, or a tensor's shape, dtype or strides differ
            (rows could lie along another dimension). Names and all else may differ.
    """
    if len(old.tensors) != len(new.tensors):
        raise ValueError(f"the old plan is for {len(old.tensors)} tensors, the new one for {len(new.tensors)}")
    found: list[Move] = []
    for index, (before, after) in enumerate(zip(old.tensors, new.tensors, strict=True)):
        difference = field_difference(before, after, ("shape", "dtype", "stride"))
        if difference is not None:
            raise ValueError(
                f"tensor {index} {after.name!r} is not the same in both plans (old here, new there): {difference}"
            )
        sources, targets = list(old.of_tensor(index)), list(new.of_tensor(index))
        start, i, j = 0, 0, 0
        while i < len(sources) and j < len(targets):
            stop = min(sources[i].stop, targets[j].stop)
            if sources[i].rank != targets[j].rank:
                found.append(Move(index, start, stop, sources[i].rank, targets[j].rank))
            start = stop
            i, j = i + (sources[i].stop == stop), j + (targets[j].stop == stop)
    return tuple(found)
