"""Chooses owners: strategies that place tensors on ranks, and the functions that make plans of the result.

Every function is deterministic and depends only on its arguments, so every rank computes the same plan.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from zeroshard_core.cost import Cost, GroupCost, cost_function, numel
from zeroshard_core.level import Level, fill_ranks, least_rows
from zeroshard_core.plan import Plan, check_owners, cuts
from zeroshard_core.spec import TensorSpec

Owners = tuple[int, ...]
"""The ranks that own a tensor, in the order of their rows: one rank, or one for each part of a cut tensor."""

Strategy = Callable[[Sequence[TensorSpec], Sequence[float], Cost], Sequence[Owners]]
"""A function of (tensors to place, loads so far per rank, cost) that returns the owners of each of these tensors."""

SMALLEST_PART = 16_384
"""Fewest elements of a part of a cut tensor. Smaller parts would cost more in calls than they even out."""


def partition(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    strategy: str | Strategy | Level = "whole",
    cost: Cost | Mapping[str, float] = numel,
    smallest_part: int = SMALLEST_PART,
    groups: Sequence[GroupCost] = (),
) -> Plan:
    """Choose an owner for every element of every tensor.

    Tensors that are not trainable are placed after the others, by what they weigh, on top of them. They do not count in
    the loads of the plan until they are trainable.

    >>> import torch
    >>> specs = [TensorSpec(name, (size,), torch.float32) for name, size in [("a", 3), ("b", 2), ("c", 2)]]
    >>> partition(specs, 2).owners
    ((0,), (1,), (1,))

    Args:
        tensors: what to place.
        world_size: number of ranks.
        strategy: ``"whole"``, ``"split"``, ``"level"`` (see the functions of these names), the value of :func:`level`,
            or a function, which is called again for the tensors that are not trainable.
        cost: the weight of a tensor, a function or a dict by name. A part of a tensor weighs its share of the elements.
        smallest_part: fewest elements of a part of a cut tensor; ``"whole"`` and functions ignore it.
        groups: replaces ``cost``: the costs of the tensors of each ``TensorSpec.group``. ``"level"`` needs it.

    Returns:
        The plan. With ``"whole"`` it takes O(T log N) for T tensors on N ranks. ``"level"`` warns if N is more than
        :attr:`Plan.useful_ranks`.

    Raises:
        ValueError: if ``world_size`` or ``smallest_part`` is less than 1, the strategy's name is unknown, a cost is
            negative or not finite, the owners that the strategy returns are no valid plan, both ``cost`` and ``groups``
            are passed, ``groups`` lacks the group of a tensor, or ``"level"`` has no ``groups`` or cannot meet its cap.
        TypeError: if the strategy is neither a name nor a function, does not return a sequence of ranks for each
            tensor, or the cost is not a function or does not return numbers.
    """
    empty = Plan(world_size, (), (), (0.0,) * max(0, world_size))
    plan = repartition(empty, tensors, strategy=strategy, cost=cost, smallest_part=smallest_part, groups=groups)
    if (strategy == "level" or isinstance(strategy, Level)) and (plan.useful_ranks or world_size) < world_size:
        whole = [index for index, ranks in enumerate(plan.owners) if len(ranks) == 1]
        name = plan.tensors[max(whole, key=plan.weights.__getitem__)].name
        text = f"only {plan.useful_ranks} of {world_size} ranks are useful: {name!r} stays whole, exceeding the mean"
        warnings.warn(text, stacklevel=2)
    return plan


def repartition(
    plan: Plan,
    tensors: Sequence[TensorSpec],
    *,
    strategy: str | Strategy | Level = "whole",
    cost: Cost | Mapping[str, float] = numel,
    smallest_part: int = SMALLEST_PART,
    groups: Sequence[GroupCost] = (),
) -> Plan:
    """Place tensors that were added, on top of the loads of the others, which keep their owners.

    Args:
        plan: the plan so far.
        tensors: the new full list: the tensors of ``plan`` at their places, perhaps frozen, unfrozen or of another
            dtype, and more after them.
        strategy: as for :func:`partition`; it sees only the tensors that were added, in order.
        cost: as for :func:`partition`.
        smallest_part: as for :func:`partition`.
        groups: as for :func:`partition`.

    Returns:
        The plan for ``tensors``.

    Raises:
        TypeError: as :func:`partition`.
        ValueError: as :func:`partition`, or if tensors of ``plan`` are missing, or one has another number of elements.
    """
    specs, known, ranks = tuple(tensors), len(plan.tensors), plan.world_size
    if len(specs) < known:
        raise ValueError(f"the plan has {known} tensors, but only {len(specs)} are given; tensors cannot be taken away")
    for index, (before, now) in enumerate(zip(plan.tensors, specs, strict=False)):
        if before.numel != now.numel:
            raise ValueError(
                f"tensor {index} {now.name!r} keeps its owners, but has {now.numel} elements instead of {before.numel}"
            )
    if groups and cost is not numel:
        raise ValueError("costs are given twice: leave out `cost`, or `groups`")
    for index, spec in enumerate(specs if groups else ()):
        if not 0 <= spec.group < len(groups):
            raise ValueError(f"tensor {index} {spec.name!r} is of group {spec.group}, but `groups` are {len(groups)}")
    work = _weight((lambda spec: groups[spec.group].work(spec)) if groups else cost)
    state = _weight(lambda spec: groups[spec.group].state(spec) if groups else 0.0, "state")
    trained = [spec.trainable for spec in specs]
    # Frozen tensors come last: those that are trained are spread as if there were no others.
    passes = [trained] if all(trained[known:]) else [trained, [True] * len(specs)]
    works, states = (
        [float(weigh(spec)) if asks else 0.0 for spec, asks in zip(specs, passes[-1], strict=True)]
        for weigh in (work, state)
    )
    owners, starts = ([*kept, *[()] * (len(specs) - len(kept))] for kept in (plan.owners, plan.starts))
    for counts in passes:
        part = [index for index in range(known, len(specs)) if counts[index] and not owners[index]]
        to_place, weights = [specs[index] for index in part], _counted(works, counts)
        loads = _loads(ranks, specs, owners, starts, weights)
        if strategy == "level" or isinstance(strategy, Level):
            if not groups:
                raise ValueError('the strategy "level" needs `groups`: what the tensors of each param group cost')
            # If no class has state, the bytes of the parameters stand for it.
            sizes = _counted(states if any(_counted(states, counts)) else [spec.nbytes for spec in specs], counts)
            may_cut = [sizes[index] > 0 and groups[specs[index].group].elementwise for index in part]
            found = fill_ranks(
                to_place,
                [weights[index] for index in part],
                [sizes[index] for index in part],
                [least_rows(spec, smallest_part) if cut else None for spec, cut in zip(to_place, may_cut, strict=True)],
                loads,
                _loads(ranks, specs, owners, starts, sizes),
                strategy.state_cap if isinstance(strategy, Level) else Level.state_cap,
                must_fit=isinstance(strategy, Level) and counts is trained,
            )
        else:
            found = [(owning, ()) for owning in _placed(strategy, to_place, loads, work, smallest_part)]
        for index, (owning, rows) in zip(part, found, strict=True):
            # Check them before they are weighed: the caller's strategy may return ranks that do not exist.
            check_owners(index, specs[index], owning, ranks)
            owners[index], starts[index] = owning, rows
    weights = _counted(works, trained)
    return Plan(
        ranks,
        specs,
        tuple(owners),
        _loads(ranks, specs, owners, starts, weights),
        heaviest=max((weight for weight, owning in zip(weights, owners, strict=True) if len(owning) == 1), default=0.0),
        starts=tuple(starts),
        state_loads=_loads(ranks, specs, owners, starts, _counted(states, trained)) if groups else (),
        weights=tuple(weights),
        classes=tuple(f"{group.name} (cost assumed)" if group.is_assumed else group.name for group in groups),
    )


def whole(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[Owners]:
    """Give each tensor to one rank: the heaviest first, each to the rank with the least load so far.

    Param groups are placed one after the other, in order of first appearance. The sort is stable, and the lowest of
    several ranks with equal loads is chosen. With :func:`zeroshard_core.numel` as the cost, trainable tensors get the
    owners that ``torch.distributed.optim.ZeroRedundancyOptimizer`` chooses. A heap replaces its scan of all ranks, so
    this takes O(T log N). The rule is longest-processing-time-first (R. L. Graham, Bounds on multiprocessing timing
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
    """Cut every tensor that is large enough, between rows, in the order of ``tensors``; for elementwise optimizers.

    A tensor is cut into ``min(N, rows // ceil(smallest_part / elements of a row))`` parts, at least one, for that many
    of the N ranks: those with the least load so far, of which the least loaded gets the largest part. (If a row is not
    a multiple of :data:`zeroshard_core.ALIGNMENT` elements, the smallest number of rows that is one counts as a row.)
    The order of the parameters lets the ranks share every bucket of DistributedDataParallel evenly.

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
    return [_deal(spec, heap, cost(spec), smallest_part) for spec in tensors]


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"whole": whole, "split": split})
"""The named strategies, except ``"level"``, which uses more than one cost: see :func:`level`."""


def _deal(spec: TensorSpec, heap: list[tuple[float, int]], weight: float, smallest_part: int) -> Owners:
    """Place a tensor on the ranks with the least load, and add its weight to their loads in the heap."""
    least = least_rows(spec, smallest_part)
    parts = min(len(heap), spec.rows // least) if least else 1
    if parts == 1:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + weight, rank))
        return (rank,)
    ranks = [heapq.heappop(heap) for _ in range(parts)]
    shares = _shares(spec, weight, parts)
    owners = [0] * parts
    # The rank with the least load gets the largest part.
    for place, (load, rank) in zip(sorted(range(parts), key=shares.__getitem__, reverse=True), ranks, strict=True):
        owners[place] = rank
        heapq.heappush(heap, (load + shares[place], rank))
    return tuple(owners)


def _shares(spec: TensorSpec, weight: float, parts: int, starts: Sequence[int] = ()) -> list[float]:
    """Return the weight of each part of a tensor, in the order of the rows."""
    return [weight * (stop - start) / spec.rows for start, stop in pairwise(cuts(spec, parts, starts))]


def _counted(weights: Sequence[float], counts: Sequence[bool]) -> list[float]:
    return [float(weight) if is_counted else 0.0 for weight, is_counted in zip(weights, counts, strict=True)]


def _loads(
    world_size: int,
    tensors: Sequence[TensorSpec],
    owners: Sequence[Owners],
    starts: Sequence[tuple[int, ...]],
    weights: Sequence[float],
) -> tuple[float, ...]:
    """Return what the tensors that have owners already weigh, per rank."""
    loads = [0.0] * world_size
    for spec, ranks, rows, weight in zip(tensors, owners, starts, weights, strict=True):
        if len(ranks) == 1:
            loads[ranks[0]] += weight
        elif ranks:
            for rank, share in zip(ranks, _shares(spec, weight, len(ranks), rows), strict=True):
                loads[rank] += share
    return tuple(loads)


def _weight(cost: Cost | Mapping[str, float], name: str = "cost") -> Cost:
    if cost is numel:
        # The default needs no check and is called often.
        return numel
    weigh = cost_function(cost)
    if not callable(weigh):
        raise TypeError(
            f"the cost must be a function from a tensor's spec to a number or a dict by name, but is {_described(cost)}"
        )

    def weight(spec: TensorSpec) -> float:
        if not (spec.trainable or spec.dtype.is_floating_point or spec.dtype.is_complex):
            # Integers are never trained, and the cost need not know them.
            return 0.0
        weighed = weigh(spec)
        try:
            is_weight = 0 <= weighed < math.inf
        except TypeError as error:
            raise TypeError(
                f"the {name} of tensor {spec.name!r} should be a number, but is {_described(weighed)}"
            ) from error
        if not is_weight:
            raise ValueError(f"the {name} of tensor {spec.name!r} should be finite and not negative, but is {weighed}")
        return weighed

    return weight


def _placed(
    strategy: str | Strategy, tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost, smallest_part: int
) -> list[Owners]:
    """Return the owners that a strategy chooses; raise TypeError if a function of the caller returns no owners."""
    choices = ", ".join(map(repr, [*STRATEGIES, "level"]))
    if isinstance(strategy, str):
        if strategy == "hybrid":
            raise ValueError('the strategy "hybrid" is withdrawn: use "level"')
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; choose one of {choices}, or a function")
        named = partial(split, smallest_part=smallest_part) if strategy == "split" else whole
        return list(named(tensors, loads, cost))
    if not callable(strategy):
        raise TypeError(f"a strategy must be one of {choices}, or a function, but is {_described(strategy)}")
    name = f"the strategy {getattr(strategy, '__name__', repr(strategy))!r} should return"
    returned: object = strategy(tensors, loads, cost)
    if not isinstance(returned, Sequence) or len(returned) != len(tensors):
        raise TypeError(f"{name} the owners of each of {len(tensors)} tensors, but returned {_described(returned)}")
    for ranks in returned:
        if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) for rank in ranks):
            raise TypeError(f"{name} a tuple of ranks for each tensor, but one of them is {_described(ranks)}")
    return [tuple(ranks) for ranks in returned]


def _described(value: object) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"
