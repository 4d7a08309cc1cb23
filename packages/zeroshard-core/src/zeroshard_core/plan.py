"""The plan: which rank owns which elements of which tensor. An immutable value, without a process group."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

from zeroshard_core.plan_difference import owner_difference, tensor_difference
from zeroshard_core.plan_json import PlanFields, canonical_bytes, read_json, write_json
from zeroshard_core.spec import Shard, TensorSpec

__all__ = ["Plan", "Shard", "TensorSpec"]


@dataclass(frozen=True)
class Plan:
    """Which rank owns which elements of which tensor.

    Every element has exactly one owner, and a rank owns at most one unbroken range of a tensor.

    >>> import torch
    >>> weight = TensorSpec("weight", (4,), torch.float32)
    >>> plan = Plan(2, (weight,), (Shard(0, 0, 3, 0), Shard(0, 3, 4, 1)), (3.0, 1.0))
    >>> plan.of_rank(1)
    (Shard(tensor=0, start=3, stop=4, rank=1),)
    >>> plan.imbalance
    1.5

    Attributes:
        world_size: number of ranks.
        tensors: what is owned; a tensor's index is its position here.
        shards: who owns it, sorted by ``(tensor, start)``.
        loads: cost per rank, as the partition counted it.
        heaviest: cost of the heaviest tensor that has one owner, as the partition counted it.

    Raises:
        ValueError: if an element has no owner or two, a rank is out of range or owns two ranges of one tensor, or a
            load is negative or not finite; the message names the tensor and the rank.
    """

    world_size: int
    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    loads: tuple[float, ...]
    heaviest: float = 0.0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"a plan needs at least one rank, but world_size is {self.world_size}")
        if len(self.loads) != self.world_size:
            raise ValueError(f"a plan for {self.world_size} ranks needs as many loads, but has {len(self.loads)}")
        for rank, load in enumerate(self.loads):
            if not 0 <= load < math.inf:
                raise ValueError(f"the load of rank {rank} should be finite and not negative, but is {load}")
        if not 0 <= self.heaviest < math.inf:
            raise ValueError(f"the heaviest cost should be finite and not negative, but is {self.heaviest}")
        _check_ownership(self.world_size, self.tensors, self.shards)

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Return what a rank owns, by tensor index.

        Raises:
            IndexError: if there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"there is no rank {rank}; the plan is for {self.world_size} ranks")
        return self._by_rank.get(rank, ())

    def of_tensor(self, tensor: int) -> tuple[Shard, ...]:
        """Return the shards of a tensor, in storage order; at least one.

        Raises:
            IndexError: if there is no such tensor.
        """
        if not 0 <= tensor < len(self.tensors):
            raise IndexError(f"there is no tensor {tensor}; the plan is for {len(self.tensors)} tensors")
        return self.shards[self._first[tensor] : self._first[tensor + 1]]

    def is_cut(self, tensor: int) -> bool:
        """Tell whether a tensor has several owners.

        Raises:
            IndexError: if there is no such tensor.
        """
        return len(self.of_tensor(tensor)) > 1

    @cached_property
    def imbalance(self) -> float:
        """The largest load over the mean load; 1.0 when nothing weighs anything."""
        mean = math.fsum(self.loads) / self.world_size
        return max(self.loads) / mean if mean > 0 else 1.0

    @cached_property
    def optimality_gap(self) -> float:
        """How far the largest load lies above a lower bound, as a fraction: largest load / lower bound - 1.

        The bound is the larger of the mean load, and the cost of the heaviest tensor that has one owner: some rank must
        hold at least the mean, and some rank must hold that tensor. So no other choice of owners for the same uncut
        tensors is better by more than this. 0.0 when nothing weighs anything. ``"whole"`` stays at or below 1 - 1/N on
        N ranks that started empty (R. L. Graham, Bounds for certain multiprocessing anomalies, 1966).
        """
        bound = max(math.fsum(self.loads) / self.world_size, self.heaviest)
        return max(0.0, max(self.loads) / bound - 1) if bound > 0 else 0.0

    def fingerprint(self) -> str:
        """Return 64 hex digits (SHA-256) that are equal for plans of equal world size, tensors and shards.

        Loads do not count: they follow from the cost, and change nothing about who owns what. The value depends on
        neither process, hash seed nor Python version.
        """
        return self._fingerprint

    def difference(self, other: Plan) -> str | None:
        """Describe the first difference, from this plan's point of view; ``None`` if the fingerprints are equal.

        The order of comparison is world size, tensors, owners.
        """
        if self.world_size != other.world_size:
            return f"world size {self.world_size} here, {other.world_size} there"
        return tensor_difference(self.tensors, other.tensors) or owner_difference(
            self.tensors, self.shards, other.shards
        )

    def to_json(self) -> str:
        """Return the plan as JSON text, which :meth:`from_json` reads back to an equal plan."""
        return write_json(PlanFields(self.world_size, self.tensors, self.shards, self.loads, self.heaviest))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from the text of :meth:`to_json`.

        Raises:
            ValueError: if the text is damaged, of another format or version, or describes no valid plan.
        """
        return Plan(*read_json(text))

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(canonical_bytes(self.world_size, self.tensors, self.shards)).hexdigest()

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Shard, ...]]:
        lists: dict[int, list[Shard]] = {}
        for shard in self.shards:
            lists.setdefault(shard.rank, []).append(shard)
        return {rank: tuple(shards) for rank, shards in lists.items()}

    @cached_property
    def _first(self) -> list[int]:
        """Per tensor, the position of its first shard; one more for the end."""
        first = [position for position, shard in enumerate(self.shards) if shard.start == 0]
        return [*first, len(self.shards)]


