"""Choosing owners: strategies that place tensors on ranks, and the resulting plans.

Everything here is deterministic and depends only on its arguments, so every rank computes the same plan by itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from zeroshard_core.cost import Cost, numel
from zeroshard_core.plan import Plan, cuts
from zeroshard_core.spec import TensorSpec

Owners = tuple[int, ...]
"""The ranks that own a tensor, in the order of their rows: one of them, or as many as it is cut into parts."""

Strategy = Callable[[Sequence[TensorSpec], Sequence[float], Cost], Sequence[Owners]]
"""A function of (tensors to place, loads so far per rank, cost) that returns the owners of each of these tensors."""

SMALLEST_PART = 16_384
"""``split`` and ``hybrid`` make no part of fewer elements: it would cost more in calls than it evens out."""


def partition(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    strategy: str | Strategy = "whole",
    cost: Cost = numel,
    smallest_part: int = SMALLEST_PART,
) -> Plan:
    """Choose an owner for every element of every tensor.

    >>> import torch
    >>> specs = [TensorSpec(name, (size,), torch.float32) for name, size in [("a", 3), ("b", 2), ("c", 2)]]
    >>> partition(specs, 2).owners
    ((0,), (1,), (1,))

    Args:
        tensors: what to place.
        world_size: number of ranks.
        strategy: ``"whole"``, ``"split"``, ``"hybrid"`` (see the functions of these names), or a function.
        cost: what a tensor weighs; frozen tensors do not count. A part of a cut tensor weighs its
            share of the elements.
        smallest_part: least number of elements of a part of a cut tensor, for ``"split"`` and ``"hybrid"``.

    Returns:
        The plan. It takes O(T log N) for T tensors on N ranks with ``"whole"``.

    Raises:
        ValueError: if ``world_size`` or ``smallest_part`` is less than 1, the strategy's name is unknown, a cost is
            negative or not finite, or the strategy's owners make no valid plan.
        TypeError: if the strategy is neither a name nor a function, or one that does not return a sequence of ranks for
            each tensor, or the cost is no function, or one that does not return numbers.
    """
    if world_size < 1:
        raise ValueError(f"a partition needs at least one rank, but world_size is {world_size}")
    specs = tuple(tensors)
    weight = _weight(cost)
    return _plan(world_size, specs, _placed(strategy, specs, (0.0,) * world_size, weight, smallest_part), weight)


def repartition(
    plan: Plan,
    tensors: Sequence[TensorSpec],
    *,
    place: Collection[int],
    strategy: str | Strategy = "whole",
    cost: Cost = numel,
    smallest_part: int = SMALLEST_PART,
) -> Plan:
    """Place some tensors again, on top of the loads of the others, which keep their owners.

    Args:
        plan: the plan so far.
        tensors: the new full list: the tensors of ``plan`` at their places, perhaps frozen, unfrozen or of another
            dtype, and more after them.
        place: indices to place again. Tensors beyond ``plan`` are placed whether named here or not.
        strategy: as for :func:`partition`; it sees only the tensors to place, in order.
        cost: as for :func:`partition`.
        smallest_part: as for :func:`partition`.

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
    chosen = {*place, *range(known, len(specs))}
    for index in chosen:
        if not 0 <= index < len(specs):
            raise IndexError(f"tensor {index} is to be placed, but there are {len(specs)} tensors")
    for index, (before, now) in enumerate(zip(plan.tensors, specs, strict=False)):
        if index not in chosen and before.numel != now.numel:
            raise ValueError(
                f"tensor {index} {now.name!r} keeps its owners, but has {now.numel} elements instead of {before.numel}"
            )
    weight = _weight(cost)
    owners = [() if index in chosen else ranks for index, ranks in enumerate(plan.owners)] + [()] * (len(specs) - known)
    placed = sorted(chosen)
    loads = _loads(specs, owners, plan.world_size, weight)
    found = _placed(strategy, [specs[index] for index in placed], loads, weight, smallest_part)
    for index, ranks in zip(placed, found, strict=True):
        owners[index] = ranks
    return _plan(plan.world_size, specs, owners, weight)


