"""The predicted memory of buckets in flight is what the events of a backward add up to, whatever sizes and dtypes."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from torch import nn, optim
from zeroshard import Planner
from zeroshard.grads.held import split_into_buckets
from zeroshard.grads.transient import IN_FLIGHT

RANKS, SIZES = 3, (8, 64, 1000, 30_000, 90_000, 140_000, 300_000)


def simulated_peaks(params: list[nn.Parameter], plan: object, limit: float) -> list[int]:
    """Let gradients arrive one by one, send complete buckets, and return each rank's peak beyond what it owns."""
    order = [*reversed(range(len(params)))]
    buckets = split_into_buckets(order, params, limit)
    missing = [{*bucket} for bucket in buckets]
    gradients, sent, free, in_flight = 0, 0, list[int](), deque[tuple[int, bool]]()
    owned, peaks = [0] * RANKS, [0] * RANKS

    def note(more: int = 0) -> None:
        held = gradients + more + sum(free) + sum(nbytes for nbytes, _ in in_flight)
        peaks[:] = [max(peak, own + held) for peak, own in zip(peaks, owned, strict=True)]

    for tensor in order:
        gradients += params[tensor].nbytes
        for each in missing:
            each.discard(tensor)
        note()
        while sent < len(buckets) and not missing[sent]:
            nbytes, is_packed = sum(params[index].nbytes for index in buckets[sent]), len(buckets[sent]) > 1
            if len(in_flight) == IN_FLIGHT:
                earliest, was_packed = in_flight.popleft()
                free += [earliest] * was_packed
            buffer = max(nbytes, free.pop()) if is_packed and free else nbytes
            note(buffer * is_packed)
            gradients -= nbytes
            for shard in (shard for index in buckets[sent] for shard in plan.of_tensor(index)):
                owned[shard.rank] += shard.numel * params[shard.tensor].element_size()
            in_flight.append((buffer, is_packed))
            sent += 1
            note()
    return [max(0, peak - own) for peak, own in zip(peaks, owned, strict=True)]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("bucket_mb", [0.5, 1])
def test_what_is_predicted_is_what_a_backward_holds(seed: int, bucket_mb: float) -> None:
    drawn = random.Random(seed)
    dtypes = [torch.float32, torch.float32, torch.bfloat16] if seed % 2 else [torch.float32]
    shapes = [(drawn.choice(SIZES), drawn.choice(dtypes)) for _ in range(drawn.randint(1, 25))]
    params = [nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size, dtype in shapes]
    planner = Planner(params, optim.SGD, backend="gloo")
    found = planner.predict(RANKS, drawn.choice(["whole", "split"]), shards_gradients=True, bucket_mb=bucket_mb)
    assert [rank.transient for rank in found.ranks] == simulated_peaks(params, found.plan, bucket_mb * 2**20)