def _check_ownership(world_size: int, tensors: tuple[TensorSpec, ...], shards: tuple[Shard, ...]) -> None:
    position = 0
    for index, spec in enumerate(tensors):
        numel, reached = spec.numel, 0
        owners: set[int] = set()
        while True:
            shard = shards[position] if position < len(shards) else None
            if shard is None or shard.tensor != index or shard.start != reached:
                raise ValueError(_uncovered(index, spec, reached, shard))
            if not 0 <= shard.rank < world_size:
                raise ValueError(
                    f"tensor {index} {spec.name!r}: elements [{shard.start}, {shard.stop}) belong to rank "
                    f"{shard.rank}, but there are ranks 0 to {world_size - 1} only"
                )
            position += 1
            if shard.start == 0 and shard.stop == numel:
                break
            if shard.stop <= shard.start or shard.stop > numel:
                raise ValueError(
                    f"tensor {index} {spec.name!r} has {numel} elements, but rank {shard.rank} owns "
                    f"[{shard.start}, {shard.stop}) of it"
                )
            if shard.rank in owners:
                raise ValueError(
                    f"tensor {index} {spec.name!r}: rank {shard.rank} owns two ranges of it, the second "
                    f"[{shard.start}, {shard.stop}); a rank may own one unbroken range of a tensor"
                )
            owners.add(shard.rank)
            reached = shard.stop
            if reached == numel:
                break
    if position < len(shards):
        raise ValueError(_left_over(tensors, shards[position]))


def _uncovered(index: int, spec: TensorSpec, reached: int, shard: Shard | None) -> str:
    named = f"tensor {index} {spec.name!r} has {spec.numel} elements"
    if shard is not None and shard.tensor == index and shard.start < reached:
        return (
            f"{named}; rank {shard.rank} owns [{shard.start}, {shard.stop}) of it, although the elements before "
            f"{reached} have an owner already (shards must be sorted by tensor and start)"
        )
    if shard is not None and shard.tensor == index:
        return (
            f"{named}; those in [{reached}, {shard.start}) have no owner: the next shard is "
            f"[{shard.start}, {shard.stop}) of rank {shard.rank} (shards must be sorted by tensor and start)"
        )
    if shard is not None and shard.tensor < index:
        return (
            f"tensor {shard.tensor}: rank {shard.rank} owns [{shard.start}, {shard.stop}) of it beyond what is to be "
            f"owned (shards must be sorted by tensor and start)"
        )
    return f"{named}; those in [{reached}, {spec.numel}) have no owner"


def _left_over(tensors: tuple[TensorSpec, ...], shard: Shard) -> str:
    if not 0 <= shard.tensor < len(tensors):
        return f"rank {shard.rank} owns a shard of tensor {shard.tensor}, but there are {len(tensors)} tensors only"
    return (
        f"tensor {shard.tensor} {tensors[shard.tensor].name!r}: rank {shard.rank} owns [{shard.start}, {shard.stop}) "
        f"of it, which has an owner already"
    )
