"""Timing of collective operations in turns: the slowest rank's time counts, or the processor time of all."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from pairs import PairedTiming, median_interval

Times = dict[str, list[float]]
"""Per contender, one time in seconds for each round."""


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int,
    advance: Callable[[], None],
    processor_time: bool = False,
) -> Times:
    """Time contenders in turn, in alternating order, ``rounds`` times each. Collective.

    Each call begins after a barrier, with the garbage of the previous one collected. Its time is that of the slowest
    rank, or the processor time of all threads of a rank, on the mean over the ranks.

    Args:
        contenders: collective operations by name, in the same order on all ranks.
        rounds: how often each is timed.
        warm_up: untimed calls of each beforehand.
        advance: called after every call, outside of what is timed.
        processor_time: which of the two. It does not depend on how many ranks share a processor.

    Returns:
        The same times on all ranks.
    """
    times: Times = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            seconds = mean_processor_time(contenders[name]) if processor_time else _slowest(contenders[name])
            if number >= 0:
                times[name].append(seconds)
            advance()
    return times


def compared(times: Times, a: str, b: str) -> PairedTiming:
    """Return the ratio of contender ``a``'s times to contender ``b``'s, round by round.

    >>> compared({"a": [2.0] * 6, "b": [4.0] * 6}, "a", "b").ratio
    0.5
    """
    ratios = [x / y for x, y in zip(times[a], times[b], strict=True)]
    low, high = median_interval(ratios)
    return PairedTiming(statistics.median(ratios), low, high, statistics.median(times[a]), statistics.median(times[b]))


def mean_processor_time(operation: Callable[[], object]) -> float:
    """Return the seconds of processor time that all threads of a rank take, on the mean over the ranks. Collective."""
    gc.collect()
    dist.barrier()
    start = process_time()
    operation()
    # Ranks that are still receiving spend this rank's time too.
    dist.barrier()
    seconds = torch.tensor(process_time() - start, dtype=torch.float64)
    dist.all_reduce(seconds)
    return seconds.item() / dist.get_world_size()


def _slowest(operation: Callable[[], object]) -> float:
    gc.collect()
    dist.barrier()
    start = perf_counter()
    operation()
    seconds = torch.tensor(perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()
