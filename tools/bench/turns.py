"""Take turns: contenders are timed alternately, so that drift of the machine cancels out of their ratios."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from math import comb
from statistics import mean, median
from time import perf_counter, process_time

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WARM_UP = 2
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

Times = dict[str, list[float]]
"""Per contender, one time in seconds for each round."""


def take_turns(
    turns: Mapping[str, Callable[[], object]], rounds: int, title: str, *, processor_time: bool = False
) -> Times:
    """Time contenders alternately, in an order that is reversed from round to round. Collective.

    A time is from one barrier of all ranks to the next, so it includes what the slowest rank takes. Processor time is
    that of all threads of this rank, which hardly depends on how many ranks share a processor.

    Args:
        turns: what each contender does in a turn, by name, in the same order on all ranks.
        rounds: timed turns of each contender, after some that are not timed.
        title: of the progress bar, which rank 0 draws between turns.
        processor_time: whether to measure processor time.
    """
    clock = process_time if processor_time else perf_counter
    times: Times = {name: [] for name in turns}
    # Garbage is collected before each turn, and what exists by now is none: looking at it would take longest.
    gc.collect()
    gc.freeze()
    # Nothing refreshes the bar by itself: a thread that draws would disturb what is timed.
    bar = Progress(*_COLUMNS, console=Console(stderr=True), auto_refresh=False, disable=dist.get_rank() != 0)
    with bar:
        task = bar.add_task(title, total=len(turns) * (WARM_UP + rounds))
        for number in range(-WARM_UP, rounds):
            for name in list(turns)[:: 1 if number % 2 == 0 else -1]:
                gc.collect()
                dist.barrier()
                start = clock()
                turns[name]()
                dist.barrier()
                if number >= 0:
                    times[name].append(clock() - start)
                bar.advance(task)
                bar.refresh()
    gc.unfreeze()
    return times


def mean_of_ranks(times: Times) -> Times:
    """Return the times of each round on the mean over all ranks. Collective."""
    everyones: list[Times] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, times)
    return {name: [mean(each) for each in zip(*(one[name] for one in everyones), strict=True)] for name in times}


def ratio(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the median of the ratios of two contenders' times, round by round, and both ends of its 95 % interval.

    >>> ratio([2.0] * 6, [4.0] * 6)
    [0.5, 0.5, 0.5]
    """
    ratios = [one / other for one, other in zip(times, base, strict=True)]
    return [median(ratios), *median_interval(ratios)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that covers the true median with a probability of at least 95 %, by order statistics.

    How many of n independent values are below the true median is binomial with n and 1/2, whatever their distribution.
    The interval leaves out as many of the smallest and of the largest values as keep both tails together within 5 %
    (H. A. David and H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1).

    >>> median_interval([float(value) for value in range(15)])
    (3.0, 11.0)

    Raises:
        ValueError: if there are fewer than 6 values.
    """
    count = len(values)
    if count < 6:
        raise ValueError(f"the median of {count} values has no 95 % interval; at least 6 are needed")
    ordered = sorted(values)
    left_out, tail = 0, 1.0
    while 2 * (tail + comb(count, left_out + 1)) <= 0.05 * 2**count:
        left_out += 1
        tail += comb(count, left_out)
    return ordered[left_out], ordered[-1 - left_out]
