"""Paired timing: how long one thing takes relative to another, measured so that drift of the machine cancels out."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from time import perf_counter


@dataclass(frozen=True)
class PairedTiming:
    """Ratio of the times of two things, over alternating pairs.

    Attributes:
        ratio: median over the pairs of (time of a / time of b).
        low: lower end of the 95 % interval of that median.
        high: upper end.
        median_a: median time of a, in seconds.
        median_b: median time of b, in seconds.
    """

    ratio: float
    low: float
    high: float
    median_a: float
    median_b: float


def alternate(
    a: Callable[[], object], b: Callable[[], object], pairs: int = 15, clock: Callable[[], float] = perf_counter
) -> PairedTiming:
    """Time two functions in alternating pairs, in turn a before b and b before a, after one untimed call of each.

    Garbage of the previous call is collected before each timed one.

    Args:
        a: the function in the ratio's numerator.
        b: the function in its denominator.
        pairs: number of pairs, at least 6 (fewer have no 95 % interval).
        clock: gives the time in seconds. Work of one thread that waits for nothing may be timed by
            ``time.process_time``, which leaves out what other processes take on a busy machine.

    Returns:
        The ratio with its interval, and both medians.

    Raises:
        ValueError: if there are fewer than 6 pairs.
    """
    median_interval([0.0] * pairs)
    a()
    b()
    times_a: list[float] = []
    times_b: list[float] = []
    for pair in range(pairs):
        for function, times in ((a, times_a), (b, times_b))[:: 1 if pair % 2 == 0 else -1]:
            times.append(_timed(function, clock))
    ratios = [x / y for x, y in zip(times_a, times_b, strict=True)]
    low, high = median_interval(ratios)
    return PairedTiming(statistics.median(ratios), low, high, statistics.median(times_a), statistics.median(times_b))


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return an interval that covers the true median with a probability of at least 95 %, by order statistics.

    The number of n independent values below the true median is binomial with n and 1/2, whatever their distribution;
    the interval leaves out as many of the smallest and of the largest values as keep both tails together within 5 %
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


def _timed(function: Callable[[], object], clock: Callable[[], float]) -> float:
    gc.collect()
    start = clock()
    function()
    return clock() - start
