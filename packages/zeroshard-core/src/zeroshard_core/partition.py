"""Chooses owners: strategies that place tensors on ranks, and the functions that make plans from them.

Every function is deterministic and depends only on its arguments, so every rank computes the same plan.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from types import MappingProxyType

from zeroshard_core.cost import Cost, GroupCost, cost_function, numel
from zeroshard_core.level import Level, Parts, fill_ranks, least_rows
from zeroshard_core.plan import Plan, check_owners, cuts
from zeroshard_core.spec import TensorSpec

Owners = tuple[int, ...]
"""The ranks that own a tensor, in the order of their rows: one rank, or one for each part of a cut tensor."""

Strategy = Callable[[Sequence[TensorSpec], Sequence[float], Cost], Sequence[Owners]]
"""A function of (tensors to place, loads so far per rank, cost) that returns the owners of each of these tensors."""

SMALLEST_PART = 16_384
"""The fewest elements of a part of a cut tensor. The calls for smaller parts would cost more than the balance saves."""


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

    Tensors that are not trainable are placed last, by cost, on top of the loads of the others. They do not count in the
    loads of the plan until they are trainable.

    >>> import torch
    >>> specs = [TensorSpec(name, (size,), torch.float32) for name, size in [("a", 3), ("b", 2), ("c", 2)]]
    >>> partition(specs, 2).owners
    ((0,), (1,), (1,))

    Args:
        tensors: the tensors to place.
        world_size: number of ranks.
        strategy: ``"whole"``, ``"split"``, ``"level"`` (see the functions of these names), the value of :func:`level`,
            or a function, which is called again for the tensors that are not trainable.
        cost: the weight of a tensor, a function or a dict by name. A part of a tensor weighs its share of the elements.
        smallest_part: fewest elements of a part of a cut tensor; ``"whole"`` and functions ignore it.
        groups: the costs of the tensors of each ``TensorSpec.group``, instead of ``cost``. ``"level"`` needs them.

    Returns:
        The plan. ``"level"`` warns if there are more ranks than :attr:`Plan.useful_ranks`.

    Raises:
        ValueError: if an argument has an invalid value, both ``cost`` and ``groups`` are passed, a cost is negative or
            not finite, the strategy returns owners that are not possible, or ``"level"`` cannot meet its cap.
        TypeError: if the strategy, the cost, or a value that one of them returns has the wrong type.
    """
    empty = Plan(world_size, (), (), (0.0,) * world_size)
    plan = repartition(empty, tensors, strategy=strategy, cost=cost, smallest_part=smallest_part, groups=groups)
    if (strategy == "level" or isinstance(strategy, Level)) and (plan.useful_ranks or world_size) < world_size:
        whole = [index for index, ranks in enumerate(plan.owners) if len(ranks) == 1]
        name = plan.tensors[max(whole, key=plan.weights.__getitem__)].name
        text = f"only {plan.useful_ranks} of {world_size} ranks are useful: {name!r} stays whole and exceeds the mean"
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
    """Place added tensors on top of the loads of the tensors in ``plan``, which keep their owners.

    ``tensors`` are first the tensors of ``plan`` in the same order, perhaps frozen, unfrozen or of another dtype, then
    the tensors to add. The strategy gets only the latter. The other arguments are as for :func:`partition`.

    Returns:
        The plan for ``tensors``.

    Raises:
        TypeError, ValueError: as :func:`partition`, or if tensors of ``plan`` are missing, or one has another number of
            elements.
    """
    specs, everything = tuple(tensors), range(len(tensors))
    _check_arguments(plan, specs, cost, groups)
    work = _checked((lambda spec: groups[spec.group].work(spec)) if groups else cost)
    state = _checked(lambda spec: groups[spec.group].state(spec) if groups else 0.0, "state")
    works, states = ([float(weigh(spec)) for spec in specs] for weigh in (work, state))
    parts: dict[int, Parts] = dict(enumerate(zip_longest(plan.owners, plan.starts, fillvalue=())))
    trained = [index for index in everything if specs[index].trainable]
    has_frozen = not all(spec.trainable for spec in specs[len(parts) :])
    # Place frozen tensors last, so that trainable tensors are spread as if there were no others.
    for counted in (trained, everything) if has_frozen else (trained,):
        part = [index for index in counted if index not in parts]
        others = {index: parts[index] for index in counted if index in parts}
        loads = _loads(plan.world_size, specs, others, works)
        if strategy == "level" or isinstance(strategy, Level):
            if not groups:
                raise ValueError('the strategy "level" needs `groups`: the costs of the tensors of each param group')
            # If no class has state, even out the bytes of the parameters instead.
            sizes = states if any(states[index] for index in counted) else [float(spec.nbytes) for spec in specs]
            may_cut = [index for index in part if sizes[index] > 0 and groups[specs[index].group].elementwise]
            least = {index: least_rows(specs[index], smallest_part) for index in may_cut}
            uncut = [index for index in part if index not in least]
            held = _loads(plan.world_size, specs, others, sizes)
            cap = strategy.state_cap if isinstance(strategy, Level) else Level.state_cap
            must_fit = isinstance(strategy, Level) and counted is trained
            placed = fill_ranks(specs, works, sizes, uncut, least, loads, held, cap, must_fit)
        else:
            owners = _chosen(strategy, [specs[index] for index in part], loads, work, smallest_part)
            placed = {index: (ranks, ()) for index, ranks in zip(part, owners, strict=True)}
        for index, (ranks, _) in placed.items():
            # Check before computing loads, because the caller's strategy may return ranks that do not exist.
            check_owners(index, specs[index], ranks, plan.world_size)
        parts |= placed
    loaded = {index: parts[index] for index in trained}
    return Plan(
        plan.world_size,
        specs,
        tuple(parts[index][0] for index in everything),
        _loads(plan.world_size, specs, loaded, works),
        heaviest=max((works[index] for index, (ranks, _) in loaded.items() if len(ranks) == 1), default=0.0),
        starts=tuple(parts[index][1] for index in everything),
        state_loads=_loads(plan.world_size, specs, loaded, states) if groups else (),
        weights=tuple(works[index] if index in loaded else 0.0 for index in everything),
        classes=tuple(f"{group.name} (cost assumed)" if group.is_assumed else group.name for group in groups),
    )


