"""Choosing owners: strategies that place tensors on ranks, and the plans that come of them.

Everything here is deterministic and depends on its arguments alone, so every rank computes the same plan by itself.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import MappingProxyType

from zeroshard_core.cost import Cost, numel
from zeroshard_core.plan import Plan
from zeroshard_core.spec import Shard, TensorSpec

Strategy = Callable[[Sequence[TensorSpec], Sequence[float], Cost], Iterable[Shard]]
"""From (tensors to place, loads so far per rank, cost) to shards; ``Shard.tensor`` is the position in the sequence."""

ALIGNMENT = 64
"""Tensors are cut at multiples of this many elements, so that vectorised kernels see whole vectors on every rank."""


def partition(
    tensors: Sequence[TensorSpec], world_size: int, *, strategy: str | Strategy = "whole", cost: Cost = numel
) -> Plan:
    """Choose an owner for every element of every tensor.

    >>> import torch
    >>> specs = [TensorSpec(name, (size,), torch.float32) for name, size in [("a", 3), ("b", 2), ("c", 2)]]
    >>> [shard.rank for shard in partition(specs, 2).shards]
    [0, 1, 1]

    Args:
        tensors: what to place.
        world_size: number of ranks.
        strategy: ``"whole"``, ``"split"``, ``"hybrid"`` (see the functions of these names), or a function.
        cost: what a tensor weighs; frozen tensors weigh nothing whatever it says. A part of a cut tensor weighs its
            share of the elements.

    Returns:
        The plan. It takes O(T log N) for T tensors on N ranks with ``"whole"``.

    Raises:
        ValueError: if ``world_size`` is less than 1, the strategy's name is unknown, a cost is negative or not finite,
            or the strategy's shards do not give every element exactly one owner.
        TypeError: if the strategy is neither a name nor a function, or one that does not return shards, or the cost is
            no function, or one that does not return numbers.
    """
    if world_size < 1:
        raise ValueError(f"a partition needs at least one rank, but world_size is {world_size}")
    specs = tuple(tensors)
    weight = _weight(cost)
    with _no_collections():
        return _plan(world_size, specs, _shards(strategy, specs, (0.0,) * world_size, weight), weight)


def repartition(
    plan: Plan,
    tensors: Sequence[TensorSpec],
    *,
    place: Collection[int],
    strategy: str | Strategy = "whole",
    cost: Cost = numel,
) -> Plan:
    """Place some tensors anew, on top of the loads of the others, which keep their owners.

    Args:
        plan: the plan so far.
        tensors: the new full list: the tensors of ``plan`` at their places, perhaps frozen, unfrozen or of another
            dtype, and more behind them.
        place: indices to place anew. Tensors beyond ``plan`` are placed whether named here or not.
        strategy: as for :func:`partition`; it sees the placed tensors alone, in order.
        cost: as for :func:`partition`.

    Returns:
        The plan for ``tensors``.

    Raises:
        TypeError: as :func:`partition`.
        ValueError: as :func:`partition`, or if tensors of ``plan`` are missing, or one that is to keep its owners has
            another number of elements.
        IndexError: if an index in ``place`` is out of range.
    """
    specs, known = tuple(tensors), len(plan.tensors)
    if len(specs) < known:
        raise ValueError(f"the plan has {known} tensors, but only {len(specs)} are given; tensors cannot be taken away")
    chosen = set(place)
    for index in chosen:
        if not 0 <= index < len(specs):
            raise IndexError(f"tensor {index} is to be placed, but there are {len(specs)} tensors")
    placed = [index for index in range(len(specs)) if index in chosen or index >= known]
    chosen.update(placed)
    for index, (before, now) in enumerate(zip(plan.tensors, specs, strict=False)):
        if index not in chosen and before.numel != now.numel:
            raise ValueError(
                f"tensor {index} {now.name!r} keeps its owners, but has {now.numel} elements instead of {before.numel}"
            )
    weight = _weight(cost)
    with _no_collections():
        kept = [shard for shard in plan.shards if shard.tensor not in chosen]
        loads = shard_loads(specs, kept, plan.world_size, weight)
        fresh = _shards(strategy, [specs[index] for index in placed], loads, weight)
        moved = [Shard(placed[_position(shard, placed)], shard.start, shard.stop, shard.rank) for shard in fresh]
        return _plan(plan.world_size, specs, [*kept, *moved], weight)


def whole(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[Shard]:
    """Give each tensor to one rank: the heaviest first, each to the rank with the least load so far.

    Param groups are placed one after the other, in order of first appearance; the sort is stable, and of several ranks
    with the least load the lowest is taken. Weighed by :func:`zeroshard_core.numel`, this gives the owners that
    ``torch.distributed.optim.ZeroRedundancyOptimizer`` chooses, for trainable tensors; with a heap instead of a scan of
    all ranks, in O(T log N). The rule is longest-processing-time-first (R. L. Graham, Bounds on multiprocessing timing
    anomalies, 1969).

    Args:
        tensors: what to place.
        loads: cost per rank so far.
        cost: what a tensor weighs.

    Returns:
        One shard per tensor.
    """
    groups: dict[int, list[int]] = {}
    for position, spec in enumerate(tensors):
        groups.setdefault(spec.group, []).append(position)
    weights = [cost(spec) for spec in tensors]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(tensors)
    for positions in groups.values():
        for position in sorted(positions, key=weights.__getitem__, reverse=True):
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + weights[position], rank))
            owners[position] = rank
    return [Shard(position, 0, spec.numel, owners[position]) for position, spec in enumerate(tensors)]


def split(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[Shard]:
    """Cut every tensor evenly, at multiples of :data:`ALIGNMENT` elements; for elementwise optimizers.

    Every rank gets one range of a cut tensor, in rank order; the ranges differ by at most ``ALIGNMENT`` elements. What
    the multiples leave over goes to the ranks with the least load so far, and among equals in rotation, so that no rank
    is always the larger. Tensors of fewer than ``ALIGNMENT`` x ranks elements are then dealt out whole: the heaviest
    first, each to the rank with the least load, and among equals to the one that was dealt the fewest, which is a
    rotation where tensors weigh the same.

    Args:
        tensors: what to place.
        loads: cost per rank so far.
        cost: what a tensor weighs.

    Returns:
        One shard per rank and cut tensor, and one per other tensor.
    """
    reached = list(loads)
    can_be_cut = [_can_be_cut(spec, len(loads)) for spec in tensors]
    shards = _cut([i for i, is_large in enumerate(can_be_cut) if is_large], tensors, reached, cost)
    heap = [(load, 0, rank) for rank, load in enumerate(reached)]
    heapq.heapify(heap)
    weights = {i: cost(tensors[i]) for i, is_large in enumerate(can_be_cut) if not is_large}
    for position in sorted(weights, key=weights.__getitem__, reverse=True):
        load, dealt, rank = heap[0]
        heapq.heapreplace(heap, (load + weights[position], dealt + 1, rank))
        shards.append(Shard(position, 0, tensors[position].numel, rank))
    return shards


def hybrid(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[Shard]:
    """Give each tensor to one rank, but cut those larger than a rank's fair share; for elementwise optimizers.

    A tensor is cut, as in :func:`split`, if the rank with the least load could not take it without going beyond the
    mean load of all ranks, everything counted: what they held before, and all of ``tensors``. So the fair share of the
    first tensor is the mean, and that of the others what the tensors cut before them left of it. The heaviest is asked
    first; the first that fits ends it, and the rest is placed as in :func:`whole`, on top of these loads. A tensor of
    fewer than ``ALIGNMENT`` x ranks elements is never cut.

    Args:
        tensors: what to place.
        loads: cost per rank so far.
        cost: what a tensor weighs.

    Returns:
        One shard per rank and cut tensor, and one per other tensor.
    """
    weights = [cost(spec) for spec in tensors]
    mean = (math.fsum(loads) + math.fsum(weights)) / len(loads)
    reached = list(loads)
    cut: set[int] = set()
    shards: list[Shard] = []
    for position in sorted(range(len(tensors)), key=weights.__getitem__, reverse=True):
        if min(reached) + weights[position] <= mean:
            break
        if _can_be_cut(tensors[position], len(loads)):
            shards += _cut([position], tensors, reached, cost, turn=len(cut))
            cut.add(position)
    rest = [position for position in range(len(tensors)) if position not in cut]
    for shard in whole([tensors[position] for position in rest], reached, cost):
        shards.append(Shard(rest[shard.tensor], shard.start, shard.stop, shard.rank))
    return shards


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"whole": whole, "split": split, "hybrid": hybrid})
"""The strategies that have names."""


def shard_loads(
    tensors: Sequence[TensorSpec], shards: Iterable[Shard], world_size: int, cost: Cost = numel
) -> tuple[float, ...]:
    """Count the cost that each rank bears; frozen tensors weigh nothing.

    Args:
        tensors: what the shards speak of.
        shards: who owns what. A shard weighs its share of the tensor's elements, or all of a tensor without elements.
        world_size: number of ranks.
        cost: what a tensor weighs.

    Returns:
        One load per rank.
    """
    loads = [0.0] * world_size
    for shard in shards:
        spec = tensors[shard.tensor]
        if spec.trainable:
            loads[shard.rank] += _share(cost(spec), shard.numel, spec.numel)
    return tuple(loads)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Put off cyclic garbage collection while many shards are made.

    They form no cycles, but 100,000 of them set off a full collection, which walks every object of the program and
    takes as long as all the rest. Reference counting goes on as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(world_size: int, specs: tuple[TensorSpec, ...], unordered: Iterable[Shard], weight: Cost) -> Plan:
    # Two stable sorts by one number each take less than one sort by pairs, which would have to be made.
    shards = tuple(sorted(sorted(unordered, key=attrgetter("start")), key=attrgetter("tensor")))
    weights = [weight(spec) for spec in specs]
    sizes = [spec.numel for spec in specs]
    loads, heaviest = [0.0] * world_size, 0.0
    for shard in shards:
        index, rank = shard.tensor, shard.rank
        # A strategy of the caller's may return anything; what is out of range is for the plan to refuse, in words.
        if 0 <= index < len(specs) and 0 <= rank < world_size:
            loads[rank] += _share(weights[index], shard.stop - shard.start, sizes[index])
            if shard.start == 0 and shard.stop == sizes[index] and weights[index] > heaviest:
                heaviest = float(weights[index])
    return Plan(world_size, specs, shards, tuple(loads), heaviest)


def _share(weight: float, part: int, size: int) -> float:
    return float(weight) if part == size or size == 0 else weight * part / size


def _weight(cost: Cost) -> Cost:
    if cost is numel:
        # The default needs no check, and is asked often.
        return lambda spec: spec.numel if spec.trainable else 0
    if not callable(cost):
        raise TypeError(f"the cost must be a function from a tensor's spec to a number, but is {_described(cost)}")

    def weight(spec: TensorSpec) -> float:
        if not spec.trainable:
            return 0.0
        weighed = cost(spec)
        try:
            is_weight = 0 <= weighed < math.inf
        except TypeError as error:
            raise TypeError(
                f"the cost of tensor {spec.name!r} should be a number, but is {_described(weighed)}"
            ) from error
        if not is_weight:
            raise ValueError(f"the cost of tensor {spec.name!r} should be finite and not negative, but is {weighed}")
        return weighed

    return weight


def _shards(
    strategy: str | Strategy, tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost
) -> Iterable[Shard]:
    """Ask a strategy, and make sure that one of the caller's own returns shards."""
    returned: object = _strategy(strategy)(tensors, loads, cost)
    name = getattr(strategy, "__name__", strategy)
    if not isinstance(returned, Iterable):
        raise TypeError(f"the strategy {name!r} should return Shards, but returned {_described(returned)}")
    shards = list(returned)
    if not isinstance(strategy, str):
        for shard in shards:
            if not isinstance(shard, Shard):
                raise TypeError(f"the strategy {name!r} should return Shards, but one of them is {_described(shard)}")
    return shards