def whole(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[Owners]:
    """Give each tensor to one rank: the heaviest first, each to the rank with the least load so far.

    Param groups are placed one after the other, in order of first appearance; the sort is stable, and among ranks
    with equal loads the lowest is chosen. Weighed by :func:`zeroshard_core.numel`, this gives the owners that
    ``torch.distributed.optim.ZeroRedundancyOptimizer`` chooses, for trainable tensors; with a heap instead of a scan of
    all ranks, in O(T log N). The rule is longest-processing-time-first (R. L. Graham, Bounds on multiprocessing timing
    anomalies, 1969).

    Args:
        tensors: what to place.
        loads: cost per rank so far.
        cost: what a tensor weighs.

    Returns:
        One owner for each tensor.
    """
    groups: dict[int, list[int]] = {}
    for position, spec in enumerate(tensors):
        groups.setdefault(spec.group, []).append(position)
    weights = [cost(spec) for spec in tensors]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: list[Owners] = [()] * len(tensors)
    for positions in groups.values():
        for position in sorted(positions, key=weights.__getitem__, reverse=True):
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + weights[position], rank))
            owners[position] = (rank,)
    return owners


def split(
    tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost, *, smallest_part: int = SMALLEST_PART
) -> list[Owners]:
    """Cut every tensor that is large enough, between rows, in the order given; for elementwise optimizers.

    A tensor is cut into ``min(N, rows // ceil(smallest_part / elements of a row))`` parts, at least one, for that many
    of the N ranks: those with the least load so far, of which the least loaded gets the largest part. (Where a row is
    no multiple of :data:`zeroshard_core.ALIGNMENT` elements, as many rows as are stand for one.) In the order of the
    parameters, so that the ranks share every bucket of DistributedDataParallel evenly.

    Args:
        tensors: what to place.
        loads: cost per rank so far.
        cost: what a tensor weighs.
        smallest_part: least number of elements of a part of a cut tensor.

    Returns:
        The owners of each tensor.

    Raises:
        ValueError: if ``smallest_part`` is less than 1.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    return [_deal(spec, heap, cost(spec), _parts(spec, len(loads), smallest_part)) for spec in tensors]


def hybrid(
    tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost, *, smallest_part: int = SMALLEST_PART
) -> list[Owners]:
    """Give each tensor to one rank, but cut those larger than a rank's fair share; for elementwise optimizers.

    A tensor is cut, as in :func:`split`, if the rank with the least load could not take it without going beyond the
    mean load of all ranks, everything counted: what they held before, and all of ``tensors``. So the fair share of the
    first tensor is the mean, and the share of each later one is what the tensors cut before it left of the mean. The
    heaviest is asked first; the first that fits ends it, and the rest is placed as in :func:`whole`, on top of these
    loads.

    Args:
        tensors: what to place.
        loads: cost per rank so far.
        cost: what a tensor weighs.
        smallest_part: as for :func:`split`.

    Returns:
        The owners of each tensor.
    """
    weights = [cost(spec) for spec in tensors]
    mean = (math.fsum(loads) + math.fsum(weights)) / len(loads)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: list[Owners] = [()] * len(tensors)
    for position in sorted(range(len(tensors)), key=weights.__getitem__, reverse=True):
        if heap[0][0] + weights[position] <= mean:
            break
        parts = _parts(tensors[position], len(loads), smallest_part)
        if parts > 1:
            owners[position] = _deal(tensors[position], heap, weights[position], parts)
    rest = [position for position, ranks in enumerate(owners) if not ranks]
    reached = [load for load, _ in sorted(heap, key=lambda item: item[1])]
    for position, ranks in zip(rest, whole([tensors[position] for position in rest], reached, cost), strict=True):
        owners[position] = ranks
    return owners


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"whole": whole, "split": split, "hybrid": hybrid})
"""The strategies that have names."""


def _parts(spec: TensorSpec, world_size: int, smallest_part: int) -> int:
    """Into how many parts a tensor is cut."""
    if smallest_part < 1:
        raise ValueError(f"the smallest part of a cut tensor should have at least 1 element, but has {smallest_part}")
    if spec.numel < 2 * smallest_part or spec.numel == 0:
        return 1
    step = spec.cut_step
    return max(1, min(world_size, spec.rows // step // math.ceil(smallest_part / (spec.numel // spec.rows * step))))


def _deal(spec: TensorSpec, heap: list[tuple[float, int]], weight: float, parts: int) -> Owners:
    """Give a tensor to the ranks with the least load, adding to the loads in the heap."""
    if parts == 1:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + weight, rank))
        return (rank,)
    least = [heapq.heappop(heap) for _ in range(parts)]
    shares = _shares(spec, parts, weight)
    owners = [0] * parts
    # The larger the part, the less its rank holds so far.
    for place, (load, rank) in zip(sorted(range(parts), key=shares.__getitem__, reverse=True), least, strict=True):
        owners[place] = rank
        heapq.heappush(heap, (load + shares[place], rank))
    return tuple(owners)


def _shares(spec: TensorSpec, parts: int, weight: float) -> list[float]:
    """What each part of a tensor weighs, in the order of the rows."""
    if parts == 1:
        return [float(weight)]
    rows = cuts(spec, parts)
    return [weight * (stop - start) / spec.rows for start, stop in pairwise(rows)]


def _loads(tensors: Sequence[TensorSpec], owners: Sequence[Owners], world_size: int, weight: Cost) -> tuple[float, ...]:
    loads = [0.0] * world_size
    for spec, ranks in zip(tensors, owners, strict=True):
        if ranks:
            for rank, share in zip(ranks, _shares(spec, len(ranks), weight(spec)), strict=True):
                loads[rank] += share
    return tuple(loads)


def _plan(world_size: int, specs: tuple[TensorSpec, ...], owners: Sequence[Owners], weight: Cost) -> Plan:
    # Checked before it is weighed: a strategy of the caller's may return ranks that are not there.
    plan = Plan(world_size, specs, tuple(owners), (0.0,) * world_size)
    alone = (float(weight(spec)) for spec, ranks in zip(specs, owners, strict=True) if len(ranks) == 1)
    return Plan(world_size, specs, plan.owners, _loads(specs, owners, world_size, weight), max(alone, default=0.0))


def _weight(cost: Cost) -> Cost:
    if cost is numel:
        # The default needs no check, and is called often.
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


def _placed(
    strategy: str | Strategy, tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost, smallest_part: int
) -> list[Owners]:
    """Ask a strategy, and make sure that one of the caller's own returns owners."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ValueError(
                f"unknown strategy {strategy!r}; choose one of {', '.join(map(repr, STRATEGIES))}, or a function"
            )
        cutting = {"split": split, "hybrid": hybrid}.get(strategy)
        named = whole if cutting is None else partial(cutting, smallest_part=smallest_part)
        return list(named(tensors, loads, cost))
    if not callable(strategy):
        raise TypeError(
            f"a strategy must be one of {', '.join(map(repr, STRATEGIES))}, or a function, but is "
            f"{_described(strategy)}"
        )
    name = getattr(strategy, "__name__", repr(strategy))
    returned: object = strategy(tensors, loads, cost)
    if not isinstance(returned, Sequence) or len(returned) != len(tensors):
        raise TypeError(
            f"the strategy {name!r} should return the owners of each of {len(tensors)} tensors, but returned "
            f"{_described(returned)}"
        )
    for ranks in returned:
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) for rank in ranks):
            raise TypeError(
                f"the strategy {name!r} should return a tuple of ranks for each tensor, but one of them is "
                f"{_described(ranks)}"
            )
    return [tuple(ranks) for ranks in returned]


def _described(value: object) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"
