"""The strategy ``"level"``: balances the work of whole tensors, then evens out state by cutting the other tensors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard_core.plan import least_largest
from zeroshard_core.spec import TensorSpec


@dataclass(frozen=True)
class Level:
    """The strategy that :func:`level` returns, with the argument of the call."""

    state_cap: float = 1.02

    def __post_init__(self) -> None:
        if not 1 <= self.state_cap < math.inf:
            raise ValueError(f"state_cap should be finite and at least 1, but is {self.state_cap}")


def level(state_cap: float = 1.02) -> Level:
    """Balance the work of tensors that stay whole, and even out state with the tensors that may be cut.

    Tensors of groups that are not elementwise or have no state stay whole. They are placed first, by decreasing work,
    each on the rank with the least work among those that have room. The elementwise tensors follow, by decreasing size:
    each fills the rank with the least state up to the common level, and its other rows go to the next ranks. Tensors
    that are too small to cut come last. Each goes to the rank with the least state, even beyond the cap.

    >>> level(state_cap=1.1)
    Level(state_cap=1.1)

    Args:
        state_cap: the most bytes of state on a rank, as a multiple of the mean, or of a lower bound if that is more:
            one of N ranks has at least k + 1 of the k N + 1 largest whole tensors. If no rank has room, whole tensors
            are placed by state instead of work.

    Returns:
        The strategy, for :func:`partition` and :func:`repartition`. These raise ValueError if whole tensors exceed the
        cap even when they are placed by state. ``"level"`` means ``level()``, but exceeds the cap instead of raising.

    Raises:
        ValueError: if ``state_cap`` is less than 1 or not finite.
    """
    return Level(state_cap)


Numbers = Sequence[float]
Parts = tuple[tuple[int, ...], tuple[int, ...]]
"""The owners of a tensor, and the first row of each part. There are no rows if the tensor is whole."""


def fill_ranks(
    specs: Sequence[TensorSpec],
    works: Numbers,
    sizes: Numbers,
    whole: Sequence[int],
    least: Mapping[int, int],
    loads: Numbers,
    held: Numbers,
    state_cap: float,
    must_fit: bool,
) -> dict[int, Parts]:
    """Place the tensors in ``whole`` and in ``least``, which has the fewest rows of a part (0: the tensor is not cut).

    Each rank already has the work in ``loads`` and the bytes of state in ``held``. Returns the parts by tensor index.
    """
    state = math.fsum(held) + math.fsum(sizes[index] for index in [*whole, *least])
    forced = min(held) + least_largest([sizes[index] for index in whole], len(held))
    # Allow for rounding: the last digits of a sum depend on its order.
    limit = state_cap * max(state / len(held), forced) * (1 + 1e-9)
    for weights, before, cap in ((works, loads, limit), (sizes, held, limit), (sizes, held, math.inf)):
        parts, filled = _place_whole(whole, weights, sizes, before, held, cap)
        if len(parts) == len(whole):
            break
    if must_fit and cap > limit:
        least_cap = math.ceil(state_cap * max(filled) / limit * 1e3) / 1e3
        text = f"{max(filled):,.0f} bytes of state on a rank, but the cap is {limit:,.0f}"
        raise ValueError(f"tensors that stay whole put {text}; use level(state_cap={least_cap}) or more")
    by_size = sorted(least, key=sizes.__getitem__, reverse=True)
    ranks = sorted((fill, rank) for rank, fill in enumerate(filled))
    water, total, count = math.inf, math.fsum(sizes[index] for index in by_size if least[index]), 0
    while count < len(ranks) and ranks[count][0] < water:
        total, count = total + ranks[count][0], count + 1
        water = total / count
    heap = ranks[:count]
    for index in by_size:
        if least[index]:
            parts[index] = _pour(specs[index], sizes[index], least[index], heap, water, cap)
    heap += ranks[count:]
    heapq.heapify(heap)
    for index in by_size:
        if not least[index]:
            fill, rank = heap[0]
            heapq.heapreplace(heap, (fill + sizes[index], rank))
            parts[index] = (rank,), ()
    return parts


def _place_whole(
    tensors: Sequence[int], weights: Numbers, sizes: Numbers, loads: Numbers, held: Numbers, limit: float
) -> tuple[dict[int, Parts], list[float]]:
    """Place tensors on the rank with the least load that has room, the heaviest first, until no rank has room.

    Returns the parts of the placed tensors, by index, and the bytes of state of each rank.
    """
    parts, filled = dict[int, Parts](), list(held)
    ready, full = sorted((load, rank) for rank, load in enumerate(loads)), list[tuple[float, float, int]]()
    for index in sorted(tensors, key=weights.__getitem__, reverse=True):
        size = sizes[index]
        while full and full[0][0] + size <= limit:
            heapq.heappush(ready, heapq.heappop(full)[1:])
        while ready and filled[ready[0][1]] + size > limit:
            load, rank = heapq.heappop(ready)
            heapq.heappush(full, (filled[rank], load, rank))
        if not ready:
            break
        load, rank = ready[0]
        heapq.heapreplace(ready, (load + weights[index], rank))
        filled[rank] += size
        parts[index] = (rank,), ()
    return parts, filled


def _pour(spec: TensorSpec, size: float, least: int, heap: list[tuple[float, int]], water: float, cap: float) -> Parts:
    """Cut a tensor for the ranks that hold the least: fill each up to the level, and make no part too small."""
    row, rows, step, start = size / spec.rows, spec.rows, spec.cut_step, 0
    starts, after = list[int](), list[tuple[float, int]]()
    while start < rows:
        fill, rank = heapq.heappop(heap)
        left = rows - start
        take = max(least, math.ceil((water - fill) / row / step) * step)
        if not heap or left - take < least:
            # The rest is too small for a part. Add it to this part if that stays under the cap, else shrink this part.
            fits = not heap or left < 2 * least or fill + left * row <= cap
            take = left if fits else (left - least) // step * step
        after.append((fill + take * row, rank))
        starts.append(start)
        start += take
    for each in after:
        heapq.heappush(heap, each)
    return tuple([rank for _, rank in after]), tuple(starts)


def least_rows(spec: TensorSpec, smallest_part: int) -> int:
    """Return the fewest rows of a part of a tensor, a multiple of its ``cut_step``; 0 if the tensor cannot be cut."""
    if smallest_part < 1:
        raise ValueError(f"smallest_part should be at least 1 element, but is {smallest_part}")
    if spec.numel < 2 * smallest_part:
        return 0
    step = spec.cut_step
    least = step * math.ceil(smallest_part / (spec.numel // spec.rows * step))
    return least if 2 * least <= spec.rows else 0