def _described(value: object) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"


def _strategy(strategy: str | Strategy) -> Strategy:
    if not isinstance(strategy, str):
        if not callable(strategy):
            raise TypeError(
                f"a strategy must be one of {', '.join(map(repr, STRATEGIES))}, or a function, but is "
                f"{_described(strategy)}"
            )
        return strategy
    if strategy not in STRATEGIES:
        raise ValueError(
            f"unknown strategy {strategy!r}; choose one of {', '.join(map(repr, STRATEGIES))}, or a function"
        )
    return STRATEGIES[strategy]


def _position(shard: Shard, placed: Sequence[int]) -> int:
    if not 0 <= shard.tensor < len(placed):
        raise ValueError(f"the strategy placed tensor {shard.tensor}, but it was given {len(placed)} tensors")
    return shard.tensor


def _can_be_cut(spec: TensorSpec, world_size: int) -> bool:
    return world_size > 1 and spec.numel >= ALIGNMENT * world_size


def _cut(
    positions: Iterable[int], tensors: Sequence[TensorSpec], loads: list[float], cost: Cost, turn: int = 0
) -> list[Shard]:
    """Cut tensors evenly, adding their cost to ``loads`` in place; ``turn`` is the rank first in rotation."""
    world_size = len(loads)
    shards: list[Shard] = []
    for position in positions:
        spec = tensors[position]
        size, weight = spec.numel, cost(spec)
        multiples, tail = divmod(size, ALIGNMENT)
        least, left_over = divmod(multiples, world_size)
        # The last rank's range ends with the tensor, so the incomplete multiple is its own; with a whole one more it
        # would have too much.
        eligible = world_size - 1 if tail else world_size
        larger = set(
            heapq.nsmallest(left_over, range(eligible), key=lambda rank: (loads[rank], (rank - turn) % world_size))
        )
        turn = (turn + left_over) % world_size
        start = 0
        for rank in range(world_size):
            stop = size if rank == world_size - 1 else start + (least + (rank in larger)) * ALIGNMENT
            shards.append(Shard(position, start, stop, rank))
            loads[rank] += _share(weight, stop - start, size)
            start = stop
    return shards
