"""Which tensors share a bucket of sharded gradients, and in which order buckets are sent."""

from __future__ import annotations

import pytest
import torch
from zeroshard.grads.held import split_into_buckets

LARGE, SMALL, HALF = 90, 10, 50


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([SMALL] * 12, [[*range(10)], [10, 11]], id="small tensors fill buckets in order"),
        pytest.param([LARGE, LARGE], [[0], [1]], id="a large tensor is alone"),
        pytest.param([HALF, HALF], [[0], [1]], id="a tensor of half a bucket is alone"),
        pytest.param(
            [LARGE, SMALL] * 3, [[0], [2], [4], [1, 3, 5]], id="small tensors share a bucket across large ones"
        ),
        pytest.param([SMALL, *[40, 40, 40], LARGE], [[0, 1, 2], [4], [3]], id="a bucket that is not full comes last"),
        pytest.param([], [], id="nothing is trained"),
    ],
)
def test_buckets_in_the_order_in_which_they_are_sent(sizes: list[int], expected: list[list[int]]) -> None:
    params = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert split_into_buckets(range(len(sizes)), params, limit=100) == expected


def test_a_bucket_has_one_dtype() -> None:
    params = [torch.empty(4, dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
    assert split_into_buckets(range(4), params, limit=1000) == [[0, 2], [1, 3]]


def test_the_order_need_not_be_that_of_the_parameters() -> None:
    params = [torch.empty(size, dtype=torch.uint8) for size in (SMALL, LARGE, SMALL)]
    assert split_into_buckets([2, 1, 0], params, limit=100) == [[1], [2, 0]]