def whole(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[Owners]:
    """Give each tensor to one rank: the heaviest first, each to the rank with the least load so far.

    This :data:`Strategy` (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969) places one param group after
    the other, in O(T log N) for T tensors on N ranks. With :func:`zeroshard_core.numel` as the cost, trainable tensors
    get the owners that ``torch.distributed.optim.ZeroRedundancyOptimizer`` chooses.
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

    With this :data:`Strategy`, a tensor has ``min(N, rows // ceil(smallest_part / elements of a row))`` parts on N
    ranks, at least one, where a row stands for :attr:`TensorSpec.cut_step` rows. They go to the ranks with the least
    load so far, and the largest part goes to the least loaded rank. Tensors are cut in order, so that the ranks share
    every bucket of DistributedDataParallel evenly.

    Raises:
        ValueError: if ``smallest_part`` is less than 1.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: list[Owners] = []
    for spec in tensors:
        least = least_rows(spec, smallest_part)
        parts = min(len(heap), spec.rows // least) if least else 1
        ranks = [heapq.heappop(heap) for _ in range(parts)]
        shares = _shares(spec, cost(spec), parts)
        chosen = [0] * parts
        for place, (load, rank) in zip(sorted(range(parts), key=shares.__getitem__, reverse=True), ranks, strict=True):
            chosen[place] = rank
            heapq.heappush(heap, (load + shares[place], rank))
        owners.append(tuple(chosen))
    return owners


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"whole": whole, "split": split})
"""The named strategies, except ``"level"``, which uses more than one cost: see :func:`level`."""


def _shares(spec: TensorSpec, weight: float, parts: int, starts: Sequence[int] = ()) -> list[float]:
    """Return the weight of each part of a tensor, in the order of the rows."""
    if parts == 1:
        return [weight]
    return [weight * (stop - start) / spec.rows for start, stop in pairwise(cuts(spec, parts, starts))]


def _loads(
    world_size: int, specs: Sequence[TensorSpec], parts: Mapping[int, Parts], weights: Sequence[float]
) -> tuple[float, ...]:
    """Return the load of each rank from the tensors in ``parts``."""
    loads = [0.0] * world_size
    for index, (ranks, rows) in parts.items():
        for rank, share in zip(ranks, _shares(specs[index], weights[index], len(ranks), rows), strict=True):
            loads[rank] += share
    return tuple(loads)


def _check_arguments(
    plan: Plan, specs: Sequence[TensorSpec], cost: Cost | Mapping[str, float], groups: Sequence[GroupCost]
) -> None:
    known = len(plan.tensors)
    if len(specs) < known:
        raise ValueError(f"the plan has {known} tensors, which cannot be removed, but only {len(specs)} are given")
    for index, (before, now) in enumerate(zip(plan.tensors, specs, strict=False)):
        if before.numel != now.numel:
            named = f"tensor {index} {now.name!r}"
            raise ValueError(f"{named} keeps its owners, but has {now.numel} elements instead of {before.numel}")
    if groups and cost is not numel:
        raise ValueError("both `cost` and `groups` are given: leave one of them out")
    for index, spec in enumerate(specs if groups else ()):
        if not 0 <= spec.group < len(groups):
            raise ValueError(f"tensor {index} {spec.name!r} is of group {spec.group}: there are {len(groups)} groups")


def _checked(cost: Cost | Mapping[str, float], name: str = "cost") -> Cost:
    """Return a cost that raises if a weight is invalid, and is 0 for integer tensors, which are never trained."""
    if cost is numel:
        # The default needs no check and is called often.
        return numel
    weigh = cost_function(cost)
    if not callable(weigh):
        raise TypeError(f"the cost must be a function of a TensorSpec or a dict by name, but is {_described(cost)}")

    def weight(spec: TensorSpec) -> float:
        if not (spec.trainable or spec.dtype.is_floating_point or spec.dtype.is_complex):
            return 0.0
        weighed = weigh(spec)
        expected = f"the {name} of tensor {spec.name!r} should be"
        try:
            is_weight = 0 <= weighed < math.inf
        except TypeError as error:
            raise TypeError(f"{expected} a number, but is {_described(weighed)}") from error
        if not is_weight:
            raise ValueError(f"{expected} finite and not negative, but is {weighed}")
        return weighed

    return weight


def _chosen(
    strategy: str | Strategy, tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost, smallest_part: int
) -> list[Owners]:
    """Return the owners that a strategy chooses; raise TypeError if the caller's function returns anything else."""
    choices = ", ".join(map(repr, [*STRATEGIES, "level"]))
    if strategy == "split":
        return split(tensors, loads, cost, smallest_part=smallest_part)
    if strategy == "hybrid":
        raise ValueError('the strategy "hybrid" was removed: use "level"')
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; choose one of {choices}, or a function")
        return [*STRATEGIES[strategy](tensors, loads, cost)]
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
